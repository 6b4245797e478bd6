"""How a packed stream is cut: fragments, their owners, and the documents at their two ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        return self.enters and self.leaves and self.head == self.tail


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
    bounds = documents.tolist()
    fragments = []
    for i, (start, head, tail) in enumerate(zip(starts.tolist(), heads.tolist(), tails.tolist(), strict=True)):
        stream, block = divmod(i, blocks)
        mirrored = block >= world_size  # only in the zigzag layout
        owner = 2 * world_size - 1 - block if mirrored else block
        ends = (bounds[head], bounds[head + 1]), (bounds[tail], bounds[tail + 1])
        fragments.append(Fragment(start, start + size, owner, stream * slots + mirrored, *ends))
    return tuple(fragments)


def owned(fragments: Sequence[Fragment], rank: int) -> tuple[Fragment, ...]:
    """The fragments of `rank` by slot: the order in which its tokens lie in memory."""
    return tuple(sorted((f for f in fragments if f.rank == rank), key=lambda f: f.slot))
