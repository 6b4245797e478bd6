"""What a rank's queries see where the keys of all ranks are gathered.

The entries of a rank are its queries' spans. An entry's keys are its document up to the entry's end (without the
causal mask the whole document), so those of a fragment's entries, one after the other, are one range of global tokens:
from the beginning of the document that enters the fragment to the fragment's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan_linear.ops.cp.fragments import Fragment, owned
from titan_linear.ops.torch.attention import Spans


class GatheredSpans(NamedTuple):
    """This rank's spans, and where their keys lie."""

    spans: Spans
    ranges: torch.Tensor  # [slots, 2] on the CPU: of each fragment's keys, in global tokens; together the spans' rows
    crosses: torch.Tensor  # [1] on the CPU: whether any rank has keys elsewhere


def span_tables(
    fragments: Sequence[Fragment], rank: int, local: np.ndarray, entries: np.ndarray, *, causal: bool
) -> dict[str, np.ndarray]:
    """The arrays of `GatheredSpans`, by name, "k" being the boundaries of the spans' keys.

    fragments: every rank's. local: [N+1] boundaries of the rank's entries. entries: [slots, 2], the first and the last
    of each fragment.
    """
    lengths, ranges = np.diff(local).astype(np.int64), []
    for f, (first, last) in zip(owned(fragments, rank), entries, strict=True):
        start, end = f.head[0], f.end if causal else f.tail[1]
        lengths[first] += f.start - start
        lengths[last] += end - f.end
        ranges.append((start, end))
    return {
        "k": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "ranges": np.array(ranges, dtype=np.int64),
        "crosses": np.array([any(f.enters or (f.leaves and not causal) for f in fragments)]),
    }
