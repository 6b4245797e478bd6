"""Kimi Delta Attention and Gated DeltaNet, as published and as in FLA's layers.

Both project to q, k and v, run one short causal convolution with silu over the three, which
also normalizes q and k, apply a delta rule, normalize and gate each head's output, and
project back. Their gates differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.draws import Draw, time_step_bias, uniform_decay, zeros
from titan_linear.models.layers import (
    Above0,
    AtLeast0,
    ConvWeight,
    GatedRMSNorm,
    OpDims,
    Size,
    by_head,
    heads_split,
    parameter,
    project,
    project_each,
    projection,
    widen,
)
from titan_linear.models.mixers.recurrent import Cache, Inputs, RecurrentMixer, RecurrentOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import chunk_gated_delta_rule, chunk_kda
from titan_linear.ops.delta_rule import is_bound
from titan_linear.ops.layout.segments import scan_programs
from titan_linear.ops.triton.configs import kernel_dims

IN_KERNEL = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(RecurrentOptions):
    v_heads: Size  # a multiple of heads
    head_dim: Size
    v_head_dim: Size
    conv_size: Size = 4
    # Range of β is (0, this); 2 allows negative eigenvalues.
    beta_range: AtLeast0 = 1.0
    # Epsilon of the output norm; None: the model's norm_eps.
    o_norm_eps: Above0 | None = None

    def __post_init__(self) -> None:
        if self.beta_range not in (1, 2):
            raise ValueError(
                f"beta_range = {self.beta_range!r} of {self.name}: must be 1, or 2 to allow negative eigenvalues"
            )

    @property
    def ops(self) -> OpDims:
        return {
            self.op: {"K": self.head_dim, "V": self.v_head_dim},
            "causal_conv1d": {"W": self.conv_size},
        }

    @property
    def contradiction(self) -> str | None:
        if self.v_heads % self.heads:
            return f"{self.name} v_heads = {self.v_heads}, which must be a multiple of heads = {self.heads}"
        return None

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of the chunked form, for each value head.

        Each token takes 6 K V operations: reading the state with q and k, and adding to it.
        Each pair of tokens in a chunk takes 4 K for the matrices q kᵀ and k kᵀ, and 4 V for
        applying them, where the inverse of the second counts as a product. Chunks count as
        full squares, as kernels compute them.
        """
        K = self.head_dim
        V = self.v_head_dim
        return self.v_heads * (6 * K * V * documents.tokens + 4 * (K + V) * documents.chunk_pairs)

    def scan_programs(self, ranks: int) -> int:
        return scan_programs(self.v_heads // ranks, kernel_dims(self.head_dim, self.v_head_dim)[1])


class DeltaMixer(RecurrentMixer):
    """Mixer with a delta rule. Its states are [B, HV, K, V]."""

    # Rounding to bfloat16 would change a document's decay.
    kept_whole = "A_log", "dt_bias"
    # Split by heads; all heads share the output norm's weight.
    split = heads_split(
        *(f"{x}_{kind}.weight" for x in "qkv" for kind in ("proj", "conv1d")),
        "b_proj.weight",
        "A_log",
        "dt_bias",
    )
    float8 = ("q_proj", "k_proj", "v_proj"), ("o_proj",)

    def __init__(self, options: DeltaOptions, config: ModelConfig, activation: str, A_log: Draw):
        super().__init__(options)
        self.head_dim = options.head_dim
        self.v_head_dim = options.v_head_dim
        key_dim = options.heads * self.head_dim
        value_dim = options.v_heads * self.v_head_dim
        # Projections and convolutions of q, k and v.
        widths = key_dim, key_dim, value_dim
        self.q_proj, self.k_proj, self.v_proj = (projection(config.dim, w) for w in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ConvWeight(w, options.conv_size) for w in widths
        )
        # β, then the output's norm and projection.
        self.b_proj = projection(config.dim, options.v_heads)
        self.beta_range = options.beta_range
        eps = config.norm_eps if options.o_norm_eps is None else options.o_norm_eps
        self.o_norm = GatedRMSNorm(self.v_head_dim, eps, activation)
        self.o_proj = projection(value_dim, config.dim)
        self.initial = {"A_log": A_log, "dt_bias": time_step_bias}

    def _inputs(self, x: Tensor, plan: BatchPlan, cache: Cache) -> tuple[Inputs, Tensor]:
        """Return the recurrence's inputs and the output gate [B, T, HV·V].

        The inputs are q, k [B, T, H, K], v [B, T, HV, V], the raw gate, and the logits of
        β.
        """
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj)
        convolutions = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
        dims = self.head_dim, self.head_dim, self.v_head_dim
        q, k, v = self._convolved(qkv, convolutions, dims, plan, cache, norm_dim=self.head_dim)
        g, beta, z = self._gates(x)
        return (q, k, v, g, beta), z

    def _of_gates(self) -> dict[str, Any]:
        """Return the delta rule's arguments about gates."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            **IN_KERNEL,
            "allow_neg_eigval": self.beta_range == 2.0,
        }

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(o, by_head(gate, self.v_head_dim)).flatten(-2))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates computed from x.

        Returns:
            The raw gate [B, T, HV] or [B, T, HV, K], the logits of β [B, T, HV], and the
            output gate [B, T, HV·V].
        """
        raise NotImplementedError


