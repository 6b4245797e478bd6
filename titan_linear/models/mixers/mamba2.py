"""Mamba-2 (Transformers are SSMs, section 7).

Its state only decays, at rates that depend on the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.draws import ones, time_step_bias, uniform_decay
from titan_linear.models.layers import (
    AtLeast0,
    ConvWeight,
    OpDims,
    Size,
    by_head,
    cut,
    heads_split,
    parameter,
    project,
    projection,
    scaled,
    widen,
)
from titan_linear.models.mixers.recurrent import Cache, Inputs, RecurrentMixer, RecurrentOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import chunk_ssd
from titan_linear.ops.exchange.collectives import Ranks, sum_over_ranks


def gated(x: Tensor, z: Tensor) -> Tensor:
    """Return x · silu(z), in float32 or wider."""
    return widen(x) * F.silu(widen(z))


class GroupedRMSNorm(nn.Module):
    """RMSNorm(x · silu(z)) over each group of channels, times a weight."""

    split = {"weight": 0}

    def __init__(self, dim: int, groups: int, eps: float):
        super().__init__()
        self.weight = parameter(dim)
        self.width = dim // groups
        self.eps = eps
        self.initial = {"weight": ones}
        # Ranks of tensor parallelism.
        self.ranks: Ranks | None = None

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalize x, z [.., dim].

        A tensor-parallel rank has whole groups, or its part of the only group.
        """
        wide = gated(x, z)
        grouped = by_head(wide, min(self.width, wide.shape[-1]))
        squares = grouped.square().sum(-1, keepdim=True)
        # The only group spans all ranks: sum its squares over them.
        if grouped.shape[-1] < self.width:
            squares = sum_over_ranks(squares, self.ranks)
        normed = (grouped * torch.rsqrt(squares / self.width + self.eps)).flatten(-2)
        return (normed * widen(self.weight)).to(x.dtype)


class Mamba2Mixer(RecurrentMixer):
    """Mamba-2. Its states are [B, heads, P, N]."""

    kept_whole = "A_log", "D", "dt_bias"
    split = heads_split(
        "x_proj.weight",
        "z_proj.weight",
        "dt_proj.weight",
        "x_conv1d.weight",
        "x_conv1d.bias",
        "A_log",
        "D",
        "dt_bias",
    )
    # The input product is left out because it contains gates.
    float8 = (("o_proj",),)

    def __init__(self, options: Mamba2, config: ModelConfig, layer: int):
        super().__init__(options)
        self.head_dim = options.head_dim
        self.state_dim = options.state_dim
        self.dt_limit = options.dt_min, options.dt_max
        self.z_factor = options.z_factor
        self.dt_factor = options.dt_factor
        self.out_factor = options.out_factor
        # Factors on x, B and C go into the convolution, which is linear.
        conv_factors = options.x_factor, options.b_factor, options.c_factor
        inner, *_ = widths = options.widths
        # Input projections and convolutions.
        self.x_proj, self.b_proj, self.c_proj = (projection(config.dim, w) for w in widths)
        self.z_proj = projection(config.dim, inner)
        self.dt_proj = projection(config.dim, options.heads)
        self.x_conv1d, self.b_conv1d, self.c_conv1d = (
            ConvWeight(w, options.conv_size, options.conv_bias, f)
            for w, f in zip(widths, conv_factors, strict=True)
        )
        # Parameters of each head, then the output's norm and projection.
        self.A_log, self.D, self.dt_bias = (parameter(options.heads) for _ in range(3))
        self.o_norm = (
            GroupedRMSNorm(inner, options.groups, config.norm_eps) if options.output_norm else None
        )
        self.o_proj = projection(inner, config.dim)
        self.initial = {"A_log": uniform_decay(1.0), "D": ones, "dt_bias": time_step_bias}
        # Several groups are split over ranks of tensor parallelism; all ranks compute a
        # single one.
        if options.groups > 1:
            of_groups = (
                f"{x}_{of}" for x in "bc" for of in ("proj.weight", "conv1d.weight", "conv1d.bias")
            )
            self.split = {**self.split, **dict.fromkeys(of_groups, 0)}

    def _inputs(self, x: Tensor, plan: BatchPlan, cache: Cache) -> tuple[Inputs, Tensor]:
        """Return the recurrence's inputs and z [B, T, heads·P].

        The inputs are x [B, T, heads, P], dt [B, T, heads], B and C [B, T, G, N].
        """
        projections = self.x_proj, self.b_proj, self.c_proj, self.z_proj, self.dt_proj
        x_dim, b_dim, c_dim, z_dim, heads = (len(p.weight) for p in projections)
        xbc, z, dt = cut(project(x, *projections), x_dim + b_dim + c_dim, z_dim, heads)
        convolutions = [self.x_conv1d, self.b_conv1d, self.c_conv1d]
        x, B, C = self._convolved(
            xbc, convolutions, (self.head_dim, self.state_dim, self.state_dim), plan, cache
        )
        return (x, scaled(dt, self.dt_factor), B, C), scaled(z, self.z_factor)

    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        x, dt, B, C = inputs
        return chunk_ssd(
            x,
            dt,
            -self.A_log.exp(),
            B,
            C,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            initial_states=how.pop("initial_state"),
            return_final_states=how.pop("output_final_state"),
            **how,
        )

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        o = o.flatten(-2)
        o = gated(o, gate).to(o.dtype) if self.o_norm is None else self.o_norm(o, gate)
        return scaled(self.o_proj(o), self.out_factor)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        _, dt, _, _ = inputs
        return -self.A_log.exp() * F.softplus(widen(dt) + self.dt_bias).clamp(*self.dt_limit)


