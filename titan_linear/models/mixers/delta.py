"""What the mixers of linear layers have in common, as published and as in FLA's layers.

Kimi Delta Attention and Gated DeltaNet project to q, k, v, run one short causal convolution with silu over the three,
apply a delta rule to normalised q and k, norm and gate each head's output, and project back. Their gates differ.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from titan_linear.models.config import Documents, MixerOptions, ModelConfig
from titan_linear.models.draws import Draw, time_step_bias
from titan_linear.models.layers import ConvWeight, GatedRMSNorm, project, widen, widened
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.ops import causal_conv1d
from titan_linear.ops.runtime.support import Choice


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(MixerOptions):
    heads: int
    v_heads: int  # a multiple of heads
    head_dim: int
    v_head_dim: int
    conv_size: int = 4
    beta_range: float = 1.0  # β in (0, this); 2 allows negative eigenvalues
    o_norm_eps: float | None = None  # eps of the output norm; None: the model's norm_eps

    linear: ClassVar[bool] = True
    op: ClassVar[str]  # the delta rule's name in titan_linear.ops

    def __post_init__(self) -> None:
        if self.beta_range not in (1, 2):
            raise ValueError(
                f"beta_range = {self.beta_range!r} of {self.name}: must be 1, or 2 to allow negative eigenvalues"
            )

    @property
    def any_gate(self) -> bool:
        """Whether gates are unbounded, for which the rule's kernels are slower."""
        return False

    @property
    def ops(self) -> dict[str, dict[str, int]]:
        return {self.op: {"K": self.head_dim, "V": self.v_head_dim}, "causal_conv1d": {"W": self.conv_size}}

    @property
    def contradiction(self) -> str | None:
        if self.v_heads % self.heads:
            return f"{self.name} v_heads = {self.v_heads}, which must be a multiple of heads = {self.heads}"
        return None

    def flops(self, dim: int, documents: Documents) -> int:
        """Projections to q, k, v, β, the gates and o, the convolution of q, k and v, the delta rule.

        The rule is counted by chunks, for each value head. Per token: 6 K V for reading the state with q and with k and
        for adding to it. Per pair of tokens in a chunk: 4 K for the matrices q kᵀ and k kᵀ, and 4 V for applying them,
        where the inverse of the second counts as a product. Chunks count as full squares, as kernels compute them.
        """
        K, V = self.head_dim, self.v_head_dim
        qkv = 2 * self.heads * K + self.v_heads * V
        projections = 2 * dim * (qkv + self.v_heads * (V + 1)) + self.gate_flops(dim)
        rule = self.v_heads * (6 * K * V * documents.tokens + 4 * (K + V) * documents.chunk_pairs)
        return (projections + 2 * self.conv_size * qkv) * documents.tokens + rule

    @abstractmethod
    def gate_flops(self, dim: int) -> int:
        """FLOPs per token of the projections to the decay and to the output gate."""

    @property
    def head_counts(self) -> dict[str, int]:
        return {"heads": self.heads}  # value heads are split along with them


