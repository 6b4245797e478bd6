"""Streams of prefix trees (data/corpus/tree_records.py), each whole in one stream.

A tree that is longer than a stream is cut into trees that keep the order of its leaves and
together repeat as few tokens as possible.

A stream's documents are the nodes of trees. The column BACK is the offset from each token
to its parent token (0: no parent), and SHARE is the total weight of the documents that
contain the token. Label columns hold, at each token, the values of the token after it, even
if that token has another parent: it is then a further label of its parent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.tree_records import BACK, SHARE
from titan_linear.data.streams.packing import IGNORE, PackedStreams, Targets, document_lengths
from titan_linear.data.streams.split import Side
from titan_linear.data.streams.whole import WholeStreams
from titan_linear.ops.layout.prefix_trees import PrefixTrees


class TreeStreams(WholeStreams):
    """Streams of trees, whole or cut.

    Raises:
        ValueError: a path is longer than a stream.
    """

    @property
    def summary(self) -> str:
        """Return a line about how many tokens are repeated because trees are cut, or ""."""
        units, _ = self._laid(0)
        computed = int(units[:, 3].sum())
        if computed == self.num_tokens:
            return ""
        return (
            f"trees longer than training.seq_len = {self.seq_len:,} are cut: {computed - self.num_tokens:,} of "
            f"{computed:,} tokens are computed again"
        )

    def _parts(self, i: int) -> tuple[Any, ...]:
        """Return the nodes of stream i as runs of the corpus's tokens, and their parents."""
        starts, lengths = [], []
        parents: list[int] = []
        for document, first, last, _ in self._documents(i).tolist():
            trees = self._nodes(document)
            # Keep the nodes on the paths to this part's leaves.
            held = np.unique(trees.on_paths(trees.leaves[first:last])[1])
            starts.append(self.corpus.offsets[document] + trees.edges[held])
            lengths.append(np.diff(trees.edges)[held])
            # Renumber the parents within the stream.
            above = trees.parents[held]
            parents += np.where(above < 0, -1, len(parents) + np.searchsorted(held, above)).tolist()
        return np.concatenate(starts), np.concatenate(lengths), IGNORE, parents

    def _weighted(self, weights: ndarray, trees: PrefixTrees) -> dict[str, ndarray]:
        """Multiply each token's weight by the number of documents that contain it.

        With weights normalised by document, a document counts 1 over its number of targets
        instead of 1.
        """
        number, node = trees.on_paths(trees.leaves)
        # Count the targets of each document, from the targets of the nodes on its path.
        targets = np.add.reduceat(np.roll(weights, 1) > 0, trees.edges[:-1], dtype=np.int64)
        targets = np.maximum(np.bincount(number, targets[node]), 1)
        # Sum over the documents that contain each node.
        each = 1 / targets[number] if self.targets.normalise == "document" else None
        share = np.repeat(np.bincount(node, each), np.diff(trees.edges))
        return {"weights": weights * np.roll(share, -1), BACK: trees.back, SHARE: share}

    def _nodes(self, document: int) -> PrefixTrees:
        return PrefixTrees.behind(
            self.corpus.columns[BACK][slice(*self.corpus.offsets[document : document + 2])]
        )

    def _lay(self, epoch: int) -> tuple[ndarray, list[int]]:
        """Lay out the epoch's trees, in their order.

        Returns [n, 4] with document, first leaf, one after the last leaf, and tokens. Also
        returns where each stream begins, and where the last one ends.
        """
        order, _ = self.line.around(epoch, 0, self.num_tokens)
        units: list[tuple[int, ...]] = []
        for document, tokens in zip(order.tolist(), document_lengths(self.corpus, order).tolist()):
            units += (
                [(document, 0, tokens, tokens)] if tokens <= self.seq_len else self._cut(document)
            )
        laid = np.array(units)
        return laid, self._filled(laid[:, 3])

    def _cut(self, document: int) -> list[tuple[int, ...]]:
        """Split a tree into runs of leaves whose trees have at most `seq_len` tokens each.

        The runs together have as few tokens as possible. Among equal ways, the first runs
        are shortest.
        """
        trees = self._nodes(document)
        ends = trees.edges[trees.leaves + 1]
        # Tokens of each path.
        whole = ends - trees.begins[trees.leaves]
        pair = self.targets.group == 2
        most, what = (ends[-1], "pair") if pair else (whole.max(), f"path to leaf {whole.argmax()}")
        if most > self.seq_len:
            raise ValueError(
                f"training.seq_len = {self.seq_len}: the {what} of tree {document} has {most:,} tokens, and it "
                "must lie in one stream; raise it, or leave such trees out"
            )
        # Leaves [first, last) have ends[last - 1] - begins[first] tokens together.
        begins = ends - whole
        reach = np.searchsorted(ends, begins + self.seq_len, side="right")
        # Dynamic programming from the last leaf back: the fewest tokens for the leaves from
        # each one on, and where its run ends.
        fewest, run_end = np.zeros(len(ends) + 1, np.int64), np.zeros(len(ends), np.int64)
        for first in reversed(range(len(ends))):
            costs = ends[first : reach[first]] + fewest[first + 1 : reach[first] + 1]
            run_end[first] = first + 1 + costs.argmin()
            fewest[first] = costs.min() - begins[first]
        # Follow the best run ends from the first leaf.
        units: list[tuple[int, ...]] = []
        first = 0
        while first < len(ends):
            last = run_end[first]
            units.append((document, first, last, ends[last - 1] - begins[first]))
            first = last
        return units


def streams_of(side: Side, *, targets: Targets, **options: Any) -> PackedStreams:
    """Build streams of trees, of whole documents, or of documents that streams may cut."""
    kind = (
        TreeStreams
        if BACK in side.corpus.columns
        else WholeStreams
        if targets.group
        else PackedStreams
    )
    return kind(side, targets=targets, **options)
