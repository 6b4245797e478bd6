"""Packed streams: documents laid end to end, cut into streams of `seq_len` tokens, each a function of its index.

    line     | d5        |d0 |d3            |d1  |d4   | d2 |d1  |d2 | d5   …     epoch 0 ends after d2
    streams  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|  …     T tokens each

Stream i is found without looking at those before it: i·T gives the epoch and the place in it, and binary searches find
the document there. For a corpus of any size this takes little memory, and never a copy of its tokens.

Streams may become longer at some index: the line goes on where the last shorter one ended.

The order of an epoch: bundles of 128 consecutive documents stand in an order that a keyed permutation gives; 128
bundles that follow each other in it are a pool, whose documents are sorted by a random draw for each. All that is kept
is how many tokens are before each pool, 8 bytes for 16,384 documents, and the few pools in use. The order of a seed may
never change: runs would not resume as they began.

Random draws are those of the counter-based generator Philox(key=(seed, epoch)), whose bits numpy keeps for good.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.corpus import Corpus
from titan_linear.data.streams.split import Side
from titan_linear.ops.cross_entropy import IGNORE
from titan_linear.ops.layout.nodes import Nodes

# --- The order of documents ------------------------------------------------------------------------------------------

POOL = 128  # bundles
ROUNDS = 8
POOLS_KEPT = 8


class Line(Protocol):
    """Documents laid end to end, epoch after epoch."""

    num_tokens: int  # of an epoch

    def around(self, epoch: int, first: int, last: int) -> tuple[ndarray, ndarray]:
        """Documents [n] int64 that follow each other in this epoch and hold its tokens [first, last), and perhaps more;
        and where each ends in the epoch, [n] int64."""


class InPlace:
    """One epoch of a side, in the corpus's order."""

    def __init__(self, side: Side):
        self.side, self.num_tokens = side, side.num_tokens

    def around(self, epoch: int, first: int, last: int) -> tuple[ndarray, ndarray]:
        assert epoch == 0, epoch
        low, high = np.searchsorted(self.side.ends[1:], [first, last - 1], side="right")
        documents = self.side.documents(np.arange(low, high + 1))
        return documents, self.side.ends[low] + np.cumsum(
            document_lengths(self.side.corpus, documents)
        )


class Pooled:
    """A side's documents in the order of each epoch. Threads may share it.

    A corpus of at most POOL bundles is one pool: every order of its documents is equally likely.
    """

    def __init__(self, side: Side, seed: int):
        self.side = side
        self.seed = seed
        self.num_tokens = side.num_tokens
        self._ends = lru_cache(maxsize=2)(self._pool_ends)  # a stream can lie across two epochs
        self._kept = lru_cache(maxsize=POOLS_KEPT)(self._pool)

    def around(self, epoch: int, first: int, last: int) -> tuple[ndarray, ndarray]:
        ends = self._ends(epoch)
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        documents = []
        document_ends = []
        for pool in range(low, high + 1):
            order, lengths = self._kept(epoch, int(pool))
            documents.append(order)
            document_ends.append(ends[pool] - lengths.sum() + np.cumsum(lengths))
        return np.concatenate(documents), np.concatenate(document_ends)

    def _pool(self, epoch: int, pool: int) -> tuple[ndarray, ndarray]:
        """A pool's documents in their order [n], and their lengths [n]."""
        documents = self.side.documents(self._bundles(epoch, pool * POOL, (pool + 1) * POOL))
        groups = documents.reshape(-1, self.side.corpus.group)
        order = np.argsort(_draws(self.seed, epoch, len(groups), stream=pool + 1), kind="stable")
        order = groups[order].ravel()
        return order, document_lengths(self.side.corpus, order)

    def _pool_ends(self, epoch: int) -> ndarray:
        """Where each pool ends in this epoch, [pools] int64."""
        sums = []
        step = 512 * POOL
        for first in range(0, self.side.num_bundles, step):
            bundles = self._bundles(epoch, first, first + step)
            tokens = self.side.ends[bundles + 1] - self.side.ends[bundles]
            sums.append(np.add.reduceat(tokens, np.arange(0, len(tokens), POOL)))
        return np.cumsum(np.concatenate(sums))

    def _bundles(self, epoch: int, first: int, last: int) -> ndarray:
        """The bundles at places [first, last) of this epoch, [n] int64."""
        count = self.side.num_bundles
        return permuted(np.arange(first, min(last, count)), count, _draws(self.seed, epoch, ROUNDS))


def permuted(places: ndarray, count: int, keys: ndarray) -> ndarray:
    """The values at these places, [n] int64, of a permutation of range(count) that `keys` choose, without the others.

    A Feistel network permutes the numbers that have at most the bits of count − 1; a value outside of range(count) goes
    through it again until it is inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    keys: [ROUNDS] uint64.
    """
    bits = (count - 1).bit_length()
    values = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= np.uint64(count))
    while len(outside):
        values[outside] = _network(values[outside], bits, keys)
        outside = outside[values[outside] >= np.uint64(count)]
    return values.astype(np.int64)


