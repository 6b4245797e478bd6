"""The causal depthwise convolution in plain PyTorch, differentiable by autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.runtime.options import States
from titan_linear.ops.runtime.support import without_autocast


class Rows(NamedTuple):
    """Row numbers when every entry is laid out after its W−1 earlier tokens."""

    past: Tensor  # [N·(W−1)] int64, the entries' earlier tokens
    own: Tensor  # [T] the entries' tokens
    last: Tensor  # [N, W−1] the last W−1 rows of each entry and its earlier tokens


def lay_out(boundaries: Boundaries, W: int) -> Rows:
    edges, device = torch.tensor(boundaries.on_host()), boundaries.cu_seqlens.device
    N, lengths = len(edges) - 1, edges.diff()
    past = torch.arange(N)[:, None] * (W - 1) + edges[:-1, None] + torch.arange(W - 1)  # [N, W−1]
    own = torch.arange(int(edges[-1])) + torch.repeat_interleave(torch.arange(1, N + 1), lengths) * (W - 1)
    return Rows(*(i.to(device) for i in (past.flatten(), own, past + lengths[:, None])))


@without_autocast
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: States | None,
    boundaries: Boundaries,
    activation: str | None,
    output_final_state: bool,
    widths: list[int],
) -> tuple[list[Tensor], Tensor | None]:
    """x [T,D], weight [D,W], initial [.,D,W−1] or None (zeros) -> y, [T, width] for each of `widths`, and the entries'
    last inputs [N,D,W−1].

    Every entry is laid out after its W−1 earlier tokens; then one convolution computes all of them.
    """
    past, own, last = boundaries.derived(lay_out, weight.shape[1])
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(len(own) + len(past), x.shape[1]).index_copy(0, own, x)
    if initial is not None:
        rows = rows.index_copy(0, past, initial.of_entries(len(boundaries)).transpose(1, 2).flatten(0, 1).to(x.dtype))
    y = F.conv1d(rows.T.to(wide).unsqueeze(0), weight.to(wide).unsqueeze(1), groups=x.shape[1])  # [1, D, rows−W+1]
    y = y[0].T.index_select(0, own - (weight.shape[1] - 1))
    y = y if bias is None else y + bias.to(wide)
    y = (F.silu(y) if activation else y).to(x.dtype)
    return list(y.split(widths, 1)), rows[last].transpose(1, 2) if output_final_state else None
