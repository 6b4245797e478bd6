from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from titan_linear.data import (
    ByteTokenizer,
    Corpus,
    PackedStreams,
    load_corpus,
    split_corpus,
    write_corpus,
)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[list], Corpus]:
    """make_corpus(documents): a corpus on disk of these lists of byte tokens."""
    folders: Iterator[Path] = (tmp_path / f"corpus{i}" for i in range(100))

    def make(documents):
        folder = next(folders)
        write_corpus(folder, [np.asarray(document) for document in documents], ByteTokenizer())
        return load_corpus(folder)

    return make


def random_documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 257, length) for length in lengths]


def packed(corpus: Corpus, **options: object) -> PackedStreams:
    """Streams of all documents of a corpus."""
    return PackedStreams(split_corpus(corpus, 0.0, "train"), **options)


def documents_of(corpus: Corpus, holdout: float, split: str) -> np.ndarray:
    """Indices [n] of the documents of a side."""
    side = split_corpus(corpus, holdout, split)
    return side.documents(np.arange(side.num_bundles))
