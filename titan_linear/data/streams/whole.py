"""Streams of whole documents: what belongs together (the two of a pair) lies in one stream, and padding fills it up.

Documents are laid as they follow in the epoch, as many as fit. So stream i depends on those before it in the epoch: an
epoch's streams are found together, once, and how many streams the epochs before had.
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
    """streams[i] holds the documents that are whole in it; `targets.group` of them belong together.

    ValueError: one is longer than a stream.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._ends = [0]  # streams before each epoch
        self._laid = lru_cache(maxsize=2)(self._lay)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._laid(0)[1]) - 1 if not self.repeat else super().__len__()

    def _documents(self, i: int) -> ndarray:
        """Those of stream i."""
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
        """The epoch's documents in their order, and where in it each stream begins, and the last one's end."""
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
        """Where each stream begins among what has these lengths, and the last one's end."""
        ends = np.cumsum(lengths)
        edges = [0]
        while edges[-1] < len(ends):
            begin = ends[edges[-1] - 1] if edges[-1] else 0
            edges.append(int(np.searchsorted(ends, begin + self.seq_len, side="right")))
        return edges
