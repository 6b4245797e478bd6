"""Passes over tokens and over rows of experts in plain PyTorch, with the functions of
ops/triton/experts.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.torch.activations import activate, activate_backward

__all__ = ["activate", "activate_backward", "collect", "spread", "top_k"]


def spread(x: Tensor, slots: Tensor, rows: int) -> Tensor:
    y = x.new_empty(rows + 1, x.shape[1])
    y[slots] = x.unsqueeze(1)  # slots of −1 write to the last row, which is cut off
    return y[:rows]


def collect(y: Tensor, slots: Tensor) -> Tensor:
    # Slots of −1 read the last row, which is zero.
    rows = F.pad(y.to(torch.promote_types(y.dtype, torch.float32)), (0, 0, 0, 1))
    x = sum(rows[slot] for slot in slots.unbind(1))
    return x.to(y.dtype, copy=True)  # a copy for the reason given in activations.py


def top_k(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
