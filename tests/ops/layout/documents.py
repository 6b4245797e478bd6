"""Document lists for context parallelism: where a cut can fall, and flash-linear-attention's own cases."""

from __future__ import annotations

import numpy as np

from tools.bench_cp import random_documents

# T = 512: with 2, 4 and 8 ranks the cuts are multiples of 256, 128 and 64 (of half that for zigzag).
EDGES = {
    "one": [512],
    "on": [128, 128, 256],
    "before": [127, 129, 255, 1],
    "after": [129, 127, 257 - 256, 255],
    "spanning": [30, 450, 32],
    # one-token documents around cuts, shorter than a convolution
    "short": [62, 1, 1, 1, 2, 61, 1, 127, 1, 254, 1],
    "padding": [100, 156, 256],  # the last document is padding: ranks of nothing else
}

# A tenth as long as in FLA.
FLA_CP2 = [[300, 400, 324], [512, 512], [100, 150, 200, 250, 124, 100, 100]]
FLA_CP4 = [[700, 324], [1024]]
FLA_CONV = [[513, 511], [514, 510], [512, 1, 511], [257, 1, 253, 257, 1, 253, 2]]


def packed(kind: str, T: int, seed: int, streams: int = 1) -> np.ndarray:
    """[N+1] int64 boundaries of streams of T tokens each: of "one" document, or of many with lengths of that kind."""
    edges = [np.arange(streams + 1) * T]
    if kind != "one":
        edges += [i * T + random_documents(kind, T, seed * streams + i) for i in range(streams)]
    return np.unique(np.concatenate(edges))
