"""Streams of whole documents and of prefix trees, filled with padding.

Documents are laid in the epoch's order, as many per stream as fit, and documents that
belong together (a pair) share a stream. So stream i depends on the earlier documents of
its epoch, and on how many streams the epochs before had. The streams of an epoch are found
together, once.

A prefix tree (data/corpus/tree_records.py) lies whole in one stream too. A tree that is longer
than a stream is cut into trees that keep the order of its leaves and together repeat as few
tokens as possible. A stream's documents are then the nodes of trees. The column BACK is the
offset from each token to its parent token (0: no parent), and SHARE is the total weight of
the documents that contain the token. Label columns hold, at each token, the values of the
token after it, even if that token has another parent: it is then a further label of its
parent.
"""

from bisect import bisect_right
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.tree_records import BACK, SHARE
from titan_linear.data.streams.packing import PackedStreams, Runs, Targets, document_lengths
from titan_linear.data.streams.split import Side
from titan_linear.ops.layout.prefix_trees import PrefixTrees

# A tree, or a run of its leaves, in one stream: the document, the first leaf, one after the
# last leaf, and the number of tokens.
Unit = tuple[int, ...]


class WholeStreams(PackedStreams):
    """Streams that hold documents whole; each `targets.group` documents share a stream.

    Raises:
        ValueError: a document, or a group of them, is longer than a stream.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        # Number of streams before each epoch.
        self._ends = [0]
        self._laid = lru_cache(maxsize=2)(self._lay)
        self._lock = Lock()

    def streams_in(self, epochs: int) -> int:
        with self._lock:
            while len(self._ends) <= epochs:
                self._lay_next()
            return self._ends[epochs]

    def _documents(self, i: int) -> ndarray:
        """Return the documents of stream i."""
        with self._lock:
            while self._ends[-1] <= i:
                self._lay_next()
            epoch = bisect_right(self._ends, i) - 1
            order, edges = self._laid(epoch)
        place = i - self._ends[epoch]
        return order[edges[place] : edges[place + 1]]

    def _lay_next(self) -> None:
        _, edges = self._laid(len(self._ends) - 1)
        self._ends.append(self._ends[-1] + len(edges) - 1)

    def runs(self, i: int) -> Runs:
        documents = self._documents(i)
        return Runs(self.corpus.offsets[documents], document_lengths(self.corpus, documents))

    def _lay(self, epoch: int) -> tuple[ndarray, list[int]]:
        """Return the epoch's documents in order, and where each stream begins among them.

        The last edge is the end of the last stream.
        """
        order, _ = self.line.around(epoch, 0, self.num_tokens)
        group = self.targets.group
        lengths = document_lengths(self.corpus, order).reshape(-1, group).sum(1)
        if lengths.max() > self.seq_len:
            document = order[int(lengths.argmax()) * group]
            together = " with its other one" if group > 1 else ""
            raise ValueError(
                f"training.seq_len = {self.seq_len}: document {document} of {self.corpus.folder} has "
                f"{lengths.max():,} tokens{together}, which the loss takes whole; raise it, or leave such documents out"
            )
        return order, [edge * group for edge in self._filled(lengths)]

    def _filled(self, lengths: ndarray) -> list[int]:
        """Return where streams begin among units of these lengths, and the end of the last."""
        ends = np.cumsum(lengths)
        edges = [0]
        while edges[-1] < len(ends):
            begin = ends[edges[-1] - 1] if edges[-1] else 0
            edges.append(int(np.searchsorted(ends, begin + self.seq_len, side="right")))
        return edges


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

    def runs(self, i: int) -> Runs:
        """Return the nodes of stream i as runs, with their parents."""
        starts = []
        lengths = []
        parents: list[int] = []
        for document, first, last, _ in self._documents(i).tolist():
            trees = self._nodes(document)
            # Keep the nodes on the paths to this part's leaves.
            _, on_paths = trees.on_paths(trees.leaves[first:last])
            held = np.unique(on_paths)
            starts.append(self.corpus.offsets[document] + trees.edges[held])
            lengths.append(np.diff(trees.edges)[held])
            # Renumber the parents within the stream.
            above = trees.parents[held]
            renumbered = len(parents) + np.searchsorted(held, above)
            parents += np.where(above < 0, -1, renumbered).tolist()
        return Runs(np.concatenate(starts), np.concatenate(lengths), parents=parents)

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
        begin, end = self.corpus.offsets[document : document + 2]
        return PrefixTrees.behind(self.corpus.columns[BACK][begin:end])

    def _lay(self, epoch: int) -> tuple[ndarray, list[int]]:
        """Lay out the epoch's trees, in their order.

        Returns [n, 4] with document, first leaf, one after the last leaf, and tokens. Also
        returns where each stream begins, and where the last one ends.
        """
        order, _ = self.line.around(epoch, 0, self.num_tokens)
        units: list[Unit] = []
        lengths = document_lengths(self.corpus, order)
        for document, tokens in zip(order.tolist(), lengths.tolist()):
            whole = (document, 0, tokens, tokens)
            units += [whole] if tokens <= self.seq_len else self._cut(document)
        laid = np.array(units)
        return laid, self._filled(laid[:, 3])

    def _cut(self, document: int) -> list[Unit]:
        """Split a tree into runs of leaves whose trees have at most `seq_len` tokens each.

        The runs together have as few tokens as possible. Among equal ways, the first runs
        are shortest.
        """
        trees = self._nodes(document)
        ends = trees.edges[trees.leaves + 1]
        # Tokens of each path.
        whole = ends - trees.begins[trees.leaves]
        most = whole.max()
        what = f"path to leaf {whole.argmax()}"
        if self.targets.group == 2:
            most = ends[-1]
            what = "pair"
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
        fewest = np.zeros(len(ends) + 1, np.int64)
        run_end = np.zeros(len(ends), np.int64)
        for first in reversed(range(len(ends))):
            costs = ends[first : reach[first]] + fewest[first + 1 : reach[first] + 1]
            run_end[first] = first + 1 + costs.argmin()
            fewest[first] = costs.min() - begins[first]
        # Follow the best run ends from the first leaf.
        units: list[Unit] = []
        first = 0
        while first < len(ends):
            last = run_end[first]
            units.append((document, first, last, ends[last - 1] - begins[first]))
            first = last
        return units


def streams_of(side: Side, *, targets: Targets, **options: Any) -> PackedStreams:
    """Build streams of trees, of whole documents, or of documents that streams may cut."""
    kind = WholeStreams if targets.group else PackedStreams
    if BACK in side.corpus.columns:
        kind = TreeStreams
    return kind(side, targets=targets, **options)
