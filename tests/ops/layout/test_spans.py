"""Which queries move so that ranks have equal work, and how keys travel to who needs them; which ones, and whose
queries, is in test_attention_cp.py."""

import tracemalloc
from itertools import product

import numpy as np
import pytest

from tests.ops.layout.documents import packed
from titan_linear.ops.layout.fragments import cut_streams
from titan_linear.ops.layout.spans import (
    ALL,
    MARGIN,
    NOTHING,
    SOME,
    balanced,
    entries,
    gathered_spans,
)

GIVES = 1.02  # the least of the degrees


def work(runs, world_size, causal=True):
    """Pairs of the rank that has most over the mean."""
    pairs = np.bincount(runs.rank, runs.pairs(causal), world_size)
    return pairs.max() / pairs.mean()


def moved(runs):
    """The share of the queries that others compute."""
    lengths = runs.end - runs.start
    return lengths[runs.rank != runs.owner].sum() / lengths.sum()


@pytest.mark.parametrize("kind", ["one", "web", "mixed"])
def test_work_is_balanced(kind):
    for T, W, streams, layout in product(
        [32768, 131072], [4, 8, 16, 32, 64], [1, 4], ["contiguous", "zigzag"]
    ):
        for seed in range(1 if kind == "one" else 2):
            documents = packed(kind, T, seed, streams)
            own = entries(cut_streams(documents, streams, W, layout))
            runs = balanced(own, W, causal=True, gives=GIVES)
            assert work(runs, W) <= GIVES + MARGIN < 1.05, (T, W, streams, layout, seed)
            assert moved(runs) < 0.25
            if layout == "zigzag" and kind == "one":
                assert runs is own  # balanced as it is
            elif kind == "one":
                assert (
                    work(own, W) == pytest.approx(2 - 1 / W, rel=1e-3) and 0.13 < moved(runs) < 0.18
                )


def test_what_moves():
    """One document on four ranks: the end of the fragments of the last two, in tiles, to the first two."""
    documents = packed("one", 131072, 0)
    runs = balanced(
        entries(cut_streams(documents, 1, 4, "contiguous")), 4, causal=True, gives=GIVES
    )
    away = runs.of(np.flatnonzero(runs.rank != runs.owner))
    assert list(zip(away.owner, away.rank, away.end, strict=True)) == [
        (3, 0, 131072),
        (2, 1, 98304),
    ]
    assert not (away.start % 128).any()
    pairs, tile = np.bincount(runs.rank, runs.pairs(True)), 128 * 131072
    assert (pairs[2:] <= GIVES * pairs.mean()).all() and (
        pairs[2:] > GIVES * pairs.mean() - tile
    ).all()


@pytest.mark.parametrize("causal", [True, False])
def test_each_query_is_computed_once(causal):
    for seed, (W, layout) in enumerate(product([2, 8], ["contiguous", "zigzag"])):
        documents = packed("mixed", 16384, seed, 2)
        own = entries(cut_streams(documents, 2, W, layout))
        runs = balanced(own, W, causal, GIVES)
        runs = runs.of(np.argsort(runs.start))
        assert (
            runs.start[0] == 0 and runs.end[-1] == 32768 and (runs.end[:-1] == runs.start[1:]).all()
        )
        assert (runs.first <= runs.start).all() and (runs.end <= runs.last).all()
        assert runs.pairs(causal).sum() == own.pairs(causal).sum()


@pytest.mark.parametrize(
    "kind, T, degree",
    [
        ("one", 32768, 1.02),
        ("web", 32768, 1.38),
        ("web", 131072, 1.3),
        ("mixed", 32768, 1.26),
        ("mixed", 131072, 1.2),
    ],
)
def test_no_more_moves_than_pays(kind, T, degree):
    """On four GPUs (docs/experiments.md) these took least time: one document evened out, short ones left where they
    are, long ones among them in between."""
    documents = packed(kind, T, 0)
    cut = cut_streams(documents, 1, 4, "contiguous")
    counted = [gathered_spans(cut, rank, 4, causal=True).pairs.numpy() for rank in range(4)]
    assert all((pairs == counted[0]).all() for pairs in counted)  # all ranks agree
    own, computed = counted[0]
    assert computed.sum() == own.sum()
    assert computed.max() / own.mean() == pytest.approx(degree, abs=0.02)


def test_how_keys_travel():
    """Gathered where most of them are needed, else those that are; not at all where documents end at the cuts."""

    def travel(edges):
        documents = np.array(edges)
        cut = cut_streams(documents, 1, 4, "contiguous")
        found = {int(gathered_spans(cut, rank, 4, 0, causal=True).keys.travel) for rank in range(4)}
        assert len(found) == 1  # the same on all ranks
        return found.pop()

    assert travel([0, 4096]) == ALL
    assert travel([0, 1024, 2048, 3072, 4096]) == NOTHING
    assert travel([0, 512, 1000, 1536, 2100, 2500, 3072, 3600, 4096]) == SOME


def test_tables_of_many_ranks_stay_small():
    """What grows with the square of the ranks would be 8 MiB, in one table."""
    cut = cut_streams(np.array([0, 1 << 24]), 1, 1024, "zigzag")
    tracemalloc.start()
    gathered_spans(cut, 500, 1024, causal=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
