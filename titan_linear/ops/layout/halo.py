"""Which tokens a rank's causal convolutions need from other ranks: those before each of its fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan_linear.ops.layout.fragments import Fragment
from titan_linear.ops.layout.tables import OnHost


class HaloRoutes(NamedTuple):
    """What this rank sends and receives. The shapes of the tables do not depend on the documents; rows beyond the
    counts are padding."""

    rows: torch.Tensor  # [.] int64: local tokens to send, by receiver
    places: torch.Tensor  # [.] int64: rows of this rank's halos [slots · width] that received tokens fill, by sender
    crosses: OnHost  # [1] whether a document crosses a cut, on any rank
    send_counts: OnHost  # [W] number of tokens for each receiver
    receive_counts: OnHost  # [W] and from each sender


def halo_routes(fragments: Sequence[Fragment], rank: int, world_size: int, width: int) -> dict:
    """The arrays of `HaloRoutes`, by name, for the `width` tokens before each fragment."""
    rows: list[list[int]] = [[] for _ in range(world_size)]
    places: list[list[int]] = [[] for _ in range(world_size)]
    size = fragments[0].end
    slots = sum(f.rank == rank for f in fragments)
    for i, target in enumerate(fragments):
        first = max(target.start - width, target.head[0])
        for source in fragments[first // size : i]:
            if rank not in (source.rank, target.rank):
                continue
            tokens = range(max(first, source.start), source.end)
            if source.rank == rank:
                rows[target.rank] += [source.slot * size + t - source.start for t in tokens]
            if target.rank == rank:
                places[source.rank] += [target.slot * width + width - target.start + t for t in tokens]
    return {
        "rows": _padded(rows, slots * width * max(width, 1)),
        "places": _padded(places, slots * width),
        "crosses": np.array([any(f.enters for f in fragments)]),
        "send_counts": np.array([len(r) for r in rows]),
        "receive_counts": np.array([len(p) for p in places]),
    }


def _padded(lists: list[list[int]], length: int) -> np.ndarray:
    flat = [x for part in lists for x in part]
    return np.array(flat + [0] * (length - len(flat)), dtype=np.int64)
