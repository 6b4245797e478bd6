"""All-gather attention (Llama 3, section 3.3.2). K and V travel to the ranks whose queries
need them, and one call of the kernel computes all of a rank's spans (ops/layout/spans.py).

Heads are computed in slices. There are as many slices as have enough to compute while
others travel, and more where memory requires it (`slice_bytes`). While one slice is
computed, the next slice's K|V are in transit. Either K and V of all ranks are gathered or,
where few rows are needed, only these are exchanged, as the batch's plan decides. In
backward K|V travel again, and a slice's dK|dV return to their owners in fp32 while the next
slice is computed. They return by a reduce-scatter, or by the reverse exchange followed by a
sum in rank order. Unlike in ring attention, memory per rank may grow with the length of the
complete stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import (
    joined,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.layout.spans import ALL, NOTHING, KeyRoutes, Spans
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.torch.attention import (
    AttentionFunction,
    AttentionRows,
    attend_spans,
    attend_spans_backward,
    empty_gradients,
    empty_output,
)
from titan_linear.ops.torch.attention_kernels import accumulator_dtype

SLICES = 4  # largest number of slices, unless memory requires more
GATHER_LIMIT = 4 * 2**30  # largest `slice_bytes`
# Least FLOPs of a slice's forward, 0.8 ms on an H200. The host needs as long for a slice's
# messages and copies.
LEAST = 5e11
Arriving = Callable[[], Tensor]  # waits for a tensor in transit and returns it


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    cp: CPContext,
) -> Tensor:
    """Attend over all ranks: q [1, T_local, Hq, D], k [1, T_local, Hkv, D], v
    [1, T_local, Hkv, Dv] → o [1, T_local, Hq, Dv]."""
    spans, keys, pairs = cp.gathered if causal else cp.full_gathered
    where = spans.tensors(), list(keys), pairs, cp.ranks.group_name
    return AttentionFunction.apply(
        q, k, v, (allgather_forward, allgather_backward), where, scale, causal
    )


def slice_bytes(tokens: int, heads: int, Hkv: int, width: int, dtype: torch.dtype) -> int:
    """Return the largest number of bytes held for slices of `heads` of Hkv key heads, with
    the keys of `tokens` tokens.

    In backward these are K|V and dK|dV of the current slice, the next slice's K|V in
    transit, and the last slice's dK|dV on their way back, summed in fp32 or wider. The
    current slice has one row of a token for each span that sees it (for one document over W
    contiguous ranks 1 + 1/W). It is reordered on arrival, hence the fourth term of `dtype`.
    width = D + Dv.
    """
    times = 2 if heads == Hkv else 4
    return tokens * heads * width * (times * dtype.itemsize + accumulator_dtype(dtype).itemsize)


def heads_at_once(
    tokens: int, Hkv: int, width: int, dtype: torch.dtype, slices: int = SLICES
) -> int:
    """Return the number of key heads per slice: enough for at most `slices` slices, or
    fewer to stay within `GATHER_LIMIT`."""
    for heads in range(Hkv // next(n for n in range(slices, 0, -1) if Hkv % n == 0), 1, -1):
        if Hkv % heads == 0 and slice_bytes(tokens, heads, Hkv, width, dtype) <= GATHER_LIMIT:
            return heads
    return 1


def heads_of_slice(pairs: Tensor, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return `heads_at_once` for this rank's q, k, v [1, T_local, ...], the same on all
    ranks. pairs: see `GatheredSpans`."""
    tokens = len(pairs) * k.shape[1]
    width = k.shape[3] + v.shape[3]
    return heads_at_once(tokens, k.shape[2], width, k.dtype, worthwhile(pairs, q, v))


def worthwhile(pairs: Tensor, q: Tensor, v: Tensor) -> int:
    """Return the number of slices with enough to compute in each, on the rank that computes
    most. It is the same on all ranks.

    pairs: see `GatheredSpans`; q [1, T_local, Hq, D], v [1, T_local, Hkv, Dv]."""
    flops = 2 * max(pairs.tolist()) * q.shape[2] * (q.shape[3] + v.shape[3])
    return min(max(int(flops / LEAST), 1), SLICES)


