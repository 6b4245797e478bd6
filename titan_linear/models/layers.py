"""Layers from which mixers and blocks are built. Reductions run in float32 or wider."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from titan_linear.models.draws import ones, zeros
from titan_linear.ops import causal_conv1d
from titan_linear.ops.float8 import Product
from titan_linear.ops.runtime.support import Choice

# Types of a model's options. With sizes below 2^20 each, the bytes of a tensor fit in
# int64.
Size = Annotated[int, Field(ge=1, lt=2**20)]
# 0: the part does not exist.
SizeOr0 = Annotated[int, Field(ge=0, lt=2**20)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Number of queries whose attention telemetry samples.
QUERIES = 32
# By op of titan_linear.ops: the sizes that its implementations depend on.
OpDims = dict[str, dict[str, int]]
# Ops of `OpModule.token_shift`.
SHIFT_OPS: OpDims = {"causal_conv1d": {"W": 2}}
# What a layer keeps of earlier tokens.
Cache = MutableMapping[str, Tensor] | None


class Output(NamedTuple):
    """Result of a branch or a layer, if it is more than y."""

    y: Tensor  # [B, T, dim]
    # Load-balance loss of experts.
    balance: Tensor | None = None
    # Values that later layers take, [B, T, width].
    values: Tensor | None = None


def as_output(y: Tensor | Output) -> Output:
    return y if isinstance(y, Output) else Output(y)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 if `dtype` is float64 already."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype))


def parameter(*shape: int) -> nn.Parameter:
    """Return a parameter whose values are drawn later (models/init.py)."""
    return nn.Parameter(torch.empty(shape))


def by_head(x: Tensor, dim: int) -> Tensor:
    """Split x [.., heads·dim] into heads [.., heads, dim]."""
    return x.unflatten(-1, (-1, dim))


def heads_split(*names: str) -> dict[str, int]:
    """Return a mixer's `split` by heads: these parameters by rows, and o_proj by columns."""
    return {**dict.fromkeys(names, 0), "o_proj.weight": 1}


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


class LowRankUpdate(NamedTuple):
    """The low-rank adapter of a projection, which adds s (x Aᵀ) Bᵀ to its output.

    B [outputs, r] is the projection's `lora_B`. Projections that form one matrix in a
    Hugging Face folder share A (models/lora.py).
    """

    # The scale s.
    factor: float
    # The projection whose `lora_A` [r, inputs] is A.
    down: Projection


class Projection(nn.Linear):
    """A linear layer.

    `product` multiplies with its weight, in float8 if the layer has no bias
    (models/float8.py).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)
        self.product: Product = F.linear
        self.lora: LowRankUpdate | None = None
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the layer.

        Args:
            bias: a bias that belongs to another module.
        """
        if self.product is F.linear:
            y = F.linear(x, self.weight, self.bias if bias is None else bias)
        else:
            y = _joined(x, self)
        return adapted(y, x, self)


projection = Projection  # without a bias


def lora_name(name: str, part: str) -> str:
    """Return the name of A or B of a weight."""
    return (
        f"{name.removesuffix('weight')}lora_{part}"
        if name.endswith("weight")
        else f"{name}_lora_{part}"
    )


def adapted(y: Tensor, x: Tensor, *projections: Projection) -> Tensor:
    """Add the adapters' output to y [.., Σ outputs], these projections' output for x."""
    downs = _downs(projections)
    return (
        add_low_rank(y, F.linear(x, torch.cat([p.lora_A for p in downs])), *projections)
        if downs
        else y
    )


