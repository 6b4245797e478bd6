"""Passes over tokens and rows of experts, as in ops/triton/experts.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops import swiglu


def spread(x: Tensor, slots: Tensor, rows: int) -> Tensor:
    y = x.new_empty(rows + 1, x.shape[1])
    y[slots] = x.unsqueeze(1)  # copies that are not there go to the last row
    return y[:rows]


def collect(y: Tensor, slots: Tensor) -> Tensor:
    rows = F.pad(y.to(torch.promote_types(y.dtype, torch.float32)), (0, 0, 0, 1))  # the last one is not there
    x = sum(rows[slot] for slot in slots.unbind(1))
    return x.to(y.dtype, copy=True)  # compiled, torch 2.11 drops the gradient of what is returned as it is


def activate(y: Tensor, weights: Tensor, gated: bool) -> Tensor:
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    x = swiglu.forward(wide, 1.0) if gated else F.relu(wide).square()
    return (x * weights[:, None]).to(y.dtype, copy=True)  # as above


def activate_backward(y: Tensor, weights: Tensor, dx: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    wide, dx = (t.to(torch.promote_types(y.dtype, torch.float32)) for t in (y, dx))
    if gated:
        dy, x = swiglu.backward(wide, dx, 1.0)
    else:
        positive = F.relu(wide)
        dy, x = 2 * dx * positive, positive.square()
    return (weights[:, None] * dy).to(y.dtype), (dx * x).sum(-1).to(weights.dtype)


def top_k(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
