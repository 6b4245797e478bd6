"""Start the processes of a run on this machine: `NGPU=4 python -m titan_linear.launch --training.steps 100`.

Everything that can be refused is refused here, before a process starts: the configuration, the run's folder, the
corpus, the tokenizer, the checkpoint. The workers then find the environment that torchrun would give them
(RANK, WORLD_SIZE, MASTER_ADDR, ...), and `torchrun -m titan_linear.train` on every node starts a run on several.

The processes are started without torchrun because of how a run must end: torchrun answers SIGTERM with a traceback
and exit code 1, cuts a save short after 30 seconds, asks healthy workers to save when one has failed, and leaves
the workers running when it is killed itself. Here

- SIGTERM and Ctrl-C reach every worker once, as SIGTERM; workers save, exit 0, and the launcher exits 143 or 130;
- a second Ctrl-C kills the workers;
- when a worker fails, the others have GRACE seconds to say why they fail too, and the launcher exits with its code;
- workers die with the launcher, whatever killed it (process.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType

from titan_linear.config import check_config, load_config
from titan_linear.process import LAUNCHER
from titan_linear.rundir import check_resume, copied_configuration, lock_folder

GRACE = 5.0  # seconds


def main(argv: list[str]) -> int:
    """Check, then run. The exit code: 0, 2 for a user's mistake, 130, 143, or a failed worker's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_now)
    if asks_for_flavors(argv):
        from titan_linear.models.presets import flavors

        print(flavors())
        return 0
    try:
        config = load_config(argv)
        world_size = process_count()
        check_config(config, world_size)
        if warning := copied_configuration(config):
            print(warning, flush=True)
        lock = lock_folder(config.job.dump_folder)
        for change in check_resume(config):
            print(f"resuming with {change}", flush=True)
        from titan_linear.preflight import preflight  # slow to import; --help and typing errors do without

        preflight(config, world_size)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with lock:
        return run_workers("titan_linear.train", argv, world_size)


def asks_for_flavors(argv: list[str]) -> bool:
    return any(flag in ("-h", "--help") and what == "flavors" for flag, what in pairwise(argv))


def process_count() -> int:
    """NGPU, else the GPUs present, else 2 processes on the CPU.

    Raises:
        ValueError: NGPU is not a positive number, or more than the GPUs present.
    """
    import torch

    present, asked = torch.cuda.device_count(), os.environ.get("NGPU", "")
    if not asked:
        return present or 2
    if not asked.isdecimal() or int(asked) < 1:
        raise ValueError(f"NGPU = {asked!r} must be a number of processes, 1 or more")
    if present and int(asked) > present:
        raise ValueError(f"NGPU = {asked} is more than the {present} GPUs present; use at most {present}")
    return int(asked)


def run_workers(module: str, argv: list[str], world_size: int) -> int:
    """`python -m module *argv` in world_size processes; the exit code of the whole (see the module)."""
    stop = _Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.on_signal)
    from torch.distributed import TCPStore

    # The launcher hosts the workers' store, as torchrun does: the port is bound once and belongs to nobody else.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", module, *argv]
    workers = [
        # Sessions of their own: a Ctrl-C in the terminal comes to them from the launcher only.
        subprocess.Popen(
            command, env=_environment(rank, world_size, store.port), stdin=subprocess.DEVNULL, start_new_session=True
        )
        for rank in range(world_size)
    ]
    return _supervise(workers, stop)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),
        # Threads that wait sleep: spinning, they take the core that the one they wait for needs, where others work too.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",  # env:// joins the launcher's store
        LAUNCHER: str(os.getpid()),
    }  # fmt: skip


@dataclass
class _Stop:
    """The signals that asked the launcher to stop."""

    number: int = 0  # of the first
    since: float = 0.0
    at_once: bool = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.number:
            self.number, self.since = number, time.monotonic()
        # Wrappers repeat a signal that the terminal has sent already; a person's second Ctrl-C comes later.
        elif number == signal.SIGINT and time.monotonic() - self.since > 0.3:
            self.at_once = True


def _supervise(workers: list[subprocess.Popen], stop: _Stop) -> int:
    asked, failed, failed_at = False, None, 0.0
    while any([worker.poll() is None for worker in workers]):  # a list: poll them all
        if stop.number and not asked:
            asked = True
            print("stopping after a last save; Ctrl-C again stops at once", file=sys.stderr, flush=True)
            _signal(workers, signal.SIGTERM)
        if failed is None and (failed := _first_failure(workers)) is not None:
            failed_at = time.monotonic()
        if stop.at_once or (failed is not None and time.monotonic() - failed_at > GRACE):
            _signal(workers, signal.SIGKILL)
        time.sleep(0.05)
    if failed is None:
        failed = _first_failure(workers)
    # A worker that was asked to stop before it could listen has died of the request, which is no failure.
    if stop.at_once or (stop.number and (failed is None or workers[failed].returncode == -signal.SIGTERM)):
        return 128 + stop.number
    return 0 if failed is None else _report(failed, workers[failed].returncode)


def _signal(workers: list[subprocess.Popen], number: int) -> None:
    for worker in workers:
        worker.send_signal(number)  # does nothing to one that has ended


def _first_failure(workers: list[subprocess.Popen]) -> int | None:
    return next((rank for rank, worker in enumerate(workers) if worker.returncode), None)


def _report(rank: int, code: int) -> int:
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    print(f"error: rank {rank} failed ({how})", file=sys.stderr)
    return code if code > 0 else 128 - code


def _exit_now(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
