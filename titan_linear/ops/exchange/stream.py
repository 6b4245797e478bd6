"""Conversion between the tokens of a whole packed stream and one rank's tokens."""

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import gather_along
from titan_linear.ops.layout.context import CPContext


def gather_stream(x: Tensor, context: CPContext) -> Tensor:
    """Join the cp ranks' numbers [T_local], on every rank, in the stream's order [T]."""
    ranks = context.ranks
    order = context.cut.order
    if ranks.world_size == 1:
        return x
    parts = gather_along(x, 0, ranks.group_name, ranks.world_size)
    return parts.view(len(order), -1)[list(order)].flatten()


def take_fragments(x: Tensor, context: CPContext) -> Tensor:
    """Select this rank's fragments.

    Shapes are [1, T, ...] → [1, T_local, ...], or [depth, T] → [depth, T_local].
    """
    if context.ranks.world_size == 1:
        return x
    return torch.cat([x[:, start:end] for start, end in context.fragments], 1)
