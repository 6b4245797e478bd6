"""Lightning attention (MiniMax-01, section 2.2).

It is linear attention whose decays are constants of head and layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.layers import (
    Above0,
    OpDims,
    RMSNorm,
    Size,
    by_head,
    heads_split,
    project_each,
    projection,
    widened,
)
from titan_linear.models.mixers.recurrent import Cache, Inputs, RecurrentMixer, RecurrentOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import chunk_simple_gla
from titan_linear.ops.exchange.collectives import Ranks


class LightningMixer(RecurrentMixer):
    """Lightning attention. Its states are [B, heads, K, V]."""

    split = heads_split(*(f"{x}_proj.weight" for x in "qkvg"), "o_norm.weight")
    # The product of q, k, v and the gate is left out because of the gate.
    float8 = (("o_proj",),)

    def __init__(self, options: Lightning, config: ModelConfig, layer: int):
        super().__init__(options)
        self.heads = options.heads
        self.head_dim = options.head_dim
        # The slope rises from −1 in the first layer to 0 in the last.
        slope = layer / (config.num_layers - 1 + 1e-5) - 1 - 1e-5
        # As a Python number, it would be compiled anew for each layer.
        self.slope = torch.tensor(slope, dtype=torch.float64, device="cpu")
        width = options.heads * options.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (
            projection(config.dim, width) for _ in range(4)
        )
        self.o_norm = RMSNorm(width, options.o_norm_eps)
        self.o_proj = projection(width, config.dim)
        # Ranks of tensor parallelism.
        self.ranks: Ranks | None = None

    def _inputs(self, x: Tensor, plan: BatchPlan, cache: Cache) -> tuple[Inputs, Tensor]:
        """Return q, k, v [B, T, heads, K], and the output gate [B, T, heads·K]."""
        *qkv, gate = project_each(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        return tuple(by_head(F.silu(y), self.head_dim) for y in qkv), gate

    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_simple_gla(*inputs, g_gamma=self._decays(inputs), scale=1.0, **how)

    def _decays(self, inputs: Inputs) -> Tensor:
        """Return the log decays of this rank's heads.

        They are slope · 2^(−8 h / heads) for head h = 1, 2, …
        """
        q, *_ = inputs
        own = q.shape[2]
        first = 0 if self.ranks is None else self.ranks.rank * own
        h = torch.arange(first + 1, first + own + 1, dtype=widened(q.dtype), device=q.device)
        return self.slope * torch.exp2(-8 / self.heads * h)

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(o.flatten(-2)) * gate.sigmoid())

    def _log_decay(self, inputs: Inputs) -> Tensor:
        return self._decays(inputs).expand(inputs[0].shape[:3])


@dataclass(frozen=True, kw_only=True)
class Lightning(RecurrentOptions):
    head_dim: Size
    o_norm_eps: Above0 = 1e-6

    name = "lightning"
    op = "chunk_simple_gla"
    module = LightningMixer

    @property
    def ops(self) -> OpDims:
        return {self.op: {"K": self.head_dim, "V": self.head_dim}}

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of the chunked form.

        Each head takes 4 K V per token for the state, and 4 K per pair of a chunk.
        """
        return (
            4
            * self.heads
            * self.head_dim
            * (self.head_dim * documents.tokens + documents.chunk_pairs)
        )
