"""Which rank computes which queries, where any rank can compute any, what they see, and what travels for that.

Fragments alone leave the work uneven: with one document on W contiguous ranks, the last rank has 2W−1 times the
query-key pairs of the first. So ranks with too many pairs give queries away: the last queries of the documents with the
most keys, because these take the most pairs along per query, in few and long runs. They give away no more than pays:
with short documents, rows that travel soon take longer than the pairs that they bring. The result depends only on
documents and fragments, so all ranks agree.

A *span* is a run of queries of one document with its keys: the document up to the run's end or, without the causal
mask, the whole document. A rank's spans are its entries, without the queries that others compute, followed by the
queries that it computes for others. The rest follows from the spans: which rows of q travel and
come back as rows of o, and which rows of K|V a rank needs from which other rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.fragments import Cut, Fragments
from titan_linear.ops.layout.nodes import Nodes
from titan_linear.ops.layout.tables import OnHost, table, two_or_more

# --- Which rank computes which queries -------------------------------------------------------------------------------

# Pairs of a rank over the mean of all ranks: a rank above `gives` gives queries away until it is down to that, and no
# rank takes queries beyond `gives` + MARGIN. The degrees that are compared:
DEGREES = (1.02, 1.1, 1.2, 1.4)
MARGIN = 0.02
# The pairs that are computed while a row travels, of K|V or of q and o: with 32 heads on four H200s the times of six
# streams, each evened out to four degrees, fit 3,150 in forward, 3,450 in forward and backward (docs/experiments.md).
PAIRS_PER_ROW = 3300
TILE = 128  # query rows that the tiled kernel takes at a time


class Runs(NamedTuple):
    """Runs of queries, each within one document, of all ranks, in global tokens: [N] int64."""

    start: ndarray
    end: ndarray
    # the first token of the document; of a node, as many earlier as there are above it
    first: ndarray
    last: ndarray  # the token after its last one
    owner: ndarray  # the rank whose fragment holds them
    rank: ndarray  # the rank that computes them

    def of(self, index: ndarray) -> Runs:
        return Runs(*(column[index] for column in self))

    def after(self, causal: bool) -> ndarray:
        """[N] the token after each run's keys."""
        return self.end if causal else self.last

    def pairs(self, causal: bool) -> ndarray:
        """[N] number of query-key pairs of each run."""
        return pairs_between(self.start, self.end, self.first, self.last, causal)


def pairs_between(start, end, first, last, causal: bool):
    """Number of query-key pairs of queries start to end in a document first to last; arguments may be arrays."""
    return (
        (end - start) * (start + end + 1 - 2 * first) // 2
        if causal
        else (end - start) * (last - first)
    )


