"""Micro-batches of each step, read, cut and moved to the device before they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.data import Batch
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.config import Documents


class StepTokens(NamedTuple):
    """Tokens of one step over all ranks."""

    total: int  # number of tokens
    # Sum of the label weights.
    weight: float


NO_DOCUMENTS = Documents(0, 0, 0)


@dataclass(frozen=True)
class FeedStats:
    """Totals of some steps over all ranks, and the time spent by this rank's host."""

    steps: int = 0
    valid: int = 0  # tokens with a label
    # Tokens if each document of a prefix tree were packed separately.
    apart: int = 0
    documents: Documents = NO_DOCUMENTS
    # Seconds spent reading and cutting batches.
    seconds: float = 0.0
    # Seconds in which this host, or the hosts of other ranks, read and cut batches while
    # the device was idle.
    waited: float = 0.0
    # Pairs of query and key in one softmax layer, on the busiest rank of each step.
    most_pairs: float = 0.0

    def work_balance(self, ranks: int) -> float:
        """Return the busiest rank's pairs divided by the mean over `ranks`; 1 is even."""
        return self.most_pairs * ranks / self.documents.pairs

    def __add__(self, more: FeedStats) -> FeedStats:
        sums = {}
        for name, total in vars(self).items():
            sums[name] = total + getattr(more, name)
        return FeedStats(**sums)


class _Ahead(NamedTuple):
    """A step fetched ahead of time."""

    first: LocalBatch
    rest: list[Batch]
    # `_counts` of this rank's batches; of all ranks' batches once `counting` has finished.
    counts: Tensor
    counting: dist.Work


@dataclass(eq=False)
class Feed:
    """Source of the micro-batches of each step.

    `prefetch` does all host work of a step that precedes its first forward. Call it while
    the device still computes the previous step. Later micro-batches are cut and moved when
    they are requested, which is while the device computes the previous one. They are copied
    from pinned memory on the current CUDA stream, and the host does not wait for the copy.

    Args:
        batches: endless batches of this data-parallel rank. They may be read one step ahead
            of training; the trainer keeps track of how far the run has come.
        cut: maps a batch to this rank's part of it, on its device (`BatchSharding`).
        micro_steps: number of batches per step.
        copies: number of ranks that receive the same batches.
        host: gloo group of all ranks that counts tokens on the hosts, without any device.
        device: the device that computes the micro-batches.
    """

    batches: Iterator[Batch]
    cut: Callable[[Batch], LocalBatch]
    _: KW_ONLY
    micro_steps: int
    copies: int
    host: dist.ProcessGroup
    device: torch.device
    _ahead: _Ahead | None = None
    _stats: FeedStats = FeedStats()  # since the last `take`
    _pairs: float = 0.0

    def prefetch(self) -> None:
        """Fetch the next step's batches, start to count its tokens, move its first batch."""
        if self._ahead is None:
            with self._timed():
                batches = [next(self.batches) for _ in range(self.micro_steps)]
                counts = torch.tensor(
                    [_counts(batch) for batch in batches], dtype=torch.float64
                ).sum(0)
            counting = dist.all_reduce(counts, group=self.host, async_op=True)
            self._ahead = _Ahead(self._move(batches[0]), batches[1:], counts, counting)

    def next_step(self) -> tuple[StepTokens, Iterator[LocalBatch]]:
        """Return the token counts of the next step, and this rank's micro-batches of it."""
        self.prefetch()
        self.settle()
        step = self._ahead
        self._ahead = None
        # `copies` ranks counted each batch.
        weight, *sums = (count / self.copies for count in step.counts.tolist())
        valid, apart, *sums = map(int, sums)  # exact below 2⁵³
        documents = Documents(*sums)
        self._stats += FeedStats(1, valid, apart, documents)
        return StepTokens(documents.tokens, weight), self._micro_batches(step)

    def _micro_batches(self, step: _Ahead) -> Iterator[LocalBatch]:
        for batch in chain([step.first], map(self._move, step.rest)):
            self._pairs += batch.plan.pairs
            yield batch

    def _move(self, batch: Batch) -> LocalBatch:
        with self._timed():
            return self.cut(batch)

    @contextmanager
    def _timed(self, reads: bool = True) -> Iterator[None]:
        """Count the seconds spent inside this context.

        If the device has finished all earlier work by the end of the context, it was idle for
        some of these seconds. All of them then count as waiting, which is an upper bound.
        """
        queued = (
            torch.cuda.current_stream(self.device).record_event()
            if self.device.type == "cuda"
            else None
        )
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        waited = seconds if queued is None or queued.query() else 0.0
        self._stats += FeedStats(seconds=seconds if reads else 0.0, waited=waited)

    def settle(self) -> None:
        """Wait until the tokens of the prefetched step are counted."""
        if self._ahead:
            with self._timed(reads=False):
                self._ahead.counting.wait()

    def take(self, prefetch: bool = False) -> FeedStats:
        """Return the totals of the micro-batches requested since the last call.

        Every rank calls this, and may `prefetch` first. Ranks synchronize, but no longer
        than counting the next step's tokens takes.
        """
        if prefetch:
            self.prefetch()
        most = np.array([self._pairs])
        with self._timed(reads=False):
            dist.all_reduce(torch.from_numpy(most), dist.ReduceOp.MAX, group=self.host)
        stats = self._stats + FeedStats(most_pairs=float(most[0]))
        self._stats = FeedStats()
        self._pairs = 0.0
        return stats


def _counts(batch: Batch) -> list[float]:
    """Count what is in a batch.

    The counts are: label weight, labels, tokens if trees were packed separately, and the
    fields of `Documents`.
    """
    labels = batch.columns["weights"] > 0
    trees = batch.trees
    # Each leaf's document from the root to the leaf.
    apart = int((trees.edges[1:] - trees.begins)[trees.leaves].sum())
    return [batch.weight, int(labels.sum()), apart, *Documents.of(trees.edges, trees.depth)]
