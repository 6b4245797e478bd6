"""Packed streams: documents laid end to end, cut into streams of `seq_len` tokens.

    line     | d5        |d0 |d3            |d1  |d4   | d2 |d1  |d2 | d5   …   epoch 0 ends after d2
    streams  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|  …     T tokens each

Each stream is a function of its index, found without reading the streams before it: i·T
gives the epoch and the place in it, and binary searches find the document there. This takes
little memory for a corpus of any size, and never a copy of its tokens.

Streams may become longer at some index: the line continues where the last shorter stream
ended.

The order of an epoch has two levels. A keyed permutation orders bundles of 128 consecutive
documents. Each 128 bundles that follow each other in that order form a pool, and the
documents of a pool are sorted by one random draw each. Memory holds only the number of
tokens before each pool (8 bytes for 16,384 documents) and the few pools in use. The order
that a seed gives must never change: runs could not resume where they stopped.

Random draws come from the counter-based generator Philox(key=(seed, epoch)), whose bits
numpy guarantees never to change.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.corpus import Corpus
from titan_linear.data.streams.split import Side
from titan_linear.ops.cross_entropy import IGNORE
from titan_linear.ops.layout.prefix_trees import PrefixTrees

# --- The order of documents ------------------------------------------------------------------------------------------

# Number of bundles in a pool.
POOL = 128
ROUNDS = 8
POOLS_KEPT = 8


class InPlace(NamedTuple):
    """One epoch of a side, in the corpus's order."""

    side: Side

    def around(self, epoch: int, first: int, last: int) -> tuple[ndarray, ndarray]:
        """Find documents as `Pooled.around` does."""
        assert epoch == 0, epoch
        low, high = np.searchsorted(self.side.ends[1:], [first, last - 1], side="right")
        documents = self.side.documents(np.arange(low, high + 1))
        lengths = document_lengths(self.side.corpus, documents)
        return documents, self.side.ends[low] + np.cumsum(lengths)


class Pooled:
    """A side's documents in the order of each epoch. Threads may share it.

    A corpus of at most POOL bundles is one pool, so every order of its documents is equally
    likely.
    """

    def __init__(self, side: Side, seed: int):
        self.side = side
        self.seed = seed
        # Two epochs, since a stream can lie across an edge between them.
        self._ends = lru_cache(maxsize=2)(self._pool_ends)
        self._kept = lru_cache(maxsize=POOLS_KEPT)(self._pool)

    def around(self, epoch: int, first: int, last: int) -> tuple[ndarray, ndarray]:
        """Find documents [n] int64 of an epoch that hold its tokens [first, last).

        They follow each other in the epoch, and there may be more than necessary. Also
        returns where each document ends in the epoch, [n] int64.
        """
        ends = self._ends(epoch)
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        pools = [self._kept(epoch, int(pool)) for pool in range(low, high + 1)]
        orders, lengths = zip(*pools)
        begin = ends[low] - lengths[0].sum()
        return np.concatenate(orders), begin + np.cumsum(np.concatenate(lengths))

    def _pool(self, epoch: int, pool: int) -> tuple[ndarray, ndarray]:
        """Return a pool's documents in their order [n], and their lengths [n]."""
        documents = self.side.documents(self._bundles(epoch, pool * POOL, (pool + 1) * POOL))
        groups = documents.reshape(-1, self.side.corpus.group)
        # Sort groups by a random draw each; documents that belong together stay together.
        places = draws(self.seed, epoch, len(groups), use=(pool + 1, 0, 0))
        order = groups[np.argsort(places, kind="stable")].ravel()
        return order, document_lengths(self.side.corpus, order)

    def _pool_ends(self, epoch: int) -> ndarray:
        """Return where each pool ends in this epoch, [pools] int64."""
        sums = []
        step = 512 * POOL
        for first in range(0, self.side.num_bundles, step):
            bundles = self._bundles(epoch, first, first + step)
            tokens = self.side.ends[bundles + 1] - self.side.ends[bundles]
            sums.append(np.add.reduceat(tokens, np.arange(0, len(tokens), POOL)))
        return np.cumsum(np.concatenate(sums))

    def _bundles(self, epoch: int, first: int, last: int) -> ndarray:
        """Return the bundles at places [first, last) of this epoch, [n] int64."""
        count = self.side.num_bundles
        return permuted(np.arange(first, min(last, count)), count, draws(self.seed, epoch, ROUNDS))


