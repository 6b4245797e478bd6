"""KCP in levels: groups of ranks in which all receive and fold equally much, and little.

A block of neighboring ranks acts on the state as a fragment does: by a pair (S_ext, M),
composed from the pairs of its ranks. States can therefore cross W ranks level by level:

    heads     g ranks of a node divide the heads: each gets the pairs of all g ranks for
              1/g of the heads
    outwards  the members of the next level are blocks of ranks with the same heads: each
              gets all pairs of these heads; this repeats until the members are all ranks

Going up, each rank composes the pairs of a level's members into the pair of their block. At
the top it folds through the members. Going down, it folds through the members of each lower
level, from the state that enters their block. Finally the ranks that divided the heads send
the states back.

The length of a chain of products is given by the widths of the levels instead of the number
of ranks. What a rank sends and receives is the same for all ranks and documents.

Where chains are short, each rank's pairs go directly to the ranks that fold them
(layout/chains.py), in one message. `route` chooses the faster way from a message's latency,
its bytes, and the products after it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple


class Level(NamedTuple):
    """One level, whose members are blocks of `stride` ranks each."""

    stride: int
    members: int
    # Whether the members divide the heads; otherwise each gets all pairs of the heads that
    # it has.
    shares_heads: bool = False


class Message(NamedTuple):
    """One step of an exchange, as seen by the rank with the most work."""

    nbytes: float  # bytes that the rank sends or receives
    in_node: bool
    products: int  # number of products in sequence after the message


class Sizes(NamedTuple):
    """Sizes of the states and transitions to exchange."""

    heads: int
    slots: int
    state: int  # bytes of S_ext of one head and slot
    transition: int  # bytes of M of one head and slot


class Network(NamedTuple):
    """Seconds until a message arrives within a node, and bytes per second that a GPU sends
    within a node and to other nodes.
    """

    latency: float
    in_node: float
    between_nodes: float


# Measured within a node; the rate between nodes is assumed to be 400 Gbit/s per GPU.
H200 = Network(13e-6, 340e9, 50e9)
# Additional seconds of a message to another node: nccl-tests' small all-to-all takes 30 µs
# between two nodes of H100s (github.com/deepseek-ai/DeepEP/issues/3) and 10.6 µs on eight
# H20s (issues/303).
FARTHER = 20e-6
# Seconds of a product with a head's M in a fold on an H200. It is 4.4 µs on an H100, and 3.8 µs
# in a composition.
PRODUCT = 4.1e-6


def route(most: int, world_size: int, node_size: int, sizes: Sizes) -> tuple[Level, ...]:
    """Return the levels by which states travel; (): directly. All ranks get the same
    result.

    Args:
        most: largest number of S_ext and M that any rank folds.
        node_size: ranks per node.
    """
    levels = fastest(world_size, node_size, sizes)
    direct = direct_messages(most, world_size, node_size, sizes)
    return levels if duration(messages(levels, node_size, sizes)) < duration(direct) else ()


@cache
def fastest(world_size: int, node_size: int, sizes: Sizes) -> tuple[Level, ...]:
    """Return the fastest of all ways to group the ranks in levels."""
    ways = groupings(world_size, math.gcd(sizes.heads, node_size))
    return min(ways, key=lambda levels: duration(messages(levels, node_size, sizes)))


def direct_messages(most: int, world_size: int, node_size: int, sizes: Sizes) -> list[Message]:
    pair = sizes.heads * (sizes.state + sizes.transition)
    return [Message(most * pair / 2, world_size == node_size, most // 2)]


def messages(levels: Sequence[Level], node_size: int, sizes: Sizes) -> list[Message]:
    found = []
    heads = sizes.heads
    # Each level is one message, followed by folds at the top or by compositions below it.
    for level in levels:
        others = level.members - 1
        top = level is levels[-1]
        if level.shares_heads:
            heads //= level.members
        pairs = others * heads * sizes.slots * (sizes.state + sizes.transition)
        products = level.members * sizes.slots - 1 if top else 2 * others
        found.append(Message(pairs, node_size % (level.stride * level.members) == 0, products))
    # At the end, states return to the ranks that divided the heads.
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
    """Yield all ways to group the ranks in levels.

    Args:
        most: the number of ranks that divide the heads must be a divisor of this.
    """
    for sharing in (n for n in range(1, most + 1) if most % n == 0):
        first = (Level(1, sharing, True),) if sharing > 1 else ()
        for members in _factors(world_size // sharing):
            strides = accumulate(members, mul, initial=sharing)
            yield *first, *(Level(*pair) for pair in zip(strides, members))


def _factors(n: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write n as an ordered product of factors above 1."""
    if n == 1:
        yield ()
    for first in (d for d in range(2, n + 1) if n % d == 0):
        for rest in _factors(n // first):
            yield first, *rest
