"""Gathers and sums over the ranks of a group, as operators: in compiled code each is one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_linear.ops.cp.exchange import group_named
from titan_linear.ops.operators import operator, register_autograd, register_fake


class Ranks(NamedTuple):
    """A group of ranks in the form that operators take: its name, its size, and this rank's number in it."""

    group: str
    size: int
    rank: int


@operator(kind="gather")
def gather_along(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """x [1 .., n, ...] of each rank → [1 .., size · n, ...], in rank order; n is the size of dimension `dim`."""
    out = x.new_empty(_with(x.shape, dim, x.shape[dim] * size))
    dist.all_gather_into_tensor(out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group))
    return out


@register_fake(gather_along)
def _(x, dim, group, size):
    return x.new_empty(_with(x.shape, dim, x.shape[dim] * size))


@operator(kept_by=("selective",), kind="scatter")
def scatter_along(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """x [1 .., size · n, ...] of each rank → [1 .., n, ...], this rank's part of the sum. Adjoint of `gather_along`."""
    out = x.new_empty(_with(x.shape, dim, x.shape[dim] // size))
    dist.reduce_scatter_tensor(out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group))
    return out


@register_fake(scatter_along)
def _(x, dim, group, size):
    return x.new_empty(_with(x.shape, dim, x.shape[dim] // size))


def _with(shape: torch.Size, dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


@operator(kept_by=("selective",), kind="sum")
def sum_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """x [...] of each rank → [...], their sum: its own adjoint."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_named(group))
    return out


@register_fake(sum_ranks)
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gather_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [1, T / size, ...], this rank's tokens → [1, T, ...], those of all. Backward sums the ranks' gradients."""
    return gather_along(x, 1, ranks.group, ranks.size)


def scatter_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [1, T, ...], this rank's term of a sum → [1, T / size, ...], the sum over ranks for this rank's tokens."""
    return scatter_along(x, 1, ranks.group, ranks.size)


def sum_over_ranks(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [...], this rank's term of a sum → [...], the sum, from which each rank then computes something different."""
    return sum_ranks(x, ranks.group)


def _register_adjoint(op: Callable[..., torch.Tensor], adjoint: Callable[..., torch.Tensor]) -> None:
    """Register the gradient of a linear operator: its adjoint, which takes the same arguments."""

    def keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, *ctx.arguments = inputs

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return adjoint(grad, *ctx.arguments), *(None for _ in ctx.arguments)

    register_autograd(op, backward, keep)


_register_adjoint(gather_along, scatter_along)
_register_adjoint(scatter_along, gather_along)
_register_adjoint(sum_ranks, sum_ranks)
