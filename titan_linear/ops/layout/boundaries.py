"""Where the entries of a packed stream begin and end, and what follows from that, derived once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from titan_linear.ops.layout.spans import Spans
from titan_linear.ops.layout.tables import OnHost
from titan_linear.ops.layout.trees import Paths, Tree

CHUNK = 64  # tokens of a chunk of the delta rule

T = TypeVar("T")


class ChunkTable(NamedTuple):
    """Which chunk of which entry a program works on."""

    index: Tensor  # [NT, 2] int32: entry (−1: none), chunk within it
    offsets: Tensor  # [N+1] int32: the first row of each entry in `index`


class Segments(NamedTuple):
    """Entries cut into segments, which a scan with few heads runs in parallel; each segment has chunks of its own."""

    cu_seqlens: Tensor  # [S+1] int32
    chunk_index: Tensor  # [NT, 2] int32
    chunk_offsets: Tensor  # [S+1] int32
    offsets: Tensor  # [N+1] int32: the first segment of each entry
    entries: Tensor  # [S] int32: 0 … S − 1, each as an entry of its own
    wanted: Tensor  # [S] int32: 2 if anything follows from the segment's S_ext and M, else 0


@dataclass(eq=False)  # not frozen: torch 2.11 would then compile a guard for all that is derived
class Boundaries:
    """Boundaries of the entries of a packed stream: documents, or the parts of them that lie in this rank's fragments.

    One object serves every layer of a batch, forward and backward, so that what it derives is derived once.
    """

    cu_seqlens: Tensor  # [N+1] int32, on the device of the tokens
    cu_seqlens_cpu: OnHost | None = None  # the same on the CPU, where it is known
    longest: OnHost | None = None  # [1] int64: tokens of the longest entry, where it is known
    # whether an implementation may cut entries into segments where heads are few
    may_split: bool = True
    # whether entries continue on other ranks or in others, with states that cross
    joined: bool = False
    tree: Tree | None = None  # of entries that continue others; None: none does
    paths: Paths | None = None  # likewise
    # known tables, by number of tokens per chunk
    chunks: Mapping[int, ChunkTable] = field(default_factory=dict)
    # Known segments, by number of programs of a scan over one entry (HV · V / 64); None: no batch's entries are cut.
    segments: Mapping[int, Segments | None] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """N, the number of entries."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def spans(self) -> Spans:
        """One per document, whose queries and keys are its tokens; in prefix trees those of `Paths`."""
        if self.paths is not None:
            return self.paths.spans
        assert self.cu_seqlens_cpu is not None and self.longest is not None
        return Spans(*[self.cu_seqlens] * 2, *[self.cu_seqlens_cpu] * 2, *[self.longest] * 2)

    def on_host(self) -> list[int]:
        """The boundaries as N+1 numbers. Without `cu_seqlens_cpu` the host waits for the GPU: only implementations that
        loop over entries on the host call this."""
        return (self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist()

    def derived(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return make(self, *arguments), kept for the next layer that asks."""
        if torch.compiler.is_compiling():  # a graph has no place to keep it
            return make(self, *arguments)
        key = (make, *arguments)
        if key not in self._derived:
            # for autograd, even if inference asks first; integers have no gradient
            with torch.inference_mode(False):
                self._derived[key] = make(self, *arguments)
        return self._derived[key]
