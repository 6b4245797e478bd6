"""Cuts of packed streams among ranks: fragments, their owners, and the tokens before them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.prefix_trees import PrefixTrees, checked_nodes
from titan_linear.ops.layout.tables import OnHost, table

LAYOUTS = "contiguous", "zigzag"


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
        """Whether a document continues into this fragment from the one before."""
        return self.head[0] < self.start

    @property
    def leaves(self) -> bool:
        """Whether a document continues into the next fragment."""
        return self.tail[1] > self.end

    @property
    def through(self) -> bool:
        """Whether one document enters, fills and leaves the fragment. Only then is M
        needed.
        """
        return self.head == self.tail and self.enters and self.leaves


# Fragments of all ranks in global order, unless stated otherwise.
Fragments = tuple[Fragment, ...]


# Not frozen: torch 2.11 would compile a guard for every number in a frozen dataclass.
@dataclass(eq=False)
class RankGroup:
    """The ranks that share streams, and this rank's place among them."""

    group: dist.ProcessGroup | None
    group_name: str  # name by which operators find the group; "" without a group
    rank: int
    world_size: int
    node_size: int  # ranks of the group per node


@dataclass(eq=False)
class Cut:
    """The cut of streams among ranks, which is the same on all ranks."""

    layout: str
    num_streams: int
    fragments: Fragments
    order: tuple[int, ...]  # each fragment's index in rank order, rank · slots + slot
    slots: int  # number of fragments per rank
    tokens: int  # number of tokens per rank, T_local
    stream_tokens: int  # number of tokens of all ranks, T
    trees: PrefixTrees  # the documents, without empty ones
    joined: bool  # `trees.joined` as a plain field for compiled code

    @property
    def documents(self) -> ndarray:
        """Global boundaries [N+1] int64."""
        return self.trees.edges

    @property
    def fragment_length(self) -> int:
        """Number of tokens of a fragment, which is the same for all."""
        return self.tokens // self.slots

    def rows(self, tokens: ndarray) -> ndarray:
        """Return the local rows of these stream tokens on their owners."""
        size = self.fragment_length
        return tokens + np.array([f.slot * size - f.start for f in self.fragments])[tokens // size]

    @property
    def owners(self) -> ndarray:
        """Rank of each fragment [fragments]."""
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
        documents: [N+1] int64, global boundaries without empty documents; the last is the
            total length of the streams.
        num_streams: number of streams of equal length; each is cut separately.
        parents: as in `build_cp_context`.

    Raises:
        ValueError: streams cannot be cut into equal blocks, or do not begin with a
            document; parents do not form trees.
    """
    # Check that the streams can be cut into equal blocks, and that each begins with a
    # document.
    trees = checked_nodes(documents, parents, num_streams)
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
    # Find the documents that hold the first and last token of each block.
    size = length // blocks
    blocks_per_rank = blocks // world_size
    starts = np.arange(num_streams * blocks) * size
    heads, tails = (
        np.searchsorted(documents, t, side="right") - 1 for t in (starts, starts + size - 1)
    )
    ends = (zip(documents[at].tolist(), documents[at + 1].tolist()) for at in (heads, tails))
    # Assign each block to its owner. In the zigzag layout the second half runs back to rank
    # 0.
    fragments = []
    for i, (start, head, tail) in enumerate(zip(starts.tolist(), *ends, strict=True)):
        stream, block = divmod(i, blocks)
        mirrored = block >= world_size  # only in the zigzag layout
        owner = 2 * world_size - 1 - block if mirrored else block
        fragments.append(
            Fragment(start, start + size, owner, stream * blocks_per_rank + mirrored, head, tail)
        )
    slots = num_streams * blocks_per_rank
    order = tuple(f.rank * slots + f.slot for f in fragments)
    return Cut(
        layout,
        num_streams,
        tuple(fragments),
        order,
        slots,
        slots * size,
        total,
        trees,
        trees.joined,
    )


def owned(fragments: Fragments, rank: int) -> Fragments:
    """Return the fragments of `rank` by slot, the order of its tokens in memory."""
    return tuple(sorted((f for f in fragments if f.rank == rank), key=lambda f: f.slot))


# --- The tokens before a fragment, which causal convolutions need -------------------------


class HaloRoutes(NamedTuple):
    """Tables of what this rank sends and receives.

    The shapes of the tables do not depend on the documents, except in prefix trees. Rows
    beyond the counts are padding.
    """

    rows: Tensor  # [.] int64: local tokens to send, by receiver
    # [.] int64: rows of this rank's halos [slots · width] for the received tokens, by
    # sender
    places: Tensor
    crosses: OnHost  # [1] whether a document crosses a cut, on any rank
    repeats: OnHost  # [1] whether a token may be sent more than once
    send_counts: OnHost  # [W] number of tokens for each receiver
    receive_counts: OnHost  # [W] number of tokens from each sender


def halo_routes(cut: Cut, rank: int, world_size: int, width: int) -> HaloRoutes:
    """Return routes of the `width` tokens before each fragment, or each entry of prefix
    trees.
    """
    # The tokens that have a halo: the first of each fragment, or in prefix trees of each
    # entry.
    trees = cut.trees
    size = cut.fragment_length
    tokens = np.arange(len(cut.fragments)) * size
    if trees.joined:
        tokens = trees.starts(size if world_size > 1 else None)
    owners = cut.owners[tokens // size]
    # Walk back `width` tokens from each of them, −1 where the document begins.
    before = np.empty((width, len(tokens)), dtype=np.int64)
    for n in range(width):
        before[n] = tokens = trees.before(tokens)
    # Each token found is sent by its owner, to a row of the receiver's halos.
    n, target = np.nonzero(before >= 0)
    token = before[n, target]
    source = cut.owners[token // size]
    to = owners[target]
    place = np.cumsum(owners == rank)[target] * width - n - 1
    leaving = np.stack([to, cut.rows(token)], 1)[source == rank]
    coming = np.stack([source, place], 1)[to == rank]
    # Group by rank, and pad the tables to a length that does not depend on the documents.
    most = cut.slots * width
    lengths = (len(leaving), len(coming)) if trees.joined else (most * max(width, 1), most)
    rows, send_counts = _by_rank(leaving, world_size, lengths[0])
    places, receive_counts = _by_rank(coming, world_size, lengths[1])
    return table(
        HaloRoutes,
        rows=rows,
        places=places,
        crosses=np.array([trees.joined or any(f.enters for f in cut.fragments)]),
        repeats=np.array([trees.joined or size < width]),
        send_counts=send_counts,
        receive_counts=receive_counts,
    )


def _by_rank(pairs: ndarray, world_size: int, length: int) -> tuple[ndarray, ndarray]:
    """Sort the numbers of pairs [., 2] (rank, number) by rank.

    Returns:
        the numbers, padded with zeros to `length`, and how many of them each rank has [W].
    """
    rank, number = pairs.T
    by_rank = np.zeros(length, dtype=np.int64)
    by_rank[: len(rank)] = number[np.argsort(rank, kind="stable")]
    return by_rank, np.bincount(rank, minlength=world_size)
