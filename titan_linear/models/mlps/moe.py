"""Mixture of experts.

A router sends each token to `top_k` of many MLPs, and one shared expert takes every token.

There are two ways to balance the experts' loads. The load-balance loss (Switch
Transformers, section 2.2) is computed per stream, so that it does not depend on how streams
are split among ranks and micro-steps. The selection bias (DeepSeek-V3, section 2.1.2) moves
after each step: see `move_selection_biases` in step/update.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_linear.models.draws import zeros
from titan_linear.models.layers import (
    Above0,
    AtLeast0,
    Cache,
    OpDims,
    OpModule,
    Output,
    Size,
    SizeOr0,
    lora_name,
    parameter,
    projection,
)
from titan_linear.models.mlps.dense import Activation, Dense
from titan_linear.models.mlps.options import MLPOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.experts import (
    COPIES,
    Copies,
    activate,
    by_expert,
    grouped_linear,
    loads,
    router_logits,
    spread,
    stream_means,
    top_k,
)
from titan_linear.ops.runtime.support import Choice


@dataclass(frozen=True)
class MoEConfig(MLPOptions):
    num_experts: Size
    top_k: Size  # experts per token
    # Hidden channels of each expert.
    hidden_dim: Size
    # Hidden channels of the shared expert, which every token goes through; 0: no shared
    # expert.
    shared_hidden_dim: SizeOr0 = 0
    # Whether to multiply the shared expert's output by sigmoid(a linear of x).
    shared_gate: bool = False
    # How router logits become scores.
    score: Literal["softmax", "sigmoid"] = "softmax"
    # Whether to divide a token's weights by their sum.
    normalise: bool = True
    # Added to this sum.
    normalise_eps: Above0 = 1e-20
    # Factor on the weights.
    scale: Above0 = 1.0
    # Whether a bias is added to scores to choose experts, but not to weigh them
    # (DeepSeek-V3, section 2.1.2).
    selection_bias: bool = False
    # Number of groups; experts are chosen from the best `top_groups` groups.
    groups: Size = 1
    top_groups: Size = 1
    # Factor on the load-balance loss.
    balance_coefficient: AtLeast0 = 0.0
    # Change of the selection bias per step, towards equal loads; 0: the bias stays
    # constant.
    bias_update_rate: AtLeast0 = 0.0
    # Activation of all experts.
    activation: Activation = "swiglu"
    # Width of what routed experts read and write, projected from and to the model's width;
    # 0: the model's width.
    latent_dim: SizeOr0 = 0

    name = "moe"

    @property
    def contradiction(self) -> str | None:
        """Values that contradict each other, worded for a message, or None."""
        if self.top_k > self.num_experts:
            return f"top_k = {self.top_k}, more than num_experts = {self.num_experts}"
        if self.shared_gate and not self.shared_hidden_dim:
            return "shared_gate = True, and shared_hidden_dim = 0 leaves nothing to gate"
        if self.bias_update_rate and not self.selection_bias:
            return f"bias_update_rate = {self.bias_update_rate}, and selection_bias = False leaves nothing to move"
        if self.groups == 1:
            return None
        size, rest = divmod(self.num_experts, self.groups)
        # Groups are ranked by their two best experts.
        if rest or size < 2:
            return f"num_experts = {self.num_experts} in groups = {self.groups}, which must be of one size, two or more"
        if self.top_groups > self.groups:
            return f"top_groups = {self.top_groups}, more than groups = {self.groups}"
        if self.top_k > self.top_groups * size:
            return f"top_k = {self.top_k}, more than the experts of top_groups = {self.top_groups} groups of {size}"
        return None

    def width(self, dim: int) -> int:
        """Return the width of what the routed experts read and write."""
        return self.latent_dim or dim

    def build(self, dim: int, depth: float = 0.0) -> MoE:
        return MoE(dim, self)

    def ops(self, dim: int, tp: int) -> OpDims:
        # Sizes of the last product; the first has O, then 2 I or I.
        sizes = {"I": self.hidden_dim // tp, "O": self.width(dim)}
        swiglu: OpDims = (
            {"swiglu": {}} if self.shared_hidden_dim and self.activation == "swiglu" else {}
        )
        return {**swiglu, "expert_copies": {}, "grouped_linear": sizes}

    @property
    def split_counts(self) -> dict[str, int]:
        shared = (
            {"hidden channels of the shared expert": self.shared_hidden_dim}
            if self.shared_hidden_dim
            else {}
        )
        return {"hidden channels of each expert": self.hidden_dim, **shared}


class Router(OpModule):
    """Selects the experts of each token and their weights. Scores are in float32 or wider."""

    # bfloat16 would lose its small updates.
    kept_whole = ("selection_bias",)
    hidden_matrices = ("weight",)

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = parameter(config.num_experts, dim)
        self.selection_bias = parameter(config.num_experts) if config.selection_bias else None
        if self.selection_bias is not None:
            self.selection_bias.requires_grad_(False)
        self.initial = {"selection_bias": zeros}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens: x [N, dim] -> experts [N, k] int64, weights [N, k], scores [N, E]."""
        c = self.config
        logits = router_logits(x, self.weight)
        scores = logits.softmax(-1) if c.score == "softmax" else logits.sigmoid()
        # The bias influences which experts are chosen, but not their weights.
        experts = self.choose(scores.detach())
        weights = scores.gather(1, experts)
        if c.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + c.normalise_eps)
        return experts, weights * c.scale, scores

    def choose(self, scores: Tensor) -> Tensor:
        """Choose the k experts with the best scores, bias included.

        With groups, they come from the groups whose two best scores are best. Among equal
        scores, the first win.
        """
        c = self.config
        passes = COPIES.implementation(self.impl("expert_copies"), scores.device, scores.dtype)
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        # Exclude the experts of all but the best groups.
        if c.groups > 1:
            grouped = scores.unflatten(1, (c.groups, -1))  # [N, groups, E/groups]
            best = top_k(grouped.topk(2, -1).values.sum(-1), c.top_groups, passes)
            out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
        return top_k(scores, c.top_k, passes)


