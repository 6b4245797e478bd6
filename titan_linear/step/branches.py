"""Prefix trees in a rank's part of a batch: branches, later tokens, and documents as paths.

A token that several tokens continue has several labels. The first label stands in the
token's own row. Every other target is a *branch*: the loss reads the parent token's row of
logits once more for it. Branches stand behind the rows of all tokens, so labels and columns
have `T_local + branches` entries.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from titan_linear.data import IGNORE, Batch
from titan_linear.data.corpus.tree_records import BACK, SHARE
from titan_linear.losses.loss import DocumentPaths, LocalBatch
from titan_linear.models.plan import Later
from titan_linear.ops import CPContext


def has_trees(batch: Batch) -> bool:
    return BACK in batch.columns


def with_branches(local: LocalBatch, batch: Batch) -> LocalBatch:
    """Append the labels and columns of branches to this rank's labels and columns."""
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
    """Find the branches whose parent tokens lie on this rank.

    Returns:
        Two int64 tensors of shape [branches]: the local rows of the parent tokens, and the
        positions of the targets in the batch.
    """
    # Branch targets: tokens with a label weight that do not directly follow their parent.
    back = batch.columns[BACK][0]
    is_target = batch.columns["weights"][0].roll(1) > 0
    targets = ((back > 1) & is_target).nonzero().flatten()
    parents = (targets - back[targets]).numpy()
    # Keep the branches whose parent lies in a fragment that this rank owns.
    fragment_length = context.cut.fragment_length
    mine = context.cut.owners[parents // fragment_length] == context.ranks.rank
    return torch.from_numpy(context.cut.rows(parents)[mine]), targets[mine]


def zero_without_label(column: Tensor, labels: Tensor) -> Tensor:
    """Set a column [1, T] or [1, T, n] to 0 where labels [1, T] are IGNORE."""
    without = labels == IGNORE
    return column.masked_fill(without.view(*without.shape, *[1] * (column.dim() - 2)), 0)


def later_in_trees(local: LocalBatch, depth: int) -> Later:
    """Build the tokens, labels and weights of `Later` for prefix trees, for k = 1 … depth.

    In trees the hidden states are shifted instead of the tokens: entry t is combined with
    the hidden state of the token k before it. The entry therefore counts once its position
    in the document is k or more.
    """
    positions = local.context.position_ids
    positions = torch.cat([positions, positions[local.branches]])  # [T_local + branches]
    inside = positions >= torch.arange(1, depth + 1).unsqueeze(1)  # [depth, T_local + branches]
    return Later(
        local.tokens.expand(depth, -1),
        local.labels.where(inside, IGNORE),
        local.columns["weights"].where(inside, 0),
    )


def paths_of(batch: Batch) -> DocumentPaths:
    """List the tree nodes that each document (a path from a root to a leaf) contains."""
    trees = batch.trees
    seq_len = batch.tokens.numel() // batch.num_streams
    leaves = trees.leaves
    begins = trees.edges[:-1]
    # Number the nodes and the leaves' documents as the columns of the batch do.
    node_names, _ = _numbered(begins // seq_len)
    documents, count = _numbered(begins[leaves] // seq_len)
    number, node = trees.on_paths(leaves)
    # SHARE sums over all documents that contain a token, which at a leaf is one document.
    # The quotient is therefore this document's part of the node's weights.
    share = batch.columns[SHARE][0].numpy()[begins]
    return DocumentPaths(
        nodes=torch.from_numpy(node_names[node]),
        documents=torch.from_numpy(documents[number]),
        share=torch.from_numpy(share[leaves][number] / share[node]),
        num_documents=count,
    )


def _numbered(streams: np.ndarray) -> tuple[np.ndarray, int]:
    """Number documents by stream, as `Batch` does: every stream begins at an even number.

    Args:
        streams: the stream of each document.

    Returns:
        The numbers, and an even count that is greater than every number.
    """
    odd = np.bincount(streams) % 2
    added_before = np.cumsum(odd) - odd
    return np.arange(len(streams)) + added_before[streams], len(streams) + int(odd.sum())