def _cost(
    outputs: costs.Outputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: list[Tensor],
    pairs: Tensor,
    **more: Any,
) -> costs.AttentionCost:
    gathered = costs.Gathered(
        nbytes=costs.travelling(k, v, **more),
        share=KeyRoutes(*keys).coming.sum().item() / k.shape[1],
        slices=k.shape[2] // heads_of_slice(pairs, q, k, v),
    )
    return costs.attention(outputs, q, v, **more)._replace(keys=gathered)


@operator(fake=empty_output, kept_by=("selective", "attention"), cost=_cost)
def allgather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: list[Tensor],
    keys: list[Tensor],
    pairs: Tensor,
    group: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return o, like q with Dv channels, and lse [1, Hq, T_local]. spans, keys, pairs: see
    `GatheredSpans`."""
    exchange = _Keys(KeyRoutes(*keys), group)
    where = Spans(*spans)
    # Compute one slice of heads while the next one is in transit.
    outputs = []
    sums = []
    for heads, k_slice, v_slice in _slices(k[0], v[0], exchange, heads_of_slice(pairs, q, k, v)):
        queries = _queries_of(heads, q, k)
        o, lse = attend_spans(q[:, :, queries], k_slice[None], v_slice[None], scale, causal, where)
        outputs.append(o)
        sums.append(lse)
        del k_slice, v_slice  # before the next slice arrives
    return _of_all_heads(outputs, 2).contiguous(), _of_all_heads(sums, 1).contiguous()


def _room_in_backward(
    q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], pairs: Tensor, **_: Any
) -> int:
    """Return the bytes of dq's accumulator, of slices of keys and their gradients, and of
    the gradients of this rank's own keys, which are held until the gradients from all ranks
    have arrived."""
    needed = KeyRoutes(*keys)
    acc = accumulator_dtype(k.dtype).itemsize
    Hkv = k.shape[2]
    heads = Hkv if needed.travel == NOTHING else heads_of_slice(pairs, q, k, v)
    tokens = k.shape[1] + int(needed.coming.sum())
    slices = slice_bytes(tokens, heads, Hkv, k.shape[3] + v.shape[3], k.dtype)
    return slices + acc * (q.numel() + k.numel() + v.numel())


@operator(fake=empty_gradients, cost=_cost, temporary=_room_in_backward)
def allgather_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spans: list[Tensor],
    keys: list[Tensor],
    pairs: Tensor,
    group: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    exchange = _Keys(KeyRoutes(*keys), group)
    where = Spans(*spans)
    tokens = k.shape[1]
    d_queries = []
    d_keys = []
    returning: list[Arriving] = []  # at most one slice's gradients
    for heads, k_slice, v_slice in _slices(k[0], v[0], exchange, heads_of_slice(pairs, q, k, v)):
        queries = _queries_of(heads, q, k)
        rows = AttentionRows(
            do=do[:, :, queries],
            q=q[:, :, queries],
            k=k_slice[None],
            v=v_slice[None],
            o=o[:, :, queries],
            lse=lse[:, queries],
        )
        dq, dk, dv = attend_spans_backward(rows, scale, causal, where)
        d_queries.append(dq.to(q.dtype))
        # The previous slice's gradients returned while this slice was computed.
        while returning:
            d_keys.append(returning.pop()())
        returning.append(exchange.send_home(dk[0], dv[0], tokens))
        del rows, k_slice, v_slice, dk, dv  # before the next slice arrives
    d_keys.append(returning.pop()())
    # Join the slices, in the inputs' dtypes.
    dk, dv = _of_all_heads(d_keys, 1).split([k.shape[-1], v.shape[-1]], dim=-1)
    dq = _of_all_heads(d_queries, 2).contiguous()
    return dq, dk[None].to(k.dtype).contiguous(), dv[None].to(v.dtype).contiguous()


def _of_all_heads(slices: list[Tensor], dim: int) -> Tensor:
    """Concatenate slices of heads. A single slice is not copied."""
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


def _queries_of(heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that read these key heads."""
    group = q.shape[2] // k.shape[2]
    return slice(heads.start * group, heads.stop * group)


