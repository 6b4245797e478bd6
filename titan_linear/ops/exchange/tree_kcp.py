"""KCP along the paths of prefix trees (ops/layout/tree_tables.py).

Forward, each point applies S ↦ M S + S_ext, from the roots down. Backward goes from the
leaves up. The gradient of the state that leaves a point is a sum over all entries that
begin from it: of dS_ext and, if the entry is a point, also of Mᵀ times the gradient of the
state that leaves it. All ranks gather the S_ext and M of shared points, and sum their
gradients over ranks. Everything else stays on its rank. The fold runs in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.exchange.collectives import add_rows, group_named, start_all_gather
from titan_linear.ops.exchange.folds import act
from titan_linear.ops.layout.tree_tables import Fold
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator


def _folded(S_ext: Tensor, M: Tensor, tables: list[Tensor], group: str, reverse: bool) -> Tensor:
    fold = Fold(*tables)
    return S_ext.new_empty(len(fold.points if reverse else fold.starts), *S_ext.shape[1:])


@operator(
    fake=_folded,
    kept_by=("selective",),
    cost=lambda *_, **__: costs.ExchangeCost("halo"),
    of_driver=True,
)
def fold_tree(S_ext: Tensor, M: Tensor, tables: list[Tensor], group: str, reverse: bool) -> Tensor:
    """Return the states from which this rank's entries start, as in `Fold.starts`.

    In reverse, return the gradients of the states with which its points end. Every rank of
    the group must call it.

    Args:
        S_ext: [points, *, K, V], in reverse [children, *, K, V].
        M: [points, *, K, K], or if diagonal [points, *, K or 1].
        tables: `Fold`.
    """
    fold = Fold(*tables)
    M = _with_shared(M, fold, group)
    if reverse:
        return _up(S_ext, M, fold, group).to(S_ext.dtype)
    # From the roots down, add to each point what the point above passes on.
    S = _with_shared(S_ext, fold, group).double()
    for ids, above in _levels(fold):
        S[ids] += act(M[ids], S[above], reverse=False)
    return S[fold.starts].to(S_ext.dtype)


def _up(dS_ext: Tensor, M: Tensor, fold: Fold, group: str) -> Tensor:
    # Each child adds its dS_ext to the point above it.
    d = dS_ext.new_zeros(len(M), *dS_ext.shape[1:], dtype=torch.float64)
    add_rows(d, fold.above, dS_ext[: len(fold.above)].double())
    levels = [*_levels(fold)]
    shared = int(fold.shared)

    def add(levels: list[tuple[Tensor, Tensor]]) -> None:
        for ids, above in reversed(levels):
            add_rows(d, above, act(M[ids], d[ids], reverse=True))

    # From the leaves up: this rank's own points, the sum over ranks, then the shared
    # points.
    add(levels[shared:])
    if len(fold.sent):
        dist.all_reduce(d[: len(fold.sent) * group_named(group).size()], group=group_named(group))
    add(levels[:shared])
    return d[fold.points]


def _with_shared(x: Tensor, fold: Fold, group: str) -> Tensor:
    """Return x [points, ...] preceded by the rows of all ranks' shared points."""
    return torch.cat([start_all_gather(x[fold.sent], group)(), x]) if len(fold.sent) else x


def _levels(fold: Fold) -> Iterator[tuple[Tensor, Tensor]]:
    counts = fold.counts.tolist()
    return zip(fold.order.split(counts), fold.before.split(counts), strict=True)
