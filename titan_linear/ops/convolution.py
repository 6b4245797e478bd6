"""The short causal convolution of the linear-attention layers, the public function."""

from __future__ import annotations

from typing import Any

import torch

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.halo import conv_halo
from titan_linear.ops.options import check_cp, entries_of, select
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
    flat, past = x.flatten(0, 1), initial_state
    if cp_context is not None:
        check_cp("x", x, initial_state, output_final_state, cu_seqlens, cp_context)
        if cp_context.conv1d_kernel_size not in (None, W):
            built = cp_context.conv1d_kernel_size
            raise ValueError(f"weight has W = {W}; cp_context was built with conv1d_kernel_size = {built}")
        past = _past_under_cp(flat, W, cp_context)
    entries = entries_of(x, cu_seqlens, cp_context)
    convolve = IMPLEMENTATIONS[select(impl, x.device)]()
    y, final = convolve(flat, weight, bias, past, entries, activation, output_final_state)
    return y.unflatten(0, (B, T)), final


def _past_under_cp(x: torch.Tensor, W: int, cp: CPContext) -> torch.Tensor:
    """[N, D, W−1]: what lies before each local entry, other than zeros only for the first of a fragment."""
    halo = conv_halo(x, W - 1, cp).transpose(1, 2)  # [slots, D, W−1]
    past = x.new_zeros(len(cp.cu_seqlens_cpu) - 1, x.shape[1], W - 1)
    first = torch.tensor([first for first, _ in cp.entries]).to(x.device, non_blocking=True)
    return past.index_copy(0, first, halo)
