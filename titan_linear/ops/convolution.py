"""The short causal convolution of the linear-attention layers.

This file has the public function and its implementation in plain PyTorch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.exchange.halo import with_halo
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.build_context import tree_context
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime.options import (
    ConvolutionOptions,
    States,
    boundaries_of,
    check_boundaries,
    check_cp,
    check_floats,
    refuse,
)
from titan_linear.ops.runtime.support import Choice, Op, dims_up_to, without_autocast
from titan_linear.ops.torch.delta_rule import l2norm
from titan_linear.ops.triton.configs import with_kernels


def _triton() -> Any:
    # Triton is available on Linux only.
    from titan_linear.ops.triton.conv1d import packed_conv1d

    return packed_conv1d


MAX_WIDTH = 8  # largest W of the kernels
CONVOLUTION = Op(
    "causal_conv1d", with_kernels(_triton, lambda: torch_conv1d, dims_up_to(MAX_WIDTH, "W"))
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: CPContext | None = None,
    *,
    widths: Sequence[int] | None = None,
    norm_dim: int | None = None,
    parents: Tensor | None = None,
    impl: str | Choice = "auto",
) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
    """Run the short causal convolution, channel by channel, within each sequence or
    document.

        y_t = act(Σ_j weight[:, j] · x_{t−W+1+j} + bias)

    The arguments match FLA's function of the same name, except that states are narrower
    (docs/ops.md). The header of delta_rule.py describes the arguments not listed here.

    Args:
        x: [B, T, D].
        weight: [D, W].
        bias: [D].
        initial_state: [N, D, W−1], the last inputs before each sequence or document; zeros
            by default.
        activation: None, "silu", or "swish" (the same as "silu").
        residual, backend, chunk_indices: must be None.
        widths: widths of up to three parts of D, such as q, k and v. y is returned as these
            parts, which are separate tensors in Triton too.
        norm_dim: K, with `widths` of q, k and v: q and k are divided by sqrt(Σ y² + 1e-6),
            where the sum is over a head of K channels, as with `use_qk_l2norm_in_kernel` of
            the delta rules.

    Returns:
        y [B, T, D] in x's dtype and, if `output_final_state` is set, each document's last
            inputs [N, D, W−1].
    """
    # Check the arguments.
    refuse("add it to y", residual=residual)
    refuse("impl chooses", backend=backend)
    refuse(
        "leave it out, chunks are found from cu_seqlens on the device", chunk_indices=chunk_indices
    )
    B, T, D, W = _check_tensors(x, weight, bias)
    check_floats(x=x, weight=weight, bias=bias, initial_state=initial_state)
    cu_seqlens, cp_context = tree_context(parents, cu_seqlens, cp_context, x.device)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation = {activation!r} is unknown; use None, 'silu' or 'swish'")
    parts = [D] if widths is None else list(widths)
    _check_parts(parts, D, norm_dim)
    if cp_context is not None:
        check_cp("x", x, initial_state, output_final_state, cu_seqlens, cp_context)
        if cp_context.tables.conv1d_kernel_size not in (None, W):
            built = cp_context.tables.conv1d_kernel_size
            raise ValueError(
                f"weight has W = {W}; cp_context was built with conv1d_kernel_size = {built}"
            )
    _check_state(initial_state, check_boundaries(B, T, cu_seqlens, cu_seqlens_cpu), D, W)
    # Fetch the inputs that precede each entry: from the caller, from other ranks, or from
    # the parent node.
    flat = x.flatten(0, 1)
    initial = None if initial_state is None else States(initial_state)
    boundaries = boundaries_of(x, cu_seqlens, cp_context, cu_seqlens_cpu)
    if (
        cp_context is not None
        and W > 1
        and (cp_context.ranks.world_size > 1 or boundaries.tree is not None)
    ):
        flat, initial = _with_halo(flat, W - 1, boundaries, cp_context)
    # Run the implementation, and restore the batch dimension.
    convolve = CONVOLUTION.load(CONVOLUTION.implementation(impl, x.device, x.dtype, W=W))
    bias = None if bias is None else bias.contiguous()
    options = ConvolutionOptions(activation is not None, output_final_state, parts, norm_dim)
    ys, final = convolve(flat, weight, bias, initial, boundaries, options)
    ys = tuple(y.unflatten(0, (B, T)) for y in ys)
    return ys if widths is not None else ys[0], final


def _with_halo(
    flat: Tensor, width: int, boundaries: Boundaries, cp_context: CPContext
) -> tuple[Tensor, States]:
    """Return flat [T, D] and, for each entry, the `width` inputs before it.

    They come from other ranks, or from the node's parent in prefix trees.
    """
    slots = cp_context.cut.slots
    rows = cp_context.tables.forward_chains.entry_slots
    # In prefix trees every entry has a halo of its own.
    if boundaries.tree is not None:
        slots = len(boundaries)
        rows = None
    flat, halo = with_halo(
        flat, cp_context.halo_of(width), slots, width, cp_context.ranks.group_name
    )
    return flat, States(halo.transpose(1, 2), rows)


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Return (B, T, D, W).

    Raises ValueError unless x is [B, T, D], weight [D, W] and bias [D].
    """
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x {tuple(x.shape)} must be [B, T, D], none of them 0")
    B, T, D = x.shape
    W = weight.shape[-1] if weight.dim() else 0
    if weight.shape != (D, W) or not W:
        raise ValueError(f"weight {tuple(weight.shape)} must be [D, W] with D = {D}, and W not 0")
    if bias is not None and bias.shape != (D,):
        raise ValueError(f"bias {tuple(bias.shape)} must be [D] = [{D}]")
    return B, T, D, W


