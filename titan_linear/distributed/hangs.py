"""A thread of each rank that watches the others: no rank waits for one that has ended, and a run that hangs says so in
one line: which collective of which step waits for which ranks.

PyTorch's flight recorders, one for gloo and one for NCCL, keep the last collectives of each process. The thread looks
at them while no step completes. Once a collective has used up most of its time-out, every rank writes its recorders
into the run's folder (`torchfrtrace FOLDER --prefix rank-` compares NCCL's), and one of them prints the line. The
time-out itself is left to the backend: gloo raises an error in the rank that waits, NCCL aborts its process.
"""

from __future__ import annotations

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

Collective = dict[str, Any]  # as a flight recorder describes it
LATE = 0.75  # of a collective's time-out
POLL = 1.0  # seconds, at most, between two looks at the store
GRACE = 2.0  # seconds for this rank to say why it fails itself
# seconds without an answer after which a rank is named, and after which the others leave
SILENT, DEAD = 3.0, 8.0


class Watch(threading.Thread):
    """Leaves when another rank has failed or does not answer; reports a late collective, once, together with those of
    the other ranks. Meanwhile this rank's main thread may wait for ever."""

    def __init__(self, folder: Path, store: Any, timeout: float):
        """timeout: that of training, in seconds. store: `dist.Store` of all ranks."""
        super().__init__(daemon=True)
        # A connection of its own: the main thread may hold the other one while it waits for a key.
        self.folder = folder
        self.store = store.clone()
        self.period = min(timeout / 20, 5.0)
        self.rank = dist.get_rank()
        self.ranks = range(dist.get_world_size())
        self.step: Callable[[], int] = lambda: 0  # the step that is being computed; 0: none yet
        # the signal that this rank has received; 0: none
        self.signal: Callable[[], int] = lambda: 0
        self.ended = threading.Event()
        # when this rank answered; whether others are named that did not
        self.asked, self.named = 0.0, False
        self.looked = time.monotonic()
        self.before = None
        self.reported = False

    def run(self) -> None:
        with suppress(dist.DistError):  # the store is gone, and all ranks end
            while not self.ended.wait(min(self.period, POLL)):
                if self.store.check([FAILED_RANK]) and not self.ended.wait(GRACE):
                    os._exit(LOST)
                self._answer()
                self._look()
            # it ended in order, and nobody shall miss it
            self.store.set(f"answers/{self.rank}", "")

    def _answer(self) -> None:
        """After a signal each rank answers. torchrun sends one also where a rank has died, and that one does not: then
        there is no step that all ranks could reach and save."""
        if not self.asked:
            if not (self.signal() or self.store.check(["signal"])):
                return
            self.asked = time.monotonic()
            self.store.set("signal", "")
            self.store.set(f"answers/{self.rank}", "")
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
        """Look for a late collective, every `period`, while no step completes."""
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
        self.store.set(f"waits/{self.rank}", name)
        if self.store.add("late", 1) == 1:
            self.ended.wait(2 * self.period)  # the other ranks look in the meantime
            missing = self._missing("waits")
            waiting = [rank for rank in self.ranks if rank not in missing]
            waited = (time.time_ns() - entry["time_created_ns"]) / 1e9
            when = f"step {self.step()}" if self.step() else "before the first step"
            where = (
                f"{_names(missing)} not there"
                if missing
                else "every rank waits, and not for the same"
            )
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
                file.unlink(missing_ok=True)  # were it a link, its target would be written
                file.write_bytes(dump())
        except OSError as error:  # a full disk must not end this thread
            print(
                f"warning: rank {self.rank}: no flight recorder: {error}",
                file=sys.stderr,
                flush=True,
            )


def recorders() -> dict[str, Callable[..., bytes]]:
    """Functions that dump this process's recorders, by name: that of collectives on its device, and with a GPU also
    gloo's."""
    module: Any = torch._C._distributed_c10d
    if torch.cuda.is_available():
        return {"rank": module._dump_nccl_trace, "gloo": module._dump_fr_trace}
    return {"rank": module._dump_fr_trace}


def recorded() -> list[list[Collective]]:
    """The collectives in each of this process's recorders, in the order in which they began."""
    return [
        pickle.loads(dump(includeStackTraces=False)).get("entries", [])
        for dump in recorders().values()
    ]


def late_collective(lists: list[list[Collective]], now: int) -> Collective | None:
    """Of the collectives that have not ended and have used up most of their time-outs, the one that began first.

    lists: one for each recorder. now: nanoseconds since the epoch.
    """
    waiting: dict[tuple[int, int], Collective] = {}  # by recorder and group
    for i, entries in enumerate(lists):
        for entry in entries:
            if entry["retired"]:  # so are earlier ones; those in an NCCL batch are never marked
                waiting.pop((i, entry["pg_id"]), None)
            else:
                waiting.setdefault((i, entry["pg_id"]), entry)
    late = [
        e for e in waiting.values() if now - e["time_created_ns"] > LATE * e["timeout_ms"] * 1e6
    ]
    return min(late, key=lambda entry: entry["time_created_ns"], default=None)


def _names(ranks: list[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, …, {ranks[-1]})"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def watched(folder: Path, store: dist.Store, timeout: float) -> Iterator[Watch]:
    """A `Watch` that runs inside of the context, and after an error until the process ends."""
    watch = Watch(folder, store, timeout)
    watch.start()
    yield watch
    watch.ended.set()
    watch.join(5)
