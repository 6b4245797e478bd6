"""Inputs whose numbers lie anywhere in memory, and inputs of no tokens, in every op and implementation."""

import pytest
import torch

from tests.ops.inputs import (
    chunked_cross_entropy,
    device_of,
    gradients,
    leaves,
    make_inputs,
    raw_gate_inputs,
    relative_error,
    same,
)
from tests.refusals import refused
from titan_linear.distributed.experts import _Exchange
from titan_linear.distributed.one_process import run_ranks
from titan_linear.models.layers import project, projection
from titan_linear.ops import (
    attention,
    build_cp_context,
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
)
from titan_linear.ops.exchange.halo import with_halo
from titan_linear.ops.exchange.ulysses import tokens_to_heads
from titan_linear.ops.swiglu import swiglu

T = 70
RULES = {"kda": chunk_kda, "gdn": chunk_gated_delta_rule}


def of_rule(op):
    options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    return lambda impl, **x: RULES[op](**x, **options, impl=impl)[0], raw_gate_inputs(
        op, T, K=16, V=16
    )


def of_convolution():
    x = {"x": torch.randn(1, T, 8), "weight": torch.randn(8, 4), "bias": torch.randn(8)}
    return lambda impl, **x: causal_conv1d(**x, activation="silu", impl=impl)[0], x


def of_attention():
    return lambda impl, **x: attention(**x), {name: torch.randn(1, T, 2, 8) for name in "qkv"}


def of_swiglu():
    return lambda impl, **x: swiglu(**x, impl=impl), {
        "gate_up": torch.randn(T, 16),
        "weight": torch.randn(4, 8),
    }


def apart(x):
    """Its numbers, every second one of memory in the last dimension, the others NaN."""
    wide = x.new_full((*x.shape, 2), torch.nan)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.parametrize(
    "make, impl",
    [
        *[(lambda op=op: of_rule(op), impl) for op in RULES for impl in ("torch", "triton")],
        *[(of_convolution, impl) for impl in ("torch", "triton")],
        (of_attention, "torch"),
    ],
    ids=[
        "kda torch",
        "kda triton",
        "gdn torch",
        "gdn triton",
        "conv torch",
        "conv triton",
        "attention",
    ],
)
def test_numbers_apart(make, impl):
    torch.manual_seed(0)
    op, x = make()
    x = {name: t.float().to(device_of(impl)) for name, t in x.items()}
    dense, spread = leaves(x), {name: apart(t).requires_grad_() for name, t in x.items()}
    got, want = (gradients([op(impl, **given)], given) for given in (spread, dense))
    assert same(got, want)


def test_parameters_of_gates_in_any_shape(op):
    """A_log as [HV, 1], where T is HV, and as Kimi publishes it."""
    x = raw_gate_inputs(op, 4)
    run, _ = of_rule(op)
    for shape in ((4, 1), (1, 1, 4, 1)):
        assert torch.equal(run("torch", **x | {"A_log": x["A_log"].view(shape)}), run("torch", **x))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dimensions_of_nothing_are_refused(dim):
    x = {
        name: t.narrow(dim, 0, 0) if t.dim() > dim else t
        for name, t in make_inputs("kda", 8).items()
    }
    with refused("none of them 0"):
        chunk_kda(**x)
    with refused("none of them 0"):
        causal_conv1d(torch.zeros(2, 8, 4).narrow(dim, 0, 0), torch.zeros(4, 4))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_boundaries_apart(op, impl):
    """cu_seqlens as every second number of memory."""
    x = {name: t.float().to(device_of(impl)) for name, t in make_inputs(op, T, K=16, V=16).items()}
    cu = torch.tensor([0, 9, 30, T], dtype=torch.int32, device=device_of(impl))
    wide = torch.stack([cu, cu + 1000], 1)[:, 0]
    got, want = (RULES[op](**x, cu_seqlens=given, impl=impl)[0] for given in (wide, cu))
    assert torch.equal(got, want)
    x, weight = torch.randn(1, T, 8, device=cu.device), torch.randn(8, 4, device=cu.device)
    got, want = (causal_conv1d(x, weight, cu_seqlens=given, impl=impl)[0] for given in (wide, cu))
    assert torch.equal(got, want)


def test_shapes_and_dtypes_of_the_smaller_ops():
    x = torch.randn(1, 8, 4)
    for given, words in (
        ((x.long(), torch.zeros(4, 4)), "x is torch.int64; give"),
        ((x, torch.zeros(4, 0)), "W not 0"),
        ((x, torch.zeros(4, 4).long()), "weight is torch.int64"),
        ((x, torch.tensor(1.0)), "must be .D, W."),
        ((x, torch.zeros(4, 4), torch.zeros(4).long()), "bias is torch.int64"),
    ):
        with refused(words):
            causal_conv1d(*given)
    for gate_up in (torch.randn(8, 7), torch.randn(8, 10), torch.tensor(1.0)):
        with refused(r"gate_up .* must be \[.., 2 H\] and"):
            swiglu(gate_up, torch.randn(4, 4))
    for integers in (0, 1):
        given = [torch.ones(8, 8), torch.ones(4, 4)]
        given[integers] = given[integers].long()
        with refused(f"{('gate_up', 'weight')[integers]} is torch.int64; give"):
            swiglu(*given)
    for scale in (0.0, torch.inf, torch.nan):
        with refused("must be above 0 and finite"):
            attention(*[torch.zeros(1, 2, 1, 8)] * 3, scale=scale)


