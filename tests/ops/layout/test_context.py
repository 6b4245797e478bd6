"""The table of who owns what, against the definition."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.ops.inputs import boundaries, tokens_of
from tests.ops.layout.documents import EDGES
from tests.refusals import refused
from titan_linear.ops import build_cp_context


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_fragments_positions_and_entries(lengths, world_size, layout):
    cu = boundaries(lengths)
    position = torch.cat([torch.arange(n) for n in lengths])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size, seen = 512 // world_size, []
    for rank in range(world_size):
        ctx = build_cp_context(cu, rank=rank, world_size=world_size, layout=layout)
        if layout == "contiguous":
            assert ctx.fragments == ((rank * size, (rank + 1) * size),)
        else:
            a, b, half = rank, 2 * world_size - 1 - rank, size // 2
            assert ctx.fragments == ((a * half, (a + 1) * half), (b * half, (b + 1) * half))
        tokens = tokens_of(ctx)
        assert torch.equal(ctx.position_ids, position[tokens])
        edges = {
            0,
            *(i for i in range(1, size) if document[tokens[i]] != document[tokens[i - 1]]),
            size,
        }
        starts = range(0, size + 1, size // ctx.cut.slots)
        edges |= set(starts)
        assert ctx.cu_seqlens.dtype == torch.int32 and ctx.cu_seqlens.tolist() == sorted(edges)
        firsts, lasts = (
            ctx.tables.reverse_chains.entries.tolist(),
            ctx.tables.forward_chains.entries.tolist(),
        )
        for first, last, (start, end) in zip(firsts, lasts, pairwise(starts), strict=True):
            assert (ctx.cu_seqlens[first], ctx.cu_seqlens[last + 1]) == (start, end)
        N = len(ctx.cu_seqlens) - 1
        assert ctx.tables.forward_chains.entry_slots.tolist() == [
            firsts.index(n) if n in firsts and ctx.own_fragments[firsts.index(n)].enters else -1
            for n in range(N + 1)
        ]
        assert ctx.tables.reverse_chains.entry_slots.tolist() == [
            lasts.index(n) if n in lasts and ctx.own_fragments[lasts.index(n)].leaves else -1
            for n in range(N + 1)
        ]
        for f in ctx.own_fragments:
            assert f.enters == (f.start > 0 and document[f.start] == document[f.start - 1])
            assert f.leaves == (f.end < 512 and document[f.end] == document[f.end - 1])
            assert f.through == (f.enters and f.leaves and document[f.start] == document[f.end - 1])
        if layout == "contiguous":
            owners_first = {t // size for t in range(512) if document[t] == document[rank * size]}
            owners_last = {
                t // size for t in range(512) if document[t] == document[(rank + 1) * size - 1]
            }
            assert (ctx.is_first_rank, ctx.pre_num_ranks) == (
                rank == min(owners_first),
                rank - min(owners_first),
            )
            assert (ctx.is_last_rank, ctx.post_num_ranks) == (
                rank == max(owners_last),
                max(owners_last) - rank,
            )
            assert ctx.pre_num_conv_tokens == int(position[rank * size])
        else:
            assert ctx.is_first_rank is None and ctx.pre_num_ranks is None
        seen += tokens.tolist()
    assert sorted(seen) == list(range(512))


def test_each_stream_is_cut_by_itself(layout):
    alone = [build_cp_context(torch.tensor([0, 10, 32]), rank=1, world_size=2, layout=layout)]
    alone.append(build_cp_context(torch.tensor([0, 32]), rank=1, world_size=2, layout=layout))
    both = build_cp_context(
        torch.tensor([0, 10, 32, 64]), rank=1, world_size=2, layout=layout, num_streams=2
    )
    assert both.fragments == alone[0].fragments + tuple(
        (s + 32, e + 32) for s, e in alone[1].fragments
    )
    assert torch.equal(both.position_ids, torch.cat([c.position_ids for c in alone]))


@pytest.mark.parametrize("size", [64, 256])
def test_chunk_tables(size):
    """Row by row: the entry and the chunk in it; an entry's first row in the offsets."""
    ctx = build_cp_context(boundaries([100, 156, 1, 255]), rank=1, world_size=2)
    index, offsets = ctx.tables.boundaries.chunks[size]
    lengths = ctx.cu_seqlens.diff().tolist()
    rows = [[n, c] for n, length in enumerate(lengths) for c in range(-(-length // size))]
    assert index.tolist() == rows
    assert offsets.tolist() == [rows.index([n, 0]) for n in range(len(lengths))] + [len(rows)]


def cost_to_build(documents, world_size, layout):
    """While four streams of that many documents are cut and planned: Python and C functions called, and elements of the
    arrays that Python functions hold when they return, which stand for the work inside NumPy."""
    T = world_size * 2 * 16384
    edges = torch.linspace(0, T, documents + 1, dtype=torch.float64).long()
    cu = torch.cat([edges[:-1] + i * T for i in range(4)] + [torch.tensor([4 * T])])
    calls = elements = 0

    def seen(frame, event, argument):
        nonlocal calls, elements
        calls += event in ("call", "c_call")
        if event == "return":
            arrays = (
                x for x in frame.f_locals.values() if isinstance(x, np.ndarray | torch.Tensor)
            )
            elements += sum(x.size if isinstance(x, np.ndarray) else x.numel() for x in arrays)

    sys.setprofile(seen)
    try:
        build_cp_context(
            cu, rank=31, world_size=world_size, layout=layout, num_streams=4, conv1d_kernel_size=4
        )
    finally:
        sys.setprofile(None)
    return calls, elements


def test_the_cost_is_linear(layout):
    """64 ranks, four streams, 10,000 documents each: calls grow with ranks, and hardly with documents, which NumPy
    counts; its arrays grow with documents, and not with documents times ranks."""
    (few, _), (many, elements) = (cost_to_build(n, 64, layout) for n in (1, 10_000))
    assert many < 2 * few
    assert cost_to_build(1, 128, layout)[0] < 2.2 * few
    assert cost_to_build(20_000, 128, layout)[1] < 2.2 * elements


@pytest.mark.parametrize(
    "cu, options, message",
    [
        ([0, 10], {"world_size": 4}, "multiple of 4"),
        ([0, 12], {"world_size": 4, "layout": "zigzag"}, "multiple of 8"),
        ([0, 12], {"layout": "striped"}, "layout"),
        ([1, 12], {}, "start at 0"),
        ([0, 8, 4], {}, "never decrease"),
        ([0, 8], {"num_streams": 2}, "stream 1"),
        (
            [0, 10],
            {"num_streams": 3},
            "10: these tokens cannot be cut into num_streams = 3 streams of 2",
        ),
        ([0, 8], {"num_streams": 0}, "num_streams = 0"),
        ([0, 8], {"conv1d_kernel_size": 0}, "conv1d_kernel_size = 0"),
        (
            [0, 4, 8],
            {"cu_seqlens_cpu": torch.tensor([0, 2, 8])},
            r"must have the values of cu_seqlens, \[0, 4, 8\]",
        ),
        ([0, 4, 8], {"cu_seqlens_cpu": torch.tensor([0, 16])}, "cu_seqlens_cpu"),
        ([0, 8], {"rank": 2}, "rank"),
        (
            [0, 8],
            {"attention": ["ring", "gather"]},
            r"attention has \['gather'\]; give methods of 'ring', 'allgather'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(cu, options, message):
    with refused(message):
        build_cp_context(torch.tensor(cu), **({"rank": 0, "world_size": 2} | options))


def test_softmax_attention_is_planned_where_it_is_asked_for():
    cu, ranks = boundaries([40, 24]), {"rank": 1, "world_size": 2}
    whole = build_cp_context(cu, **ranks)
    for methods in ((), ("ulysses",), ("ring",), ("allgather",), ("ring", "allgather")):
        ctx = build_cp_context(cu, attention=methods, **ranks)
        ctx.mark_dynamic()
        for method, tables in (("ring", "rectangles"), ("allgather", "gathered")):
            if method in methods:
                ours, theirs = (tree_leaves(getattr(of, tables)) for of in (ctx, whole))
                assert all(
                    x is y is None or torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)
                )
            else:
                with refused(f"method = '{method}': the context was not planned"):
                    getattr(ctx, tables)
        assert ctx.full_rectangles.hops == 1 and ctx.full_gathered.keys.travel  # at first use
