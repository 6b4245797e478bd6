"""The mixers of linear layers: Kimi Delta Attention and Gated DeltaNet, as published and as in FLA's layers.

Both project to q, k, v, run one short causal convolution with silu over the three, apply a delta rule to normalised
q and k, norm and gate each head's output, and project back. They differ in their gates.
"""

from __future__ import annotations

import torch
from torch import nn

from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import ConvWeight, GatedRMSNorm
from titan_linear.models.packed import Packed
from titan_linear.ops import causal_conv1d, chunk_gated_delta_rule, chunk_kda


class _DeltaMixer(nn.Module):
    def __init__(self, config: ModelConfig, activation: str):
        super().__init__()
        self.heads, self.v_heads = config.linear_heads, config.linear_v_heads
        self.head_dim, self.v_head_dim = config.linear_head_dim, config.linear_v_head_dim
        key_dim, value_dim = self.heads * self.head_dim, self.v_heads * self.v_head_dim
        self.widths = (key_dim, key_dim, value_dim)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.dim, w, bias=False) for w in self.widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(w, config.conv_size) for w in self.widths)
        self.b_proj = nn.Linear(config.dim, self.v_heads, bias=False)
        self.beta_range = config.beta_range
        eps = config.norm_eps if config.o_norm_eps is None else config.o_norm_eps
        self.o_norm = GatedRMSNorm(self.v_head_dim, eps, activation)
        self.o_proj = nn.Linear(value_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, packed: Packed, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """x [B, T, dim] -> [B, T, dim]. A cache holds what earlier tokens left, and is brought up to date."""
        q, k, v = self._convolved(x, packed, cache)
        beta = self.b_proj(x).sigmoid() * self.beta_range  # [B, T, HV]
        states = {} if cache is None else {"initial_state": cache.get("state"), "output_final_state": True}
        o, state = self._delta_rule(
            q, k, v, self._raw_gate(x), beta, A_log=self.A_log, dt_bias=self.dt_bias, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, impl=packed.impl, cp_method=packed.linear_method, **packed.documents, **states,
        )  # fmt: skip
        if cache is not None:
            cache["state"] = state
        z = self.g_proj(x).unflatten(-1, (self.v_heads, self.v_head_dim))
        return self.o_proj(self.o_norm(o, z).flatten(-2))

    def _convolved(self, x: torch.Tensor, packed: Packed, cache: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
        """q, k [B, T, H, K] and v [B, T, HV, V] after the convolution: one over the three, so one halo under CP."""
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        states = {} if cache is None else {"initial_state": cache.get("conv"), "output_final_state": True}
        qkv, tail = causal_conv1d(qkv, weight, activation="silu", impl=packed.impl, **packed.documents, **states)
        if cache is not None:
            cache["conv"] = tail
        q, k, v = qkv.split(self.widths, -1)
        return [
            q.unflatten(-1, (self.heads, self.head_dim)),
            k.unflatten(-1, (self.heads, self.head_dim)),
            v.unflatten(-1, (self.v_heads, self.v_head_dim)),
        ]

    def _raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _delta_rule(self, *inputs: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError


class KDAMixer(_DeltaMixer):
    """A gate per channel from a low-rank projection; the output gate is low-rank too (Kimi Linear, section 4)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, activation="sigmoid")
        self.lower_bound, gate_bias = config.kda_lower_bound, config.kda_gate_bias
        rank, gate_dim, value_dim = self.v_head_dim, self.v_heads * self.head_dim, self.v_heads * self.v_head_dim
        self.f_proj = nn.Sequential(nn.Linear(config.dim, rank, bias=False), nn.Linear(rank, gate_dim, bias=False))
        self.g_proj = nn.Sequential(nn.Linear(config.dim, rank, bias=False), nn.Linear(rank, value_dim, gate_bias))
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim))

    def _raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.f_proj(x).unflatten(-1, (self.v_heads, self.head_dim))

    def _delta_rule(self, *inputs: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunk_kda(*inputs, lower_bound=self.lower_bound, **options)


class GDNMixer(_DeltaMixer):
    """A gate per head (Gated Delta Networks, section 3.3)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, activation="silu")
        self.a_proj = nn.Linear(config.dim, self.v_heads, bias=False)
        self.g_proj = nn.Linear(config.dim, self.v_heads * self.v_head_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))

    def _raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_proj(x)

    def _delta_rule(self, *inputs: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunk_gated_delta_rule(*inputs, **options)
