"""Batches: which data-parallel rank computes which streams, and how far a run has read.

torchdata's threads read batches ahead. They share the memory-mapped corpus and the epochs'
orders, and nothing is copied between processes.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from titan_linear.data.corpus.tree_records import BACK
from titan_linear.data.streams.mixture import Streams
from titan_linear.data.streams.packing import Stream
from titan_linear.ops.layout.prefix_trees import PrefixTrees


@dataclass(frozen=True, eq=False)
class Batch:
    """The L streams of one micro-step on one data-parallel rank, end to end.

    Context parallelism has not cut it yet.
    """

    tokens: Tensor  # [1, L·T] int64
    labels: Tensor  # [1, L·T] int64, −100 where there is nothing to predict
    cu_seqlens: Tensor  # [N+1] int32, from 0 to L·T; every stream's edge is a boundary
    position_ids: Tensor  # [1, L·T] int64, from 0 in each document
    num_streams: int  # L
    streams: tuple[int, ...]  # their global indices, for error messages
    # Per-label values that losses read, [1, L·T] or [1, L·T, n].
    columns: dict[str, Tensor]
    # Larger than every number in the column "document", if there is one.
    num_documents: int = 0

    @property
    def weight(self) -> float:
        """Return the sum of the weights of all labels."""
        return float(self.columns["weights"].sum(dtype=torch.float64))

    @cached_property
    def trees(self) -> PrefixTrees:
        """Return the documents, or the nodes of prefix trees."""
        edges = self.cu_seqlens.numpy().astype(np.int64)
        if BACK in self.columns:
            return PrefixTrees.behind(self.columns[BACK][0].numpy(), edges)
        return PrefixTrees.apart(edges)


@dataclass(eq=False)
class StreamLoader(Stateful):
    """Yields this rank's micro-batches, without end.

    Step s takes streams [s·G, (s+1)·G). Its micro-step m gives rank d the L streams that
    start at s·G + m·(dp·L) + d·L.

    The state is the global index of the next stream, so a run resumes under any dp_degree
    and num_workers. Batches are read ahead of training, so the caller reports each finished
    step (`advance`).

    Args:
        next_stream: number of streams that finished steps have consumed, over all ranks; a
            multiple of G.
        num_workers: threads that read ahead, two batches each. With 0, a batch is read when
            it is asked for.

    Raises:
        ValueError: (naming training.global_batch_size) G does not divide next_stream.
    """

    streams: Streams
    _: KW_ONLY
    global_batch_size: int
    local_batch_size: int
    dp_rank: int
    dp_degree: int
    next_stream: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        assert self.global_batch_size % (self.dp_degree * self.local_batch_size) == 0, self
        assert 0 <= self.dp_rank < self.dp_degree, self
        self._set(self.next_stream)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from `next_stream` on; errors in threads are raised here unchanged."""
        # G is a multiple of dp·L: step s begins at micro-batch s·G / (dp·L).
        numbers = itertools.count(self.next_stream // (self.dp_degree * self.local_batch_size))
        node = ParallelMapper(
            IterableWrapper(numbers),
            self._read,
            num_workers=self.num_workers,
            method="thread",
        )
        for batch in Loader(node):
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def _read(self, n: int) -> Batch | Exception:
        # Return the exception: torchdata would raise its own, whose message is a traceback.
        try:
            return micro_batch(self.streams, n, self.local_batch_size, self.dp_rank, self.dp_degree)
        except Exception as error:
            return error

    def advance(self) -> None:
        """Record that a step is finished."""
        self.next_stream += self.global_batch_size

    def state_dict(self) -> dict[str, Tensor]:
        """Return the next stream as a tensor, because DCP would pickle anything else."""
        return {"next_stream": torch.tensor(self.next_stream)}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._set(int(state_dict["next_stream"]))

    def _set(self, next_stream: int) -> None:
        if next_stream < 0 or next_stream % self.global_batch_size:
            raise ValueError(
                f"training.global_batch_size = {self.global_batch_size} does not divide the next stream {next_stream}; "
                "resume with the global batch that the run began with"
            )
        self.next_stream = next_stream


def validation_batches(
    streams: Streams,
    *,
    local_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    limit: int = -1,
    first: int = 0,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of one validation pass, from micro-batch `first` on.

    The pass covers all streams (which have repeat=False), or the first `limit` of them.
    Every rank gets the same number of micro-batches: streams after the end of the pass are
    all padding.
    """
    end = len(streams) if limit == -1 else min(limit, len(streams))
    for n in range(first, math.ceil(end / (dp_degree * local_batch_size))):
        yield micro_batch(streams, n, local_batch_size, dp_rank, dp_degree, end)


def micro_batch(
    streams: Streams,
    n: int,
    local_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    end: float = math.inf,
) -> Batch:
    """Build a rank's micro-batch n, counted from stream 0.

    It holds streams [first, first + L) with first = n·dp·L + d·L. Padding replaces the
    streams from `end` on.
    """
    first = (n * dp_degree + dp_rank) * local_batch_size
    indices = tuple(range(first, first + local_batch_size))
    return _collate([streams[i] if i < end else streams.padding() for i in indices], indices)


def _collate(streams: list[Stream], indices: tuple[int, ...]) -> Batch:
    def joined(parts: Iterable[np.ndarray]) -> Tensor:
        first, *others = parts
        # One stream is not copied.
        array = np.concatenate([first, *others]) if others else first
        return torch.from_numpy(array)[None]

    # Shift each stream's boundaries to its place in the micro-batch.
    seq_len = len(streams[0].tokens)
    edges = [stream.cu_seqlens[1:] + j * seq_len for j, stream in enumerate(streams)]
    columns = {}
    for name in streams[0].columns:
        columns[name] = joined(stream.columns[name] for stream in streams)
    # Make the numbers of documents unique across streams. Each stream's count includes
    # padding and is rounded to an even number, so that pairs stay pairs.
    counts = [len(stream.cu_seqlens) // 2 * 2 for stream in streams]
    if "document" in columns:
        before = np.cumsum([0, *counts[:-1]])
        columns["document"] += torch.from_numpy(np.repeat(before, seq_len))
    return Batch(
        tokens=joined(stream.tokens for stream in streams),
        labels=joined(stream.labels for stream in streams),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], *edges]).astype(np.int32)),
        position_ids=joined(stream.position_ids for stream in streams),
        num_streams=len(streams),
        streams=indices,
        columns=columns,
        num_documents=sum(counts),
    )
