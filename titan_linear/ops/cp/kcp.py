"""KCP: context parallelism for recurrences whose fragment acts on the state as S ↦ M S + S_ext.

Each rank gives (S_ext, M) of its own fragments; an exchange hands every rank the pairs on its way; a fold in the order
of the document gives the state that enters each of its fragments (Kimi Context Parallel, "CP Architecture"). Backward
is the same walk in the other direction with Mᵀ. Nothing here knows KDA or GDN.

A chain of fragments begins where the document begins, and its first fragment needs no M: only a fragment that one
document enters, fills and leaves has an M that anyone asks for. With two ranks there is never one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.exchange import all_to_all


def contributes(ctx: CPContext, slot: int, reverse: bool = False) -> bool:
    """Whether a later fragment (an earlier one in reverse) needs this local fragment's state."""
    f = ctx.local[slot]
    return f.enters if reverse else f.leaves


def chain(ctx: CPContext, index: int, reverse: bool = False) -> list[int]:
    """Fragments (indices into ctx.table) whose states fold into fragment `index`, the nearest first."""
    f, step = ctx.table[index], 1 if reverse else -1
    if not (f.leaves if reverse else f.enters):
        return []
    links = [index + step]
    while ctx.table[links[-1]].through:
        links.append(links[-1] + step)
    return links


def incoming_states(
    ctx: CPContext,
    states: Mapping[int, torch.Tensor],
    transitions: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    reverse: bool = False,
) -> torch.Tensor:
    """The state that enters each local fragment, zero where a document begins there.

    Args:
        states: slot -> S_ext [*, K, V], for each local fragment that `contributes`.
        transitions: slot -> M [*, K, K], for each local fragment that a document passes `through`.
        like: [*, K, V], gives shape, dtype and device of the result.
        reverse: gradients; states are dS_ext, the result is the gradient of the state that leaves each fragment, and
            transitions are the same M as in forward: they are transposed here.

    Returns: [slots, *, K, V]. M chains in float64.
    """
    out = like.new_zeros(len(ctx.local), *like.shape)
    chains = {i: chain(ctx, i, reverse) for i in range(len(ctx.table))}
    if not any(chains.values()):
        return out  # no document crosses a cut; every rank sees that alike
    received = _exchange(ctx, states, transitions, like, chains)
    for i, f in enumerate(ctx.table):
        if f.rank == ctx.rank and chains[i]:
            out[f.slot] = _fold([received[j] for j in reversed(chains[i])], reverse)
    return out


def _fold(links: list[tuple[torch.Tensor, torch.Tensor | None]], reverse: bool) -> torch.Tensor:
    """(S_ext, M) from the chain's first fragment to its last -> the state that leaves the last.

    In float64: float32 products may run as TF32 where a user asked for that, whose error grows with the chain.
    """
    S = links[0][0].double()
    for S_ext, M in links[1:]:
        S = (M.mT if reverse else M).double() @ S + S_ext
    return S.to(links[0][0].dtype)


def _exchange(
    ctx: CPContext,
    states: Mapping[int, torch.Tensor],
    transitions: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    chains: Mapping[int, list[int]],
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """What this rank's chains need: fragment -> (S_ext, M or None)."""
    needs = [set() for _ in range(ctx.world_size)]  # [rank] fragments it folds
    for i, f in enumerate(ctx.table):
        needs[f.rank].update(chains[i])
    K, square = like.shape[-2], like.numel() // like.shape[-1] * like.shape[-2]

    def routed(source: int, target: int) -> list[int]:
        return sorted(j for j in needs[target] if ctx.table[j].rank == source)

    def payload(j: int) -> list[torch.Tensor]:
        f = ctx.table[j]
        parts = [states[f.slot], transitions[f.slot]] if f.through else [states[f.slot]]
        return [x.to(like.dtype).flatten() for x in parts]

    send = [
        torch.cat([like.new_empty(0), *(x for j in routed(ctx.rank, r) for x in payload(j))])
        for r in range(ctx.world_size)
    ]
    sources = [routed(r, ctx.rank) for r in range(ctx.world_size)]
    sizes = [[like.numel() + square * ctx.table[j].through for j in js] for js in sources]
    blocks = all_to_all(send, [sum(s) for s in sizes], ctx.group)
    received = {}
    for js, block, size in zip(sources, blocks, sizes, strict=True):
        for j, x in zip(js, block.split(size), strict=True):
            M = x[like.numel() :].view(*like.shape[:-2], K, K) if ctx.table[j].through else None
            received[j] = (x[: like.numel()].view(like.shape), M)
    return received
