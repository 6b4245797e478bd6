"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all keys and values, and one call of the kernel
computes all of its spans (ops/cp/spans.py).

Heads come in slices, each gathered while the one before is computed; in backward K and V are gathered again, and dK|dV
of a slice is summed to its owners by a reduce-scatter in fp32 while the next is computed. Memory per rank, that of two
slices, grows with the whole stream, where ring attention's does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.exchange import group_named
from titan_linear.ops.cp.order import to_rank_order, tokens_in_global_order
from titan_linear.ops.operators import operator, register_fake
from titan_linear.ops.torch.attention import Spans, accumulator_dtype, attend_spans, attend_spans_backward

SLICES = 4  # at most


def allgather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, cp: CPContext
) -> torch.Tensor:
    """q [1, T_local, Hq, D], k [1, T_local, Hkv, D], v [1, T_local, Hkv, Dv] → o [1, T_local, Hq, Dv]."""
    return _AllGatherAttention.apply(q, k, v, scale, causal, cp)


def heads_at_once(Hkv: int) -> int:
    """Key heads of a slice."""
    return Hkv // next(n for n in range(SLICES, 0, -1) if Hkv % n == 0)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, causal: bool, cp: CPContext) -> torch.Tensor:
        spans, ranges, crosses = cp.gathered if causal else cp.full_gathered
        ctx.where = list(spans), ranges, crosses, list(cp.order), cp.group_name
        o, lse = allgather_forward(q, k, v, *ctx.where, scale, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o.view_as(o)

    @staticmethod
    def backward(ctx, do: torch.Tensor):
        return *allgather_backward(do, *ctx.saved_tensors, *ctx.where, ctx.scale, ctx.causal), None, None, None


@operator
def allgather_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[torch.Tensor], ranges: torch.Tensor,
    crosses: torch.Tensor, order: list[int], group: str, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o like q with Dv, lse [1, Hq, T_local]; spans, ranges, crosses: `GatheredSpans`."""
    slices = _slices(q, k, v, ranges, bool(crosses), order, group)
    parts = [attend_spans(q[:, :, s.of_q], s.k, s.v, scale, causal, Spans(*spans)) for s in slices]
    o, lse = (torch.cat(x, dim=dim) for x, dim in zip(zip(*parts, strict=True), (2, 1), strict=True))
    return o, lse


@operator
def allgather_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    spans: list[torch.Tensor], ranges: torch.Tensor, crosses: torch.Tensor, order: list[int], group: str, scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dkv, sums = [], [], None
    for s in _slices(q, k, v, ranges, bool(crosses), order, group):
        rows = (x[:, :, s.of_q] for x in (do, q))
        grads = attend_spans_backward(
            *rows, s.k, s.v, o[:, :, s.of_q], lse[:, s.of_q], scale, causal, Spans(*spans)
        )  # fmt: skip
        dq.append(grads[0])
        if sums is not None:
            dkv.append(sums.wait())
        sums = _Sums(torch.cat(grads[1:], dim=-1)[0], ranges, bool(crosses), order, group, k.shape[1])
    dkv = torch.cat([*dkv, sums.wait()], dim=1).unsqueeze(0)  # [1, T_local, Hkv, D + Dv]
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
    return torch.cat(dq, dim=2).to(q.dtype), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


@register_fake(allgather_forward)
def _(q, k, v, *_):
    B, T, Hq, _D = q.shape
    return q.new_empty(B, T, Hq, v.shape[-1]), q.new_empty(B, Hq, T, dtype=accumulator_dtype(q.dtype))


@register_fake(allgather_backward)
def _(do, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class Slice(NamedTuple):
    """Some heads, with the keys of this rank's spans."""

    of_q: slice  # query heads
    k: torch.Tensor  # [1, keys, h, D]
    v: torch.Tensor  # [1, keys, h, Dv]


def _slices(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, crosses: bool, order: list[int], name: str
) -> Iterator[Slice]:
    """All heads, each slice gathered while the one before is worked on; nothing is sent where no document crosses a
    cut."""
    if not crosses:
        yield Slice(slice(None), k, v)
        return
    Hkv, (D, Dv), groups = k.shape[2], (k.shape[-1], v.shape[-1]), q.shape[2] // k.shape[2]
    group, step = group_named(name), heads_at_once(Hkv)
    starts = iter(range(0, Hkv, step))

    def gather(first: int) -> tuple[int, torch.Tensor, dist.Work]:
        kv = torch.cat([x[0, :, first : first + step] for x in (k, v)], dim=-1)  # [T_local, h, D + Dv]
        everything = kv.new_empty(group.size(), *kv.shape)
        return first, everything, dist.all_gather_into_tensor(everything.flatten(0, 1), kv, group=group, async_op=True)

    following = gather(next(starts))
    while following is not None:
        (first, everything, work), start = following, next(starts, None)
        following = None if start is None else gather(start)
        work.wait()
        keys = tokens_in_global_order(everything, order, ranges.tolist()).unsqueeze(0)
        yield Slice(slice(first * groups, (first + step) * groups), *keys.split([D, Dv], dim=-1))


class _Sums:
    """dK|dV of spans on their way to the owners of the tokens, as a sum."""

    def __init__(
        self, dkv: torch.Tensor, ranges: torch.Tensor, crosses: bool, order: list[int], name: str, T_local: int
    ):
        """dkv: [keys, h, D + Dv]."""
        self.own, self.work = dkv, None
        if not crosses:
            return
        group = group_named(name)
        everything = dkv.new_zeros(group.size() * T_local, *dkv.shape[1:], dtype=accumulator_dtype(dkv.dtype))
        row = 0
        for start, end in ranges.tolist():
            everything[start:end] += dkv[row : row + end - start]
            row += end - start
        parts = to_rank_order(everything, order, group.size()).contiguous()
        self.own = torch.empty_like(parts[0])
        self.work = dist.reduce_scatter_tensor(self.own, parts.flatten(0, 1), group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """[T_local, h, D + Dv]"""
        if self.work is not None:
            self.work.wait()
        return self.own
