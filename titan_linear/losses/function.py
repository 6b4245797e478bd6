"""Any function of log-probabilities as a loss.

A first pass over the head computes log p of each label, and cp ranks share them. Every rank
then differentiates the function of the whole micro-batch. Its derivatives are the slopes of
a second pass, which is linear in log p: gradients are exact however tokens are split.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_linear.losses.loss import LocalBatch, LossFunction
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics
from titan_linear.ops.exchange.stream import gather_stream, take_fragments


class FunctionLoss(LossFunction):
    # Maps log p [T] of the micro-batch's labels to a scalar, or to terms to add up.
    keys: Callable[[Tensor], Tensor]
    reads_twice = True

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        context = batch.context
        # First pass: log p of the whole micro-batch, in its order.
        first_pass = logits.rows(labels)
        logp = first_pass.logprobs[:, 0].masked_fill(labels < 0, 0)
        leaf = gather_stream(logp, context).requires_grad_()
        with torch.enable_grad():
            value = self.keys(leaf).sum()
        (slopes,) = torch.autograd.grad(value, leaf)
        slopes = take_fragments(slopes.unsqueeze(0), context)[0]

        # Second pass: each term is 0, and has the function's slope.
        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            logp = rows.logprobs[:, 0]
            return slopes[tokens] * (logp - logp.detach())

        total = logits.sum(labels, terms, rows=first_pass)
        # All cp and tp ranks have the value: the first of them counts it.
        tp_rank = logits.ranks.rank if logits.ranks else 0
        counts = context.ranks.rank + tp_rank == 0
        return total + value.detach() * counts
