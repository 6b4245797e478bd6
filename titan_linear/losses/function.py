"""Any function of log-probabilities as a loss.

A first pass over the head computes log p of each label, and cp ranks share them. Every rank
then differentiates the function of the whole micro-batch. Its derivatives are the slopes of
a second pass, which is linear in log p: gradients are exact however tokens are split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_linear.losses.loss import LocalBatch, LossFunction
from titan_linear.ops import CPContext
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics
from titan_linear.ops.exchange.collectives import gather_along


class FunctionLoss(LossFunction):
    # Maps log p [T] of the micro-batch's labels to a scalar, or to terms to add up.
    keys: Callable[[Tensor], Tensor]
    reads_twice = True

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        context = batch.context
        # First pass: log p of the whole micro-batch, in its order.
        known = logits.rows(labels)
        logp = known.logprobs[:, 0].masked_fill(labels < 0, 0)
        leaf = of_stream(logp, context).requires_grad_()
        with torch.enable_grad():
            value = self.keys(leaf).sum()
        (slopes,) = torch.autograd.grad(value, leaf)
        slopes = of_fragments(slopes.unsqueeze(0), context)[0]

        # Second pass: each term is 0, and has the function's slope.
        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            logp = rows.logprobs[:, 0]
            return slopes[tokens] * (logp - logp.detach())

        total = logits.sum(labels, terms, rows=known)
        # All cp and tp ranks have the value: the first of them counts it.
        tp_rank = logits.ranks.rank if logits.ranks else 0
        counts = context.ranks.rank + tp_rank == 0
        return total + value.detach() * counts


def of_stream(x: Tensor, context: CPContext) -> Tensor:
    """Join the cp ranks' numbers [T_local], on every rank, in the stream's order [T]."""
    ranks = context.ranks
    order = context.cut.order
    if ranks.world_size == 1:
        return x
    parts = gather_along(x, 0, ranks.group_name, ranks.world_size)
    return parts.view(len(order), -1)[list(order)].flatten()


def of_fragments(x: Tensor, context: CPContext) -> Tensor:
    """Select this rank's fragments.

    Shapes are [1, T, ...] → [1, T_local, ...], or [depth, T] → [depth, T_local].
    """
    if context.ranks.world_size == 1:
        return x
    return torch.cat([x[:, start:end] for start, end in context.fragments], 1)
