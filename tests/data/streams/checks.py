"""Checks that hold for every stream."""

import numpy as np

from titan_linear.data import IGNORE


def check_stream(stream, tokens, owners, start, seq_len):
    """Stream [start, start + seq_len) against the line, by definition."""
    labels, positions, edges = [], [], [0]
    for t in range(start, start + seq_len):
        goes_on = t + 1 < len(owners) and owners[t + 1] == owners[t]
        labels.append(tokens[t + 1] if goes_on else IGNORE)
        new = t > start and owners[t] != owners[t - 1]
        positions.append(0 if new or t == start else positions[-1] + 1)
        if new:
            edges.append(t - start)
    assert stream.tokens.tolist() == tokens[start : start + seq_len]
    assert stream.labels.tolist() == labels
    assert stream.position_ids.tolist() == positions
    assert stream.cu_seqlens.tolist() == [*edges, seq_len]
    assert stream.tokens.dtype == stream.labels.dtype == stream.position_ids.dtype == np.int64
    assert stream.cu_seqlens.dtype == np.int32
