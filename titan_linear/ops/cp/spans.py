"""What a rank's queries see where keys can come from anywhere, and what travels for that.

A run of queries of one document and its keys (the document up to the run's end; without the causal mask the whole
document) are a *span*. A rank's are its entries, but for the queries that others compute, and then the queries that it
computes for others (ops/cp/balance.py). The rest follows: which rows of q travel and come back as rows of o, and which
rows of K|V a rank needs from whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan_linear.ops.cp.balance import Runs, balanced, entries, pairs_by_rank
from titan_linear.ops.cp.fragments import Fragment
from titan_linear.ops.torch.attention import Spans

# Keys are gathered where an exchange of those that are needed would send or receive, on some rank, more than this share
# of what a gather does: bytes of a gather take no longer than those of an exchange, and its one message goes to many.
GATHER_FROM = 0.5


class QueryRoutes(NamedTuple):
    """Queries that others compute: the rows of q that leave and come, and the way back of o."""

    rows: torch.Tensor  # [T_local] int64: local rows in the order of the spans, then those that leave, by receiver
    leaving: torch.Tensor  # [W] on the CPU, rows by receiver
    coming: torch.Tensor  # [W] on the CPU, rows by sender: after this rank's own, those of its spans
    moves: torch.Tensor  # [1] on the CPU: whether any rank gives queries away


class KeyRoutes(NamedTuple):
    """Where the keys of this rank's spans are from. On the CPU; both lists are padded with empty ranges to two."""

    pieces: torch.Tensor  # [., 2] the spans' keys, one after the other, as ranges of: rows here, then rows that came
    sent: torch.Tensor  # [., 2] where not all are gathered: ranges of rows here that leave, by receiver
    leaving: torch.Tensor  # [W] rows by receiver, and
    coming: torch.Tensor  # [W] by sender, where all are gathered too
    travel: torch.Tensor  # [1] NOTHING (and keys are rows as they lie), SOME or ALL; the same on all ranks


NOTHING, SOME, ALL = range(3)


class GatheredSpans(NamedTuple):
    """This rank's spans, and what travels for them."""

    spans: Spans
    queries: QueryRoutes
    keys: KeyRoutes
    pairs: torch.Tensor  # [2, W] int64 on the CPU: of query and key, of each rank's queries and of those it computes


def span_tables(
    fragments: Sequence[Fragment], documents: np.ndarray, rank: int, world_size: int, *, causal: bool
) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of a rank's `GatheredSpans`, by field and name; of `Spans` the boundaries of queries and keys.

    fragments: every rank's. documents: [N+1] int64 global boundaries.
    """
    own = entries(fragments, documents)
    runs = balanced(own, world_size, causal)
    first, after = runs.first, (runs.end if causal else runs.last)  # of their keys
    here = np.flatnonzero(runs.rank == rank)
    here = here[np.lexsort((runs.start[here], runs.owner[here], runs.owner[here] != rank))]
    needed = _Needed.all(fragments, runs.rank, first, after)
    return {
        "spans": {
            "q": _bounds((runs.end - runs.start)[here]).astype(np.int32),
            "k": _bounds((after - first)[here]).astype(np.int32),
        },
        "queries": _query_routes(fragments, runs, rank, world_size),
        "keys": _key_routes(fragments, needed, first[here], after[here], rank, world_size),
        "pairs": {"pairs": np.stack([pairs_by_rank(own, world_size, causal), pairs_by_rank(runs, world_size, causal)])},
    }


def _query_routes(fragments: Sequence[Fragment], runs: Runs, rank: int, world_size: int) -> dict[str, np.ndarray]:
    mine = runs.of(np.flatnonzero(runs.owner == rank))
    mine = mine.of(np.lexsort((mine.start, mine.rank, mine.rank != rank)))
    lengths, size = mine.end - mine.start, fragments[0].end
    local = mine.start + _offsets(fragments)[mine.start // size]
    rows = np.repeat(local - _bounds(lengths)[:-1], lengths) + np.arange(lengths.sum())
    moved = runs.rank != runs.owner
    leaving, coming = mine.rank != rank, moved & (runs.rank == rank)
    return {
        "rows": rows,
        "leaving": np.bincount(mine.rank[leaving], lengths[leaving], world_size).astype(np.int64),
        "coming": np.bincount(runs.owner[coming], (runs.end - runs.start)[coming], world_size).astype(np.int64),
        "moves": np.array([moved.any()]),
    }


class _Needed(NamedTuple):
    """Keys that ranks need of others, each token once: ranges of global tokens, [N] int64."""

    by: np.ndarray  # rank
    of: np.ndarray  # rank
    start: np.ndarray
    end: np.ndarray
    row: np.ndarray  # of the first, there

    @classmethod
    def all(cls, fragments: Sequence[Fragment], by: np.ndarray, start: np.ndarray, end: np.ndarray) -> _Needed:
        """In the order of `by` and `start`. by, start, end: [.] of every span's keys."""
        by, start, end = _union(by, start, end)
        i, n, start, end = _by_fragment(start, end, fragments[0].end)
        of = np.array([f.rank for f in fragments])[n]
        return cls(by[i], of, start, end, start + _offsets(fragments)[n])._where(by[i] != of)

    def _where(self, which: np.ndarray) -> _Needed:
        return _Needed(*(column[which] for column in self))

    def of_rank(self, rank: int) -> _Needed:
        """By receiver, which is how they lie in what it sends."""
        return self._where(self.of == rank)

    def by_rank(self, rank: int) -> _Needed:
        """By sender, which is how they come."""
        found = self._where(self.by == rank)
        return found._where(np.argsort(found.of, kind="stable"))

    def rows(self, world_size: int) -> np.ndarray:
        """[W, W] by receiver and sender."""
        counts = np.bincount(self.by * world_size + self.of, self.end - self.start, world_size**2)
        return counts.reshape(world_size, world_size).astype(np.int64)


