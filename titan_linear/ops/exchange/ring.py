"""Ring attention (Liu et al. 2023): keys and values travel around the ring of ranks.

At hop h a rank holds the keys of rank − h. It computes the rectangles that its queries form
with them while the next keys arrive. In backward K and V travel again. The gradient of the
keys follows them in the same direction, one hop behind, in fp32. After the last hop it goes
straight to its owner. A rank holds two packed buffers of K|V (and three of dK|dV in
backward) of its own length, whatever the number of ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.exchange.collectives import group_named
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.layout.rectangles import Rectangle
from titan_linear.ops.layout.spans import Spans
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.torch.attention import (
    AttentionFunction,
    AttentionRows,
    attend,
    attend_backward,
    attend_spans,
    attend_spans_backward,
    empty_gradients,
    empty_output,
    merge_,
)
from titan_linear.ops.torch.attention_kernels import accumulator_dtype


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    cp: CPContext,
    stride: int = 1,
) -> Tensor:
    """Compute o [1, T_local, Hq, Dv] from q [1, T_local, Hq, D], k [1, T_local, Hkv, D] and
    v [1, T_local, Hkv, Dv].

    Args:
        stride: neighbors on the ring are this many ranks of the group apart.
    """
    rectangles = cp.rectangles if causal else cp.full_rectangles
    squares = cp.tables.boundaries.spans.tensors()
    where = squares, rectangles.by_hop, rectangles.hops, cp.ranks.group_name, stride
    return AttentionFunction.apply(q, k, v, (ring_forward, ring_backward), where, scale, causal)


def _cost(outputs: costs.Outputs, stride: int, **arguments: Any) -> costs.AttentionCost:
    keys = costs.Ring(costs.travelling(**arguments), stride)
    return costs.attention(outputs, **arguments)._replace(keys=keys)


@operator(fake=empty_output, kept_by=("selective", "attention"), cost=_cost)
def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    squares: list[Tensor],
    by_hop: Tensor,
    hops: Tensor,
    group: str,
    stride: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return o, shaped like q with Dv, and lse [1, Hq, T_local].

    Args:
        squares: fields of `Spans`.
        by_hop, hops: fields of `Rectangles`.
    """
    kv = _Travelling(k, v, group, stride, int(hops))
    # First this rank's own squares, while the first keys are on their way.
    o, lse = attend_spans(q, k, v, scale, causal, Spans(*squares))
    o = o.to(accumulator_dtype(q.dtype))
    # Then the rectangles with the keys of each hop, merged into the result.
    rectangles = _by_hop(by_hop, kv.hops)
    for hop, blocks in enumerate(rectangles):
        k_hop, v_hop = kv.arrive(hop)
        for (a, b), (c, d) in blocks:
            block = attend(q[:, a:b], k_hop[:, c:d], v_hop[:, c:d], scale, causal=False)
            merge_(o[:, a:b], lse[:, :, a:b], *block)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def _room_in_backward(q: Tensor, k: Tensor, v: Tensor, hops: Tensor, **_: Any) -> int:
    """Return the bytes that backward allocates.

    These are the accumulators of dq and dK|dV, one block's dq and dK|dV, and the buffers in
    which K|V (two) and dK|dV (two or three) travel.
    """
    acc = accumulator_dtype(k.dtype).itemsize
    keys = k.numel() + v.numel()
    buffers = min(int(hops) + 1, 3)
    travelling = keys * (2 * k.element_size() + acc * buffers) if hops else 0
    return (acc + k.element_size()) * (q.numel() + keys) + travelling


@operator(fake=empty_gradients, cost=_cost, temporary=_room_in_backward)
def ring_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    squares: list[Tensor],
    by_hop: Tensor,
    hops: Tensor,
    group: str,
    stride: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Start sending the keys, and compute the gradients of this rank's own squares.
    acc = accumulator_dtype(q.dtype)
    D = k.shape[-1]
    kv = _Travelling(k, v, group, stride, int(hops))
    rows = AttentionRows(do, q, k, v, o, lse)
    grads = attend_spans_backward(rows, scale, causal, Spans(*squares))
    dq = grads[0].to(acc)
    # dK|dV of this rank's keys, to which the other ranks' parts are added at the end.
    home = torch.cat(grads[1:], dim=-1).to(acc)
    gradient = _FollowingGradient(home, group, stride, kv.hops)
    # At each hop, compute the keys' gradient from this rank's queries and pass it on.
    for hop, blocks in enumerate(_by_hop(by_hop, kv.hops)):
        k_hop, v_hop = kv.arrive(hop)
        rows = rows._replace(k=k_hop, v=v_hop)
        dkv = home if hop == 0 else gradient.blank(hop)
        for rectangle in blocks:
            _add_rectangle(rectangle, rows, scale, dq, dkv)
        if hop:
            gradient.depart(hop)
    gradient.come_home()
    return (
        dq.to(q.dtype).contiguous(),
        home[..., :D].to(k.dtype).contiguous(),
        home[..., D:].to(v.dtype).contiguous(),
    )


