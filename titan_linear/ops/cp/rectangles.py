"""What a rank's queries see beyond their own fragments, as rectangles without a mask.

Cut a packed stream into fragments. Inside a fragment attention is one (causal) square per document. The only
document with keys *before* a fragment is the one that enters it, and all of those keys are visible: one
rectangle, of the fragment's rows of that document and the document's tokens before the fragment. Without the
causal mask the document that leaves gives a second one, with its tokens after. So there is no mask, no block
without a visible pair, and no row without keys, whatever the documents and whatever the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan_linear.ops.cp.fragments import Fragment, padded

Rows = tuple[int, int]


class Rectangle(NamedTuple):
    """Every query of one range sees every key of another."""

    q: Rows
    kv: Rows


class Rectangles(NamedTuple):
    """This rank's rectangles. On the CPU; rows beyond the last are −1, so that the table has one shape whatever the
    documents are."""

    by_hop: torch.Tensor  # [., 5] hop around the ring, q in local rows, kv in rows of the owner's tokens
    hops: torch.Tensor  # [1] how far around the ring keys travel, on any rank


def rectangle_tables(fragments: Sequence[Fragment], rank: int, world_size: int, *, causal: bool) -> dict:
    """The arrays of `Rectangles`, by name. fragments: every rank's, in global order."""
    by_rank: list[list[Fragment]] = [[] for _ in range(world_size)]
    for f in sorted(fragments, key=lambda f: f.slot):
        by_rank[f.rank].append(f)
    mine, by_hop = _rectangles(by_rank[rank], causal), []
    for hop in range(world_size):
        by_hop += [(hop, *q, *kv) for q, kv in _with_keys_of(mine, by_rank[(rank - hop) % world_size])]
    return {
        "by_hop": padded(by_hop, 2 * len(fragments), 5),
        "hops": np.array([_hops(fragments, world_size, causal)]),
    }


def _beyond(f: Fragment, causal: bool) -> list[Rectangle]:
    """The rectangles of a fragment, in global tokens."""
    rectangles = []
    if f.enters:
        rectangles.append(Rectangle((f.start, min(f.end, f.head[1])), (f.head[0], f.start)))
    if f.leaves and not causal:
        rectangles.append(Rectangle((max(f.start, f.tail[0]), f.end), (f.end, f.tail[1])))
    return rectangles


def _rectangles(own: Sequence[Fragment], causal: bool) -> list[Rectangle]:
    """The rectangles of a rank's fragments: q in local rows, kv in global tokens."""
    rectangles, offset = [], 0
    for f in own:
        for (a, b), kv in _beyond(f, causal):
            rectangles.append(Rectangle((a - f.start + offset, b - f.start + offset), kv))
        offset += f.end - f.start
    return rectangles


def _with_keys_of(rectangles: Sequence[Rectangle], owner: Sequence[Fragment]) -> list[Rectangle]:
    """The parts of the rectangles whose keys lie in the fragments of one owner: kv in rows of its tokens."""
    parts: list[Rectangle] = []
    for q, (a, b) in rectangles:
        offset = 0
        for f in owner:
            kv = max(a, f.start) - f.start + offset, min(b, f.end) - f.start + offset
            offset += f.end - f.start
            if kv[0] < kv[1]:
                _append(parts, Rectangle(q, kv))
    return parts


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


def _hops(fragments: Sequence[Fragment], world_size: int, causal: bool) -> int:
    """How far around the ring keys must travel: the largest (query's rank − key's owner) mod W on any rank.

    It follows from the fragments, so that all ranks agree; documents that end near where they begin need few hops.
    """
    hops, size = 0, fragments[0].end
    for f in reversed(fragments):  # the last fragments tend to look farthest back
        for _, (a, b) in _beyond(f, causal):
            owners = {g.rank for g in fragments[a // size : (b - 1) // size + 1]}
            hops = max([hops, *((f.rank - owner) % world_size for owner in owners)])
        if hops == world_size - 1:
            break
    return hops
