"""Start a run, or this machine's part of it.

NGPU=4 python -m titan_linear.run.launch --training.steps 100

Everything that can be refused is refused here, before a process starts: the configuration,
the run's folder, the corpus, the tokenizer and the checkpoint. Each node also writes its
token cache. Then torchrun starts the workers, in this process. `torchrun -m
titan_linear.train` works too: in that case rank 0 makes the same checks.

NGPU                      number of processes on this node
NNODES, NODE_RANK         number of nodes, and this node's number (default: 1, 0)
MASTER_ADDR, MASTER_PORT  address of node 0 (with several nodes; default port: 29500)
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
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

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

# Seconds for the nodes to meet: each of them prepares its data first.
PREPARE = 24 * 3600
# Seconds in which a wrapper that passes signals on may send the same signal again.
REPEAT = 0.3
# Exit codes of workers that ended because another did: torchrun sends SIGTERM.
FOLLOWING = (LOST, -signal.SIGTERM)


class Node(NamedTuple):
    """This machine among the machines of a run, and the place where they meet.

    Read from NODE_RANK of NNODES, MASTER_ADDR and MASTER_PORT.
    """

    processes: int
    rank: int = 0
    count: int = 1
    # Empty if this machine is alone.
    address: str = ""
    port: int = 0


@refusing
def main(argv: list[str]) -> int:
    """Check the run, then start it; return the exit code.

    The code is 0, 2 for a user's mistake, 130, 143, or a failed worker's.
    """
    # Until there are workers, a request to stop ends this process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # SIGUSR1 is meant for the workers, once there are any.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if any(flag in ("-h", "--help") and what == "flavors" for flag, what in pairwise(argv)):
        from titan_linear.models.presets import flavors

        print(flavors())
        return 0
    config = load_config(argv)
    node = this_node()
    world_size = node.count * node.processes
    check_config(config, world_size)
    # This import is slow. `--help` and misspelled keys do not need it.
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
    # A single node does not need the other variables.
    processes = process_count()
    nodes = _number("NNODES", "1", 1)
    if nodes == 1:
        return Node(processes)
    # With several nodes, check this node's number and the address of node 0.
    rank = _number("NODE_RANK", "", 0)
    port = _number("MASTER_PORT", "29500", 1)
    if port > 65535:
        raise ValueError(f"MASTER_PORT = {port} is not a port; use one below 65536")
    if rank >= nodes:
        raise ValueError(
            f"NODE_RANK = {rank} must be less than NNODES = {nodes}; nodes are numbered from 0"
        )
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise ValueError(
            f"NNODES = {nodes} needs MASTER_ADDR, the address of node 0; set it, the same on every node"
        )
    # torchrun would look for a wrong address for as long as it waits.
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ValueError(
            f"MASTER_ADDR = {address!r}, MASTER_PORT = {port} is not an address ({error}); give node 0's"
        ) from None
    return Node(processes, rank, nodes, address, port)


def process_count() -> int:
    """Return the number of processes on this node.

    It is NGPU if set, else the number of GPUs present, else 2, on the CPU.

    Raises:
        ValueError: NGPU is not a positive number, or is more than the GPUs present.
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
    value = os.environ.get(name) or default
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} = {value!r} must be a number, {least} or more")
    return int(value)


# --- Workers ------------------------------------------------------------------------------


