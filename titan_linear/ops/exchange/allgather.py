"""All-gather attention (Llama 3, section 3.3.2) with balanced work: K and V travel to the rank that computes, and so do
queries of ranks with too much work. One call of the kernel computes all of a rank's spans (ops/layout/spans.py).

Heads are computed in slices: as many slices as have enough to compute while others travel, and more where memory
requires it (`slice_bytes`). While a slice is computed, K|V and q of the next are on their way, and so is o of the last,
back to the owners of the queries. Either K and V of all ranks are gathered or, where few are needed, only these are
exchanged: the plan of the batch says which. In backward everything travels again, with do and o beside q, and dK|dV of
a slice go to their owners in fp32 while the next is computed: by a reduce-scatter, or back the way that the keys came,
to be added up in rank order. Unlike ring attention's, memory per rank may grow with the whole stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from titan_linear.ops.layout.spans import ALL, NOTHING, KeyRoutes, QueryRoutes, Spans
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.torch.attention import (
    Attention,
    Rows,
    attend_spans,
    attend_spans_backward,
    empty_gradients,
    empty_output,
)
from titan_linear.ops.torch.attention_kernels import Triple, accumulator_dtype

SLICES = 4  # at most, unless memory requires more
GATHER_LIMIT = 4 * 2**30  # bytes, for `slice_bytes`
# FLOPs of a slice's forward, 0.8 ms on an H200: its messages and copies take the host as long
LEAST = 5e11
Arriving = Callable[[], Sequence[Tensor]]  # waits for tensors on their way and returns them
Came = tuple[Tensor, Tensor, Sequence[Tensor]]  # of a slice: k, v and rows of queries


def allgather_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, cp: CPContext
) -> Tensor:
    """q [1, T_local, Hq, D], k [1, T_local, Hkv, D], v [1, T_local, Hkv, Dv] → o [1, T_local, Hq, Dv]."""
    spans, queries, keys, pairs = cp.gathered if causal else cp.full_gathered
    where = spans.tensors(), list(queries), list(keys), pairs, cp.ranks.group_name
    return Attention.apply(q, k, v, (allgather_forward, allgather_backward), where, scale, causal)


def slice_bytes(tokens: int, heads: int, Hkv: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that slices of `heads` of Hkv key heads take at most, with the keys of `tokens` tokens.

    In backward: K|V and dK|dV of the slice in hand, K|V of the next one on its way, and dK|dV of the last one on its
    way home, summed in fp32 or wider. The slice in hand has a row of a token for each span that sees it (for one
    document over W contiguous ranks 1 + 1/W), and is put in order when it arrives, hence the fourth term of `dtype`.
    width = D + Dv.
    """
    times = 2 if heads == Hkv else 4
    return tokens * heads * width * (times * dtype.itemsize + accumulator_dtype(dtype).itemsize)


