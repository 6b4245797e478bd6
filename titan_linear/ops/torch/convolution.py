"""The causal depthwise convolution in plain PyTorch, differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titan_linear.ops.options import Entries


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    entries: Entries,
    activation: str | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T,D], weight [D,W], initial_state [N,D,W−1] or None (zeros) -> y [T,D], the entries' last inputs [N,D,W−1].

    Every entry is laid out behind its W−1 earlier tokens; then one convolution does all of them.
    """
    W, bounds = weight.shape[1], entries.host
    edges = torch.tensor(bounds)
    past = torch.arange(len(bounds) - 1)[:, None] * (W - 1) + edges[:-1, None] + torch.arange(W - 1)  # [N, W−1]
    own = torch.arange(bounds[-1]) + torch.repeat_interleave(torch.arange(1, len(bounds)), edges.diff()) * (W - 1)
    last = past + edges.diff()[:, None]
    past, own, last = (i.to(x.device, non_blocking=True) for i in (past.flatten(), own, last))
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(len(own) + len(past), x.shape[1]).index_copy(0, own, x)
    if initial_state is not None:
        rows = rows.index_copy(0, past, initial_state.transpose(1, 2).flatten(0, 1).to(x.dtype))
    y = F.conv1d(rows.T.to(wide).unsqueeze(0), weight.to(wide).unsqueeze(1), groups=x.shape[1])  # [1, D, rows−W+1]
    y = y[0].T.index_select(0, own - (W - 1))
    y = y if bias is None else y + bias.to(wide)
    return (F.silu(y) if activation else y).to(x.dtype), rows[last].transpose(1, 2) if output_final_state else None
