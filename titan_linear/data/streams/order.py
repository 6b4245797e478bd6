"""The order of the documents in each epoch, for a corpus of any size.

Bundles of 128 consecutive documents stand in an order that a keyed permutation gives; 128 bundles that follow each
other in it are a pool, whose documents are sorted by a random draw for each. All that is kept is how many tokens are
before each pool, 8 bytes for 16,384 documents, and the few pools in use. The order of a seed may never change: runs
would not resume as they began.

Random draws are those of the counter-based generator Philox(key=(seed, epoch)), whose bits numpy keeps for good.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from titan_linear.data.corpus.corpus import Corpus
from titan_linear.data.streams.split import Side

POOL = 128  # bundles
ROUNDS = 8
POOLS_KEPT = 8


class Line(Protocol):
    """Documents laid end to end, epoch after epoch."""

    num_tokens: int  # of an epoch

    def around(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents [n] int64 that follow each other in this epoch and hold its tokens [first, last), and perhaps more;
        and where each ends in the epoch, [n] int64."""


class InPlace:
    """One epoch of a side, in the corpus's order."""

    def __init__(self, side: Side):
        self.side, self.num_tokens = side, side.num_tokens

    def around(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        assert epoch == 0, epoch
        low, high = np.searchsorted(self.side.ends[1:], [first, last - 1], side="right")
        documents = self.side.documents(np.arange(low, high + 1))
        return documents, self.side.ends[low] + np.cumsum(document_lengths(self.side.corpus, documents))


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

    def around(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        ends = self._ends(epoch)
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        documents = []
        document_ends = []
        for pool in range(low, high + 1):
            order, lengths = self._kept(epoch, int(pool))
            documents.append(order)
            document_ends.append(ends[pool] - lengths.sum() + np.cumsum(lengths))
        return np.concatenate(documents), np.concatenate(document_ends)

    def _pool(self, epoch: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
        """A pool's documents in their order [n], and their lengths [n]."""
        documents = self.side.documents(self._bundles(epoch, pool * POOL, (pool + 1) * POOL))
        order = documents[np.argsort(_draws(self.seed, epoch, len(documents), stream=pool + 1), kind="stable")]
        return order, document_lengths(self.side.corpus, order)

    def _pool_ends(self, epoch: int) -> np.ndarray:
        """Where each pool ends in this epoch, [pools] int64."""
        sums = []
        step = 512 * POOL
        for first in range(0, self.side.num_bundles, step):
            bundles = self._bundles(epoch, first, first + step)
            tokens = self.side.ends[bundles + 1] - self.side.ends[bundles]
            sums.append(np.add.reduceat(tokens, np.arange(0, len(tokens), POOL)))
        return np.cumsum(np.concatenate(sums))

    def _bundles(self, epoch: int, first: int, last: int) -> np.ndarray:
        """The bundles at places [first, last) of this epoch, [n] int64."""
        count = self.side.num_bundles
        return permuted(np.arange(first, min(last, count)), count, _draws(self.seed, epoch, ROUNDS))


def permuted(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
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


def _network(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
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


def _scrambled(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """32 well-mixed bits of each value and the key. (The multipliers are those of splitmix64.)"""
    mixed = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


def _draws(seed: int, epoch: int, count: int, stream: int = 0) -> np.ndarray:
    """[count] uint64 random draws; those for different values of `stream` are independent of each other."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, stream, 0, 0], dtype=np.uint64)).random_raw(count)


def document_lengths(corpus: Corpus, documents: np.ndarray) -> np.ndarray:
    """Number of tokens of each of these documents, [n] int64."""
    return corpus.offsets[documents + 1] - corpus.offsets[documents]
