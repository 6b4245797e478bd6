"""The ops that a mixer calls, with the shapes it gives them and their definitions in
float64.

The doctor computes them in several ways and compares the results (ops.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.models.config import MixerOptions
from titan_linear.models.draws import generator
from titan_linear.models.layers import widen
from titan_linear.models.mixers.attention import Attention
from titan_linear.models.mixers.delta import GDN, IN_KERNEL, KDA, DeltaOptions
from titan_linear.models.mixers.lightning import Lightning
from titan_linear.models.mixers.mamba2 import Mamba2
from titan_linear.models.mixers.mla import MLA
from titan_linear.models.mixers.rwkv7 import RWKV7, log_decay
from titan_linear.models.mixers.short_conv import ShortConv
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import (
    attention,
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    chunk_simple_gla,
    chunk_ssd,
)
from titan_linear.ops.reference.attention import attention as direct_attention
from titan_linear.ops.reference.convolution import direct_causal_conv1d
from titan_linear.ops.reference.delta_rule import gdn_gate, kda_gate, l2norm, recurrent_delta_rule
from titan_linear.ops.reference.linear_attention import (
    recurrent_dplr,
    recurrent_simple_gla,
    recurrent_ssd,
)

Tensors = dict[str, Tensor]
# Bounds in float64, of recurrences and of softmax attention.
DELTA = 1e-9
EXACT = 1e-10


@dataclass(frozen=True)
class Draws:
    """Draws normal numbers by name, in float64, for T tokens."""

    T: int
    seed: int
    # Kind of mixer.
    kind: str
    device: torch.device
    # Context-parallel method of its op.
    cp_method: str

    def __call__(self, name: str, *shape: int) -> Tensor:
        rng = generator(self.seed, "proof", self.kind, name)
        return torch.randn(shape, generator=rng).double().to(self.device)

    def how(self, plan: BatchPlan, impl: str) -> dict[str, Any]:
        """Return the arguments that all recurrences take."""
        return {"impl": impl, "cp_method": self.cp_method, **plan.documents}

    def tokens(self, **shapes: tuple[int, ...]) -> Tensors:
        """Draw [1, T, ...] for each name."""
        return {name: self(name, 1, self.T, *shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Case:
    """An op with the shapes that a mixer gives it, or a mixer."""

    # For example "chunk_kda" or "mixer kda".
    name: str
    # [1, T, ...] float64: the inputs, and `dy`, the output's gradient.
    tokens: Tensors
    # Maps x (inputs and parameters), plan and impl to the output [1, T, ...].
    run: Callable[[Tensors, BatchPlan, str], Tensor]
    # An op's definition, of x and cu_seqlens.
    oracle: Callable[[Tensors, Tensor], Tensor] | None
    # Bounds of results in dtypes other than float64, in UNITs. "" stands for all other
    # results.
    units: Mapping[str, float]
    # Bound in float64.
    bound: float = DELTA
    # Parameters, float64, and the names of the ones that are never narrower than float32.
    parameters: Tensors = field(default_factory=dict)
    wide: tuple[str, ...] = ()
    # Below float64, these replace the parameters that amplify rounding.
    usual: Tensors = field(default_factory=dict)
    # The output and its inputs are [1, T, heads, ...].
    by_head: bool = True
    layers: tuple[int, ...] = ()
    # Index in the batch at which its tokens begin.
    first: int = 0

    def __str__(self) -> str:
        plural = "s" if len(self.layers) > 1 else ""
        return f"{self.name}, layer{plural} {', '.join(map(str, self.layers))}"

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an input where the case is computed in `dtype`."""
        return torch.promote_types(dtype, torch.float32) if name in self.wide else dtype


@singledispatch
def cases(mixer: MixerOptions, draw: Draws) -> Iterator[Case]:
    """Yield each op of a mixer. An op that is not registered here is only compared with
    itself.
    """
    return iter(())


# --- Softmax attention, convolutions ------------------------------------------------------


@cases.register(Attention)
def _(mixer: Attention, draw: Draws) -> Iterator[Case]:
    D = mixer.head_dim
    yield _attention(draw, mixer.heads, mixer.kv_heads, D, D, mixer.scale)


