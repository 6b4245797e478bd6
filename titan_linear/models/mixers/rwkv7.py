"""RWKV-7's time mixing (Goose, arXiv 2503.14456, section 4).

It is a delta rule that removes along another direction than it writes, with rates and
decays of each channel, all computed from mixes of a token with the previous token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.draws import Draw, Elements, constant, token_mix
from titan_linear.models.layers import (
    SHIFT_OPS,
    Cache,
    LayerNorm,
    OpDims,
    Output,
    Size,
    by_head,
    heads_split,
    parameter,
    projection,
    widen,
)
from titan_linear.models.mixers.recurrent import Inputs, RecurrentMixer, RecurrentOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import chunk_rwkv7
from titan_linear.ops.layout.segments import scan_programs
from titan_linear.ops.triton.configs import kernel_dims


def log_decay(w: Tensor) -> Tensor:
    return -math.exp(-0.5) * widen(w).sigmoid()


class LowRank(nn.Module):
    """up(activation(down(x))) + bias.  [.., dim] -> [.., width]"""

    split = {"up.weight": 0, "bias": 0}

    def __init__(
        self,
        dim: int,
        rank: int,
        width: int,
        activation: Callable[[Tensor], Tensor] | None,
        bias: Draw | None,
    ):
        super().__init__()
        self.down = projection(dim, rank)
        self.up = projection(rank, width)
        self.activation = activation
        self.initial = {"bias": bias}
        self.bias = None if bias is None else parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.up(x if self.activation is None else self.activation(x), self.bias)


class HeadNorm(LayerNorm):
    """A LayerNorm of each head: [.., heads, V] -> [.., heads·V].

    Each channel has a weight and a bias.
    """

    split = {"weight": 0, "bias": 0}

    def forward(self, o: Tensor) -> Tensor:
        normed = F.layer_norm(widen(o), o.shape[-1:], eps=self.eps).flatten(-2)
        return torch.addcmul(widen(self.bias), normed, widen(self.weight)).to(o.dtype)


class RWKV7Mixer(RecurrentMixer):
    """RWKV-7's time mixing.

    With x_c = x + (x_{t−1} − x) ⊙ c for each mix c, k̂ = (k ⊙ k_k) / ‖·‖ by head, rates a,
    and v₁ of the first layer:

        w = −e^{−1/2} σ(w_lora(x_w))
        a = σ(a_lora(x_a))
        g = g_lora(x_g)
        v ← v + (v₁ − v) ⊙ σ(v_lora(x_v))
        k̃ = k ⊙ (1 + (a − 1) ⊙ k_a)
        S_t = Diag(e^w) S_{t−1} − (k̂ ⊙ a) (k̂ᵀ S_{t−1}) + k̃ vᵀ
        o_t = S_tᵀ r
        y = W_o (g ⊙ (norm(o) + (r · (k̃ ⊙ r_k)) v))

    Its states are [B, heads, K, V]. The cache also holds `shift` [B, dim, 1], the last
    token's x. In the first layer, the mixer returns its v too.
    """

    split = heads_split("r_proj.weight", "k_proj.weight", "v_proj.weight", "k_k", "k_a", "r_k")
    float8 = tuple((f"{name}_proj",) for name in "rkvo")

    def __init__(self, options: RWKV7, config: ModelConfig, layer: int):
        super().__init__(options)
        dim = config.dim
        K = options.head_dim
        width = options.heads * options.head_dim
        depth = layer / config.num_layers
        decay = 1 + (layer / max(config.num_layers - 1, 1)) ** 0.3
        channels = partial(_channels, width, K)
        self.head_dim = K
        # Mixes of each token with the previous one, and their initial values.
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (
            parameter(dim) for _ in range(6)
        )
        self.k_k, self.k_a, self.r_k = (parameter(width) for _ in range(3))
        powers = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}
        self.initial = {name: token_mix(dim, power * (1 - depth)) for name, power in powers.items()}
        self.initial |= {"k_k": channels(0.76, -0.1), "k_a": constant(1.02), "r_k": constant(-0.04)}
        # Projections, and low-rank MLPs of the decay w, the rate a, the gate g and the mix
        # of values v.
        self.r_proj, self.k_proj, self.v_proj = (projection(dim, width) for _ in range(3))
        self.w_lora = LowRank(
            dim, options.w_rank, width, torch.tanh, channels(-5.5, 6.0, 2.5, decay)
        )
        self.a_lora = LowRank(dim, options.a_rank, width, None, channels(-0.39, 0.4, 0.3))
        self.g_lora = LowRank(dim, options.g_rank, width, torch.sigmoid, None)
        self.v_lora = None
        if options.v_rank:
            self.v_lora = LowRank(dim, options.v_rank, width, None, channels(0.93, -0.4))
        # Norm of each head, and the output projection.
        self.g_norm = HeadNorm(width, K * config.norm_eps)
        self.g_norm.initial["weight"] = constant(((layer + 1) / config.num_layers) ** 0.7)
        self.o_proj = projection(width, dim)

    def forward(
        self, x: Tensor, plan: BatchPlan, cache: Cache = None, *taken: Tensor
    ) -> Tensor | Output:
        inputs, others = self._inputs(x, plan, cache, *taken)
        y = self._output(self._carried(inputs, plan, cache), others)
        return y if taken else Output(y, values=others[-1].clone())

    def _inputs(
        self, x: Tensor, plan: BatchPlan, cache: Cache, *taken: Tensor
    ) -> tuple[Inputs, tuple[Tensor, ...]]:
        """Return the recurrence's inputs and what the output needs.

        Returns:
            r, logits w, k, v, a, b, each [B, T, heads, K]; and the bonus (r · (k̃ ⊙ r_k))
            v, the gate and v, each [B, T, heads·K].
        """
        # Mixes of each token with the previous one.
        shift = self.token_shift(x, plan.documents, cache, "shift")
        mixes = self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, shift, mix) for mix in mixes)
        r = self.r_proj(x_r)
        k = self.k_proj(x_k)
        values = self.v_proj(x_v)
        # Values: mixed with the first layer's.
        if taken:
            values = torch.lerp(values, taken[0], self.v_lora(x_v).sigmoid())
        # The direction that is removed, its rate, and the key that is written.
        rate = self.a_lora(x_a).sigmoid()
        removed = F.normalize(by_head(widen(k * self.k_k), self.head_dim), dim=-1).to(x.dtype)
        k = torch.addcmul(k, k * (rate - 1), self.k_a)
        flat = r, self.w_lora(x_w), k, values, rate, self.r_k
        r, w, k, v, rate, r_k = (by_head(y, self.head_dim) for y in flat)
        bonus = (r * k * r_k).sum(-1, keepdim=True) * v
        return (r, w, k, v, -removed, removed * rate), (bonus.flatten(-2), self.g_lora(x_g), values)

    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_rwkv7(*inputs, use_gate_in_kernel=True, **how)

    def _output(self, o: Tensor, gate: tuple[Tensor, ...]) -> Tensor:
        bonus, gate, _ = gate
        return self.o_proj((self.g_norm(o) + bonus) * gate)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        return log_decay(inputs[1])


@dataclass(frozen=True, kw_only=True)
class RWKV7(RecurrentOptions):
    head_dim: Size
    # Rank of the low-rank MLP of the decay.
    w_rank: Size
    # Rank of the MLP of the rate of removal.
    a_rank: Size
    # Rank of the MLP that mixes in the first layer's values; 0 in the first layer.
    v_rank: Size
    # Rank of the MLP of the output gate.
    g_rank: Size

    name = "rwkv7"
    op = "chunk_rwkv7"
    module = RWKV7Mixer

    @property
    def first(self) -> RWKV7:
        return replace(self, v_rank=0)

    @property
    def takes(self) -> int:
        return self.heads * self.head_dim if self.v_rank else 0

    @property
    def ops(self) -> OpDims:
        return {self.op: {"K": self.head_dim, "V": self.head_dim}, **SHIFT_OPS}

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of the chunked form.

        Each token and head takes 8 K²: reading the state with r and a, and adding to it
        along k and b. Each pair of tokens in a chunk takes 8 K for the matrices of r and a
        with k and b, and 8 K for applying them, where an inverse counts as a product.
        """
        return (
            self.heads
            * self.head_dim
            * (8 * self.head_dim * documents.tokens + 16 * documents.chunk_pairs)
        )

    def scan_programs(self, ranks: int) -> int:
        return scan_programs(self.heads // ranks, kernel_dims(self.head_dim, self.head_dim)[1])

    @property
    def contradiction(self) -> str | None:
        return (
            f"{self.name} head_dim = 1, of which each head's norm makes 0"
            if self.head_dim == 1
            else None
        )


def _channels(
    width: int,
    head_dim: int,
    start: float,
    rise: float,
    wave: float = 0.0,
    power: float = 1.0,
) -> Draw:
    """Draw start + rise · (0 to 1 over all channels)^power + wave · z |z|.

    z runs from −1 to 1 over each head's channels.
    """

    def draw(elements: Elements) -> Tensor:
        n = elements.places()
        z = 2 * (n % head_dim) / (head_dim - 1) - 1
        return start + rise * (n / (width - 1)).pow(power) + wave * z * z.abs()

    return draw
