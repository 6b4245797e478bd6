"""Where the entries of a packed stream begin and end, and what follows from that, derived once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

CHUNK = 64  # tokens of a chunk of the delta rule
CONV_RUN = 256  # tokens of a program of the convolution

T = TypeVar("T")


class ChunkTable(NamedTuple):
    """Which chunk of which entry a program works on."""

    index: torch.Tensor  # [NT, 2] int32: entry (−1: none), chunk within it
    offsets: torch.Tensor  # [N+1] int32: the first row of each entry


@dataclass(frozen=True, eq=False)
class Boundaries:
    """Boundaries of the entries of a packed stream: documents, or the parts of them that lie in this rank's fragments.

    One object serves every layer of a batch, forward and backward, so that what it derives is derived once.
    """

    cu_seqlens: torch.Tensor  # [N+1] int32, on the device of the tokens
    cu_seqlens_cpu: torch.Tensor | None = None  # the same on the CPU, where it is known
    longest: torch.Tensor | None = None  # [1] int64 on the CPU: tokens of the longest entry, where it is known
    may_split: bool = True  # by an implementation, into segments where heads are few
    chunks: Mapping[int, ChunkTable] = field(default_factory=dict)  # by tokens of a chunk, those that are known
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    def on_host(self) -> list[int]:
        """[N+1] numbers. Without `cu_seqlens_cpu` a GPU is waited for: only implementations that loop over entries on
        the host ask."""
        return (self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist()

    def derived(self, make: Callable[..., T], *arguments: Any) -> T:
        """make(self, *arguments), kept for the next layer that asks."""
        if torch.compiler.is_compiling():  # a graph has no place to keep it
            return make(self, *arguments)
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        return self._derived[key]


def chunk_arrays(cu_seqlens: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(index [NT, 2], offsets [N+1]) int32 of a `ChunkTable`, on the host. An entry without tokens has one chunk, so
    that its states are written like any other's. A table has two rows at least: torch.compile takes one for a constant.
    """
    counts = np.maximum(-(-np.diff(cu_seqlens) // size), 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    entry = np.repeat(np.arange(len(counts)), counts)
    index = np.stack([entry, np.arange(offsets[-1]) - offsets[entry]], 1)
    if len(index) == 1:
        index = np.append(index, [[-1, 0]], 0)
    return index.astype(np.int32), offsets.astype(np.int32)