def add_low_rank(y: Tensor, low: Tensor, *projections: Projection) -> Tensor:
    """Add the adapters' output to y, given low [.., Σ r]: x Aᵀ of each A."""
    downs = _downs(projections)
    rank = low.shape[-1] // len(downs)
    # One matrix [Σ outputs, Σ r] of all B, each in the columns of its A.
    rows = []
    for p in projections:
        i = downs.index(p.lora.down) if p.lora else 0
        B = p.lora_B if p.lora else low.new_zeros(len(p.weight), rank)
        rows.append(F.pad(B, (i * rank, (len(downs) - 1 - i) * rank)))  # [outputs, Σ r]
    factor = next(p.lora.factor for p in projections if p.lora)
    return torch.addmm(
        y.flatten(0, -2), low.flatten(0, -2), torch.cat(rows).T, alpha=factor
    ).view_as(y)


def _downs(projections: Sequence[Projection]) -> list[Projection]:
    return list(dict.fromkeys(p.lora.down for p in projections if p.lora))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    If zero-centered, the factor is (1 + weight).
    """

    def __init__(self, dim: int, eps: float, zero_centred: bool = False):
        super().__init__()
        self.weight = parameter(dim)
        self.eps = eps
        self.zero_centred = zero_centred
        self.initial = {"weight": zeros if zero_centred else ones}

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + widen(self.weight) if self.zero_centred else widen(self.weight)
        return F.rms_norm(widen(x), self.weight.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.bias = (parameter(dim) for _ in range(2))
        self.eps = eps
        self.initial = {"weight": ones, "bias": zeros}

    def forward(self, x: Tensor) -> Tensor:
        weight = widen(self.weight)
        bias = widen(self.bias)
        return F.layer_norm(widen(x), weight.shape, weight, bias, self.eps).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) · act(z), where act is sigmoid or silu."""

    def __init__(self, dim: int, eps: float, activation: str):
        super().__init__(dim, eps)
        self.activation = {"sigmoid": torch.sigmoid, "silu": F.silu}[activation]

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        normed = F.rms_norm(widen(x), self.weight.shape, widen(self.weight), self.eps)
        return (normed * self.activation(widen(z))).to(x.dtype)


def project(x: Tensor, *projections: Projection) -> Tensor:
    """Apply projections without biases to x [.., dim] as one product.

    Their outputs are concatenated.
    """
    return adapted(_joined(x, *projections), x, *projections)


def _joined(x: Tensor, *projections: Projection) -> Tensor:
    weights = [projection.weight for projection in projections]
    product = projections[0].product
    # Without gradients (generation, or a frozen model's first layer) the compiler cannot
    # pass `product` to an autograd function.
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *weights)):
        return product(x, torch.cat(weights))
    return _Project.apply(x, product, *weights)


class _Project(torch.autograd.Function):
    """A product with concatenated weights, which backward concatenates again.

    If it were saved, the concatenation would be a copy that FSDP cannot free.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Product, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.product = product
        return product(x, torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, _, *of_weights = ctx.needs_input_grad
        # dy has autocast's dtype if only forward ran under autocast.
        dy = dy.to(x.dtype)
        dx = ctx.product(dy, torch.cat(weights).T) if of_x else None
        # Frozen weights need no gradients.
        if not any(of_weights):
            return dx, None, *(None for _ in weights)
        dweight = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return dx, None, *dweight.split([len(weight) for weight in weights])


def cut(x: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """Split x [.., Σ widths] into adjacent slices [.., width], as views."""
    return _Cut.apply(x, widths)


def project_each(x: Tensor, *projections: Projection) -> tuple[Tensor, ...]:
    """Return the output of each projection, computed as one product."""
    return cut(project(x, *projections), *(len(p.weight) for p in projections))


class _Cut(torch.autograd.Function):
    """Slicing in forward, one concatenation in backward.

    Forward slices because a compiler saves the results of torch.split for backward.
    Backward concatenates once; the gradients of plain slices would each be padded to the
    full width and added.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(x[..., a:b] for a, b in pairwise([0, *accumulate(widths)]))

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None]:
        return torch.cat(parts, -1), None


