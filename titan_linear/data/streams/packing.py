"""Packed streams: documents laid end to end, cut into streams of `seq_len` tokens, each a function of its index.

    line     | d5        |d0 |d3            |d1  |d4   | d2 |d1  |d2 | d5   …     epoch 0 ends after d2
    streams  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|  …     T tokens each

Stream i is found without looking at those before it: i·T gives the epoch and the place in it, and binary searches find
the document there (order.py). For a corpus of any size this takes little memory, and never a copy of its tokens.

Streams may become longer at some index: the line goes on where the last shorter one ended.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titan_linear.data.streams.order import InPlace, Line, Pooled, document_lengths
from titan_linear.data.streams.split import Side
from titan_linear.ops.cross_entropy import IGNORE


@dataclass(frozen=True, eq=False)
class Stream:
    """T tokens of packed documents. A document that the stream's edge cuts goes on in the next as a new document."""

    tokens: np.ndarray  # [T] int64
    labels: np.ndarray  # [T] int64: the next token of the same document, where it is trained on; else IGNORE
    cu_seqlens: np.ndarray  # [N+1] int32, from 0 to T
    position_ids: np.ndarray  # [T] int64, from 0 in each document


@dataclass(frozen=True)
class Length:
    """From stream `start` on, streams have `seq_len` tokens."""

    start: int
    seq_len: int


class PackedStreams:
    """streams[i]: stream i of the endless line of these documents; random access, the same everywhere.

    Each epoch lays the documents in an order of its own, drawn from (seed, epoch) (order.py). Epochs follow without a
    gap. Threads may share the streams.
    repeat=False: one pass in the corpus's order, in len(streams) streams; padding, as a document, fills up the last.
    """

    def __init__(self, side: Side, *, seq_len: int, seed: int, repeat: bool = True):
        self.corpus = side.corpus
        self.repeat = repeat
        self.line: Line = Pooled(side, seed) if repeat else InPlace(side)
        self.num_tokens = side.num_tokens  # of one epoch
        self._set_lengths([Length(0, seq_len)])

    def of_lengths(self, lengths: Sequence[Length]) -> PackedStreams:
        """The same line in streams of these lengths, the first of which begins at stream 0."""
        assert self.repeat and lengths[0].start == 0, lengths
        other = copy(self)
        other._set_lengths(lengths)
        return other

    def _set_lengths(self, lengths: Sequence[Length]) -> None:
        self.lengths = list(lengths)
        self.seq_len = lengths[-1].seq_len
        self._begin = [0]  # for each length: its first token in the line
        for length, following in pairwise(lengths):
            self._begin.append(self._begin[-1] + (following.start - length.start) * length.seq_len)

    def place(self, i: int) -> tuple[int, int]:
        """The first token of stream i in the line, and how many it has."""
        n = bisect_right([length.start for length in self.lengths], i) - 1
        start = self.lengths[n].start
        seq_len = self.lengths[n].seq_len
        return self._begin[n] + (i - start) * seq_len, seq_len

    @property
    def fingerprints(self) -> dict[str, str]:
        """That of the corpus, as a mixture's by name."""
        return {"": self.corpus.fingerprint}

    def __len__(self) -> int:
        if self.repeat:
            raise TypeError("repeated streams have no end")
        return -(-self.num_tokens // self.seq_len)

    def __getitem__(self, i: int) -> Stream:
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        start, seq_len = self.place(i)
        stop = start + seq_len
        starts, lengths, next_token = self._runs(start, stop if self.repeat else min(stop, self.num_tokens))
        edges = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
        positions = np.repeat(starts, lengths) + within
        tokens = self.corpus.tokens[positions].astype(np.int64)
        labels = np.append(tokens[1:], next_token)
        labels[edges[1:-1] - 1] = IGNORE  # inside a stream, a run ends where its document ends
        labels[~self.corpus.loss_mask(positions + 1)] = IGNORE
        return self._padded(tokens, labels, edges, within, seq_len)

    def runs(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents of stream i begin in the corpus's tokens [n], and how many tokens of each it has [n]."""
        assert self.repeat
        start, seq_len = self.place(i)
        starts, lengths, _ = self._runs(start, start + seq_len)
        return starts, lengths

    def padding(self) -> Stream:
        """A stream of padding only: it gives a rank as many streams as the others have."""
        none = np.zeros(0, dtype=np.int64)
        return self._padded(none, none, np.zeros(1, dtype=np.int64), none, self.seq_len)

    def _padded(
        self, tokens: np.ndarray, labels: np.ndarray, edges: np.ndarray, positions: np.ndarray, seq_len: int
    ) -> Stream:
        missing = seq_len - len(tokens)
        if missing:
            tokens = np.append(tokens, np.zeros(missing, dtype=np.int64))
            labels = np.append(labels, np.full(missing, IGNORE))
            edges = np.append(edges, seq_len)
            positions = np.append(positions, np.arange(missing))
        return Stream(tokens, labels, edges.astype(np.int32), positions)

    def _runs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The line's [start, stop) as runs of corpus.tokens, one per document: where each begins [n], its length [n].

        Also the token that follows in the last one's document, or IGNORE if that document ends here.
        """
        starts = []
        lengths = []
        while start < stop:
            epoch, first = divmod(start, self.num_tokens)
            last = min(first + stop - start, self.num_tokens)  # [first, last) of this epoch
            documents, ends = self.line.around(epoch, first, last)
            low, high = np.searchsorted(ends, [first, last - 1], side="right")
            documents = documents[low : high + 1]
            document_ends = ends[low : high + 1]
            document_starts = document_ends - document_lengths(self.corpus, documents)
            begin = np.maximum(document_starts, first)
            starts.append(self.corpus.offsets[documents] + begin - document_starts)
            lengths.append(np.minimum(document_ends, last) - begin)
            start += last - first
        end = int(starts[-1][-1] + lengths[-1][-1])
        goes_on = end < self.corpus.offsets[documents[-1] + 1]
        return np.concatenate(starts), np.concatenate(lengths), int(self.corpus.tokens[end]) if goes_on else IGNORE
