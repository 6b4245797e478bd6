"""Any function of log-probabilities as a loss.

A first pass over the head computes log p of each label, and cp ranks share them. Every rank
then differentiates the function of the whole micro-batch. Its derivatives are the slopes of
a second pass, which is linear in log p: gradients are exact however tokens are split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_linear.losses.loss import LocalBatch, LossFunction
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics
from titan_linear.ops.exchange.stream import gather_stream, take_fragments


@dataclass(frozen=True)
class FunctionLoss(LossFunction):
    # Maps log p [T] of the micro-batch's labels to a scalar, or to terms to add up.
    keys: Callable[..., Tensor]
    # Divides the logits.
    temperature: float = 1.0
    # Whether the function also gets the entropy [T] of each label's distribution, for
    # reports: its gradient must be 0.
    entropy: bool = False
    reads_twice = True

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        context = batch.context
        logits = tempered(logits, self.temperature)
        # First pass: log p of the whole micro-batch, in its order.
        first_pass = logits.rows(labels, statistics=self.entropy)
        leaves = [x.requires_grad_() for x in whole_numbers(first_pass, batch)]
        with torch.enable_grad():
            value = self.keys(*leaves).sum()
        slopes, *others = torch.autograd.grad(value, leaves, materialize_grads=True)
        if any(x.any() for x in others):
            raise ValueError(
                "the loss depends on the entropy, whose gradient by the logits is not computed; set the entropy's "
                "coefficient (actor.entropy_coeff) to 0"
            )
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


def tempered(logits: ChunkedLogits, temperature: float) -> ChunkedLogits:
    """Divide the logits by a temperature."""
    return logits if temperature == 1 else replace(logits, x=logits.x / temperature)


def whole_numbers(rows: LogitStatistics, batch: LocalBatch) -> list[Tensor]:
    """Return log p and, if `rows` have it, the entropy of each label of the micro-batch.

    They are [T], in the order of the micro-batch, on every cp and tp rank; 0 where there is
    no label.
    """
    labels = batch.labels.flatten()
    numbers = [rows.logprobs[:, 0]]
    if rows.entropy is not None:
        numbers.append(rows.entropy)
    return [gather_stream(x.masked_fill(labels < 0, 0), batch.context) for x in numbers]
