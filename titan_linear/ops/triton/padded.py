"""Heads of any K and V up to 256, padded with zeros to dims that the kernels support
(`configs.kernel_dims`).

Zero channels change nothing. They add nothing to q·k, to the values that k reads from a
state or to a norm, and their rows and columns of a state stay zero, as do their gradients.
V is padded only to a multiple of 32, so v and o with 192 channels are not copied. The
unpadded inputs are kept for backward and padded again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, DPLRInputs, Inputs, States


class Padded:
    """A rule over padded heads with the interface of a rule over the original heads. States
    exchanged with other ranks stay padded."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: Inputs | DPLRInputs,
        options: AnyOptions,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[Tensor],
        dims: tuple[int, int],
    ):
        self.given = inputs.q.shape[-1], inputs.v.shape[-1]
        self.dims = K, V = dims
        # Inputs with K channels; v is the only one with V.
        self.of_keys = [
            n for n, x in inputs._asdict().items() if x is not None and x.dim() == 3 and n != "v"
        ]
        padded = {"v": filled(inputs.v, V)} | {
            n: filled(getattr(inputs, n), K) for n in self.of_keys
        }
        self.bias = inputs.dt_bias if "g" in self.of_keys else None  # one number per channel
        if self.bias is not None:
            padded["dt_bias"] = filled(self.bias.reshape(-1, self.given[0]), K).flatten()
        self.rule = make(inputs._replace(**padded), options, boundaries, differentiable, kept)

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
    ) -> tuple[AnyInputs, Tensor]:
        states = self._filled(initial), self._filled(d_final)
        grads, d_initial = self.rule.backward(filled(do, self.dims[1]), *states, need_d_initial)
        K, V = self.given
        # Cut the padding off the gradients.
        cut = {n: getattr(grads, n)[..., :K] for n in self.of_keys} | {"v": grads.v[..., :V]}
        if self.bias is not None:
            cut["dt_bias"] = grads.dt_bias.view(-1, self.dims[0])[:, :K].reshape(self.bias.shape)
        grads = grads._replace(**cut)
        return grads, self._cut(d_initial) if need_d_initial else d_initial

    def _filled(self, states: States | None) -> States | None:
        return None if states is None else states._replace(values=filled(states.values, *self.dims))

    def _cut(self, states: Tensor) -> Tensor:
        K, V = self.given
        return states[..., :K, :V].contiguous()


def filled(x: Tensor, *dims: int) -> Tensor:
    """Return x with its last dimensions zero-padded at their ends to `dims`, or x itself if
    it already has these sizes."""
    missing = [dim - size for dim, size in zip(dims, x.shape[-len(dims) :], strict=True)]
    return F.pad(x, [n for missed in reversed(missing) for n in (0, missed)]) if any(missing) else x
