"""A thread on each rank that watches the other ranks.

Because of it, no rank waits for one that has ended.

A run that hangs prints one line: which collective of which step waits for which ranks.

PyTorch's flight recorders, one for gloo and one for NCCL, keep the last collectives of each
process. The thread reads them while no step completes. Once a collective has used up most
of its time-out, every rank writes its recorders into the run's folder (`torchfrtrace FOLDER
--prefix rank-` compares NCCL's), and one rank prints the line. The time-out itself is left
to the backend: gloo raises an error in the rank that waits, and NCCL aborts its process.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_linear.distributed.ending import FAILED_RANK
from titan_linear.distributed.process import LOST

# A collective, as a flight recorder describes it.
Collective = dict[str, Any]
# Share of a collective's time-out.
LATE = 0.75
# Longest time in seconds between two reads of the store.
POLL = 1.0
# Seconds for this rank to report its own failure.
GRACE = 2.0
# Seconds without an answer after which a rank is named, and after which the others leave.
SILENT = 3.0
DEAD = 8.0


class Watch(threading.Thread):
    """Leaves when another rank fails or does not answer; reports a late collective.

    It reports once, together with the other ranks' late collectives. Meanwhile this rank's
    main thread may wait forever.
    """

    def __init__(self, folder: Path, store: Any, timeout: float):
        """Prepare the thread.

        Args:
            store: `dist.Store` of all ranks.
            timeout: training's time-out, in seconds.
        """
        super().__init__(daemon=True)
        # The thread has its own connection, because the main thread may hold the other one
        # while it waits for a key.
        self.folder = folder
        self.store = store.clone()
        self.period = min(timeout / 20, 5.0)
        self.rank = dist.get_rank()
        self.ranks = range(dist.get_world_size())
        # The step that is being computed; 0: none yet.
        self.step: Callable[[], int] = lambda: 0
        # The signal that this rank has received; 0: none.
        self.signal: Callable[[], int] = lambda: 0
        self.ended = threading.Event()
        # When this rank answered, and whether silent ranks have been named.
        self.asked = 0.0
        self.named = False
        self.looked = time.monotonic()
        self.before = None
        self.reported = False

    def run(self) -> None:
        # Without the store, all ranks end.
        with suppress(dist.DistError):
            while not self.ended.wait(min(self.period, POLL)):
                if self.store.check([FAILED_RANK]) and not self.ended.wait(GRACE):
                    os._exit(LOST)
                self._answer()
                self._look()
            # This rank ended in order, and must not be reported as missing.
            self.store.set(f"answers/{self.rank}", "")

    def _answer(self) -> None:
        """Answer after a signal, and leave if other ranks do not.

        torchrun also sends a signal if a rank has died. The dead rank does not answer, and
        no step exists that all ranks could reach and save.
        """
        # Answer once, as soon as any rank has received a signal.
        if not self.asked:
            if not (self.signal() or self.store.check(["signal"])):
                return
            self.asked = time.monotonic()
            self.store.set("signal", "")
            self.store.set(f"answers/{self.rank}", "")
        # Name the ranks that stay silent, then leave.
        waited = time.monotonic() - self.asked
        if waited < SILENT or self.store.check([f"answers/{rank}" for rank in self.ranks]):
            return
        missing = self._missing("answers")
        if not self.named and self.rank == min(set(self.ranks) - set(missing)):
            print(f"error: no answer from {_names(missing)}", file=sys.stderr, flush=True)
        self.named = True
        if waited > DEAD:
            os._exit(LOST)

    def _look(self) -> None:
        """Look for a late collective every `period`, while no step completes."""
        if self.reported or time.monotonic() - self.looked < self.period:
            return
        self.looked = time.monotonic()
        if self.step() != self.before:
            self.before = self.step()
        elif late := late_collective(recorded(), time.time_ns()):
            self.reported = True
            self._say(late)
        elif self.store.check(["late"]):
            self.reported = True
            self._dump()

    def _say(self, entry: Collective) -> None:
        name = entry["profiling_name"].rpartition(":")[2]
        # The first late rank prints the line, after the others have had time to look.
        self.store.set(f"waits/{self.rank}", name)
        if self.store.add("late", 1) == 1:
            # The other ranks look in the meantime.
            self.ended.wait(2 * self.period)
            missing = self._missing("waits")
            waiting = [rank for rank in self.ranks if rank not in missing]
            waited = (time.time_ns() - entry["time_created_ns"]) / 1e9
            when = f"step {self.step()}" if self.step() else "before the first step"
            where = "every rank waits, and not for the same"
            if missing:
                where = f"{_names(missing)} not there"
            print(
                f"hang: {when}: {_names(waiting)} in {name} for {waited:.0f} of {entry['timeout_ms'] / 1e3:.0f} s, "
                f"{where}; '{self.folder}' has what each did last",
                file=sys.stderr,
                flush=True,
            )
        self._dump()

    def _missing(self, what: str) -> list[int]:
        return [rank for rank in self.ranks if not self.store.check([f"{what}/{rank}"])]

    def _dump(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, dump in recorders().items():
                file = self.folder / f"{name}-{self.rank}"
                # If it were a link, its target would be overwritten.
                file.unlink(missing_ok=True)
                file.write_bytes(dump())
        # A full disk must not end this thread.
        except OSError as error:
            print(
                f"warning: rank {self.rank}: no flight recorder: {error}",
                file=sys.stderr,
                flush=True,
            )


def recorders() -> dict[str, Callable[..., bytes]]:
    """Return functions that dump this process's flight recorders, by name.

    "rank" has the collectives on its device; with a GPU there is also "gloo".
    """
    module: Any = torch._C._distributed_c10d
    if torch.cuda.is_available():
        return {"rank": module._dump_nccl_trace, "gloo": module._dump_fr_trace}
    return {"rank": module._dump_fr_trace}


def recorded() -> list[list[Collective]]:
    """Return the collectives in each of this process's recorders, oldest first."""
    dumps = [pickle.loads(dump(includeStackTraces=False)) for dump in recorders().values()]
    return [dump.get("entries", []) for dump in dumps]


def late_collective(lists: list[list[Collective]], now: int) -> Collective | None:
    """Return the late collective that began first, or None.

    A collective is late if it has not ended and has used up most of its time-out.

    Args:
        lists: collectives of each recorder.
        now: nanoseconds since the epoch.
    """
    # The first waiting collective, by recorder and group.
    waiting: dict[tuple[int, int], Collective] = {}
    for i, entries in enumerate(lists):
        for entry in entries:
            group = i, entry["pg_id"]
            # Earlier collectives of the group have ended too, even if an NCCL batch never marks
            # them.
            if entry["retired"]:
                waiting.pop(group, None)
            else:
                waiting.setdefault(group, entry)
    # The first of them that is late, if any.
    for entry in sorted(waiting.values(), key=lambda entry: entry["time_created_ns"]):
        if now - entry["time_created_ns"] > LATE * entry["timeout_ms"] * 1e6:
            return entry
    return None


def _names(ranks: list[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, …, {ranks[-1]})"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def watched(folder: Path, store: dist.Store, timeout: float) -> Iterator[Watch]:
    """Run a `Watch` inside this context, and after an error until the process ends."""
    watch = Watch(folder, store, timeout)
    watch.start()
    yield watch
    watch.ended.set()
    watch.join(5)
