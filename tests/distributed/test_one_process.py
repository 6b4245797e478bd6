"""Groups whose ranks live in one process: any degree of context parallelism equals one rank, in float64."""

import math
import threading
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.ops.inputs import boundaries, call, leaves, raw_gate_inputs, relative_error, tokens_of
from titan_linear.distributed.one_process import RankFailed, run_ranks
from titan_linear.ops import attention, build_cp_context, causal_conv1d
from titan_linear.ops.exchange import kcp
from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.layout.levels import fastest
from titan_linear.proof.doctor import one_process

# of 2048 tokens: through many ranks of 64, and several within one
LENGTHS = [5, 1200, 1, 2, 200, 1, 639]
METHODS = ("ring", "allgather", "ulysses")
OVER_HEADS = ("kda over heads", "gdn over heads")
PARAMETERS = {"A_log", "dt_bias", "weight"}
BOUNDS = {
    **dict.fromkeys(("kda", "gdn", "conv", *OVER_HEADS), 1e-9),
    **dict.fromkeys(METHODS, 1e-10),
}


@cache
def inputs_of(op, heads):
    rng, T = torch.Generator().manual_seed(0), sum(LENGTHS)
    if op == "conv":
        shapes = {"x": (1, T, 3), "weight": (3, 4)}
    elif op in METHODS:
        shapes = dict.fromkeys("qkv", (1, T, heads, 4))
    else:
        x = raw_gate_inputs(op[:3], T, H=heads, HV=heads, K=4, V=3)
        return x | {"dt_bias": x["dt_bias"] - 3}  # a decay that lasts for hundreds of tokens
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def results(op, x, mine, **where):
    """The output and every gradient, of these tokens of inputs of all."""
    x = leaves({name: t if name in PARAMETERS else t[:, mine] for name, t in x.items()})
    if op == "conv":
        y = causal_conv1d(**x, activation="silu", **where)[0]
    elif op in METHODS:
        y = attention(**x, **where, **({"method": op} if "cp_context" in where else {}))
    else:
        y = call(op[:3], x, **where, cp_method="ulysses" if op in OVER_HEADS else "kcp")[0]
    whole = (1, sum(LENGTHS), *y.shape[2:])
    dy = torch.randn(whole, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[
        :, mine
    ]
    return dict(
        zip(("y", *x), (y.detach(), *torch.autograd.grad(y, list(x.values()), dy)), strict=True)
    )


@pytest.mark.parametrize(
    "world_size, heads, ops",
    [
        (64, 1, ("kda", "gdn", "conv", "ring", "allgather")),
        (8, 8, ("ulysses", *OVER_HEADS)),
        (2, 2, OVER_HEADS),
    ],
)
def test_any_degree_equals_one_rank(world_size, heads, ops, layout):
    check(world_size, heads, ops, layout)


@pytest.mark.parametrize("heads", [4, 16])
def test_states_level_by_level(heads, layout, monkeypatch):
    """As if heads were of 128 x 128."""
    large = {"state": 1 << 16, "transition": 1 << 16}
    monkeypatch.setattr(
        kcp, "route", lambda most, W, node, sizes: fastest(W, node, sizes._replace(**large))
    )
    check(64, heads, ("kda", "gdn"), layout, node_size=8)


def test_over_heads_with_rows_of_dt_bias_apart():
    cu, x = boundaries([8]), raw_gate_inputs("kda", 8, K=4, V=3)
    bias = x["dt_bias"].view(-1, 4)
    apart = x | {"dt_bias": torch.cat([bias, bias], -1)[:, :4]}

    def on_rank(group):
        context = build_cp_context(cu, group)
        mine = tokens_of(context)
        of_rank = (
            {name: t if name in PARAMETERS else t[:, mine] for name, t in given.items()}
            for given in (x, apart)
        )
        return [call("kda", given, cp_context=context, cp_method="ulysses")[0] for given in of_rank]

    for want, got in run_ranks(on_rank, 2):
        assert torch.equal(got, want)


def check(world_size, heads, ops, layout, node_size=None):
    cu = boundaries(LENGTHS)

    def on_rank(group):
        context = build_cp_context(cu, group, layout=layout, node_size=node_size)
        mine = tokens_of(context)
        return mine, {op: results(op, inputs_of(op, heads), mine, cp_context=context) for op in ops}

    ranks = run_ranks(on_rank, world_size)
    for op in ops:
        for name, want in results(
            op, inputs_of(op, heads), torch.arange(sum(LENGTHS)), cu_seqlens=cu
        ).items():
            if name in PARAMETERS:
                got = sum(found[op][name] for _, found in ranks)
            else:
                got = torch.empty_like(want)
                for mine, found in ranks:
                    got[:, mine] = found[op][name]
            assert (got - want).norm() <= BOUNDS[op] * want.norm(), (op, name)


def every_collective(group):
    rank, W = group.rank(), group.size()
    x = torch.arange(2.0 * W) + 100 * rank
    summed, most = x.clone(), x.clone()
    dist.all_reduce(summed, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    gathered, part = torch.empty(2 * W * W), torch.empty(2)
    pending = dist.all_gather_into_tensor(gathered, x, group=group, async_op=True)
    dist.reduce_scatter_tensor(part, x, group=group)
    pending.wait()
    came = torch.empty(2 * W)
    dist.all_to_all_single(came, x, group=group)
    arrived = torch.empty(2)
    ops = [
        dist.P2POp(dist.isend, part, group=group, group_peer=(rank + 1) % W),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % W),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    group.barrier().wait()
    return [summed, most, gathered, part, came, arrived]


def same_with_gloo(rank, world_size):
    return every_collective(dist.group.WORLD)


def test_the_collectives_are_those_of_processes(worlds):
    ours, gloo = run_ranks(every_collective, 4), worlds(4).run(same_with_gloo)
    assert all(
        torch.equal(a, b)
        for x, y in zip(ours, gloo, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def different(group):
    x = torch.ones(2)
    dist.all_reduce(x, group=group) if group.rank() else group.barrier().wait()


def absent(group):
    if group.rank() != 1:
        dist.all_reduce(torch.ones(2), group=group)


def too_few(group):
    dist.all_to_all_single(torch.empty(2), torch.ones(3), [0, 1, 1], [1, 1, 1], group=group)


def wrong(group):
    if group.rank() == 2:
        raise ValueError("what was wrong")
    group.barrier().wait()


@pytest.mark.parametrize(
    "on_rank, message",
    [
        (
            different,
            "rank 1 of 3 in one process.* rank 1 calls all_reduce where rank.s. 0 called barrier",
        ),
        (
            absent,
            "no rank can go on: rank 0 waits in all_reduce for rank.s. 1, 2; rank 1 has ended; rank 2 waits",
        ),
        (
            too_few,
            "rank 2 of 3 in one process: AssertionError: rank 0 expects rows .0, 1, 1. by sender, and .1, 1, 1. come",
        ),
        (wrong, "rank 2 of 3 in one process: ValueError: what was wrong"),
    ],
)
@pytest.mark.parametrize("default_group", [False, True])
def test_ranks_that_cannot_go_on_say_why(on_rank, message, default_group):
    with (
        one_process() if default_group else nullcontext(),
        pytest.raises(RankFailed, match=message),
    ):
        run_ranks(on_rank, 3)
    assert run_ranks(lambda group: group.rank(), 3) == [0, 1, 2]


# --- Rounding --------------------------------------------------------------------------------------------------------


def slow_decay(op, T, K):
    """Gates of about −7e-4 a token, whose parameters have gradients: a state lasts over a thousand tokens."""
    x = raw_gate_inputs(op, T, H=2, HV=2, K=K, V=K)
    return x | {"A_log": torch.full_like(x["A_log"], math.log(1e-3)), "dt_bias": 0.1 * x["dt_bias"]}


def of_one_document(op, x, dy, size, layout, impl):
    """The output and every gradient, of so many ranks together."""
    T, device = dy.shape[1], dy.device

    def on_rank(group):
        context = build_cp_context(boundaries([T]), group, layout=layout, device=device)
        mine = tokens_of(context).to(device)
        own = leaves({name: t if name in PARAMETERS else t[:, mine] for name, t in x.items()})
        y = call(op, own, cp_context=context, impl=impl)[0]
        gradients = torch.autograd.grad(y, list(own.values()), dy[:, mine])
        return mine, dict(zip(("y", *x), (y.detach(), *gradients), strict=True))

    ranks = run_ranks(on_rank, size)
    order = torch.cat([mine for mine, _ in ranks]).argsort()
    parts = {name: [found[name] for _, found in ranks] for name in ("y", *x)}
    return {n: sum(p) if n in PARAMETERS else torch.cat(p, 1)[:, order] for n, p in parts.items()}


def check_rounding(op, T, K, sizes, layout, device, dtype, impl):
    """Errors against float64 of the same, rounded, inputs: over ranks at most a tenth more than on one, whatever their
    number.

    A parameter's gradient is a sum of g's, which ranks add up in another order. The norm of n independent errors
    differs by 1 / √n from draw to draw: that of few numbers may be larger by three times as much, from g's error on.
    g's gradients are themselves sums up to the end of a chunk, and have one such error for each chunk and channel.
    """
    kept = (*PARAMETERS, "g")  # which layers give in float32
    x = {
        n: t.to(device, torch.float32 if n in kept else dtype)
        for n, t in slow_decay(op, T, K).items()
    }
    dy = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    exact = of_one_document(
        op, {n: t.double() for n, t in x.items()}, dy.double(), 1, "contiguous", "torch"
    )

    def errors(size):
        found = of_one_document(op, x, dy, size, layout, impl)
        return {n: relative_error(found[n], want) for n, want in exact.items()}

    one = errors(1)
    limits = {n: 1.1 * e for n, e in one.items()}
    limits["g"] = max(1.1, 1 + 3 / (x["g"].numel() / CHUNK) ** 0.5) * one["g"]
    limits |= {
        n: (1 + 3 / x[n].numel() ** 0.5) * max(one[n], one["g"]) for n in PARAMETERS & x.keys()
    }
    for size in sizes:
        assert not [(n, e, limits[n]) for n, e in errors(size).items() if not e <= limits[n]], size


def test_the_last_rank_is_the_thread_that_calls():
    *others, last = run_ranks(lambda group: threading.current_thread(), 3)
    assert last is threading.current_thread() and last not in others

    def interrupted(group):
        if group.rank() == 2:
            raise KeyboardInterrupt  # as Ctrl-C in the main thread
        dist.barrier(group)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(interrupted, 3)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_rounding_in_float32(op):
    check_rounding(op, 2048, 16, (2, 8), "zigzag", "cpu", torch.float32, "torch")


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_rounding_in_bfloat16(op, layout):
    check_rounding(op, 131072, 128, (2, 8, 64), layout, "cuda", torch.bfloat16, "triton")
