"""KCP: context parallelism for recurrences whose fragment acts on the state as S ↦ M S + S_ext.

Each rank gives (S_ext, M) of its own fragments; an exchange brings every rank the pairs of its chains; a fold in the
order of the document gives the state that enters each of its fragments (Kimi Context Parallel, "CP Architecture").
Backward is the same walk in the other direction with Mᵀ. Nothing here is specific to KDA or GDN.

A chain of fragments begins where the document begins, and its first fragment needs no M: only a fragment that one
document enters, fills and leaves has an M that any rank needs. With two contiguous ranks there
is never one.

Who sends what to whom follows from the fragments, once per batch (`chains`). The shapes of the tables do not depend on
the documents, so that compiled code sees one shape; rows beyond the last are −1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from titan_linear.ops.cp.exchange import all_to_all, group_named
from titan_linear.ops.cp.fragments import Fragment, owned, padded
from titan_linear.ops.operators import operator, register_fake

NOTHING, STATE, STATE_AND_M = range(3)  # what is needed of a fragment


class Chains(NamedTuple):
    """This rank's part in one direction. Forward, a slot gives the state that leaves it and gets the state that enters
    it; in reverse, it gives the gradient of the state that entered and gets that of the state that left."""

    entries: torch.Tensor  # [slots] int32: the entry whose boundary a slot gives: its last (in reverse its first)
    wanted: torch.Tensor  # [slots] int32: NOTHING, STATE or STATE_AND_M
    chain_offsets: torch.Tensor  # [slots + 1] int32: where each slot's links begin, which fold into it in order
    s_row: torch.Tensor  # [.] int32 for each link: the row of its S_ext among those received
    m_row: torch.Tensor  # [.] int32: and of its M; −1 for a chain's first
    slots: torch.Tensor  # [slots, 2] (entry, wanted) again; on the CPU, as are all up to `most`
    crosses: torch.Tensor  # [1] whether a document crosses a cut, on any rank
    sends: torch.Tensor  # [., 2] (slot, 0 for S_ext or 1 for M) by receiver; for each receiver S_ext first
    send_counts: torch.Tensor  # [W, 2] numbers of S_ext and M for each receiver
    receive_counts: torch.Tensor  # [W, 2] and from each sender
    links: torch.Tensor  # [., 3] the links again, as (slot, s_row, m_row)
    most: torch.Tensor  # [1] the largest number of S_ext and M that any one rank folds, its own included
    # Of all F = W · slots fragments in global order, on the device, the same in both directions (`of_all`):
    order: torch.Tensor  # [F] int64: the place of each, its index by rank, then slot
    places: torch.Tensor  # [F] int64: the inverse
    through: torch.Tensor  # [F] bool: whether its M counts
    groups: torch.Tensor  # [F + 1] int32: the first of each run joined by documents; F behind the last
    between_nodes: torch.Tensor  # [1], on the CPU: whether ranks are on several nodes


def chains(fragments: Sequence[Fragment], rank: int, world_size: int, entries: np.ndarray, *, reverse: bool) -> dict:
    """The arrays of `Chains`, by name, except those of `of_all`.

    Args:
        fragments: every rank's, in global order.
        entries: [slots, 2] the first and last entry of each of this rank's fragments.
    """
    chain = _walks(fragments, reverse)
    own = [i for i, f in enumerate(fragments) if f.rank == rank]
    slots, blocks = len(own), len(fragments) // len(own)
    received = _received(fragments, chain, own, world_size)
    place = {(j, kind): n for kind in range(2) for n, j in enumerate(j for js in received for j in js[kind])}
    in_order = sorted(own, key=lambda i: fragments[i].slot)
    rows = [(fragments[i].slot, place[j, 0], place.get((j, 1), -1)) for i in in_order for j in chain[i]]
    links = padded(rows, slots * blocks, 3)
    chain_offsets = np.cumsum([0, *(len(chain[i]) for i in in_order)])
    sent = _sent(fragments, chain, own, world_size)
    sends = [(fragments[j].slot, kind) for js in sent for kind in range(2) for j in js[kind]]
    wanted = [_wanted(f, reverse) for f in owned(fragments, rank)]
    table = np.stack([entries[:, 0 if reverse else 1], wanted], 1).astype(np.int32)
    most = np.zeros(world_size, dtype=np.int64)
    np.add.at(most, [f.rank for f in fragments], [max(2 * len(walk) - 1, 0) for walk in chain])
    return {
        "entries": table[:, 0],
        "wanted": table[:, 1],
        "slots": table,
        "chain_offsets": chain_offsets.astype(np.int32),
        "s_row": links[:, 1].astype(np.int32),
        "m_row": links[:, 2].astype(np.int32),
        "crosses": np.array([any(chain)]),
        "sends": padded(sends, 2 * slots * blocks, 2),
        "send_counts": np.array([[len(js) for js in kinds] for kinds in sent]),
        "receive_counts": np.array([[len(js) for js in kinds] for kinds in received]),
        "links": links,
        "most": most.max(keepdims=True),
    }


def of_all(fragments: Sequence[Fragment], world_size: int, between_nodes: bool) -> dict:
    """The rest of the arrays of `Chains`, by name."""
    F = len(fragments)
    order = np.array([f.rank * (F // world_size) + f.slot for f in fragments])
    firsts = [i for i, f in enumerate(fragments) if not f.enters]
    return {
        "order": order,
        "places": np.argsort(order),
        "through": np.array([f.through for f in fragments]),
        "groups": np.array(firsts + [F] * (F + 1 - len(firsts)), dtype=np.int32),
        "between_nodes": np.array([between_nodes]),
    }


def _wanted(f: Fragment, reverse: bool) -> int:
    if f.through:
        return STATE_AND_M
    return STATE if (f.enters if reverse else f.leaves) else NOTHING


def _walks(fragments: Sequence[Fragment], reverse: bool) -> list[range]:
    """For each fragment, those that fold into it, in the order of the fold; they are adjacent, so a range."""
    order = range(len(fragments))
    walks, first = [range(0)] * len(fragments), 0
    for i in reversed(order) if reverse else order:
        f, before = fragments[i], i + 1 if reverse else i - 1
        if f.leaves if reverse else f.enters:
            first = first if fragments[before].through else before
            walks[i] = range(first, i, -1 if reverse else 1)
    return walks


Kinds = tuple[list[int], list[int]]  # fragments whose S_ext travels, and those whose M does


def _received(fragments: Sequence[Fragment], chain: list[range], own: list[int], world_size: int) -> list[Kinds]:
    """What this rank needs, by sender, in global order."""
    needed = sorted({j for i in own for j in chain[i]})
    received: list[Kinds] = [([], []) for _ in range(world_size)]
    for j in needed:
        _add(received[fragments[j].rank], j, fragments[j])
    return received


def _sent(fragments: Sequence[Fragment], chain: list[range], own: list[int], world_size: int) -> list[Kinds]:
    """What others need from this rank, by receiver, in global order."""
    sent: list[Kinds] = [([], []) for _ in range(world_size)]
    for j in own:
        receivers = set()
        for step in (1, -1):  # fragments whose chains hold j lie next to j, without a gap
            i = j + step
            while 0 <= i < len(fragments) and j in chain[i]:
                receivers.add(fragments[i].rank)
                i += step
        for r in receivers:
            _add(sent[r], j, fragments[j])
    return sent


def _add(kinds: Kinds, j: int, f: Fragment) -> None:
    kinds[0].append(j)
    if f.through:
        kinds[1].append(j)


def incoming_states(
    S_ext: torch.Tensor, M: torch.Tensor, chains: Chains, group: str, *, reverse: bool = False
) -> torch.Tensor:
    """The state that enters each local fragment, zero where a document begins. Every rank of the group must call it.

    Args:
        S_ext: [slots, *, K, V], read where `chains.wanted` is STATE or more.
        M: [slots, *, K, K], read where it is STATE_AND_M.
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
    if _folds_all(S_ext) and pays_by_heads(S_ext, M, c.most.item(), c.between_nodes.item()):
        return incoming_by_heads(S_ext, M, c, group, reverse)
    if not _on_tensor_cores(S_ext):
        return fold_in_float64(*exchange(S_ext, M, c, group), c.links, len(S_ext), reverse)
    from titan_linear.ops.triton.fold import fold  # Triton is available on Linux only

    S_rows, M_rows = exchange(S_ext, M, c, group)
    return fold(S_rows, M_rows, c.chain_offsets, c.s_row, c.m_row, reverse)


