"""Boundaries of the entries of a packed stream, and the tables derived from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from titan_linear.ops.layout.spans import Spans
from titan_linear.ops.layout.tables import OnHost
from titan_linear.ops.layout.tree_tables import PathTables, Tree

CHUNK = 64  # tokens per chunk of the chunked recurrences

T = TypeVar("T")


class ChunkTable(NamedTuple):
    """Table that tells each program of a kernel its chunk and entry."""

    index: Tensor  # [NT, 2] int32: entry (−1: none), chunk within it
    offsets: Tensor  # [N+1] int32: first row of each entry in `index`


class Segments(NamedTuple):
    """Entries cut into segments, which a scan with few heads runs in parallel.

    Each segment has its own chunks.
    """

    cu_seqlens: Tensor  # [S+1] int32
    chunk_index: Tensor  # [NT, 2] int32
    chunk_offsets: Tensor  # [S+1] int32
    offsets: Tensor  # [N+1] int32: first segment of each entry
    entries: Tensor  # [S] int32: 0 … S − 1, each segment as an entry of its own
    wanted: Tensor  # [S] int32: 2 if the segment's S_ext and M are read, else 0


# Not frozen: torch 2.11 would compile a guard for everything in a frozen dataclass.
@dataclass(eq=False)
class Boundaries:
    """Boundaries of the entries of a packed stream.

    An entry is a document, or the part of a document that lies in one of this rank's
    fragments. One object serves every layer of a batch, forward and backward, so that
    tables are derived only once.
    """

    cu_seqlens: Tensor  # [N+1] int32, on the device of the tokens
    cu_seqlens_cpu: OnHost | None = None  # the same on the CPU, if known
    longest: OnHost | None = None  # [1] int64: tokens of the longest entry, if known
    # Whether an implementation may cut entries into segments where heads are few.
    may_split: bool = True
    # Whether states pass from entries to other entries or to other ranks.
    joined: bool = False
    # Tables of prefix trees for recurrences and for attention; None: no entry continues
    # another.
    tree: Tree | None = None
    paths: PathTables | None = None
    # Chunk tables made in advance, by number of tokens per chunk.
    chunks: Mapping[int, ChunkTable] = field(default_factory=dict)
    # Segments made in advance, by number of programs of a scan over one entry
    # (HV · V / 64). None: entries are not cut in any batch.
    segments: Mapping[int, Segments | None] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Number of entries, N."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def spans(self) -> Spans:
        """One span per document, whose queries and keys are its tokens.

        In prefix trees, these are the spans of `PathTables`.
        """
        if self.paths is not None:
            return self.paths.spans
        assert self.cu_seqlens_cpu is not None and self.longest is not None
        return Spans(*[self.cu_seqlens] * 2, *[self.cu_seqlens_cpu] * 2, *[self.longest] * 2)

    def on_host(self) -> list[int]:
        """Return the boundaries as N+1 numbers.

        Without `cu_seqlens_cpu` the host waits for the GPU. Only implementations that loop
        over entries on the host call this.
        """
        return (self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist()

    def derived(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return make(self, *arguments), and keep the result for later layers."""
        # Compiled code has no place to keep the result.
        if torch.compiler.is_compiling():
            return make(self, *arguments)
        key = make, *arguments
        if key not in self._derived:
            # Make tensors that autograd accepts, even if inference asks first.
            with torch.inference_mode(False):
                self._derived[key] = make(self, *arguments)
        return self._derived[key]
