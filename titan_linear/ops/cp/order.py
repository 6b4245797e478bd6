"""Between the global order of a stream's tokens and that in which ranks hold them, one rank after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_global_order(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """[W, T_local, ...], every rank's tokens by rank → [T, ...] in global order. order: that of `CPContext`."""
    x = x.flatten(0, 1)
    if list(order) == list(range(len(order))):
        return x
    blocks = x.unflatten(0, (len(order), -1))  # all fragments are of one length
    return torch.cat([blocks[i] for i in order])


def to_rank_order(x: torch.Tensor, order: Sequence[int], world_size: int) -> torch.Tensor:
    """[T, ...] in global order → [W, T_local, ...]: the inverse of `to_global_order`."""
    if list(order) != list(range(len(order))):
        blocks = x.unflatten(0, (len(order), -1))
        x = torch.cat([blocks[i] for i in sorted(range(len(order)), key=order.__getitem__)])
    return x.unflatten(0, (world_size, -1))
