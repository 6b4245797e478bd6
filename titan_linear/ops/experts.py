"""Ops of a mixture of experts.

These are routing, copies of tokens for experts, products and activations of experts, sums
of the experts' outputs, and means over whole streams.
"""

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

# --- Routing ------------------------------------------------------------------------------


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weightᵀ [N, E] in float32 or wider, for x [N, D] and weight [E, D].

    In bfloat16, products are exact on tensor cores and are summed in float32. Backward
    splits the logits' gradient into two bfloat16 numbers, which loses a relative 2⁻¹⁶ of
    it.
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
        # Split d into its rounded value and the remainder, so that both products run on
        # tensor cores.
        high = d.to(x.dtype)
        parts = torch.cat([high, (d - high).to(x.dtype)], 1)  # [N, 2 E]
        dweight = wide_product(parts.T, x).unflatten(0, (2, -1)).sum(0)
        return parts @ torch.cat([weight, weight]), dweight.to(weight.dtype)


def _wide_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))


@operator(fake=_wide_fake, cost=lambda outputs, a, b: costs.GroupedCost(len(a), b.shape[1], len(b)))
def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in float32 or wider."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(wide), b.to(wide))


@operator(
    fake=lambda scores, k, passes: scores.new_empty(scores.shape[0], k, dtype=torch.int64),
    kept_by=("selective",),
)
def top_k(scores: Tensor, k: int, passes: str) -> Tensor:
    """Return the indices [N, k] of the k largest of scores [N, E], the largest first.

    Of equal scores, the one with the lowest index comes first.
    """
    return COPIES.load(passes).top_k(scores.contiguous(), k)


# --- Copies -------------------------------------------------------------------------------


class Copies(NamedTuple):
    """Up to k copies of each of N tokens, one per row.

    Row slots[n, j] is the j-th copy of token n, or −1 if the copy does not exist.
    order[row] = n · k + j.
    """

    slots: Tensor  # [N, k] int64
    order: Tensor  # [rows] int64


def loads(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of copies for each expert, [num_experts] int64."""
    chosen = experts.flatten()
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def by_expert(experts: Tensor, num_experts: int, rows: int) -> Copies:
    """Return rows sorted by expert and, for each expert, by token.

    Args:
        experts: [N, k] int64, −1: no copy.
        rows: number of copies that exist.
    """
    here = experts >= 0
    # A GPU sorts int16 keys in two passes.
    keys = experts.where(here, num_experts).flatten().to(torch.int16)
    order = keys.sort(stable=True).indices
    return Copies(inverse(order).view_as(experts).where(here, -1), order[:rows])


@operator(fake=torch.empty_like)
def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`.

    It is an operator because the CPU compiler fused it with its reader and returned zeros.
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def by_slot(slots: Tensor, rows: int) -> Copies:
    """Return the copies of these slots (see `Copies`).

    Slots of −1 go to an extra last row, which is cut off.
    """
    places = torch.arange(slots.numel(), device=slots.device)
    order = places.new_empty(rows + 1).scatter_(0, slots.where(slots >= 0, rows).flatten(), places)
    return Copies(slots, order[:rows])


def spread(x: Tensor, copies: Copies, impl: str | Choice = "auto") -> Tensor:
    """Copy x [N, D] into rows [rows, D]. Differentiable in x.

    Backward adds up a token's gradients in float32 or wider, in the order of its copies.
    """
    return _Pass.apply(
        x, copies.slots, len(copies.order), COPIES.implementation(impl, x.device, x.dtype), False
    )


def collect(y: Tensor, copies: Copies, impl: str | Choice = "auto") -> Tensor:
    """Compute x[n] = Σ_j y[slots[n, j]]: y [rows, D] -> [N, D] in y's dtype.

    The sum is in float32 or wider, in the order of j.
    """
    return _Pass.apply(
        y, copies.slots, len(copies.order), COPIES.implementation(impl, y.device, y.dtype), True
    )


def activate(
    y: Tensor, weights: Tensor, copies: Copies, gated: bool, impl: str | Choice = "auto"
) -> Tensor:
    """Apply the experts' activation, weighted, in float32 or wider: -> [rows, H].

    If gated, y is [rows, 2 H], gates first, and the result is weights · silu(gate) · up.
    Otherwise y is [rows, H], and the result is weights · relu(y)². weights [N, k] are the
    weights of each token's copies. Differentiable in y and weights.
    """
    return _Activate.apply(
        y, weights, *copies, gated, COPIES.implementation(impl, y.device, y.dtype)
    )


class _Pass(torch.autograd.Function):
    """Apply `collect` if `sums`, else `spread`: each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        slots: Tensor,
        rows: int,
        name: str,
        sums: bool,
    ) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.how = rows, name, sums
        return _pass(x, slots, rows, name, sums)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        (slots,) = ctx.saved_tensors
        rows, name, sums = ctx.how
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
        ctx: Any,
        y: Tensor,
        weights: Tensor,
        slots: Tensor,
        order: Tensor,
        gated: bool,
        name: str,
    ) -> Tensor:
        y = y.contiguous()
        of_rows = weights.flatten()[order]
        ctx.save_for_backward(y, of_rows, slots)
        ctx.name = name
        ctx.gated = gated
        return COPIES.load(name).activate(y, of_rows, gated)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        y, of_rows, slots = ctx.saved_tensors
        dy, dweights = COPIES.load(ctx.name).activate_backward(
            y, of_rows, dx.contiguous(), ctx.gated
        )
        # Slots of −1 read the padded zero.
        return dy, F.pad(dweights, (0, 1))[slots], *[None] * 4


