"""Who computes which queries, where any rank can compute any: as many pairs of query and key as the others.

Cut into fragments, work is uneven: of one document the last of W contiguous ranks has 2W−1 times the first one's.
So ranks that have more than others give queries away: the last ones of the documents with most keys, which are the
fewest for the pairs that they take along, in few and long runs. A function of documents and fragments: all ranks agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from titan_linear.ops.cp.fragments import Fragment
from titan_linear.ops.torch.attention import TILE

# Pairs of a rank over the mean of all: who has more than the first gives queries away until it has no more than that,
# and nobody takes more than up to the second.
GIVES, TAKES = 1.02, 1.04


class Runs(NamedTuple):
    """Of queries of one document each, of all ranks, in global tokens: [N] int64."""

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray  # token of the document
    last: np.ndarray  # after its last token
    owner: np.ndarray  # rank
    rank: np.ndarray  # that computes them

    def of(self, index: np.ndarray) -> Runs:
        return Runs(*(column[index] for column in self))

    def pairs(self, causal: bool) -> np.ndarray:
        """[N] of query and key."""
        return pairs_between(self.start, self.end, self.first, self.last, causal)


def pairs_between(start, end, first, last, causal: bool):
    """Pairs that queries start to end of a document first to last have, as numbers or arrays of them."""
    return (end - start) * (start + end + 1 - 2 * first) // 2 if causal else (end - start) * (last - first)


def entries(fragments: Sequence[Fragment], documents: np.ndarray) -> Runs:
    """Each document's part of each fragment, computed where it lies; in global order."""
    size = fragments[0].end
    edges = np.union1d(documents, np.arange(len(fragments) + 1) * size)
    start, document = edges[:-1], np.searchsorted(documents, edges[:-1], side="right") - 1
    owner = np.array([f.rank for f in fragments])[start // size]
    return Runs(start, edges[1:], documents[document], documents[document + 1], owner, owner)


def balanced(runs: Runs, world_size: int, causal: bool) -> Runs:
    """The runs, some of them cut in two or more, with ranks that have about as many pairs each."""
    loads = pairs_by_rank(runs, world_size, causal)
    moves = [move for rank in np.argsort(-loads, kind="stable") for move in _given_away(runs, rank, loads, causal)]
    if not moves:
        return runs
    index, start, end, to = np.array(moves).T
    kept_end = runs.end.copy()
    np.minimum.at(kept_end, index, start)  # what is given away are tails
    moved = runs.of(index)._replace(start=start, end=end, rank=to)
    both = Runs(*(np.concatenate(x) for x in zip(runs._replace(end=kept_end), moved, strict=True)))
    return both.of(both.start < both.end)


def pairs_by_rank(runs: Runs, world_size: int, causal: bool) -> np.ndarray:
    """[W] pairs that each rank computes."""
    return np.bincount(runs.rank, runs.pairs(causal), world_size).astype(np.int64)  # float64 is exact below 2^53


def _given_away(runs: Runs, rank: int, loads: np.ndarray, causal: bool) -> list[tuple[int, int, int, int]]:
    """What a rank gives away: (run, start, end, to whom); `loads` [W] change with it."""
    moves, mean = [], loads.mean()
    if loads[rank] <= GIVES * mean:
        return moves
    own = np.flatnonzero(runs.owner == rank)
    keys_of_last = (runs.end if causal else runs.last) - runs.first
    tile = _tile(int(keys_of_last.max()), mean)
    for i in own[np.argsort(-keys_of_last[own], kind="stable")]:
        start, end, first, last = (int(x[i]) for x in runs[:4])
        while start < end and (surplus := loads[rank] - GIVES * mean) > 0:
            pairs = partial(pairs_between, end=end, first=first, last=last, causal=causal)
            to = int(loads.argmin())
            cut = _cut(range(start, end, tile), pairs, surplus, TAKES * mean - loads[to])
            if cut is None:
                return moves  # not even a tile fits anywhere
            loads[[rank, to]] += -pairs(cut), pairs(cut)
            moves.append((i, cut, end, to))
            end = cut
    return moves


def _cut(cuts: range, pairs: Callable[[int], int], surplus: float, room: float) -> int | None:
    """From where on queries are given away: as few as clear the surplus, or as fit; None: not even the last ones do.

    pairs: of the queries from a cut on."""

    def rising(cut: int) -> int:
        return -pairs(cut)

    cut = cuts[max(bisect_right(cuts, -surplus, key=rising) - 1, 0)]
    if pairs(cut) <= room:
        return cut
    fits = bisect_left(cuts, -room, key=rising)
    return cuts[fits] if fits < len(cuts) else None


def _tile(longest: int, mean: float) -> int:
    """Queries that are given away together, so that what stays ends with a kernel's tile; fewer where those of the
    longest document would be too many for whoever has least, the mean or less."""
    tile = TILE
    while tile > 1 and tile * longest > (TAKES - 1) * mean:
        tile //= 2
    return tile
