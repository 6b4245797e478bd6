"""Move tensors between the ranks of a group, given by its name because operators cannot take the group itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist


def group_named(name: str) -> dist.ProcessGroup:
    """The group whose `group_name` this is."""
    return dist.distributed_c10d._resolve_process_group(name)


def between_nodes(group: dist.ProcessGroup | None) -> bool:
    """Whether the ranks of a group are on several nodes, according to torchrun's environment."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not size or type(group) is not dist.ProcessGroup:  # no torchrun, no group, or a group in one process
        return False
    return len({rank // size for rank in dist.get_process_group_ranks(group)}) > 1


def all_to_all(x: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: str) -> torch.Tensor:
    """x [Σ send_sizes, ...]: its first send_sizes[0] rows go to rank 0 of the group, the next to rank 1, and so on ->
    [Σ receive_sizes, ...], the rows received, in rank order. Every rank of the group must call it."""
    return start_all_to_all(x, send_sizes, receive_sizes, group)()


# The same and other collectives, asynchronous: each returns a function that waits for the result and returns it.


def start_all_to_all(
    x: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: str
) -> Callable[[], torch.Tensor]:
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    # Call the group itself: the checks and logs of `dist.all_to_all_single` take as long as launching the exchange.
    return _arrival(group_named(group).alltoall_base(out, x, receive_sizes, send_sizes, dist.AllToAllOptions()), out)


def start_all_gather(x: torch.Tensor, group: str) -> Callable[[], torch.Tensor]:
    """x [n, ...] → [W·n, ...], the rows of all ranks in rank order."""
    ranks = group_named(group)
    out = x.new_empty(ranks.size() * len(x), *x.shape[1:])
    return _arrival(dist.all_gather_into_tensor(out, x, group=ranks, async_op=True), out)


def start_reduce_scatter(x: torch.Tensor, group: str) -> Callable[[], torch.Tensor]:
    """x [W·n, ...] → [n, ...], this rank's part of the sum over ranks."""
    ranks = group_named(group)
    out = x.new_empty(len(x) // ranks.size(), *x.shape[1:])
    return _arrival(dist.reduce_scatter_tensor(out, x, group=ranks, async_op=True), out)


def _arrival(work: dist.Work, out: torch.Tensor) -> Callable[[], torch.Tensor]:
    def wait() -> torch.Tensor:
        work.wait()
        return out

    return wait
