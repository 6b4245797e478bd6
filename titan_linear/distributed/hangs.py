"""A run that hangs says so in one line: which collective of which step waits for which ranks.

PyTorch's flight recorders, one for gloo and one for NCCL, keep the last collectives of each process. A thread of each
rank looks at them while no step completes. Once a collective has used up most of its time-out, every rank writes its
recorders into the run's folder (`torchfrtrace FOLDER --prefix rank-` compares NCCL's), and one of them prints the line.
The time-out itself is left to the backend: gloo raises an error in the rank that waits, NCCL aborts its process.
"""

from __future__ import annotations

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

LATE = 0.75  # of a collective's time-out


class Watch(threading.Thread):
    """Looks at this rank's collectives; if one is late, reports it, once, together with those of the other ranks."""

    def __init__(self, folder: Path, store: dist.Store, timeout: float):
        """timeout: that of training, in seconds. store: one of all ranks, which only `Watch` uses."""
        super().__init__(daemon=True)
        self.folder, self.store, self.period = folder, store, min(timeout / 20, 5.0)
        self.rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        self.step: Callable[[], int] = lambda: 0  # the step that is being computed; 0: none yet
        self.ended = threading.Event()

    def run(self) -> None:
        with suppress(dist.DistError):  # the store is gone, and all ranks end
            self._look()

    def _look(self) -> None:
        before = None
        while not self.ended.wait(self.period):
            if self.step() != before:
                before = self.step()
            elif late := late_collective(recorded(), time.time_ns()):
                return self._say(late)
            elif self.store.check(["late"]):
                return self._dump()

    def _say(self, entry: dict[str, Any]) -> None:
        name = entry["profiling_name"].rpartition(":")[2]
        self.store.set(f"waits/{self.rank}", name)
        first = self.store.add("late", 1) == 1
        self._dump()
        if not first:
            return
        self.ended.wait(2 * self.period)  # the other ranks look in the meantime
        waiting = [rank for rank in self.ranks if self.store.check([f"waits/{rank}"])]
        missing = [rank for rank in self.ranks if rank not in waiting]
        waited = (time.time_ns() - entry["time_created_ns"]) / 1e9
        when = f"step {self.step()}" if self.step() else "before the first step"
        where = f"{_names(missing)} not there" if missing else "every rank waits, and not for the same"
        print(
            f"hang: {when}: {_names(waiting)} in {name} for {waited:.0f} of {entry['timeout_ms'] / 1e3:.0f} s, {where}"
            f"; '{self.folder}' has what each did last",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _dump(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, dump in recorders().items():
            (self.folder / f"{name}-{self.rank}").write_bytes(dump())


def recorders() -> dict[str, Callable[..., bytes]]:
    """Functions that dump this process's recorders, by name: that of collectives on its device, and with a GPU also
    gloo's."""
    module = torch._C._distributed_c10d
    if torch.cuda.is_available():
        return {"rank": module._dump_nccl_trace, "gloo": module._dump_fr_trace}
    return {"rank": module._dump_fr_trace}


def recorded() -> list[list[dict[str, Any]]]:
    """The collectives in each of this process's recorders, in the order in which they began."""
    return [pickle.loads(dump(includeStackTraces=False)).get("entries", []) for dump in recorders().values()]


def late_collective(lists: list[list[dict[str, Any]]], now: int) -> dict[str, Any] | None:
    """Of the collectives that have not ended and have used up most of their time-outs, the one that began first.

    lists: one for each recorder. now: nanoseconds since the epoch.
    """
    waiting: dict[tuple[int, int], dict[str, Any]] = {}  # by recorder and group
    for i, entries in enumerate(lists):
        for entry in entries:
            if entry["retired"]:  # so are earlier ones; those in an NCCL batch are never marked
                waiting.pop((i, entry["pg_id"]), None)
            else:
                waiting.setdefault((i, entry["pg_id"]), entry)
    late = [e for e in waiting.values() if now - e["time_created_ns"] > LATE * e["timeout_ms"] * 1e6]
    return min(late, key=lambda entry: entry["time_created_ns"], default=None)


def _names(ranks: list[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, …, {ranks[-1]})"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def watched(folder: Path, store: dist.Store, timeout: float) -> Iterator[Watch]:
    """A `Watch` that runs inside of the context."""
    watch = Watch(folder, dist.PrefixStore("hangs", store), timeout)
    watch.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        watch.join(5)
