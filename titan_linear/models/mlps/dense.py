"""MLPs that process every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.models.draws import token_mix
from titan_linear.models.layers import (
    SHIFT_OPS,
    Cache,
    OpDims,
    OpModule,
    add_low_rank,
    parameter,
    project,
    projection,
)
from titan_linear.models.mlps.options import MLPOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.swiglu import swiglu

Activation = Literal["swiglu", "relu2"]
DenseActivation = Literal[Activation, "shifted_relu2"]


@dataclass(frozen=True)
class Dense(MLPOptions):
    hidden_dim: int
    activation: DenseActivation = "swiglu"
    # Factor on the gate of a SwiGLU.
    gate_factor: float = 1.0

    name = "mlp"

    def build(self, dim: int, depth: float = 0.0) -> SwiGLU | ReLU2:
        if self.activation == "swiglu":
            return SwiGLU(dim, self.hidden_dim, self.gate_factor)
        if self.activation == "relu2":
            return ReLU2(dim, self.hidden_dim)
        return ShiftedReLU2(dim, self.hidden_dim, depth)

    def ops(self, dim: int, tp: int) -> OpDims:
        ops: dict[str, OpDims] = {"swiglu": {"swiglu": {}}, "relu2": {}, "shifted_relu2": SHIFT_OPS}
        return ops[self.activation]

    @property
    def split_counts(self) -> dict[str, int]:
        return {"hidden channels": self.hidden_dim}


class SwiGLU(OpModule):
    """down(silu(factor · gate(x)) · up(x)).  [.., dim] -> [.., dim]"""

    split = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    float8 = ("gate_proj", "up_proj"), ("down_proj",)

    def __init__(self, dim: int, hidden_dim: int, gate_factor: float = 1.0):
        super().__init__()
        self.gate_factor = gate_factor
        self.gate_proj = projection(dim, hidden_dim)
        self.up_proj = projection(dim, hidden_dim)
        self.down_proj = projection(hidden_dim, dim)

    def forward(self, x: Tensor, plan: BatchPlan | None = None, cache: Cache = None) -> Tensor:
        impl = self.impl("swiglu")
        gate_up = project(x, self.gate_proj, self.up_proj)
        down = self.down_proj
        A = down.lora_A if down.lora else None
        y: Any = swiglu(gate_up, down.weight, impl, down.product, self.gate_factor, A)
        return y if A is None else add_low_rank(*y, down)


class ReLU2(OpModule):
    """down(relu(up(x))²) (Primer, section 4.1).  [.., dim] -> [.., dim]"""

    split = {"up_proj.weight": 0, "down_proj.weight": 1}
    float8 = ("up_proj",), ("down_proj",)

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.up_proj = projection(dim, hidden_dim)
        self.down_proj = projection(hidden_dim, dim)

    def forward(self, x: Tensor, plan: BatchPlan | None = None, cache: Cache = None) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class ShiftedReLU2(ReLU2):
    """ReLU2 of x mixed with the previous token.

    This is RWKV-7's channel mixing (arXiv 2503.14456, section 4).

    The cache holds `mlp_shift` [B, dim, 1], the last token's x.
    """

    def __init__(self, dim: int, hidden_dim: int, depth: float):
        super().__init__(dim, hidden_dim)
        self.x_k = parameter(dim)
        self.initial = {"x_k": token_mix(dim, (1 - depth) ** 4)}

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        shift = self.token_shift(x, plan.documents, cache, "mlp_shift")
        return super().forward(torch.addcmul(x, shift, self.x_k))
