"""Start a run, or this machine's part of it: `NGPU=4 python -m titan_linear.launch --training.steps 100`.

Everything that can be refused is refused here, before a process starts: the configuration, the run's folder, the
corpus, the tokenizer, the checkpoint; and each node writes its token cache. Then torchrun starts the workers, in this
process. `torchrun -m titan_linear.train` works too: there rank 0 does what is done here before.

NGPU                      number of processes on this node
NNODES, NODE_RANK         number of nodes, and which this one is (default: 1, 0)
MASTER_ADDR, MASTER_PORT  where node 0 is (with several nodes; default port: 29500)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from titan_linear.config import Config, check_config, config_to_toml, load_config
from titan_linear.distributed.process import (
    AGREED,
    LAUNCHER,
    LOST,
    STORE,
    outliving_readers,
    refusing,
    run_command,
)
from titan_linear.storage.rundir import CONFIG

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

PREPARE = 24 * 3600  # seconds for the nodes to meet: each prepares its data before
REPEAT = 0.3  # seconds in which a wrapper that passes signals on may send the same one again
FOLLOWING = (LOST, -signal.SIGTERM)  # how workers end because another has: torchrun sends SIGTERM


@dataclass(frozen=True)
class Node:
    """This machine among those of a run, and where they meet: NODE_RANK of NNODES, MASTER_ADDR, MASTER_PORT."""

    processes: int
    rank: int = 0
    count: int = 1
    address: str = ""  # unless it is alone
    port: int = 0


@refusing
def main(argv: list[str]) -> int:
    """Check, then run. Return the exit code: 0, 2 for a user's mistake, 130, 143, or a failed worker's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # meant for the workers, once there are any
    if any(flag in ("-h", "--help") and what == "flavors" for flag, what in pairwise(argv)):
        from titan_linear.models.presets import flavors

        print(flavors())
        return 0
    config, node = load_config(argv), this_node()
    world_size = node.count * node.processes
    check_config(config, world_size)
    # slow to import; --help and misspelt keys do without
    from titan_linear.run.preflight import cleared

    with (
        cleared(config, argv, world_size, node.processes, first=node.rank == 0),
        outliving_readers(),
    ):
        return run_workers(config, node)


def this_node() -> Node:
    """Read this node's place in the run from the environment.

    Raises:
        ValueError: a variable is missing or wrong.
    """
    processes = process_count()
    nodes = _number("NNODES", "1", 1)
    if nodes == 1:
        return Node(processes)
    rank = _number("NODE_RANK", "", 0)
    port = _number("MASTER_PORT", "29500", 1)
    if port > 65535:
        raise ValueError(f"MASTER_PORT = {port} is no port; use one below 65536")
    if rank >= nodes:
        raise ValueError(
            f"NODE_RANK = {rank} must be less than NNODES = {nodes}; nodes are numbered from 0"
        )
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise ValueError(
            f"NNODES = {nodes} needs MASTER_ADDR, the address of node 0; set it, the same on every node"
        )
    try:
        socket.getaddrinfo(address, port)  # torchrun would look for it for as long as it waits
    except (OSError, UnicodeError, OverflowError) as error:
        raise ValueError(
            f"MASTER_ADDR = {address!r}, MASTER_PORT = {port} is no address ({error}); give node 0's"
        ) from None
    return Node(processes, rank, nodes, address, port)


def process_count() -> int:
    """Number of processes on this node: NGPU, else the number of GPUs present, else 2, on the CPU.

    Raises:
        ValueError: NGPU is not a positive number, or more than the GPUs present.
    """
    import torch

    present = torch.cuda.device_count()
    count = _number("NGPU", str(present or 2), 1)
    if present and count > present:
        raise ValueError(
            f"NGPU = {count} is more than the {present} GPUs present; use at most {present}"
        )
    return count


def _number(name: str, default: str, least: int) -> int:
    value = os.environ.get(name, "") or default
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} = {value!r} must be a number, {least} or more")
    return int(value)


# --- Workers ---------------------------------------------------------------------------------------------------------


def run_workers(
    config: Config, node: Node, module: str = "titan_linear.train", more: Sequence[str] = ()
) -> int:
    """Run `python -m module`, with `more` arguments, in this node's processes, by torchrun, and return the exit code of
    the whole.

    Workers read the configuration as it was checked, also when they start again: its file may have changed by then.

    Raises:
        ValueError: the nodes cannot meet.
        SystemExit: after a signal, if there were no workers yet or it was a second Ctrl-C.
    """
    if node.count > 1:
        print(f"node {node.rank} of {node.count} meets the others at {node.address}:{node.port}")
    with TemporaryDirectory(prefix="titan_linear_") as folder:
        checked = Path(folder, CONFIG)
        agreed = Path(folder, "agreed")
        checked.write_text(config_to_toml(config), encoding="utf-8")
        os.environ.update(
            _environment(node.processes) | {LAUNCHER: str(os.getpid()), AGREED: str(agreed)}
        )
        workers = Workers(node, config, folder, [module, "--job.config_file", str(checked), *more])
        workers.run_to_end()
        # a signal of another node
        stopped_for = workers.stop or (int(agreed.read_text()) if agreed.exists() else 0)
    failures = workers.failures
    if workers.stop:
        # A worker that was asked to stop before it handled signals was killed by the request, and others lost it.
        failures = {
            rank: failure for rank, failure in failures.items() if failure.exitcode not in FOLLOWING
        }
    if failures:
        return _report(failures)
    return 128 + stopped_for if stopped_for else 0


