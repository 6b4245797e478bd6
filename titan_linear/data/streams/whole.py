"""Streams of whole documents: documents that belong together (a pair) share a stream.

Padding fills each stream. Documents are laid in the epoch's order, as many per stream as
fit. So stream i depends on the earlier documents of its epoch, and on how many streams the
epochs before had. The streams of an epoch are found together, once.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy import ndarray

from titan_linear.data.streams.packing import IGNORE, PackedStreams, document_lengths


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

    def __len__(self) -> int:
        return len(self._laid(0)[1]) - 1 if not self.repeat else super().__len__()

    def _documents(self, i: int) -> ndarray:
        """Return the documents of stream i."""
        with self._lock:
            while self._ends[-1] <= i:
                self._ends.append(self._ends[-1] + len(self._laid(len(self._ends) - 1)[1]) - 1)
            epoch = bisect_right(self._ends, i) - 1
            order, edges = self._laid(epoch)
        place = i - self._ends[epoch]
        return order[edges[place] : edges[place + 1]]

    def _parts(self, i: int) -> tuple[Any, ...]:
        documents = self._documents(i)
        return self.corpus.offsets[documents], document_lengths(self.corpus, documents), IGNORE

    def _lay(self, epoch: int) -> tuple[ndarray, list[int]]:
        """Return the epoch's documents in order, and where each stream begins among them.

        The last edge is the end of the last stream.
        """
        order, _ = self.line.around(epoch, 0, self.num_tokens)
        group = self.targets.group
        lengths = document_lengths(self.corpus, order).reshape(-1, group).sum(1)
        if lengths.max() > self.seq_len:
            document = order[int(lengths.argmax()) * group]
            raise ValueError(
                f"training.seq_len = {self.seq_len}: document {document} of {self.corpus.folder} has "
                f"{lengths.max():,} tokens{' with its other one' * (group > 1)}, which the loss takes "
                "whole; raise it, or leave such documents out"
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
