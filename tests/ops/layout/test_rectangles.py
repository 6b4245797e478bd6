"""The ring's tables; that they cover each visible pair once is in test_attention_cp.py."""

import sys

import numpy as np
import pytest

from tests.ops.layout.documents import packed
from titan_linear.ops.layout.fragments import cut_streams, owned
from titan_linear.ops.layout.rectangles import Rectangle, _append, _rectangles, rectangles
from titan_linear.ops.layout.tables import padded


def searched(fragments, rank, world_size, causal):
    """`by_hop` as it is defined: keys are looked for in every fragment of every rank."""
    rows = []
    for hop in range(world_size):
        parts = []
        for q, (a, b) in _rectangles(owned(fragments, rank), causal):
            offset = 0
            for f in owned(fragments, (rank - hop) % world_size):
                kv = max(a, f.start) - f.start + offset, min(b, f.end) - f.start + offset
                offset += f.end - f.start
                if kv[0] < kv[1]:
                    _append(parts, Rectangle(q, kv))
        rows += [(hop, *q, *kv) for q, kv in parts]
    return padded(rows, 2 * len(fragments), 5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_tables_are_those_of_a_search_through_all_fragments(layout, causal):
    for seed, (kind, world_size, streams) in enumerate(
        [("web", 4, 3), ("mixed", 8, 2), ("one", 4, 2), ("web", 1, 2)]
    ):
        fragments = cut_streams(
            packed(kind, 4096, seed, streams), streams, world_size, layout
        ).fragments
        for rank in range(world_size):
            found = rectangles(fragments, rank, world_size, causal=causal).by_hop
            assert np.array_equal(found, searched(fragments, rank, world_size, causal))


def test_the_work_is_linear_in_streams():
    """Calls of Python's are counted: four times the streams are at most about four times the calls."""

    def calls(streams):
        count = 0

        def profile(_, event, __):
            nonlocal count
            count += event in ("call", "c_call")

        fragments = cut_streams(np.arange(streams + 1) * 64, streams, 4, "zigzag").fragments
        sys.setprofile(profile)
        try:
            rectangles(fragments, 1, 4, causal=True)
        finally:
            sys.setprofile(None)
        return count

    assert calls(64) < 5 * calls(16)