def run_workers(
    config: Config, node: Node, module: str = "titan_linear.train", more: Sequence[str] = ()
) -> int:
    """Run `python -m module` in this node's processes; return the run's exit code.

    torchrun starts the processes. `more` is appended to their arguments. Workers read the
    configuration as it was checked, also when they start again: the user's file may have
    changed by then.

    Raises:
        ValueError: the nodes cannot meet.
        SystemExit: a signal came before there were workers, or Ctrl-C came a second time.
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
        command = [module, "--job.config_file", str(checked), *more]
        workers = Workers(
            node,
            folder,
            command,
            max_restarts=config.comm.max_restarts,
            saves=config.checkpoint.enable,
        )
        workers.run_to_end()
        # Another node may have received the signal.
        stopped_for = workers.stop or (int(agreed.read_text()) if agreed.exists() else 0)
    failures = workers.failures
    if workers.stop:
        # A worker that was asked to stop before it handled signals was killed by the
        # request. Other workers then lost it.
        failures = {
            rank: failure for rank, failure in failures.items() if failure.exitcode not in FOLLOWING
        }
    if failures:
        return _report(failures)
    return 128 + stopped_for if stopped_for else 0


def _environment(processes: int) -> dict[str, str]:
    """Return variables for the workers; a value that the user has set wins over a default."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        # Waiting threads soon sleep. On a machine with other work, spinning would take the
        # core that the awaited thread needs. If they slept at once (PASSIVE sets libgomp's
        # spin count to 0), waking them would halve the speed of a free machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = "1000"
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Print which rank failed first, and return its exit code."""
    # Workers that followed another's failure sort last, then the earliest failure wins.
    rank = min(
        failures, key=lambda rank: (failures[rank].exitcode in FOLLOWING, failures[rank].timestamp)
    )
    code = failures[rank].exitcode
    how = f"exit code {code}" if code > 0 else f"killed by {failures[rank].signal_name()}"
    print(
        f"error: rank {rank} {'lost another rank' if code == LOST else f'failed ({how})'}",
        file=sys.stderr,
    )
    return code if code > 0 else 128 - code


class Workers(threading.Thread):
    """torchrun's `run`, in a thread, and the workers that it starts.

    torchrun never sees a signal: it would kill the workers 30 seconds later. Signals come
    to the main thread, also while PyTorch waits for other nodes in C++. The first request
    to stop is passed on to the workers as SIGTERM: they save for as long as it takes, and
    end with 0. A Ctrl-C after it ends them at once, but not within REPEAT seconds: wrappers
    repeat at once what the terminal has already sent, and a person takes longer.

    `stop` is the number of the first request's signal (0: none). `failures` holds this
    node's failed workers, by rank.
    """

    def __init__(
        self,
        node: Node,
        folder: str,
        command: list[str],
        *,
        max_restarts: int,
        saves: bool,
    ):
        """Prepare torchrun's `run`.

        Args:
            folder: for torchrun's files.
            command: the module and its arguments.
            saves: whether workers save before they stop.
        """
        from torch.distributed import TCPStore  # slow to import

        super().__init__(daemon=True)
        self.max_restarts = max_restarts
        self.saves = saves
        self.place = f"{node.address}:{node.port}"
        options = {
            "nproc-per-node": node.processes,
            "max-restarts": self.max_restarts,
            "monitor-interval": 0.1,
            "log-dir": folder,
        }
        # Several nodes meet at node 0's address.
        if node.count > 1:
            options |= {
                "nnodes": node.count,
                "node-rank": node.rank,
                "rdzv-endpoint": self.place,
                "rdzv-conf": f"timeout={PREPARE}",
            }
        else:
            # A single node meets in a file of our own. Through a port, whoever reaches it
            # could make all workers start again, and data received through it is unpickled.
            # The workers meet on the loopback; torchrun's store listens on all interfaces.
            options |= {
                "rdzv-backend": "c10d",
                "rdzv-conf": "store_type=file",
                "local-addr": "localhost",
                "rdzv-endpoint": f"{folder}/rendezvous",
            }
            # Bind the port here and pass it on as an open socket, so that nobody else can
            # take it.
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
        self.stop = 0
        self.stopped_at = 0.0
        # Process ids of workers that SIGTERM was sent to.
        self.told: set[int] = set()
        self.failures: dict[int, ProcessFailure] = {}
        self.error: BaseException | None = None

    def run_to_end(self) -> None:
        self.start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A SIGHUP that nohup ignores stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_request)
        # SIGUSR1 asks the workers for memory snapshots (profiling.py).
        signal.signal(signal.SIGUSR1, lambda number, _: _send(number, self._running()))
        # Pass requests on to workers until torchrun ends.
        while self.is_alive():
            self.join(0.1)
            self._pass_on()
        if self.error:
            raise self.error

    def run(self) -> None:
        from torch.distributed import DistError  # slow to import
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import get_args_parser, run

        # The launcher reports failures itself, so torchrun's log is silenced. With
        # restarts, it still prints the error of the worker that made all of them start
        # again.
        log = logging.getLogger("torch.distributed.elastic")
        log.propagate = False
        log.handlers = [logging.NullHandler()]
        if self.max_restarts:
            said = logging.StreamHandler()
            said.setLevel(logging.ERROR)
            logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(said)
        # Workers inherit the blocked signal and unblock it once they can handle it.
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
        # `run_to_end` raises it in the main thread.
        except BaseException as error:
            self.error = error

    def _running(self) -> set[int]:
        """Return the process ids of the workers: the children of this thread."""
        # The files are missing once the thread has ended.
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/self/task/{self.native_id}/children").read_text()
            return set(map(int, children.split()))
        return set()

    def _on_request(self, number: int, _: FrameType | None) -> None:
        running = self._running()
        # Ignore repeats: only a second Ctrl-C, after REPEAT seconds, counts.
        if self.stop and (number != signal.SIGINT or time.monotonic() - self.stopped_at < REPEAT):
            return
        # On a second Ctrl-C, or before there are workers, end everything at once.
        if self.stop or not running:
            _send(signal.SIGKILL, running)
            sys.exit(128 + (self.stop or number))
        # On the first request, announce the stop; `_pass_on` sends it to the workers.
        self.stopped_at = time.monotonic()
        self.stop = number
        after = (
            "after a last save"
            if self.saves
            else "after this step, without a save (checkpoint.enable = false)"
        )
        print(f"stopping {after}; Ctrl-C again stops at once", file=sys.stderr)

    def _pass_on(self) -> None:
        """After a request, send SIGTERM to the workers that have not had it.

        Some of them may only have been about to start.
        """
        running = self._running()
        if not self.stop or running <= self.told:
            return
        # All workers have started again (comm.max_restarts), so the save failed.
        if self.told and not self.told & running:
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
