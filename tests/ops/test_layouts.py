"""Inputs whose numbers lie anywhere in memory, and inputs of no tokens, in every op and implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ops.inputs import device_of, gradients, leaves, make_inputs, raw_gate_inputs
from titan_linear.ops import attention, build_cp_context, causal_conv1d, chunk_gated_delta_rule, chunk_kda
from titan_linear.ops.swiglu import swiglu

T = 70
RULES = {"kda": chunk_kda, "gdn": chunk_gated_delta_rule}


def of_rule(op: str) -> tuple[Callable, dict[str, torch.Tensor]]:
    options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    return lambda impl, **x: RULES[op](**x, **options, impl=impl)[0], raw_gate_inputs(op, T, K=16, V=16)


def of_convolution() -> tuple[Callable, dict[str, torch.Tensor]]:
    x = {"x": torch.randn(1, T, 8), "weight": torch.randn(8, 4), "bias": torch.randn(8)}
    return lambda impl, **x: causal_conv1d(**x, activation="silu", impl=impl)[0], x


def of_attention() -> tuple[Callable, dict[str, torch.Tensor]]:
    return lambda impl, **x: attention(**x), {name: torch.randn(1, T, 2, 8) for name in "qkv"}


def of_swiglu() -> tuple[Callable, dict[str, torch.Tensor]]:
    return lambda impl, **x: swiglu(**x, impl=impl), {"gate_up": torch.randn(T, 16), "weight": torch.randn(4, 8)}


def apart(x: torch.Tensor) -> torch.Tensor:
    """Its numbers, every second one of memory in the last dimension, the others NaN."""
    wide = x.new_full((*x.shape, 2), torch.nan)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.parametrize(
    ("make", "impl"),
    [
        *[(lambda op=op: of_rule(op), impl) for op in RULES for impl in ("torch", "triton")],
        *[(of_convolution, impl) for impl in ("torch", "triton")],
        (of_attention, "torch"),
    ],
    ids=["kda torch", "kda triton", "gdn torch", "gdn triton", "conv torch", "conv triton", "attention"],
)
def test_numbers_apart(make: Callable, impl: str) -> None:
    torch.manual_seed(0)
    op, x = make()
    x = {name: t.float().to(device_of(impl)) for name, t in x.items()}
    dense, spread = leaves(x), {name: apart(t).requires_grad_() for name, t in x.items()}
    got, want = (gradients([op(impl, **given)], given) for given in (spread, dense))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", RULES)
def test_parameters_of_gates_in_any_shape(op: str) -> None:
    """A_log as [HV, 1], where T is HV, and as Kimi publishes it."""
    x = raw_gate_inputs(op, 4)
    run, _ = of_rule(op)
    for shape in ((4, 1), (1, 1, 4, 1)):
        assert torch.equal(run("torch", **x | {"A_log": x["A_log"].view(shape)}), run("torch", **x))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dimensions_of_nothing_are_refused(dim: int) -> None:
    x = {name: t.narrow(dim, 0, 0) if t.dim() > dim else t for name, t in make_inputs("kda", 8).items()}
    with pytest.raises(ValueError, match="none of them 0"):
        chunk_kda(**x)
    with pytest.raises(ValueError, match="none of them 0"):
        causal_conv1d(torch.zeros(2, 8, 4).narrow(dim, 0, 0), torch.zeros(4, 4))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("op", RULES)
def test_boundaries_apart(op: str, impl: str) -> None:
    """cu_seqlens as every second number of memory."""
    x = {name: t.float().to(device_of(impl)) for name, t in make_inputs(op, T, K=16, V=16).items()}
    cu = torch.tensor([0, 9, 30, T], dtype=torch.int32, device=device_of(impl))
    wide = torch.stack([cu, cu + 1000], 1)[:, 0]
    got, want = (RULES[op](**x, cu_seqlens=given, impl=impl)[0] for given in (wide, cu))
    assert torch.equal(got, want)
    x, weight = torch.randn(1, T, 8, device=cu.device), torch.randn(8, 4, device=cu.device)
    got, want = (causal_conv1d(x, weight, cu_seqlens=given, impl=impl)[0] for given in (wide, cu))
    assert torch.equal(got, want)


def test_shapes_and_dtypes_of_the_smaller_ops() -> None:
    x = torch.randn(1, 8, 4)
    for given, words in (
        ((x.long(), torch.zeros(4, 4)), "x is torch.int64; give"), ((x, torch.zeros(4, 0)), "W not 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            causal_conv1d(*given)
    for width in (7, 10):
        with pytest.raises(ValueError, match=r"gate_up .* must be \[.., 2 H\] and"):
            swiglu(torch.randn(8, width), torch.randn(4, 4))


@pytest.mark.parametrize("op", RULES)
def test_a_context_that_inference_saw_first(op: str) -> None:
    x = {name: t.float() for name, t in make_inputs(op, 70, K=16, V=16).items()}
    context = build_cp_context(torch.tensor([0, 9, 70]), rank=0, world_size=1)
    for impl in ("torch", "triton"):
        on = {name: t.to(device_of(impl)) for name, t in x.items()}
        with torch.inference_mode():
            RULES[op](**on, cp_context=context, impl=impl)
        on = leaves(on)
        assert all(grad.isfinite().all() for grad in gradients([RULES[op](**on, cp_context=context, impl=impl)[0]], on))


def test_decoding_under_autocast() -> None:
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    first = torch.tensor([0, 2])
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, v, first_key=first)
    assert torch.equal(o, attention(q, k, v, first_key=first))


@pytest.mark.parametrize(
    ("make", "impl"),
    [(lambda: of_rule("kda"), "torch"), (of_convolution, "triton"), (of_attention, "torch"), (of_swiglu, "torch")],
    ids=["kda", "conv", "attention", "swiglu"],
)
def test_second_derivatives_are_refused(make: Callable, impl: str) -> None:
    op, x = make()
    x = leaves({name: t.float().to(device_of(impl)) for name, t in x.items()})
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(op(impl, **x).sum(), list(x.values()), create_graph=True)
