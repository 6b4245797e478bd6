"""How a packed stream is cut: fragments, their owners, the documents at their two ends, the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from titan_linear.ops.layout.boundaries import OnHost

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of global tokens that one rank owns, and the documents at its two ends."""

    start: int
    end: int
    rank: int  # the owner
    slot: int  # index among the owner's fragments
    head: tuple[int, int]  # global (start, end) of the document that holds the first token
    tail: tuple[int, int]  # global (start, end) of the document that holds the last token

    @property
    def enters(self) -> bool:
        """Whether a document comes in from the fragment before."""
        return self.head[0] < self.start

    @property
    def leaves(self) -> bool:
        """Whether a document goes on into the fragment after."""
        return self.tail[1] > self.end

    @property
    def through(self) -> bool:
        """Whether one document comes in, fills the fragment and goes out: the only case that needs M."""
        return self.head == self.tail and self.enters and self.leaves


def cut(documents: np.ndarray, num_streams: int, world_size: int, layout: str) -> tuple[Fragment, ...]:
    """Every rank's fragments, in global order.

    Args:
        documents: [N+1] int64, global boundaries without empty documents; the last is the total length of the streams.
        num_streams: number of streams, of equal length; each is cut by itself.

    Raises:
        ValueError: streams that cannot be cut into equal blocks, or that do not begin with a document.
    """
    total = int(documents[-1])
    length, blocks = total // num_streams, world_size * (2 if layout == "zigzag" else 1)
    if total % num_streams or length % blocks:
        raise ValueError(
            f"cu_seqlens ends at {total}: these tokens cannot be cut into num_streams = {num_streams} streams of "
            f"{blocks} equal blocks ({layout} layout on {world_size} ranks); pad each stream to a multiple of {blocks}"
        )
    begins = np.arange(1, num_streams) * length
    for i in np.flatnonzero(documents[np.searchsorted(documents, begins)] != begins):
        raise ValueError(f"num_streams = {num_streams}: stream {i + 1} must begin a document in cu_seqlens")
    size, slots = length // blocks, blocks // world_size
    starts = np.arange(num_streams * blocks) * size
    heads, tails = (np.searchsorted(documents, t, side="right") - 1 for t in (starts, starts + size - 1))
    bounds = np.stack([documents[heads], documents[heads + 1], documents[tails], documents[tails + 1]], 1)
    fragments = []
    for i, (start, (*head, a, b)) in enumerate(zip(starts.tolist(), bounds.tolist(), strict=True)):
        stream, block = divmod(i, blocks)
        mirrored = block >= world_size  # only in the zigzag layout
        owner = 2 * world_size - 1 - block if mirrored else block
        fragments.append(Fragment(start, start + size, owner, stream * slots + mirrored, tuple(head), (a, b)))
    return tuple(fragments)


def owned(fragments: Sequence[Fragment], rank: int) -> tuple[Fragment, ...]:
    """The fragments of `rank` by slot: the order in which its tokens lie in memory."""
    return tuple(sorted((f for f in fragments if f.rank == rank), key=lambda f: f.slot))


# --- The tokens before a fragment, which causal convolutions need ----------------------------------------------------


class HaloRoutes(NamedTuple):
    """What this rank sends and receives. The shapes of the tables do not depend on the documents; rows beyond the
    counts are padding."""

    rows: Tensor  # [.] int64: local tokens to send, by receiver
    places: Tensor  # [.] int64: rows of this rank's halos [slots · width] that received tokens fill, by sender
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
