"""Spans of all-gather attention: which keys each rank's queries see, and which rows travel
between ranks.

A *span* is a run of queries of one document together with its keys: the document up to the
run's end or, without the causal mask, the complete document. A rank's spans are its
entries. They determine which rows of K|V the rank needs, and from which other ranks. The
result depends only on documents and fragments, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.fragments import Cut
from titan_linear.ops.layout.tables import OnHost, table, two_or_more

# --- The queries of each rank ----------------------------------------------------------------------------------------


class QueryRuns(NamedTuple):
    """Runs of queries of all ranks, each within one document, in global tokens: [N] int64."""

    start: ndarray
    end: ndarray
    # The document's first token. For a node it is as many tokens earlier as there are
    # tokens above the node.
    first: ndarray
    last: ndarray  # the token after the document's last one
    rank: ndarray  # the rank whose fragment holds them


def entries(cut: Cut) -> QueryRuns:
    """Cut documents at fragment boundaries. Returns the part of each document in each
    fragment, in global order."""
    documents, begins = cut.trees.chains
    size = cut.fragment_length
    cuts = np.arange(len(cut.fragments)) * size
    at = np.searchsorted(documents, cuts)
    inside = np.flatnonzero(documents[at] != cuts)  # cuts inside a document
    at = at[inside]
    edges = np.insert(documents, at, cuts[inside])
    # The document and the rank of each part.
    document = np.insert(np.arange(len(documents)), at, at - 1)[:-1]
    rank = cut.owners[edges[:-1] // size]
    return QueryRuns(edges[:-1], edges[1:], begins[document], documents[document + 1], rank)


def pairs_by_rank(runs: QueryRuns, world_size: int, causal: bool) -> ndarray:
    """Return the number of query-key pairs that each rank computes, [W] int64."""
    queries = runs.end - runs.start
    if causal:
        pairs = queries * (runs.start + runs.end + 1 - 2 * runs.first) // 2
    else:
        pairs = queries * (runs.last - runs.first)
    # float64 is exact below 2^53
    return np.bincount(runs.rank, pairs, world_size).astype(np.int64)


# --- Visible keys, and rows that travel ------------------------------------------------------------------------------


# Keys are gathered if an exchange of only the needed keys would make some rank send or
# receive more than this share of a gather's rows. A byte takes no longer in a gather than
# in an exchange, and a gather sends one message to many ranks.
GATHER_FROM = 0.5
# cuDNN's plans need lengths that are multiples of CUDNN_MULTIPLE
# (ops/torch/attention_kernels.py), and at most FEW spans, or twice as many in prefix trees.
CUDNN_MULTIPLE = 128
FEW = 4


class Spans(NamedTuple):
    """Queries of a packed stream and the keys that they see. Span i has rows q[i] to q[i+1]
    of the queries and rows k[i] to k[i+1] of the keys, and no span is empty. The host reads
    its own copies, so that it does not wait for the device."""

    q: Tensor  # [N+1] int32
    k: Tensor  # [N+1] int32
    q_cpu: OnHost  # host copies of q and k
    k_cpu: OnHost
    longest_q: OnHost  # [1] rows of the longest span
    longest_k: OnHost
    # [., 4] in prefix trees: ranges of query rows, and ranges of key rows that all these
    # queries see
    below: OnHost | None = None

    def tensors(self) -> list[Tensor]:
        return [table for table in self if table is not None]

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """Return the query rows and the key rows of each span."""
        queries = pairwise(self.q_cpu.tolist())
        keys = pairwise(self.k_cpu.tolist())
        for (a, b), (c, d) in zip(queries, keys, strict=True):
            yield slice(a, b), slice(c, d)

    def rectangles(self) -> Iterator[tuple[slice, slice]]:
        """Return the query rows and the key rows of each range in `below`."""
        for a, b, c, d in [] if self.below is None else self.below.tolist():
            if a < b:
                yield slice(a, b), slice(c, d)

    def recur(self) -> bool:
        """Return whether these lengths recur in every batch. Fragment lengths do, document
        lengths do not."""
        if len(self.q_cpu) - 1 > (FEW if self.below is None else 2 * FEW):
            return False
        return not any(x % CUDNN_MULTIPLE for x in (*self.q_cpu.tolist(), *self.k_cpu.tolist()))

    def varlen(self) -> Varlen:
        return self.q, self.k, int(self.longest_q), int(self.longest_k)


Varlen = tuple[Tensor, Tensor, int, int]  # boundaries of q and of k, longest of q and of k


class KeyRoutes(NamedTuple):
    """Sources of the keys of this rank's spans. Both lists of ranges are padded to two with
    empty ranges."""

    # [., 2] the spans' keys in order, as ranges of rows; local rows come first, then
    # received ones
    pieces: OnHost
    sent: OnHost  # [., 2] ranges of local rows to send, by receiver; unused with ALL
    leaving: OnHost  # [W] number of rows to send, by receiver
    coming: OnHost  # [W] number of rows to receive, by sender, with ALL too
    # [1] NOTHING (the spans' keys are the local rows), SOME or ALL; the same on all ranks
    travel: OnHost


NOTHING, SOME, ALL = range(3)


class GatheredSpans(NamedTuple):
    """This rank's spans, and the routes of their keys."""

    spans: Spans
    keys: KeyRoutes
    pairs: OnHost  # [W] int64: query-key pairs of each rank


