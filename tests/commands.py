"""Launches in processes that are forked from a server which has imported PyTorch: importing it is most of what a launch
takes. Workers are started as always.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from tests import worlds  # noqa: F401 (what the server imports)
from titan_linear import launch

FORKSERVER = multiprocessing.get_context("forkserver")


class Launch:
    """`python -m titan_linear.launch *argv`, of which `output` gets stdout and stderr; as far as it goes, a Popen."""

    def __init__(self, argv: list[str], output: Path, environment: dict[str, str]):
        self.output = output
        self.process = FORKSERVER.Process(target=_launch, args=(argv, output, environment))
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        assert self.returncode is not None, f"it still runs:\n{self.output.read_text()}"
        return self.output.read_text(), None


def _launch(argv: list[str], output: Path, environment: dict[str, str]) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(launch.main(argv))
