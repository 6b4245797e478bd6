"""Reorder a stream's tokens between global order and rank order: the tokens that each rank holds, rank after rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_global_order(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """x [W, T_local, ...], the tokens of each rank → [T, ...] in global order. order: `CPContext.order`."""
    x = x.flatten(0, 1)
    if list(order) == list(range(len(order))):
        return x
    blocks = x.unflatten(0, (len(order), -1))  # all fragments have the same length
    return torch.cat([blocks[i] for i in order])


def to_rank_order(x: torch.Tensor, order: Sequence[int], world_size: int) -> torch.Tensor:
    """[T, ...] in global order → [W, T_local, ...]: the inverse of `to_global_order`."""
    if list(order) != list(range(len(order))):
        blocks = x.unflatten(0, (len(order), -1))
        x = torch.cat([blocks[i] for i in sorted(range(len(order)), key=order.__getitem__)])
    return x.unflatten(0, (world_size, -1))
