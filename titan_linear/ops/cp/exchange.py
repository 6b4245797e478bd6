"""Moving tensors between the ranks of a group, by its name: operators cannot take the group itself."""

from __future__ import annotations

import torch
import torch.distributed as dist


def group_named(name: str) -> dist.ProcessGroup:
    """The group whose `group_name` this is."""
    return dist.distributed_c10d._resolve_process_group(name)


def all_to_all(x: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: str) -> torch.Tensor:
    """x [Σ send_sizes, ...]: its first send_sizes[0] rows go to rank 0 of the group, the next to rank 1, and so on ->
    [Σ receive_sizes, ...], what came, in rank order. Every rank of the group must call it."""
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    # The group itself: `dist.all_to_all_single` checks and logs for as long as the exchange takes to launch.
    group_named(group).alltoall_base(out, x, receive_sizes, send_sizes, dist.AllToAllOptions()).wait()
    return out
