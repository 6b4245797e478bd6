"""Expert parallelism: rows travel to the ranks that have their experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.parts import shard_parameter
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import MoE
from titan_linear.ops.exchange.collectives import Ranks, all_to_all, group_named
from titan_linear.ops.runtime.operators import MODES, check_first_derivative, kept


def apply_ep(model: Decoder, ranks: Ranks) -> frozenset[str]:
    """Leave each of `ranks` an equal share of the experts of every layer, to which the others send rows. In place.
    Returns the names of the parameters that are shared out."""
    shared = set()
    dispatch = partial(AllToAllDispatch, ranks)  # one for all layers: their compiled code refers to it
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            for name in dict(layer.mlp.experts.named_parameters()):
                shard_parameter(layer.mlp.experts, name, 0, ranks.size, ranks.rank)
                shared.add(f"layers.{i}.mlp.experts.{name}")
            layer.mlp.dispatch = dispatch
    return frozenset(shared)


class AllToAllDispatch:
    """Rows on their way to the ranks that have their experts. See `LocalDispatch` in models/mlps/moe.py.

    Every row travels, however many an expert gets. The host reads these numbers once, in forward.
    """

    def __init__(self, ranks: Ranks, rows: Tensor, counts: Tensor):
        """rows [M, dim] in the order of their experts; counts [E] int64."""
        to, of, came = _agree(counts, ranks)
        self.sizes, self.group = (to, of), ranks.group
        self.counts = came.sum(0)  # [own experts]
        own = torch.arange(came.shape[1], device=rows.device).repeat(ranks.size)
        of_expert = own.repeat_interleave(came.flatten(), output_size=sum(of))  # the expert of each row that comes
        self.order = of_expert.argsort(stable=True)
        self.pending: list[dist.Work] = []
        self.arriving = _exchange(rows, to, of, ranks.group, self.pending)

    def rows(self) -> Tensor:
        """The rows that have come, in the order of this rank's experts."""
        self.pending.pop().wait()
        return self.arriving[self.order]

    def back(self, y: Tensor) -> Tensor:
        """Outputs of `rows()` → outputs of the rows that this rank gave, in their order."""
        to, of = self.sizes
        pending: list[dist.Work] = []
        out = _exchange(y[self.order.argsort()], of, to, self.group, pending)
        pending.pop().wait()
        return out


@torch.compiler.disable
@partial(kept, modes=MODES)
def _agree(counts: Tensor, ranks: Ranks) -> tuple[list[int], list[int], Tensor]:
    """Rows for each expert [E] -> numbers of rows to each rank, of rows from each rank, and of the latter for each of
    this rank's experts [ranks, own experts]."""
    sent = counts.unflatten(0, (ranks.size, -1)).contiguous()  # by receiver
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group_named(ranks.group))
    to, of = torch.stack([sent.sum(1), came.sum(1)]).tolist()
    return to, of, came


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows that has begun when this returns; the work that is appended to `pending` waits for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: str, pending: list[dist.Work]):
        ctx.sizes, ctx.group = (receive, send), group
        out = x.new_empty(sum(receive), *x.shape[1:])
        work = dist.all_to_all_single(out, x.contiguous(), receive, send, group=group_named(group), async_op=True)
        pending.append(work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_first_derivative()
        return all_to_all(grad.contiguous(), *ctx.sizes, ctx.group), None, None, None, None


_exchange = torch.compiler.disable(_Exchange.apply)
