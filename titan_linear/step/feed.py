"""From a data-parallel rank's batches to the micro-batches of each step, read, cut and on the rank's
device before they are wanted."""

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
    """Of a step, over all ranks."""

    total: int  # number of tokens
    weight: float  # of those with a label


NO_DOCUMENTS = Documents(0, 0, 0)


@dataclass(frozen=True)
class FeedStats:
    """What some steps had, over all ranks, and the time that it took this rank's host to feed them."""

    steps: int = 0
    valid: int = 0  # tokens with a label
    apart: int = 0  # tokens, with the documents of prefix trees packed apart
    documents: Documents = NO_DOCUMENTS
    seconds: float = 0.0  # to read and cut batches
    # to read and cut them, or for other ranks to do so, while the device had nothing left to do
    waited: float = 0.0
    # of query and key in a softmax layer, on the rank that computed most in each step
    most_pairs: float = 0.0

    def work_balance(self, ranks: int) -> float:
        """Pairs of the rank that computed most, divided by the mean over the `ranks` that share them: 1 is even."""
        return self.most_pairs * ranks / self.documents.pairs

    def __add__(self, more: FeedStats) -> FeedStats:
        return FeedStats(
            steps=self.steps + more.steps,
            valid=self.valid + more.valid,
            apart=self.apart + more.apart,
            documents=Documents(
                *(a + b for a, b in zip(self.documents, more.documents, strict=True))
            ),
            seconds=self.seconds + more.seconds,
            waited=self.waited + more.waited,
            most_pairs=self.most_pairs + more.most_pairs,
        )


class _Ahead(NamedTuple):
    """A step that was fetched ahead."""

    first: LocalBatch
    rest: list[Batch]
    counts: Tensor  # `_counts` of this rank's batches; of all ranks' once `counting` is done
    counting: dist.Work


@dataclass(eq=False)
class Feed:
    """Steps of micro-batches.

    `prefetch` does all that the host does for a step before its first forward: call it while the device still computes
    the step before. Later micro-batches are cut and moved when they are asked for, which is while the device computes
    the one before. They are copied from pinned memory, on the current CUDA stream, and the host does not wait for it.

    Args:
        batches: those of this data-parallel rank, without end. They may be read a step ahead of training: the trainer
            keeps track of how far the run has come.
        cut: a batch → this rank's part of it, on its device (`BatchSharding`).
        micro_steps: number of batches per step.
        copies: number of ranks that get the same batches.
        host: a gloo group of all ranks in which tokens are counted, on the hosts; no device takes part.
        device: the one that computes the micro-batches.
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
        """Fetch the next step's batches, begin to count its tokens, and move its first micro-batch."""
        if self._ahead is None:
            with self._timed():
                batches = [next(self.batches) for _ in range(self.micro_steps)]
                counts = torch.tensor(
                    [_counts(batch) for batch in batches], dtype=torch.float64
                ).sum(0)
            counting = dist.all_reduce(counts, group=self.host, async_op=True)
            self._ahead = _Ahead(self._move(batches[0]), batches[1:], counts, counting)

    def next_step(self) -> tuple[StepTokens, Iterator[LocalBatch]]:
        """The numbers of tokens of the next step, and this rank's micro-batches of it."""
        self.prefetch()
        self.settle()
        step, self._ahead = self._ahead, None
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
        """Count the seconds spent inside. If by their end the device has done all that was queued before them, it has
        waited, for these seconds at most."""
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
        """What was in the step whose micro-batches were asked for since the last call. Every rank calls this, and may
        `prefetch` first. They wait for each other, but no longer than they would have to for the next step's count of
        tokens."""
        if prefetch:
            self.prefetch()
        most = np.array([self._pairs])
        with self._timed(reads=False):
            dist.all_reduce(torch.from_numpy(most), dist.ReduceOp.MAX, group=self.host)
        stats = self._stats + FeedStats(most_pairs=float(most[0]))
        self._stats, self._pairs = FeedStats(), 0.0
        return stats


def _counts(batch: Batch) -> list[float]:
    """The weight and the number of labels, the number of tokens with trees packed apart, and those of `Documents`."""
    labels = batch.columns["weights"] > 0
    nodes = batch.nodes
    apart = int((nodes.edges[1:] - nodes.begins)[nodes.leaves].sum())
    return [batch.weight, int(labels.sum()), apart, *Documents.of(nodes.edges, nodes.depth)]
