"""What a call asks for besides its tensors: which implementation, where entries lie, a delta rule's switches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch

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


@dataclass(frozen=True, eq=False)
class Entries:
    """The boundaries of sequences, documents or parts of them in a packed stream, for whoever asks for them.

    The host's copy of a tensor on a GPU costs a synchronisation, and only implementations that loop on the host ask.
    """

    boundaries: torch.Tensor  # [N+1] int
    on_host: torch.Tensor | None = None  # the same on the CPU, where it is known
    fixed: bool = False  # stages will be asked for single entries (context parallelism): none may be split

    def __len__(self) -> int:
        return self.boundaries.numel() - 1

    @cached_property
    def host(self) -> list[int]:
        return (self.boundaries if self.on_host is None else self.on_host).tolist()

    def on(self, device: torch.device) -> torch.Tensor:
        """[N+1] int32."""
        return self.boundaries.to(device, torch.int32, non_blocking=True)


def entries_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None, cp: CPContext | None) -> Entries:
    """Of x [B, T, ...]: this rank's under CP, packed documents, or else every row of the batch."""
    if cp is not None:
        return Entries(cp.cu_seqlens, cp.cu_seqlens_cpu, fixed=True)
    if cu_seqlens is not None:
        return Entries(cu_seqlens)
    return Entries(torch.arange(x.shape[0] + 1) * x.shape[1])


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
    if x.shape[:2] != (1, cp.offsets[-1]):
        raise ValueError(f"{name} has [B, T] = {list(x.shape[:2])}; cp_context gives this rank [1, {cp.offsets[-1]}]")