def heads_at_once(
    tokens: int, Hkv: int, width: int, dtype: torch.dtype, slices: int = SLICES
) -> int:
    """Number of key heads per slice: enough for at most `slices` slices, or fewer to keep within `GATHER_LIMIT`."""
    for heads in range(Hkv // next(n for n in range(slices, 0, -1) if Hkv % n == 0), 1, -1):
        if Hkv % heads == 0 and slice_bytes(tokens, heads, Hkv, width, dtype) <= GATHER_LIMIT:
            return heads
    return 1


def heads_of_slice(pairs: Tensor, q: Tensor, k: Tensor, v: Tensor) -> int:
    """`heads_at_once` for this rank's q, k, v [1, T_local, ...]; the same on all ranks. pairs: of `GatheredSpans`."""
    tokens = pairs.shape[1] * k.shape[1]
    width = k.shape[3] + v.shape[3]
    return heads_at_once(tokens, k.shape[2], width, k.dtype, worthwhile(pairs, q, v))


def worthwhile(pairs: Tensor, q: Tensor, v: Tensor) -> int:
    """Number of slices with enough to compute in each, on the rank that computes most; the same on all ranks.

    pairs: of `GatheredSpans`; q [1, T_local, Hq, D], v [1, T_local, Hkv, Dv]."""
    flops = 2 * max(pairs.tolist()[1]) * q.shape[2] * (q.shape[3] + v.shape[3])
    return min(max(int(flops / LEAST), 1), SLICES)


def _cost(
    outputs: costs.Outputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: list[Tensor],
    pairs: Tensor,
    **more: Any,
) -> costs.Attention:
    gathered = costs.Gathered(
        nbytes=costs.travelling(k, v, **more),
        share=KeyRoutes(*keys).coming.sum().item() / k.shape[1],
        slices=k.shape[2] // heads_of_slice(pairs, q, k, v),
        pairs=max(pairs.tolist()[1]),
    )
    return costs.attention(outputs, q, v, **more)._replace(keys=gathered)


@operator(fake=empty_output, kept_by=("selective", "attention"), cost=_cost)
def allgather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: list[Tensor],
    queries: list[Tensor],
    keys: list[Tensor],
    pairs: Tensor,
    group: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """o like q with Dv, lse [1, Hq, T_local]; spans, queries, keys, pairs: `GatheredSpans`."""
    moved = _Queries(QueryRoutes(*queries), group)
    needed = _Keys(KeyRoutes(*keys), group)
    results = _Arrivals()

    def compute(came: Came) -> tuple[Tensor, Tensor]:
        k_slice, v_slice, (rows,) = came
        return attend_spans(rows[None], k_slice[None], v_slice[None], scale, causal, Spans(*spans))

    for o, lse in map(
        compute, _slices([q[0]], k[0], v[0], moved, needed, heads_of_slice(pairs, q, k, v))
    ):
        results.take()
        results.pending = moved.send_back(lse[0].T, o[0])
    lse, o = results.joined()
    return o[None], lse.T[None].contiguous()


def _room_in_backward(
    q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], pairs: Tensor, **_: Any
) -> int:
    """Bytes of dq's accumulator, slices of keys and their gradients, and the gradients of this rank's own keys, held
    until all ranks' have come."""
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
    queries: list[Tensor],
    keys: list[Tensor],
    pairs: Tensor,
    group: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    moved = _Queries(QueryRoutes(*queries), group)
    needed = _Keys(KeyRoutes(*keys), group)
    gradients, gradients_of_keys = _Arrivals(), _Arrivals()

    def compute(came: Came) -> Triple:
        k_slice, v_slice, (lse_rows, do_rows, q_rows, o_rows) = came
        lse_rows = lse_rows.T.contiguous()
        rows = Rows(*(x[None] for x in (do_rows, q_rows, k_slice, v_slice, o_rows, lse_rows)))
        return attend_spans_backward(rows, scale, causal, Spans(*spans))

    rows_of = [lse[0].T, do[0], q[0], o[0]]
    heads = heads_of_slice(pairs, q, k, v)
    for dq, dk, dv in map(compute, _slices(rows_of, k[0], v[0], moved, needed, heads)):
        gradients.take()
        gradients.pending = moved.send_back(dq[0].to(q.dtype))
        gradients_of_keys.take()
        gradients_of_keys.pending = needed.send_home(dk[0], dv[0], k.shape[1])
        del dk, dv  # before the next slice has its own
    (dq,) = gradients.joined()
    (dkv,) = gradients_of_keys.joined()
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
    return dq[None], dk[None].to(k.dtype).contiguous(), dv[None].to(v.dtype).contiguous()


def _slices(
    tokens: Sequence[Tensor], k: Tensor, v: Tensor, queries: _Queries, keys: _Keys, heads: int
) -> Iterator[Came]:
    """All heads in slices of `heads` key heads, each on its way while the one before is computed: for this rank's spans
    k [keys, h, D], v [keys, h, Dv], and rows of `tokens`, each [T_local, Hq, ...] here. Only the caller holds one."""
    Hkv = k.shape[1]
    groups = tokens[0].shape[1] // k.shape[1]
    step = Hkv if keys.travel == NOTHING else heads

    def start(first: int) -> tuple[Arriving, Arriving]:
        of_k = slice(first, first + step)
        of_q = slice(first * groups, (first + step) * groups)
        return keys.fetch(k[:, of_k], v[:, of_k]), queries.send(*(x[:, of_q] for x in tokens))

    under_way = deque([start(0)])
    for following in range(step, Hkv + step, step):
        if following < Hkv:
            under_way.append(start(following))
        yield _come(*under_way.popleft())


def _come(keys: Arriving, rows: Arriving) -> Came:
    """What comes, of which the caller then holds nothing else."""
    k, v = keys()
    return k, v, rows()


class _Arrivals:
    """Results of slices, [T_local, h, ...] each. One is taken when the next is computed and about to be sent."""

    def __init__(self):
        self.parts: list[Sequence[Tensor]] = []
        self.pending: Arriving | None = None

    def take(self) -> None:
        if self.pending is not None:
            self.parts.append(self.pending())
            self.pending = None

    def joined(self) -> list[Tensor]:
        """The results of all heads, [T_local, H, ...]."""
        self.take()
        return [
            x[0].contiguous() if len(x) == 1 else torch.cat(x, dim=1)
            for x in zip(*self.parts, strict=True)
        ]


# --- What travels ----------------------------------------------------------------------------------------------------


