"""KCP in levels: how ranks are grouped so that none receives or folds more than another, and none much.

A block of neighbouring ranks acts on the state as a fragment does, by a pair (S_ext, M) composed of those of its ranks.
So states can cross W ranks level by level:

    heads     g ranks of a node share out the heads: each gets the pairs of all g for 1/g of the heads
    outwards  of the members of the next level, blocks of ranks that have the same heads, each gets all pairs of these
              heads; again, until the members are all ranks

Going up, each rank composes the pairs of a level's members to that of their block. At the top it folds through them;
going down, through the members of each lower level, from the state that enters their block. The ranks that share out
the heads send the states back. A chain of products is as long as the levels are wide, not as there are ranks, and what
a rank sends and receives is the same for all ranks and documents.

Where chains are short, each rank's pairs go directly to the ranks that fold them (layout/chains.py), in one message.
`route` takes what a message's latency, its bytes and the products after it make fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple


class Level(NamedTuple):
    """Its members are blocks of `stride` ranks each."""

    stride: int
    members: int
    # members share out the heads; else each gets all pairs of the heads that it has
    shares_heads: bool = False


class Message(NamedTuple):
    """One step of an exchange, as the rank with most to do sees it."""

    nbytes: float  # that it sends, or receives
    in_node: bool
    products: int  # one after the other, that follow it


class Sizes(NamedTuple):
    """What there is to exchange."""

    heads: int
    slots: int
    state: int  # bytes of S_ext, of one head and slot
    transition: int  # and of M


class Network(NamedTuple):
    """Seconds before a message is there in a node, and bytes per second that a GPU sends, there and to other nodes."""

    latency: float
    in_node: float
    between_nodes: float


H200 = Network(13e-6, 340e9, 50e9)  # between nodes assumed: 400 Gbit/s per GPU
# Seconds by which a message to another node takes longer: nccl-tests' small all-to-all takes 30 µs between two nodes of
# H100s (github.com/deepseek-ai/DeepEP/issues/3), 10.6 on eight H20s (issues/303).
FARTHER = 20e-6
# seconds of a product with a head's M in a fold on an H200; on an H100 4.4, in a composition 3.8
PRODUCT = 4.1e-6


def route(most: int, world_size: int, node_size: int, sizes: Sizes) -> tuple[Level, ...]:
    """The levels by which states travel; (): directly. The same on all ranks.

    most: the largest number of S_ext and M that any one rank folds; node_size: ranks per node.
    """
    levels = fastest(world_size, node_size, sizes)
    direct = direct_messages(most, world_size, node_size, sizes)
    return levels if duration(messages(levels, node_size, sizes)) < duration(direct) else ()


@cache
def fastest(world_size: int, node_size: int, sizes: Sizes) -> tuple[Level, ...]:
    """Of all ways to group the ranks in levels, the fastest."""
    ways = groupings(world_size, math.gcd(sizes.heads, node_size))
    return min(ways, key=lambda levels: duration(messages(levels, node_size, sizes)))


def direct_messages(most: int, world_size: int, node_size: int, sizes: Sizes) -> list[Message]:
    pair = sizes.heads * (sizes.state + sizes.transition)
    return [Message(most * pair / 2, world_size == node_size, most // 2)]


def messages(levels: Sequence[Level], node_size: int, sizes: Sizes) -> list[Message]:
    found, heads = [], sizes.heads
    for level in levels:
        others, top = level.members - 1, level is levels[-1]
        if level.shares_heads:
            heads //= level.members
        pairs = others * heads * sizes.slots * (sizes.state + sizes.transition)
        products = level.members * sizes.slots - 1 if top else 2 * others
        found.append(Message(pairs, node_size % (level.stride * level.members) == 0, products))
    if levels[0].shares_heads:
        found.append(Message((levels[0].members - 1) * heads * sizes.slots * sizes.state, True, 0))
    return found


def duration(exchange: Sequence[Message], network: Network = H200) -> float:
    near = sum(m.nbytes / network.in_node for m in exchange if m.in_node)
    far = sum(FARTHER + m.nbytes / network.between_nodes for m in exchange if not m.in_node)
    return (
        network.latency * len(exchange) + near + far + PRODUCT * sum(m.products for m in exchange)
    )


def groupings(world_size: int, most: int) -> Iterator[tuple[Level, ...]]:
    """most: what the number of ranks that share out the heads must divide."""
    for sharing in (n for n in range(1, most + 1) if most % n == 0):
        first = (Level(1, sharing, True),) if sharing > 1 else ()
        for members in _factors(world_size // sharing):
            strides = accumulate(members, mul, initial=sharing)
            yield *first, *(Level(*pair) for pair in zip(strides, members))


def _factors(n: int) -> Iterator[tuple[int, ...]]:
    """All ways to write n as a product of factors above 1, in any order."""
    if n == 1:
        yield ()
    for first in (d for d in range(2, n + 1) if n % d == 0):
        for rest in _factors(n // first):
            yield first, *rest
