"""The tokens before a fragment that a causal convolution needs, fetched from the ranks that own them."""

from __future__ import annotations

from typing import Any

import torch

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.exchange import all_to_all


def conv_halo(x: torch.Tensor, width: int, ctx: CPContext) -> torch.Tensor:
    """x [T_local, D] -> [slots, width, D]: the `width` tokens before each local fragment, zeros before its document.

    They may come from several fragments where those are shorter than `width`. Differentiable; every rank must call it.
    """
    if width == 0 or not any(f.enters for f in ctx.table):
        return x.new_zeros(len(ctx.local), width, x.shape[1])
    return _Halo.apply(x, width, ctx)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, cp: CPContext) -> torch.Tensor:
        ctx.call, ctx.shape = (width, cp), x.shape
        rows, places = _routes(cp, width, x.device)
        D = x.shape[1]
        sizes = [len(p) * D for p in places]
        received = all_to_all([x[r].flatten() for r in rows], sizes, cp.group)
        out = x.new_zeros(len(cp.local) * width, D)
        out[torch.cat(places)] = torch.cat(received).view(-1, D)
        return out.view(len(cp.local), width, D)

    @staticmethod
    def backward(ctx: Any, d_halo: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        width, cp = ctx.call
        rows, places = _routes(cp, width, d_halo.device)
        D = d_halo.shape[-1]
        flat = d_halo.reshape(-1, D)
        received = all_to_all([flat[p].flatten() for p in places], [len(r) * D for r in rows], cp.group)
        dx = d_halo.new_zeros(ctx.shape)
        for r, part in zip(rows, received, strict=True):
            dx.index_put_((r,), part.view(-1, D), accumulate=True)  # deterministic, as index_add_ is not on CUDA
        return dx, None, None


def _routes(cp: CPContext, width: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each rank: the local rows it gets from here, and the rows of [slots·width] that come from it."""
    rows: list[list[int]] = [[] for _ in range(cp.world_size)]
    places: list[list[int]] = [[] for _ in range(cp.world_size)]
    for target in cp.table:
        for token in range(max(target.start - width, target.head[0]), target.start):
            source = next(f for f in cp.table if f.start <= token < f.end)
            if source.rank == cp.rank:
                rows[target.rank].append(cp.offsets[source.slot] + token - source.start)
            if target.rank == cp.rank:
                places[source.rank].append(target.slot * width + width - target.start + token)
    return tuple([torch.tensor(i, dtype=torch.int64).to(device, non_blocking=True) for i in x] for x in (rows, places))
