"""All-to-all over heads (DeepSpeed Ulysses, Jacobs et al. 2023): trade a part of the tokens for a part of the heads.

Between `tokens_to_heads` and `heads_to_tokens` a rank holds the whole stream, in global order, for H/W heads, so
any single-device operation that treats heads independently runs unchanged: softmax attention here, and the
linear layers, for which it is the method to compare with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.segments import stream_documents, to_global_order, to_rank_order
from titan_linear.ops.torch.attention import Attention


def tokens_to_heads(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """x [1, T_local, H, ...], this rank's tokens → [1, T, H/W, ...], all tokens of this rank's heads.

    Differentiable. Raises ValueError where W does not divide H.
    """
    if x.shape[2] % cp.world_size:
        raise ValueError(
            f"an all-to-all over heads cannot split {x.shape[2]} heads among {cp.world_size} ranks; "
            "use a number of ranks that divides the heads, or another method"
        )
    return _TokensToHeads.apply(x, cp)


def heads_to_tokens(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """x [1, T, H/W, ...], all tokens of this rank's heads → [1, T_local, H, ...]: undoes `tokens_to_heads`."""
    return _HeadsToTokens.apply(x, cp)


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, cp: CPContext
) -> torch.Tensor:
    """q [1, T_local, Hq, D], k [1, T_local, Hkv, D], v [1, T_local, Hkv, Dv] → o [1, T_local, Hq, Dv].

    W must divide Hq, and divide Hkv or be a multiple of it; a key head is then sent to each rank that has queries
    for it, and autograd sums its gradients.
    """
    copies = _key_head_copies(q.shape[2], k.shape[2], cp.world_size)
    if copies > 1:
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    q, k, v = (tokens_to_heads(x, cp) for x in (q, k, v))
    o = Attention.apply(q, k, v, scale, causal, stream_documents(cp, q.device))
    return heads_to_tokens(o, cp)


def _key_head_copies(Hq: int, Hkv: int, W: int) -> int:
    if Hq % W == 0 and Hkv % W == 0:
        return 1
    if Hq % W == 0 and W % Hkv == 0:
        return W // Hkv
    raise ValueError(
        f"method = 'ulysses' cannot split {Hq} query and {Hkv} key heads among {W} ranks: the ranks must divide the "
        "query heads, and divide or be a multiple of the key heads; use method 'ring' or 'allgather'"
    )


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, cp: CPContext) -> torch.Tensor:
        ctx.cp = cp
        return _spread_heads(x, cp)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _collect_heads(grad, ctx.cp), None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, cp: CPContext) -> torch.Tensor:
        ctx.cp = cp
        return _collect_heads(x, cp)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _spread_heads(grad, ctx.cp), None


def _spread_heads(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """[1, T_local, H, ...] → [1, T, H/W, ...]."""
    parts = x[0].unflatten(1, (cp.world_size, -1)).movedim(1, 0)  # [W, T_local, H/W, ...], by receiver
    return to_global_order(_all_to_all(parts, cp), cp).unsqueeze(0)


def _collect_heads(x: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """[1, T, H/W, ...] → [1, T_local, H, ...]."""
    parts = _all_to_all(to_rank_order(x[0], cp), cp)  # [W, T_local, H/W, ...], by sender
    return parts.movedim(0, 1).flatten(1, 2).unsqueeze(0)


def _all_to_all(parts: torch.Tensor, cp: CPContext) -> torch.Tensor:
    """parts[r] goes to rank r; the result's [r] came from rank r."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=cp.group)
    return received