def entries(cut: Cut) -> Runs:
    """The part of each document in each fragment, computed by its owner; in global order."""
    fragments, (documents, begins) = cut.fragments, cut.nodes.chains
    size = fragments[0].end
    cuts = np.arange(len(fragments)) * size
    at = np.searchsorted(documents, cuts)
    inside = np.flatnonzero(documents[at] != cuts)  # cuts that are no boundary of a document
    at = at[inside]
    edges = np.insert(documents, at, cuts[inside])
    document = np.insert(np.arange(len(documents)), at, at - 1)[:-1]
    owner = cut.owners[edges[:-1] // size]
    return Runs(edges[:-1], edges[1:], begins[document], documents[document + 1], owner, owner)


def balanced(runs: Runs, world_size: int, causal: bool, gives: float) -> Runs:
    """The runs, some of them cut in two or more, with ranks chosen so that none has many more than `gives` times the
    mean number of pairs."""
    loads = pairs_by_rank(runs, world_size, causal)
    by_owner = np.argsort(runs.owner, kind="stable")
    begins = np.searchsorted(runs.owner[by_owner], np.arange(world_size + 1))
    mean = loads.mean()
    keys_of_last = runs.after(causal) - runs.first
    most = gives * mean, (gives + MARGIN) * mean
    tile, moves = _tile(int(keys_of_last.max()), most[1] - mean), []
    for rank in np.argsort(-loads, kind="stable"):
        if loads[rank] > most[0]:
            own = by_owner[begins[rank] : begins[rank + 1]]
            longest_first = own[np.argsort(-keys_of_last[own], kind="stable")]
            moves += _given_away(runs, longest_first, loads, most, tile, causal)
    if not moves:
        return runs
    index, start, end, to = np.array(moves).T
    kept_end = runs.end.copy()
    np.minimum.at(kept_end, index, start)  # only tails of runs are given away
    moved = runs.of(index)._replace(start=start, end=end, rank=to)
    both = Runs(*(np.concatenate(x) for x in zip(runs._replace(end=kept_end), moved, strict=True)))
    return both.of(both.start < both.end)


def pairs_by_rank(runs: Runs, world_size: int, causal: bool) -> ndarray:
    """[W] number of pairs that each rank computes."""
    # float64 is exact below 2^53
    return np.bincount(runs.rank, runs.pairs(causal), world_size).astype(np.int64)


def _given_away(
    runs: Runs, own: ndarray, loads: ndarray, most: tuple[float, float], tile: int, causal: bool
) -> list[tuple[int, int, int, int]]:
    """The queries that a rank gives away: (run, start, end, receiver). Updates `loads` [W] in place.

    own: the numbers of the rank's runs, those with the most keys first. most: pairs that a giver keeps, that a rank has
    after it took some.
    """
    moves: list[tuple[int, int, int, int]] = []
    rank = runs.owner[own[0]]
    for i in own:
        start, end, first, last = (int(column[i]) for column in runs[:4])
        while start < end and (surplus := loads[rank] - most[0]) > 0:
            pairs = partial(pairs_between, end=end, first=first, last=last, causal=causal)
            to = int(loads.argmin())
            cut = _cut(range(start, end, tile), pairs, surplus, most[1] - loads[to])
            if cut is None:
                return moves  # not even one tile fits on any rank
            loads[rank] -= pairs(cut)
            loads[to] += pairs(cut)
            moves.append((i, cut, end, to))
            end = cut
        if start < end:
            return moves  # the surplus is cleared
    return moves


def _cut(cuts: range, pairs: Callable[[int], int], surplus: float, room: float) -> int | None:
    """Where the queries that are given away begin: as few as clear the surplus, or as many as fit into the room.
    None: not even those from the last cut on fit.

    pairs: number of pairs of the queries from a cut on."""

    def rising(cut: int) -> int:
        return -pairs(cut)

    cut = cuts[max(bisect_right(cuts, -surplus, key=rising) - 1, 0)]
    if pairs(cut) <= room:
        return cut
    fits = bisect_left(cuts, -room, key=rising)
    return cuts[fits] if fits < len(cuts) else None


def _tile(longest: int, room: float) -> int:
    """Number of queries that are given away together, so that those that stay end with a kernel's tile; smaller where a
    tile of the longest document has too many pairs for the room of a rank with the mean."""
    tile = TILE
    while tile > 1 and tile * longest > room:
        tile //= 2
    return tile


# --- What they see, and what travels ---------------------------------------------------------------------------------


# Keys are gathered where an exchange of only those needed would make some rank send or receive more than this share of
# what a gather does: a byte takes no longer in a gather than in an exchange, and a gather's one message goes to many.
GATHER_FROM = 0.5
# cuDNN's plans are for lengths that are multiples of this (ops/torch/attention_kernels.py)
CUDNN_MULTIPLE = 128
FEW = 4  # and for at most this many spans, or twice as many in prefix trees


class Spans(NamedTuple):
    """Queries of a packed stream and the keys that they see: span i has rows q[i] to q[i+1] of the queries, rows k[i]
    to k[i+1] of the keys, and none is empty. The host reads copies of its own, so as not to wait for the device."""

    q: Tensor  # [N+1] int32
    k: Tensor  # [N+1] int32
    q_cpu: OnHost  # the same
    k_cpu: OnHost
    longest_q: OnHost  # [1] rows of the longest span
    longest_k: OnHost
    # [., 4] rows of queries, and of keys that all of them see, in prefix trees
    below: OnHost | None = None

    def tensors(self) -> list[Tensor]:
        return [table for table in self if table is not None]

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """For each span, the rows of its queries and those of its keys."""
        return zip(
            *([slice(a, b) for a, b in pairwise(x.tolist())] for x in (self.q_cpu, self.k_cpu)),
            strict=True,
        )

    def rectangles(self) -> Iterator[tuple[slice, slice]]:
        """Likewise, for `below`."""
        for a, b, c, d in [] if self.below is None else self.below.tolist():
            if a < b:
                yield slice(a, b), slice(c, d)

    def recur(self) -> bool:
        """Whether these lengths recur in every batch, as those of fragments do and those of documents do not."""
        if len(self.q_cpu) - 1 > (FEW if self.below is None else 2 * FEW):
            return False
        return not any(x % CUDNN_MULTIPLE for x in (*self.q_cpu.tolist(), *self.k_cpu.tolist()))

    def varlen(self) -> Varlen:
        return self.q, self.k, int(self.longest_q), int(self.longest_k)


Varlen = tuple[Tensor, Tensor, int, int]  # boundaries of q and of k, longest of q and of k


class QueryRoutes(NamedTuple):
    """Queries that other ranks compute: the rows of q that leave and arrive, and how o comes back."""

    # [T_local] int64: local rows of the spans, in their order, then those that leave, by receiver
    rows: Tensor
    leaving: OnHost  # [W] number of rows by receiver
    coming: OnHost  # [W] number of rows by sender; in the spans they follow this rank's own
    moves: OnHost  # [1] whether any rank gives queries away


class KeyRoutes(NamedTuple):
    """Where the keys of this rank's spans come from. Both lists are padded to two with empty ranges."""

    # [., 2] the spans' keys in order: ranges of rows, numbered local first, then received
    pieces: OnHost
    sent: OnHost  # [., 2] unless all are gathered: ranges of local rows that leave, by receiver
    leaving: OnHost  # [W] number of rows by receiver,
    coming: OnHost  # [W] and by sender, also where all are gathered
    # [1] NOTHING (the spans' keys are the local rows), SOME or ALL; the same on all ranks
    travel: OnHost


NOTHING, SOME, ALL = range(3)


class GatheredSpans(NamedTuple):
    """This rank's spans, and what travels for them."""

    spans: Spans
    queries: QueryRoutes
    keys: KeyRoutes
    pairs: OnHost  # [2, W] int64: query-key pairs of each rank's queries, and of those it computes


def gathered_spans(
    cut: Cut,
    rank: int,
    world_size: int,
    pairs_per_row: int = PAIRS_PER_ROW,
    *,
    causal: bool,
) -> GatheredSpans:
    """pairs_per_row: as in `build_cp_context`."""
    fragments, nodes = cut.fragments, cut.nodes
    own = entries(cut)
    blocks = _blocks(fragments, world_size)
    runs = evened(own, blocks, pairs_per_row, causal, nodes)
    first, after = runs.first, runs.after(causal)
    here = np.flatnonzero(runs.rank == rank)
    here = here[np.lexsort((runs.start[here], runs.owner[here], runs.owner[here] != rank))]
    needed = _needed(runs, causal, nodes)
    _, *keys = nodes.ranges(runs.start[here], after[here])
    q_lengths = (runs.end - runs.start)[here]
    k_lengths = (after - first)[here]
    q, k = (_bounds(lengths).astype(np.int32) for lengths in (q_lengths, k_lengths))
    longest = {"longest_q": q_lengths.max(keepdims=True), "longest_k": k_lengths.max(keepdims=True)}
    pairs = np.stack([pairs_by_rank(each, world_size, causal) for each in (own, runs)])
    return GatheredSpans(
        table(Spans, q=q, k=k, q_cpu=q, k_cpu=k, **longest),
        _query_routes(cut, runs, rank, world_size),
        _key_routes(cut, blocks, needed, rank, *keys),
        torch.from_numpy(pairs),
    )


def _query_routes(cut: Cut, runs: Runs, rank: int, world_size: int) -> QueryRoutes:
    mine = runs.of(np.flatnonzero(runs.owner == rank))
    mine = mine.of(np.lexsort((mine.start, mine.rank, mine.rank != rank)))
    lengths = mine.end - mine.start
    rows = np.repeat(cut.rows(mine.start) - _bounds(lengths)[:-1], lengths) + np.arange(
        lengths.sum()
    )
    moved = runs.rank != runs.owner
    leaving = mine.rank != rank
    coming = moved & (runs.rank == rank)
    return table(
        QueryRoutes,
        rows=rows,
        leaving=np.bincount(mine.rank[leaving], lengths[leaving], world_size).astype(np.int64),
        coming=np.bincount(runs.owner[coming], (runs.end - runs.start)[coming], world_size).astype(
            np.int64
        ),
        moves=np.array([moved.any()]),
    )


class _Needed(NamedTuple):
    """Keys that ranks need, each token once per rank: ranges of global tokens, [N] int64, sorted by `by`, `start`."""

    by: ndarray  # the rank that needs them
    start: ndarray
    end: ndarray

    def overlaps(self, blocks: ndarray) -> tuple[ndarray, ndarray]:
        """Start and end [N, slots] of each range's part of blocks [slots, 2] or [N, slots, 2]; end ≤ start: none."""
        return np.maximum(self.start[:, None], blocks[..., 0]), np.minimum(
            self.end[:, None], blocks[..., 1]
        )

    def traffic(self, blocks: ndarray) -> tuple[ndarray, ndarray]:
        """Number of rows [W] that each rank receives, and that it sends. blocks: [W, slots, 2], the ranks' tokens."""
        start, end = self.overlaps(blocks[self.by])
        own = np.maximum(end - start, 0).sum(1)
        # in all ranges, before each edge
        before = _sums_below(self.start, blocks) - _sums_below(self.end, blocks)
        own_of_rank = np.bincount(self.by, own, len(blocks))
        received = np.bincount(self.by, self.end - self.start, len(blocks)) - own_of_rank
        return received, np.diff(before).sum((1, 2)) - own_of_rank


def _sums_below(edges: ndarray, x: ndarray) -> ndarray:
    """Σ max(x − edge, 0) over edges, for each x."""
    edges = np.sort(edges)
    count = np.searchsorted(edges, x)
    return count * x - _bounds(edges)[count]


def _needed(runs: Runs, causal: bool, nodes: Nodes) -> _Needed:
    number, start, end = nodes.ranges(runs.start, runs.after(causal))
    return _Needed(*_union(runs.rank[number], start, end))


def _blocks(fragments: Fragments, world_size: int) -> ndarray:
    """[W, slots, 2] the ranks' tokens: start and end of each fragment."""
    owners = np.array([f.rank for f in fragments])
    size = fragments[0].end
    return np.argsort(owners, kind="stable").reshape(world_size, -1, 1) * size + [0, size]


def evened(own: Runs, blocks: ndarray, pairs_per_row: int, causal: bool, nodes: Nodes) -> Runs:
    """The runs, evened out to the degree with which the rank that takes longest is done first."""
    world_size = len(blocks)
    loads = pairs_by_rank(own, world_size, causal)
    candidates = [
        balanced(own, world_size, causal, gives)
        for gives in DEGREES
        if loads.max() > gives * loads.mean()
    ]

    def time(runs: Runs) -> int:
        """In pairs: the most that a rank computes, and the most rows of K|V and of queries that one sends or gets."""
        rows = _rows_of_busiest(runs, blocks, causal, nodes)
        return pairs_by_rank(runs, world_size, causal).max() + pairs_per_row * rows

    return min([own, *candidates], key=time)


def _rows_of_busiest(runs: Runs, blocks: ndarray, causal: bool, nodes: Nodes) -> int:
    world_size = len(blocks)
    moved = runs.of(np.flatnonzero(runs.rank != runs.owner))
    queries = [
        np.bincount(of, moved.end - moved.start, world_size) for of in (moved.owner, moved.rank)
    ]
    keys = _needed(runs, causal, nodes).traffic(blocks)
    return np.max(keys) + np.max(queries)


def _key_routes(
    cut: Cut, blocks: ndarray, needed: _Needed, rank: int, start: ndarray, end: ndarray
) -> KeyRoutes:
    """blocks: [W, slots, 2], the ranks' tokens; start, end: [.] key ranges of the rank's spans, in order."""
    world_size, slots, _ = blocks.shape
    fragments, owners = cut.fragments, cut.owners
    size = fragments[0].end
    tokens = slots * size
    received, sent = needed.traffic(blocks)
    # Where no document enters a fragment, the spans' keys are the rank's rows, each once and in order. A document that
    # goes on in the same rank's next fragment, as one across the middle of zig-zag does, needs no rows of other ranks,
    # but some of its rows are keys of two spans. In trees they always may be.
    apart = not cut.nodes.joined and not any(f.enters for f in fragments)
    travel = SOME if received.any() or not apart else NOTHING
    if travel and max(received.max(), sent.max()) > GATHER_FROM * (world_size - 1) * tokens:
        travel = ALL

    receiver, leave, leave_end = _leaving(needed, blocks[rank], rank)
    sender, come, come_end = _arriving(needed, owners, rank, size)
    _, n, first, after = _by_fragment(start, end, size)
    owner, row = owners[n], cut.rows(first)  # at its owner
    if travel == ALL:
        row += tokens + owner * tokens
    elif len(come):
        order = np.argsort(come)
        at = order[np.searchsorted(come[order], first, side="right") - 1]
        came = _bounds(come_end - come)[at] + first - come[at]
        row = np.where(owner == rank, row, tokens + came)
    leaving = np.bincount(receiver, leave_end - leave, world_size)
    coming = np.bincount(sender, come_end - come, world_size)
    every = tokens * (np.arange(world_size) != rank)
    return table(
        KeyRoutes,
        pieces=_joined(row, row + after - first, row < tokens),
        sent=_joined(leave, leave_end, receiver),
        leaving=every if travel == ALL else leaving.astype(np.int64),
        coming=every if travel == ALL else coming.astype(np.int64),
        travel=np.array([travel]),
    )


def _leaving(needed: _Needed, own: ndarray, rank: int) -> tuple[ndarray, ndarray, ndarray]:
    """Receiver, first row and row after the last of what other ranks need of this one, by receiver.

    own: [slots, 2] its tokens."""
    start, end = needed.overlaps(own)  # [N, slots]
    leaves = (start < end) & (needed.by != rank)[:, None]
    i, slot = np.nonzero(leaves)
    to_row = slot * (own[0, 1] - own[0, 0]) - own[slot, 0]
    return needed.by[i], start[leaves] + to_row, end[leaves] + to_row


def _arriving(
    needed: _Needed, owners: ndarray, rank: int, size: int
) -> tuple[ndarray, ndarray, ndarray]:
    """Sender, first token and token after the last of what this rank needs of others, by sender: as rows arrive."""
    mine = needed.by == rank
    _, n, start, end = _by_fragment(needed.start[mine], needed.end[mine], size)
    others = np.flatnonzero(owners[n] != rank)
    others = others[np.argsort(owners[n[others]], kind="stable")]
    return owners[n[others]], start[others], end[others]


def _bounds(lengths: ndarray) -> ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _by_fragment(start: ndarray, end: ndarray, size: int) -> tuple[ndarray, ...]:
    """Ranges of global tokens, cut at fragment edges: of each piece the index of its range and fragment, start, end."""
    first, after = start // size, -(-end // size)
    i = np.repeat(np.arange(len(start)), after - first)
    n = np.repeat(after - np.cumsum(after - first), after - first) + np.arange(len(i))
    return i, n, np.maximum(start[i], n * size), np.minimum(end[i], (n + 1) * size)


def _union(group: ndarray, start: ndarray, end: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """The union of each group's ranges, as disjoint ranges: group, start, end, sorted in this order."""
    apart = group * (int(end.max()) + 1)  # so that no range reaches those of the next group
    order = np.argsort(start + apart, kind="stable")
    group = group[order]
    a = start[order]
    reach = np.maximum.accumulate((end + apart)[order])
    new = np.flatnonzero(np.concatenate([[True], (a + apart[order])[1:] > reach[:-1]]))
    last = np.append(new[1:], len(a)) - 1
    return group[new], a[new], reach[last] - apart[order][last]


def _joined(start: ndarray, end: ndarray, group: ndarray) -> ndarray:
    """[., 2] ranges, adjacent ones of the same group joined into one; at least two, perhaps empty ones."""
    breaks = (start[1:] != end[:-1]) | (group[1:] != group[:-1])
    edge = np.ones(min(len(start), 1), dtype=bool)
    return two_or_more(np.stack([start[np.append(edge, breaks)], end[np.append(breaks, edge)]], 1))
