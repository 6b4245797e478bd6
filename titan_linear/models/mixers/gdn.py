"""Gated DeltaNet (Gated Delta Networks, section 3.3): a delta rule with a gate per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.cases import Draws, OpCase
from titan_linear.models.config import ModelConfig
from titan_linear.models.draws import uniform_decay
from titan_linear.models.layers import cut, project, widen
from titan_linear.models.mixers.delta import DeltaMixer, DeltaOptions
from titan_linear.models.mixers.recurrent import Inputs
from titan_linear.ops import chunk_gated_delta_rule
from titan_linear.ops.reference.delta_rule import gdn_gate


@dataclass(frozen=True, kw_only=True)
class GDN(DeltaOptions):
    name: ClassVar[str] = "gdn"
    op: ClassVar[str] = "chunk_gated_delta_rule"

    def gate_flops(self, dim: int) -> int:
        return 2 * dim * self.v_heads * (1 + self.v_head_dim)

    def cases(self, draw: Draws) -> Iterator[OpCase]:
        return self.delta_cases(draw, chunk_gated_delta_rule, gdn_gate, (self.v_heads,))

    def build(self, config: ModelConfig, layer: int) -> GDNMixer:
        return GDNMixer(self, config)


class GDNMixer(DeltaMixer):
    split: ClassVar[dict[str, int]] = {**DeltaMixer.split, "a_proj.weight": 0, "g_proj.weight": 0}

    def __init__(self, options: GDN, config: ModelConfig):
        super().__init__(options, config, "silu", uniform_decay(0.0))
        self.a_proj = nn.Linear(config.dim, options.v_heads, bias=False)
        self.g_proj = nn.Linear(config.dim, options.v_heads * self.v_head_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(options.v_heads))
        self.dt_bias = nn.Parameter(torch.empty(options.v_heads))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = len(self.A_log)
        g, beta = cut(project(x, self.a_proj, self.b_proj), heads, heads)
        return g, beta, self.g_proj(x)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        _, _, _, gate, _ = inputs
        return -self.A_log.exp() * F.softplus(widen(gate) + self.dt_bias)

    def _delta_rule(self, *inputs: Tensor, **options) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(*inputs, **options)
