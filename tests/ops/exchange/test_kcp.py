"""KCP and the convolution's halo: every rank's outputs and gradients against one process, in float64."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dispatch import AsPromised
from tests.ops.inputs import (
    DEVICE,
    MAKERS,
    SMALL,
    boundaries,
    call,
    decaying_inputs,
    gradients,
    leaves,
    raw_gate_inputs,
    relative_error,
    tokens_of,
)
from tests.ops.layout.documents import EDGES, FLA_CONV, FLA_CP2, FLA_CP4
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import build_cp_context, causal_conv1d
from titan_linear.ops.exchange import kcp
from titan_linear.ops.exchange.halo import return_halo
from titan_linear.ops.layout.levels import Level
from titan_linear.ops.torch import chunked

TOLERANCE = 1e-9
PARAMETERS = {"A_log", "A", "D", "dt_bias", "weight", "bias"}
LAYOUTS = ["contiguous", "zigzag"]


def inputs_of(op, lengths, streams=1):
    """Every rank and the reference draw the same tensors from the op's name and the documents."""
    T = sum(lengths) * streams
    if op == "conv":
        rng = torch.Generator().manual_seed(0)
        shapes = {"x": (1, T, 6), "weight": (6, 4), "bias": (6,)}
        return {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    if op == "ssd-heads":
        return decaying_inputs("ssd", T, G=2, heads=4, N=8, P=6, bias=-7.0)
    if op == "kda-raw":
        return raw_gate_inputs("kda", T, H=1, HV=2, K=8, V=6)
    return MAKERS[op](T, **SMALL[op])


def run_op(op, x, **options):
    if op == "conv":
        return causal_conv1d(**x, activation="silu", **options)[0]
    return call(
        op.partition("-")[0], x, cp_method="ulysses" if op == "ssd-heads" else "kcp", **options
    )[0]


def output_gradient(op, like):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def on_rank(rank, world_size, cases, levels=()):
    """For each (op, lengths, layout, streams): this rank's output and gradients of its tokens and of the parameters.
    levels: by which states travel; (): directly."""
    with pytest.MonkeyPatch.context() as patch, AsPromised():
        patch.setattr(kcp, "route", lambda *_: levels)
        return results_of(dist.group.WORLD, cases)


def results_of(group, cases):
    results = []
    for op, lengths, layout, streams in cases:
        ctx = build_cp_context(
            boundaries(lengths * streams), group, layout=layout, num_streams=streams
        )
        mine = tokens_of(ctx)
        whole = inputs_of(op, lengths, streams)
        x = leaves({n: t if n in PARAMETERS else t[:, mine] for n, t in whole.items()})
        y = run_op(op, x, cp_context=ctx)
        dy = output_gradient(op, whole["v" if "v" in whole else "x"])[:, mine]
        results.append([y.detach(), *torch.autograd.grad(y, list(x.values()), dy)])
    return results


def check(world, cases, levels=()):
    compare(world.run(on_rank, cases, levels), cases)


def compare(ranks, cases):
    for i, (op, lengths, layout, streams) in enumerate(cases):
        cu = boundaries(lengths * streams)
        where = {"layout": layout, "num_streams": streams, "world_size": len(ranks)}
        tokens = [tokens_of(build_cp_context(cu, rank=rank, **where)) for rank in range(len(ranks))]
        for j, (name, want) in enumerate(by_one_process(op, tuple(lengths), streams).items()):
            if name in PARAMETERS:
                assert relative_error(sum(r[i][j] for r in ranks), want) < TOLERANCE, (
                    cases[i],
                    name,
                )
                continue
            for rank, results in enumerate(ranks):
                error = (results[i][j] - want[:, tokens[rank]]).norm() / want.norm()
                assert error < TOLERANCE, (cases[i], name, rank, error)


@cache
def by_one_process(op, lengths, streams):
    """The output and the gradients of all inputs, for every world and layout."""
    x = leaves(inputs_of(op, list(lengths), streams))
    y = run_op(op, x, cu_seqlens=boundaries(list(lengths) * streams))
    grads = torch.autograd.grad(y, list(x.values()), output_gradient(op, y))
    return {"y": y.detach()} | dict(zip(x, grads, strict=True))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_edges(worlds, world_size):
    """Each op on four ranks; the exchange knows of them only whether M is a matrix or a number."""
    ops = (
        ["kda", "gdn", "kda-raw", "ssd", "gla", "rwkv7", "conv"]
        if world_size == 4
        else ["kda", "ssd", "conv"]
    )
    cases = [(op, d, layout, 1) for op in ops for d in EDGES.values() for layout in LAYOUTS]
    if world_size == 8:
        compare(run_ranks(lambda group: results_of(group, cases), world_size), cases)
    else:
        check(worlds(world_size), cases)


@pytest.mark.parametrize("op", ["kda", "gdn", "ssd", "gla", "rwkv7", "conv"])
def test_other_degrees(op):
    """Cuts inside chunks, documents of one token, and padding of more than a rank."""
    lengths = [62, 1, 1, 700, 1, 2, 73, 1, 440, 399]  # 1680 tokens, a multiple of 2W
    cases = [(op, lengths, layout, 1) for layout in LAYOUTS]
    for world_size in (1, 3, 5, 6, 7):
        compare(run_ranks(lambda group: results_of(group, cases), world_size), cases)


@pytest.mark.parametrize("levels", [(Level(1, 2, True), Level(2, 2)), (Level(1, 2), Level(2, 2))])
def test_states_level_by_level(worlds, levels):
    cases = [
        (op, d, layout, 1) for op in ("kda", "ssd") for d in EDGES.values() for layout in LAYOUTS
    ]
    check(
        worlds(4), [*cases, ("kda", [40, 24], "zigzag", 3), ("gdn", [128], "contiguous", 2)], levels
    )


def test_heads_are_exchanged_with_their_parameters(worlds):
    check(worlds(2), [("ssd-heads", d, layout, 1) for d in EDGES.values() for layout in LAYOUTS])


def test_streams_side_by_side(worlds):
    check(worlds(2), [(op, [40, 24], layout, 3) for op in ("kda", "conv") for layout in LAYOUTS])


@pytest.mark.parametrize("world_size, lists", [(2, FLA_CP2), (4, FLA_CP4)])
def test_the_cases_of_fla(worlds, world_size, lists):
    convolutions = [("conv", lengths, layout, 1) for lengths in FLA_CONV for layout in LAYOUTS]
    rules = [(op, lengths, "contiguous", 1) for op in ("kda", "gdn") for lengths in lists]
    check(worlds(world_size), [*rules, *convolutions])


def test_fragments_shorter_than_the_convolution(worlds):
    check(
        worlds(4),
        [("conv", lengths, layout, 1) for lengths in ([8], [1, 7], [3, 5]) for layout in LAYOUTS],
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_gradients_of_a_token_in_several_halos_are_added_in_order(monkeypatch, size, layout):
    """`index_add_` on GPUs adds rows that one call names twice in any order, so none does; where a fragment is shorter
    than the halo, it is not called."""
    fragments = {"contiguous": 4, "zigzag": 8}[layout]
    cu, shared = boundaries([fragments * size]), size < 3
    index_add, calls = Tensor.index_add_, []

    def recorded(x, dim, rows, source):
        calls.append(rows.tolist())
        return index_add(x, dim, rows, source)

    def added(group):
        ctx = build_cp_context(cu, group, layout=layout, device=DEVICE)
        routes, draw = ctx.halo_of(3), torch.Generator().manual_seed(ctx.ranks.rank)
        shapes = (ctx.cut.tokens, 8), (ctx.cut.slots, 3, 8)
        dx, d_halo = (torch.randn(*shape, generator=draw).to(DEVICE) for shape in shapes)
        return_halo(dx, d_halo, list(routes), group.group_name)
        return dx, routes.rows[: int(routes.send_counts.sum())].cpu()

    first = run_ranks(added, 4)
    monkeypatch.setattr(Tensor, "index_add_", recorded)
    again = run_ranks(added, 4)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(first, again, strict=True))
    assert any(len(rows.unique()) < len(rows) for _, rows in again) == shared
    assert all(len(set(rows)) == len(rows) for rows in calls) and len(calls) == 4 * (not shared)


def outside(group, i, op, lengths, layout):
    """Output and gradients of this rank's tokens outside document i, as is and with all inputs of i NaN."""
    cu, results = boundaries(lengths), []
    ctx = build_cp_context(cu, group, layout=layout)
    mine, base = tokens_of(ctx), inputs_of(op, lengths)
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[cu[i] : cu[i + 1]] = True
    for fill in (None, torch.nan):
        x = {n: t.clone() for n, t in base.items()}
        if fill is not None:
            for t in (t for n, t in x.items() if n not in PARAMETERS):
                t[:, inside] = fill
        x = leaves({n: t if n in PARAMETERS else t[:, mine] for n, t in x.items()})
        names = ["y", *x]
        found = gradients([run_op(op, x, cp_context=ctx)], x)
        results.append(
            [
                t.detach()[:, ~inside[mine]]
                for n, t in zip(names, found, strict=True)
                if n not in PARAMETERS
            ]
        )
    return results


LEVELS = (Level(1, 2, True), Level(2, 4))


@pytest.mark.parametrize(
    "op, levels",
    [
        *((op, levels) for op in ("kda", "gdn", "ssd", "rwkv7") for levels in ((), LEVELS)),
        ("conv", ()),
    ],
)
def test_nan_stays_in_its_document(monkeypatch, op, levels, layout):
    """States and gradients of NaN arrive, on ranks whose fragments hold other documents too; these are as without."""
    monkeypatch.setattr(kcp, "route", lambda *_: levels)
    lengths = [100, 60, 1, 75, 20]
    for i in range(len(lengths)):
        for clean, beside in run_ranks(
            partial(outside, i=i, op=op, lengths=lengths, layout=layout), 8
        ):
            assert all(map(torch.equal, clean, beside)), (i, layout)


def counted(rank, world_size, lengths, layout, op="kda"):
    """How many M this rank computes, and how many elements it sends forward and backward."""
    computed, sent = [], []
    transition, all_to_all = chunked.transition, kcp.all_to_all
    try:
        chunked.transition = lambda *args: computed.append(1) or transition(*args)
        kcp.all_to_all = lambda x, *sizes: sent.append(x.numel()) or all_to_all(x, *sizes)
        ctx = build_cp_context(boundaries(lengths), dist.group.WORLD, layout=layout)
        mine = tokens_of(ctx)
        x = leaves(
            {n: t if n in PARAMETERS else t[:, mine] for n, t in inputs_of(op, lengths).items()}
        )
        run_op(op, x, cp_context=ctx).sum().backward()
    finally:
        chunked.transition, kcp.all_to_all = transition, all_to_all
    return sum(computed), sent


HV, K, V = 2, 8, 6
OF_STATE, OF_M = HV * K * V, HV * K * K


def test_m_is_neither_computed_nor_sent_where_no_document_passes_through(worlds):
    assert worlds(2).run(counted, [512], "contiguous") == [(0, [OF_STATE, 0]), (0, [0, OF_STATE])]
    # Four ranks, one document: ranks 1 and 2 are passed through, and give S_ext and M to those further on.
    assert worlds(4).run(counted, [512], "contiguous") == [
        (0, [3 * OF_STATE, 0]),
        (1, [2 * (OF_STATE + OF_M), OF_STATE + OF_M]),
        (1, [OF_STATE + OF_M, 2 * (OF_STATE + OF_M)]),
        (0, [0, 3 * OF_STATE]),
    ]
    # Where a state only decays, M is a number for each head.
    assert [sent for _, sent in worlds(4).run(counted, [512], "contiguous", "ssd")] == [
        [3 * OF_STATE, 0],
        [2 * (OF_STATE + HV), OF_STATE + HV],
        [OF_STATE + HV, 2 * (OF_STATE + HV)],
        [0, 3 * OF_STATE],
    ]
    # A cut on every rank edge: nothing to say.
    assert worlds(4).run(counted, [128] * 4, "contiguous") == [(0, [])] * 4
    # A document on each side of the middle of rank 1: it comes in, ends, another begins and goes out: no M.
    assert worlds(4).run(counted, [192, 192, 128], "contiguous") == [
        (0, [OF_STATE, 0]),
        (0, [OF_STATE, OF_STATE]),
        (0, [0, OF_STATE]),
        (0, [0, 0]),
    ]


def test_the_state_kept_for_backward_is_one_per_fragment(worlds):
    """Not one per document: a rank of many short documents keeps no more than a rank of one."""
    assert worlds(2).run(kept_states, [1] * 256 + [256]) == [1, 1]


def kept_states(rank, world_size, lengths):
    ctx = build_cp_context(boundaries(lengths), dist.group.WORLD)
    saved = []
    x = leaves({n: t[:, tokens_of(ctx)] for n, t in inputs_of("kda", lengths).items()})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run_op("kda", x, cp_context=ctx)
    return sum(t.shape[0] for t in saved if t.shape[1:] == (HV, K, V))


def test_states_are_not_available_under_cp():
    ctx = build_cp_context(torch.tensor([0, 16]), rank=0, world_size=2)
    x = {n: t[:, :8] for n, t in inputs_of("kda", [16]).items()}
    for options in ({"output_final_state": True}, {"initial_state": torch.zeros(1, HV, K, V)}):
        with refused("with cp_context"):
            call("kda", x, cp_context=ctx, **options)
    with refused("^cu_seqlens must not be"):
        call("kda", x, cp_context=ctx, cu_seqlens=torch.tensor([0, 8]))
