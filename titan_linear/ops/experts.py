"""Ops of a mixture of experts: copies of tokens for experts, their products and activations, sums of what they give,
and means over whole streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.exchange.collectives import sum_ranks
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import check_first_derivative, kept, operator
from titan_linear.ops.runtime.support import (
    Choice,
    Implementation,
    Op,
    Target,
    dtype_in,
    instead_of,
    on_gpu,
)
from titan_linear.ops.torch import experts as in_torch
from titan_linear.ops.triton.configs import with_kernels

# --- Routing ---------------------------------------------------------------------------------------------------------


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, D], weight [E, D] -> x weightᵀ [N, E] in float32 or wider.

    In bfloat16, products are exact on tensor cores, and summed in float32; the logits' gradient is two numbers in
    bfloat16, which leave 2⁻¹⁶ of it out.
    """
    return _Logits.apply(x, weight)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.T)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        check_first_derivative()
        x, weight = ctx.saved_tensors
        if x.dtype != torch.bfloat16:
            return wide_product(d, weight).to(x.dtype), wide_product(d.T, x).to(weight.dtype)
        high = d.to(x.dtype)
        parts = torch.cat([high, (d - high).to(x.dtype)], 1)  # [N, 2 E]
        dweight = wide_product(parts.T, x).unflatten(0, (2, -1)).sum(0)
        return parts @ torch.cat([weight, weight]), dweight.to(weight.dtype)


def _wide_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))


@operator(fake=_wide_fake, cost=lambda outputs, a, b: costs.Grouped(len(a), b.shape[1], len(b)))
def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(wide), b.to(wide))


@operator(
    fake=lambda scores, k, passes: scores.new_empty(scores.shape[0], k, dtype=torch.int64),
    kept_by=("selective",),
)
def top_k(scores: Tensor, k: int, passes: str) -> Tensor:
    """The indices [N, k] of the k largest of scores [N, E], largest first; of equal ones the lowest comes first."""
    return COPIES.load(passes).top_k(scores.contiguous(), k)


# --- Copies ----------------------------------------------------------------------------------------------------------


class Copies(NamedTuple):
    """Up to k copies of each of N tokens, one per row: row slots[n, j] is token n's j-th copy, which is not there where
    that is -1; order[row] = n · k + j."""

    slots: Tensor  # [N, k] int64
    order: Tensor  # [rows] int64


def loads(experts: Tensor, num_experts: int) -> Tensor:
    """[num_experts] int64, the number of copies for each."""
    chosen = experts.flatten()
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def by_expert(experts: Tensor, num_experts: int, rows: int) -> Copies:
    """Rows sorted by expert and, for each expert, by token. experts [N, k] int64, -1: no copy; rows: all others."""
    here = experts >= 0
    # which a GPU sorts in two passes
    keys = experts.where(here, num_experts).flatten().to(torch.int16)
    order = keys.sort(stable=True).indices
    return Copies(inverse(order).view_as(experts).where(here, -1), order[:rows])


@operator(fake=torch.empty_like)
def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes one. Compiled for a CPU, it was fused with what reads it and came out as zeros."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def by_slot(slots: Tensor, rows: int) -> Copies:
    """slots: as in `Copies`; those that are -1 go to a last row, which is cut off."""
    places = torch.arange(slots.numel(), device=slots.device)
    order = places.new_empty(rows + 1).scatter_(0, slots.where(slots >= 0, rows).flatten(), places)
    return Copies(slots, order[:rows])


def spread(x: Tensor, copies: Copies, impl: str | Choice = "auto") -> Tensor:
    """The copies of x [N, D] -> [rows, D]. Differentiable in x; a token's gradients are added up in float32 or wider,
    in the order of its copies."""
    return _Pass.apply(
        x, copies.slots, len(copies.order), COPIES.implementation(impl, x.device, x.dtype), False
    )


def collect(y: Tensor, copies: Copies, impl: str | Choice = "auto") -> Tensor:
    """x[n] = Σ_j y[slots[n, j]] in float32 or wider, in the order of j. y [rows, D] -> [N, D] in y's dtype."""
    return _Pass.apply(
        y, copies.slots, len(copies.order), COPIES.implementation(impl, y.device, y.dtype), True
    )