def gathered_spans(cut: Cut, rank: int, world_size: int, *, causal: bool) -> GatheredSpans:
    """Plan all-gather attention for this rank."""
    runs = entries(cut)
    # The token after each run's keys, [N].
    after = runs.end if causal else runs.last
    # Global order, which is also the order of the rank's rows.
    here = np.flatnonzero(runs.rank == rank)
    q_lengths = (runs.end - runs.start)[here]
    k_lengths = (after - runs.first)[here]
    q, k = (_bounds(lengths).astype(np.int32) for lengths in (q_lengths, k_lengths))
    longest = {"longest_q": q_lengths.max(keepdims=True), "longest_k": k_lengths.max(keepdims=True)}
    # The keys that all ranks need determine what this rank sends. Its own keys determine
    # where each row of its spans comes from.
    number, start, end = cut.trees.ranges(runs.start, after)
    needed = _Needed(*_union(runs.rank[number], start, end))
    _, *keys = cut.trees.ranges(runs.start[here], after[here])
    return GatheredSpans(
        table(Spans, q=q, k=k, q_cpu=q, k_cpu=k, **longest),
        _key_routes(cut, _blocks(cut, world_size), needed, rank, *keys),
        torch.from_numpy(pairs_by_rank(runs, world_size, causal)),
    )


class _Needed(NamedTuple):
    """Keys that ranks need, each token once per rank, as ranges of global tokens: [N]
    int64, sorted by `by`, then `start`."""

    by: ndarray  # the rank that needs them
    start: ndarray
    end: ndarray

    def overlaps(self, blocks: ndarray) -> tuple[ndarray, ndarray]:
        """Return start and end [N, slots] of each range's overlap with blocks [slots, 2] or
        [N, slots, 2]. The overlap is empty where end ≤ start."""
        return np.maximum(self.start[:, None], blocks[..., 0]), np.minimum(
            self.end[:, None], blocks[..., 1]
        )

    def traffic(self, blocks: ndarray) -> tuple[ndarray, ndarray]:
        """Return the number of rows [W] that each rank receives, and that it sends.

        blocks: [W, slots, 2], the ranks' tokens.
        """
        start, end = self.overlaps(blocks[self.by])
        own = np.maximum(end - start, 0).sum(1)
        # Number of needed tokens, over all ranges, before each edge of the blocks.
        before = _sums_below(self.start, blocks) - _sums_below(self.end, blocks)
        own_of_rank = np.bincount(self.by, own, len(blocks))
        received = np.bincount(self.by, self.end - self.start, len(blocks)) - own_of_rank
        return received, np.diff(before).sum((1, 2)) - own_of_rank


def _sums_below(edges: ndarray, x: ndarray) -> ndarray:
    """Return Σ max(x − edge, 0) over edges, for each x."""
    edges = np.sort(edges)
    count = np.searchsorted(edges, x)
    return count * x - _bounds(edges)[count]


def _blocks(cut: Cut, world_size: int) -> ndarray:
    """Return the ranks' tokens [W, slots, 2]: start and end of each fragment."""
    size = cut.fragment_length
    return np.argsort(cut.owners, kind="stable").reshape(world_size, -1, 1) * size + [0, size]