def _by_hop(by_hop: Tensor, hops: int) -> Iterator[list[Rectangle]]:
    """Yield the rectangles of hop 0, 1, … hops."""
    rows = by_hop.tolist()
    for hop in range(hops + 1):
        yield [Rectangle((a, b), (c, d)) for h, a, b, c, d in rows if h == hop]


def _add_rectangle(
    rectangle: Rectangle, rows: AttentionRows, scale: float, dq: Tensor, dkv: Tensor
) -> None:
    """Add the gradients of one rectangle to dq [1, T, Hq, D] and dkv [1, T, Hkv, D + Dv]."""
    (a, b), (c, d) = rectangle
    D = rows.k.shape[-1]
    dq_block, dk_block, dv_block = attend_backward(
        rows.block(slice(a, b), slice(c, d)), scale, causal=False
    )
    dq[:, a:b] += dq_block
    dkv[:, c:d, :, :D] += dk_block
    dkv[:, c:d, :, D:] += dv_block


class _Travelling:
    """K|V on their way around the ring.

    They are double-buffered: the next hop is in flight while this hop's blocks are
    computed.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        group: str,
        stride: int,
        hops: int,
    ):
        self.own = k, v
        self.group = group
        self.stride = stride
        self.hops = hops
        self.works: list[dist.Work] = []
        if hops:
            packed = torch.cat([k, v], dim=-1)  # [1, T, Hkv, D + Dv]
            self.buffers = [packed, torch.empty_like(packed)]
            self._send(0)

    def arrive(self, hop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of rank − hop; send them on unless this is the last
        hop.
        """
        if hop == 0:
            return self.own
        _wait(self.works)
        if hop < self.hops:
            self._send(hop)
        k, v = self.buffers[hop % 2].split([x.shape[-1] for x in self.own], dim=-1)
        return k, v

    def _send(self, hop: int) -> None:
        self.works = _shift(
            self.buffers[hop % 2], self.buffers[(hop + 1) % 2], self.stride, self.group
        )


class _FollowingGradient:
    """dK|dV of the keys in hand.

    It is computed while the other ranks' sum arrives, added to it, and sent on.
    """

    def __init__(self, home: Tensor, group: str, stride: int, hops: int):
        self.home = home
        self.group = group
        self.stride = stride
        self.hops = hops
        self.works: list[dist.Work] = []
        self.buffers = [torch.empty_like(home) for _ in range(min(hops, 2) + 1)] if hops else []

    def blank(self, hop: int) -> Tensor:
        """Return zeros for this rank's part of the gradient of the keys at `hop`."""
        self.mine = self.buffers[0 if hop == 1 else 2].zero_()
        return self.mine

    def depart(self, hop: int) -> None:
        """Add the sum that arrived to this rank's part; pass it on, or home after the last
        hop.
        """
        _wait(self.works)
        here = self.buffers[(hop - 1) % 2]
        next_ = self.buffers[hop % 2]
        if hop > 1:
            here += self.mine
        step = 1 if hop < self.hops else -self.hops
        self.works = _shift(here, next_, step * self.stride, self.group)
        self.arriving = next_

    def come_home(self) -> None:
        """Add the other ranks' gradients of this rank's keys."""
        _wait(self.works)
        if self.hops:
            self.home += self.arriving


def _shift(send: Tensor, receive: Tensor, step: int, name: str) -> list[dist.Work]:
    """Start sending to rank + step and receiving from rank − step of the named group."""
    group = group_named(name)
    rank = group.rank()
    size = group.size()
    to = (rank + step) % size
    from_ = (rank - step) % size
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=group, group_peer=to),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=from_),
        ]
    )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
