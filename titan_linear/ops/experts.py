"""Ops of a mixture of experts: copies of tokens for experts and sums of what these give, products with one matrix per
group of rows, and means over whole streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.exchange.collectives import sum_ranks
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime.operators import check_first_derivative, kept
from titan_linear.ops.runtime.support import Choice, Implementation, Op, Target, dtype_in, instead_of, on_gpu
from titan_linear.ops.triton.configs import with_kernels

# --- Copies ----------------------------------------------------------------------------------------------------------


class Copies(NamedTuple):
    """Up to k copies of each of N tokens, one per row: row slots[n, j] is token n's j-th copy, which is not there where
    that is -1; order[row] = n · k + j."""

    slots: Tensor  # [N, k] int64
    order: Tensor  # [rows] int64

    @property
    def tokens(self) -> Tensor:
        """[rows] the token of each row."""
        return self.order // self.slots.shape[1]


def by_expert(experts: Tensor, num_experts: int, rows: int) -> Copies:
    """Rows sorted by expert and, for each expert, by token. experts [N, k] int64, -1: no copy; rows: all others."""
    here = experts >= 0
    order = experts.where(here, num_experts).flatten().sort(stable=True).indices
    places = torch.arange(len(order), device=order.device)
    slots = torch.empty_like(order).scatter_(0, order, places).view_as(experts)
    return Copies(slots.where(here, -1), order[:rows])


def by_slot(slots: Tensor, rows: int) -> Copies:
    """slots: as in `Copies`; those that are -1 go to a last row, which is cut off."""
    places = torch.arange(slots.numel(), device=slots.device)
    order = places.new_empty(rows + 1).scatter_(0, slots.where(slots >= 0, rows).flatten(), places)
    return Copies(slots, order[:rows])


def spread(x: Tensor, copies: Copies, impl: str | Choice = "auto") -> Tensor:
    """The copies of x [N, D] -> [rows, D]. Differentiable in x; a token's gradients are added up in float32 or wider,
    in the order of its copies."""
    return _Spread.apply(x, *copies, COPIES.implementation(impl, x.device, x.dtype))


def collect(y: Tensor, copies: Copies, weights: Tensor | None = None, impl: str | Choice = "auto") -> Tensor:
    """x[n] = Σ_j weights[n, j] · y[slots[n, j]] in float32 or wider, in the order of j; no weights: the sum.

    y [rows, D], weights [N, k] -> x [N, D] in y's dtype. Differentiable in y and weights.
    """
    return _Collect.apply(y, *copies, weights, COPIES.implementation(impl, y.device, y.dtype))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, order: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.name = name
        return x[Copies(slots, order).tokens]  # which compiled code does not keep, but reads again

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        check_first_derivative()
        (slots,) = ctx.saved_tensors
        return COPIES.load(ctx.name)[0](dy.contiguous(), slots, None), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, order: Tensor, weights: Tensor | None, name: str) -> Tensor:
        y = y.contiguous()
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(slots, *((order,) if weights is None else (weights, y)))
        ctx.name, ctx.weighed = name, weights is not None
        return COPIES.load(name)[0](y, slots, weights)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        check_first_derivative()
        if not ctx.weighed:
            return dx[Copies(*ctx.saved_tensors).tokens], None, None, None, None
        dy, dweights = COPIES.load(ctx.name)[1](dx.contiguous(), *ctx.saved_tensors)
        return dy, None, None, dweights, None


def _collect(y: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    x = y.new_zeros(len(slots), y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for j, (copy, here) in enumerate(_each_copy(y, slots)):
        x = x + (copy if weights is None else copy * weights[:, j, None]).where(here, 0.0)
    return x.to(y.dtype, copy=True)  # compiled, torch 2.11 drops the gradient of what is returned as it is


def _collect_backward(dx: Tensor, slots: Tensor, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = dx.to(torch.promote_types(dx.dtype, torch.float32))
    copies = by_slot(slots, len(y))
    dy = wide[copies.tokens] * weights.flatten()[copies.order, None]
    dweights = [(wide * copy).where(here, 0.0).sum(1) for copy, here in _each_copy(y, slots)]
    return dy.to(y.dtype), torch.stack(dweights, 1).to(weights.dtype)


def _each_copy(y: Tensor, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The j-th copy of each token, [N, D] in float32 or wider, and whether there is one, [N, 1]."""
    y = y.to(torch.promote_types(y.dtype, torch.float32)) if len(y) else y.new_zeros(1, y.shape[1])
    return [(y[at.clamp(min=0)], at.unsqueeze(1) >= 0) for at in slots.unbind(1)]


def _triton() -> tuple[Callable[..., Any], ...]:
    from titan_linear.ops.triton import copies  # Triton is available on Linux only

    return copies.collect_copies, copies.collect_copies_backward


COPIES = Op("expert_copies", with_kernels(_triton, lambda: (_collect, _collect_backward), slower="slower"))


# --- Products --------------------------------------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, impl: str | Choice = "auto") -> Tensor:
    """y_i = W_e x_i for rows x_i of group e; rows of a group are adjacent, and groups are in order.

    x [M, I], weight [E, O, I], counts [E] int64 that sum to M -> y [M, O]. Differentiable in x and weight.
    In bfloat16 on CUDA it is one kernel of PyTorch if I and O are multiples of 8; else a loop over groups, for which,
    on CUDA, the host waits for the counts.
    """
    _, O, I = weight.shape
    return GROUPED_LINEAR.load(GROUPED_LINEAR.implementation(impl, x.device, x.dtype, I=I, O=O))(x, weight, counts)


def _grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))


@torch.compiler.disable
def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    groups = zip(x.split(counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def rows_of_16_bytes(t: Target) -> str | None:
    """Rows of all matrices, gradients too, must be multiples of 16 bytes; each dim is the length of some rows."""
    step = 16 // t.dtype.itemsize
    uneven = (f"rows of {n} are no multiple of {step} numbers (16 bytes)" for n in t.dims.values() if n % step)
    return next(uneven, None)


GROUPED_LINEAR = Op(
    "grouped_linear",
    {
        "grouped_mm": Implementation(lambda: _grouped_mm, (on_gpu, dtype_in(torch.bfloat16), rows_of_16_bytes)),
        "loop": Implementation(
            lambda: _loop, remark=instead_of("grouped_mm", "every layer with experts waits for the GPU")
        ),
    },
)


# --- Means -----------------------------------------------------------------------------------------------------------


@kept
@torch.no_grad()
def stream_means(x: Tensor, num_streams: int, cp_context: CPContext | None) -> Tensor:
    """x [T, E], this rank's tokens, one stream after another -> [num_streams, E], means over whole streams."""
    means = x.unflatten(0, (num_streams, -1)).mean(1)
    if cp_context is not None and cp_context.ranks.world_size > 1:  # ranks have equal parts of every stream
        means = sum_ranks(means, cp_context.ranks.group_name) / cp_context.ranks.world_size
    return means
