"""Tables that follow from a batch's documents: made by NumPy on the host, then moved at once to where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np
import torch
from torch import Tensor

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
