"""The sums over packed documents on which work depends: the FLOPs of every layer are a function of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from titan_linear.ops.layout.boundaries import CHUNK


class Documents(NamedTuple):
    """Sums over documents, so that the values of several batches add up. They count whole documents: how a stream is
    cut among ranks does not change them."""

    tokens: int
    pairs: int  # (query, key) pairs that the causal mask leaves: n(n + 1)/2 for a document of n tokens
    chunk_pairs: int  # pairs of tokens in one chunk of the delta rule: n² for a chunk of n <= 64 tokens

    @classmethod
    def of(cls, cu_seqlens: np.ndarray) -> Documents:
        """cu_seqlens: [N+1] int boundaries, on the host."""
        n = np.diff(cu_seqlens.astype(np.int64))
        last = n % CHUNK
        chunk_pairs = (n - last) * CHUNK + last * last
        return cls(int(n.sum()), int((n * (n + 1) // 2).sum()), int(chunk_pairs.sum()))
