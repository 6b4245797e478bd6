"""KCP's states level by level: the same as directly, in equal shares, whatever the documents."""

import math
import threading
from collections import Counter, defaultdict
from functools import partial
from itertools import chain

import pytest
import torch

from tests.ops.inputs import boundaries
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import build_cp_context
from titan_linear.ops.exchange import folds, kcp, levels
from titan_linear.ops.exchange.collectives import group_named
from titan_linear.ops.layout.chains import STATE, STATE_AND_M
from titan_linear.ops.layout.levels import (
    Level,
    Sizes,
    direct_messages,
    duration,
    fastest,
    groupings,
    messages,
    route,
)


def states_by(group, ways, lengths, layout, streams, shapes):
    """In both directions, the states that come directly and in each of these ways, where what nobody asked for is NaN;
    shapes: of a slot's S_ext and M."""
    context, results = (
        build_cp_context(boundaries(lengths * streams), group, layout=layout, num_streams=streams),
        [],
    )
    draw = torch.Generator().manual_seed(group.rank())
    for chains, reverse in (
        (context.tables.forward_chains, False),
        (context.tables.reverse_chains, True),
    ):
        S_ext, M = (
            torch.randn(context.cut.slots, *shape, generator=draw, dtype=torch.float64)
            for shape in shapes
        )
        S_ext[chains.wanted < STATE], M[chains.wanted < STATE_AND_M] = torch.nan, torch.nan
        pairs, name = (S_ext, M / shapes[0][1] ** 0.5), context.ranks.group_name
        directly = kcp.fold_chains(*kcp.exchange(*pairs, chains, name), chains, reverse)
        found = [
            directly,
            *(levels.incoming_by_levels(*pairs, chains, way, name, reverse) for way in ways),
        ]
        results.append(found)
    return results


@pytest.mark.parametrize("world_size", [2, 8])
def test_every_way_brings_the_same_states(world_size, layout):
    """Of matrices and of diagonals."""
    T, ways = 16 * world_size, list(groupings(world_size, math.gcd(world_size, 4)))
    for transition in ((4, 3, 3), (4, 3), (4, 1)):
        for lengths, streams in (
            ([T], 1),
            ([T // 2 + 5, 8, T // 2 - 13], 1),
            ([1, T - 2, 1], 2),
            ([16] * world_size, 1),
        ):
            work = partial(
                states_by,
                ways=ways,
                lengths=lengths,
                layout=layout,
                streams=streams,
                shapes=((4, 3, 5), transition),
            )
            for rank in run_ranks(work, world_size):
                for want, *found in rank:
                    assert all((x - want).abs().max() < 1e-12 for x in found), (lengths, transition)


@pytest.mark.parametrize("transition", [(2, 16, 16), (2, 1)], ids=str)
def test_kernels_fold_as_float64(monkeypatch, transition, layout):
    lengths, ways = [40, 8, 80], [(Level(1, 2, True), Level(2, 2)), (Level(1, 2), Level(2, 2))]
    work = partial(
        states_by,
        ways=ways,
        lengths=lengths,
        layout=layout,
        streams=1,
        shapes=((2, 16, 16), transition),
    )
    exact = run_ranks(work, 4)
    for module in (folds, levels):
        monkeypatch.setattr(module, "by_kernels", lambda _: True)
    real = torch.randn
    monkeypatch.setattr(
        torch,
        "randn",
        lambda *shape, generator, dtype: real(*shape, generator=generator, dtype=dtype).float(),
    )
    for got, want in zip(run_ranks(work, 4), exact, strict=True):
        for x, y in zip(chain(*got), chain(*want), strict=True):
            assert x.dtype == torch.float32 and (x - y).norm() <= 2e-6 * y.norm()


@pytest.mark.parametrize("world_size, heads", [(64, 16), (64, 4), (64, 10), (256, 9)])
def test_ranks_have_equal_shares(monkeypatch, world_size, heads, layout):
    """One document over all ranks: bytes that a rank sends and receives, of others, and multiplications in products
    with M, which are within 10% of their mean; and as many bytes as the plan says."""
    found = defaultdict(Counter)  # what → rank, or its thread → sum
    all_to_all, act = levels.all_to_all, folds.act

    def exchanged(x, sent, received, name):
        rank = group_named(name).rank()
        for what, sizes in (("sent", sent), ("received", received)):
            found[what][rank] += x.itemsize * (sum(sizes) - sizes[rank])
        return all_to_all(x, sent, received, name)

    def acted(M, S, reverse):
        found["multiplied"][threading.get_ident()] += S.numel() * M.shape[-1]
        return act(M, S, reverse)

    def on_rank(group):
        where = {"layout": layout, "node_size": 8, "attention": ()}
        context = build_cp_context(torch.tensor([0, 4 * world_size]), group, **where)
        states = torch.zeros(context.cut.slots, heads, 2, 2)
        kcp.incoming_states(states, states, context.tables.forward_chains, context.ranks.group_name)

    monkeypatch.setattr(levels, "all_to_all", exchanged)
    monkeypatch.setattr(folds, "act", acted)
    sizes = Sizes(
        heads, slots={"contiguous": 1, "zigzag": 2}[layout], state=1 << 16, transition=1 << 16
    )
    way = fastest(world_size, 8, sizes)
    monkeypatch.setattr(kcp, "route", lambda *_: way)
    run_ranks(on_rank, world_size)
    for of_rank in found.values():
        assert (
            len(of_rank) == world_size
            and max(of_rank.values()) <= 1.1 * of_rank.total() / world_size
        )
    planned = sum(m.nbytes for m in messages(way, 8, sizes._replace(state=16, transition=16)))
    assert set(found["sent"].values()) == set(found["received"].values()) == {planned}


def test_levels_where_chains_are_long():
    """One document over 8, 16, 64 and 1024 ranks, 8 to a node; and one on each rank."""
    for heads, ranks, says in [
        (16, 8, (Level(1, 8, True),)),
        (64, 8, (Level(1, 8, True),)),
        (16, 16, (Level(1, 4, True), Level(4, 2), Level(8, 2))),
        (16, 64, (Level(1, 8, True), Level(8, 8))),
        (16, 1024, (Level(1, 8, True), Level(8, 4), Level(32, 4), Level(128, 8))),
        (9, 64, (Level(1, 2), Level(2, 4), Level(8, 2), Level(16, 4))),
    ]:
        sizes = Sizes(heads, slots=1, state=1 << 16, transition=1 << 16)
        context = build_cp_context(torch.tensor([0, ranks]), rank=0, world_size=ranks)
        most = context.tables.forward_chains.most.item()
        assert most == 2 * ranks - 3
        assert route(most, ranks, min(ranks, 8), sizes) == says
        assert route(2, ranks, min(ranks, 8), sizes) == ()
        if says:
            exchange = messages(says, 8, sizes)
            assert duration(exchange) < duration(direct_messages(most, ranks, min(ranks, 8), sizes))
            assert sum(m.products for m in exchange) < ranks


def test_node_size_must_divide():
    with refused("node_size = 3; give a divisor of the number of ranks, 4"):
        build_cp_context(torch.tensor([0, 8]), rank=0, world_size=4, node_size=3)