@register_fake(kcp_incoming)
def _(S_ext, *_):
    return torch.empty_like(S_ext)


def _folds_all(S: torch.Tensor) -> bool:
    """Whether S can be folded through all fragments at once; on GPUs only the kernel does that."""
    return not S.is_cuda or _on_tensor_cores(S)


def _on_tensor_cores(S: torch.Tensor) -> bool:
    """Whether one kernel folds all chains, with products as exact as those of float32."""
    K, V = S.shape[-2:]
    return S.is_cuda and S.dtype == torch.float32 and K in (16, 32, 64, 128, 256) and (V == 16 or V % 32 == 0)


def exchange(S_ext: torch.Tensor, M: torch.Tensor, c: Chains, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every S_ext [., *, K, V] and M [., *, K, K] that this rank folds, by one message to each rank."""
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
    h, width = heads[rank], K * (V + K)
    given = torch.cat([S_ext, M], -1).transpose(0, 1).contiguous()  # [HV, slots, K, V + K]
    came = all_to_all(given.flatten(), [n * slots * width for n in heads], [h * slots * width] * W, group)
    every = came.view(W, h, slots, K, V + K).transpose(1, 2).flatten(0, 1)[c.order]  # [F, h, K, V + K]
    states, transitions = every.split([V, K], -1)
    transitions = transitions.where(c.through.view(-1, 1, 1, 1), 0.0)  # no M was written for the others
    folded = _fold_groups(states.contiguous(), transitions.contiguous(), c.groups, reverse)[c.places]
    back = all_to_all(folded.flatten(), [slots * h * K * V] * W, [slots * n * K * V for n in heads], group)
    parts = back.split([slots * n * K * V for n in heads])
    return torch.cat([x.view(slots, n, K, V) for x, n in zip(parts, heads, strict=True)], 1)


def _fold_groups(S_ext: torch.Tensor, M: torch.Tensor, groups: torch.Tensor, reverse: bool) -> torch.Tensor:
    """S_ext [F, h, K, V], M [F, h, K, K] → the state that enters each fragment, zeros for the first of a group; in
    reverse the gradient of the state that leaves each, zeros for the last of a group."""
    if not S_ext.numel():  # a rank without heads
        return torch.empty_like(S_ext)
    if S_ext.is_cuda:
        from titan_linear.ops.triton.fold import fold_segments

        return fold_segments(S_ext, M, None, None, groups, reverse)
    states = S_ext.new_zeros(S_ext.shape, dtype=torch.float64)
    for begin, end in pairwise(groups.tolist()):
        walk = range(begin, end)[::-1] if reverse else range(begin, end)
        for before, i in pairwise(walk):
            transition = M[before].mT if reverse else M[before]
            states[i] = transition.double() @ states[before] + S_ext[before]
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
            transition = M_rows[m].mT if reverse else M_rows[m]
            states[slot] = transition.double() @ states[slot]
        if slot >= 0:
            states[slot] += S_rows[s]
    return states.to(S_rows.dtype)
