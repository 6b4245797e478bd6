"""Communication between the ranks of a group: exchanges, gathers and sums.

Gathers and sums are operators, each of which is one call in compiled code. Groups are
passed by name, because operators cannot take the group itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_autograd


class Ranks(NamedTuple):
    """A group of ranks in the form that operators take: its name, its size, and this rank."""

    group: str
    size: int
    rank: int


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group with this `group_name`."""
    return dist.distributed_c10d._resolve_process_group(name)


def all_to_all(x: Tensor, send_sizes: list[int], receive_sizes: list[int], group: str) -> Tensor:
    """Exchange rows of x [Σ send_sizes, ...] -> [Σ receive_sizes, ...], the rows received,
    in rank order.

    The first send_sizes[0] rows go to rank 0 of the group, the next send_sizes[1] to rank
    1, and so on. Every rank of the group must call it.
    """
    return start_all_to_all(x, send_sizes, receive_sizes, group)()


# Asynchronous collectives: each returns a function that waits for the result and returns
# it.


def start_all_to_all(
    x: Tensor, send_sizes: list[int], receive_sizes: list[int], group: str
) -> Callable[[], Tensor]:
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    # Call the group directly: the checks and logs of `dist.all_to_all_single` take as long
    # as launching the exchange.
    return _arrival(
        group_named(group).alltoall_base(out, x, receive_sizes, send_sizes, dist.AllToAllOptions()),
        out,
    )


def start_all_gather(x: Tensor, group: str) -> Callable[[], Tensor]:
    """Gather x [n, ...] → [W·n, ...], the rows of all ranks in rank order."""
    ranks = group_named(group)
    out = x.new_empty(ranks.size() * len(x), *x.shape[1:])
    return _arrival(dist.all_gather_into_tensor(out, x, group=ranks, async_op=True), out)


def start_reduce_scatter(x: Tensor, group: str) -> Callable[[], Tensor]:
    """Sum x [W·n, ...] over ranks → [n, ...], this rank's part of the sum."""
    ranks = group_named(group)
    out = x.new_empty(len(x) // ranks.size(), *x.shape[1:])
    return _arrival(dist.reduce_scatter_tensor(out, x, group=ranks, async_op=True), out)


def _arrival(work: dist.Work, out: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        work.wait()
        return out

    return wait


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Concatenate the parts, or return like[:0] without any.

    A single part is not copied: most chains have one link, and most spans have the rows of
    one rank.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else like[:0]


def add_rows(into: Tensor, rows: Tensor, x: Tensor) -> None:
    """Compute into[rows] += x, where rows may repeat.

    On GPUs `index_add_` would add repeated rows in a varying order.
    """
    into.index_put_((rows,), x, accumulate=True)


# Operators.


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])


@operator(
    fake=lambda x, dim, group, size: _resized(x, dim, x.shape[dim] * size),
    cost=costs.exchange("gather"),
)
def gather_along(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Gather x [1 .., n, ...] of each rank → [1 .., size · n, ...] in rank order.

    n is the size of dimension `dim`.
    """
    out = _resized(x, dim, x.shape[dim] * size)
    dist.all_gather_into_tensor(
        out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group)
    )
    return out


@operator(
    fake=lambda x, dim, group, size: _resized(x, dim, x.shape[dim] // size),
    kept_by=("selective",),
    cost=costs.exchange("scatter"),
)
def scatter_along(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Sum x [1 .., size · n, ...] over ranks → [1 .., n, ...], this rank's part of the sum.

    It is the adjoint of `gather_along`.
    """
    out = _resized(x, dim, x.shape[dim] // size)
    dist.reduce_scatter_tensor(
        out.flatten(0, dim), x.flatten(0, dim).contiguous(), group=group_named(group)
    )
    return out


@operator(
    fake=lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
    kept_by=("selective",),
    cost=costs.exchange("sum"),
)
def sum_ranks(x: Tensor, group: str) -> Tensor:
    """Sum x [...] over ranks → [...]. It is its own adjoint."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_named(group))
    return out


def gather_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """Gather x [1, T / size, ...], this rank's tokens → [1, T, ...], all ranks' tokens.

    Backward sums the ranks' gradients.
    """
    return gather_along(x, 1, ranks.group, ranks.size)


def scatter_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum x [1, T, ...] over ranks → [1, T / size, ...], the sum for this rank's tokens."""
    return scatter_along(x, 1, ranks.group, ranks.size)


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum x [...] over ranks → [...].

    Each rank then computes something different from the sum.
    """
    return sum_ranks(x, ranks.group)


def _register_adjoint(op: Callable[..., Tensor], adjoint: Callable[..., Tensor]) -> None:
    """Register an operator's gradient: its adjoint, which takes the same arguments."""

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, *ctx.arguments = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return adjoint(grad, *ctx.arguments), *(None for _ in ctx.arguments)

    register_autograd(op, backward, keep)


_register_adjoint(gather_along, scatter_along)
_register_adjoint(scatter_along, gather_along)
_register_adjoint(sum_ranks, sum_ranks)
