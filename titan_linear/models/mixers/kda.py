"""Kimi Delta Attention (Kimi Linear, section 4): a delta rule with a gate per channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.cases import Draws, OpCase
from titan_linear.models.config import ModelConfig
from titan_linear.models.draws import uniform_decay, zeros
from titan_linear.models.layers import cut, project, widen
from titan_linear.models.mixers.delta import DeltaMixer, DeltaOptions
from titan_linear.models.mixers.recurrent import Inputs
from titan_linear.ops import chunk_kda
from titan_linear.ops.kda import is_bound
from titan_linear.ops.reference.delta_rule import kda_gate


@dataclass(frozen=True, kw_only=True)
class KDA(DeltaOptions):
    lower_bound: float | None = -5.0  # of the bounded gate, whose kernels are faster; None: −exp(A_log)·softplus(…)
    gate_bias: bool = True  # a bias in the output gate

    name: ClassVar[str] = "kda"
    op: ClassVar[str] = "chunk_kda"

    @property
    def any_gate(self) -> bool:
        return self.lower_bound is None

    @property
    def contradiction(self) -> str | None:
        if self.lower_bound is not None and not is_bound(self.lower_bound):
            return f"{self.name} lower_bound = {self.lower_bound}, which must be null or lie in [-5, 0)"
        return super().contradiction

    def gate_flops(self, dim: int) -> int:
        """Each gate is a projection to `v_head_dim` channels, followed by one from them."""
        rank, widths = self.v_head_dim, self.v_heads * (self.head_dim + self.v_head_dim)
        return 2 * rank * (2 * dim + widths)

    def cases(self, draw: Draws) -> Iterator[OpCase]:
        gates = (self.v_heads, self.head_dim)
        return self.delta_cases(draw, chunk_kda, kda_gate, gates, lower_bound=self.lower_bound)

    def build(self, config: ModelConfig, layer: int) -> KDAMixer:
        return KDAMixer(self, config)


class KDAMixer(DeltaMixer):
    """The gate and the output gate come from low-rank projections."""

    split: ClassVar[dict[str, int]] = {  # of the low-rank projections, the second factors only
        **DeltaMixer.split,
        "f_proj.1.weight": 0,
        "g_proj.1.weight": 0,
        "g_proj.1.bias": 0,
    }

    def __init__(self, options: KDA, config: ModelConfig):
        A_log = uniform_decay(1.0) if options.lower_bound is None else zeros
        super().__init__(options, config, "sigmoid", A_log)
        self.lower_bound = options.lower_bound
        rank, gate_dim, value_dim = self.v_head_dim, options.v_heads * self.head_dim, options.v_heads * self.v_head_dim
        self.f_proj = nn.Sequential(nn.Linear(config.dim, rank, bias=False), nn.Linear(rank, gate_dim, bias=False))
        self.g_proj = nn.Sequential(
            nn.Linear(config.dim, rank, bias=False), nn.Linear(rank, value_dim, bias=options.gate_bias)
        )
        self.A_log = nn.Parameter(torch.empty(options.v_heads))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (f_in, f_out), (g_in, g_out) = self.f_proj, self.g_proj
        f, g = cut(project(x, f_in, g_in), f_in.out_features, g_in.out_features)
        return f_out(f).unflatten(-1, (-1, self.head_dim)), self.b_proj(x), g_out(g)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        _, _, _, gate, _ = inputs
        rate, gate = self.A_log.exp()[:, None], widen(gate) + self.dt_bias.view(-1, self.head_dim)
        return -rate * F.softplus(gate) if self.lower_bound is None else self.lower_bound * (rate * gate).sigmoid()

    def _delta_rule(self, *inputs: Tensor, **options) -> tuple[Tensor, Tensor | None]:
        return chunk_kda(*inputs, lower_bound=self.lower_bound, **options)
