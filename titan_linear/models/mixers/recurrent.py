"""Common parts of the mixers of linear layers.

A mixer computes inputs from x, runs a recurrence over them, and computes an output.
Telemetry is here too.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan_linear.models.config import MixerOptions
from titan_linear.models.layers import (
    Cache,
    ConvWeight,
    OpModule,
    Size,
    by_head,
    scaled,
    widen,
    widened,
)
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.ops.layout.segments import scan_programs

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(MixerOptions):
    heads: Size

    linear = True
    # The recurrence's name in titan_linear.ops.
    op: ClassVar[str]

    @property
    def head_counts(self) -> dict[str, int]:
        return {"heads": self.heads}

    def scan_programs(self, ranks: int) -> int:
        """Return the number of programs of a scan over one entry, of heads that are not padded."""
        return scan_programs(self.heads // ranks, self.ops[self.op]["V"])


class RecurrentMixer(OpModule):
    """Base of mixers with a recurrence.

    The cache holds `state`, the recurrence's state [B, heads, ., .], and `conv` [B, D,
    W−1], the convolution's last inputs.
    """

    def __init__(self, options: RecurrentOptions):
        super().__init__()
        self.op = options.op
        # "kcp" or "ulysses", under context parallelism.
        self.cp_method = "kcp"

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        """Apply the mixer: x [B, T, dim] -> [B, T, dim].

        A cache of earlier tokens is updated in place.
        """
        inputs, gate = self._inputs(x, plan, cache)
        return self._output(self._carried(inputs, plan, cache), gate)

    def _carried(self, inputs: Inputs, plan: BatchPlan, cache: Cache) -> Tensor:
        """Return the recurrence's output, continuing from the cache, which is updated."""
        if cache is None:
            o, _ = self._recurrence(inputs, plan)
        else:
            o, cache["state"] = self._recurrence(inputs, plan, cache.get("state"), final=True)
        return o

    @abstractmethod
    def _inputs(
        self, x: Tensor, plan: BatchPlan, cache: Cache, *taken: Tensor
    ) -> tuple[Inputs, Any]:
        """Compute the recurrence's inputs [B, T, ...], and an output gate [B, T, ...].

        The gate is whatever else `_output` needs.

        Args:
            taken: values of the first layer, for mixers that take them.
        """

    def _recurrence(
        self, inputs: Inputs, plan: BatchPlan, state: Tensor | None = None, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence.

        Args:
            state: initial states; None: zeros.
            final: whether to return the last states.

        Returns:
            o [B, T, heads, V], and the last states or None.
        """
        return self._rule(
            inputs,
            initial_state=state,
            output_final_state=final,
            impl=self.impl(self.op),
            cp_method=self.cp_method,
            **plan.documents,
        )

    @abstractmethod
    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        """Call the op `op` with these inputs.

        Args:
            how: arguments that all recurrences share.
        """

    @abstractmethod
    def _output(self, o: Tensor, gate: Any) -> Tensor:
        """Compute the mixer's output [B, T, dim]."""

    @abstractmethod
    def _log_decay(self, inputs: Inputs) -> Tensor:
        """Return log decays ≤ 0, [B, T, heads] or [B, T, heads, K]."""

    def watch(self, x: Tensor, window: Window, *taken: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return what telemetry shows of the recurrence.

        half_life: number of tokens in which a state decays by half, ln 2 over the mean
            log decay of tokens and, in KDA, a head's channels.
        state_norm: 2-norm of the states at the ends of documents.
        carried_share: share of the squared output over the second half of the longest
            document that comes from its first half, through the state.
        fragment_share: share of all squared outputs that comes from other ranks'
            fragments.
        """
        # Outputs with and without the state of the longest document's first half.
        inputs, _ = self._inputs(
            x[:, : window.tokens], window.plan, None, *(y[:, : window.tokens] for y in taken)
        )
        o, states = self._recurrence(inputs, window.plan, final=True)
        alone, _ = self._recurrence(inputs, window.halves)
        # Sum over the window's tokens or documents.  [W, heads]
        decay = -self._log_decay(inputs).reshape(window.tokens, o.shape[2], -1).mean(-1)
        norms = widen(states).flatten(2).norm(dim=-1)  # [N, heads]
        seen = {
            "half_life": (torch.full_like(decay[0], math.log(2) * len(decay)), decay.sum(0)),
            "state_norm": (norms.sum(0), torch.full_like(norms[0], len(norms))),
            "carried_share": _share(o[0, window.carried], alone[0, window.carried]),
        }
        # Outputs with and without states from other ranks.
        if window.fragments is not None:
            plan, apart = window.fragments
            inputs, _ = self._inputs(x, plan, None, *taken)
            o, _ = self._recurrence(inputs, plan)
            alone, _ = self._recurrence(inputs, apart)
            seen["fragment_share"] = _share(o[0], alone[0])
        return seen

    def _convolved(
        self,
        x: Tensor,
        convolutions: list[ConvWeight],
        dims: tuple[int, ...],
        plan: BatchPlan,
        cache: Cache,
        norm_dim: int | None = None,
    ) -> list[Tensor]:
        """Apply several convolutions, then a silu, as one convolution.

        It has one halo under context parallelism.

        Args:
            x: [B, T, D], the inputs of these convolutions, concatenated.
            norm_dim: if given, the outputs are q, k and v; heads of q and k then have this
                many channels, and are normalized to length 1.

        Returns:
            The output of each convolution, [B, T, ., dim].
        """
        # [D, W], or [D, 1, W] in modeling_titan_linear.py
        weights = [scaled(c.weight.flatten(1), c.factor) for c in convolutions]
        biases = [c.bias for c in convolutions]
        bias = None if biases[0] is None else torch.cat(biases)
        options = {
            "bias": bias,
            "activation": "silu",
            "widths": [*map(len, weights)],
            "norm_dim": norm_dim,
        }
        parts = self.convolve(x, torch.cat(weights), cache, "conv", **options, **plan.documents)
        return [by_head(part, dim) for part, dim in zip(parts, dims, strict=True)]


def _share(o: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of squares by head [heads], of o − alone and of o.

    o and alone are [., heads, V].
    """
    # The dtype of the norms widens without copies.
    norms = partial(torch.linalg.vector_norm, dim=(0, 2), dtype=widened(o.dtype))
    return norms(o - alone).square(), norms(o).square()