def _environment(processes: int) -> dict[str, str]:
    """Variables for the workers; a default yields to a value that the user has set."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        # Waiting threads soon sleep: on a machine with other work, spinning would take the core that the thread they
        # wait for needs. If they slept at once (PASSIVE sets libgomp's spin count to 0), waking them would halve the
        # speed of a free machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = "1000"
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Print which rank failed first, and return its exit code."""
    order = {
        rank: (failure.exitcode in FOLLOWING, failure.timestamp)
        for rank, failure in failures.items()
    }
    rank = min(order, key=order.get)
    code = failures[rank].exitcode
    how = f"exit code {code}" if code > 0 else f"killed by {failures[rank].signal_name()}"
    print(
        f"error: rank {rank} {'lost another rank' if code == LOST else f'failed ({how})'}",
        file=sys.stderr,
    )
    return code if code > 0 else 128 - code


class Workers(threading.Thread):
    """torchrun's `run`, in a thread, and the workers that it starts.

    It never sees a signal: it would kill the workers 30 seconds later. Signals come to the main thread, also while
    PyTorch waits for other nodes in C++. The first request to stop is passed on to workers as SIGTERM: they save for
    as long as it takes, and end with 0. A Ctrl-C after it ends them at once, but not within REPEAT seconds: wrappers
    repeat at once what the terminal has already sent, and a person takes longer.

    stop: number of the signal of the first request; 0: none. failures: of this node's workers, by rank.
    """

    def __init__(self, node: Node, config: Config, folder: str, command: list[str]):
        """folder: for torchrun's files. command: the module and its arguments."""
        from torch.distributed import TCPStore  # slow to import

        super().__init__(daemon=True)
        self.max_restarts = config.comm.max_restarts
        self.saves = config.checkpoint.enable
        self.place = f"{node.address}:{node.port}"
        options = {
            "nproc-per-node": node.processes,
            "max-restarts": self.max_restarts,
            "monitor-interval": 0.1,
            "log-dir": folder,
        }
        if node.count > 1:
            options |= {"nnodes": node.count, "node-rank": node.rank}
            options |= {"rdzv-endpoint": self.place, "rdzv-conf": f"timeout={PREPARE}"}
        else:
            # In a file of our own: through a port, whoever reaches it can have all workers start again, and what comes
            # through it is unpickled. The workers meet on the loopback; torchrun's store listens on all interfaces.
            options |= {
                "rdzv-backend": "c10d",
                "rdzv-conf": "store_type=file",
                "local-addr": "localhost",
            }
            options |= {"rdzv-endpoint": f"{folder}/rendezvous"}
            listening = socket.create_server(("127.0.0.1", 0))
            _, port = listening.getsockname()
            self.store = TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            os.environ |= {STORE: str(port), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.arguments = [
            *(f"--{name}={value}" for name, value in options.items()),
            "--module",
            *command,
        ]
        self.stop, self.stopped_at = 0, 0.0
        self.told: set[int] = set()  # process ids of workers that SIGTERM was sent to
        self.failures: dict[int, ProcessFailure] = {}
        self.error: BaseException | None = None

    def run_to_end(self) -> None:
        self.start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # as nohup has it
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_request)
        # snapshots (profiling.py)
        signal.signal(signal.SIGUSR1, lambda number, _: _send(number, self._running()))
        while self.is_alive():
            self.join(0.1)
            self._pass_on()
        if self.error:
            raise self.error

    def run(self) -> None:
        from torch.distributed import DistError  # slow to import
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import get_args_parser, run

        log = logging.getLogger("torch.distributed.elastic")
        log.propagate = False
        log.handlers = [logging.NullHandler()]  # what happens is said here
        if self.max_restarts:  # but for the worker because of which others start again
            said = logging.StreamHandler()
            said.setLevel(logging.ERROR)
            logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(said)
        # Workers inherit this, and unblock it once they can handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            run(get_args_parser().parse_args(self.arguments))
        except ChildFailedError as error:
            self.failures = error.failures
        except DistError as error:
            reason = str(error).partition("\n")[0]
            self.error = ValueError(
                f"nodes cannot meet at {self.place} ({reason}); give node 0's address, a free port"
            )
        except BaseException as error:  # to `run_to_end`
            self.error = error

    def _running(self) -> set[int]:
        """Process ids of the workers: the children of this thread."""
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            return {
                int(child)
                for child in Path(f"/proc/self/task/{self.native_id}/children").read_text().split()
            }
        return set()

    def _on_request(self, number: int, _: FrameType | None) -> None:
        running = self._running()
        if self.stop and (number != signal.SIGINT or time.monotonic() - self.stopped_at < REPEAT):
            return
        if self.stop or not running:
            _send(signal.SIGKILL, running)
            sys.exit(128 + (self.stop or number))
        self.stop, self.stopped_at = number, time.monotonic()
        after = (
            "after a last save"
            if self.saves
            else "after this step, without a save (checkpoint.enable = false)"
        )
        print(f"stopping {after}; Ctrl-C again stops at once", file=sys.stderr)

    def _pass_on(self) -> None:
        """After a request, send SIGTERM to workers that have not had it; some may have been about to start."""
        running = self._running()
        if not self.stop or running <= self.told:
            return
        if self.told and not self.told & running:  # all start again (comm.max_restarts)
            print("error: the workers have failed instead of saving", file=sys.stderr)
            sys.exit(1)
        _send(signal.SIGTERM, running - self.told)
        self.told |= running


def _send(number: int, processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    run_command(main)
