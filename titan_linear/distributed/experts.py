"""Expert parallelism: tokens travel to the ranks that have their experts."""

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
    """Leave each of `ranks` an equal share of the experts of every layer, in place.

    The other ranks send tokens to them.

    Returns:
        The names of the parameters that are distributed.
    """
    shared = set()
    # One object for all layers, because their compiled code refers to it.
    dispatch = partial(AllToAllDispatch, ranks)
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            for name in dict(layer.mlp.experts.named_parameters()):
                shard_parameter(layer.mlp.experts, name, 0, ranks.size, ranks.rank)
                shared.add(f"layers.{i}.mlp.experts.{name}")
            layer.mlp.dispatch = dispatch
    return frozenset(shared)


class AllToAllDispatch:
    """Tokens on their way to the ranks that have their experts.

    The interface is defined by `LocalDispatch` in models/mlps/moe.py.

    A token travels once to each rank that has some of its experts, with these experts and
    their weights; the sum of their outputs comes back. With 8 experts per token over 4
    ranks, 2.7 rows travel per token; if each expert received its own row, it would be 6.
    Every token travels, however many an expert receives. The host reads the numbers of rows
    once, in forward.

    The compiler skips all of this. Otherwise it would compile each function separately, for
    each use and number of rows, until it gives up.
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
        """Send the tokens.

        Arguments are the same as for `LocalDispatch`, which takes what arrives.
        """
        # Number of experts per rank.
        here = len(counts) // ranks.size
        # Which ranks want which tokens, [ranks, N]; the ranks then agree on numbers of
        # rows.
        wanted = torch.zeros(ranks.size, len(x), dtype=torch.bool, device=x.device)
        wanted.scatter_(0, (experts // here).T, torch.ones_like(experts.T, dtype=torch.bool))
        to, of, self.total, self.counts = _agree(counts, wanted, ranks)
        self.sizes = (to, of)
        self.group = ranks.group
        self.impl = impl
        # The place of each token's copy among the rows sent, ordered by receiver.
        places = wanted.flatten().cumsum(0).view_as(wanted) - 1
        # A token's j-th copy is for rank j.
        self.sent = by_slot(places.where(wanted, -1).T.contiguous(), sum(to))
        # A row's experts travel with their weights; the receiver counts them from its first
        # expert.
        choices = torch.cat([weights, experts.to(weights.dtype)], 1)
        self.first = here * ranks.rank
        self.pending: list[dist.Work] = []
        self.choices, self.arriving = (
            _Exchange.apply(spread(rows, self.sent, impl), to, of, self.group, self.pending)
            for rows in (choices, x)
        )

    @torch.compiler.disable
    def arrived(self) -> tuple[Tensor, Copies, Tensor, Tensor]:
        """Wait for the tokens and return them as arguments of `Experts`."""
        while self.pending:
            self.pending.pop(0).wait()
        # Experts of other ranks become -1.
        weights, experts = self.choices.chunk(2, 1)
        experts = experts.detach().long() - self.first
        experts = experts.where((experts >= 0) & (experts < len(self.counts)), -1)
        return LocalDispatch(self.arriving, experts, weights, self.counts, self.total).arrived()

    @torch.compiler.disable
    def back(self, y: Tensor) -> Tensor:
        """Return the sum of outputs of each token sent, given the sums for arrived tokens."""
        return _Return.apply(y, self.sent, *self.sizes, self.group, self.impl)


@partial(kept, modes=MODES)
def _agree(
    counts: Tensor, wanted: Tensor, ranks: Ranks
) -> tuple[list[int], list[int], int, Tensor]:
    """Exchange the numbers of rows between ranks.

    Args:
        counts: copies for each expert, [E].
        wanted: tokens for each rank, [ranks, N].

    Returns:
        Numbers of tokens to each rank, of tokens from each rank, and of copies here; and
        copies for each of this rank's experts [own experts].
    """
    # One row per receiver: copies for each of its experts, then its tokens.
    sent = torch.cat([counts.unflatten(0, (ranks.size, -1)), wanted.sum(1, keepdim=True)], 1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group_named(ranks.group))
    # One copy to the host for all numbers.
    own = came[:, :-1].sum(0)
    *rows, copies = torch.cat([sent[:, -1], came[:, -1], own.sum(0, keepdim=True)]).tolist()
    return rows[: ranks.size], rows[ranks.size :], copies, own


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows that has started when this returns.

    The work appended to `pending` waits for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: list[int],
        receive: list[int],
        group: str,
        pending: list[dist.Work],
    ):
        ctx.sizes = (receive, send)
        ctx.group = group
        out = x.new_empty(sum(receive), *x.shape[1:])
        work = dist.all_to_all_single(
            out,
            x.contiguous(),
            receive,
            send,
            group=group_named(group),
            async_op=True,
        )
        pending.append(work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_first_derivative()
        send, receive = ctx.sizes
        return all_to_all(grad.contiguous(), send, receive, ctx.group), None, None, None, None


class _Return(torch.autograd.Function):
    """Sends rows back and sums them for each token.

    Recomputation stops at the last tensor that autograd saves. `ctx` therefore holds what
    backward needs directly, so that no row is sent back twice.
    """

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