@cases.register(MLA)
def _(mixer: MLA, draw: Draws) -> Iterator[Case]:
    yield _attention(draw, mixer.heads, mixer.heads, mixer.head_dim, mixer.v_dim)


@cases.register(ShortConv)
def _(mixer: ShortConv, draw: Draws) -> Iterator[Case]:
    yield _convolution(draw, (mixer.channels,), mixer.conv_size, activation=None)


def _attention(
    draw: Draws,
    heads: int,
    kv_heads: int,
    D: int,
    Dv: int,
    scale: float | None = None,
) -> Case:
    def run(x, plan, impl):
        return attention(**x, scale=scale, method=draw.cp_method, **plan.documents)

    def oracle(x, cu_seqlens):
        return direct_attention(**x, scale=scale, cu_seqlens=cu_seqlens)

    tokens = draw.tokens(q=(heads, D), k=(kv_heads, D), v=(kv_heads, Dv), dy=(heads, Dv))
    return Case("attention", tokens, run, oracle, {"": 6.0, "y": 3.0}, EXACT)


def _convolution(
    draw: Draws,
    widths: tuple[int, ...],
    W: int,
    *,
    bias: bool = False,
    activation: str | None = "silu",
    norm_dim: int | None = None,
) -> Case:
    """Return the case of a convolution.

    norm_dim: the number of channels of a normalized head, if `widths` are the widths of q,
    k and v.
    """
    D = sum(widths)
    options = {"activation": activation, "widths": widths, "norm_dim": norm_dim}

    def run(x, plan, impl):
        return torch.cat(causal_conv1d(**x, **options, impl=impl, **plan.documents)[0], -1)

    def oracle(x, cu_seqlens):
        return direct_causal_conv1d(**x, **options, cu_seqlens=cu_seqlens)[0]

    parameters = {"weight": draw("weight", D, W) / 2}
    if bias:
        parameters["bias"] = draw("bias", D)
    tokens = draw.tokens(x=(D,), dy=(D,))
    more = {"parameters": parameters, "by_head": False}
    return Case("causal_conv1d", tokens, run, oracle, {"": 1.5}, **more)


# --- Recurrences --------------------------------------------------------------------------
#
# Decays last for hundreds of tokens and differ by head, so that a leak does not fade and
# exchanged heads are noticed. They amplify rounding. Below float64, kernels are held to
# their bounds for usual decays.


@cases.register(KDA)
def _(mixer: KDA, draw: Draws) -> Iterator[Case]:
    gates = (mixer.v_heads, mixer.head_dim)
    return _delta_rule(mixer, draw, chunk_kda, kda_gate, gates, lower_bound=mixer.lower_bound)


@cases.register(GDN)
def _(mixer: GDN, draw: Draws) -> Iterator[Case]:
    return _delta_rule(mixer, draw, chunk_gated_delta_rule, gdn_gate, (mixer.v_heads,))


def _delta_rule(
    mixer: DeltaOptions,
    draw: Draws,
    op: Callable[..., tuple[Tensor, Tensor | None]],
    gate: Callable[..., Tensor],
    gates: tuple[int, ...],
    **options: Any,
) -> Iterator[Case]:
    """Yield the cases of a delta rule.

    gate: the definition of log decays, from `gates` [1, T, *gates]. options: of gate and
    op.
    """
    H = mixer.heads
    HV = mixer.v_heads
    K = mixer.head_dim
    V = mixer.v_head_dim
    dt_bias = draw("dt_bias", math.prod(gates))
    # Slow decays, which differ by head.
    slow = {"A_log": torch.linspace(-1, 1, HV).double().to(dt_bias.device), "dt_bias": dt_bias - 7}

    # q and k are normalized before the op, in the run's dtype.
    def run(x, plan, impl):
        x = x | {name: l2norm(x[name]).to(x[name].dtype) for name in "qk"}
        signed = mixer.beta_range == 2.0
        how = draw.how(plan, impl) | IN_KERNEL | options
        return op(**x, allow_neg_eigval=signed, **how)[0]

    def oracle(x, cu_seqlens):
        q = l2norm(x["q"])
        k = l2norm(x["k"])
        g = gate(x["g"], x["A_log"], x["dt_bias"], **options)
        beta = mixer.beta_range * x["beta"].sigmoid()
        return recurrent_delta_rule(q, k, x["v"], g, beta, cu_seqlens=cu_seqlens)[0]

    tokens = draw.tokens(q=(H, K), k=(H, K), v=(HV, V), g=gates, beta=(HV,), dy=(HV, V))
    # The gradients of the last two are sums that cancel.
    units = {"": 1.5, "g": 3.0, "beta": 3.0, "A_log": 6.0, "dt_bias": 6.0}
    more = {"parameters": slow, "wide": ("A_log", "dt_bias"), "usual": {"dt_bias": dt_bias}}
    yield Case(mixer.op, tokens, run, oracle, units, **more)
    yield _convolution(draw, (H * K, H * K, HV * V), mixer.conv_size, norm_dim=K)


