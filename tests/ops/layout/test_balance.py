"""Which queries move so that ranks have equal work."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.ops.layout.documents import packed
from titan_linear.ops.layout.fragments import cut
from titan_linear.ops.layout.spans import GIVES, TAKES, Runs, balanced, entries


def work(runs: Runs, world_size: int, causal: bool = True) -> float:
    """Pairs of the rank that has most over the mean."""
    pairs = np.bincount(runs.rank, runs.pairs(causal), world_size)
    return pairs.max() / pairs.mean()


def moved(runs: Runs) -> float:
    """The share of the queries that others compute."""
    lengths = runs.end - runs.start
    return lengths[runs.rank != runs.owner].sum() / lengths.sum()


@pytest.mark.parametrize("kind", ["one", "web", "mixed"])
def test_work_is_balanced(kind: str) -> None:
    for T, W, streams, layout in product([32768, 131072], [4, 8, 16, 32, 64], [1, 4], ["contiguous", "zigzag"]):
        for seed in range(1 if kind == "one" else 2):
            documents = packed(kind, T, seed, streams)
            own = entries(cut(documents, streams, W, layout), documents)
            runs = balanced(own, W, causal=True)
            assert work(runs, W) <= TAKES < 1.05, (T, W, streams, layout, seed)
            assert moved(runs) < 0.25
            if layout == "zigzag" and kind == "one":
                assert runs is own  # balanced as it is
            elif kind == "one":
                assert work(own, W) == pytest.approx(2 - 1 / W, rel=1e-3) and 0.13 < moved(runs) < 0.18


def test_what_moves() -> None:
    """One document on four ranks: the end of the fragments of the last two, in tiles, to the first two."""
    documents = packed("one", 131072, 0)
    runs = balanced(entries(cut(documents, 1, 4, "contiguous"), documents), 4, causal=True)
    away = runs.of(np.flatnonzero(runs.rank != runs.owner))
    assert list(zip(away.owner, away.rank, away.end, strict=True)) == [(3, 0, 131072), (2, 1, 98304)]
    assert not (away.start % 128).any()
    pairs, tile = np.bincount(runs.rank, runs.pairs(True)), 128 * 131072
    assert (pairs[2:] <= GIVES * pairs.mean()).all() and (pairs[2:] > GIVES * pairs.mean() - tile).all()


@pytest.mark.parametrize("causal", [True, False])
def test_each_query_is_computed_once(causal: bool) -> None:
    for seed, (W, layout) in enumerate(product([2, 8], ["contiguous", "zigzag"])):
        documents = packed("mixed", 16384, seed, 2)
        own = entries(cut(documents, 2, W, layout), documents)
        runs = balanced(own, W, causal)
        runs = runs.of(np.argsort(runs.start))
        assert runs.start[0] == 0 and runs.end[-1] == 32768 and (runs.end[:-1] == runs.start[1:]).all()
        assert (runs.first <= runs.start).all() and (runs.end <= runs.last).all()
        assert runs.pairs(causal).sum() == own.pairs(causal).sum()
