"""KCP: context parallelism for recurrences whose fragment acts on the state as S ↦ M S + S_ext.

Each rank gives (S_ext, M) of its own fragments; an exchange brings every rank the pairs of its chains; a fold in the
order of the document gives the state that enters each of its fragments (Kimi Context Parallel, "CP Architecture").
Backward is the same walk in the other direction with Mᵀ. Nothing here is specific to a recurrence. Where its state
only decays, M is diagonal: its diagonal, or one number for all of it, is what travels.

Who sends what to whom follows from the fragments, once per batch (ops/layout/chains.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from titan_linear.ops.exchange.collectives import all_to_all, group_named
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime.operators import operator, register_fake


def incoming_states(
    S_ext: torch.Tensor, M: torch.Tensor, chains: Chains, group: str, *, reverse: bool = False
) -> torch.Tensor:
    """The state that enters each local fragment, zero where a document begins. Every rank of the group must call it.

    Args:
        S_ext: [slots, *, K, V], read where `chains.wanted` is STATE or more.
        M: [slots, *, K, K], or if diagonal [slots, *, K or 1], read where it is STATE_AND_M.
        group: the name of the group.
        reverse: for gradients. S_ext is dS_ext, the result is the gradient of the state that leaves each fragment, and
            M are forward's, transposed here.

    Returns: [slots, *, K, V]. The fold runs in float64, or in float32 by three products of parts.
    """
    return kcp_incoming(S_ext, M, list(chains), group, reverse)


@operator(kept_by=("selective",), kind="states", of_driver=True)
def kcp_incoming(
    S_ext: torch.Tensor, M: torch.Tensor, tables: list[torch.Tensor], group: str, reverse: bool
) -> torch.Tensor:
    """`incoming_states`; tables: `Chains`."""
    c = Chains(*tables)
    if not c.crosses.item():  # the same on every rank
        return torch.zeros_like(S_ext)
    if _folds_all(S_ext, M) and pays_by_heads(S_ext, M, c.most.item(), c.between_nodes.item()):
        return incoming_by_heads(S_ext, M, c, group, reverse)
    if not _on_tensor_cores(S_ext, M):
        return fold_in_float64(*exchange(S_ext, M, c, group), c.links, len(S_ext), reverse)
    from titan_linear.ops.triton.fold import fold  # Triton is available on Linux only

    S_rows, M_rows = exchange(S_ext, M, c, group)
    return fold(S_rows, M_rows, c.chain_offsets, c.s_row, c.m_row, reverse)


@register_fake(kcp_incoming)
def _(S_ext, *_):
    return torch.empty_like(S_ext)


def _folds_all(S: torch.Tensor, M: torch.Tensor) -> bool:
    """Whether S can be folded through all fragments at once; on GPUs only the kernel does that."""
    return not S.is_cuda or _on_tensor_cores(S, M)


def _on_tensor_cores(S: torch.Tensor, M: torch.Tensor) -> bool:
    """Whether one kernel folds all chains, with products as exact as those of float32."""
    K, V = S.shape[-2:]
    return (
        S.is_cuda
        and M.dim() == S.dim()
        and S.dtype == torch.float32
        and K in (16, 32, 64, 128, 256)
        and (V == 16 or V % 32 == 0)
    )


def exchange(S_ext: torch.Tensor, M: torch.Tensor, c: Chains, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every S_ext [., *, K, V] and M [., *, K, K] or, diagonal, [., *, K or 1] that this rank folds, by one message to
    each rank."""
    sizes = S_ext.numel() // len(S_ext), M.numel() // len(M)
    parts = [(M if kind else S_ext)[slot].flatten() for slot, kind in c.sends.tolist() if slot >= 0]
    message = _joined(parts, S_ext)
    counts = c.receive_counts.tolist()
    came = all_to_all(message, _elements(c.send_counts.tolist(), sizes), _elements(counts, sizes), group)
    edges = accumulate((n * size for row in counts for n, size in zip(row, sizes)), initial=0)
    blocks = [slice(*edge) for edge in pairwise(edges)]
    S_rows, M_rows = _joined(_parts(came, blocks[0::2]), S_ext), _joined(_parts(came, blocks[1::2]), M)
    return S_rows.view(-1, *S_ext.shape[1:]), M_rows.view(-1, *M.shape[1:])