def attention_entropy(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Measure how evenly QUERIES queries attend.

    The measure is the entropy of the attention weights divided by its maximum, ln(number of
    keys).

    Args:
        q: [1, T, H, D].
        k: [1, T, Hkv, D]; attention is causal.
        cu_seqlens: [N+1] boundaries of the packed documents.

    Returns:
        The sum over the queries [H] and the number of queries [H], without queries that see
        only one key.
    """
    # Evenly spaced queries, and the keys that each of them sees.
    T, H = q.shape[1:3]
    rows = (torch.arange(1, QUERIES + 1, device=q.device) * T // QUERIES - 1).clamp(min=0)
    keys = torch.arange(T, device=q.device)
    # Starts of the queries' documents, [queries].
    first = cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]
    seen = (keys >= first[:, None]) & (keys <= rows[:, None])  # [queries, T]
    # Attention weights of these queries.
    k = widen(k[0]).repeat_interleave(H // k.shape[2], dim=1)
    scores = torch.einsum("qhd,khd->hqk", widen(q[0, rows]), k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    logs = scores.masked_fill(~seen, float("-inf")).log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(~seen, 0.0)).sum(-1)  # [H, queries]
    # Average over the queries that see several keys.
    count = seen.sum(-1)
    several = (count > 1).to(entropy.dtype)
    return (entropy / count.clamp(min=2).log() * several).sum(-1), several.sum().expand(H)


class ConvWeight(nn.Module):
    """The weight [D, W] of a short depthwise convolution, and its bias [D] if it has one.

    The bias is drawn as zeros.

    Args:
        factor: factor on its inputs.
    """

    def __init__(self, dim: int, width: int, bias: bool = False, factor: float = 1.0):
        super().__init__()
        self.factor = factor
        self.weight = parameter(dim, width)
        self.bias = parameter(dim) if bias else None
        self.initial = {"bias": zeros}


def grown(cache: Cache, **new: Tensor) -> tuple[Tensor, ...]:
    """Append tensors [B, T, ...] to the cache's [B, earlier, ...] and return both together."""
    if cache is not None:
        new = {
            name: torch.cat([cache[name], x], 1) if name in cache else x for name, x in new.items()
        }
        cache.update(new)
    return tuple(new.values())


class OpModule(nn.Module):
    """A module that calls ops."""

    # Op -> the implementation that `Decoder.use` has chosen.
    implementations: Mapping[str, Choice] = {}

    def impl(self, op: str) -> str | Choice:
        """Return the choice for an op; without one, the op decides at each call."""
        return self.implementations.get(op, "auto")

    def convolve(self, x: Tensor, weight: Tensor, cache: Cache, name: str, **options: Any) -> Any:
        """Apply `causal_conv1d`, continuing from and updating a cache.

        cache[name] has the last inputs [B, D, W−1].
        """
        if cache is not None:
            options |= {"initial_state": cache.get(name), "output_final_state": True}
        y, tail = causal_conv1d(x, weight, impl=self.impl("causal_conv1d"), **options)
        if cache is not None:
            cache[name] = tail
        return y

    def token_shift(
        self, x: Tensor, documents: dict[str, object], cache: Cache, name: str
    ) -> Tensor:
        """Return RWKV's shift x_{t−1} − x_t: [B, T, D] -> [B, T, D].

        x_{−1} is 0 before the first token of each document.

        It is a convolution with the taps 1 and 0, which handles documents, halos and states.
        cache[name] is the last token's x, [B, D, 1].
        """
        taps = F.pad(x.new_ones(x.shape[-1], 1), (0, 1))  # [D, 2]
        return self.convolve(x, taps, cache, name, **documents) - x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding to x [B, T, H, D].

    It rotates halves of a head against each other (RoFormer; Llama's layout).

    With cos and sin [T, half] or [B, T, half], the first 2·half channels of each head are
    rotated; the others do not change.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [.., T, 1, half]
    a, b, rest = widen(x).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)
