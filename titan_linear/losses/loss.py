"""What every loss is, and is given; and sums over documents, which ranks may share: a loss that needs them passes over
the head twice."""

from __future__ import annotations

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
    branches: list[Tensor] | None  # of prefix trees: further rows, their labels and weights, [.] each
    plan: BatchPlan


class Loss(Protocol):
    group: ClassVar[int] = 0  # documents whole in one stream: 1, or 2 that follow each other; 0: streams cut them
    columns: tuple[str, ...] = ()  # that it reads beside "weights"
    reports: ClassVar[tuple[str, ...]] = ()  # further means, by the same weights
    reads_twice: bool = False  # it passes over the head for sums over documents first, without gradients

    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        """The sum of its terms on this rank; [1 + reports] with those of its reports."""


def column(batch: Targets, name: str, like: Tensor) -> Tensor:
    """[T] or [T, n], in the dtype of `like`."""
    return batch.columns[name][0].to(like.dtype)


def with_branches(logits: ChunkedLogits, batch: Targets) -> tuple[ChunkedLogits, Tensor, Tensor | None]:
    """Logits, labels [T] and weights [T]; with the further targets of branching points behind those of the tokens."""
    labels = batch.labels.flatten()
    weights = batch.columns["weights"].flatten() if "weights" in batch.columns else None
    if batch.branches is None:
        return logits, labels, weights
    rows, *targets = batch.branches
    labels, weights = (torch.cat(x) for x in zip((labels, weights), targets))
    return replace(logits, x=torch.cat([logits.x, logits.x[rows]])), labels, weights


def logprobs(logits: ChunkedLogits, ids: Tensor) -> Tensor:
    """log p of ids [T] or [T, k], 0 where the first of a token's is no label; without a gradient."""
    found = torch.zeros_like(ids, dtype=torch.promote_types(logits.x.dtype, torch.float32))

    def keep(rows: Rows, tokens: slice) -> Tensor:
        found[tokens] = rows.logprobs.view_as(found[tokens])
        return rows.lse

    with torch.no_grad():
        replace(logits, token_losses=None, more=()).sum(ids, keep)
    return found.masked_fill(ids == IGNORE, 0)


def document_sums(batch: Targets, *numbers: Tensor) -> Tensor:
    """For each document, whichever ranks it lies on: how many labels it has, and the sums of these numbers [T], which
    are 0 where there is no label. [1 + numbers, documents] float64."""
    rows = torch.stack([(batch.labels[0] != IGNORE).double(), *(x.double() for x in numbers)])
    sums = rows.new_zeros(len(rows), batch.num_documents).index_add_(1, batch.columns["document"][0], rows)
    context = batch.plan.cp_context
    if context is not None and context.ranks.world_size > 1:
        sums = gather_along(sums.unsqueeze(0), 0, context.ranks.group_name, context.ranks.world_size).sum(0)
    return sums
