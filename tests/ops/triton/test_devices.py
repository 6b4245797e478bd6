"""The kernels under context parallelism on two GPUs (`pytest -m cuda` where there are two), against float64.

Every rank's output and gradients are compared with its part of what one process computes in float64 without context
parallelism; parameters' gradients with their sum over the ranks.
"""

import pytest
import torch
import torch.distributed as dist

from tests.ops.inputs import boundaries, leaves, raw_gate_inputs, relative_error, tokens_of
from tests.ops.triton.promised import PROMISED, run, to_device
from titan_linear.ops import build_cp_context, causal_conv1d
from titan_linear.ops.exchange import kcp
from titan_linear.ops.layout.levels import Level

PARAMETERS = ("dA_log", "ddt_bias", "dweight")


def errors(ours, exact, mine, rank):
    """This rank's part, and the sum over the ranks of what is shared."""
    for name in [n for n in PARAMETERS if n in ours]:  # in the same order on every rank
        dist.all_reduce(ours[name])
    part = {n: t if n in PARAMETERS else t[:, mine] for n, t in exact.items()}
    return {n: relative_error(ours[n], part[n]) for n in ours}


def delta_rule(ctx, mine, rank, op, cu):
    x = to_device(raw_gate_inputs(op, int(cu[-1]), H=2, HV=4, K=128, V=128, gate="usual"))
    do = torch.randn(
        x["v"].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(7)
    ).bfloat16()
    local = {n: t if n in ("A_log", "dt_bias") else t[:, mine] for n, t in x.items()}
    ours = run(op, local, [do[:, mine]], cp_context=ctx, impl="triton")
    exact = run(op, {n: t.double() for n, t in x.items()}, [do], cu_seqlens=cu, impl="torch")
    return errors(ours, exact, mine, rank)


def convolution(ctx, mine, rank, cu):
    rng = torch.Generator("cuda").manual_seed(8)
    x, do = (
        torch.randn(1, int(cu[-1]), 256, device="cuda", generator=rng).bfloat16() for _ in range(2)
    )
    weight = torch.randn(256, 4, device="cuda", generator=rng).bfloat16()
    results = []
    for y, dy, options in (
        ({"x": x[:, mine], "weight": weight}, do[:, mine], {"cp_context": ctx, "impl": "triton"}),
        (
            {"x": x.double(), "weight": weight.double()},
            do.double(),
            {"cu_seqlens": cu, "impl": "torch"},
        ),
    ):
        y = leaves(y)
        o = causal_conv1d(**y, activation="silu", **options)[0]
        grads = torch.autograd.grad(o, list(y.values()), dy)
        results.append(dict(zip(("o", "dx", "dweight"), (o.detach(), *grads))))
    return errors(*results, mine, rank)


def on_rank(rank, world_size, op, lengths, layout, levels=()):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kcp, "route", lambda *_: levels)
        return found_on_rank(rank, op, lengths, layout)


def found_on_rank(rank, op, lengths, layout):
    cu = boundaries(lengths)
    ctx = build_cp_context(cu.cuda(), dist.group.WORLD, layout=layout, cu_seqlens_cpu=cu)
    mine = tokens_of(ctx).cuda()
    return convolution(ctx, mine, rank, cu) if op == "conv" else delta_rule(ctx, mine, rank, op, cu)


@pytest.mark.cuda(2)
@pytest.mark.parametrize("lengths", [[4096], [1, 15, 63, 64, 65, 1000, 3, 837], [2, 2043, 3]])
@pytest.mark.parametrize("op", ["kda", "gdn", "conv"])
def test_two_devices(worlds, op, lengths, layout):
    bounds = PROMISED | {"dx": 5e-3, "dweight": 5e-3}
    for found in worlds(2, "nccl").run(on_rank, op, lengths, layout):
        assert not {n: e for n, e in found.items() if not e <= bounds[n]}


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param((Level(1, 2, True),), marks=pytest.mark.cuda(2)),
        pytest.param((Level(1, 2),), marks=pytest.mark.cuda(2)),
        pytest.param((Level(1, 2, True), Level(2, 2)), marks=pytest.mark.cuda(4)),
    ],
)
def test_states_level_by_level(worlds, op, layout, levels):
    for lengths in ([4096], [2, 2043, 3]):
        for found in worlds(2 * len(levels), "nccl").run(on_rank, op, lengths, layout, levels):
            assert not {n: e for n, e in found.items() if not e <= PROMISED[n]}
