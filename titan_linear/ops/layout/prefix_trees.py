"""Prefix trees: documents that share their beginnings, laid out so that each shared token
is computed once.

    documents   a b c d    a b e    a b e f g
    a tree      [a b] [c d] [e] [f g],   parents −1 0 0 2

A node of the tree is a segment of the stream. It has the index of its parent, which comes
before it. A document is a path: each of its tokens comes after the tokens of the nodes
above. This determines what a mixer needs of a token's past:

    a recurrence   starts from the parent's end state; a state's gradient is the sum over
                   the children
    a convolution  reads the last tokens on the path
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
class PrefixTrees:
    """Nodes of a stream's trees. A document that shares nothing is a tree of one node."""

    edges: ndarray  # [N+1] int64, first token of each node, then the stream's length
    parents: ndarray  # [N] int64, −1: no parent

    @classmethod
    def behind(cls, back: ndarray, edges: Iterable[int] = ()) -> PrefixTrees:
        """Build nodes from each token's offset `back` to its parent token (0: none).

        Nodes are also cut at these edges.
        """
        # A node begins where a token does not continue the one before it, and ends where a
        # node branches off.
        begins = np.flatnonzero(back != 1)
        above = (begins - back[begins])[back[begins] > 0]
        edges = np.unique([*edges, *begins, *(above + 1), len(back)])
        back = back[edges[:-1]]
        return cls(
            edges,
            np.where(back > 0, np.searchsorted(edges, edges[:-1] - back, side="right") - 1, -1),
        )

    @classmethod
    def apart(cls, edges: ndarray) -> PrefixTrees:
        """Build nodes of documents that do not continue each other."""
        return cls(edges, np.full(len(edges) - 1, -1))

    @property
    def joined(self) -> bool:
        """Whether any node continues another."""
        return bool((self.parents >= 0).any())

    def on_paths(self, ends: ndarray) -> tuple[ndarray, ndarray]:
        """Return the nodes from a root to each of these `ends`, path after path.

        Returns:
            the number of each node's path, and the node.
        """
        # Climb all paths at once, one level per step.
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
        """Number of tokens above each node [N]."""
        number, above = self.on_paths(np.arange(len(self.parents)))
        lengths = np.diff(self.edges)
        return np.bincount(number, lengths[above]).astype(np.int64) - lengths

    def after(self, tokens: int) -> PrefixTrees:
        """Return the nodes without the first `tokens` of each document.

        What then lacks a parent is a document of its own.
        """
        return PrefixTrees.behind(np.where(self.positions > tokens, self.back, 0))

    @property
    def positions(self) -> ndarray:
        """Positions of tokens in their documents [T]."""
        return np.arange(self.edges[-1]) - np.repeat(self.begins, np.diff(self.edges))

    @property
    def back(self) -> ndarray:
        """Offset of each token to its parent token [T], 0: none (the argument of `behind`)."""
        back = np.ones_like(self.positions)
        begins = self.edges[:-1]
        back[begins] = np.where(self.parents >= 0, begins - self.edges[self.parents + 1] + 1, 0)
        return back

    @property
    def leaves(self) -> ndarray:
        """Nodes that no other node continues."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    @property
    def begins(self) -> ndarray:
        """Place [N] where position 0 of each node's tokens would be in the stream."""
        return self.edges[:-1] - self.depth

    @property
    def chains(self) -> tuple[ndarray, ndarray]:
        """Runs of nodes of which each continues the one before it.

        Returns the first token of each run (then the stream's length), and `begins` of its
        first node. Attention treats a run as one document with more keys than queries. A
        leaf is a run of its own, so that its NaN values do not reach the nodes above.
        """
        heads = self.parents != np.arange(len(self.parents)) - 1
        heads[[0, *self.leaves]] = True
        heads = np.flatnonzero(heads)
        return np.append(self.edges[heads], self.edges[-1]), self.begins[heads]

    def below(self, edges: ndarray) -> ndarray | None:
        """Return rectangles [., 4]: the tokens below nodes, and the tokens that they
        continue.

        A row has the range of queries below a node, then the range of keys: from the
        beginning of the node's run (`chains`) to the end of the node. None: the tokens
        below a node are not contiguous.
        """
        # The tokens below a node must end where its last descendant ends.
        number, node = self.on_paths(np.arange(len(self.parents)))
        begin = self.edges[:-1]
        end = self.edges[1:].copy()
        np.maximum.at(end, node, self.edges[number + 1])
        if (end - begin != np.bincount(node, np.diff(self.edges)[number])).any():
            return None
        # Make one rectangle per node, for the queries that no later rectangle of the run
        # covers.
        run = np.searchsorted(edges, begin, side="right") - 1
        last = np.append(run[1:] != run[:-1], True)
        # Tokens below the run's next node see these keys as well, in that node's rectangle.
        behind = np.where(last, edges[run + 1], np.append(end[1:], 0))
        return np.stack([behind, end, edges[run], self.edges[1:]], 1)[behind < end]

    def at(self, tokens: ndarray) -> ndarray:
        """Return the node of each token."""
        return np.searchsorted(self.edges, tokens, side="right") - 1

    def ranges(self, start: ndarray, end: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """Return the paths of tokens `start`, each up to its `end`, as ranges of tokens.

        Returns:
            for each range the number of its path, its first token, and the token after its
            last.
        """
        number, nodes = self.on_paths(self.at(start))
        last = np.append(number[1:] != number[:-1], True)
        return number, self.edges[nodes], np.where(last, end[number], self.edges[nodes + 1])

    def starts(self, size: int | None) -> ndarray:
        """Return where entries begin [E]: at each node, and at each fragment of `size`
        tokens.
        """
        cuts = np.arange(0, self.edges[-1], size or self.edges[-1])
        return np.union1d(self.edges[:-1], cuts)

    def before(self, tokens: ndarray) -> ndarray:
        """Return the parent token of each token, −1: none; −1 stays −1."""
        node = self.at(tokens)
        above = np.where(self.parents >= 0, self.edges[self.parents + 1] - 1, -1)[node]
        return np.where(tokens < 0, -1, np.where(tokens > self.edges[node], tokens - 1, above))


def checked_nodes(
    edges: ndarray, parents: Tensor | Sequence[int] | None, num_streams: int
) -> PrefixTrees:
    """Return the nodes of documents with these parents.

    Args:
        parents: None: no node has a parent.

    Raises:
        ValueError: parents do not form trees that each lie in one stream.
    """
    if parents is None:
        return PrefixTrees.apart(edges)
    # Check shape and dtype.
    numbers = torch.as_tensor(parents).cpu().numpy()
    order = np.arange(len(edges) - 1)
    if numbers.shape != order.shape or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"parents ({numbers.dtype} {list(numbers.shape)}) must be integers [N] = {list(order.shape)}, one for "
            "each segment"
        )
    numbers = numbers.astype(np.int64)
    # Check that each parent comes before its child, in the same stream.
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
    return PrefixTrees(edges, numbers)