def _check_state(initial_state: Tensor | None, N: int, D: int, W: int) -> None:
    if initial_state is not None and initial_state.shape != (N, D, W - 1):
        fla = ": FLA's has one column more, which it never reads; pass initial_state[..., 1:]"
        raise ValueError(
            f"initial_state {tuple(initial_state.shape)} must be [N, D, W−1] = [{N}, {D}, {W - 1}]"
            f"{fla if initial_state.shape == (N, D, W) else ''}"
        )


def _check_parts(parts: list[int], D: int, norm_dim: int | None) -> None:
    if not 1 <= len(parts) <= 3 or min(parts) < 1 or sum(parts) != D:
        raise ValueError(f"widths = {parts} must be one to three widths whose sum is D = {D}")
    if norm_dim is not None and (
        len(parts) != 3 or norm_dim < 1 or any(width % norm_dim for width in parts[:2])
    ):
        raise ValueError(
            f"norm_dim = {norm_dim} needs widths of q, k and v, multiples of it for q and k, not {parts}"
        )


# --- In plain PyTorch, differentiable by autograd -----------------------------------------


class ConvolutionRows(NamedTuple):
    """Row numbers in a layout where each entry follows its W−1 earlier tokens."""

    past: Tensor  # [N·(W−1)] int64: rows of the entries' earlier tokens
    own: Tensor  # [T]: rows of the entries' tokens
    last: Tensor  # [N, W−1]: last W−1 rows of each entry, earlier tokens included


def lay_out(boundaries: Boundaries, W: int) -> ConvolutionRows:
    # Entry n begins n·(W−1) rows later than in the stream; its own tokens another W−1 rows
    # later.
    edges = torch.tensor(boundaries.on_host())
    device = boundaries.cu_seqlens.device
    N = len(edges) - 1
    lengths = edges.diff()
    # [N, W−1]
    past = torch.arange(N)[:, None] * (W - 1) + edges[:-1, None] + torch.arange(W - 1)
    own = torch.arange(int(edges[-1])) + torch.repeat_interleave(
        torch.arange(1, N + 1), lengths
    ) * (W - 1)
    return ConvolutionRows(*(i.to(device) for i in (past.flatten(), own, past + lengths[:, None])))


# The compiler leaves it out because it works on the host.
@torch.compiler.disable
@without_autocast
def torch_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: States | None,
    boundaries: Boundaries,
    options: ConvolutionOptions,
) -> tuple[list[Tensor], Tensor | None]:
    """Convolve every entry in one call of conv1d.

    Each entry is laid out after its W−1 earlier tokens.

    Args:
        x: [T, D].
        weight: [D, W].
        initial: [., D, W−1], or None for zeros.

    Returns:
        y, a tensor [T, width] for each of `widths`, and the entries' last inputs [N, D,
            W−1] if they are needed.
    """
    # Lay out each entry after its earlier tokens (zeros by default).
    past, own, last = boundaries.derived(lay_out, weight.shape[1])
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(len(own) + len(past), x.shape[1]).index_copy(0, own, x)
    if initial is not None:
        rows = rows.index_copy(
            0, past, initial.of_entries(len(boundaries)).transpose(1, 2).flatten(0, 1).to(x.dtype)
        )
    # Convolve all rows at once [1, D, rows−W+1], and keep the rows of the entries' tokens.
    y = F.conv1d(rows.T.to(wide).unsqueeze(0), weight.to(wide).unsqueeze(1), groups=x.shape[1])
    y = y[0].T.index_select(0, own - (weight.shape[1] - 1))
    y = y if bias is None else y + bias.to(wide)
    # Apply the activation, and normalize the heads of q and k.
    parts = (F.silu(y) if options.silu else y).split(options.widths, 1)
    if options.norm_dim is not None:
        q, k, v = parts
        q, k = (l2norm(part.unflatten(1, (-1, options.norm_dim))).flatten(1) for part in (q, k))
        parts = q, k, v
    return [part.to(x.dtype) for part in parts], rows[last].transpose(
        1, 2
    ) if options.need_final else None
