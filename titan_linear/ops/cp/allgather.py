"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all keys and values, once, in global order.

A rank's remote rectangles are then whole (one per fragment), and the squares of its own tokens are computed
while K and V arrive. In backward K and V are gathered again and dK|dV is summed to its owners by a
reduce-scatter in fp32. Memory per rank grows with the whole stream, where ring attention's does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.exchange import group_named
from titan_linear.ops.cp.order import to_global_order, to_rank_order
from titan_linear.ops.cp.rectangles import Rectangle
from titan_linear.ops.operators import operator, register_fake
from titan_linear.ops.torch.attention import (
    Packing,
    accumulator_dtype,
    attend,
    attend_backward,
    attend_documents,
    attend_documents_backward,
    merge_,
)


def allgather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, cp: CPContext
) -> torch.Tensor:
    """q [1, T_local, Hq, D], k [1, T_local, Hkv, D], v [1, T_local, Hkv, Dv] → o [1, T_local, Hq, Dv]."""
    return _AllGatherAttention.apply(q, k, v, scale, causal, cp)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, causal: bool, cp: CPContext) -> torch.Tensor:
        rectangles = cp.rectangles if causal else cp.full_rectangles
        squares = Packing(cp.cu_seqlens, cp.cu_seqlens_cpu, cp.boundaries.longest)
        ctx.where = *squares, rectangles.gathered, rectangles.crosses, list(cp.order), cp.group_name
        o, lse = allgather_forward(q, k, v, *ctx.where, scale, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o.view_as(o)

    @staticmethod
    def backward(ctx, do: torch.Tensor):
        return *allgather_backward(do, *ctx.saved_tensors, *ctx.where, ctx.scale, ctx.causal), None, None, None


@operator
def allgather_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor,
    longest: torch.Tensor, rectangles: torch.Tensor, crosses: torch.Tensor, order: list[int], group: str, scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o like q with Dv, lse [1, Hq, T_local]; rectangles are `Rectangles.gathered`."""
    gathering = _Gathering(k, v, bool(crosses), order, group)
    o, lse = attend_documents(q, k, v, scale, causal, Packing(cu_seqlens, cu_seqlens_cpu, longest))
    k_all, v_all = gathering.wait()
    o = o.to(accumulator_dtype(q.dtype))
    for (a, b), (c, d) in _remote(rectangles):
        block = attend(q[:, a:b], k_all[:, c:d], v_all[:, c:d], scale, causal=False)
        merge_(o[:, a:b], lse[:, :, a:b], *block)
    return o.to(q.dtype).contiguous(), lse.contiguous()


@operator
def allgather_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor, longest: torch.Tensor, rectangles: torch.Tensor,
    crosses: torch.Tensor, order: list[int], group: str, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    acc, D = accumulator_dtype(q.dtype), k.shape[-1]
    gathering = _Gathering(k, v, bool(crosses), order, group)
    squares = attend_documents_backward(
        do, q, k, v, o, lse, scale, causal, Packing(cu_seqlens, cu_seqlens_cpu, longest)
    )  # fmt: skip
    dq, dkv = squares[0].to(acc), torch.cat(squares[1:], dim=-1).to(acc)
    k_all, v_all = gathering.wait()
    if gathering.needed:
        dkv_all = dkv.new_zeros(1, k_all.shape[1], *dkv.shape[2:])  # [1, T, Hkv, D + Dv]
        for (a, b), (c, d) in _remote(rectangles):
            rows = do[:, a:b], q[:, a:b], k_all[:, c:d], v_all[:, c:d], o[:, a:b], lse[:, :, a:b]
            dq_block, dk_block, dv_block = attend_backward(*rows, scale, causal=False)
            dq[:, a:b] += dq_block
            dkv_all[:, c:d, :, :D] += dk_block
            dkv_all[:, c:d, :, D:] += dv_block
        dkv += _sum_to_owners(dkv_all[0], order, group)
    return dq.to(q.dtype).contiguous(), dkv[..., :D].to(k.dtype).contiguous(), dkv[..., D:].to(v.dtype).contiguous()


@register_fake(allgather_forward)
def _(q, k, v, cu_seqlens, cu_seqlens_cpu, longest, rectangles, crosses, order, group, scale, causal):
    B, T, Hq, _ = q.shape
    return q.new_empty(B, T, Hq, v.shape[-1]), q.new_empty(B, Hq, T, dtype=accumulator_dtype(q.dtype))


@register_fake(allgather_backward)
def _(do, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remote(rectangles: torch.Tensor) -> Iterator[Rectangle]:
    return (Rectangle((a, b), (c, d)) for a, b, c, d in rectangles.tolist() if a >= 0)


class _Gathering:
    """K|V of all ranks on their way here; nothing is sent where no document crosses a cut."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, needed: bool, order: list[int], name: str):
        self.own, self.needed, self.order = (k, v), needed, order
        if needed:
            group = group_named(name)
            packed = torch.cat([k[0], v[0]], dim=-1)  # [T_local, Hkv, D + Dv]
            self.gathered = packed.new_empty(group.size(), *packed.shape)
            self.work = dist.all_gather_into_tensor(self.gathered.flatten(0, 1), packed, group=group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k [1, T, Hkv, D] and v [1, T, Hkv, Dv] in global order."""
        if not self.needed:
            return self.own
        self.work.wait()
        everything = to_global_order(self.gathered, self.order).unsqueeze(0)
        k, v = everything.split([x.shape[-1] for x in self.own], dim=-1)
        return k, v


def _sum_to_owners(dkv: torch.Tensor, order: list[int], name: str) -> torch.Tensor:
    """Sum [T, ...] in global order over the ranks; each gets its own tokens [T_local, ...]."""
    group = group_named(name)
    parts = to_rank_order(dkv, order, group.size()).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own
