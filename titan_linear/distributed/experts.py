"""Expert parallelism: tokens travel to the ranks that have their experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.parts import shard_parameter
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import LocalDispatch, MoE
from titan_linear.ops.exchange.collectives import Ranks, all_to_all, group_named
from titan_linear.ops.experts import Copies, by_slot, collect, spread
from titan_linear.ops.runtime.operators import MODES, check_first_derivative, kept
from titan_linear.ops.runtime.support import Choice


def apply_ep(model: Decoder, ranks: Ranks) -> frozenset[str]:
    """Leave each of `ranks` an equal share of the experts of every layer, to which the others send tokens. In place.
    Returns the names of the parameters that are shared out."""
    shared = set()
    # one for all layers: their compiled code refers to it
    dispatch = partial(AllToAllDispatch, ranks)
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            for name in dict(layer.mlp.experts.named_parameters()):
                shard_parameter(layer.mlp.experts, name, 0, ranks.size, ranks.rank)
                shared.add(f"layers.{i}.mlp.experts.{name}")
            layer.mlp.dispatch = dispatch
    return frozenset(shared)


class AllToAllDispatch:
    """Tokens on their way to the ranks that have their experts. See `LocalDispatch` in models/mlps/moe.py.

    To each rank that has some of a token's experts the token goes once, with its experts there and their weights; back
    comes the sum of their outputs. With 8 experts a token among 4 ranks 2.7 rows travel, and would be 6 if each expert
    had its own. Every token travels, however many an expert gets. The host reads these numbers once, in forward.

    The compiler leaves all of it alone: it would compile each function by itself, for each use and number of rows,
    until it gives up.
    """

    @torch.compiler.disable
    def __init__(
        self,
        ranks: Ranks,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        counts: Tensor,
        impl: str | Choice = "auto",
    ):
        """As `LocalDispatch`, which takes what comes."""
        here = len(counts) // ranks.size  # experts of a rank
        wanted = torch.zeros(ranks.size, len(x), dtype=torch.bool, device=x.device)
        wanted.scatter_(0, (experts // here).T, torch.ones_like(experts.T, dtype=torch.bool))
        to, of, self.total, self.counts = _agree(counts, wanted, ranks)
        self.sizes, self.group, self.impl = (to, of), ranks.group, impl
        places = wanted.flatten().cumsum(0).view_as(wanted) - 1
        # a token's j-th copy is for rank j
        self.sent = by_slot(places.where(wanted, -1).T.contiguous(), sum(to))
        # A row's experts, which its receiver numbers from its first, travel with their weights.
        choices = torch.cat([weights, experts.to(weights.dtype)], 1)
        self.first = here * ranks.rank
        self.pending: list[dist.Work] = []
        self.choices, self.arriving = (
            _Exchange.apply(spread(given, self.sent, impl), to, of, self.group, self.pending)
            for given in (choices, x)
        )

    @torch.compiler.disable
    def arrived(self) -> tuple[Tensor, Copies, Tensor, Tensor]:
        """The tokens that have come, as `Experts` takes them."""
        while self.pending:
            self.pending.pop(0).wait()
        weights, experts = self.choices.chunk(2, 1)
        experts = experts.detach().long() - self.first
        experts = experts.where((experts >= 0) & (experts < len(self.counts)), -1)
        return LocalDispatch(self.arriving, experts, weights, self.counts, self.total).arrived()

    @torch.compiler.disable
    def back(self, y: Tensor) -> Tensor:
        """Sums of outputs for `arrived()` → those of each token that this rank gave."""
        return _Return.apply(y, self.sent, *self.sizes, self.group, self.impl)


@partial(kept, modes=MODES)
def _agree(
    counts: Tensor, wanted: Tensor, ranks: Ranks
) -> tuple[list[int], list[int], int, Tensor]:
    """Copies for each expert [E] and tokens for each rank [ranks, N] -> numbers of tokens to each rank, of tokens from
    each rank, of copies here, and of the latter for each of this rank's experts [own experts]."""
    # by receiver
    sent = torch.cat([counts.unflatten(0, (ranks.size, -1)), wanted.sum(1, keepdim=True)], 1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group_named(ranks.group))
    own = came[:, :-1].sum(0)
    *rows, copies = torch.cat([sent[:, -1], came[:, -1], own.sum(0, keepdim=True)]).tolist()
    return rows[: ranks.size], rows[ranks.size :], copies, own


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows that has begun when this returns; the work that is appended to `pending` waits for it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: list[int],
        receive: list[int],
        group: str,
        pending: list[dist.Work],
    ):
        ctx.sizes, ctx.group = (receive, send), group
        out = x.new_empty(sum(receive), *x.shape[1:])
        work = dist.all_to_all_single(
            out, x.contiguous(), receive, send, group=group_named(group), async_op=True
        )
        pending.append(work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_first_derivative()
        send, receive = ctx.sizes
        return all_to_all(grad.contiguous(), send, receive, ctx.group), None, None, None, None


class _Return(torch.autograd.Function):
    """Rows go back and are added up. Recomputation ends with the last tensor that autograd saves: `ctx` has what
    backward needs, so that no row goes back twice."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        sent: Copies,
        to: list[int],
        of: list[int],
        group: str,
        impl: str | Choice,
    ):
        ctx.how = sent, to, of, group, impl
        return collect(all_to_all(y.contiguous(), of, to, group), sent, impl)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        sent, to, of, group, impl = ctx.how
        return all_to_all(spread(grad, sent, impl), to, of, group), *[None] * 5
