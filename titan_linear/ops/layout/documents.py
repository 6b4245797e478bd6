"""Checks of document boundaries as users pass them."""

import numpy as np
import torch
from torch import Tensor


def checked(name: str, cu_seqlens: Tensor, tokens: int | None = None) -> np.ndarray:
    """Check boundaries of documents, which may be empty, and return them [N+1] on the host.

    Args:
        name: name of the argument, for messages.
        tokens: where the boundaries must end, if known.

    Raises:
        ValueError: `cu_seqlens` are not boundaries, or do not end at `tokens`.
    """
    check_shape(name, cu_seqlens)
    edges = cu_seqlens.cpu().numpy()
    if (
        edges[0] != 0
        or np.count_nonzero(edges[1:] < edges[:-1])
        or (tokens is not None and int(edges[-1]) != tokens)
    ):
        end = "" if tokens is None else f", and end at {tokens}, the number of tokens"
        raise ValueError(f"{name} = {short(edges.tolist())}: must start at 0, never decrease{end}")
    return edges


def distinct(edges: np.ndarray) -> np.ndarray:
    """Return the boundaries without empty documents."""
    return edges[np.diff(edges, prepend=-1) > 0]


def check_shape(name: str, cu_seqlens: Tensor) -> None:
    """Check everything about boundaries that does not require their values."""
    dtype = cu_seqlens.dtype
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not integer or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"{name} is {dtype} {tuple(cu_seqlens.shape)}; give N + 1 integers for N documents"
        )


def check_copy(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor) -> None:
    """Raise ValueError unless cu_seqlens_cpu is cu_seqlens on the CPU.

    Values are compared if both are on the CPU.
    """
    if cu_seqlens is None:
        raise ValueError(
            "cu_seqlens_cpu is a copy of cu_seqlens, which is missing; give both or neither"
        )
    if cu_seqlens_cpu.shape != cu_seqlens.shape or cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device} must be the values of "
            f"cu_seqlens, {tuple(cu_seqlens.shape)}, on the CPU"
        )
    # Reading values from a GPU would wait for it, and compiled code has no values.
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return
    if (cu_seqlens_cpu != cu_seqlens).any():
        a = short(cu_seqlens.tolist())
        b = short(cu_seqlens_cpu.tolist())
        raise ValueError(
            f"cu_seqlens_cpu = {b} must have the values of cu_seqlens, {a}; or leave it out"
        )


def short(values: list[int]) -> str:
    return (
        str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, …, {values[-1]}]"
    )
