"""Activations in plain PyTorch, with the functions of ops/triton/activations.py."""

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(y: Tensor, weights: Tensor | None, gated: bool, factor: float = 1.0) -> Tensor:
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    if gated:
        gate, up = wide.chunk(2, -1)
        x = F.silu(gate * factor) * up
    else:
        x = F.relu(wide).square()
    x = x if weights is None else x * weights[..., None]
    # Copy: in compiled code, torch 2.11 drops the gradient of an intermediate that is
    # returned unchanged.
    return x.to(y.dtype, copy=True)


def activate_backward(
    y: Tensor, weights: Tensor | None, dx: Tensor, gated: bool, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    wide, dx = (t.to(torch.promote_types(y.dtype, torch.float32)) for t in (y, dx))
    if gated:
        gate, up = wide.chunk(2, -1)
        gate = gate * factor
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        dy = torch.cat([dx * up * sigmoid * (1 + gate * (1 - sigmoid)) * factor, dx * silu], -1)
        x = silu * up
    else:
        positive = F.relu(wide)
        dy = 2 * dx * positive
        x = positive.square()
    # The second result is x if there are no weights, and otherwise the weights' gradient.
    if weights is None:
        return dy.to(y.dtype), x.to(y.dtype)
    return (weights[..., None] * dy).to(y.dtype), (dx * x).sum(-1).to(weights.dtype)
