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


def tokens_in_global_order(x: torch.Tensor, order: Sequence[int], ranges: Sequence[Sequence[int]]) -> torch.Tensor:
    """[W, T_local, ...], every rank's tokens by rank → the tokens of these ranges of the global order, one after the
    other; copied once, or not at all where they lie together."""
    blocks = x.flatten(0, 1).unflatten(0, (len(order), -1))
    size, pieces = blocks.shape[1], []
    if list(order) == list(range(len(order))):
        pieces = [blocks.flatten(0, 1)[start:end] for start, end in ranges]
    else:
        for start, end in ranges:
            for n in range(start // size, -(-end // size)):
                pieces.append(blocks[order[n], max(start - n * size, 0) : end - n * size])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def to_rank_order(x: torch.Tensor, order: Sequence[int], world_size: int) -> torch.Tensor:
    """[T, ...] in global order → [W, T_local, ...]: the inverse of `to_global_order`."""
    if list(order) != list(range(len(order))):
        blocks = x.unflatten(0, (len(order), -1))
        x = torch.cat([blocks[i] for i in sorted(range(len(order)), key=order.__getitem__)])
    return x.unflatten(0, (world_size, -1))