def permuted(places: ndarray, count: int, keys: ndarray) -> ndarray:
    """Return the values at these places, [n] int64, of a permutation of range(count).

    `keys` choose the permutation, and none of its other values is computed. A Feistel
    network permutes all numbers with at most as many bits as count − 1. A value outside
    range(count) goes through it again until it is inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002).

    Args:
        keys: [ROUNDS] uint64.
    """
    bits = (count - 1).bit_length()
    values = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= count)
    while len(outside):
        values[outside] = _network(values[outside], bits, keys)
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def _network(values: ndarray, bits: int, keys: ndarray) -> ndarray:
    """Apply a Feistel network.

    Each round changes one part of the bits by a function of the other.
    """
    below = bits // 2
    low_mask = (1 << below) - 1
    high_mask = (1 << bits - below) - 1
    high = values >> below
    low = values & low_mask
    for i, key in enumerate(keys):
        if i % 2 == 0:
            high ^= _scrambled(low, key) & high_mask
        else:
            low ^= _scrambled(high, key) & low_mask
    return high << below | low


def _scrambled(values: ndarray, key: np.uint64) -> ndarray:
    """Return 32 well-mixed bits of each value and the key (multipliers of splitmix64)."""
    mixed = (values ^ key) * 0xBF58476D1CE4E5B9
    mixed ^= mixed >> 29
    mixed *= 0x94D049BB133111EB
    return mixed >> 32


def draws(seed: int, epoch: int, count: int, use: Sequence[int] = (0, 0, 0)) -> ndarray:
    """Return [count] uint64 random draws, independent for different values of `use`."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    counter = np.array([0, *use], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def document_lengths(corpus: Corpus, documents: ndarray) -> ndarray:
    """Return the number of tokens of each of these documents, [n] int64."""
    return corpus.offsets[documents + 1] - corpus.offsets[documents]


# --- Packed streams --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stream:
    """T tokens of packed documents.

    If the stream's edge cuts a document, its rest begins the next stream as a new document.
    """

    tokens: ndarray  # [T] int64
    # [T] int64: the next token of the same document where it is trained on, else IGNORE.
    labels: ndarray
    cu_seqlens: ndarray  # [N+1] int32, from 0 to T
    position_ids: ndarray  # [T] int64, from 0 in each document
    # Per-label values, [T] or [T, n] each; always includes "weights".
    columns: dict[str, ndarray]


@dataclass(frozen=True)
class Targets:
    """Inputs of a loss in addition to tokens and labels.

    Args:
        normalise: divides the weights of labels by the number of labels in their "document"
            or "stream", or ("token") by nothing.
        columns: names of the corpus's columns to read.
        group: number of consecutive documents that lie whole in one stream. With 0, streams
            cut documents.
    """

    normalise: str = "token"
    columns: tuple[str, ...] = ()
    group: int = 0


class Runs(NamedTuple):
    """Documents of a stream as runs of the corpus's tokens, one after the other."""

    starts: ndarray  # [n] int64, places in the corpus's tokens
    lengths: ndarray  # [n] int64
    # The token that follows the last run in its document, else IGNORE.
    next_token: int = IGNORE
    # Parents of runs that continue other runs, as in `PrefixTrees`. Runs without an entry
    # continue none.
    parents: Sequence[int] = ()


class Length(NamedTuple):
    """Number of tokens per stream, `seq_len`, from stream `start` on."""

    start: int
    seq_len: int


