"""Where the entries of a packed stream begin and end, and what follows from that, derived once; tables in general."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor

CHUNK = 64  # tokens of a chunk of the delta rule
CONV_RUN = 256  # tokens per program of the convolution

PROGRAMS = 132  # of a scan that fill an H100 or H200: one per multiprocessor
SHORTEST = 512  # tokens of the shortest segment: below, the fold costs what the scan saves

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
    numbers: Tensor  # [S] int32: 0 … S − 1
    wanted: Tensor  # [S] int32: 2 if anything follows from the segment's S_ext and M, else 0


@dataclass(eq=False)  # not frozen: torch 2.11 would then compile a guard for all that is derived
class Boundaries:
    """Boundaries of the entries of a packed stream: documents, or the parts of them that lie in this rank's fragments.

    One object serves every layer of a batch, forward and backward, so that what it derives is derived once.
    """

    cu_seqlens: Tensor  # [N+1] int32, on the device of the tokens
    cu_seqlens_cpu: Tensor | None = None  # the same on the CPU, where it is known
    longest: Tensor | None = None  # [1] int64 on the CPU: tokens of the longest entry, where it is known
    may_split: bool = True  # whether an implementation may cut entries into segments where heads are few
    joined: bool = False  # whether entries continue on other ranks, with states that cross
    chunks: Mapping[int, ChunkTable] = field(default_factory=dict)  # known tables, by number of tokens per chunk
    # Known segments, by number of programs of a scan over one entry (HV · V / 64); None: no batch's entries are cut.
    segments: Mapping[int, Segments | None] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """N, the number of entries."""
        return self.cu_seqlens.shape[0] - 1

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
            with torch.inference_mode(False):  # for autograd, even if inference asks first; integers have no gradient
                self._derived[key] = make(self, *arguments)
        return self._derived[key]


def checked(name: str, cu_seqlens: Tensor, tokens: int | None = None) -> np.ndarray:
    """Check boundaries of documents, which may be empty, and return their values [N+1], copied from their device.

    name: of the argument, for messages; tokens: where the boundaries must end, if that is known.

    Raises:
        ValueError: `cu_seqlens` are not boundaries, or do not end at `tokens`.
    """
    check_shape(name, cu_seqlens)
    edges = cu_seqlens.cpu().numpy()
    if edges[0] != 0 or np.count_nonzero(edges[1:] < edges[:-1]) or (tokens is not None and int(edges[-1]) != tokens):
        end = "" if tokens is None else f", and end at {tokens}, the number of tokens"
        raise ValueError(f"{name} = {short(edges.tolist())}: must start at 0, never decrease{end}")
    return edges


def distinct(edges: np.ndarray) -> np.ndarray:
    """Boundaries without those of empty documents."""
    return edges[np.diff(edges, prepend=-1) > 0]


def check_shape(name: str, cu_seqlens: Tensor) -> None:
    """Check all that can be checked of boundaries without reading their values."""
    dtype = cu_seqlens.dtype
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not integer or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"{name} is {dtype} {tuple(cu_seqlens.shape)}; give N + 1 integers for N documents")


def check_copy(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor) -> None:
    """Raise ValueError unless cu_seqlens_cpu is cu_seqlens on the CPU. Values are compared if both are there."""
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu is a copy of cu_seqlens, which is missing; give both or neither")
    if cu_seqlens_cpu.shape != cu_seqlens.shape or cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device} must be the values of "
            f"cu_seqlens, {tuple(cu_seqlens.shape)}, on the CPU"
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
    that its states are written like any other's. A table has at least two rows: torch.compile makes a size of 1 a
    constant.
    """
    counts = np.maximum(-(-np.diff(cu_seqlens) // size), 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    entry = np.repeat(np.arange(len(counts)), counts)
    index = np.stack([entry, np.arange(offsets[-1]) - offsets[entry]], 1)
    if len(index) == 1:
        index = np.append(index, [[-1, 0]], 0)
    return index.astype(np.int32), offsets.astype(np.int32)


def scan_programs(HV: int, V: int) -> int:
    """Number of programs of a scan over one entry: one per head and block of 64 columns of V."""
    return HV * max(V // 64, 1)


def segment_length(tokens: int, entries: int, programs: int, joined: bool = False) -> int | None:
    """Tokens per segment, a multiple of 64, or None where cutting does not pay.

    Cutting pays from three segments per entry: with two, the shorter scans save only the time that finding the
    segments' states and transitions takes. Entries that continue on other ranks need these anyway: there, two pay.

    programs: of a scan over one entry, HV · V / 64.
    """
    segments = PROGRAMS // max(entries * programs, 1)
    least = 2 if joined else 3
    if segments < least or tokens < least * SHORTEST * entries:
        return None
    share = -(-tokens // (entries * segments))
    return max(-(-share // CHUNK) * CHUNK, SHORTEST)


def segment_arrays(cu_seqlens: np.ndarray, length: int, crossing: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of `Segments`, on the host: segments have `length` tokens, the last of an entry what is left.

    crossing: [N] bool, entries whose state comes from another rank or goes to one.
    """
    index, offsets = chunk_arrays(cu_seqlens, length)
    entry, number = index[index[:, 0] >= 0].T
    edges = np.append(cu_seqlens[entry] + number * length, cu_seqlens[-1]).astype(np.int32)
    chunk_index, chunk_offsets = chunk_arrays(edges, CHUNK)
    read = crossing | (np.diff(offsets) > 1)
    return {
        "cu_seqlens": edges,
        "chunk_index": chunk_index,
        "chunk_offsets": chunk_offsets,
        "offsets": offsets,
        "numbers": np.arange(len(entry), dtype=np.int32),
        "wanted": 2 * read[entry].astype(np.int32),
    }


# --- Tables, made by NumPy on the host, then moved at once to where they are read ------------------------------------


ALIGNMENT = 16  # bytes, as kernels with vector loads require
OnHost = Annotated[Tensor, "on the host"]  # the type of a table's field that the CPU reads, whatever the device
Tables = dict[str, tuple[type, Mapping[str, np.ndarray]]]  # by name: a named tuple's type, and its fields as arrays


@cache
def fields_on_host(table: type) -> frozenset[str]:
    """The names of a named tuple's fields of type `OnHost`."""
    hints = get_type_hints(table, include_extras=True)
    return frozenset(name for name, hint in hints.items() if hint == OnHost)


def to_tensors(tables: Tables, device: torch.device) -> dict[str, Any]:
    """The named tuples with tensors as fields, each where it is read. Those on the device reach it in one copy."""
    arrays = {(key, field): array for key, (_, fields) in tables.items() for field, array in fields.items()}
    stay = {(key, field) for key, (kind, _) in tables.items() for field in fields_on_host(kind)}
    tensors = to_device({at: array for at, array in arrays.items() if at not in stay}, device)
    tensors |= {at: torch.from_numpy(arrays[at]) for at in stay}
    return {key: kind(**{field: tensors[key, field] for field in fields}) for key, (kind, fields) in tables.items()}


def to_device(arrays: Mapping[Any, np.ndarray | Tensor], device: torch.device) -> dict[Any, Tensor]:
    """The same arrays on `device`, contiguous as kernels read them. They reach a GPU through one pinned buffer, which
    is copied while the host continues."""
    tensors = {name: torch.as_tensor(array).contiguous() for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    sizes = {name: -(-t.nbytes // ALIGNMENT) * ALIGNMENT for name, t in tensors.items()}
    buffer = torch.empty(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
    for name, t in tensors.items():
        parts[name][: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    arrived = dict(zip(sizes, buffer.to(device, non_blocking=True).split(list(sizes.values())), strict=True))
    return {name: arrived[name][: t.nbytes].view(t.dtype).view(t.shape) for name, t in tensors.items()}


def padded(rows: list[tuple[int, ...]], length: int, width: int) -> np.ndarray:
    """[length, width]: `rows`, then rows of −1, so that the shape of a table does not depend on the documents."""
    table = np.full((length, width), -1, dtype=np.int64)
    table[: len(rows)] = np.array(rows, dtype=np.int64).reshape(-1, width)
    return table
