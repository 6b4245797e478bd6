"""Move many small arrays to a device in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 16  # bytes, as kernels with vector loads require


def to_device(arrays: Mapping[str, np.ndarray | torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
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
