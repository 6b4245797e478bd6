"""Dispatch modes that look at the operators that run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class AsPromised(TorchDispatchMode):
    """Each of this project's operators returns the shapes, strides and types that compiled code expects of it."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if op.namespace == "titan_linear":
            promised = op(*tree_map(without_numbers, args), **kwargs)
            given, promised = (
                [layout(x) for x in tree_leaves(y) if x is not None] for y in (out, promised)
            )
            assert given == promised, f"{op}: {given}, promised {promised}"
        return out


def without_numbers(x: Any) -> Any:
    """A tensor like x on the meta device, where operators return what they promise."""
    return (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
    )


def layout(x: Tensor) -> tuple[torch.Size, list[int], torch.dtype]:
    """Shape, strides of dimensions above 1, type."""
    return x.shape, [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1], x.dtype


class AddsInAnyOrder(TorchDispatchMode):
    """Which operators add floating-point numbers to one place that a GPU may add in any order: compiled code makes them
    atomic additions, each rounded to the dtype."""

    ADD = ("index_add", "index_put", "_index_put_impl", "_unsafe_index_put", "scatter_add")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__.rstrip("_")
        if name in self.ADD and args[0].is_floating_point() and self.several(name, args):
            self.found.append(name)
        return op(*args, **(kwargs or {}))

    @staticmethod
    def several(name: str, args: tuple) -> bool:
        """Whether a place gets more than one number; the gradient of an indexing always counts."""
        if "put" in name:
            return args[3:4] == (True,)
        return any(len(row.unique()) < len(row) for row in args[2].reshape(-1, args[2].shape[-1]))


class Inside(TorchDispatchMode):
    """Sees every operator of PyTorch, those inside of this project's operators too; `ran` is called after each."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "titan_linear":
            with self:
                return op.python(*args, **kwargs)
        out = op(*args, **kwargs)
        self.ran(op, args, kwargs, out)
        return out

    def ran(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        raise NotImplementedError
