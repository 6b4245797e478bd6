"""The tokens before a fragment that a causal convolution needs, fetched from the ranks that own them.

They may come from several fragments where those are shorter than the halo is wide. Which tokens go where follows from
the fragments, once per batch (`halo_routes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from titan_linear.ops.cp.exchange import all_to_all
from titan_linear.ops.cp.fragments import Fragment
from titan_linear.ops.operators import check_first_derivative, operator, register_fake


class HaloRoutes(NamedTuple):
    """What this rank sends and receives. Tables have one shape whatever the documents are; what lies beyond the counts
    is padding."""

    rows: torch.Tensor  # [.] int64: local tokens to send, by receiver
    places: torch.Tensor  # [.] int64: rows of [slots · width] that they fill there, by sender
    crosses: torch.Tensor  # [1], on the CPU as what follows: whether a document crosses a cut, on any rank
    send_counts: torch.Tensor  # [W]
    receive_counts: torch.Tensor  # [W]


def halo_routes(fragments: Sequence[Fragment], rank: int, world_size: int, width: int) -> dict:
    """The arrays of `HaloRoutes`, by name, for the `width` tokens before each fragment."""
    rows: list[list[int]] = [[] for _ in range(world_size)]
    places: list[list[int]] = [[] for _ in range(world_size)]
    size = fragments[0].end
    slots = sum(f.rank == rank for f in fragments)
    for i, target in enumerate(fragments):
        first = max(target.start - width, target.head[0])
        for source in fragments[first // size : i]:
            if rank not in (source.rank, target.rank):
                continue
            tokens = range(max(first, source.start), source.end)
            if source.rank == rank:
                rows[target.rank] += [source.slot * size + t - source.start for t in tokens]
            if target.rank == rank:
                places[source.rank] += [target.slot * width + width - target.start + t for t in tokens]
    return {
        "rows": _padded(rows, slots * width * max(width, 1)),
        "places": _padded(places, slots * width),
        "crosses": np.array([any(f.enters for f in fragments)]),
        "send_counts": np.array([len(r) for r in rows]),
        "receive_counts": np.array([len(p) for p in places]),
    }


def _padded(lists: list[list[int]], length: int) -> np.ndarray:
    flat = [x for part in lists for x in part]
    return np.array(flat + [0] * (length - len(flat)), dtype=np.int64)


def with_halo(
    x: torch.Tensor, routes: HaloRoutes, slots: int, width: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T_local, D] -> x itself and [slots, width, D], the `width` tokens before each local fragment, zeros before its
    document. Differentiable; every rank of the group calls it.

    x comes back so that the gradient of its halos, which is of few tokens, is added in place to that of its other use.
    """
    return _WithHalo.apply(x, tuple(routes), slots, width, group)


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, routes: tuple[torch.Tensor, ...], slots: int, width: int, group: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.routes, ctx.group = routes, group
        return x.view_as(x), fetch_halo(x, *routes, slots, width, group)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor, d_halo: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        check_first_derivative()
        return_halo(dx, d_halo, *ctx.routes, ctx.group)
        return dx, None, None, None, None


@operator
def fetch_halo(
    x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, crosses: torch.Tensor, send_counts: torch.Tensor,
    receive_counts: torch.Tensor, slots: int, width: int, group: str,
) -> torch.Tensor:  # fmt: skip
    """x [T_local, D] -> [slots, width, D]; the tables are those of `HaloRoutes`."""
    out = x.new_zeros(slots * width, x.shape[1])
    if crosses.item():
        sent, received = send_counts.tolist(), receive_counts.tolist()
        came = all_to_all(x.index_select(0, rows[: sum(sent)]), sent, received, group)
        out.index_copy_(0, places[: sum(received)], came)
    return out.view(slots, width, x.shape[1])


@register_fake(fetch_halo)
def _(x, rows, places, crosses, send_counts, receive_counts, slots, width, group):
    return x.new_empty(slots, width, x.shape[1])


@partial(operator, mutates=("dx",))
def return_halo(
    dx: torch.Tensor, d_halo: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, crosses: torch.Tensor,
    send_counts: torch.Tensor, receive_counts: torch.Tensor, group: str,
) -> None:  # fmt: skip
    """Add to dx [T_local, D] what other ranks' halos say of these tokens: the adjoint of `fetch_halo`, in place."""
    if crosses.item():
        sent, received = receive_counts.tolist(), send_counts.tolist()
        flat = d_halo.reshape(-1, d_halo.shape[-1])
        came = all_to_all(flat.index_select(0, places[: sum(sent)]), sent, received, group)
        # Deterministic, as index_add_ is not on CUDA: a token may have gone to several ranks.
        dx.index_put_((rows[: sum(received)],), came, accumulate=True)


@register_fake(return_halo)
def _(dx, d_halo, rows, places, crosses, send_counts, receive_counts, group):
    return None
