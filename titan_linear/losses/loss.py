"""Interface of losses, and sums over documents that ranks may share.

A loss that needs such sums passes over the head twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_linear.config import Section
from titan_linear.models.plan import BatchPlan, Later
from titan_linear.ops import CPContext
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.ops.exchange.collectives import gather_along


class DocumentPaths(NamedTuple):
    """The nodes of prefix trees in each document.

    There is one entry per pair of document and node.
    """

    # [.] int64, numbered as in the column "document"
    nodes: Tensor
    # [.] int64: a document that contains the node
    documents: Tensor
    # [.] float64: this document's share of the node's token weights
    share: Tensor
    num_documents: int


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The part of a micro-batch that one rank computes. `step/cut.py` builds it in stages."""

    tokens: Tensor  # [1, T_local] int64
    # [1, T_local + branches] int64; −100 where there is nothing to predict
    labels: Tensor
    columns: dict[str, Tensor]  # like labels, or [1, T_local + branches, n]
    streams: tuple[int, ...]  # global indices, for error messages
    # Greater than every number in the column "document".
    num_documents: int = 0
    # The layout: which tokens of the batch these are.
    context: CPContext | None = None
    # [branches] int64, for prefix trees: rows of logits that are read again
    branches: Tensor | None = None
    # For prefix trees, where the column "document" numbers nodes.
    paths: DocumentPaths | None = None
    # Targets of layers that predict later tokens.
    later: Later | None = None
    # Plan for the mixers, built once everything else is on the device.
    plan: BatchPlan | None = None
    # Of the whole micro-batch, if it was cut by `Session.cut`: number of tokens, and sum of
    # the label weights.
    num_tokens: int = 0
    weight: float = 0.0


@dataclass(frozen=True)
class LossFunction(ABC):
    chosen_by = "loss.name"
    # The loss's value of loss.name.
    name: ClassVar[str]
    # Its keys: the configuration section named after the loss, or, of a registered loss, the
    # table loss.options.
    section: ClassVar[type[Section]] = Section
    keys: Any
    # Documents that must lie whole in one stream: 1, or 2 for adjacent pairs. 0: streams
    # may cut documents.
    group: ClassVar[int] = 0
    # Columns that the loss reads in addition to "weights", and the most numbers per token in
    # each; 0: one number.
    columns: ClassVar[Mapping[str, int]] = {}
    unit: ClassVar[str] = "nats per token"
    # Captions of further means that it reports, with the same weights.
    reports: ClassVar[dict[str, str]] = {}
    # Whether it first passes over the head without gradients, for sums over documents.
    reads_twice: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        """Return the sum of the loss's terms on this rank; [1 + reports] if it has reports."""

    def terms(self, loss: Tensor, **reports: Tensor) -> Tensor:
        """Return tokens' losses and reports [n] as `ChunkedLogits.sum` takes them."""
        return torch.stack([loss, *(reports[name] for name in self.reports)], 1)


def column(batch: LocalBatch, name: str, like: Tensor) -> Tensor:
    """Return a column as [T] or [T, n], in the dtype of `like`."""
    return batch.columns[name][0].to(like.dtype)


def logprobs(logits: ChunkedLogits, ids: Tensor) -> Tensor:
    """Return log p of ids [T] or [T, k], without a gradient; 0 where the id is IGNORE."""
    return logits.rows(ids).logprobs.view_as(ids).masked_fill(ids == IGNORE, 0)


class DocumentSums(NamedTuple):
    """Sums over the labeled tokens of each document, [documents] float64."""

    weights: Tensor
    count: Tensor  # number of labels
    numbers: dict[str, Tensor]

    @property
    def length(self) -> Tensor:
        """Number of labels, at least 1: the divisor of means."""
        return self.count.clamp(min=1)


def document_sums(batch: LocalBatch, **numbers: Tensor) -> DocumentSums:
    """Sum numbers [T] over each document, whichever ranks it lies on.

    Entries without a label do not count.
    """
    # Sum over this rank's tokens of each document.
    labelled = batch.labels[0] != IGNORE
    columns = batch.columns["weights"][0], labelled, *numbers.values()
    rows = torch.stack([x.double() for x in columns]).where(labelled, 0)
    sums = rows.new_zeros(len(rows), batch.num_documents).index_add_(
        1, batch.columns["document"][0], rows
    )
    # Add the sums of all cp ranks.
    context = batch.plan.cp_context
    if context is not None and context.ranks.world_size > 1:
        sums = gather_along(
            sums.unsqueeze(0), 0, context.ranks.group_name, context.ranks.world_size
        ).sum(0)
    # In prefix trees these are sums over nodes: add the nodes of each document's path.
    if paths := batch.paths:
        of_paths = sums[:, paths.nodes]
        of_paths[0] *= paths.share
        sums = sums.new_zeros(len(sums), paths.num_documents)
        sums.index_add_(1, paths.documents, of_paths)
    weights, count, *sums_of_numbers = sums
    return DocumentSums(weights, count, dict(zip(numbers, sums_of_numbers, strict=True)))


def of_documents(
    batch: LocalBatch, slopes: Tensor, **values: Tensor
) -> Callable[[Tensor, slice], dict[str, Tensor]]:
    """Return a function that distributes document values in proportion to token weight.

    Args:
        slopes: [documents], the derivative of the first value by each token's log p.
        values: [documents] each.

    Returns:
        A function of log p [n] and the tokens' slice to the values of these tokens, [n]
        each. Their sum over all tokens is the weighted value; the first has the gradient
        that `slopes` prescribes.
    """
    columns = torch.stack([*values.values()], 1)
    # In prefix trees, add up the values of all documents that contain a node.
    if paths := batch.paths:
        columns, slopes = (
            x.new_zeros(batch.num_documents, *x.shape[1:]).index_add_(0, paths.nodes, x)
            for x in (columns[paths.documents] * paths.share.unsqueeze(1), slopes[paths.documents])
        )
    # Spread the values over the tokens of each document or node.
    document = batch.columns["document"][0]
    columns = batch.columns["weights"][0].unsqueeze(1) * columns[document]
    slopes = slopes[document]

    def terms(logp: Tensor, tokens: slice) -> dict[str, Tensor]:
        # The first value's difference term is 0, but carries the gradient.
        first, *others = columns[tokens].to(logp.dtype).unbind(1)
        first = first + slopes[tokens].to(logp.dtype) * (logp - logp.detach())
        return dict(zip(values, [first, *others], strict=True))

    return terms
