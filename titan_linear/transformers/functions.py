"""Our ops behind the signatures of the functions that transformers' layers call.

transformers hands keywords of a model's call down to these functions, and so the batch's `cp_context`. Layers that
gradient checkpointing runs again in backward receive their own batch's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_linear import ops


def in_context(*names: str) -> Callable:
    """Return a decorator: the function gets `cp_context` and, of the other keywords, those with these names."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, cp_context: ops.CPContext | None = None, **kwargs: Any) -> Any:
            if cp_context is None:
                raise ValueError(
                    "a layer was called without cp_context: call model(**cp.cut(batch)), and give "
                    "each further model of this class a context_parallel of its own"
                )
            options = {name: kwargs[name] for name in names if name in kwargs}
            return function(*args, cp_context=cp_context, **options)

        return call

    return decorate


def _wide(x: Tensor, like: Tensor) -> Tensor:
    # transformers computes decays in float32; ops want float64 for a float64 model.
    return x.to(torch.promote_types(x.dtype, like.dtype))


@in_context("weight", "bias", "activation")
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Convolve x [1, D, T] with weight [D, W]."""
    y, _ = ops.causal_conv1d(x.transpose(1, 2), weight, bias, **options)
    return y.transpose(1, 2)


def delta_rule(op: Callable) -> Callable:
    """Return a function that runs a delta rule on [1, T, H, K]."""

    @in_context("g", "beta", "use_qk_l2norm_in_kernel")
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        return op(q, k, v, _wide(g, v), **options)

    return call


@in_context("D", "dt_bias", "dt_softplus", "dt_limit")
def state_space(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Tensor:
    """Run Mamba-2's recurrence on x [1, T, heads, P]."""
    y, _ = ops.chunk_ssd(x, dt, _wide(A, x), B, C, **options)
    return y.contiguous()


def not_fused(*_: Any, **__: Any) -> None:
    """Replace Mamba's fused kernel, which would ignore documents: layers then call its parts."""


@in_context("hidden_states")
def lightning_attention(layer: nn.Module, hidden_states: Tensor, cp_context: ops.CPContext) -> Any:
    """Replace `MiniMaxLightningAttention.forward`: linear attention with one decay per head."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * layer.head_dim))
    q, k, v = qkv.split(layer.head_dim, dim=-1)
    decay = _wide(-layer.slope_rate.flatten(), v)
    o, _ = ops.chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0, cp_context=cp_context)
    gate = layer.output_gate(hidden_states).sigmoid()
    return layer.out_proj(gate * layer.norm(o.flatten(2))), None


@in_context("scaling")
def softmax_attention(_: nn.Module, *states: Any, cp_context: ops.CPContext, scaling: float) -> Any:
    """Attend within documents: query, key and value [1, H, T, D], and no mask -> [1, T, H, D]."""
    # Under autocast, rotary embeddings leave queries and keys wider than values.
    q, k, v = (x.transpose(1, 2).to(states[2].dtype) for x in states[:3])
    return ops.attention(q, k, v, scale=scaling, cp_context=cp_context), None


# --- Functions to replace in a family's modeling file -------------------------------------

CONVOLUTION = {"causal_conv1d_fn": convolution}
GATED_DELTA = CONVOLUTION | {"torch_chunk_gated_delta_rule": delta_rule(ops.chunk_gated_delta_rule)}
KIMI_DELTA = CONVOLUTION | {"chunk_kimi_delta_attention": delta_rule(ops.chunk_kda)}
MAMBA = CONVOLUTION | {
    "mamba2_chunk_scan": state_space,
    "mamba2_split_conv1d_scan_combined": not_fused,
}
# transformers' name of the family
FAMILIES: Mapping[str, Mapping[str, Callable]] = {
    "qwen3_5": GATED_DELTA,
    "qwen3_5_moe": GATED_DELTA,
    "qwen3_next": GATED_DELTA,
    "olmo_hybrid": GATED_DELTA,
    "kimi_linear": KIMI_DELTA,
    "bailing_hybrid": KIMI_DELTA,
    "nemotron_h": MAMBA,
    "granitemoehybrid": MAMBA,
    "bamba": MAMBA,
    "falcon_h1": MAMBA,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "minimax": {"MiniMaxLightningAttention.forward": lightning_attention},
}
