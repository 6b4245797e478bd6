"""All-to-all over heads (DeepSpeed Ulysses, Jacobs et al. 2023).

Ranks exchange a part of the tokens for a part of the heads. Between `tokens_to_heads` and
`heads_to_tokens` a rank holds the whole stream, in global order, for H/W heads. Any
single-device operation that treats heads independently runs unchanged: softmax attention
here, and the linear layers, where this method serves for comparison.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.exchange.collectives import all_to_all, group_named
from titan_linear.ops.exchange.ring import ring_attention
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import check_first_derivative, operator
from titan_linear.ops.torch.attention import local_attention


def tokens_to_heads(x: Tensor, cp: CPContext, *, in_node: bool = False) -> Tensor:
    """Exchange x [1, T_local, H, ...] → [1, T, H/W, ...], all tokens of this rank's heads.

    Differentiable. Raises ValueError if the number of ranks does not divide H.

    Args:
        in_node: only the ranks of a node exchange. The result [1, T_node, H/node_size, ...]
            has the node's tokens, in the order in which a rank of `cp.of_nodes` holds them.
    """
    ranks = cp.ranks.node_size if in_node else cp.ranks.world_size
    if x.shape[2] % ranks:
        raise ValueError(
            f"an all-to-all over heads cannot split {x.shape[2]} heads among {ranks} ranks; "
            "use a number of ranks that divides the heads, or another method"
        )
    return _ExchangeHeads.apply(x, cp, in_node, True)


def heads_to_tokens(x: Tensor, cp: CPContext, *, in_node: bool = False) -> Tensor:
    """Exchange x [1, T, H/W, ...] → [1, T_local, H, ...]: undoes `tokens_to_heads`."""
    return _ExchangeHeads.apply(x, cp, in_node, False)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    cp: CPContext,
) -> Tensor:
    """Compute o [1, T_local, Hq, Dv] from q [1, T_local, Hq, D], k [1, T_local, Hkv, D] and
    v [1, T_local, Hkv, Dv].

    W must divide Hq, and must divide Hkv or be a multiple of it. In the latter case a key
    head is sent to each rank that has queries for it, and autograd sums its gradients.
    """
    k, v = (_copied(x, "ulysses", q.shape[2], cp.ranks.world_size) for x in (k, v))
    q = tokens_to_heads(q, cp)
    k = tokens_to_heads(k, cp)
    v = tokens_to_heads(v, cp)
    return heads_to_tokens(local_attention(q, k, v, scale, causal, cp.stream), cp)


def ulysses_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    cp: CPContext,
) -> Tensor:
    """Compute attention in two dimensions (USP, Fang & Zhao 2024).

    Within a node it is an all-to-all over heads, as in `ulysses_attention`. Between nodes
    it is a ring for each share of the heads, where the ranks of a node count as one.
    """
    k, v = (_copied(x, "ulysses+ring", q.shape[2], cp.ranks.node_size) for x in (k, v))
    q, k, v = (tokens_to_heads(x, cp, in_node=True) for x in (q, k, v))
    o = ring_attention(q, k, v, scale, causal, cp.of_nodes, stride=cp.ranks.node_size)
    return heads_to_tokens(o, cp, in_node=True)


def _copied(x: Tensor, method: str, Hq: int, ranks: int) -> Tensor:
    """Return x [1, T_local, Hkv, ...] with a copy of each key head for every rank with its
    queries.
    """
    copies = key_head_copies(Hq, x.shape[2], ranks)
    if not copies:
        raise ValueError(
            f"method = {method!r} cannot split {Hq} query and {x.shape[2]} key heads among {ranks} ranks: the ranks "
            "must divide the query heads, and divide or be a multiple of the key heads; use 'ring' or 'allgather'"
        )
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def key_head_copies(Hq: int, Hkv: int, W: int) -> int:
    """Return the number of ranks that each key head is sent to.

    0: W ranks cannot share these heads.
    """
    if Hq % W == 0 and Hkv % W == 0:
        return 1
    return W // Hkv if Hq % W == 0 and W % Hkv == 0 else 0


class _ExchangeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp: CPContext, in_node: bool, to_heads: bool) -> Tensor:
        order, ranks = (
            (cp.order_in_node, cp.ranks.node_size)
            if in_node
            else (cp.cut.order, cp.ranks.world_size)
        )
        ctx.where = list(order), ranks, cp.ranks.group_name
        ctx.to_heads = to_heads
        return exchange_heads(x, *ctx.where, to_heads)

    @staticmethod
    def backward(ctx, grad: Tensor):
        check_first_derivative()
        return exchange_heads(grad, *ctx.where, not ctx.to_heads), None, None, None


def _exchanged(x: Tensor, order: list[int], world_size: int, group: str, to_heads: bool) -> Tensor:
    B, tokens, heads, *rest = x.shape
    shape = (
        (tokens * world_size, heads // world_size)
        if to_heads
        else (tokens // world_size, heads * world_size)
    )
    return x.new_empty(B, *shape, *rest)


@operator(fake=_exchanged, kept_by=("selective",), cost=costs.exchange("heads"))
def exchange_heads(
    x: Tensor, order: list[int], world_size: int, group: str, to_heads: bool
) -> Tensor:
    """Exchange tokens for heads, or back.

    Args:
        to_heads: [1, T_local, H, ...] → [1, T, H/W, ...]; otherwise the reverse.
        world_size: W, or the ranks of a node.
    """
    if to_heads:
        # Parts [W, T_local, H/W, ...] by receiver.
        parts = x[0].unflatten(1, (world_size, -1)).movedim(1, 0)
        return to_global_order(_all_to_all(parts, group), order).unsqueeze(0)
    # Parts [W, T_local, H/W, ...] by sender.
    parts = _all_to_all(to_rank_order(x[0], order, world_size), group)
    # Flatten copies, except with one head per rank, so ask for contiguous memory.
    return parts.movedim(0, 1).flatten(1, 2).unsqueeze(0).contiguous()


def _all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send parts[r] to rank r; the result's [r] came from rank r.

    If there are fewer parts than ranks, they belong to the ranks of this rank's node.
    """
    ranks = group_named(group)
    parts = parts.contiguous()
    if len(parts) < ranks.size():
        sizes = [0] * ranks.size()
        first = ranks.rank() // len(parts) * len(parts)
        sizes[first : first + len(parts)] = [1] * len(parts)
        return all_to_all(parts, sizes, sizes, group)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=ranks)
    return received


# In rank order, the tokens that each rank holds come rank after rank.


def to_global_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Turn x [W, T_local, ...], the tokens of each rank → [T, ...] in global order.

    order: `Cut.order`.
    """
    x = x.flatten(0, 1)
    if list(order) == list(range(len(order))):
        return x
    # All fragments have the same length.
    blocks = x.unflatten(0, (len(order), -1))
    return torch.cat([blocks[i] for i in order])


def to_rank_order(x: Tensor, order: Sequence[int], world_size: int) -> Tensor:
    """Turn [T, ...] in global order → [W, T_local, ...]: undoes `to_global_order`."""
    if list(order) != list(range(len(order))):
        blocks = x.unflatten(0, (len(order), -1))
        x = torch.cat([blocks[i] for i in sorted(range(len(order)), key=order.__getitem__)])
    return x.unflatten(0, (world_size, -1))
