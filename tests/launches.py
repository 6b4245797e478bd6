"""Launches in processes that are forked from a server which has imported PyTorch: importing it is most of what a launch
takes, and most of what a worker takes.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests import worlds  # noqa: F401 (what the server imports)
from titan_linear.run import launch  # noqa: F401 (likewise)

FORKSERVER = multiprocessing.get_context("forkserver")
FORK = multiprocessing.get_context("fork")


class Forked:
    """As far as it goes, a Popen."""

    def __init__(self, process: multiprocessing.Process):
        self.process = process
        process.start()
        self.pid, self.kill = process.pid, process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Launch(Forked):
    """`python -m module *argv`, by default the launcher, of which `output` gets stdout and stderr.

    fresh: start workers as always, as interpreters of their own; else they are forked, where there are no GPUs.
    """

    def __init__(
        self,
        argv: list[str],
        output: Path,
        environment: dict[str, str],
        fresh: bool = False,
        module: str = "titan_linear.run.launch",
    ):
        super().__init__(
            FORKSERVER.Process(target=_launch, args=(module, argv, output, environment, fresh))
        )
        self.output = output

    def wait(self) -> None:
        self.process.join()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        assert self.returncode is not None, f"it still runs:\n{self.output.read_text()}"
        return self.output.read_text(), None


def _launch(
    module: str, argv: list[str], output: Path, environment: dict[str, str], fresh: bool
) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    if not fresh and not torch.cuda.device_count():
        SubprocessHandler._popen = lambda _, command, environment: Worker(command, environment)
    sys.exit(importlib.import_module(module).main(argv))


class Worker(Forked):
    """`python -u -m module *argv`, forked from its launcher; what the elastic agent asks of a Popen."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]):
        super().__init__(FORK.Process(target=_work, args=(command[3:], environment)))
        os.setpgid(self.pid, self.pid)  # the worker does too: whichever comes first

    def wait(self, timeout: float | None = None) -> None:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a worker", timeout)


def _work(module_and_argv: tuple[str, ...], environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the launcher's are not the worker's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # what the launcher has must not be collected here: it would close files of this process
    gc.freeze()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # as if it were imported here
    module, *argv = module_and_argv
    sys.exit(importlib.import_module(module).main(argv))
