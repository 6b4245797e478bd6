"""The held-out split of a corpus, and where each side's tokens lie, at any size.

A document is held out if its hash, as a fraction of 2⁶⁴, is below `holdout`. This depends
on its tokens alone: equal documents are never on both sides, and adding documents to the
corpus moves no others.

A `Side` finds its documents by bundles: BUNDLE consecutive documents of the corpus, without
the documents of the other side. It stores only the number of the side's tokens before each
bundle, 8 bytes for BUNDLE documents. For more than SMALL documents, these sums are computed
once and kept in a file next to the token caches, which all processes of a machine map:

    split-<fingerprint of the corpus>-<threshold>.bin
        int64 [2, bundles + 1]: to train on, held out; then a CRC-32
"""

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.corpus import SMALL, Corpus, check_lengths, read
from titan_linear.data.corpus.writing import locked
from titan_linear.storage.files import default_cache_dir, write_whole

# Number of documents in a bundle.
BUNDLE = 128
# Bundles summed at once: their numbers stay in a core's cache.
SPAN = 512
SPLITS = ("train", "validation")


class Side(NamedTuple):
    """The documents of a corpus that are trained on, or the documents held out."""

    corpus: Corpus
    holdout: float
    split: str  # one of SPLITS
    ends: ndarray  # [bundles + 1] int64: tokens of this side before each bundle

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def num_bundles(self) -> int:
        return len(self.ends) - 1

    def documents(self, bundles: ndarray) -> ndarray:
        """Return the indices [n] int64 of this side's documents in these bundles [m] int64."""
        documents = (bundles[:, None] * BUNDLE + np.arange(BUNDLE)).ravel()
        documents = documents[documents < self.corpus.num_documents]
        # Nothing is held out: all documents are trained on.
        if not self.holdout:
            return documents
        # Both documents of a pair go to the side of the first.
        first = documents // self.corpus.group * self.corpus.group
        held_out = self.corpus.hashes[first] < _threshold(self.holdout)
        return documents[held_out == (self.split == "validation")]


def split_corpus(corpus: Corpus, holdout: float, split: str) -> Side:
    """Return the documents of "train" or "validation".

    Raises:
        ValueError: nothing is left on this side (naming validation.holdout), or the sums of
            a large corpus cannot be written.
    """
    assert split in SPLITS, split
    ends = _ends(corpus, _threshold(holdout))[SPLITS.index(split)]
    if not ends[-1]:
        raise ValueError(
            f"validation.holdout = {holdout} leaves no document for {split}, of {corpus.num_documents:,}; "
            + _better_holdout(corpus.hashes, split)
        )
    return Side(corpus, holdout, split, ends)


def _threshold(holdout: float) -> int:
    """Return the hash below which documents are held out.

    The top 53 bits of a hash decide, because a float64 holds as many.
    """
    return math.ceil(holdout * 2**53) << 11


def _better_holdout(hashes: ndarray, split: str) -> str:
    """Return the remedy for a side without documents.

    Args:
        hashes: the hashes of all documents, [n] uint64.
    """
    low, high = ((int(x) >> 11) * 2.0**-53 for x in (hashes.min(), hashes.max()))
    if low == high:
        return "all are the same: give validation.dataset_path, or train on more documents"
    # Just above the smallest hash, with the fewest digits that leave a document on each side.
    first = math.ceil(-math.log10(max(low, 1e-9)))
    tries = (math.floor(low * 10**n + 1) / 10**n for n in range(first, 18))
    better = next((x for x in tries if low < x <= high), high)
    return f"{'raise' if split == 'validation' else 'lower'} it, to {better} for example, or train on more documents"


# --- Sums ------------------------------------------------------------------------------------------------------------


def _ends(corpus: Corpus, threshold: int) -> ndarray:
    """Return the tokens before each bundle on each side, [2, bundles + 1] int64.

    Row 0 counts the documents to train on, row 1 the documents held out.
    """
    if corpus.num_documents <= SMALL:
        return _sums(corpus, threshold)
    path = default_cache_dir() / f"split-{corpus.fingerprint}-{threshold:016x}.bin"
    if (ends := _mapped(path, corpus)) is not None:
        return ends
    # Write the sums, unless another process has just written them, and map them.
    try:
        with locked(path):
            if (ends := _mapped(path, corpus)) is None:
                ends = _sums(corpus, threshold)
                write_whole(path, ends.tobytes() + np.int64(zlib.crc32(ends)).tobytes())
                ends = _mapped(path, corpus)
    except OSError as error:
        raise ValueError(
            f"the sums of a split, {path}, cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    assert ends is not None, path
    return ends


def _mapped(path: Path, corpus: Corpus) -> ndarray | None:
    """Return the sums in this file, or None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        numbers = np.asarray(np.memmap(path, "<i8", mode="r"))
        complete = len(numbers) == 2 * (_num_bundles(corpus) + 1) + 1
        if complete and zlib.crc32(numbers[:-1]) == numbers[-1]:
            return numbers[:-1].reshape(2, -1)
    return None


def _num_bundles(corpus: Corpus) -> int:
    return -(-corpus.num_documents // BUNDLE)


def _sums(corpus: Corpus, threshold: int) -> ndarray:
    count = corpus.num_documents
    bundles = _num_bundles(corpus)
    ends = np.zeros((2, bundles + 1), dtype=np.int64)

    # Threads sum SPAN bundles each.
    def add(first: int) -> None:
        low = first * BUNDLE
        high = min((first + SPAN) * BUNDLE, count)
        offsets = check_lengths(corpus, low, high)
        all_of_it = np.diff(np.append(offsets[:-1:BUNDLE], offsets[-1]))
        held_out = np.zeros_like(all_of_it)
        if threshold:
            hashes = read(corpus.hashes, low, high)[:: corpus.group].repeat(corpus.group)
            lengths = np.diff(offsets) * (hashes < threshold)
            held_out = np.add.reduceat(lengths, np.arange(0, high - low, BUNDLE))
        ends[:, first + 1 : first + 1 + len(all_of_it)] = all_of_it - held_out, held_out

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(add, range(0, bundles, SPAN)))
    return np.cumsum(ends, axis=1, out=ends)
