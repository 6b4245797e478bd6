"""Rectangles of a rank's attention beyond its own fragments, without a mask.

A packed stream is cut into fragments. Inside a fragment, attention is one (causal) square
per document. The only document with keys *before* a fragment is the one that enters it, and
all of those keys are visible. They form one rectangle: the fragment's rows of that
document, and the document's tokens before the fragment. Without the causal mask, the
document that leaves the fragment adds a second rectangle, with its tokens after it. So the
rectangles need no mask, every block has a visible pair, and every row has keys, for any
documents and layout.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from titan_linear.ops.layout.fragments import Fragment, Fragments, owned
from titan_linear.ops.layout.tables import OnHost, padded

Rows = tuple[int, int]


class Rectangle(NamedTuple):
    """Every query of one range sees every key of another."""

    q: Rows
    kv: Rows


class Rectangles(NamedTuple):
    """This rank's rectangles. Rows of the table after the last rectangle are −1, so its
    shape does not depend on the documents."""

    # [., 5] hop around the ring, q range in local rows, kv range in rows of the owner
    by_hop: OnHost
    hops: OnHost  # [1] largest number of hops that keys travel, over all ranks


def rectangles(fragments: Fragments, rank: int, world_size: int, *, causal: bool) -> Rectangles:
    """Return the rectangles of `rank` by ring hop. fragments: every rank's, in global
    order."""
    by_hop: list[list[Rectangle]] = [[] for _ in range(world_size)]
    for rectangle in _rectangles(owned(fragments, rank), causal):
        for owner, part in _by_owner(rectangle, fragments):
            _append(by_hop[(rank - owner) % world_size], part)
    # Pad the table to two rectangles per fragment.
    rows = [(hop, *q, *kv) for hop, parts in enumerate(by_hop) for q, kv in parts]
    table = padded(rows, 2 * len(fragments), 5)
    return Rectangles(torch.from_numpy(table), torch.tensor([_hops(fragments, world_size, causal)]))


def _beyond(f: Fragment, causal: bool) -> list[Rectangle]:
    """Return the rectangles of a fragment, in global tokens."""
    rectangles = []
    if f.enters:
        rectangles.append(Rectangle((f.start, min(f.end, f.head[1])), (f.head[0], f.start)))
    if f.leaves and not causal:
        rectangles.append(Rectangle((max(f.start, f.tail[0]), f.end), (f.end, f.tail[1])))
    return rectangles


def _rectangles(own: Fragments, causal: bool) -> list[Rectangle]:
    """Return the rectangles of a rank's fragments, with q in local rows and kv in global
    tokens."""
    rectangles = []
    offset = 0
    for f in own:
        for (a, b), kv in _beyond(f, causal):
            rectangles.append(Rectangle((a - f.start + offset, b - f.start + offset), kv))
        offset += f.end - f.start
    return rectangles


def _by_owner(rectangle: Rectangle, fragments: Fragments) -> Iterator[tuple[int, Rectangle]]:
    """Cut a rectangle with kv in global tokens where the owner of its keys changes. Yields
    the owner, and the part with kv in rows of the owner's tokens."""
    q, (a, b) = rectangle
    for f in _holding(a, b, fragments):
        row = f.slot * (f.end - f.start) - f.start
        yield f.rank, Rectangle(q, (max(a, f.start) + row, min(b, f.end) + row))


def _holding(a: int, b: int, fragments: Fragments) -> Fragments:
    """Return the fragments that hold global tokens a to b. All fragments have the same
    size."""
    size = fragments[0].end - fragments[0].start
    return fragments[a // size : (b - 1) // size + 1]


def _append(rectangles: list[Rectangle], new: Rectangle) -> None:
    """Append a rectangle, or extend the last one where the two form one rectangle. The
    kernels then have fewer and larger blocks."""
    if rectangles:
        q, kv = rectangles[-1]
        if q == new.q and kv[1] == new.kv[0]:
            rectangles[-1] = Rectangle(q, (kv[0], new.kv[1]))
            return
        if kv == new.kv and q[1] == new.q[0]:
            rectangles[-1] = Rectangle((q[0], new.q[1]), kv)
            return
    rectangles.append(new)


def _hops(fragments: Fragments, world_size: int, causal: bool) -> int:
    """Return how far around the ring keys must travel: the largest (query's rank − key's
    owner) mod W on any rank.

    It follows from the fragments, so all ranks agree. Documents that end close to where
    they begin need few hops.
    """
    hops = 0
    for f in reversed(fragments):  # keys of the last fragments tend to be farthest away
        for _, (a, b) in _beyond(f, causal):
            owners = {g.rank for g in _holding(a, b, fragments)}
            hops = max([hops, *((f.rank - owner) % world_size for owner in owners)])
        if hops == world_size - 1:
            break
    return hops
