"""What a call asks for besides its tensors: which implementation, and a delta rule's numbers and switches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeltaRuleOptions:
    scale: float
    l2norm: bool = False  # normalise q and k
    gate_in_kernel: bool = False  # g is raw: apply A_log and dt_bias
    lower_bound: float | None = None  # the bounded gate, lower_bound·sigmoid(…); None: −exp(A_log)·softplus(…)
    safe_gate: bool = False  # the caller promises g ≥ −5 per token
    disable_recompute: bool = False  # keep the intermediates of forward for backward


def select(impl: str, available: Iterable[str], device: torch.device) -> str:
    """The implementation that `impl` names; "auto" is Triton's on CUDA, where the op has one."""
    if impl == "auto":
        return "triton" if device.type == "cuda" and "triton" in available else "torch"
    if impl not in available:
        raise ValueError(f"impl = {impl!r} is not available for this op; use 'auto' or one of {list(available)}")
    return impl
