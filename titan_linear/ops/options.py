"""The numbers and switches of one delta-rule call, as every implementation reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleOptions:
    scale: float
    l2norm: bool = False  # normalise q and k
    gate_in_kernel: bool = False  # g is raw: apply A_log and dt_bias
    lower_bound: float | None = None  # the bounded gate, lower_bound·sigmoid(…); None: −exp(A_log)·softplus(…)
    safe_gate: bool = False  # the caller promises g ≥ −5 per token
    disable_recompute: bool = False  # keep the intermediates of forward for backward
