"""What every loss is, and is given; and how one learns what a document's tokens are together worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from titan_linear.models.plan import BatchPlan
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits, Rows
from titan_linear.ops.exchange.collectives import gather_along


class Targets(Protocol):
    """The part of a micro-batch that one rank computes."""

    labels: Tensor  # [1, T] int64, −100 where there is nothing to predict
    columns: dict[str, Tensor]  # [1, T] or [1, T, n] each
    num_documents: int  # more than any number in the column "document"
    plan: BatchPlan


class Loss(Protocol):
    group: ClassVar[int] = 0  # documents whole in one stream: 1, or 2 that follow each other; 0: streams cut them
    columns: tuple[str, ...] = ()  # that it reads beside "weights"
    reports: ClassVar[tuple[str, ...]] = ()  # further means, by the same weights

    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        """The sum of its terms on this rank; [1 + reports] with those of its reports."""


def column(batch: Targets, name: str, like: Tensor) -> Tensor:
    """[T] or [T, n], in the dtype of `like`."""
    return batch.columns[name][0].to(like.dtype)


def logprobs(logits: ChunkedLogits, labels: Tensor) -> Tensor:
    """log p of labels [T], 0 where there is none; without a gradient."""
    found = torch.zeros_like(labels, dtype=torch.promote_types(logits.x.dtype, torch.float32))

    def keep(rows: Rows, tokens: slice) -> Tensor:
        found[tokens] = rows.logprobs[:, 0]
        return rows.lse

    with torch.no_grad():
        replace(logits, token_losses=None, more=()).sum(labels, keep)
    return found.masked_fill(labels == IGNORE, 0)


def through_documents(
    logits: ChunkedLogits, batch: Targets, columns: list[Tensor], of_sums: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """A loss of sums over documents, which may lie on several ranks.

    of_sums: the sums [documents] of log p, of each column [T] and of the tokens with a label → loss and reports [m].
    Returns: these, on the first of the ranks that share the documents, elsewhere zeros; and what the loss changes by
    with each token's log p, [T]. This costs one pass over the head: the gradient is that of Σ slopes · log p.
    """
    labels = batch.labels.flatten()
    found = logprobs(logits, labels)
    document = batch.columns["document"].flatten()
    valid = (labels != IGNORE).double()
    rows = torch.stack([found.double(), *(x.double() for x in columns), valid]) * valid
    sums = rows.new_zeros(len(rows), batch.num_documents).index_add_(1, document, rows)
    context = batch.plan.cp_context
    if context is not None and context.ranks.world_size > 1:
        sums = gather_along(sums.unsqueeze(0), 0, context.ranks.group_name, context.ranks.world_size).sum(0)
    with torch.enable_grad():
        of_policy = sums[0].requires_grad_()
        numbers = of_sums(of_policy, *sums[1:])
        (slope,) = torch.autograd.grad(numbers[0], of_policy)
    first = (context is None or context.ranks.rank == 0) and (logits.ranks is None or logits.ranks.rank == 0)
    return numbers.detach().to(found.dtype) * first, (slope[document] * valid).to(found.dtype)
