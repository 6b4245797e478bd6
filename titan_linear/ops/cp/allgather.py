"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all keys and values, once, in global order.

A rank's remote rectangles are then whole (one per fragment), and the squares of its own tokens are computed
while K and V arrive. In backward K and V are gathered again and dK|dV is summed to its owners by a
reduce-scatter in fp32. Memory per rank grows with the whole stream, where ring attention's does not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.segments import beyond, local_documents, remote, to_global_order, to_rank_order
from titan_linear.ops.torch.attention import (
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
        documents = local_documents(cp, q.device)
        gathering = _Gathering(k, v, cp, causal)
        o, lse = attend_documents(q, k, v, scale, causal, documents)
        k_all, v_all = gathering.wait()
        o = o.to(accumulator_dtype(q.dtype))
        for (a, b), (c, d) in remote(cp, causal):
            block = attend(q[:, a:b], k_all[:, c:d], v_all[:, c:d], scale, causal=False)
            merge_(o[:, a:b], lse[:, :, a:b], *block)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal, ctx.cp, ctx.documents = scale, causal, cp, documents
        return o

    @staticmethod
    def backward(ctx, do: torch.Tensor):
        q, k, v, o, lse = ctx.saved_tensors
        cp, scale, causal = ctx.cp, ctx.scale, ctx.causal
        acc, D = accumulator_dtype(q.dtype), k.shape[-1]
        gathering = _Gathering(k, v, cp, causal)
        squares = attend_documents_backward(do, q, k, v, o, lse, scale, causal, ctx.documents)
        dq, dkv = squares[0].to(acc), torch.cat(squares[1:], dim=-1).to(acc)
        k_all, v_all = gathering.wait()
        if gathering.needed:
            dkv_all = dkv.new_zeros(1, k_all.shape[1], *dkv.shape[2:])  # [1, T, Hkv, D + Dv]
            for (a, b), (c, d) in remote(cp, causal):
                rows = do[:, a:b], q[:, a:b], k_all[:, c:d], v_all[:, c:d], o[:, a:b], lse[:, :, a:b]
                dq_block, dk_block, dv_block = attend_backward(*rows, scale, causal=False)
                dq[:, a:b] += dq_block
                dkv_all[:, c:d, :, :D] += dk_block
                dkv_all[:, c:d, :, D:] += dv_block
            dkv += _sum_to_owners(dkv_all[0], cp)
        return dq.to(q.dtype), dkv[..., :D].to(k.dtype), dkv[..., D:].to(v.dtype), None, None, None


class _Gathering:
    """K|V of all ranks on their way here; nothing is sent where no document crosses a cut (the table says so)."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, cp: CPContext, causal: bool):
        self.own, self.cp = (k, v), cp
        self.needed = any(beyond(f, causal) for f in cp.table)
        if self.needed:
            self.packed = torch.cat([k[0], v[0]], dim=-1)  # [T_local, Hkv, D + Dv]
            self.gathered = self.packed.new_empty(cp.world_size, *self.packed.shape)
            self.work = dist.all_gather_into_tensor(
                self.gathered.flatten(0, 1), self.packed, group=cp.group, async_op=True
            )  # fmt: skip

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k [1, T, Hkv, D] and v [1, T, Hkv, Dv] in global order."""
        if not self.needed:
            return self.own
        self.work.wait()
        everything = to_global_order(self.gathered, self.cp).unsqueeze(0)
        k, v = everything.split([x.shape[-1] for x in self.own], dim=-1)
        return k, v


def _sum_to_owners(dkv: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """Sum [T, ...] in global order over the ranks; each gets its own tokens [T_local, ...]."""
    parts = to_rank_order(dkv, cp).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=cp.group)
    return own
