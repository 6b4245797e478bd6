"""The short causal convolution of the linear-attention layers, the public function."""

from __future__ import annotations

from typing import Any

import torch

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.halo import conv_halo
from titan_linear.ops.options import Entries, batch_entries, select
from titan_linear.ops.torch import convolution as torch_convolution


def _triton() -> Any:
    from titan_linear.ops.triton.conv1d import packed_conv1d  # Triton is there on Linux only

    return packed_conv1d


IMPLEMENTATIONS = {"torch": lambda: torch_convolution.causal_conv1d, "triton": _triton}


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_context: CPContext | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y_t = act(Σ_j weight[:, j] · x_{t−W+1+j} + bias), channel by channel, within each sequence or packed document.

    Args:
        x: [B, T, D]; weight: [D, W]; bias: [D].
        activation: None, "silu" or "swish" (the same).
        initial_state: [N, D, W−1], the last inputs before each sequence or document; zeros by default.
        cu_seqlens: [N + 1] int, boundaries of packed documents (B = 1).
        cp_context: x is this rank's tokens; the W−1 tokens before its fragments are fetched. Neither cu_seqlens nor
            states may be given.
        impl: "auto", "torch" or "triton".

    Returns: y [B, T, D] in x's dtype; the last inputs of each document [N, D, W−1], or None.
    """
    B, T, D = x.shape
    W = weight.shape[-1]
    if weight.shape != (D, W):
        raise ValueError(f"weight {tuple(weight.shape)} must be [D, W] with D = {D}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation = {activation!r} is unknown; use None, 'silu' or 'swish'")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens describes one packed stream: B must be 1, not {B}")
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (N, D, W - 1):
        raise ValueError(f"initial_state {tuple(initial_state.shape)} must be [N, D, W−1] = [{N}, {D}, {W - 1}]")
    flat = x.flatten(0, 1)
    if cp_context is not None:
        _check_cp(x, W, initial_state, output_final_state, cu_seqlens, cp_context)
        entries = Entries(cp_context.cu_seqlens, cp_context.cu_seqlens_cpu)
        past = _past_under_cp(flat, W, cp_context)
    else:
        entries = batch_entries(B, T) if cu_seqlens is None else Entries(cu_seqlens)
        past = initial_state
    convolve = IMPLEMENTATIONS[select(impl, x.device)]()
    y, final = convolve(flat, weight, bias, past, entries, activation, output_final_state)
    return y.unflatten(0, (B, T)), final


def _past_under_cp(x: torch.Tensor, W: int, cp: CPContext) -> torch.Tensor:
    """[N, D, W−1]: what lies before each local entry, other than zeros only for the first of a fragment."""
    halo = conv_halo(x, W - 1, cp).transpose(1, 2)  # [slots, D, W−1]
    past = x.new_zeros(len(cp.cu_seqlens_cpu) - 1, x.shape[1], W - 1)
    first = torch.tensor([first for first, _ in cp.entries]).to(x.device, non_blocking=True)
    return past.index_copy(0, first, halo)


def _check_cp(
    x: torch.Tensor,
    W: int,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    cp: CPContext,
) -> None:
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must not be passed with cp_context, which holds this rank's own")
    if initial_state is not None or output_final_state:
        raise ValueError("initial_state and output_final_state are not available with cp_context: leave them out")
    if x.shape[:2] != (1, cp.offsets[-1]):
        raise ValueError(f"x has [B, T] = {list(x.shape[:2])}; cp_context gives this rank [1, {cp.offsets[-1]}]")
    if cp.conv1d_kernel_size not in (None, W):
        raise ValueError(f"weight has W = {W}; cp_context was built with conv1d_kernel_size = {cp.conv1d_kernel_size}")
