"""Balance of experts across all ranks, between steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from titan_linear.models.moe import MoE


@torch.no_grad()
def move_selection_biases(model: nn.Module, *, apply: bool = True) -> None:
    """Raise the bias of experts that had less than their share of the step's tokens and lower the others' (DeepSeek-V3,
    section 2.1.2), by `bias_update_rate`; then count anew. One collective. Without `apply` only count anew.

    Every rank counts the tokens it computes, so that sums over all ranks are those of the whole batch.
    """
    layers = [m for m in model.modules() if isinstance(m, MoE) and m.loads is not None]
    if layers and apply:
        loads = torch.cat([m.loads for m in layers])
        dist.all_reduce(loads)
        for m, load in zip(layers, loads.split([m.config.num_experts for m in layers]), strict=True):
            load = load.to(m.router.selection_bias.dtype)
            m.router.selection_bias += m.config.bias_update_rate * torch.sign(load.mean() - load)
    for m in layers:
        m.loads = None