class PackedStreams:
    """Streams of an endless line of documents, with random access.

    Stream i is the same everywhere. Each epoch lays the documents in its own order, drawn
    from (seed, epoch). Epochs follow each other without a gap. Threads may share the
    streams.

    Args:
        repeat: False makes one pass in the corpus's order, in len(streams) streams.
            Padding, as a separate document, fills the last.
    """

    def __init__(
        self,
        side: Side,
        *,
        seq_len: int,
        seed: int,
        repeat: bool = True,
        targets: Targets = Targets(),
    ):
        self.corpus = side.corpus
        self.targets = targets
        self.repeat = repeat
        self.line: Pooled | InPlace = Pooled(side, seed) if repeat else InPlace(side)
        # Number of tokens in one epoch.
        self.num_tokens = side.num_tokens
        self._set_lengths([Length(0, seq_len)])

    def of_lengths(self, lengths: Sequence[Length]) -> PackedStreams:
        """Return the same line cut into streams of these lengths, beginning at stream 0."""
        assert self.repeat and lengths[0].start == 0, lengths
        other = copy(self)
        other._set_lengths(lengths)
        return other

    def _set_lengths(self, lengths: Sequence[Length]) -> None:
        self.lengths = list(lengths)
        self.seq_len = lengths[-1].seq_len
        # For each length: its first token in the line.
        self._begin = [0]
        for length, following in pairwise(lengths):
            self._begin.append(self._begin[-1] + (following.start - length.start) * length.seq_len)

    def streams_in(self, epochs: int) -> int:
        """Return the number of streams that together hold this many epochs."""
        return -(-epochs * self.num_tokens // self.seq_len)

    def place(self, i: int) -> tuple[int, int]:
        """Return the first token of stream i in the line, and the number of its tokens."""
        n = bisect_right(self.lengths, i, key=lambda length: length.start) - 1
        length = self.lengths[n]
        return self._begin[n] + (i - length.start) * length.seq_len, length.seq_len

    # The interface of a mixture, with one source that has no name.

    @property
    def sources(self) -> dict[str, PackedStreams]:
        return {"": self}

    def source(self, i: int) -> tuple[str, int]:
        return "", i

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"": self.corpus.fingerprint}

    def __len__(self) -> int:
        if self.repeat:
            raise TypeError("repeated streams have no end")
        return self.streams_in(1)

    def __getitem__(self, i: int) -> Stream:
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        _, seq_len = self.place(i)
        return self._stream(seq_len, self.runs(i))

    def padding(self) -> Stream:
        """Return a stream of padding only, for ranks that have fewer streams than others."""
        none = np.zeros(0, dtype=np.int64)
        return self._stream(self.seq_len, Runs(none, none))

    def _stream(self, seq_len: int, runs: Runs) -> Stream:
        """Build a stream, and fill it with padding, which is one document of zeros."""
        starts, lengths, next_token, parents = runs
        end = lengths.sum()
        # Padding is a last run, with token 0.
        if end < seq_len:
            starts = np.append(starts, 0)
            lengths = np.append(lengths, seq_len - end)
        # Gather the tokens of all runs.
        edges = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(seq_len) - np.repeat(edges[:-1], lengths)
        positions = np.repeat(starts, lengths) + within
        positions[end:] = 0
        tokens = self.corpus.tokens[positions].astype(np.int64)
        tokens[end:] = 0
        # Label each token with the next one, if that continues it and has a weight. Where
        # the next token continues an earlier one, only the columns hold its values.
        unparented = [-1] * (len(lengths) - len(parents))
        trees = PrefixTrees(edges, np.array([*parents, *unparented]))
        behind = np.append(trees.back[1:], next_token != IGNORE)
        behind[end:] = 0
        following = np.append(positions[1:], positions[-1] + 1)
        weights = self.corpus.column("weights", following) * (behind > 0)
        labelled = (behind == 1) & (weights > 0)
        labels = np.where(labelled, np.append(tokens[1:], next_token), IGNORE)
        # Columns hold the values of the next token, as labels do.
        columns = self._weighted(weights, trees)
        for name in self.targets.columns:
            column = self.corpus.column(name, following)
            column[weights == 0] = 0
            columns[name] = column
        if self.targets.group:
            numbers = np.repeat(np.arange(len(lengths)), lengths)
            columns["document"] = np.roll(numbers, -1)
        return Stream(tokens, labels, edges.astype(np.int32), trees.positions, columns)

    def _weighted(self, weights: ndarray, trees: PrefixTrees) -> dict[str, ndarray]:
        """Return the column of label weights [T], divided according to `targets.normalise`."""
        if self.targets.normalise == "token":
            return {"weights": weights}
        edges = trees.edges
        if self.targets.normalise == "stream":
            edges = edges[[0, -1]]
        # Divide by the number of labels between two edges.
        counts = np.add.reduceat(weights > 0, edges[:-1], dtype=np.int64)
        return {"weights": weights / np.repeat(np.maximum(counts, 1), np.diff(edges))}

    def runs(self, i: int) -> Runs:
        """Return the documents of stream i."""
        start, seq_len = self.place(i)
        stop = start + seq_len
        if not self.repeat:
            stop = min(stop, self.num_tokens)
        starts = []
        lengths = []
        while start < stop:
            epoch, first = divmod(start, self.num_tokens)
            # One epoch at a time: its tokens [first, last).
            last = min(first + stop - start, self.num_tokens)
            documents, ends = self.line.around(epoch, first, last)
            low, high = np.searchsorted(ends, [first, last - 1], side="right")
            documents = documents[low : high + 1]
            document_ends = ends[low : high + 1]
            document_starts = document_ends - document_lengths(self.corpus, documents)
            # The range may cut the first and the last document.
            begin = np.maximum(document_starts, first)
            starts.append(self.corpus.offsets[documents] + begin - document_starts)
            lengths.append(np.minimum(document_ends, last) - begin)
            start += last - first
        # The last document may continue after the range.
        end = int(starts[-1][-1] + lengths[-1][-1])
        next_token = IGNORE
        if end < self.corpus.offsets[documents[-1] + 1]:
            next_token = int(self.corpus.tokens[end])
        return Runs(np.concatenate(starts), np.concatenate(lengths), next_token)