def _network(values: ndarray, bits: int, keys: ndarray) -> ndarray:
    """A Feistel network: each round changes one part of the bits by a function of the other."""
    below = np.uint64(bits // 2)
    low_mask = np.uint64((1 << bits // 2) - 1)
    high_mask = np.uint64((1 << bits - bits // 2) - 1)
    high = values >> below
    low = values & low_mask
    for i, key in enumerate(keys):
        if i % 2 == 0:
            high ^= _scrambled(low, key) & high_mask
        else:
            low ^= _scrambled(high, key) & low_mask
    return high << below | low


def _scrambled(values: ndarray, key: np.uint64) -> ndarray:
    """32 well-mixed bits of each value and the key. (The multipliers are those of splitmix64.)"""
    mixed = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


def _draws(seed: int, epoch: int, count: int, stream: int = 0) -> ndarray:
    """[count] uint64 random draws; those for different values of `stream` are independent of each other."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Philox(
        key=key, counter=np.array([0, stream, 0, 0], dtype=np.uint64)
    ).random_raw(count)


def document_lengths(corpus: Corpus, documents: ndarray) -> ndarray:
    """Number of tokens of each of these documents, [n] int64."""
    return corpus.offsets[documents + 1] - corpus.offsets[documents]


# --- Packed streams --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stream:
    """T tokens of packed documents. A document that the stream's edge cuts goes on in the next as a new document."""

    tokens: ndarray  # [T] int64
    # [T] int64: the next token of the same document, where it is trained on; else IGNORE
    labels: ndarray
    cu_seqlens: ndarray  # [N+1] int32, from 0 to T
    position_ids: ndarray  # [T] int64, from 0 in each document
    columns: dict[str, ndarray]  # [T] or [T, n] each: numbers of the labels, "weights" always


@dataclass(frozen=True)
class Targets:
    """What a loss reads beside tokens and labels.

    normalise: what weights of labels are divided by: the number of labels in their document or stream, or nothing.
    columns: of the corpus.
    group: number of documents that follow each other and are whole in one stream; 0: streams cut documents.
    """

    normalise: str = "token"
    columns: tuple[str, ...] = ()
    group: int = 0


@dataclass(frozen=True)
class Length:
    """From stream `start` on, streams have `seq_len` tokens."""

    start: int
    seq_len: int


class PackedStreams:
    """streams[i]: stream i of the endless line of these documents; random access, the same everywhere.

    Each epoch lays the documents in an order of its own, drawn from (seed, epoch). Epochs follow without a
    gap. Threads may share the streams.
    repeat=False: one pass in the corpus's order, in len(streams) streams; padding, as a document, fills up the last.
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

    # As a mixture of one source, which has no name.

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
        return -(-self.num_tokens // self.seq_len)

    def __getitem__(self, i: int) -> Stream:
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        return self._stream(self.place(i)[1], *self._parts(i))

    def padding(self) -> Stream:
        """A stream of padding only: it gives a rank as many streams as the others have."""
        none = np.zeros(0, dtype=np.int64)
        return self._stream(self.seq_len, none, none, IGNORE)

    def _stream(
        self,
        seq_len: int,
        starts: ndarray,
        lengths: ndarray,
        next_token: int,
        parents: Sequence[int] = (),
    ) -> Stream:
        """Of these runs of the corpus's tokens, then the token that follows; padding, a document of zeros, fills it.
        parents: of runs that continue others, as in `Nodes`; by default none does."""
        end = lengths.sum()
        if end < seq_len:
            starts, lengths = np.append(starts, 0), np.append(lengths, seq_len - end)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(seq_len) - np.repeat(edges[:-1], lengths)
        positions = np.repeat(starts, lengths) + within
        positions[end:] = 0
        tokens = self.corpus.tokens[positions].astype(np.int64)
        tokens[end:] = 0
        nodes = Nodes(edges, np.array([*parents, *[-1] * (len(lengths) - len(parents))]))
        behind = np.append(nodes.back[1:], next_token != IGNORE)
        behind[end:] = 0
        following = np.append(positions[1:], positions[-1] + 1)
        weights = self.corpus.column("weights", following) * (behind > 0)
        labels = np.where((behind == 1) & (weights > 0), np.append(tokens[1:], next_token), IGNORE)
        columns = self._weighted(weights, nodes)
        for name in self.targets.columns:
            column = self.corpus.column(name, following)
            column[weights == 0] = 0
            columns[name] = column
        if self.targets.group:
            columns["document"] = np.roll(np.repeat(np.arange(len(lengths)), lengths), -1)
        return Stream(tokens, labels, edges.astype(np.int32), nodes.positions, columns)

    def _parts(self, i: int) -> tuple[Any, ...]:
        """What `_stream` reads of stream i: `_runs`, and the parents of those that continue others."""
        start, seq_len = self.place(i)
        stop = start + seq_len
        return self._runs(start, stop if self.repeat else min(stop, self.num_tokens))

    def _weighted(self, weights: ndarray, nodes: Nodes) -> dict[str, ndarray]:
        """The column of the weights of labels [T], divided as `targets.normalise` says."""
        if self.targets.normalise == "token":
            return {"weights": weights}
        edges = nodes.edges if self.targets.normalise == "document" else np.array([0, len(weights)])
        counts = np.add.reduceat(weights > 0, edges[:-1], dtype=np.int64)
        return {"weights": weights / np.repeat(np.maximum(counts, 1), np.diff(edges))}

    def runs(self, i: int) -> tuple[ndarray, ndarray]:
        """Where the documents of stream i begin in the corpus's tokens [n], and how many tokens of each it has [n]."""
        return self._parts(i)[:2]

    def _runs(self, start: int, stop: int) -> tuple[ndarray, ndarray, int]:
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
        return (
            np.concatenate(starts),
            np.concatenate(lengths),
            int(self.corpus.tokens[end]) if goes_on else IGNORE,
        )