def _triton() -> Any:
    from titan_linear.ops.triton import experts  # Triton is available on Linux only

    return experts


COPIES = Op("expert_copies", with_kernels(_triton, lambda: in_torch, slower="slower"))


# --- Products -----------------------------------------------------------------------------


class Products(NamedTuple):
    """Matrix products with one matrix per group of rows.

    Rows of a group are adjacent, and groups are in order.
    """

    # x [M, I], weight [E, O, I], counts [E] -> [M, O]
    linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    # dy [M, O], x [M, I], counts [E] -> [E, O, I], summed over the rows of each group
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    impls: tuple[str | Choice, str | Choice] = ("auto", "auto"),
    copies: Copies | None = None,
    keep: bool = True,
) -> Tensor:
    """Compute y_i = W_e x_i for the rows x_i of group e.

    Rows of a group are adjacent, and groups are in order. Differentiable in x and weight.

    In bfloat16 on CUDA it is one kernel of PyTorch if I and O are multiples of 8. Otherwise
    it loops over groups; on CUDA the host then waits for the counts.

    Args:
        x: [M, I].
        weight: [E, O, I].
        counts: [E] int64, the rows of each group; they sum to M.
        impls: implementations of the products and of the passes over rows (GROUPED_LINEAR,
            COPIES).
        copies: if given, the result is summed over each token's rows.
        keep: whether selective checkpointing keeps y.

    Returns:
        y [M, O], or [N, O] with `copies`.
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
        ctx.products = products
        ctx.passes = passes
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


# Fakes read sizes from .shape: len() would make a varying size a constant in compiled code.


def _product_fake(
    x: Tensor, weight: Tensor, counts: Tensor, slots: Tensor | None, *_: str
) -> Tensor:
    return x.new_empty((x if slots is None else slots).shape[0], weight.shape[1])


def _product(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    slots: Tensor | None,
    products: str,
    passes: str,
) -> Tensor:
    """Compute `grouped_linear`; the rows [M, O] before the sum exist only in this call."""
    y = GROUPED_LINEAR.load(products).linear(x, weight, counts)
    return y if slots is None else COPIES.load(passes).collect(y, slots)


def _product_cost(
    outputs: tuple[Tensor], x: Tensor, weight: Tensor, slots: Tensor | None, **_: Any
) -> costs.GroupedCost:
    inside = 0 if slots is None else len(x) * weight.shape[1] * x.element_size() + outputs[0].nbytes
    _, n, k = weight.shape
    return costs.GroupedCost(len(x), n, k, inside)


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
    cost=lambda outputs, dy, x, **_: costs.GroupedCost(len(x), dy.shape[1], x.shape[1]),
)
def outer_product(dy: Tensor, x: Tensor, counts: Tensor, products: str) -> Tensor:
    """Compute Σ dy_i x_iᵀ over the rows of each group: dy [M, O], x [M, I] -> [E, O, I]."""
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
    """Require rows of all matrices, including gradients, to be multiples of 16 bytes.

    Each dim is the length of some rows.
    """
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


# --- Means --------------------------------------------------------------------------------


@kept
@torch.no_grad()
def stream_means(x: Tensor, num_streams: int, cp_context: CPContext | None) -> Tensor:
    """Return means over whole streams [num_streams, E] of x [T, E], this rank's tokens.

    The tokens are one stream after another.
    """
    means = x.unflatten(0, (num_streams, -1)).mean(1)
    # Ranks have equal parts of every stream, so the mean of their means is right.
    if cp_context is not None and cp_context.ranks.world_size > 1:
        means = sum_ranks(means, cp_context.ranks.group_name) / cp_context.ranks.world_size
    return means