class Experts(OpModule):
    """Many MLPs of one shape, their weights stacked."""

    # All are split by hidden channels.
    split = {"gate_up_proj": 2, "up_proj": 1, "down_proj": 2}

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        E = config.num_experts
        hidden = config.hidden_dim
        self.gated = config.activation == "swiglu"
        up = "gate_up_proj" if self.gated else "up_proj"
        down = "down_proj"
        self.hidden_matrices = up, down
        # [experts, 2 if gated (gate, then up), hidden, dim]
        setattr(self, up, parameter(E, *[2] * self.gated, hidden, dim))
        setattr(self, down, parameter(E, dim, hidden))
        # Adapted weight → factor; each expert has its own A and B (models/lora.py).
        self.lora: dict[str, float] = {}

    def forward(self, x: Tensor, copies: Copies, weights: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts.

        Args:
            x: [N, dim] tokens.
            copies: rows, sorted by expert.
            weights: [N, k].
            counts: [E] int64, each expert's rows.

        Returns:
            Σ weight · output of each token's copies, [N, dim].
        """
        up, down = self.hidden_matrices
        rows = spread(x, copies, self._impls[1])
        hidden = activate(
            self._linear(rows, up, counts), weights, copies, self.gated, self._impls[1]
        )
        return self._linear(hidden, down, counts, copies)

    def _linear(self, x: Tensor, name: str, counts: Tensor, copies: Copies | None = None) -> Tensor:
        """Multiply by a weight and add its adapter's output.

        With `copies`, the rows of each token are summed.
        """
        y = grouped_linear(x, getattr(self, name).flatten(1, -2), counts, self._impls, copies)
        if name not in self.lora:
            return y
        # The adapter's contribution.
        A, B = (getattr(self, lora_name(name, part)) for part in "AB")
        low = grouped_linear(x, A, counts, self._impls)
        added = grouped_linear(low, B.flatten(1, -2), counts, self._impls, copies, keep=False)
        return torch.add(y, added, alpha=self.lora[name])

    @property
    def _impls(self) -> tuple[str | Choice, str | Choice]:
        return self.impl("grouped_linear"), self.impl("expert_copies")


class LocalDispatch:
    """The `dispatch` of a rank that has all experts.

    It also defines the interface that `MoE` expects of any other dispatch.
    """

    def __init__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        counts: Tensor,
        copies: int | None = None,
        impl: str | Choice = "auto",
    ):
        """Sort copies of tokens by expert.

        Args:
            x: [N, dim].
            experts, weights: [N, k] of each token; expert -1: none.
            counts: [E] int64, number of copies for each expert.
            copies: sum of `counts`; None: every token has k copies.
        """
        self.x = x
        self.weights = weights
        self.counts = counts
        self.copies = by_expert(experts, len(counts), experts.numel() if copies is None else copies)

    def arrived(self) -> tuple[Tensor, Copies, Tensor, Tensor]:
        """Return the arguments of `Experts`."""
        return self.x, self.copies, self.weights, self.counts

    def back(self, y: Tensor) -> Tensor:
        """Return Σ weight · output of each token given to `__init__`, [N, dim].

        y is the output of the experts.
        """
        return y


class MoE(OpModule):
    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.router = Router(dim, config)
        self.experts = Experts(config.width(dim), config)
        if config.latent_dim:
            self.latent_in_proj = projection(dim, config.latent_dim)
            self.latent_out_proj = projection(config.latent_dim, dim)
        shared = Dense(config.shared_hidden_dim, config.activation)
        self.shared = shared.build(dim) if config.shared_hidden_dim else None
        self.shared_gate = projection(dim, 1) if config.shared_gate else None
        self.dispatch: Callable[..., LocalDispatch] = LocalDispatch
        # [E] int64, tokens sent to each expert in this step
        self.loads: Tensor
        self.register_buffer(
            "loads", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False
        )

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Output:
        """Apply the layer: x [B, T, dim] -> [B, T, dim].

        The output includes this rank's part of the load-balance loss, or None where it is
        not wanted.
        """
        flat = x.flatten(0, 1)
        # Route the tokens and count the loads.
        experts, weights, scores = self.router(flat)
        counts = loads(experts, self.config.num_experts)
        # Only training counts. Activation checkpointing counts all loads twice, which does
        # not change their ranking.
        if torch.is_grad_enabled():
            self.loads += counts
        # Routed experts may work on a narrower latent.
        latent = self.latent_in_proj(flat) if self.config.latent_dim else flat
        impl = self.impl("expert_copies")
        sent = self.dispatch(latent, experts, weights, counts, impl=impl)
        # Computed while rows travel.
        shared = self._shared(flat)
        y = sent.back(self.experts(*sent.arrived()))
        y = self.latent_out_proj(y) if self.config.latent_dim else y
        y = y if shared is None else y + shared
        return Output(y.view_as(x), self._balance_loss(experts, scores, plan))

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        y = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()

    def _balance_loss(self, experts: Tensor, scores: Tensor, plan: BatchPlan) -> Tensor | None:
        """Return coefficient · E · Σ_e f_e Σ_t p_te over this rank's tokens.

        f_e is the share of the stream's tokens sent to expert e, and p are the scores,
        scaled to sum to 1. The sum is over tokens with or without a label.
        """
        c = self.config
        if not (c.balance_coefficient and torch.is_grad_enabled()):
            return None
        chosen = torch.zeros_like(scores).scatter_(1, experts, 1.0)
        share = stream_means(chosen, plan.num_streams, plan.cp_context)  # [streams, E]
        p = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (plan.num_streams, -1)).sum(1)
        return c.balance_coefficient * c.num_experts * (share * p).sum()
