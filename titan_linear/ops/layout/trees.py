"""What recurrences and attention read of prefix trees (nodes.py).

Entries (parts of nodes in fragments) that others begin from are *points*: M S + S_ext leaves them if S enters. States
follow from those of all points by a fold along the paths (ops/exchange/trees.py). Points that have entries of other
ranks below them are *shared*: all ranks read their S_ext and M.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_linear.ops.layout.chains import STATE, STATE_AND_M
from titan_linear.ops.layout.nodes import Nodes
from titan_linear.ops.layout.spans import Spans
from titan_linear.ops.layout.tables import OnHost, table, two_or_more

# nodes at most that have others below them, for attention to take each by itself and copy no keys
ONE_BY_ONE = 8


class Paths(NamedTuple):
    """Attention where a rank has the whole stream: a span for each of `Nodes.chains`, whose keys are its own, with
    `Spans.below`, or if many nodes have others below them, are copied from its path: `rows`."""

    spans: Spans
    rows: Tensor | None = None  # [.] int64
    order: Tensor | None = None  # [.] int64, of these, by rows
    first: Tensor | None = None  # [T] int64: where in that order each row begins


def paths_of(nodes: Nodes) -> Paths:
    edges, begins = nodes.chains
    below, copied, k = nodes.below(edges), (), edges
    if below is None or len(below) > ONE_BY_ONE:
        below, k = np.zeros((0, 4), dtype=np.int64), np.append(0, np.cumsum(edges[1:] - begins))
        _, start, end = nodes.ranges(edges[:-1], edges[1:])
        rows = np.concatenate([np.arange(*ends) for ends in zip(start, end)])
        order = np.argsort(rows, kind="stable")
        copied = rows, order, np.searchsorted(rows[order], np.arange(edges[-1]))
    longest = (np.diff(x).max(keepdims=True) for x in (edges, k))
    q, k = (x.astype(np.int32) for x in (edges, k))
    spans = Spans(*map(torch.from_numpy, (q, k, q, k, *longest, two_or_more(below))))
    return Paths(spans, *map(torch.from_numpy, copied))


class Listed(NamedTuple):
    """Entries whose boundary a rule gives, as in `Chains`."""

    entries: Tensor  # [.] int32
    wanted: Tensor  # [.] int32: NOTHING, STATE or STATE_AND_M
    slots: OnHost  # [., 2] both


class Fold(NamedTuple):
    """The order in which states follow from each other. Rows are those of shared points, P for each rank, then those
    of this rank's points."""

    order: Tensor  # [.] int64: rows of points below others, from the roots down, shared ones first
    before: Tensor  # [.] int64: the row of the point above each
    counts: OnHost  # [levels] number of points in each level of `order`
    shared: OnHost  # [1] number of levels of shared points
    sent: Tensor  # [P] int64: this rank's points that are shared, and others up to P
    above: Tensor  # [children] int64: the row of the point above each child
    points: Tensor  # [≥ 2] int64: this rank's
    starts: Tensor  # [≥ 2] int64: those from which its entries start


class Tree(NamedTuple):
    """A rank's part in the recurrences of prefix trees. Lists have two entries at least, of which nothing is wanted."""

    points: Listed
    children: Listed  # entries below a point
    fold: Fold
    # [N+1] int32: the row among `fold.starts` that each entry starts from, −1: zeros
    starts: Tensor
    ends: Tensor  # [N+1] int32: the point that each entry is, −1: none


def exchanged(tree: Tree) -> tuple[int, int]:
    """How many points' S_ext and M a rank gives to all, and in how many folds states follow from them: one for each
    level of shared points, of which there are no more than these, and one of the rank's own."""
    return len(tree.fold.sent), int(tree.fold.shared) + 1


def tree_of(nodes: Nodes, owners: np.ndarray, size: int, rank: int) -> Tree:
    """owners: the rank of each fragment of `size` tokens; one rank has nodes whole."""
    start = nodes.starts(size if owners.any() else None)
    owner = owners[start // size]
    # the entry that each one continues, or −1
    before = np.searchsorted(start, nodes.before(start), side="right") - 1
    E, W = len(before), int(owners.max()) + 1
    number, entry = Nodes(np.append(start, nodes.edges[-1]), before).on_paths(np.arange(E))
    level = np.bincount(number) - 1
    point, shared = np.isin(np.arange(E), before), np.zeros(E, dtype=bool)
    shared[entry[owner[number] != owner[entry]]] = True
    mine, children = (np.flatnonzero(which & (owner == rank)) for which in (point, before >= 0))
    by_rank = [np.flatnonzero(shared & (owner == r)) for r in range(W)]
    P = max(map(len, by_rank))
    row, slot = np.full((2, E), -1)
    slot[mine] = np.arange(len(mine))
    row[mine] = W * P + slot[mine]
    for r, sent in enumerate(by_rank):
        row[sent] = r * P + np.arange(len(sent))
    below = np.flatnonzero((row >= 0) & (before >= 0))
    levels = level[below] + E * ~shared[below]
    below = below[np.argsort(levels, kind="stable")]
    starts, start_of = np.unique(row[before[children]], return_inverse=True)
    local = np.cumsum(owner == rank) - 1
    of_entries = np.full((2, local[-1] + 2), -1, dtype=np.int32)
    of_entries[0, local[children]] = start_of
    of_entries[1, local[mine]] = slot[mine]
    fold = table(
        Fold,
        order=row[below],
        before=row[before[below]],
        counts=np.unique(levels, return_counts=True)[1],
        shared=np.array([len(np.unique(levels[levels < E]))]),
        sent=np.resize(slot[by_rank[rank]], P)
        if len(by_rank[rank])
        else np.zeros(P, dtype=np.int64),
        above=row[before[children]],
        points=two_or_more(row[mine]),
        starts=two_or_more(starts),
    )
    points = _listed(local[mine], np.where(before[mine] >= 0, STATE_AND_M, STATE))
    return Tree(
        points,
        _listed(local[children], np.full(len(children), STATE)),
        fold,
        *map(torch.from_numpy, of_entries),
    )


def _listed(entries: np.ndarray, wanted: np.ndarray) -> Listed:
    slots = two_or_more(np.stack([entries, wanted], 1).astype(np.int32))
    return table(Listed, entries=slots[:, 0], wanted=slots[:, 1], slots=slots)
