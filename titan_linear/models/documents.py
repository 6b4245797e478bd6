"""What the work on packed documents depends on. The FLOPs of every layer are a function of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from titan_linear.ops.boundaries import CHUNK


class Documents(NamedTuple):
    """Sums over documents, so that those of several batches add up. They count whole documents: how a stream is cut
    among ranks does not change them."""

    tokens: int
    pairs: int  # of a query and a key that the causal mask leaves: n(n + 1)/2 for a document of n tokens
    chunk_pairs: int  # of tokens of one chunk of the delta rule: n² for a chunk of n <= 64 tokens

    @classmethod
    def of(cls, cu_seqlens: np.ndarray) -> Documents:
        """cu_seqlens: [N+1] int boundaries, on the host."""
        n = np.diff(cu_seqlens.astype(np.int64))
        last = n % CHUNK
        chunk_pairs = (n - last) * CHUNK + last * last
        return cls(int(n.sum()), int((n * (n + 1) // 2).sum()), int(chunk_pairs.sum()))