@cases.register(Lightning)
def _(mixer: Lightning, draw: Draws) -> Iterator[Case]:
    heads = mixer.heads
    K = mixer.head_dim

    def run(x, plan, impl):
        x = x | {"g": -F.softplus(widen(x["g"]) - 7)}
        return chunk_simple_gla(**x, scale=1.0, **draw.how(plan, impl))[0]

    def oracle(x, cu_seqlens):
        x = x | {"g": -F.softplus(x["g"] - 7)}
        return recurrent_simple_gla(**x, scale=1.0, cu_seqlens=cu_seqlens)[0]

    tokens = draw.tokens(q=(heads, K), k=(heads, K), v=(heads, K), g=(heads,), dy=(heads, K))
    yield Case(mixer.op, tokens, run, oracle, {"": 1.5, "g": 3.0})


@cases.register(Mamba2)
def _(mixer: Mamba2, draw: Draws) -> Iterator[Case]:
    heads = mixer.heads
    P = mixer.head_dim
    G = mixer.groups
    N = mixer.state_dim
    limits = {"dt_softplus": True, "dt_limit": (mixer.dt_min, mixer.dt_max)}
    dt_bias = draw("dt_bias", heads)
    A = -torch.linspace(0.3, 3, heads).double().to(dt_bias.device)

    def run(x, plan, impl):
        return chunk_ssd(**x, **limits, **draw.how(plan, impl))[0]

    def oracle(x, cu_seqlens):
        return recurrent_ssd(**x, **limits, cu_seqlens=cu_seqlens)[0]

    tokens = draw.tokens(x=(heads, P), dt=(heads,), B=(G, N), C=(G, N), dy=(heads, P))
    parameters = {"A": A, "D": draw("D", heads), "dt_bias": dt_bias - 7}
    units = {"": 1.5, "dt": 3.0, "B": 3.0, "C": 3.0, **dict.fromkeys(parameters, 6.0)}
    more = {"parameters": parameters, "wide": tuple(parameters), "usual": {"dt_bias": dt_bias}}
    yield Case(mixer.op, tokens, run, oracle, units, **more)
    yield _convolution(draw, mixer.widths, mixer.conv_size, bias=mixer.conv_bias)


@cases.register(RWKV7)
def _(mixer: RWKV7, draw: Draws) -> Iterator[Case]:
    shape = (mixer.heads, mixer.head_dim)

    # The op takes the normalized direction, negated, as `a`, and a scaled copy as `b`.
    def inputs(x: Tensors) -> Tensors:
        removed = F.normalize(widen(x["a"]), dim=-1)
        b = removed * widen(x["b"]).sigmoid()
        return x | {"w": x["w"] - 7, "a": -removed.to(x["a"].dtype), "b": b.to(x["b"].dtype)}

    def run(x, plan, impl):
        return chunk_rwkv7(**inputs(x), use_gate_in_kernel=True, **draw.how(plan, impl))[0]

    def oracle(x, cu_seqlens):
        r, w, *others = (inputs(x)[name] for name in "rwkvab")
        return recurrent_dplr(r, *others, log_decay(w), scale=1.0, cu_seqlens=cu_seqlens)[0]

    # All inputs and the output have the same shape.
    tokens = draw.tokens(**dict.fromkeys("rwkvab", shape), dy=shape)
    yield Case(mixer.op, tokens, run, oracle, {"": 3.0, "w": 6.0})
    yield _convolution(draw, (math.prod(shape),), 2, activation=None)
