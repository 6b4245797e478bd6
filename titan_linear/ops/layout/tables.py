"""Tables of a batch: named tuples made with NumPy and moved to the device in one copy."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, as kernels with vector loads require
# Type of a table's field that stays on the CPU.
OnHost = Annotated[Tensor, "on the host"]

T = TypeVar("T")


def table(kind: Callable[..., T], **arrays: np.ndarray) -> T:
    """Return a named tuple of host tensors that share the arrays' memory."""
    return kind(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def padded(rows: list[tuple[int, ...]], length: int, width: int) -> np.ndarray:
    """Return `rows` padded with −1 to [length, width].

    So a table's shape does not depend on the documents.
    """
    array = np.full((length, width), -1, dtype=np.int64)
    array[: len(rows)] = np.array(rows, dtype=np.int64).reshape(-1, width)
    return array


def two_or_more(rows: np.ndarray) -> np.ndarray:
    """Pad rows [., ...] with zeros to at least two.

    torch.compile treats a size of one as a constant.
    """
    return np.pad(rows, [(0, max(2 - len(rows), 0)), *[(0, 0)] * (rows.ndim - 1)])


def to_device(tree: T, device: torch.device) -> T:
    """Return the tree with its tensors on `device`, contiguous as kernels read them.

    A tree consists of named tuples, dataclasses, lists, dicts and tensors. Fields of type
    `OnHost` stay on the CPU. Tensors reach a GPU through one pinned buffer, which is copied
    while the host continues.
    """
    if device.type == "cpu":
        return _mapped(tree, Tensor.contiguous)
    # Pack all tensors into one buffer, aligned.
    tensors: list[Tensor] = []
    _mapped(tree, tensors.append)
    sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, t in zip(buffer.split(sizes), tensors, strict=True):
        _like(part, t).copy_(t)
    # Copy the buffer, and cut it into tensors again.
    parts = zip(buffer.to(device, non_blocking=True).split(sizes), tensors, strict=True)
    return _mapped(tree, lambda _: _like(*next(parts)))


def _like(part: Tensor, t: Tensor) -> Tensor:
    """Return the first bytes of a buffer's part with the dtype and shape of t."""
    return part[: t.nbytes].view(t.dtype).view(t.shape)


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the tree with `change` applied to each tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list):
        return [_mapped(branch, change) for branch in tree]
    if isinstance(tree, dict):
        return {key: _mapped(branch, change) for key, branch in tree.items()}
    branches = {name: _mapped(getattr(tree, name), change) for name in _moving(type(tree))}
    if not branches:
        return tree
    return tree._replace(**branches) if hasattr(tree, "_replace") else replace(tree, **branches)


@cache
def _moving(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's or named tuple's fields that are not `OnHost`."""
    names = (
        [field.name for field in fields(kind)]
        if is_dataclass(kind)
        else getattr(kind, "_fields", ())
    )
    if not names:
        return ()
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name in names if OnHost not in (hints[name], *get_args(hints[name])))