# --- Kimi Delta Attention --------------------------------------------------------------


class KDAMixer(DeltaMixer):
    """KDA. The gate and the output gate come from low-rank projections or from full ones."""

    # Of the low-rank projections, only the second factors are split.
    split = {
        **DeltaMixer.split,
        **{
            f"{gate}_proj.{part}": 0
            for gate in "fg"
            for part in ("weight", "bias", "1.weight", "1.bias")
        },
    }

    def __init__(self, options: KDA, config: ModelConfig, layer: int):
        A_log = uniform_decay(1.0) if options.lower_bound is None else zeros
        super().__init__(options, config, "sigmoid", A_log)
        self.lower_bound = options.lower_bound
        # Full projections, or the second factors of low-rank ones.
        gate_dim = options.v_heads * self.head_dim
        value_dim = options.v_heads * self.v_head_dim
        self.low_rank_gates = options.low_rank_gates
        rank = self.v_head_dim if self.low_rank_gates else config.dim
        f_proj: Any = projection(rank, gate_dim)
        g_proj: Any = projection(rank, value_dim, options.gate_bias)
        if self.low_rank_gates:
            f_proj, g_proj = (
                nn.Sequential(projection(config.dim, rank), second) for second in (f_proj, g_proj)
            )
        self.f_proj = f_proj
        self.g_proj = g_proj
        self.A_log = parameter(options.v_heads)
        self.dt_bias = parameter(gate_dim)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = g = x
        f_out = self.f_proj
        g_out = self.g_proj
        if self.low_rank_gates:
            f, g = project_each(x, f_out[0], g_out[0])
            f_out = f_out[1]
            g_out = g_out[1]
        return by_head(f_out(f), self.head_dim), self.b_proj(x), g_out(g)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        _, _, _, gate, _ = inputs
        rate = self.A_log.exp()[:, None]
        gate = widen(gate) + self.dt_bias.view(-1, self.head_dim)
        return (
            -rate * F.softplus(gate)
            if self.lower_bound is None
            else self.lower_bound * (rate * gate).sigmoid()
        )

    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_kda(*inputs, lower_bound=self.lower_bound, **self._of_gates(), **how)


@dataclass(frozen=True, kw_only=True)
class KDA(DeltaOptions):
    # Lower bound of the bounded gate, whose kernels are faster; None:
    # −exp(A_log)·softplus(…).
    lower_bound: float | None = -5.0
    # Whether the output gate has a bias.
    gate_bias: bool = True
    # Whether each gate goes through `v_head_dim` channels; otherwise it is one projection.
    low_rank_gates: bool = True

    name = "kda"
    op = "chunk_kda"
    module = KDAMixer

    @property
    def contradiction(self) -> str | None:
        if self.lower_bound is not None and not is_bound(self.lower_bound):
            return f"{self.name} lower_bound = {self.lower_bound}, which must be null or lie in [-5, 0)"
        return super().contradiction


# --- Gated DeltaNet --------------------------------------------------------------------


class GDNMixer(DeltaMixer):
    split = {**DeltaMixer.split, "a_proj.weight": 0, "g_proj.weight": 0}

    def __init__(self, options: GDN, config: ModelConfig, layer: int):
        super().__init__(options, config, "silu", uniform_decay(0.0))
        self.a_proj = projection(config.dim, options.v_heads)
        self.g_proj = projection(config.dim, options.v_heads * self.v_head_dim)
        self.A_log = parameter(options.v_heads)
        self.dt_bias = parameter(options.v_heads)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *project_each(x, self.a_proj, self.b_proj), self.g_proj(x)

    def _log_decay(self, inputs: Inputs) -> Tensor:
        _, _, _, gate, _ = inputs
        return -self.A_log.exp() * F.softplus(widen(gate) + self.dt_bias)

    def _rule(self, inputs: Inputs, **how: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(*inputs, **self._of_gates(), **how)


@dataclass(frozen=True, kw_only=True)
class GDN(DeltaOptions):
    name = "gdn"
    op = "chunk_gated_delta_rule"
    module = GDNMixer
