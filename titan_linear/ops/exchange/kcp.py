"""KCP: context parallelism for recurrences with an affine action on the state.

A fragment acts on the state as S ↦ M S + S_ext. Each rank computes (S_ext, M) of its own
fragments. An exchange brings every rank the pairs of its chains. A fold in the order of the
document gives the state that enters each of its fragments (Kimi Context Parallel, "CP
Architecture"). Backward walks in the other direction with Mᵀ. Nothing here is specific to
one recurrence. Where a state only decays, M is diagonal, and its diagonal, or one number
for all of it, is exchanged.

The messages between ranks follow from the fragments, once per batch (ops/layout/chains.py).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import all_to_all, group_named, joined
from titan_linear.ops.exchange.folds import fold_chains
from titan_linear.ops.exchange.levels import incoming_by_levels
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.levels import Sizes, route
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator


def incoming_states(
    S_ext: Tensor, M: Tensor, chains: Chains, group: str, *, reverse: bool = False
) -> Tensor:
    """Return the state that enters each local fragment, zero where a document begins.

    Every rank of the group must call it.

    Args:
        S_ext: [slots, *, K, V], read where `chains.wanted` is STATE or more.
        M: [slots, *, K, K], or if diagonal [slots, *, K or 1], read where `chains.wanted`
            is STATE_AND_M.
        group: name of the group.
        reverse: for gradients. S_ext is then dS_ext, the result is the gradient of the
            state that leaves each fragment, and M are the forward direction's, transposed
            here.

    Returns:
        [slots, *, K, V]. The fold runs in float64, or in float32 where each product is
        three products of parts.
    """
    return kcp_incoming(S_ext, M, list(chains), group, reverse)


def _cost(
    outputs: costs.Outputs, S_ext: Tensor, M: Tensor, tables: list[Tensor], **_: Any
) -> costs.Incoming:
    return costs.Incoming(tables, S_ext, M)


@operator(
    fake=lambda S_ext, *_: torch.empty_like(S_ext),
    kept_by=("selective",),
    cost=_cost,
    of_driver=True,
)
def kcp_incoming(
    S_ext: Tensor, M: Tensor, tables: list[Tensor], group: str, reverse: bool
) -> Tensor:
    """Compute `incoming_states`; tables: `Chains`."""
    c = Chains(*tables)
    # No document crosses a cut. All ranks agree on this, so none waits for an exchange.
    if not c.crosses.item():
        return torch.zeros_like(S_ext)
    # States travel by levels where chains are long, and directly where they are short.
    if levels := route(
        c.most.item(), group_named(group).size(), c.node_size.item(), sizes_of(S_ext, M)
    ):
        return incoming_by_levels(S_ext, M, c, levels, group, reverse).contiguous()
    return fold_chains(*exchange(S_ext, M, c, group), c, reverse)


def sizes_of(S_ext: Tensor, M: Tensor) -> Sizes:
    slots, heads, *_ = S_ext.shape
    return Sizes(heads, slots, S_ext[0, 0].nbytes, M[0, 0].nbytes)


def exchange(S_ext: Tensor, M: Tensor, c: Chains, group: str) -> tuple[Tensor, Tensor]:
    """Return every S_ext [., *, K, V] and M [., *, K, K] that this rank folds, exchanged by
    one message to each rank.
    """
    # Pack what each receiver needs, and exchange it.
    sizes = S_ext.numel() // len(S_ext), M.numel() // len(M)
    parts = [(M if kind else S_ext)[slot].flatten() for slot, kind in c.sends.tolist() if slot >= 0]
    message = joined(parts, S_ext.flatten())
    counts = c.receive_counts.tolist()
    came = all_to_all(
        message, _elements(c.send_counts.tolist(), sizes), _elements(counts, sizes), group
    )
    # From each sender came S_ext, then M; separate the two.
    edges = accumulate((n * size for row in counts for n, size in zip(row, sizes)), initial=0)
    blocks = [slice(*edge) for edge in pairwise(edges)]
    S_rows = joined(_parts(came, blocks[0::2]), S_ext)
    M_rows = joined(_parts(came, blocks[1::2]), M)
    return S_rows.view(-1, *S_ext.shape[1:]), M_rows.view(-1, *M.shape[1:])


def _parts(x: Tensor, blocks: Sequence[slice]) -> list[Tensor]:
    """Return the non-empty blocks of x."""
    return [x[block] for block in blocks if block.start < block.stop]


def _elements(counts: list[list[int]], sizes: tuple[int, int]) -> list[int]:
    return [states * sizes[0] + transitions * sizes[1] for states, transitions in counts]
