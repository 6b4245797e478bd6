"""Packed streams: documents laid end to end, cut into streams of `seq_len` tokens, each a function of its index.

    line     | d5        |d0 |d3            |d1  |d4   | d2 |d1  |d2 | d5   …     epoch 0 ends after d2
    streams  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|  …     T tokens each

Stream i is found without looking at those before it: i·T gives the epoch and the place in it, a binary search in that
epoch's cumulative lengths the document. An epoch in use costs 16 bytes per document, and never a copy of tokens.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_linear.data.cache import Corpus
from titan_linear.loss import IGNORE


@dataclass(frozen=True, eq=False)
class Stream:
    """T tokens of packed documents. A document cut by the stream's edge is, in the next stream, a document anew."""

    tokens: np.ndarray  # [T] int64
    labels: np.ndarray  # [T] int64: the next token of the same document, where it is learnt; else IGNORE
    cu_seqlens: np.ndarray  # [N+1] int32, from 0 to T
    position_ids: np.ndarray  # [T] int64, from 0 in each document


def split_documents(corpus: Corpus, holdout: float, split: str) -> np.ndarray:
    """Indices [n] int64 of the documents of "train" or "validation", in the corpus's order.

    A document is held out if its hash, as a fraction of 2⁶⁴, is below `holdout`: this depends on its tokens alone, so
    equal documents are never on both sides, and documents that join the corpus move no other.
    ValueError (naming validation.holdout): not in [0, 1), or nothing is left on this side.
    """
    assert split in ("train", "validation"), split
    if not 0 <= holdout < 1:
        raise ValueError(f"validation.holdout = {holdout}, the share of documents to hold out, must be in [0, 1)")
    fractions = (corpus.hashes >> np.uint64(11)) * 2.0**-53
    held_out = fractions < holdout
    documents = np.flatnonzero(held_out if split == "validation" else ~held_out)
    if not len(documents):
        raise ValueError(
            f"validation.holdout = {holdout} leaves no document for {split}, of {corpus.num_documents:,}; "
            + _better_holdout(fractions, split)
        )
    return documents


def _better_holdout(fractions: np.ndarray, split: str) -> str:
    """What to do where one side has no documents; fractions: of the documents' hashes, [n] float64."""
    low, high = fractions.min(), fractions.max()
    if low == high:
        return "all are the same: give validation.dataset_path, or train on more documents"
    # Just above the smallest, to the fewest digits that leave a document on each side.
    first = math.ceil(-math.log10(max(low, 1e-9)))
    tries = (math.floor(low * 10**n + 1) / 10**n for n in range(first, 18))
    better = next((x for x in tries if low < x <= high), float(high))
    return f"{'raise' if split == 'validation' else 'lower'} it, to {better} for example, or train on more documents"


class PackedStreams:
    """streams[i]: stream i of the endless line of these documents; random access, the same everywhere.

    Each epoch lays the documents in an order of its own: that of raw draws of the counter-based generator
    Philox(key=(seed, epoch)), whose bits numpy keeps for good. Epochs follow without a gap.
    repeat=False: one pass, in the given order; len(streams) of them, the last filled up with a document of padding.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, *, seq_len: int, seed: int, repeat: bool = True):
        if seq_len < 1:
            raise ValueError(f"training.seq_len = {seq_len} must be 1 or more")
        assert len(documents), "no documents"
        self.corpus, self.documents = corpus, np.asarray(documents, dtype=np.int64)
        self.seq_len, self.seed, self.repeat = seq_len, seed, repeat
        self.num_tokens = int(self._lengths(self.documents).sum())  # of one epoch
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}  # to a loader's worker: it derives them again

    def __len__(self) -> int:
        if self.repeat:
            raise TypeError("repeated streams have no end")
        return -(-self.num_tokens // self.seq_len)

    def __getitem__(self, i: int) -> Stream:
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        start, stop = i * self.seq_len, (i + 1) * self.seq_len
        starts, lengths, next_token = self._runs(start, stop if self.repeat else min(stop, self.num_tokens))
        edges = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
        positions = np.repeat(starts, lengths) + within
        tokens = self.corpus.tokens[positions].astype(np.int64)
        labels = np.append(tokens[1:], next_token)
        labels[edges[1:-1] - 1] = IGNORE  # inside a stream, a run ends where its document ends
        labels[~self.corpus.is_learnt(positions + 1)] = IGNORE
        return self._padded(tokens, labels, edges, within)

    def padding(self) -> Stream:
        """A stream of padding only: it gives a rank as many streams as the others have."""
        none = np.zeros(0, dtype=np.int64)
        return self._padded(none, none, np.zeros(1, dtype=np.int64), none)

    def _padded(self, tokens: np.ndarray, labels: np.ndarray, edges: np.ndarray, positions: np.ndarray) -> Stream:
        missing = self.seq_len - len(tokens)
        if missing:
            tokens = np.append(tokens, np.zeros(missing, dtype=np.int64))
            labels = np.append(labels, np.full(missing, IGNORE))
            edges = np.append(edges, self.seq_len)
            positions = np.append(positions, np.arange(missing))
        return Stream(tokens, labels, edges.astype(np.int32), positions)

    def _runs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The line's [start, stop) as runs of corpus.tokens, one per document: where each begins [n], its length [n].

        And the token that follows in the last one's document, or IGNORE if that document ends here.
        """
        starts, lengths = [], []
        while start < stop:
            epoch, first = divmod(start, self.num_tokens)
            last = min(first + stop - start, self.num_tokens)  # [first, last) of this epoch
            order, ends = self._epoch(epoch)
            low, high = np.searchsorted(ends, [first, last - 1], side="right")
            documents, document_ends = order[low : high + 1], ends[low : high + 1]
            document_starts = document_ends - self._lengths(documents)
            begin = np.maximum(document_starts, first)
            starts.append(self.corpus.offsets[documents] + begin - document_starts)
            lengths.append(np.minimum(document_ends, last) - begin)
            start += last - first
        end = int(starts[-1][-1] + lengths[-1][-1])
        goes_on = end < self.corpus.offsets[documents[-1] + 1]
        return np.concatenate(starts), np.concatenate(lengths), int(self.corpus.tokens[end]) if goes_on else IGNORE

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in this epoch's order [n], and where each ends in it [n]."""
        if epoch not in self._epochs:
            order = self.documents
            if self.repeat:
                key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
                order = order[np.argsort(np.random.Philox(key=key).random_raw(len(order)), kind="stable")]
            while len(self._epochs) > 1:  # a stream can lie across two
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = order, np.cumsum(self._lengths(order))
        return self._epochs[epoch]

    def _lengths(self, documents: np.ndarray) -> np.ndarray:
        return self.corpus.offsets[documents + 1] - self.corpus.offsets[documents]
