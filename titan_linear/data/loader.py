"""Batches: which data-parallel rank computes which streams, and the one number that says how far a run has read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from titan_linear.data.mixture import Streams
from titan_linear.data.packing import Stream
from titan_linear.loss import IGNORE


@dataclass(frozen=True, eq=False)
class Batch:
    """L streams of one micro-step of one data-parallel rank, end to end; context parallelism has not cut it yet."""

    tokens: torch.Tensor  # [1, L·T] int64
    labels: torch.Tensor  # [1, L·T] int64, −100 where there is nothing to predict
    cu_seqlens: torch.Tensor  # [N+1] int32, from 0 to L·T; every stream's edge is a boundary
    position_ids: torch.Tensor  # [1, L·T] int64, from 0 in each document
    num_streams: int  # L
    streams: tuple[int, ...]  # their global indices, for error messages


def build_dataloader(
    streams: Streams,
    *,
    global_batch_size: int,
    local_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    cursor: int = 0,
    num_workers: int = 0,
) -> DataLoader:
    """This rank's micro-batches, without end; the trainer keeps track of how far the run has come.

    Step s takes streams [s·G, (s+1)·G); its micro-step m gives this rank d the L streams from s·G + m·(dp·L) + d·L.
    cursor: number of streams that completed steps have consumed, over all ranks; a multiple of G.
    ValueError (naming training.global_batch_size): dp·L does not divide G, or G does not divide the cursor.
    """
    per_micro_step = dp_degree * local_batch_size
    if global_batch_size < 1 or local_batch_size < 1 or global_batch_size % per_micro_step:
        raise ValueError(
            f"training.global_batch_size = {global_batch_size} must be a positive multiple of data-parallel degree × "
            f"training.local_batch_size = {dp_degree} × {local_batch_size} = {per_micro_step}"
        )
    if cursor < 0 or cursor % global_batch_size:
        raise ValueError(
            f"training.global_batch_size = {global_batch_size} does not divide the data cursor {cursor}; resume with "
            "the global batch that the run began with"
        )
    assert 0 <= dp_rank < dp_degree, (dp_rank, dp_degree)
    micro_batches = _MicroBatches(streams, local_batch_size, dp_rank, dp_degree)
    # It has a generator of its own: otherwise workers' seeds would be drawn from torch's global one.
    return DataLoader(
        micro_batches, batch_size=None, sampler=_From(cursor // per_micro_step), num_workers=num_workers,
        generator=torch.Generator(),
    )  # fmt: skip


def validation_batches(
    streams: Streams, *, local_batch_size: int, dp_rank: int, dp_degree: int, limit: int = -1
) -> Iterator[Batch]:
    """This rank's micro-batches of one pass over streams with repeat=False, or over the first `limit` of them.

    Every rank gets the same number of them; streams beyond the last of the pass are all padding.
    """
    end = len(streams) if limit == -1 else min(limit, len(streams))
    micro_batches = _MicroBatches(streams, local_batch_size, dp_rank, dp_degree, end)
    return (micro_batches[n] for n in range(-(-end // (dp_degree * local_batch_size))))


def learnt(streams: Streams, indices: Iterable[int]) -> int:
    """Number of tokens with a label in these streams."""
    return sum(int((streams[i].labels != IGNORE).sum()) for i in indices)


class _From(Sampler):
    """start, start + 1, …: numbers of this rank's micro-batches."""

    def __init__(self, start: int):
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start)


class _MicroBatches(Dataset):
    """Item n is this rank's micro-batch n: streams [n·dp·L + d·L, … + L). Since G is a multiple of dp·L, step s begins
    at n = s·G / (dp·L), and the number of micro-steps need not be known here."""

    def __init__(
        self, streams: Streams, local_batch_size: int, dp_rank: int, dp_degree: int, end: float = math.inf
    ):  # fmt: skip
        self.streams, self.local_batch_size, self.dp_rank, self.end = streams, local_batch_size, dp_rank, end
        self.per_micro_step = dp_degree * local_batch_size

    def __getitem__(self, n: int) -> Batch:
        first = n * self.per_micro_step + self.dp_rank * self.local_batch_size
        indices = tuple(range(first, first + self.local_batch_size))
        return _collate([self.streams[i] if i < self.end else self.streams.padding() for i in indices], indices)


def _collate(streams: list[Stream], indices: tuple[int, ...]) -> Batch:
    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(stream, name) for stream in streams]))[None]

    seq_len = len(streams[0].tokens)
    edges = [stream.cu_seqlens[1:] + j * seq_len for j, stream in enumerate(streams)]
    cu_seqlens = torch.from_numpy(np.concatenate([[0], *edges]).astype(np.int32))
    return Batch(joined("tokens"), joined("labels"), cu_seqlens, joined("position_ids"), len(streams), indices)
