"""The micro-batches of each step, cut for this rank and on its device before they are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_linear.data import IGNORE, Batch
from titan_linear.models.plan import BatchPlan


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What a rank computes of a `Batch`, on its device."""

    tokens: torch.Tensor  # [1, T_local] int64
    labels: torch.Tensor  # [1, T_local] int64
    plan: BatchPlan
    streams: tuple[int, ...]  # global indices, for error messages


class Feed:
    """Steps of micro-batches.

    All that the host does for a step before its first forward is done by `prefetch`: call it while the device still
    computes the step before. Later micro-batches are cut and moved when they are asked for, which is while the device
    computes the one before: copies are queued on the current stream, from pinned memory, and nothing waits for them.

    Args:
        batches: of this data-parallel rank, without end. It may be a step ahead of the training: how far the run has
            come is the trainer's to know.
        cut: a batch → tokens, labels and plan of this rank, on its device (`BatchSharding`).
        micro_steps: batches of a step.
        copies: ranks that get the same batches.
        host: a gloo group of all ranks, in which valid tokens are counted; no device takes part.
    """

    def __init__(
        self, batches: Iterator[Batch], cut: Callable[[Batch], tuple[torch.Tensor, torch.Tensor, BatchPlan]], *,
        micro_steps: int, copies: int, host: dist.ProcessGroup,
    ):  # fmt: skip
        self.batches, self.cut, self.micro_steps, self.copies, self.host = batches, cut, micro_steps, copies, host
        self._ahead: tuple[list[Batch], MicroBatch, torch.Tensor, dist.Work] | None = None
        self._seconds, self._steps = 0.0, 0  # since they were asked for

    def prefetch(self) -> None:
        """Fetch the next step's batches, begin to count its valid tokens, and move its first micro-batch."""
        if self._ahead is None:
            with self._timed():
                batches = [next(self.batches) for _ in range(self.micro_steps)]
                valid = torch.tensor(sum(int((batch.labels != IGNORE).sum()) for batch in batches))
            counting = dist.all_reduce(valid, group=self.host, async_op=True)
            self._ahead = batches, self._move(batches[0]), valid, counting

    def next_step(self) -> tuple[int, Iterator[MicroBatch]]:
        """The valid tokens of the next step over all ranks, and this rank's micro-batches of it."""
        self.prefetch()
        (batches, first, valid, counting), self._ahead = self._ahead, None
        self._steps += 1
        counting.wait()
        return int(valid) // self.copies, self._micro_batches(first, batches[1:])

    def _micro_batches(self, first: MicroBatch, rest: list[Batch]) -> Iterator[MicroBatch]:
        yield first
        for batch in rest:
            yield self._move(batch)

    def _move(self, batch: Batch) -> MicroBatch:
        with self._timed():
            return MicroBatch(*self.cut(batch), batch.streams)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin

    def seconds_per_step(self) -> float:
        """What the host has taken to read and cut the batches of a step, on average since this was last asked."""
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        return seconds / max(steps, 1)
