"""How keys travel to the ranks that need them; which ones, and for whose queries, is in test_attention_cp.py."""

import tracemalloc

import numpy as np
import pytest

from tests.ops.layout.documents import packed
from titan_linear.ops.layout.fragments import cut_streams
from titan_linear.ops.layout.spans import ALL, NOTHING, SOME, gathered_spans


@pytest.mark.parametrize("kind", ["one", "web", "mixed"])
@pytest.mark.parametrize("layout, degree", [("contiguous", 2 - 1 / 4), ("zigzag", 1)])
def test_ranks_compute_their_own_queries(kind, layout, degree):
    """All ranks count the same pairs. Of one document, the last rank of contiguous ones has most; zig-zag is even."""
    documents = packed(kind, 32768, 0)
    cut = cut_streams(documents, 1, 4, layout)
    plans = [gathered_spans(cut, rank, 4, causal=True) for rank in range(4)]
    assert all((plan.pairs == plans[0].pairs).all() for plan in plans)
    lengths = np.diff(documents)
    pairs = plans[0].pairs.numpy()
    assert pairs.sum() == (lengths * (lengths + 1) // 2).sum()
    assert all(plan.spans.q[-1] == 8192 for plan in plans)
    if kind == "one":
        assert pairs.max() / pairs.mean() == pytest.approx(degree, rel=1e-3)


def test_how_keys_travel():
    """Gathered where most of them are needed, else those that are; not at all where documents end at the cuts."""

    def travel(edges):
        documents = np.array(edges)
        cut = cut_streams(documents, 1, 4, "contiguous")
        found = {int(gathered_spans(cut, rank, 4, causal=True).keys.travel) for rank in range(4)}
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
