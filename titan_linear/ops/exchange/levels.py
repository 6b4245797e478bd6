"""Exchange of KCP's states across many ranks, level by level (layout/levels.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import all_to_all, group_named
from titan_linear.ops.exchange.folds import BlockRuns, by_kernels, compose_runs, fold_runs
from titan_linear.ops.layout.chains import Chains, block_sizes
from titan_linear.ops.layout.levels import Level


def incoming_by_levels(
    S_ext: Tensor,
    M: Tensor,
    c: Chains,
    levels: Sequence[Level],
    group: str,
    reverse: bool,
) -> Tensor:
    """Return the result of `kcp_incoming` (kcp.py) for the same arguments."""
    # Climb: exchange pairs with the members of each level, and compose them for the next.
    climbed = []
    for level in levels:
        climbed.append(runs := _members(S_ext, M, c, level, group))
        if level is not levels[-1]:
            S_ext, M = compose_runs(runs, reverse)
    top = climbed.pop()
    # At the top, the runs of all slots are one run in global order: fold through it.
    joined = BlockRuns(*(x.flatten(0, 1).unsqueeze(0) for x in top))
    states = fold_runs(joined, None, reverse).view_as(top.S_ext)
    # Descend: pick this rank's states, and fold them through the members of each lower
    # level.
    for level, runs in zip(reversed(levels), [*reversed(climbed), None], strict=True):
        states = _own(states, c, level, group)
        if runs is not None:
            states = fold_runs(runs, states, reverse)
    return states


def _members(S_ext: Tensor, M: Tensor, c: Chains, level: Level, group: str) -> BlockRuns:
    """Exchange S_ext and M of this rank's block [slots, HV, ...] with a level's members.

    Returns the pairs of all members [slots, members, h, ...] in global order; h is HV, or
    this rank's share of HV.
    """
    slots, HV, K, V = S_ext.shape
    W, first = _place(level, group)
    pairs = torch.cat([S_ext.flatten(2), M.flatten(2)], 2)
    # Members that divide the heads get a share of each pair; the others get all pairs of
    # these heads.
    if level.shares_heads:
        came = _exchanged(pairs.transpose(0, 1).contiguous(), level, group)
        came = came.view(level.members, HV // level.members, slots, -1).transpose(1, 2)
    else:
        came = _exchanged(pairs.expand(level.members, *pairs.shape).contiguous(), level, group)
        came = came.view(level.members, *pairs.shape)
    states, transitions = _mirrored(came.transpose(0, 1), c).split([K * V, M[0, 0].numel()], -1)
    table = c.blocks if by_kernels(S_ext) else c.blocks_on_host
    # Find what the members pass on; in the table, blocks of fewer ranks come first.
    smaller = sum(W // n for n in block_sizes(W) if n < level.stride)
    begin = (smaller + first // level.stride) * slots
    wanted = table[begin : begin + level.members * slots].view(level.members, slots)
    return BlockRuns(
        states.unflatten(-1, (K, V)).contiguous(),
        transitions.unflatten(-1, M.shape[2:]).contiguous(),
        _mirrored(wanted.T, c).contiguous(),
    )


def _own(states: Tensor, c: Chains, level: Level, group: str) -> Tensor:
    """Pick the states [slots, HV, K, V] that enter this rank.

    The states that enter a level's members [slots, members, h, K, V] are in global order.
    """
    states = _mirrored(states, c)
    # Members that divided the heads send the states back; the others pick their own.
    if level.shares_heads:
        came = _exchanged(states.transpose(0, 1).contiguous(), level, group)
        return came.view_as(states.transpose(0, 1)).transpose(0, 1).flatten(1, 2)
    return states[:, group_named(group).rank() // level.stride % level.members]


def _exchanged(x: Tensor, level: Level, group: str) -> Tensor:
    """Send an equal part of x to each member of the level, and return one part from each."""
    W, first = _place(level, group)
    sizes = [0] * W
    sizes[first : first + level.stride * level.members : level.stride] = [
        x.numel() // level.members
    ] * level.members
    return all_to_all(x.flatten(), sizes, sizes, group)


def _place(level: Level, group: str) -> tuple[int, int]:
    """Return the number of ranks, and the first rank with which this rank exchanges."""
    ranks = group_named(group)
    return ranks.size(), ranks.rank() - ranks.rank() // level.stride % level.members * level.stride


def _mirrored(x: Tensor, c: Chains) -> Tensor:
    """Return x [slots, members, ...], turned from rank order to global order or back.

    In the zigzag layout, a rank's second fragment of a stream comes before the second
    fragments of lower ranks.
    """
    if not c.zigzag.item():
        return x
    return torch.stack([x[::2], x[1::2].flip(1)], 1).flatten(0, 1)
