"""The norm of queries and keys, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last dimension, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def unit_heads(ys: Sequence[Tensor], parts: int, dim: int) -> list[Tensor]:
    """ys [T, width], where each head of `dim` channels of the first `parts` becomes a unit vector."""
    return [*(unit(y.unflatten(1, (-1, dim))).flatten(1) for y in ys[:parts]), *ys[parts:]]
