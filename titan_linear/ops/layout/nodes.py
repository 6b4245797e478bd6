"""Prefix trees: documents that share their beginnings, laid out so that each shared token is computed once.

    documents   a b c d    a b e    a b e f g          a tree   [a b] [c d] [e] [f g],   parents −1 0 0 2

A node of the tree is a segment of the stream and has the index of its parent, which lies before it. A document is a
path: each of its tokens comes after those of the nodes above. What a mixer needs of a token's past follows:

    a recurrence   starts from the state with which the parent ends; a state's gradient is the sum over the children
    a convolution  reads its last tokens on the path
    attention      sees the path
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor


@dataclass(eq=False)
class Nodes:
    """The nodes of the trees of a stream; documents that share nothing are trees of one node."""

    edges: ndarray  # [N+1] int64, where each begins
    parents: ndarray  # [N] int64, −1: none

    @classmethod
    def behind(cls, back: ndarray, edges: Iterable[int] = ()) -> Nodes:
        """Those of tokens each of which lies `back` tokens behind the one that it continues, 0: it continues none; cut
        at these edges, too."""
        begins = np.flatnonzero(back != 1)
        above = (begins - back[begins])[back[begins] > 0]
        edges = np.unique([*edges, *begins, *(above + 1), len(back)])
        back = back[edges[:-1]]
        return cls(
            edges,
            np.where(back > 0, np.searchsorted(edges, edges[:-1] - back, side="right") - 1, -1),
        )

    @classmethod
    def apart(cls, edges: ndarray) -> Nodes:
        """Documents, none of which continues another."""
        return cls(edges, np.full(len(edges) - 1, -1))

    @property
    def joined(self) -> bool:
        """Whether any continues another."""
        return bool((self.parents >= 0).any())

    def on_paths(self, ends: ndarray) -> tuple[ndarray, ndarray]:
        """The nodes from a root to each of these, path after path: the number of each one's path, and the node."""
        levels = [np.stack([np.arange(len(ends)), ends])]
        while levels[-1].size:
            number, node = levels[-1]
            above = np.stack([number, self.parents[node]])
            levels.append(above[:, above[1] >= 0])
        number, node = np.concatenate(levels, 1)
        order = np.lexsort((node, number))
        return number[order], node[order]

    @cached_property
    def depth(self) -> ndarray:
        """[N] number of tokens above each."""
        number, above = self.on_paths(np.arange(len(self.parents)))
        lengths = np.diff(self.edges)
        return np.bincount(number, lengths[above]).astype(np.int64) - lengths

    def after(self, tokens: int) -> Nodes:
        """Of documents without their first `tokens`, each of which is a document of its own."""
        return Nodes.behind(np.where(self.positions > tokens, self.back, 0))

    @property
    def positions(self) -> ndarray:
        """[T] in documents."""
        return np.arange(self.edges[-1]) - np.repeat(self.begins, np.diff(self.edges))

    @property
    def back(self) -> ndarray:
        """[T] of which these are `behind`."""
        back, begins = np.ones_like(self.positions), self.edges[:-1]
        back[begins] = np.where(self.parents >= 0, begins - self.edges[self.parents + 1] + 1, 0)
        return back

    @property
    def leaves(self) -> ndarray:
        """Nodes that none continues."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    @property
    def begins(self) -> ndarray:
        """[N] where the position 0 of each node's tokens would be."""
        return self.edges[:-1] - self.depth

    @property
    def chains(self) -> tuple[ndarray, ndarray]:
        """Where runs of nodes begin of which each continues the one before it, and the stream's end; and `begins` of
        the first of each. Attention takes a run for one document, with more keys than queries. A leaf is a run of its
        own, so that no NaN of it reaches the nodes above."""
        heads = self.parents != np.arange(len(self.parents)) - 1
        heads[[0, *self.leaves]] = True
        heads = np.flatnonzero(heads)
        return np.append(self.edges[heads], self.edges[-1]), self.begins[heads]

    def below(self, edges: ndarray) -> ndarray | None:
        """[., 4] rectangles of tokens below nodes and of tokens that they continue: rows from and to, then those of the
        run of `chains` from its first node on. None: what is below a node does not lie together."""
        number, node = self.on_paths(np.arange(len(self.parents)))
        begin, end = self.edges[:-1], self.edges[1:].copy()
        np.maximum.at(end, node, self.edges[number + 1])
        if (end - begin != np.bincount(node, np.diff(self.edges)[number])).any():
            return None
        run = np.searchsorted(edges, begin, side="right") - 1
        last = np.append(run[1:] != run[:-1], True)
        # what is below the next node sees that, too
        behind = np.where(last, edges[run + 1], np.append(end[1:], 0))
        return np.stack([behind, end, edges[run], self.edges[1:]], 1)[behind < end]

    def at(self, tokens: ndarray) -> ndarray:
        """The node of each token."""
        return np.searchsorted(self.edges, tokens, side="right") - 1

    def ranges(self, start: ndarray, end: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """The paths of the tokens from `start` on, each up to its `end`, as ranges of tokens: the number of each one's
        path, its first token and the token after its last."""
        number, nodes = self.on_paths(self.at(start))
        last = np.append(number[1:] != number[:-1], True)
        return number, self.edges[nodes], np.where(last, end[number], self.edges[nodes + 1])

    def starts(self, size: int | None) -> ndarray:
        """[E] where each entry begins: each node, and each fragment of `size` tokens."""
        cuts = np.arange(0, self.edges[-1], size or self.edges[-1])
        return np.union1d(self.edges[:-1], cuts)

    def before(self, tokens: ndarray) -> ndarray:
        """The token that each one continues, −1: none; of −1, too."""
        node = self.at(tokens)
        above = np.where(self.parents >= 0, self.edges[self.parents + 1] - 1, -1)[node]
        return np.where(tokens < 0, -1, np.where(tokens > self.edges[node], tokens - 1, above))


def checked_nodes(
    edges: ndarray, parents: Tensor | Sequence[int] | None, num_streams: int
) -> Nodes:
    """parents: None: no node has one. ValueError: parents that are no trees, each in one of the streams."""
    if parents is None:
        return Nodes.apart(edges)
    numbers = torch.as_tensor(parents).cpu().numpy()
    order = np.arange(len(edges) - 1)
    if numbers.shape != order.shape or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"parents ({numbers.dtype} {list(numbers.shape)}) must be integers [N] = {list(order.shape)}, one for "
            "each segment"
        )
    numbers = numbers.astype(np.int64)
    stream = edges[:-1] // (edges[-1] // num_streams)
    bad = (
        (numbers < -1)
        | (numbers >= order)
        | ((numbers >= 0) & (stream[np.minimum(numbers, order)] != stream))
    )
    for node in np.flatnonzero(bad):
        raise ValueError(
            f"parents[{node}] = {numbers[node]} must be −1, or a segment before {node} in its stream"
        )
    return Nodes(edges, numbers)
