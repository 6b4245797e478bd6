"""Gathers and sums over the ranks of a group, as operators: compiled code takes each as one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_linear.ops.cp.exchange import group_named
from titan_linear.ops.operators import operator, register_fake


class Ranks(NamedTuple):
    """The ranks of a group, as operators take them, and which of them this is."""

    group: str
    size: int
    rank: int


@operator
def gather_along(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """x [1 .., n, ...] of each rank → [1 .., size · n, ...], in rank order, n at `dim`."""
    out = x.new_empty(_with(x.shape, dim, x.shape[dim] * size))
    dist.all_gather_into_tensor(out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group))
    return out


@register_fake(gather_along)
def _(x, dim, group, size):
    return x.new_empty(_with(x.shape, dim, x.shape[dim] * size))


@operator
def scatter_along(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """x [1 .., size · n, ...] of each rank → [1 .., n, ...], this rank's part of their sum: the other's adjoint."""
    out = x.new_empty(_with(x.shape, dim, x.shape[dim] // size))
    dist.reduce_scatter_tensor(out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group))
    return out


@register_fake(scatter_along)
def _(x, dim, group, size):
    return x.new_empty(_with(x.shape, dim, x.shape[dim] // size))


def _with(shape: torch.Size, dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


@operator
def sum_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """x [...] of each rank → [...], their sum: its own adjoint."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_named(group))
    return out


@register_fake(sum_ranks)
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gather_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [1, T / size, ...], this rank's tokens → [1, T, ...], all of them. Backward sums what the ranks say of them."""
    return _GatherTokens.apply(x, ranks.group, ranks.size)


def scatter_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [1, T, ...], this rank's part of a sum → [1, T / size, ...], the whole sum of this rank's tokens."""
    return _ScatterTokens.apply(x, ranks.group, ranks.size)


def sum_over_ranks(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x [...], this rank's part of a sum → [...], the sum, of which each rank then computes something else."""
    return _SumOverRanks.apply(x, ranks.group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.ranks = group, size
        return gather_along(x, 1, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter_along(grad, 1, *ctx.ranks), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.ranks = group, size
        return scatter_along(x, 1, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_along(grad, 1, *ctx.ranks), None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return sum_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_ranks(grad, ctx.group), None
