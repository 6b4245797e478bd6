"""What a call asks for besides its tensors: which implementation, where entries lie, a delta rule's switches."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from titan_linear.ops.boundaries import Boundaries
from titan_linear.ops.cp.context import CPContext


@dataclass(frozen=True)
class DeltaRuleOptions:
    scale: float
    l2norm: bool = False  # normalise q and k
    gate_in_kernel: bool = False  # g is raw: apply A_log and dt_bias
    lower_bound: float | None = None  # the bounded gate, lower_bound·sigmoid(…); None: −exp(A_log)·softplus(…)
    safe_gate: bool = False  # the caller promises g ≥ −5 per token
    beta_range: float | None = None  # beta is raw: β = beta_range·sigmoid(beta); None: beta is β
    disable_recompute: bool = False  # keep the intermediates of forward for backward


def select(impl: str, device: torch.device) -> str:
    """The implementation that `impl` names for tensors on `device`; "auto" is Triton's on CUDA, else torch's."""
    if impl == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl = {impl!r} is unknown; use 'auto', 'torch' or 'triton'")
    if impl == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl = 'triton' needs tensors on a GPU, not on {device.type}; use 'auto' or 'torch'")
    return impl


def boundaries_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None, cp: CPContext | None) -> Boundaries:
    """Of x [B, T, ...]: this rank's entries under context parallelism, packed documents, or every row of the batch."""
    if cp is not None:
        return cp.stream if cp.world_size == 1 else cp.boundaries
    if cu_seqlens is None:
        B, T = x.shape[:2]
        on_host, there = (torch.arange(B + 1, dtype=torch.int32, device=d) * T for d in ("cpu", x.device))
        return Boundaries(there, on_host)
    on_host = cu_seqlens if cu_seqlens.device.type == "cpu" else None
    return Boundaries(cu_seqlens.to(x.device, torch.int32, non_blocking=True), on_host)


def check_cp(
    name: str,
    x: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    cp: CPContext,
) -> None:
    """What no recurrent op takes beside a cp_context is a ValueError; x [B, T, ...] is its argument `name`."""
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must not be passed with cp_context, which holds this rank's own")
    if initial_state is not None or output_final_state:
        raise ValueError("initial_state and output_final_state are not available with cp_context: leave them out")
    if x.shape[:2] != (1, cp.tokens):
        raise ValueError(f"{name} has [B, T] = {list(x.shape[:2])}; cp_context gives this rank [1, {cp.tokens}]")
