"""Heads of any K and V up to 256, padded with zeros to dims that the kernels compute (`configs.kernel_dims`).

Channels of zeros change nothing: they add nothing to q·k, to what k reads from a state or to a norm, and their rows and
columns of a state stay zero, as do their gradients. V is padded to a multiple of 32 only: v and o of 192 channels stay
as they are. Inputs are kept for backward as they were given, and padded again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs, States
from titan_linear.ops.triton.configs import kernel_dims


class Padded:
    """A rule over padded heads that looks like one over the given heads. States that go to other ranks and come from
    them stay padded."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: Inputs,
        options: DeltaRuleOptions,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[Tensor],
    ):
        self.inputs, self.given = inputs, (inputs.q.shape[-1], inputs.v.shape[-1])
        self.dims = K, V = kernel_dims(*self.given)
        padded = inputs._replace(q=filled(inputs.q, K), k=filled(inputs.k, K), v=filled(inputs.v, V))
        if inputs.g.dim() == 3:
            padded = padded._replace(g=filled(inputs.g, K))
            if inputs.dt_bias is not None:
                padded = padded._replace(dt_bias=filled(inputs.dt_bias.reshape(-1, self.given[0]), K).flatten())
        self.rule = make(padded, options, boundaries, differentiable, kept)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.rule.kept

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        return self.rule.boundary(chains)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        o, final = self.rule.forward(self._filled(initial), need_final)
        return o[..., : self.given[1]], self._cut(final)

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        return self.rule.boundary_backward(filled(do, self.dims[1]), chains)

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[Inputs, Tensor]:
        states = self._filled(initial), self._filled(d_final)
        grads, d_initial = self.rule.backward(filled(do, self.dims[1]), *states, need_d_initial)
        (K, V), dg, ddt_bias = self.given, grads.g, grads.dt_bias
        if dg.dim() == 3:
            dg = dg[..., :K]
            bias = self.inputs.dt_bias
            ddt_bias = None if bias is None else ddt_bias.view(-1, self.dims[0])[:, :K].reshape(bias.shape)
        grads = grads._replace(q=grads.q[..., :K], k=grads.k[..., :K], v=grads.v[..., :V], g=dg, dt_bias=ddt_bias)
        return grads, self._cut(d_initial) if need_d_initial else d_initial

    def _filled(self, states: States | None) -> States | None:
        return None if states is None else states._replace(values=filled(states.values, *self.dims))

    def _cut(self, states: Tensor) -> Tensor:
        K, V = self.given
        return states[..., :K, :V].contiguous()


def filled(x: Tensor, *dims: int) -> Tensor:
    """x with its last dimensions padded with zeros at their ends to `dims`; x itself if nothing is missing."""
    missing = [dim - size for dim, size in zip(dims, x.shape[-len(dims) :], strict=True)]
    return F.pad(x, [n for missed in reversed(missing) for n in (0, missed)]) if any(missing) else x
