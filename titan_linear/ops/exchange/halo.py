"""Halos: tokens before a fragment that a causal convolution needs.

They come from the ranks that own them. Where fragments are shorter than the halo, these
tokens come from several fragments. The routes follow from the fragments, once per batch
(ops/layout/fragments.py).
"""

from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import add_rows, all_to_all
from titan_linear.ops.layout.fragments import HaloRoutes
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import check_first_derivative, operator


def with_halo(
    x: Tensor, routes: HaloRoutes, slots: int, width: int, group: str
) -> tuple[Tensor, Tensor]:
    """Return x [T_local, D] and halos [slots, width, D].

    A halo has the `width` tokens before a local fragment, with zeros in place of tokens
    before its document. Differentiable; every rank of the group must call it.

    x itself is returned too, so that backward adds the halos' gradient, which has few
    tokens, in place to the gradient of x's other use.
    """
    return _WithHalo.apply(x, list(routes), slots, width, group)


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routes: list[Tensor],
        slots: int,
        width: int,
        group: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        ctx.group = group
        return x.view_as(x), fetch_halo(x, routes, slots, width, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d_halo: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_first_derivative()
        return_halo(dx, d_halo, ctx.routes, ctx.group)
        return dx, None, None, None, None


def _cost(*_: Any, **__: Any) -> costs.ExchangeCost:
    return costs.ExchangeCost("halo")


@operator(
    fake=lambda x, tables, slots, width, group: x.new_empty(slots, width, x.shape[1]),
    kept_by=("selective",),
    cost=_cost,
)
def fetch_halo(x: Tensor, tables: list[Tensor], slots: int, width: int, group: str) -> Tensor:
    """Fetch the halos [slots, width, D] for x [T_local, D]; tables: `HaloRoutes`."""
    routes = HaloRoutes(*tables)
    out = x.new_zeros(slots * width, x.shape[1])
    if routes.crosses.item():
        sent = routes.send_counts.tolist()
        received = routes.receive_counts.tolist()
        came = _exchanged(x.index_select(0, routes.rows[: sum(sent)]), sent, received, group)
        out.index_copy_(0, routes.places[: sum(received)], came)
    return out.view(slots, width, x.shape[1])


@operator(fake=lambda *_: None, mutates=("dx",), cost=_cost)
def return_halo(dx: Tensor, d_halo: Tensor, tables: list[Tensor], group: str) -> None:
    """Add the halos' gradients to dx [T_local, D] in place: the adjoint of `fetch_halo`."""
    routes = HaloRoutes(*tables)
    if not routes.crosses.item():
        return
    sent = routes.receive_counts.tolist()
    received = routes.send_counts.tolist()
    flat = d_halo.reshape(-1, d_halo.shape[-1])
    came = _exchanged(flat.index_select(0, routes.places[: sum(sent)]), sent, received, group)
    rows = routes.rows[: len(came)]
    if routes.repeats.item():
        add_rows(dx, rows, came)
    else:
        dx.index_add_(0, rows, came)


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    # Without a group there is one rank, which sends its own tokens to itself.
    return all_to_all(x, sent, received, group) if group else x
