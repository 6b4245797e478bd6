"""Prefix trees in a rank's part of a batch: branches, further tokens, and documents as paths.

A token that several tokens continue has several labels. The first of these stands at the token's own
row; every other target is a *branch*, whose row of logits the loss reads once more, behind the rows
of all tokens. Labels and columns therefore have `T_local + branches` entries.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from titan_linear.data import IGNORE, Batch
from titan_linear.data.corpus.trees import BACK, SHARE
from titan_linear.losses.loss import LocalBatch, Paths
from titan_linear.models.plan import Later
from titan_linear.ops import CPContext


def has_trees(batch: Batch) -> bool:
    return BACK in batch.columns


def with_branches(local: LocalBatch, batch: Batch) -> LocalBatch:
    """Append labels and columns of branches to those of this rank's tokens."""
    rows, targets = branches_of(batch, local.context)
    labels = torch.cat([local.labels, batch.tokens[:, targets]], 1)
    columns = {}
    for name, column in local.columns.items():
        # A column's entry for predicting a target stands one place before it.
        further = batch.columns[name][:, targets - 1]
        columns[name] = zero_without_label(torch.cat([column, further], 1), labels)
    paths = paths_of(batch) if "document" in columns else None
    return replace(local, labels=labels, columns=columns, branches=rows, paths=paths)


def branches_of(batch: Batch, context: CPContext) -> tuple[Tensor, Tensor]:
    """Find the branches whose parent tokens this rank has.

    Returns: local rows of the parent tokens [branches], and positions in the batch of the targets
        [branches], both int64.
    """
    back = batch.columns[BACK][0]
    is_target = batch.columns["weights"][0].roll(1) > 0
    targets = ((back > 1) & is_target).nonzero().flatten()
    parents = (targets - back[targets]).numpy()
    fragment_length = context.cut.fragments[0].end
    mine = context.cut.owners[parents // fragment_length] == context.ranks.rank
    return torch.from_numpy(context.cut.rows(parents)[mine]), targets[mine]


def zero_without_label(column: Tensor, labels: Tensor) -> Tensor:
    """Set a column [1, T] or [1, T, n] to 0 where labels [1, T] are IGNORE."""
    without = labels == IGNORE
    return column.masked_fill(without.view(*without.shape, *[1] * (column.dim() - 2)), 0)


def later_in_trees(local: LocalBatch, depth: int) -> Later:
    """Tokens, labels and weights as `Later` has them in trees, where a token's own entries count
    once its position is k or more: its hidden states are then those of the token k before."""
    positions = local.context.position_ids
    positions = torch.cat([positions, positions[local.branches]])  # [T_local + branches]
    inside = positions >= torch.arange(1, depth + 1).unsqueeze(1)  # [depth, T_local + branches]
    return Later(
        local.tokens.expand(depth, -1),
        local.labels.where(inside, IGNORE),
        local.columns["weights"].where(inside, 0),
    )


def paths_of(batch: Batch) -> Paths:
    """Which nodes each document, a path from a root to a leaf, holds."""
    nodes = batch.nodes
    seq_len = batch.tokens.numel() // batch.num_streams
    leaves, begins = nodes.leaves, nodes.edges[:-1]
    node_names, _ = _numbered(begins // seq_len)
    documents, count = _numbered(begins[leaves] // seq_len)
    number, node = nodes.on_paths(leaves)
    share = batch.columns[SHARE][0].numpy()[begins]
    return Paths(
        nodes=torch.from_numpy(node_names[node]),
        documents=torch.from_numpy(documents[number]),
        share=torch.from_numpy(share[leaves][number] / share[node]),
        num_documents=count,
    )


def _numbered(streams: np.ndarray) -> tuple[np.ndarray, int]:
    """Number documents, given each one's stream, so that every stream begins at an even number, as
    `Batch` numbers them. Returns the numbers, and one more than the highest rounded up to even."""
    odd = np.bincount(streams) % 2
    added_before = np.cumsum(odd) - odd
    return np.arange(len(streams)) + added_before[streams], len(streams) + int(odd.sum())
