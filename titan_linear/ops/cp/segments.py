"""What a rank's queries see beyond their own fragments, as rectangles without a mask.

Cut a packed stream into fragments. Inside a fragment attention is one (causal) square per document. The only
document with keys *before* a fragment is the one that enters it, and all of those keys are visible: one
rectangle, of the fragment's rows of that document and the document's tokens before the fragment. Without the
causal mask the document that leaves gives a second one, with its tokens after. So there is no mask, no block
without a visible pair, and no row without keys, whatever the documents and whatever the layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_linear.ops.cp.context import CPContext, Fragment
from titan_linear.ops.torch.attention import Documents

Rows = tuple[int, int]


class Rectangle(NamedTuple):
    """Every query of one range sees every key of another."""

    q: Rows
    kv: Rows


def beyond(f: Fragment, causal: bool) -> list[Rectangle]:
    """The rectangles of a fragment, in global tokens."""
    rectangles = []
    if f.enters:
        rectangles.append(Rectangle((f.start, min(f.end, f.head[1])), (f.head[0], f.start)))
    if f.leaves and not causal:
        rectangles.append(Rectangle((max(f.start, f.tail[0]), f.end), (f.end, f.tail[1])))
    return rectangles


def remote(cp: CPContext, causal: bool) -> list[Rectangle]:
    """This rank's rectangles: q in local rows, kv in global tokens."""
    rectangles = []
    for f, offset in zip(cp.local, cp.offsets):
        for (a, b), kv in beyond(f, causal):
            rectangles.append(Rectangle((a - f.start + offset, b - f.start + offset), kv))
    return rectangles


def with_owner(cp: CPContext, causal: bool, owner: int) -> list[Rectangle]:
    """This rank's rectangles with the keys of `owner`: q in local rows, kv in rows of the owner's tokens."""
    rectangles: list[Rectangle] = []
    for q, (a, b) in remote(cp, causal):
        offset = 0
        for f in cp.fragments_of(owner):
            kv = max(a, f.start) - f.start + offset, min(b, f.end) - f.start + offset
            offset += f.end - f.start
            if kv[0] < kv[1]:
                _append(rectangles, Rectangle(q, kv))
    return rectangles


def ring_hops(cp: CPContext, causal: bool) -> int:
    """How far around the ring keys must travel: the largest (query's rank − key's owner) mod W on any rank.

    It follows from the table, so that all ranks agree; documents that end near where they begin need few hops.
    """
    W, hops = cp.world_size, 0
    for f in reversed(cp.table):  # the last fragments tend to look farthest back
        for _, (a, b) in beyond(f, causal):
            owners = {g.rank for g in cp.table if g.start < b and a < g.end}
            hops = max([hops, *((f.rank - owner) % W for owner in owners)])
        if hops == W - 1:
            break
    return hops


def local_documents(cp: CPContext, device: torch.device) -> Documents:
    """This rank's entries: the squares of its own tokens."""
    return Documents(tuple(cp.cu_seqlens_cpu.tolist()), cp.cu_seqlens.to(device, non_blocking=True))


def stream_documents(cp: CPContext, device: torch.device) -> Documents:
    """The documents of the whole stream, for a rank that holds all tokens in global order."""
    boundaries = torch.tensor(cp.documents, dtype=torch.int32)
    return Documents(cp.documents, boundaries.to(device, non_blocking=True))


def to_global_order(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """[W, T_local, ...], every rank's tokens by rank → [T, ...] in global order."""
    if [f.rank for f in cp.table] == list(range(cp.world_size)):
        return x.flatten(0, 1)
    blocks = x.unflatten(1, (-1, cp.table[0].end))  # [W, slots, block, ...]: all fragments are of one length
    return torch.cat([blocks[f.rank, f.slot] for f in cp.table])


def to_rank_order(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """[T, ...] in global order → [W, T_local, ...]: the inverse of `to_global_order`."""
    if [f.rank for f in cp.table] == list(range(cp.world_size)):
        return x.unflatten(0, (cp.world_size, -1))
    by_rank = sorted(cp.table, key=lambda f: (f.rank, f.slot))
    return torch.cat([x[f.start : f.end] for f in by_rank]).unflatten(0, (cp.world_size, -1))


def _append(rectangles: list[Rectangle], new: Rectangle) -> None:
    """Append, or widen the last one where the two are one rectangle: fewer and larger blocks for the kernels."""
    if rectangles:
        q, kv = rectangles[-1]
        if q == new.q and kv[1] == new.kv[0]:
            rectangles[-1] = Rectangle(q, (kv[0], new.kv[1]))
            return
        if kv == new.kv and q[1] == new.q[0]:
            rectangles[-1] = Rectangle((q[0], new.q[1]), kv)
            return
    rectangles.append(new)