def _key_routes(
    cut: Cut,
    blocks: ndarray,
    needed: _Needed,
    rank: int,
    start: ndarray,
    end: ndarray,
) -> KeyRoutes:
    """Plan how the keys of this rank's spans reach it.

    blocks: [W, slots, 2], the ranks' tokens. start, end: [.] key ranges of the rank's
    spans, in order.
    """
    world_size = len(blocks)
    owners = cut.owners
    size = cut.fragment_length
    tokens = cut.tokens
    received, sent = needed.traffic(blocks)
    # If no document enters a fragment, the spans' keys are the rank's rows, each once and
    # in order. A document may also continue in the same rank's next fragment, as across the
    # middle of zig-zag. It needs no rows of other ranks, but some of its rows are keys of
    # two spans. In trees any row may be a key of several spans.
    apart = not cut.trees.joined and not any(f.enters for f in cut.fragments)
    travel = SOME if received.any() or not apart else NOTHING
    if travel and max(received.max(), sent.max()) > GATHER_FROM * (world_size - 1) * tokens:
        travel = ALL

    # Ranges of rows to send, to receive, and of the spans' keys cut at fragments.
    receiver, leave, leave_end = _leaving(needed, blocks[rank], rank)
    sender, come, come_end = _arriving(needed, owners, rank, size)
    _, n, first, after = _by_fragment(start, end, size)
    owner, row = owners[n], cut.rows(first)  # rows among the owner's tokens
    # Number the received rows: gathered rows by rank, exchanged rows in order of arrival.
    if travel == ALL:
        row += tokens + owner * tokens
    elif len(come):
        order = np.argsort(come)
        at = order[np.searchsorted(come[order], first, side="right") - 1]
        came = _bounds(come_end - come)[at] + first - come[at]
        row = np.where(owner == rank, row, tokens + came)
    leaving = np.bincount(receiver, leave_end - leave, world_size)
    coming = np.bincount(sender, come_end - come, world_size)
    if travel == ALL:
        leaving = coming = tokens * (np.arange(world_size) != rank)
    return table(
        KeyRoutes,
        pieces=_joined(row, row + after - first, row < tokens),
        sent=_joined(leave, leave_end, receiver),
        leaving=leaving.astype(np.int64),
        coming=coming.astype(np.int64),
        travel=np.array([travel]),
    )


def _leaving(needed: _Needed, own: ndarray, rank: int) -> tuple[ndarray, ndarray, ndarray]:
    """Return the rows that other ranks need from this one, by receiver: receiver, first row
    and the row after the last.

    own: [slots, 2], this rank's tokens.
    """
    start, end = needed.overlaps(own)  # [N, slots]
    leaves = (start < end) & (needed.by != rank)[:, None]
    i, slot = np.nonzero(leaves)
    to_row = slot * (own[0, 1] - own[0, 0]) - own[slot, 0]
    return needed.by[i], start[leaves] + to_row, end[leaves] + to_row


def _arriving(
    needed: _Needed, owners: ndarray, rank: int, size: int
) -> tuple[ndarray, ndarray, ndarray]:
    """Return the tokens that this rank needs from others, in order of arrival (by sender):
    sender, first token and the token after the last."""
    mine = needed.by == rank
    _, n, start, end = _by_fragment(needed.start[mine], needed.end[mine], size)
    others = np.flatnonzero(owners[n] != rank)
    others = others[np.argsort(owners[n[others]], kind="stable")]
    return owners[n[others]], start[others], end[others]


def _bounds(lengths: ndarray) -> ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _by_fragment(start: ndarray, end: ndarray, size: int) -> tuple[ndarray, ...]:
    """Cut ranges of global tokens at fragment boundaries. Returns the index of each piece's
    range and of its fragment, and its start and end."""
    first = start // size
    after = -(-end // size)
    i = np.repeat(np.arange(len(start)), after - first)
    n = np.repeat(after - np.cumsum(after - first), after - first) + np.arange(len(i))
    return i, n, np.maximum(start[i], n * size), np.minimum(end[i], (n + 1) * size)


def _union(group: ndarray, start: ndarray, end: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Unite each group's ranges into disjoint ranges. Returns group, start and end, sorted
    in this order."""
    apart = group * (int(end.max()) + 1)  # keeps the groups' ranges apart
    order = np.argsort(start + apart, kind="stable")
    group = group[order]
    a = start[order]
    reach = np.maximum.accumulate((end + apart)[order])
    # A new range begins where the next start lies after everything so far.
    new = np.flatnonzero(np.concatenate([[True], (a + apart[order])[1:] > reach[:-1]]))
    last = np.append(new[1:], len(a)) - 1
    return group[new], a[new], reach[last] - apart[order][last]


def _joined(start: ndarray, end: ndarray, group: ndarray) -> ndarray:
    """Join adjacent ranges of the same group. Returns at least two ranges [., 2], which may
    be empty."""
    breaks = (start[1:] != end[:-1]) | (group[1:] != group[:-1])
    edge = np.ones(min(len(start), 1), dtype=bool)
    return two_or_more(np.stack([start[np.append(edge, breaks)], end[np.append(breaks, edge)]], 1))
