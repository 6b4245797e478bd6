"""Streams of prefix trees (data/corpus/trees.py), each whole in one stream. A tree that is longer than a stream is cut
into trees that together repeat the fewest tokens, of all ways that keep the order of its leaves.

A stream's documents are its nodes. The column BACK says how many tokens before each one that lies which it continues
(0: none), and SHARE how much the documents that hold it count together. Columns of labels have at each token the
numbers of the token behind it, also where that continues another one: the token is then a further label of that one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.trees import BACK, SHARE
from titan_linear.data.streams.packing import IGNORE, Stream, document_lengths
from titan_linear.data.streams.whole import WholeStreams
from titan_linear.ops.layout.nodes import Nodes


class TreeStreams(WholeStreams):
    """streams[i] holds trees, whole or cut. ValueError: a path is longer than a stream."""

    @property
    def summary(self) -> str:
        """For the console, if trees are cut; else ""."""
        units, _ = self._laid(0)
        computed = int(units[:, 3].sum())
        if computed == self.num_tokens:
            return ""
        return (
            f"trees longer than training.seq_len = {self.seq_len:,} are cut: {computed - self.num_tokens:,} of "
            f"{computed:,} tokens are computed again"
        )

    def _parts(self, i: int) -> tuple[ndarray, ndarray, int]:
        """The nodes of stream i as runs of the corpus's tokens."""
        starts, lengths = [], []
        for document, first, last, _ in self._documents(i).tolist():
            nodes = self._nodes(document)
            above = np.unique(nodes.on_paths(nodes.leaves[first:last])[1])
            starts.append(self.corpus.offsets[document] + nodes.edges[above])
            lengths.append(np.diff(nodes.edges)[above])
        return np.concatenate(starts), np.concatenate(lengths), IGNORE

    def _stream(self, starts: ndarray, lengths: ndarray, next_token: int, seq_len: int) -> Stream:
        edges = np.unique(np.append(0, [*np.cumsum(lengths), seq_len]))
        parents = np.full(len(edges) - 1, -1)
        ends: dict[int, int] = {}  # the last node that ends at a token of the corpus
        for n, (start, back) in enumerate(zip(starts.tolist(), self.corpus.columns[BACK][starts].tolist())):
            parents[n] = ends[start - back + 1] if back else -1
            ends[start + lengths[n]] = n
        nodes = Nodes(edges, parents)
        stream = super()._stream(starts, lengths, next_token, seq_len, nodes.back)
        weights = stream.columns["weights"]
        share = self._shares(nodes, np.roll(weights, 1) > 0)
        columns = {"weights": weights * np.roll(share, -1), BACK: nodes.back, SHARE: share}
        return replace(stream, position_ids=nodes.positions, columns=stream.columns | columns)

    def _divided(self, weights: ndarray, edges: ndarray) -> ndarray:
        return weights  # shares are

    def _shares(self, nodes: Nodes, targets: ndarray) -> ndarray:
        """How many documents hold each token; each counts 1, or if they are normalised, 1 over its targets."""
        number, node = nodes.on_paths(nodes.leaves)
        targets = np.add.reduceat(targets, nodes.edges[:-1], dtype=np.int64)
        targets = np.maximum(np.bincount(number, targets[node]), 1)
        each = 1 / targets[number] if self.targets.normalise == "document" else None
        return np.repeat(np.bincount(node, each), np.diff(nodes.edges))

    def _nodes(self, document: int) -> Nodes:
        return Nodes.behind(self.corpus.columns[BACK][slice(*self.corpus.offsets[document : document + 2])])

    def _lay(self, epoch: int) -> tuple[ndarray, list[int]]:
        """The epoch's trees in their order, [., 4]: document, its first leaf, one after its last, and
        tokens; and where each stream begins, and the last one's end."""
        order, _ = self.line.around(epoch, 0, self.num_tokens)
        units: list[tuple[int, ...]] = []
        for document, tokens in zip(order.tolist(), document_lengths(self.corpus, order).tolist()):
            units += [(document, 0, tokens, tokens)] if tokens <= self.seq_len else self._cut(document)
        laid = np.array(units)
        return laid, self._filled(laid[:, 3])

    def _cut(self, document: int) -> list[tuple[int, ...]]:
        """Runs of leaves whose trees have at most `seq_len` tokens each, and the fewest together."""
        nodes = self._nodes(document)
        ends = nodes.edges[nodes.leaves + 1]
        whole = ends - nodes.begins[nodes.leaves]  # tokens of each path
        pair = self.targets.group == 2
        most, what = (ends[-1], "pair") if pair else (whole.max(), f"path to leaf {whole.argmax()}")
        if most > self.seq_len:
            raise ValueError(
                f"training.seq_len = {self.seq_len}: the {what} of tree {document} has {most:,} tokens, and it "
                "must lie in one stream; raise it, or leave such trees out"
            )
        best: list[tuple[int, list[tuple[int, ...]]]] = [(0, [])]  # for the leaves before each
        for last in range(1, len(ends) + 1):
            sizes = whole[:last] + ends[last - 1] - ends[:last]  # a leaf adds what lies behind the one before
            ways = [
                (best[first][0] + size, [*best[first][1], (document, first, last, size)])
                for first, size in enumerate(sizes.tolist())
                if size <= self.seq_len
            ]
            best.append(min(ways))
        return best[-1][1]
