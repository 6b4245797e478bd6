"""Tables of prefix trees (prefix_trees.py) that recurrences and attention read.

An entry is the part of a node in a fragment. Entries that others begin from are *points*.
If S enters a point, M S + S_ext leaves it. All states follow from the points' S_ext and M
by a fold along the paths (ops/exchange/tree_kcp.py). Points that have entries of other ranks
below them are *shared*: all ranks read their S_ext and M.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_linear.ops.layout.chains import STATE, STATE_AND_M
from titan_linear.ops.layout.prefix_trees import PrefixTrees
from titan_linear.ops.layout.spans import Spans
from titan_linear.ops.layout.tables import OnHost, table, two_or_more

# Largest number of nodes with others below them for which attention computes each rectangle
# separately; with more, it copies keys.
ONE_BY_ONE = 8


class PathTables(NamedTuple):
    """Tables of attention on a rank that has the whole stream.

    There is one span for each of `PrefixTrees.chains`. Its keys are its own tokens, with
    `Spans.below` for the keys above. If many nodes have others below them, the span's keys
    are copied from its path instead: `rows`.
    """

    spans: Spans
    rows: Tensor | None = None  # [.] int64: the token of each copied key
    order: Tensor | None = None  # [.] int64: indices that sort `rows`
    first: Tensor | None = None  # [T] int64: first index in `order` of each token


def paths_of(trees: PrefixTrees) -> PathTables:
    # Spans whose keys above them are a few rectangles.
    edges, begins = trees.chains
    below = trees.below(edges)
    copied = ()
    k = edges
    # Otherwise, copy the keys of each span's path.
    if below is None or len(below) > ONE_BY_ONE:
        below = np.zeros((0, 4), dtype=np.int64)
        k = np.append(0, np.cumsum(edges[1:] - begins))
        _, start, end = trees.ranges(edges[:-1], edges[1:])
        rows = np.concatenate([np.arange(*ends) for ends in zip(start, end)])
        order = np.argsort(rows, kind="stable")
        copied = rows, order, np.searchsorted(rows[order], np.arange(edges[-1]))
    longest = (np.diff(x).max(keepdims=True) for x in (edges, k))
    q = edges.astype(np.int32)
    k = k.astype(np.int32)
    spans = Spans(*map(torch.from_numpy, (q, k, q, k, *longest, two_or_more(below))))
    return PathTables(spans, *map(torch.from_numpy, copied))


class Listed(NamedTuple):
    """Entries whose boundary a rule computes, as in `Chains`."""

    entries: Tensor  # [.] int32
    wanted: Tensor  # [.] int32: NOTHING, STATE or STATE_AND_M
    slots: OnHost  # [., 2] entries and wanted


class Fold(NamedTuple):
    """Order in which states follow from each other.

    Rows are numbered: first the shared points, P for each rank, then this rank's points.
    """

    # [.] int64: rows of the points below other points, from the roots down, shared ones
    # first
    order: Tensor
    before: Tensor  # [.] int64: the row of the point above each of `order`
    counts: OnHost  # [levels] number of points in each level of `order`
    shared: OnHost  # [1] number of levels of shared points
    sent: Tensor  # [P] int64: this rank's shared points, padded to P
    above: Tensor  # [children] int64: the row of the point above each child
    points: Tensor  # [≥ 2] int64: rows of this rank's points
    starts: Tensor  # [≥ 2] int64: rows of the points from which this rank's entries start


class Tree(NamedTuple):
    """A rank's part in the recurrences of prefix trees.

    Lists have at least two entries; nothing is wanted of the padding.
    """

    points: Listed
    children: Listed  # entries below a point
    fold: Fold
    # [N+1] int32: the row in `fold.starts` that each entry starts from, −1: zeros
    starts: Tensor
    ends: Tensor  # [N+1] int32: each entry's number among the points, −1: not a point


def exchanged(tree: Tree) -> tuple[int, int]:
    """Return the number of points whose S_ext and M a rank sends to all, and of folds.

    There is one fold for each level of shared points, of which there are no more than
    points, and one for the rank's own points.
    """
    return len(tree.fold.sent), int(tree.fold.shared) + 1


def tree_of(trees: PrefixTrees, owners: np.ndarray, size: int, rank: int) -> Tree:
    """Build the tables of one rank.

    Args:
        owners: rank of each fragment of `size` tokens; a single rank has uncut nodes.
    """
    start = trees.starts(size if owners.any() else None)
    owner = owners[start // size]
    # The entry that each entry continues, or −1, and its level in the tree.
    before = np.searchsorted(start, trees.before(start), side="right") - 1
    E = len(before)
    W = int(owners.max()) + 1
    number, entry = PrefixTrees(np.append(start, trees.edges[-1]), before).on_paths(np.arange(E))
    level = np.bincount(number) - 1
    # Points have entries below them; shared points have entries of other ranks below them.
    point = np.isin(np.arange(E), before)
    shared = np.zeros(E, dtype=bool)
    shared[entry[owner[number] != owner[entry]]] = True
    mine, children = (np.flatnonzero(which & (owner == rank)) for which in (point, before >= 0))
    by_rank = [np.flatnonzero(shared & (owner == r)) for r in range(W)]
    # Number the rows: P shared points of each rank, then this rank's points.
    P = max(map(len, by_rank))
    row, slot = np.full((2, E), -1)
    slot[mine] = np.arange(len(mine))
    row[mine] = W * P + slot[mine]
    for r, sent in enumerate(by_rank):
        row[sent] = r * P + np.arange(len(sent))
    # Sort the points below others by level, shared ones first.
    below = np.flatnonzero((row >= 0) & (before >= 0))
    levels = level[below] + E * ~shared[below]
    below = below[np.argsort(levels, kind="stable")]
    # The states from which entries start, and the tables of this rank's entries.
    starts, start_of = np.unique(row[before[children]], return_inverse=True)
    local = np.cumsum(owner == rank) - 1
    of_entries = np.full((2, local[-1] + 2), -1, dtype=np.int32)
    of_entries[0, local[children]] = start_of
    of_entries[1, local[mine]] = slot[mine]
    own = slot[by_rank[rank]]
    sent = np.resize(own, P) if len(own) else np.zeros(P, dtype=np.int64)
    fold = table(
        Fold,
        order=row[below],
        before=row[before[below]],
        counts=np.unique(levels, return_counts=True)[1],
        shared=np.array([len(np.unique(levels[levels < E]))]),
        sent=sent,
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