@dataclass(frozen=True, kw_only=True)
class Mamba2(RecurrentOptions):
    head_dim: Size
    state_dim: Size
    # Groups of heads that share B and C; the output norm is over each group's channels.
    groups: Size = 1
    conv_size: Size = 4
    conv_bias: bool = True
    # Limits of the time steps.
    dt_min: AtLeast0 = 0.0
    dt_max: float = math.inf
    # Factors on the projections to z, x, B, C and Δ, and on the output's.
    z_factor: AtLeast0 = 1.0
    x_factor: AtLeast0 = 1.0
    b_factor: AtLeast0 = 1.0
    c_factor: AtLeast0 = 1.0
    dt_factor: AtLeast0 = 1.0
    out_factor: AtLeast0 = 1.0
    # Whether the output has a norm; otherwise it is only gated.
    output_norm: bool = True

    name = "mamba2"
    op = "chunk_ssd"
    module = Mamba2Mixer

    @property
    def ops(self) -> OpDims:
        return {
            self.op: {"K": self.state_dim, "V": self.head_dim},
            "causal_conv1d": {"W": self.conv_size},
        }

    @property
    def contradiction(self) -> str | None:
        if self.heads % self.groups:
            return f"{self.name} heads = {self.heads}, which must be a multiple of groups = {self.groups}"
        # This is also false for NaN.
        if not self.dt_min <= self.dt_max:
            return f"{self.name} dt_min = {self.dt_min}, above dt_max = {self.dt_max}"
        return None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of x, B and C."""
        return (
            self.heads * self.head_dim,
            self.groups * self.state_dim,
            self.groups * self.state_dim,
        )

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of the chunked form.

        Each token and head takes 4 N P: reading the state and adding to it. Each pair of
        tokens in a chunk takes 2 N for each group's C Bᵀ, and 2 P for each head's use of
        it.
        """
        inner = self.heads * self.head_dim
        N = self.state_dim
        return (
            4 * inner * N * documents.tokens + 2 * (self.groups * N + inner) * documents.chunk_pairs
        )

    @property
    def head_counts(self) -> dict[str, int]:
        """A single group is not split: all ranks compute its B and C."""
        return super().head_counts | ({"groups": self.groups} if self.groups > 1 else {})

    def indivisible_heads(self, ranks: int) -> str | None:
        return f"{self.groups} groups" if self.groups % ranks else super().indivisible_heads(ranks)
