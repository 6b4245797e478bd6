"""Which ranks share packed streams and how these are cut: fragments, their owners, the documents at their two ends, the
tokens before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.nodes import Nodes, checked_nodes
from titan_linear.ops.layout.tables import OnHost, table

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


Fragments = tuple[Fragment, ...]  # every rank's, in global order, unless others are named


@dataclass(eq=False)  # not frozen: torch 2.11 would then compile a guard for every number in it
class RankGroup:
    """The ranks that share streams, and this one among them."""

    group: dist.ProcessGroup | None
    group_name: str  # by which operators find it; "" without a group
    rank: int
    world_size: int
    node_size: int  # ranks of the group per node


@dataclass(eq=False)
class Cut:
    """How streams are cut among ranks; the same on all of them."""

    layout: str
    num_streams: int
    fragments: Fragments
    order: tuple[int, ...]  # index of each fragment in rank order, rank · slots + slot
    slots: int  # number of fragments per rank
    tokens: int  # number of tokens per rank, T_local
    stream_tokens: int  # and of all ranks, T
    nodes: Nodes  # the documents, without empty ones
    joined: bool  # `nodes.joined`, as compiled code reads it

    @property
    def documents(self) -> ndarray:
        """[N+1] int64, global boundaries."""
        return self.nodes.edges

    def rows(self, tokens: ndarray) -> ndarray:
        """The local rows that tokens of the stream have at their owners."""
        size = self.fragments[0].end
        return tokens + np.array([f.slot * size - f.start for f in self.fragments])[tokens // size]

    @property
    def owners(self) -> ndarray:
        """[fragments] their ranks."""
        return np.array([f.rank for f in self.fragments])


def cut_streams(
    documents: ndarray,
    num_streams: int,
    world_size: int,
    layout: str,
    parents: Tensor | None = None,
) -> Cut:
    """Cut streams into fragments.

    Args:
        documents: [N+1] int64, global boundaries without empty documents; the last is the total length of the streams.
        num_streams: number of streams, of equal length; each is cut by itself.
        parents: as in `build_cp_context`.

    Raises:
        ValueError: streams that cannot be cut into equal blocks, or that do not begin with a document; parents that are
            no trees.
    """
    nodes = checked_nodes(documents, parents, num_streams)
    total = int(documents[-1])
    length = total // num_streams
    blocks = world_size * (2 if layout == "zigzag" else 1)
    if total % num_streams or length % blocks:
        raise ValueError(
            f"cu_seqlens ends at {total}: these tokens cannot be cut into num_streams = {num_streams} streams of "
            f"{blocks} equal blocks ({layout} layout on {world_size} ranks); pad each stream to a multiple of {blocks}"
        )
    begins = np.arange(1, num_streams) * length
    for i in np.flatnonzero(documents[np.searchsorted(documents, begins)] != begins):
        raise ValueError(
            f"num_streams = {num_streams}: stream {i + 1} must begin a document in cu_seqlens"
        )
    size, slots = length // blocks, blocks // world_size
    starts = np.arange(num_streams * blocks) * size
    heads, tails = (
        np.searchsorted(documents, t, side="right") - 1 for t in (starts, starts + size - 1)
    )
    ends = (zip(documents[at].tolist(), documents[at + 1].tolist()) for at in (heads, tails))
    fragments = []
    for i, (start, head, tail) in enumerate(zip(starts.tolist(), *ends, strict=True)):
        stream, block = divmod(i, blocks)
        mirrored = block >= world_size  # only in the zigzag layout
        owner = 2 * world_size - 1 - block if mirrored else block
        fragments.append(
            Fragment(start, start + size, owner, stream * slots + mirrored, head, tail)
        )
    slots *= num_streams
    order = tuple(f.rank * slots + f.slot for f in fragments)
    return Cut(
        layout,
        num_streams,
        tuple(fragments),
        order,
        slots,
        slots * size,
        total,
        nodes,
        nodes.joined,
    )


def owned(fragments: Fragments, rank: int) -> Fragments:
    """The fragments of `rank` by slot: the order in which its tokens lie in memory."""
    return tuple(sorted((f for f in fragments if f.rank == rank), key=lambda f: f.slot))


# --- The tokens before a fragment, which causal convolutions need ----------------------------------------------------


class HaloRoutes(NamedTuple):
    """What this rank sends and receives. The shapes of the tables do not depend on the documents; rows beyond the
    counts are padding."""

    rows: Tensor  # [.] int64: local tokens to send, by receiver
    # [.] int64: rows of this rank's halos [slots · width] that received tokens fill, by sender
    places: Tensor
    crosses: OnHost  # [1] whether a document crosses a cut, on any rank
    repeats: OnHost  # [1] whether a token may be sent more than once
    send_counts: OnHost  # [W] number of tokens for each receiver
    receive_counts: OnHost  # [W] and from each sender


def halo_routes(cut: Cut, rank: int, world_size: int, width: int) -> HaloRoutes:
    """Routes of the `width` tokens before each fragment; in prefix trees, before each entry."""
    nodes, size = cut.nodes, cut.fragments[0].end
    tokens = np.arange(len(cut.fragments)) * size
    if nodes.joined:
        tokens = nodes.starts(size if world_size > 1 else None)
    owners = cut.owners[tokens // size]
    before = np.empty((width, len(tokens)), dtype=np.int64)
    for n in range(width):
        before[n] = tokens = nodes.before(tokens)
    n, target = np.nonzero(before >= 0)
    token = before[n, target]
    source, to = cut.owners[token // size], owners[target]
    place = np.cumsum(owners == rank)[target] * width - n - 1
    leaving, coming = (
        np.stack([to, cut.rows(token)], 1)[source == rank],
        np.stack([source, place], 1)[to == rank],
    )
    most = cut.slots * width
    lengths = (len(leaving), len(coming)) if nodes.joined else (most * max(width, 1), most)
    rows, send_counts = _by_rank(leaving, world_size, lengths[0])
    places, receive_counts = _by_rank(coming, world_size, lengths[1])
    return table(
        HaloRoutes,
        rows=rows,
        places=places,
        crosses=np.array([nodes.joined or any(f.enters for f in cut.fragments)]),
        repeats=np.array([nodes.joined or size < width]),
        send_counts=send_counts,
        receive_counts=receive_counts,
    )


def _by_rank(pairs: ndarray, world_size: int, length: int) -> tuple[ndarray, ndarray]:
    """[., 2] (rank, number) -> the numbers by rank, with zeros up to `length`, and how many each rank has [W]."""
    rank, number = pairs.T
    by_rank = np.zeros(length, dtype=np.int64)
    by_rank[: len(rank)] = number[np.argsort(rank, kind="stable")]
    return by_rank, np.bincount(rank, minlength=world_size)