@pytest.mark.parametrize("made", [False, True])
def test_a_context_that_inference_saw_first(op, made):
    """Or that was made there."""
    x = {name: t.float() for name, t in make_inputs(op, 70, K=16, V=16).items()}
    for impl in ("torch", "triton"):
        with torch.inference_mode(made):
            context = build_cp_context(
                torch.tensor([0, 9, 70]), rank=0, world_size=1, device=device_of(impl)
            )
        on = {name: t.to(device_of(impl)) for name, t in x.items()}
        with torch.inference_mode():
            RULES[op](**on, cp_context=context, impl=impl)
        on = leaves(on)
        assert all(
            grad.isfinite().all()
            for grad in gradients([RULES[op](**on, cp_context=context, impl=impl)[0]], on)
        )


@pytest.mark.parametrize("op", [*RULES, "conv", "attention"])
def test_a_context_that_lies_elsewhere_is_refused(op):
    context = build_cp_context(torch.tensor([0, 9, T]), rank=0, world_size=1, device="meta")
    with refused("is on cpu and cp_context on meta; build it with device = cpu"):
        if op == "attention":
            attention(*torch.randn(3, 1, T, 2, 8), cp_context=context)
        elif op == "conv":
            causal_conv1d(torch.randn(1, T, 8), torch.randn(8, 4), cp_context=context)
        else:
            RULES[op](**make_inputs(op, T, K=16, V=16), cp_context=context)


@pytest.mark.parametrize("compiled", [False, True])
def test_decoding_under_autocast(compiled):
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    first = torch.tensor([0, 2])
    decode = (
        torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    )
    with torch.autocast("cpu", torch.bfloat16):
        o = decode(q, k, v, first_key=first)
    assert torch.equal(o, attention(q, k, v, first_key=first))


def test_attention_in_tiles_under_autocast(monkeypatch):
    monkeypatch.setattr("titan_linear.ops.torch.attention.block_kernel", lambda *_: "tiled")
    x = leaves({name: torch.randn(1, T, 2, 8) for name in "qkv"})
    want = gradients([attention(**x)], x)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients([attention(**x)], x)
    assert same(got, want)


def test_only_forward_under_autocast():
    """SwiGLU and projections give what autocast's products do, and gradients in the types of the inputs."""
    x, dy = leaves({"gate_up": torch.randn(T, 16), "weight": torch.randn(4, 8)}), torch.randn(T, 4)
    layers = [projection(16, 8) for _ in range(2)]
    for run, given in (
        (swiglu, x),
        (lambda gate_up: project(gate_up, *layers)[:, :4], {"gate_up": x["gate_up"]}),
    ):
        want = torch.autograd.grad(run(**given), list(given.values()), dy)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(**given)
        got = torch.autograd.grad(y, list(given.values()), dy.bfloat16())
        assert y.dtype == torch.bfloat16
        assert all(
            g.dtype == torch.float32 and relative_error(g, w) < 2**-8
            for g, w in zip(got, want, strict=True)
        )


@pytest.mark.parametrize(
    "make, impl",
    [
        (lambda: of_rule("kda"), "torch"),
        (of_convolution, "triton"),
        (of_attention, "torch"),
        (of_swiglu, "torch"),
    ],
    ids=["kda", "conv", "attention", "swiglu"],
)
def test_second_derivatives_are_refused(make, impl):
    op, x = make()
    x = leaves({name: t.float().to(device_of(impl)) for name, t in x.items()})
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(op(impl, **x).sum(), list(x.values()), create_graph=True)


def exchanged(group):
    """Whether each exchange between ranks, and the loss, refuses a derivative of its gradient."""
    context = build_cp_context(torch.tensor([0, 8]), group, conv1d_kernel_size=3)
    pending = []
    calls = (
        lambda x: sum(
            y.sum()
            for y in with_halo(x**2, context.halo_of(2), context.cut.slots, 2, group.group_name)
        ),
        lambda x: tokens_to_heads((x**2).view(1, 4, 2), context),
        lambda x: _Exchange.apply(x**2, [2, 2], [2, 2], group.group_name, pending),
        lambda x: chunked_cross_entropy(
            x**2, torch.ones(3, 2), torch.ones(4, dtype=torch.int64), 4
        ),
    )
    refused = []
    for call in calls:
        x = torch.ones(4, 2, requires_grad=True)
        y = call(x).sum()
        try:
            torch.autograd.grad(y, x, create_graph=True)
        except RuntimeError as error:
            refused.append("second derivatives" in str(error))
    return refused


def test_second_derivatives_of_exchanges_are_refused():
    assert run_ranks(exchanged, 2) == [[True] * 4] * 2
