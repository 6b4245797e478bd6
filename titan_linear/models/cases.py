"""The ops that a mixer calls, with the shapes it gives them and their definitions: what the doctor computes in several
ways and compares (proof/ops.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.models.layers import widen
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import attention, causal_conv1d, chunk_simple_gla
from titan_linear.ops.reference.attention import attention as direct_attention
from titan_linear.ops.reference.convolution import direct_causal_conv1d
from titan_linear.ops.reference.linear_attention import recurrent_simple_gla

Tensors = dict[str, Tensor]
Draws = Callable[..., Tensor]  # (name, *shape) -> normal numbers, float64
DELTA, EXACT = 1e-9, 1e-10  # bounds in float64, of recurrences and of softmax attention


@dataclass(frozen=True)
class OpCase:
    op: str
    tokens: Mapping[str, tuple[int, ...]]  # inputs [1, T, ...]: their shapes behind T
    output: tuple[int, ...]  # likewise
    parameters: Tensors  # float64
    run: Callable[..., Tensor]  # (inputs, plan, impl, cp_method) -> [1, T, ...]
    oracle: Callable[[Tensors, Tensor], Tensor]  # the op's definition: (inputs, cu_seqlens)
    units: Mapping[str, float]  # bounds of results in other dtypes than float64, in their units; "": all others
    bound: float = DELTA  # in float64
    wide: tuple[str, ...] = ()  # parameters that are never narrower than float32
    usual: Tensors = field(default_factory=dict)  # parameters instead of those that amplify rounding
    by_head: bool = True  # the output and its inputs are [1, T, heads, ...]


def attention_case(heads: int, kv_heads: int, D: int, Dv: int, scale: float | None = None) -> OpCase:
    def run(x: Tensors, plan: BatchPlan, impl: str, cp_method: str) -> Tensor:
        return attention(**x, scale=scale, method=cp_method, **plan.documents)

    def oracle(x: Tensors, cu_seqlens: Tensor) -> Tensor:
        return direct_attention(**x, scale=scale, cu_seqlens=cu_seqlens)

    tokens = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, Dv)}
    return OpCase("attention", tokens, (heads, Dv), {}, run, oracle, {"": 6.0, "y": 3.0}, EXACT)


def convolution_case(
    draw: Draws,
    widths: Sequence[int],
    W: int,
    *,
    bias: bool = False,
    activation: str | None = "silu",
    norm_dim: int | None = None,
) -> OpCase:
    """norm_dim: with the `widths` of q, k and v, the channels of a normalised head."""
    D = sum(widths)
    options = {"activation": activation, "widths": widths, "norm_dim": norm_dim}

    def run(x: Tensors, plan: BatchPlan, impl: str, cp_method: str) -> Tensor:
        return torch.cat(causal_conv1d(**x, **options, impl=impl, **plan.documents)[0], -1)

    def oracle(x: Tensors, cu_seqlens: Tensor) -> Tensor:
        return direct_causal_conv1d(**x, **options, cu_seqlens=cu_seqlens)[0]

    parameters = {"weight": draw("weight", D, W) / 2} | ({"bias": draw("bias", D)} if bias else {})
    return OpCase("causal_conv1d", {"x": (D,)}, (D,), parameters, run, oracle, {"": 1.5}, by_head=False)


def simple_gla_case(heads: int, K: int, V: int, scale: float | None = None) -> OpCase:
    """With decays that last for hundreds of tokens, so that a leak does not fade."""

    def run(x: Tensors, plan: BatchPlan, impl: str, cp_method: str) -> Tensor:
        x = x | {"g": -F.softplus(widen(x["g"]) - 7)}
        return chunk_simple_gla(**x, scale=scale, impl=impl, cp_method=cp_method, **plan.documents)[0]

    def oracle(x: Tensors, cu_seqlens: Tensor) -> Tensor:
        x = x | {"g": -F.softplus(x["g"] - 7)}
        return recurrent_simple_gla(**x, scale=scale, cu_seqlens=cu_seqlens)[0]

    tokens = {"q": (heads, K), "k": (heads, K), "v": (heads, V), "g": (heads,)}
    return OpCase("chunk_simple_gla", tokens, (heads, V), {}, run, oracle, {"": 1.5, "g": 3.0})