def _parts(x: torch.Tensor, blocks: Sequence[slice]) -> list[torch.Tensor]:
    """The blocks of x that are not empty."""
    return [x[block] for block in blocks if block.start < block.stop]


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate; a single part is returned as it is, which saves a copy, as most chains have one link."""
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else like.new_empty(0)


def _elements(counts: list[list[int]], sizes: tuple[int, int]) -> list[int]:
    return [states * sizes[0] + transitions * sizes[1] for states, transitions in counts]


# The cost of a second message, as the bytes that a link carries in that time: 80 µs at 340 and at 50 GB/s.
IN_NODE, BETWEEN_NODES = 27 << 20, 4 << 20


def pays_by_heads(S_ext: torch.Tensor, M: torch.Tensor, most: int, between_nodes: bool) -> bool:
    """Whether `exchange` would take twice as long as `incoming_by_heads` on the rank that receives most, as it brings
    a long chain whole to every rank. The same on all ranks."""
    whole = most * (S_ext.nbytes + M.nbytes) // (2 * len(S_ext))
    return whole > 2 * (bytes_by_heads(S_ext, M) + (BETWEEN_NODES if between_nodes else IN_NODE))


def bytes_by_heads(S_ext: torch.Tensor, M: torch.Tensor) -> int:
    """Bytes that a rank sends, and also the bytes that it receives."""
    return 2 * S_ext.nbytes + M.nbytes


def incoming_by_heads(S_ext: torch.Tensor, M: torch.Tensor, c: Chains, group: str, reverse: bool) -> torch.Tensor:
    """What `kcp_incoming` returns, by way of the heads: a rank gets S_ext and M of all fragments for its share of the
    heads, folds through all of them, and sends every rank the states that enter that rank's fragments. Two all-to-alls,
    in which what a rank sends and receives does not grow with the number of ranks."""
    ranks, (slots, HV, K, V) = group_named(group), S_ext.shape
    W, rank = ranks.size(), ranks.rank()
    heads = [HV * (p + 1) // W - HV * p // W for p in range(W)]
    h, of_state, of_M = heads[rank], K * V, M[0, 0].numel()
    given = torch.cat([S_ext.flatten(2), M.flatten(2)], -1).transpose(0, 1).contiguous()  # [HV, slots, of both]
    width = slots * (of_state + of_M)
    came = all_to_all(given.flatten(), [n * width for n in heads], [h * width] * W, group)
    every = came.view(W, h, slots, of_state + of_M).transpose(1, 2).flatten(0, 1)[c.order]  # [F, h, of both]
    states, transitions = every.split([of_state, of_M], -1)
    transitions = transitions.where(c.through.view(-1, 1, 1), 0.0)  # no M was written for the others
    states, transitions = states.unflatten(-1, (K, V)), transitions.unflatten(-1, M.shape[2:])
    folded = _fold_groups(states.contiguous(), transitions.contiguous(), c.groups, reverse)[c.places]
    back = all_to_all(folded.flatten(), [slots * h * K * V] * W, [slots * n * K * V for n in heads], group)
    parts = back.split([slots * n * K * V for n in heads])
    return torch.cat([x.view(slots, n, K, V) for x, n in zip(parts, heads, strict=True)], 1)


def _fold_groups(S_ext: torch.Tensor, M: torch.Tensor, groups: torch.Tensor, reverse: bool) -> torch.Tensor:
    """S_ext [F, h, K, V], M [F, h, K, K] or [F, h, K or 1] → the state that enters each fragment, zeros for the first
    of a group; in reverse the gradient of the state that leaves each, zeros for the last of a group."""
    if not S_ext.numel():  # a rank without heads
        return torch.empty_like(S_ext)
    if S_ext.is_cuda:
        from titan_linear.ops.triton.fold import fold_segments

        return fold_segments(S_ext, M, None, None, groups, reverse)
    states = S_ext.new_zeros(S_ext.shape, dtype=torch.float64)
    for begin, end in pairwise(groups.tolist()):
        walk = range(begin, end)[::-1] if reverse else range(begin, end)
        for before, i in pairwise(walk):
            states[i] = _through(M[before], states[before], reverse) + S_ext[before]
    return states.to(S_ext.dtype)


def fold_in_float64(
    S_rows: torch.Tensor, M_rows: torch.Tensor, links: torch.Tensor, slots: int, reverse: bool
) -> torch.Tensor:
    """S ← M S + S_ext along each slot's chain -> [slots, *, K, V], zeros for a slot without a chain.

    In float64, because float32 products run as TF32 if a user asked for that, and TF32's error grows with the chain.
    """
    states = S_rows.new_zeros(slots, *S_rows.shape[1:], dtype=torch.float64)
    for slot, s, m in links.tolist():
        if m >= 0:
            states[slot] = _through(M_rows[m], states[slot], reverse)
        if slot >= 0:
            states[slot] += S_rows[s]
    return states.to(S_rows.dtype)


def _through(M: torch.Tensor, S: torch.Tensor, reverse: bool) -> torch.Tensor:
    """M S, in reverse Mᵀ S; M [*, K, K] or diagonal [*, K or 1], S [*, K, V] float64."""
    if M.dim() < S.dim():
        return M.double().unsqueeze(-1) * S
    return (M.mT if reverse else M).double() @ S