class _Queries:
    """Query rows on their way to the rank that computes them, and back. Rows that stay are copied once, meanwhile."""

    def __init__(self, routes: QueryRoutes, group: str):
        self.leaving = routes.leaving.tolist()
        self.coming = routes.coming.tolist()
        self.moves = bool(routes.moves)
        # by where computed
        self.here, self.away = routes.rows.tensor_split([len(routes.rows) - sum(self.leaving)])
        self.group = group

    def send(self, *tensors: Tensor) -> Arriving:
        """From each [T_local, ...], the rows of this rank's spans: its own, then those that arrive."""
        if not self.moves:
            return lambda: tensors
        arrive = self._travel(
            [x.index_select(0, self.away) for x in tensors], self.leaving, self.coming
        )
        stay = len(self.here)
        rows = len(self.here) + sum(self.coming)
        of_spans = [x.new_empty(rows, *x.shape[1:]) for x in tensors]
        for x, into in zip(tensors, of_spans, strict=True):
            torch.index_select(x, 0, self.here, out=into[:stay])

        def arrived() -> Sequence[Tensor]:
            for into, came in zip(of_spans, arrive(), strict=True):
                into[stay:] = came
            return of_spans

        return arrived

    def send_back(self, *tensors: Tensor) -> Arriving:
        """The inverse of `send`: from each [rows of the spans, ...], the rows of this rank's tokens."""
        if not self.moves:
            return lambda: tensors
        stay = len(self.here)
        tokens = len(self.here) + len(self.away)
        arrive = self._travel([x[stay:] for x in tensors], self.coming, self.leaving)
        own = [x.new_empty(tokens, *x.shape[1:]) for x in tensors]
        for x, into in zip(tensors, own, strict=True):
            into.index_copy_(0, self.here, x[:stay])

        def arrived() -> Sequence[Tensor]:
            for into, came in zip(own, arrive(), strict=True):
                into.index_copy_(0, self.away, came)
            return own

        return arrived

    def _travel(self, tensors: Sequence[Tensor], leaving: list[int], coming: list[int]) -> Arriving:
        """Send all rows of the tensors, ordered by receiver, in one message."""
        if len(tensors) == 1:
            arrive = start_all_to_all(tensors[0].contiguous(), leaving, coming, self.group)
            return lambda: [arrive()]
        arrive = start_all_to_all(_packed(tensors), leaving, coming, self.group)
        return lambda: _unpacked(arrive(), tensors)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [n, ...] of several dtypes as rows of bytes, for one message."""
    rows = [x.flatten(1).clone(memory_format=torch.contiguous_format) for x in tensors]
    return torch.cat([x.view(torch.uint8) for x in rows], dim=1)


def _unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = rows.split([x.shape[1:].numel() * x.element_size() for x in like], dim=1)
    # view() needs the dtype's alignment
    parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return [
        part.view(x.dtype).view(len(rows), *x.shape[1:])
        for part, x in zip(parts, like, strict=True)
    ]


class _Keys:
    """K|V on their way to the ranks that need them, and dK|dV on their way home."""

    def __init__(self, routes: KeyRoutes, group: str):
        self.pieces, self.sent = (
            [(a, b) for a, b in x.tolist() if a < b] for x in (routes.pieces, routes.sent)
        )
        self.leaving = routes.leaving.tolist()
        self.coming = routes.coming.tolist()
        self.travel, self.group = int(routes.travel), group

    def fetch(self, k: Tensor, v: Tensor) -> Arriving:
        """k [T_local, h, D], v [T_local, h, Dv] → k and v of this rank's spans."""
        if self.travel == NOTHING:
            return lambda: (k, v)
        if self.travel == ALL:
            arrive = start_all_gather(torch.cat([k, v], dim=-1), self.group)
        else:
            leaves = [joined([x[a:b] for a, b in self.sent], x) for x in (k, v)]
            arrive = start_all_to_all(
                torch.cat(leaves, dim=-1), self.leaving, self.coming, self.group
            )

        def arrived() -> Sequence[Tensor]:
            came = arrive().split([k.shape[-1], v.shape[-1]], dim=-1)
            return [joined(self._pieces_of(*x), x[0]) for x in zip((k, v), came, strict=True)]

        return arrived

    def send_home(self, dk: Tensor, dv: Tensor, tokens: int) -> Arriving:
        """dk [keys, h, D], dv [keys, h, Dv] of this rank's spans → dK|dV [T_local, h, D + Dv] of its tokens, summed
        over all ranks."""
        D, Dv = dk.shape[-1], dv.shape[-1]
        if self.travel == NOTHING:
            return lambda: [torch.cat([dk, dv], dim=-1)]
        # a gather brought this rank's own, too
        rows = sum(self.coming) + tokens * (self.travel == ALL)
        sizes = [b - a for a, b in self.pieces]
        dtype = accumulator_dtype(dk.dtype)
        here, there = (dk.new_zeros(n, dk.shape[1], D + Dv, dtype=dtype) for n in (tokens, rows))
        for piece, *of_piece in zip(
            self._pieces_of(here, there), dk.split(sizes), dv.split(sizes), strict=True
        ):
            for part, gradient in zip(piece.split([D, Dv], dim=-1), of_piece, strict=True):
                part += gradient
        if self.travel == ALL:
            arrive = start_reduce_scatter(there, self.group)
            return lambda: [arrive()]
        arrive = start_all_to_all(there, self.coming, self.leaving, self.group)
        return lambda: [self._summed(here, arrive())]

    def _pieces_of(self, here: Tensor, there: Tensor) -> list[Tensor]:
        """The keys of the spans, in order, as views of local and received rows."""
        n = len(here)
        return [here[a:b] if b <= n else there[a - n : b - n] for a, b in self.pieces]

    def _summed(self, here: Tensor, came: Tensor) -> Tensor:
        """Add up in rank order, so that the result is bitwise repeatable."""
        for (a, b), gradient in zip(
            self.sent, came.split([b - a for a, b in self.sent]), strict=True
        ):
            here[a:b] += gradient
        return here