def _slices(
    k: Tensor, v: Tensor, exchange: _Keys, heads: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of `heads` key heads, each in transit while the previous one is
    computed: the heads, and k [keys, h, D] and v [keys, h, Dv] of this rank's spans. Only
    the caller holds the tensors."""
    Hkv = k.shape[1]
    step = Hkv if exchange.travel == NOTHING else heads
    slices = [slice(first, first + step) for first in range(0, Hkv, step)]
    under_way = deque([exchange.fetch(k[:, slices[0]], v[:, slices[0]])])
    for this, following in zip_longest(slices, slices[1:]):
        if following is not None:
            under_way.append(exchange.fetch(k[:, following], v[:, following]))
        yield this, *under_way.popleft()()


# --- Transfers -------------------------------------------------------------------------------------------------------


def _filled(ranges: Tensor) -> list[tuple[int, int]]:
    """Return the ranges [., 2] that are not empty."""
    return [(a, b) for a, b in ranges.tolist() if a < b]


class _Keys:
    """Transfers of K|V to the ranks that need them, and of dK|dV back to their owners."""

    def __init__(self, routes: KeyRoutes, group: str):
        self.pieces = _filled(routes.pieces)
        self.sent = _filled(routes.sent)
        self.leaving = routes.leaving.tolist()
        self.coming = routes.coming.tolist()
        self.travel = int(routes.travel)
        self.group = group

    def fetch(self, k: Tensor, v: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Start the transfer of k [T_local, h, D], v [T_local, h, Dv]. The returned
        function waits and returns k and v of this rank's spans."""
        if self.travel == NOTHING:
            return lambda: (k, v)
        if self.travel == ALL:
            arrive = start_all_gather(torch.cat([k, v], dim=-1), self.group)
        else:
            leaves = torch.cat([self._leaving(k), self._leaving(v)], dim=-1)
            arrive = start_all_to_all(leaves, self.leaving, self.coming, self.group)

        def arrived() -> Sequence[Tensor]:
            came = arrive().split([k.shape[-1], v.shape[-1]], dim=-1)
            return [joined(self._pieces_of(*x), x[0]) for x in zip((k, v), came, strict=True)]

        return arrived

    def send_home(self, dk: Tensor, dv: Tensor, tokens: int) -> Arriving:
        """Start the return of dk [keys, h, D], dv [keys, h, Dv] of this rank's spans. The
        returned function waits and returns dK|dV [T_local, h, D + Dv] of its tokens, summed
        over all ranks."""
        D = dk.shape[-1]
        Dv = dv.shape[-1]
        if self.travel == NOTHING:
            return lambda: torch.cat([dk, dv], dim=-1)
        # A gather includes this rank's own rows.
        rows = sum(self.coming) + tokens * (self.travel == ALL)
        sizes = [b - a for a, b in self.pieces]
        dtype = accumulator_dtype(dk.dtype)
        here, there = (dk.new_zeros(n, dk.shape[1], D + Dv, dtype=dtype) for n in (tokens, rows))
        # Add each span's gradients to its keys' rows; a row may be a key of several spans.
        for piece, *of_piece in zip(
            self._pieces_of(here, there), dk.split(sizes), dv.split(sizes), strict=True
        ):
            for part, gradient in zip(piece.split([D, Dv], dim=-1), of_piece, strict=True):
                part += gradient
        if self.travel == ALL:
            return start_reduce_scatter(there, self.group)
        arrive = start_all_to_all(there, self.coming, self.leaving, self.group)
        return lambda: self._summed(here, arrive())

    def _leaving(self, x: Tensor) -> Tensor:
        return joined([x[a:b] for a, b in self.sent], x)

    def _pieces_of(self, here: Tensor, there: Tensor) -> list[Tensor]:
        """Return the keys of the spans, in order, as views of local and received rows."""
        n = len(here)
        return [here[a:b] if b <= n else there[a - n : b - n] for a, b in self.pieces]

    def _summed(self, here: Tensor, came: Tensor) -> Tensor:
        """Add the received gradients in rank order, so that the result is bitwise
        reproducible."""
        for (a, b), gradient in zip(
            self.sent, came.split([b - a for a, b in self.sent]), strict=True
        ):
            here[a:b] += gradient
        return here
