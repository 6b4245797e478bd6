"""What every loss is, and is given; and sums over documents, which ranks may share: a loss that needs them passes over
the head twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_linear.models.plan import BatchPlan, Later
from titan_linear.ops import CPContext
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.ops.exchange.collectives import gather_along


class Paths(NamedTuple):
    """Which nodes of prefix trees the documents hold."""

    nodes: Tensor  # [.] int64, as the column "document" has them
    documents: Tensor  # [.] int64: of each of these, a document that holds it
    share: Tensor  # [.] float64: of the weights of its tokens, those in this document
    num_documents: int


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The part of a micro-batch that one rank computes. `step/cut.py` makes it, in stages."""

    tokens: Tensor  # [1, T_local] int64
    # [1, T_local + branches] int64, −100 where there is nothing to predict
    labels: Tensor
    columns: dict[str, Tensor]  # like labels, or [1, T_local + branches, n]
    streams: tuple[int, ...]  # global indices, for error messages
    num_documents: int = 0  # more than any number in the column "document"
    context: CPContext | None = None  # which tokens of the batch these are
    branches: Tensor | None = (
        None  # [branches] int64 of prefix trees: rows of logits that are read again
    )
    paths: Paths | None = None  # of prefix trees, whose nodes the column "document" has
    later: Later | None = None  # what layers that predict further tokens are trained on
    plan: BatchPlan | None = None  # what mixers read, once the rest is on the device


@dataclass(frozen=True)
class Loss(ABC):
    keys: Any  # the configuration's section of its name
    # documents whole in one stream: 1, or 2 that follow each other; 0: streams cut them
    group: ClassVar[int] = 0
    columns: ClassVar[tuple[str, ...]] = ()  # that it reads beside "weights"
    most_numbers: ClassVar[int] = 0  # for a token in each of these, which have equally many; 0: one
    unit: ClassVar[str] = "nats per token"
    reports: ClassVar[dict[str, str]] = {}  # further means, by the same weights, and their captions
    # it passes over the head for sums over documents first, without gradients
    reads_twice: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        """The sum of its terms on this rank; [1 + reports] with those of its reports."""


def column(batch: LocalBatch, name: str, like: Tensor) -> Tensor:
    """[T] or [T, n], in the dtype of `like`."""
    return batch.columns[name][0].to(like.dtype)


def logprobs(logits: ChunkedLogits, ids: Tensor) -> Tensor:
    """log p of ids [T] or [T, k], 0 where the first of a token's is no label; without a gradient."""
    return logits.rows(ids).logprobs.view_as(ids).masked_fill(ids == IGNORE, 0)


def document_sums(batch: LocalBatch, *numbers: Tensor) -> Tensor:
    """For each document, whichever ranks it lies on: its weights' sum, how many labels it has, and the sums of these
    numbers [T], where there is one. [2 + numbers, documents] float64."""
    labelled = batch.labels[0] != IGNORE
    columns = batch.columns["weights"][0], labelled, *numbers
    rows = torch.stack([x.double() for x in columns]).where(labelled, 0)
    sums = rows.new_zeros(len(rows), batch.num_documents).index_add_(
        1, batch.columns["document"][0], rows
    )
    context = batch.plan.cp_context
    if context is not None and context.ranks.world_size > 1:
        sums = gather_along(
            sums.unsqueeze(0), 0, context.ranks.group_name, context.ranks.world_size
        ).sum(0)
    if (paths := batch.paths) is None:
        return sums
    of_paths = sums[:, paths.nodes]
    of_paths[0] *= paths.share
    return sums.new_zeros(len(sums), paths.num_documents).index_add_(1, paths.documents, of_paths)


def of_documents(
    batch: LocalBatch, values: Tensor, slopes: Tensor
) -> Callable[[Tensor, slice], list[Tensor]]:
    """What tokens, by their log p, have of their documents' values [documents, m] by their weight in them, m × [n]; the
    first changes with each log p by the document's slope [documents]."""
    if paths := batch.paths:
        values, slopes = values[paths.documents] * paths.share.unsqueeze(1), slopes[paths.documents]
        values, slopes = (
            x.new_zeros(batch.num_documents, *x.shape[1:]).index_add_(0, paths.nodes, x)
            for x in (values, slopes)
        )
    document = batch.columns["document"][0]
    values, slopes = batch.columns["weights"][0].unsqueeze(1) * values[document], slopes[document]

    def terms(logp: Tensor, tokens: slice) -> list[Tensor]:
        first, *others = values[tokens].to(logp.dtype).unbind(1)
        return [first + slopes[tokens].to(logp.dtype) * (logp - logp.detach()), *others]

    return terms
