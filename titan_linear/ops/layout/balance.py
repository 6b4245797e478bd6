"""Which rank computes which queries, where any rank can compute any: all get about the same number of query-key pairs.

Fragments alone leave the work uneven: with one document on W contiguous ranks, the last rank has 2W−1 times the pairs
of the first. So ranks with too many pairs give queries away: the last queries of the documents with the most keys,
because these take the most pairs along per query, in few and long runs. The result depends only on documents and
fragments, so all ranks agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from titan_linear.ops.layout.boundaries import distinct
from titan_linear.ops.layout.fragments import Fragment

# Pairs of a rank over the mean of all ranks: a rank above GIVES gives queries away until it is down to GIVES, and no
# rank takes queries beyond TAKES.
GIVES, TAKES = 1.02, 1.04
TILE = 128  # query rows that the tiled kernel takes at a time


class Runs(NamedTuple):
    """Runs of queries, each within one document, of all ranks, in global tokens: [N] int64."""

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray  # the first token of the document
    last: np.ndarray  # the token after its last one
    owner: np.ndarray  # the rank whose fragment holds them
    rank: np.ndarray  # the rank that computes them

    def of(self, index: np.ndarray) -> Runs:
        return Runs(*(column[index] for column in self))

    def pairs(self, causal: bool) -> np.ndarray:
        """[N] number of query-key pairs of each run."""
        return pairs_between(self.start, self.end, self.first, self.last, causal)


def pairs_between(start, end, first, last, causal: bool):
    """Number of query-key pairs of queries start to end in a document first to last; arguments may be arrays."""
    return (end - start) * (start + end + 1 - 2 * first) // 2 if causal else (end - start) * (last - first)


def entries(fragments: Sequence[Fragment], documents: np.ndarray) -> Runs:
    """The part of each document in each fragment, computed by its owner; in global order."""
    size = fragments[0].end
    edges = distinct(np.sort(np.concatenate([documents, np.arange(len(fragments)) * size])))
    start, document = edges[:-1], np.searchsorted(documents, edges[:-1], side="right") - 1
    owner = np.array([f.rank for f in fragments])[start // size]
    return Runs(start, edges[1:], documents[document], documents[document + 1], owner, owner)


def balanced(runs: Runs, world_size: int, causal: bool) -> Runs:
    """The runs, some of them cut in two or more, with ranks chosen so that all have about the same number of pairs."""
    loads = pairs_by_rank(runs, world_size, causal)
    by_owner = np.argsort(runs.owner, kind="stable")
    own = np.split(by_owner, np.cumsum(np.bincount(runs.owner, minlength=world_size))[:-1])
    mean, keys_of_last = loads.mean(), (runs.end if causal else runs.last) - runs.first
    tile, moves = _tile(int(keys_of_last.max()), mean), []
    for rank in np.argsort(-loads, kind="stable"):
        if loads[rank] > GIVES * mean:
            longest_first = own[rank][np.argsort(-keys_of_last[own[rank]], kind="stable")]
            moves += _given_away(runs.of(longest_first), longest_first, loads, mean, tile, causal)
    if not moves:
        return runs
    index, start, end, to = np.array(moves).T
    kept_end = runs.end.copy()
    np.minimum.at(kept_end, index, start)  # only tails of runs are given away
    moved = runs.of(index)._replace(start=start, end=end, rank=to)
    both = Runs(*(np.concatenate(x) for x in zip(runs._replace(end=kept_end), moved, strict=True)))
    return both.of(both.start < both.end)


def pairs_by_rank(runs: Runs, world_size: int, causal: bool) -> np.ndarray:
    """[W] number of pairs that each rank computes."""
    return np.bincount(runs.rank, runs.pairs(causal), world_size).astype(np.int64)  # float64 is exact below 2^53


def _given_away(
    own: Runs, index: np.ndarray, loads: np.ndarray, mean: float, tile: int, causal: bool
) -> list[tuple[int, int, int, int]]:
    """The queries that a rank gives away: (run, start, end, receiver). Updates `loads` [W] in place.

    own: the rank's runs, those with the most keys first; index: their numbers.
    """
    moves, rank = [], own.owner[0]
    for i, start, end, first, last in zip(index.tolist(), *(x.tolist() for x in own[:4]), strict=True):
        while start < end and (surplus := loads[rank] - GIVES * mean) > 0:
            pairs = partial(pairs_between, end=end, first=first, last=last, causal=causal)
            to = int(loads.argmin())
            cut = _cut(range(start, end, tile), pairs, surplus, TAKES * mean - loads[to])
            if cut is None:
                return moves  # not even one tile fits on any rank
            loads[[rank, to]] += -pairs(cut), pairs(cut)
            moves.append((i, cut, end, to))
            end = cut
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


def _tile(longest: int, mean: float) -> int:
    """Number of queries that are given away together, so that those that stay end with a kernel's tile; smaller where a
    tile of the longest document has too many pairs for the rank that has least, which is the mean or less."""
    tile = TILE
    while tile > 1 and tile * longest > (TAKES - 1) * mean:
        tile //= 2
    return tile
