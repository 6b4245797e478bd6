"""Corpora of any size whose offsets, hashes and tokens are computed when they are read, from a repeating pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from titan_linear.data import Corpus

MEAN = 10_000  # tokens per document
PERIOD = 1 << 16  # documents after which the pattern repeats


class Simulated:
    """An array whose elements are computed when they are read."""

    base = None

    def __init__(self, length: int, value: Any):
        self.length, self.value = length, value

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: Any) -> np.ndarray:
        index = (
            np.arange(*where.indices(self.length))
            if isinstance(where, slice)
            else np.asarray(where)
        )
        return self.value(index)


def simulated_corpus(num_documents: int) -> Corpus:
    """Documents of 1 to 2 · MEAN tokens, MEAN on average."""
    rng = np.random.default_rng(0)
    half = rng.integers(1, MEAN, PERIOD // 2)
    # [PERIOD]
    inside = np.concatenate([[0], np.cumsum(np.concatenate([half, 2 * MEAN - half]))])[:-1]
    hashes = rng.integers(2**64, size=PERIOD, dtype=np.uint64)

    def offset(index):
        return (index >> 16) * (PERIOD * MEAN) + inside[index & PERIOD - 1]

    def token(index):
        return (index % 257).astype(np.uint16)

    return Corpus(
        folder=Path("simulated"),
        tokens=Simulated(num_documents * MEAN, token),
        offsets=Simulated(num_documents + 1, offset),
        hashes=Simulated(num_documents, lambda index: hashes[index & PERIOD - 1]),
        info={"fingerprint": f"simulated-{num_documents}"},
    )