class DeltaMixer(nn.Module):
    """The cache holds `state` [B, HV, K, V] and `conv` [B, D, W−1], the convolution's last inputs."""

    kept_whole: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")  # rounding to bfloat16 would change a document's decay
    split: ClassVar[dict[str, int]] = {  # by heads; all heads share the output norm's weight
        **{f"{x}_{kind}.weight": 0 for x in "qkv" for kind in ("proj", "conv1d")},
        "b_proj.weight": 0,
        "A_log": 0,
        "dt_bias": 0,
        "o_proj.weight": 1,
    }

    def __init__(self, options: DeltaOptions, config: ModelConfig, activation: str, A_log: Draw):
        super().__init__()
        self.head_dim, self.v_head_dim = options.head_dim, options.v_head_dim
        key_dim, value_dim = options.heads * self.head_dim, options.v_heads * self.v_head_dim
        widths = (key_dim, key_dim, value_dim)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.dim, w, bias=False) for w in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(w, options.conv_size) for w in widths)
        self.b_proj = nn.Linear(config.dim, options.v_heads, bias=False)
        self.beta_range = options.beta_range
        eps = config.norm_eps if options.o_norm_eps is None else options.o_norm_eps
        self.o_norm = GatedRMSNorm(self.v_head_dim, eps, activation)
        self.o_proj = nn.Linear(value_dim, config.dim, bias=False)
        self.initial = {"A_log": A_log, "dt_bias": time_step_bias}
        self.op = options.op
        self.implementations: dict[str, Choice] = {}
        self.cp_method = "kcp"  # "kcp" | "ulysses", under context parallelism

    def forward(self, x: torch.Tensor, plan: BatchPlan, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """x [B, T, dim] -> [B, T, dim]. A cache holds what earlier tokens left; it is updated in place."""
        q, k, v = self._convolved(x, plan, cache)
        states = {} if cache is None else {"initial_state": cache.get("state"), "output_final_state": True}
        g, beta, z = self._gates(x)
        o, state = self._rule(q, k, v, g, beta, plan, **states)
        if cache is not None:
            cache["state"] = state
        return self.o_proj(self.o_norm(o, z.unflatten(-1, (-1, self.v_head_dim))).flatten(-2))

    def watch(self, x: torch.Tensor, window: Window) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """half_life: number of tokens in which a state decays by half, ln 2 over the mean log decay of tokens and, in
        KDA, a head's channels. state_norm: 2-norm of the states at the ends of documents. carried_share: of the
        squared output over the second half of the longest document, the share that comes from its first half, through
        the state. fragment_share: of all squared outputs, the share that comes from other ranks' fragments."""
        whole, x = x, x[:, : window.tokens]
        q, k, v = self._convolved(x, window.plan, None)
        gate, beta, _ = self._gates(x)
        o, states = self._rule(q, k, v, gate, beta, window.plan, output_final_state=True)
        alone, _ = self._rule(q, k, v, gate, beta, window.halves)
        decay = -self._log_decay(gate).reshape(*gate.shape[1:3], -1).mean(-1)  # [W, HV]
        norms = widen(states).flatten(2).norm(dim=-1)  # [N, HV]
        seen = {
            "half_life": (torch.full_like(decay[0], math.log(2) * len(decay)), decay.sum(0)),
            "state_norm": (norms.sum(0), torch.full_like(norms[0], len(norms))),
            "carried_share": _share(o[0, window.carried], alone[0, window.carried]),
        }
        if window.fragments is not None:
            plan, apart = window.fragments
            inputs = *self._convolved(whole, plan, None), *self._gates(whole)[:2]
            (o, _), (alone, _) = self._rule(*inputs, plan), self._rule(*inputs, apart)
            seen["fragment_share"] = _share(o[0], alone[0])
        return seen

    def _rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        plan: BatchPlan,
        **states: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o [B, T, HV, V] and, if requested, the final states [N, HV, K, V]; gate and beta come from `_gates`."""
        return self._delta_rule(
            q,
            k,
            v,
            gate,
            beta,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.beta_range == 2.0,
            impl=self.implementations.get(self.op, "auto"),
            cp_method=self.cp_method,
            **plan.documents,
            **states,
        )

    def _convolved(self, x: torch.Tensor, plan: BatchPlan, cache: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
        """q, k [B, T, H, K] and v [B, T, HV, V] after one convolution over all three: one halo under CP."""
        weights = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj)
        states = {} if cache is None else {"initial_state": cache.get("conv"), "output_final_state": True}
        parts, tail = causal_conv1d(
            qkv,
            torch.cat(weights),
            activation="silu",
            widths=[*map(len, weights)],
            impl=self.implementations.get("causal_conv1d", "auto"),
            **plan.documents,
            **states,
        )
        if cache is not None:
            cache["conv"] = tail
        dims = self.head_dim, self.head_dim, self.v_head_dim
        return [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True)]

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The raw gate [B, T, HV] or [B, T, HV, K], the logits of β [B, T, HV], the output gate [B, T, HV·V]."""
        raise NotImplementedError

    def _log_decay(self, gate: torch.Tensor) -> torch.Tensor:
        """The log decay ≤ 0, [B, T, HV] or [B, T, HV, K], from the raw gate."""
        raise NotImplementedError

    def _delta_rule(self, *inputs: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError


def _share(o: torch.Tensor, alone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares by head [HV], of o − alone and of o, for o and alone [., HV, V]."""
    norms = partial(torch.linalg.vector_norm, dim=(0, 2), dtype=widened(o.dtype))  # in that dtype, without copies
    return norms(o - alone).square(), norms(o).square()
