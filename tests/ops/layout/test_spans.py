"""How keys travel to who needs them; which ones, and whose queries, is in test_attention_cp.py."""

from __future__ import annotations

import tracemalloc

import numpy as np

from titan_linear.ops.layout.fragments import cut
from titan_linear.ops.layout.spans import ALL, NOTHING, SOME, span_tables


def test_how_keys_travel() -> None:
    """Gathered where most of them are needed, else those that are; not at all where documents end at the cuts."""

    def travel(edges: list[int]) -> int:
        documents = np.array(edges)
        found = {
            int(
                span_tables(cut(documents, 1, 4, "contiguous"), documents, rank, 4, causal=True)["keys"][1]["travel"][0]
            )
            for rank in range(4)
        }
        assert len(found) == 1  # the same on all ranks
        return found.pop()

    assert travel([0, 4096]) == ALL
    assert travel([0, 1024, 2048, 3072, 4096]) == NOTHING
    assert travel([0, 512, 1000, 1536, 2100, 2500, 3072, 3600, 4096]) == SOME


def test_tables_of_many_ranks_stay_small() -> None:
    """What grows with the square of the ranks would be 8 MiB, in one table."""
    fragments = cut(np.array([0, 1 << 24]), 1, 1024, "zigzag")
    tracemalloc.start()
    span_tables(fragments, np.array([0, 1 << 24]), 500, 1024, causal=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
