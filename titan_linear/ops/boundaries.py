"""Where the entries of a packed stream begin and end, and what follows from that, derived once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

CHUNK = 64  # tokens of a chunk of the delta rule
CONV_RUN = 256  # tokens of a program of the convolution

PROGRAMS = 132  # of a scan, that fill an H100 or H200: its multiprocessors
SHORTEST = 512  # tokens of a segment: below, the fold costs what the scan saves

T = TypeVar("T")


class ChunkTable(NamedTuple):
    """Which chunk of which entry a program works on."""

    index: torch.Tensor  # [NT, 2] int32: entry (−1: none), chunk within it
    offsets: torch.Tensor  # [N+1] int32: the first row of each entry


class Segments(NamedTuple):
    """Entries cut into segments, which a scan with few heads takes side by side; each with chunks of its own."""

    cu_seqlens: torch.Tensor  # [S+1] int32
    chunk_index: torch.Tensor  # [NT, 2] int32
    chunk_offsets: torch.Tensor  # [S+1] int32
    offsets: torch.Tensor  # [N+1] int32: the first segment of each entry
    numbers: torch.Tensor  # [S] int32: 0 … S − 1


@dataclass(frozen=True, eq=False)
class Boundaries:
    """Boundaries of the entries of a packed stream: documents, or the parts of them that lie in this rank's fragments.

    One object serves every layer of a batch, forward and backward, so that what it derives is derived once.
    """

    cu_seqlens: torch.Tensor  # [N+1] int32, on the device of the tokens
    cu_seqlens_cpu: torch.Tensor | None = None  # the same on the CPU, where it is known
    longest: torch.Tensor | None = None  # [1] int64 on the CPU: tokens of the longest entry, where it is known
    may_split: bool = True  # by an implementation, into segments where heads are few
    joined: bool = False  # to entries of other ranks, by states that cross
    chunks: Mapping[int, ChunkTable] = field(default_factory=dict)  # by tokens of a chunk, those that are known
    # By programs of a scan over one entry (HV · V / 64), those that are known; None: entries stay whole.
    segments: Mapping[int, Segments | None] = field(default_factory=dict)
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
            with torch.inference_mode(False):  # autograd takes it too, whoever asks first; integers have no gradient
                self._derived[key] = make(self, *arguments)
        return self._derived[key]


def checked(name: str, cu_seqlens: torch.Tensor, tokens: int | None = None) -> np.ndarray:
    """The values [N+1] of boundaries, copied from their device, of documents that may be empty.

    name: of the argument; tokens: where they end, if that is known.

    Raises:
        ValueError: they are no boundaries of so many tokens.
    """
    check_shape(name, cu_seqlens)
    edges = cu_seqlens.cpu().numpy()
    if edges[0] != 0 or np.count_nonzero(edges[1:] < edges[:-1]) or (tokens is not None and int(edges[-1]) != tokens):
        end = "" if tokens is None else f", and end at {tokens}, the number of tokens"
        raise ValueError(f"{name} = {short(edges.tolist())}: must start at 0, never decrease{end}")
    return edges


def check_shape(name: str, cu_seqlens: torch.Tensor) -> None:
    """All that can be asked of boundaries without their values."""
    dtype = cu_seqlens.dtype
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not integer or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"{name} is {dtype} {tuple(cu_seqlens.shape)}; give N + 1 integers for N documents")


def check_copy(cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor) -> None:
    """ValueError: the second is not the first on the CPU. Values are compared where both are there."""
    given = None if cu_seqlens is None else tuple(cu_seqlens.shape)
    if tuple(cu_seqlens_cpu.shape) != given or cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device} must be the values of "
            f"cu_seqlens, {given}, on the CPU; without cu_seqlens leave it out"
        )
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return
    if (cu_seqlens_cpu != cu_seqlens).any():
        a, b = (short(x.tolist()) for x in (cu_seqlens, cu_seqlens_cpu))
        raise ValueError(f"cu_seqlens_cpu = {b} must have the values of cu_seqlens, {a}; or leave it out")


def short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, …, {values[-1]}]"


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


def scan_programs(HV: int, V: int) -> int:
    """Of a scan over one entry: a head's columns in blocks of 64."""
    return HV * max(V // 64, 1)


def segment_length(tokens: int, entries: int, programs: int, joined: bool = False) -> int | None:
    """Tokens of a segment, a multiple of 64, or None where cutting does not pay.

    That is below three segments an entry: in two, scans are as much shorter as finding the segments' states and
    transitions takes. For entries that are joined to those of other ranks these are found anyway: two pay.

    programs: of a scan over one entry, HV · V / 64.
    """
    segments, least = PROGRAMS // max(entries * programs, 1), 2 if joined else 3
    if segments < least or tokens < least * SHORTEST * entries:
        return None
    share = -(-tokens // (entries * segments))
    return max(-(-share // CHUNK) * CHUNK, SHORTEST)


def segment_arrays(cu_seqlens: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Those of `Segments`, on the host: segments of `length` tokens, the last of an entry what is left."""
    index, offsets = chunk_arrays(cu_seqlens, length)
    entry, number = index[index[:, 0] >= 0].T
    edges = np.append(cu_seqlens[entry] + number * length, cu_seqlens[-1]).astype(np.int32)
    chunk_index, chunk_offsets = chunk_arrays(edges, CHUNK)
    return {
        "cu_seqlens": edges, "chunk_index": chunk_index, "chunk_offsets": chunk_offsets, "offsets": offsets,
        "numbers": np.arange(len(entry), dtype=np.int32),
    }  # fmt: skip