def _key_routes(
    fragments: Sequence[Fragment], needed: _Needed, start: np.ndarray, end: np.ndarray, rank: int, world_size: int
) -> dict[str, np.ndarray]:
    """start, end: [.] the keys of the rank's spans, in order."""
    size, tokens = fragments[0].end, len(fragments) // world_size * fragments[0].end
    rows = needed.rows(world_size)
    # Where no document enters a fragment, spans' keys are the rank's rows, each once and in order. A document that goes
    # on in the same rank's next fragment, as one across the middle of zig-zag does, needs no other rank's rows, but has
    # some in two spans.
    travel = SOME if rows.any() or any(f.enters for f in fragments) else NOTHING
    if travel and max(rows.sum(0).max(), rows.sum(1).max()) > GATHER_FROM * (world_size - 1) * tokens:
        travel, rows = ALL, tokens * (1 - np.eye(world_size, dtype=np.int64))
    leave, come = needed.of_rank(rank), needed.by_rank(rank)

    _, n, first, after = _by_fragment(start, end, size)
    owner = np.array([f.rank for f in fragments])[n]
    row = first + _offsets(fragments)[n]  # at its owner
    if travel == ALL:
        row += tokens + owner * tokens
    elif len(come.by):
        order = np.argsort(come.start)
        at = order[np.searchsorted(come.start[order], first, side="right") - 1]
        came = _bounds(come.end - come.start)[at] + first - come.start[at]
        row = np.where(owner == rank, row, tokens + came)
    return {
        "pieces": _joined(row, row + after - first, row < tokens),
        "sent": _joined(leave.row, leave.row + leave.end - leave.start, leave.by),
        "leaving": rows[:, rank].copy(),
        "coming": rows[rank].copy(),
        "travel": np.array([travel]),
    }


def _offsets(fragments: Sequence[Fragment]) -> np.ndarray:
    """Of each fragment: its owner's local row − global token."""
    size = fragments[0].end
    return np.array([f.slot * size - f.start for f in fragments])


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _by_fragment(start: np.ndarray, end: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
    """Ranges of global tokens, cut where fragments are: the index of each one's range and fragment, its start, end."""
    first, after = start // size, -(-end // size)
    i = np.repeat(np.arange(len(start)), after - first)
    n = np.repeat(after - np.cumsum(after - first), after - first) + np.arange(len(i))
    return i, n, np.maximum(start[i], n * size), np.minimum(end[i], (n + 1) * size)


def _union(group: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ranges of each group without what they have in common: group, start, end, in this order."""
    apart = group * (int(end.max()) + 1)  # no range reaches the next group's
    order = np.argsort(start + apart, kind="stable")
    group, a, reach = group[order], start[order], np.maximum.accumulate((end + apart)[order])
    new = np.flatnonzero(np.concatenate([[True], (a + apart[order])[1:] > reach[:-1]]))
    last = np.append(new[1:], len(a)) - 1
    return group[new], a[new], reach[last] - apart[order][last]


def _joined(start: np.ndarray, end: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[., 2] ranges, one that follows on that before in the same group as one with it; padded with empty ones to two:
    torch.compile takes a size of one for a constant."""
    breaks = (start[1:] != end[:-1]) | (group[1:] != group[:-1])
    edge = np.ones(min(len(start), 1), dtype=bool)
    ranges = np.stack([start[np.append(edge, breaks)], end[np.append(breaks, edge)]], 1)
    return np.pad(ranges, ((0, max(2 - len(ranges), 0)), (0, 0)))
