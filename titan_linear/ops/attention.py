"""Softmax attention: dense, packed, decoding, and under context parallelism."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.exchange.allgather import GATHER_LIMIT, allgather_attention, slice_bytes
from titan_linear.ops.exchange.ring import ring_attention
from titan_linear.ops.exchange.ulysses import (
    key_head_copies,
    ulysses_attention,
    ulysses_ring_attention,
)
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.build_context import tree_context
from titan_linear.ops.layout.context import SOFTMAX_METHODS, CPContext
from titan_linear.ops.layout.documents import checked, distinct
from titan_linear.ops.layout.spans import entries, pairs_by_rank
from titan_linear.ops.runtime.options import check_usable, scale_of
from titan_linear.ops.torch.attention import local_attention

BY_METHOD = ring_attention, allgather_attention, ulysses_attention, ulysses_ring_attention
METHODS = dict(zip(SOFTMAX_METHODS, BY_METHOD, strict=True))
IMPLS = "auto", "torch"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    first_key: Tensor | None = None,
    parents: Tensor | None = None,
    cp_context: CPContext | None = None,
    method: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """Compute o = softmax(scale · q kᵀ + mask) v, with memory linear in T, in any float
    dtype.

    Args:
        q: [B, Tq, Hq, D]. Hq is a multiple of Hkv, and query head h reads key head h //
            (Hq/Hkv).
        k: [B, Tk, Hkv, D]. The causal mask needs Tq <= Tk and is aligned to the end
            (decoding).
        v: [B, Tk, Hkv, Dv].
        scale: factor on the scores, above 0; D^-½ by default.
        causal: whether a token sees only tokens up to itself.
        cu_seqlens: [N+1] int boundaries of packed documents (B = 1, Tq = Tk). Attention
            stays inside a document. The host reads the boundaries: pass them on the CPU to
            avoid a CUDA synchronization.
        first_key: [B] int, for decoding (Tq = 1) a batch of texts of different lengths,
            aligned to the end. The keys of row b before first_key[b] are padding.
        parents: [N] int, for prefix trees: the index of the document of `cu_seqlens` that
            each document continues, or −1.
        cp_context: the context of context parallelism, which holds the documents. The
            tensors are then this rank's tokens (B = 1, Tq = Tk). The result is what one
            device would compute for these tokens, gradients included. Nothing is copied to
            the host.
        method: how ranks communicate: "ring", "allgather", "ulysses", "ulysses+ring" (see
            `ops/exchange/`), or "auto" (see `choose_method`). It matters only with a
            `cp_context` of several ranks.
        impl: "torch" or "auto", which mean the same here.

    Returns:
        o [B, Tq, Hq, Dv] in q's dtype.

    Raises:
        ValueError: an argument does not fit the others; the message names the argument.
    """
    # Check the arguments, and turn prefix trees into a context.
    _check_tensors(q, k, v, causal)
    if impl not in IMPLS:
        raise ValueError(
            f"impl = {impl!r} is unknown to attention; use {' or '.join(map(repr, IMPLS))}"
        )
    if method != "auto" and method not in METHODS:
        raise ValueError(
            f"method = {method!r} is unknown; use 'auto', {', '.join(map(repr, METHODS))}"
        )
    cu_seqlens, cp_context = tree_context(parents, cu_seqlens, cp_context, q.device)
    scale = scale_of(scale, q)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale = {scale} must be above 0 and finite: some kernels give NaN for another"
        )
    # Decoding: one query per row, whose keys begin at first_key.
    if first_key is not None:
        if cu_seqlens is not None or cp_context is not None:
            raise ValueError(
                "first_key must not be given with cu_seqlens or cp_context: it is for decoding a batch"
            )
        return _decode(q, k, v, scale, first_key)
    # One device: a dense batch, or packed documents.
    if cp_context is None:
        documents = None if cu_seqlens is None else _documents(cu_seqlens, q, k)
        return local_attention(q, k, v, scale, causal, documents)
    # Context parallelism; a context of one rank holds the whole stream.
    _check_context(cp_context, cu_seqlens, q, k, causal)
    if cp_context.ranks.world_size == 1:
        return local_attention(q, k, v, scale, causal, cp_context.stream)
    if method == "auto":
        method = _chosen(cp_context, q, k, v)
    return METHODS[method](q, k, v, scale, causal, cp_context)


def _chosen(cp: CPContext, q: Tensor, k: Tensor, v: Tensor) -> str:
    width = k.shape[-1] + v.shape[-1]
    ranks = cp.ranks.world_size, cp.ranks.node_size
    return choose_method(
        *ranks, cp.cut.stream_tokens, q.shape[2], k.shape[2], width, k.dtype, cp.cut.joined
    )


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float, first_key: Tensor) -> Tensor:
    """Attend with each row's single query to its keys from first_key on: return o [B, 1,
    Hq, Dv].
    """
    B = q.shape[0]
    Tq = q.shape[1]
    Tk = k.shape[1]
    if Tq != 1 or first_key.shape != (B,) or first_key.is_floating_point():
        given = f"{first_key.dtype} {tuple(first_key.shape)}"
        raise ValueError(f"first_key is {given}; give [B] = [{B}] integers, with Tq = 1, not {Tq}")
    seen = torch.arange(Tk, device=q.device) >= first_key[:, None]  # [B, Tk]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
        )
    return o.transpose(1, 2)


def choose_method(
    W: int,
    node_size: int,
    tokens: int,
    Hq: int,
    Hkv: int,
    width: int,
    dtype: torch.dtype,
    trees: bool = False,
) -> str:
    """Return the method that "auto" stands for.

    The choice depends on shapes alone, so all ranks agree. The first method that applies is:

    - "ulysses" where W divides the key heads, or where several ranks share each key head
      and this sends no more than an all-gather would. All ranks then have equal work,
      whatever the documents and the layout, and memory does not grow with W.
    - "allgather" while the slices of one key head stay within `GATHER_LIMIT`. Blocks are
      larger than the ring's, and one call computes all documents. Prefix trees never get
      past this method, because the ring methods do not support them.
    - "ulysses+ring" where the ranks of a node can share the heads. Each rank then sends
      only its share to other nodes.
    - "ring".

    Args:
        W: number of ranks.
        node_size: number of ranks per node.
        tokens: number of tokens on all W ranks together.
        Hq, Hkv: numbers of query heads and key heads.
        width: D + Dv.
        dtype: dtype of keys and values.
        trees: whether the documents are prefix trees.
    """
    copies = key_head_copies(Hq, Hkv, W)
    # Ulysses sends q, o and the K|V of W heads for 1/W of the stream; an all-gather sends
    # the K|V of the whole stream.
    sends_less = Hq + W <= W * Hkv
    if copies == 1 or (copies and sends_less):
        return "ulysses"
    if trees or slice_bytes(tokens, 1, Hkv, width, dtype) <= GATHER_LIMIT:
        return "allgather"
    return "ulysses+ring" if 1 < node_size < W and key_head_copies(Hq, Hkv, node_size) else "ring"


def pairs_computed(cp: CPContext, method: str) -> float:
    """Count the query-key pairs under the causal mask that this rank computes, summed over
    its heads and divided by the number of all heads.

    A rank that has 1/W of the heads ("ulysses") counts 1/W of all pairs; with
    "ulysses+ring", 1/node_size of its node's pairs.

    Args:
        method: one of `METHODS`.
    """
    # The ranks that share the heads share the sum of their pairs.
    own = pairs_by_rank(entries(cp.cut), cp.ranks.world_size, causal=True).tolist()
    ranks = {"ulysses": cp.ranks.world_size, "ulysses+ring": cp.ranks.node_size}.get(method, 1)
    first = cp.ranks.rank - cp.ranks.rank % ranks
    return sum(own[first : first + ranks]) / ranks


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    # Each tensor by itself.
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; give [B, T, heads, dim], none of them 0"
            )
        if x.dtype != q.dtype or x.device != q.device or not x.is_floating_point():
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}; q, k and v need one float dtype and one device"
            )
    # Shapes that must fit each other.
    B, Tq, Hq, D = q.shape
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; with q {tuple(q.shape)} it must be [{B}, Tk, Hkv, {D}]"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; with k {tuple(k.shape)} it must be [B, Tk, Hkv, Dv]"
        )
    if Hq % k.shape[2]:
        raise ValueError(
            f"q has {Hq} heads and k has {k.shape[2]}; the first must be a multiple of the second"
        )
    if causal and Tq > k.shape[1]:
        raise ValueError(f"q has {Tq} tokens and k has {k.shape[1]}; a causal mask needs Tq <= Tk")


def _check_one_stream(what: str, q: Tensor, k: Tensor) -> None:
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{what} needs B = 1 and Tq = Tk; q has shape {tuple(q.shape)}, k {tuple(k.shape)}"
        )


def _documents(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> Boundaries:
    """Return the documents of a packed stream on one device, without empty ones."""
    _check_one_stream("cu_seqlens", q, k)
    on_host = torch.from_numpy(
        distinct(checked("cu_seqlens", cu_seqlens, q.shape[1])).astype(np.int32)
    )
    return Boundaries(
        on_host.to(q.device, non_blocking=True), on_host, on_host.diff().max().long().view(1)
    )


def _check_context(
    cp: CPContext, cu_seqlens: Tensor | None, q: Tensor, k: Tensor, causal: bool
) -> None:
    if not causal and cp.cut.joined:
        raise ValueError(
            "causal = False: in prefix trees a token sees what comes before it; give causal = True"
        )
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must not be given with cp_context, which holds the documents")
    _check_one_stream("cp_context", q, k)
    if q.shape[1] != cp.cut.tokens:
        raise ValueError(
            f"q has {q.shape[1]} tokens; cp_context gives rank {cp.ranks.rank} {cp.cut.tokens}"
        )
    check_usable(cp, "q", q)