def activate(
    y: Tensor, weights: Tensor, copies: Copies, gated: bool, impl: str | Choice = "auto"
) -> Tensor:
    """weights · silu(gate) · up of rows y [rows, 2 H] if gated, gates first, or weights · relu(y)² of y [rows, H], in
    float32 or wider. weights [N, k] of each token's copies -> [rows, H]. Differentiable in y and weights."""
    return _Activate.apply(
        y, weights, *copies, gated, COPIES.implementation(impl, y.device, y.dtype)
    )


class _Pass(torch.autograd.Function):
    """`collect` if `sums`, else `spread`: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: int, name: str, sums: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.how = rows, name, sums
        return _pass(x, slots, rows, name, sums)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        (slots,), (rows, name, sums) = ctx.saved_tensors, ctx.how
        return _pass(dy, slots, rows, name, not sums), *[None] * 4


def _pass(x: Tensor, slots: Tensor, rows: int, name: str, sums: bool) -> Tensor:
    passes = COPIES.load(name)
    return (
        passes.collect(x.contiguous(), slots)
        if sums
        else passes.spread(x.contiguous(), slots, rows)
    )


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor, slots: Tensor, order: Tensor, gated: bool, name: str
    ) -> Tensor:
        y, of_rows = y.contiguous(), weights.flatten()[order]
        ctx.save_for_backward(y, of_rows, slots)
        ctx.name, ctx.gated = name, gated
        return COPIES.load(name).activate(y, of_rows, gated)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        y, of_rows, slots = ctx.saved_tensors
        dy, dweights = COPIES.load(ctx.name).activate_backward(
            y, of_rows, dx.contiguous(), ctx.gated
        )
        return dy, F.pad(dweights, (0, 1))[slots], *[None] * 4  # slots of -1 read the 0


def _triton() -> Any:
    from titan_linear.ops.triton import experts  # Triton is available on Linux only

    return experts


COPIES = Op("expert_copies", with_kernels(_triton, lambda: in_torch, slower="slower"))


# --- Products --------------------------------------------------------------------------------------------------------


class Products(NamedTuple):
    """With one matrix per group of rows; a group's rows are adjacent, and groups in order."""

    # x [M, I], weight [E, O, I], counts [E] -> [M, O]
    linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    # dy [M, O], x [M, I], counts [E] -> [E, O, I], sums over rows
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    impls: tuple[str | Choice, str | Choice] = ("auto", "auto"),
    copies: Copies | None = None,
    keep: bool = True,
) -> Tensor:
    """y_i = W_e x_i for rows x_i of group e; rows of a group are adjacent, and groups are in order.

    x [M, I], weight [E, O, I], counts [E] int64 that sum to M -> y [M, O]; with `copies` sums over each token's rows,
    [N, O]. Differentiable in x and weight. impls: of products and of passes over rows (GROUPED_LINEAR, COPIES). keep:
    what selective checkpointing does with y.
    In bfloat16 on CUDA it is one kernel of PyTorch if I and O are multiples of 8; else a loop over groups, for which,
    on CUDA, the host waits for the counts.
    """
    products, passes = impls
    _, O, I = weight.shape
    products = GROUPED_LINEAR.implementation(products, x.device, x.dtype, I=I, O=O)
    passes = COPIES.implementation(passes, x.device, x.dtype)
    return _Linear.apply(
        x, weight, counts, None if copies is None else copies.slots, products, passes, keep
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        slots: Tensor | None,
        products: str,
        passes: str,
        keep: bool,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, counts, slots)
        ctx.products, ctx.passes = products, passes
        return (kept_product if keep else grouped_product)(
            x, weight, counts, slots, products, passes
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        x, weight, counts, slots = ctx.saved_tensors
        dy = dy.contiguous() if slots is None else _pass(dy, slots, len(x), ctx.passes, False)
        of_x, of_weight, *_ = ctx.needs_input_grad
        dx = (
            grouped_product(dy, weight.mT, counts, None, ctx.products, ctx.passes) if of_x else None
        )
        return dx, outer_product(dy, x, counts, ctx.products) if of_weight else None, *[None] * 5


# In `fake`, len() would fix a size that varies.


def _product_fake(
    x: Tensor, weight: Tensor, counts: Tensor, slots: Tensor | None, *_: str
) -> Tensor:
    return x.new_empty((x if slots is None else slots).shape[0], weight.shape[1])


def _product(
    x: Tensor, weight: Tensor, counts: Tensor, slots: Tensor | None, products: str, passes: str
) -> Tensor:
    """As `grouped_linear`; rows as wide as tokens lie only inside."""
    y = GROUPED_LINEAR.load(products).linear(x, weight, counts)
    return y if slots is None else COPIES.load(passes).collect(y, slots)


def _product_cost(
    outputs: tuple[Tensor], x: Tensor, weight: Tensor, slots: Tensor | None, **_: Any
) -> costs.Grouped:
    inside = 0 if slots is None else len(x) * weight.shape[1] * x.element_size() + outputs[0].nbytes
    _, n, k = weight.shape
    return costs.Grouped(len(x), n, k, inside)


_spec: dict[str, Any] = {
    "fake": _product_fake,
    "cost": _product_cost,
    "temporary": lambda x, weight, slots, **_: (
        0 if slots is None else len(x) * weight.shape[1] * x.element_size()
    ),
}
kept_product = operator(_product, name="kept_product", kept_by=("selective",), **_spec)
grouped_product = operator(_product, name="grouped_product", **_spec)


@operator(
    fake=lambda dy, x, counts, _: x.new_empty(counts.shape[0], dy.shape[1], x.shape[1]),
    cost=lambda outputs, dy, x, **_: costs.Grouped(len(x), dy.shape[1], x.shape[1]),
)
def outer_product(dy: Tensor, x: Tensor, counts: Tensor, products: str) -> Tensor:
    """Σ dy_i x_iᵀ over rows of each group: dy [M, O], x [M, I] -> [E, O, I]."""
    return GROUPED_LINEAR.load(products).outer(dy, x, counts)


def _grouped_mm() -> Products:
    def ends(counts: Tensor) -> Tensor:
        return counts.cumsum(0).to(torch.int32)

    return Products(
        lambda x, weight, counts: torch._grouped_mm(x, weight.mT, offs=ends(counts)),
        lambda dy, x, counts: torch._grouped_mm(dy.mT, x, offs=ends(counts)),
    )


def _loop() -> Products:
    def linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        groups = zip(x.split(counts.tolist()), weight.unbind(0), strict=True)
        return torch.cat([torch.mm(rows, matrix.T) for rows, matrix in groups])

    def outer(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        groups = zip(*(t.split(counts.tolist()) for t in (dy, x)), strict=True)
        return torch.stack([torch.mm(of_dy.T, of_x) for of_dy, of_x in groups])

    return Products(linear, outer)


def rows_of_16_bytes(t: Target) -> str | None:
    """Rows of all matrices, gradients too, must be multiples of 16 bytes; each dim is the length of some rows."""
    step = 16 // t.dtype.itemsize
    uneven = (
        f"rows of {n} are no multiple of {step} numbers (16 bytes)"
        for n in t.dims.values()
        if n % step
    )
    return next(uneven, None)


GROUPED_LINEAR = Op(
    "grouped_linear",
    {
        "grouped_mm": Implementation(
            _grouped_mm, (on_gpu, dtype_in(torch.bfloat16), rows_of_16_bytes)
        ),
        "loop": Implementation(
            _loop, remark=instead_of("grouped_mm", "every layer with experts waits for the GPU")
        ),
    },
)


# --- Means -----------------------------------------------------------------------------------------------------------


@kept
@torch.no_grad()
def stream_means(x: Tensor, num_streams: int, cp_context: CPContext | None) -> Tensor:
    """x [T, E], this rank's tokens, one stream after another -> [num_streams, E], means over whole streams."""
    means = x.unflatten(0, (num_streams, -1)).mean(1)
    # ranks have equal parts of every stream
    if cp_context is not None and cp_context.ranks.world_size > 1:
        means = sum_ranks(means, cp_context.ranks.group_name) / cp_context.ranks.world_size
    return means
