"""Causal depthwise convolution over packed documents, with SiLU and the l2 norm of q and k,
forward and backward.

    z[t] = bias + sum_i weight[i] x[t - W + 1 + i] ;  y = z or silu(z)
    in q and k:  n = r y,  r = (sum y^2 + eps)^-1/2

The sum is over a head of K channels, which one block holds completely. Backward recomputes
y: dy = r (dn - n (n . dn)).

One program owns a run of tokens of one document and a block of channels, and slides a
window of W rows along it in registers. Every row is read once (apart from W - 1 rows of
halo) and each gradient is written once. The weight gradient is a sum of per-program
partials in a fixed order. Arithmetic is fp32 for every input type.
"""

# ruff: noqa: RUF005, B007 (Triton joins tuples with + and unrolls static_range)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.segments import CONV_RUN
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import check_first_derivative, operator, register_autograd
from titan_linear.ops.runtime.options import ConvolutionOptions, States
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.tiles import (
    Kernel,
    arange,
    blocks_of,
    load_index,
    load_wide,
    masked,
    sigmoid,
    state_row,
    wide,
    zeros,
)

# Rows per program, a multiple of the unroll. Forward and backward share a chunk table.
BT = CONV_RUN
# Channels per program, rows in flight, and warps. These suit every GPU, because no shared
# memory is used.
FORWARD_CONFIG = {"BD": 512, "R": 8, "num_warps": 2}
BACKWARD_CONFIG = {"BD": 256, "R": 8, "num_warps": 2}
EPS = constexpr(1e-6)  # added to squared norms


Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # three parts of y and the final state


@triton.jit
def _part(i_d, xs, strides, D, width_0, width_1, BC):
    """Locate block i_d (BC of the D channels) in the one to three tensors that hold the
    channels side by side (missing tensors: None).

    Returns the tensor, its stride, the number of channels before it, the block within it
    and its width.
    """
    x, stride, before, width = xs[0], strides[0], 0, width_0
    # Blocks after the first part belong to the second.
    if xs[1] is not None:
        blocks = tl.cdiv(width_0, BC)
        behind = i_d >= blocks
        x, stride = tl.where(behind, xs[1], x), tl.where(behind, strides[1], stride)
        before, width = tl.where(behind, width_0, 0), tl.where(behind, width_1, width)
        i_d = tl.where(behind, i_d - blocks, i_d)
        # Blocks after the second part belong to the third.
        if xs[2] is not None:
            blocks = tl.cdiv(width_1, BC)
            behind = behind & (i_d >= blocks)
            x, stride = tl.where(behind, xs[2], x), tl.where(behind, strides[2], stride)
            before = tl.where(behind, width_0 + width_1, before)
            width = tl.where(behind, D - width_0 - width_1, width)
            i_d = tl.where(behind, i_d - blocks, i_d)
    return x, stride, before, i_d, width


@triton.jit
def _block_channels(i_d, width, BD, K, BK):
    """Return the channels of block i_d among a part's `width` channels, and which of its BD
    places hold one. Each head of K channels has BK places."""
    o_d = arange(BD)
    if K == BK:
        o_y = i_d * BD + o_d
        m_d = o_y < width
    else:
        o_y = i_d * (BD // BK * K) + o_d // BK * K + o_d % BK
        m_d = (o_y < width) & (o_d % BK < K)
    return o_y, m_d


@triton.jit
def _entry(initial, cu_seqlens, i_n):
    """Return the row of entry i_n's initial state, its first token, and the token after its
    last one."""
    i_r = state_row(initial, i_n)
    return i_r, load_index(cu_seqlens + i_n), load_index(cu_seqlens + i_n + 1)


@triton.jit
def _zeros(n, BD):
    """Return n zero rows [BD]."""
    rows = ()
    for i in tl.static_range(n):
        rows = rows + (zeros(BD),)
    return rows


@triton.jit
def _history(x, initial, start, i_r, o_d, m_d, first, stride_x, D, W):
    """Return the W - 1 rows before `start`, oldest first: rows of x or, for a document's
    first run, of its initial state i_r."""
    window = ()
    for row in tl.static_range(W - 1):
        p_x = x + (start - W + 1 + row) * stride_x + o_d
        b_x = load_wide(p_x, m_d & (not first))  # [BD]
        if initial[0] is not None:
            p_s = initial[0] + (i_r * D + o_d) * (W - 1) + row
            b_x += load_wide(p_s, m_d & first & (i_r >= 0))
        window = window + (b_x,)
    return window


@triton.jit
def _convolve(window, weights, b_bias, W):
    b_z = b_bias
    for i in tl.static_range(W):
        b_z += weights[i] * window[i]
    return b_z


@triton.jit
def _head_sums(b_x, BD, BK):
    """Return, at each place of [BD], the sum over its head."""
    b_sum = tl.sum(tl.reshape(b_x, [BD // BK, BK]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(b_sum, [BD // BK, BK]), [BD])


@triton.jit
def _load_weights(weight, bias, o_d, m_d, W, BD):
    weights = ()
    for i in tl.static_range(W):
        weights = weights + (load_wide(weight + o_d * W + i, m_d),)
    b_bias = zeros(BD)
    if bias is not None:
        b_bias = load_wide(bias + o_d, m_d)
    return weights, b_bias


@Kernel
def conv1d_fwd_kernel(
    x, weight, bias,
    initial,  # states [S, D, W-1], and each entry's row among them
    ys,  # [T, width] of each part; None for missing parts
    cu_seqlens,
    chunk_index,  # [NT, 2] entry (-1: none), run of BT rows in it
    D, width_0, width_1, blocks,  # widths of the first two parts; number of blocks of channels
    stride_x, W: constexpr, BT: constexpr, BD: constexpr, R: constexpr, SILU: constexpr,
    NORM: constexpr,  # l2 norm of the first two of three parts
    K: constexpr, BK: constexpr,  # channels of a head, and its places in a block
):  # fmt: skip
    i_d, i_t = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_n, i_s = tl.load(chunk_index + 2 * i_t), tl.load(chunk_index + 2 * i_t + 1)
    if i_n < 0:
        return
    # This program's tensor, its channels, and its run of tokens.
    y, _, before, i_d, width = _part(i_d, ys, (D, D, D), D, width_0, width_1, BD // BK * K)
    i_n = i_n.to(tl.int64)
    i_r, bos, eos = _entry(initial, cu_seqlens, i_n)
    start = bos + i_s * BT
    end = tl.minimum(start + BT, eos)
    o_y, m_d = _block_channels(i_d, width, BD, K, BK)
    o_d, normed = before + o_y, before < width_0 + width_1
    weights, b_bias = _load_weights(weight, bias, o_d, m_d, W, BD)

    # Slide the window along the run, R rows at a time.
    window = _history(x, initial, start, i_r, o_d, m_d, i_s == 0, stride_x, D, W)
    for t in range(start, end, R):
        rows = ()  # R independent loads in flight
        for r in tl.static_range(R):
            rows = rows + (masked(x + (t + r) * stride_x + o_d, mask=m_d & (t + r < end)),)
        for r in tl.static_range(R):
            full = window + (wide(rows[r]),)
            b_z = _convolve(full, weights, b_bias, W)
            if SILU:
                b_z = b_z * sigmoid(b_z)
            if NORM:
                b_z *= tl.where(normed, tl.rsqrt(_head_sums(b_z * b_z, BD, BK) + EPS), 1.0)
            tl.store(y + (t + r) * width + o_y, b_z, mask=m_d & (t + r < end))
            window = full[1:]


@triton.jit
def _activation_bwd(b_dz, window, weights, b_bias, normed, W, BD, BK, SILU, NORM):
    """Return dz from b_dz, the gradient of the row's output."""
    b_z = _convolve(window, weights, b_bias, W)
    b_s = sigmoid(b_z) if SILU else 1.0
    # Through the l2 norm of a head.
    if NORM:
        b_y = b_z * b_s
        b_r = tl.rsqrt(_head_sums(b_y * b_y, BD, BK) + EPS)
        b_r2 = b_r * b_r * _head_sums(b_y * b_dz, BD, BK)
        b_dz = tl.where(normed, b_r * (b_dz - b_y * b_r2), b_dz)
    # Through SiLU.
    if SILU:
        b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
    return b_dz


@triton.jit
def _row_gradient(grads, weights, d_final_state, p, eos, i_n, o_d, m_d, D, W):
    """Return the gradient of row p from dz of rows p to p + W - 1."""
    b_dx = weights[0] * grads[W - 1]
    for i in tl.static_range(1, W):
        b_dx += weights[i] * grads[W - 1 - i]
    # The last W - 1 rows are also the final state.
    if d_final_state is not None:
        o_s = p - (eos - (W - 1))
        p_s = d_final_state + (i_n * D + o_d) * (W - 1) + o_s
        b_dx += load_wide(p_s, m_d & (o_s >= 0) & (o_s < W - 1))
    return b_dx


@triton.jit
def _state_gradient(
    x, dy, window, weights, b_bias, normed, d_final_state, d_initial_state, bos, eos, i_n, i_r, o_d, m_d, D, stride_x,
    stride_dy, W, BD, BK, SILU, NORM,
):  # fmt: skip
    """Write the gradient of an entry's initial state from the entry's first rows; `window`
    is that state.

    The loop over the run computes these rows again. A store there, needed only by these
    rows, would slow it down for all rows.
    """
    grads = _zeros(W - 1, BD)
    for r in tl.static_range(W - 1):
        t = bos + r
        m_t = m_d & (t < eos)
        full = window + (load_wide(x + t * stride_x + o_d, m_t),)
        b_dz = load_wide(dy + t * stride_dy + o_d, m_t)
        d_full = grads + (
            _activation_bwd(b_dz, full, weights, b_bias, normed, W, BD, BK, SILU, NORM),
        )
        b_ds = _row_gradient(d_full, weights, d_final_state, t - (W - 1), eos, i_n, o_d, m_d, D, W)
        tl.store(d_initial_state + (i_r * D + o_d) * (W - 1) + r, b_ds, mask=m_d)
        window, grads = full[1:], d_full[1:]


@Kernel
def conv1d_bwd_kernel(
    x, weight, bias, initial,
    dys,  # laid out like forward's ys
    d_final_state, dx,
    d_weight,  # [NT, W, D] partials
    d_bias,  # [NT, D] partials, or None
    d_initial_state,  # [S, D, W-1]
    cu_seqlens, chunk_index, D, width_0, width_1, blocks, stride_x,
    strides,  # token strides of dys
    W: constexpr, BT: constexpr, BD: constexpr, R: constexpr, SILU: constexpr,
    NORM: constexpr,  # l2 norm of the first two of three parts
    K: constexpr, BK: constexpr,  # channels of a head, and its places in a block
):  # fmt: skip
    i_d, i_t = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_s = tl.load(chunk_index + 2 * i_t), tl.load(chunk_index + 2 * i_t + 1)
    dy, stride_dy, before, i_d, width = _part(i_d, dys, strides, D, width_0, width_1, BD // BK * K)
    o_y, m_d = _block_channels(i_d, width, BD, K, BK)
    o_d, normed = before + o_y, before < width_0 + width_1
    dy -= before  # o_d then points at the part's channels
    if i_n < 0:  # zeros, since partials are summed over all rows of chunk_index
        for i in tl.static_range(W):
            tl.store(d_weight + (i_t * W + i) * D + o_d, zeros(BD), mask=m_d)
        if d_bias is not None:
            tl.store(d_bias + i_t * D + o_d, zeros(BD), mask=m_d)
        return
    # This program's run, its weights, and the rows before it.
    sums = _zeros(W, BD)  # d_weight, one [BD] for each tap
    b_dbias = zeros(BD)
    i_n = i_n.to(tl.int64)
    i_r, bos, eos = _entry(initial, cu_seqlens, i_n)
    start = bos + i_s * BT
    end = tl.minimum(start + BT, eos)
    weights, b_bias = _load_weights(weight, bias, o_d, m_d, W, BD)
    window = _history(x, initial, start, i_r, o_d, m_d, i_s == 0, stride_x, D, W)
    # dz of the W - 1 rows before the current one. Another program owns rows before `start`.
    grads = _zeros(W - 1, BD)
    if initial[0] is not None and (i_s == 0) & (i_r >= 0):
        _state_gradient(
            x, dy, window, weights, b_bias, normed, d_final_state, d_initial_state, bos, eos, i_n, i_r, o_d, m_d, D,
            stride_x, stride_dy, W, BD, BK, SILU, NORM,
        )  # fmt: skip
    # Row t completes the gradient of row t - W + 1. A run that is not a document's last has
    # a multiple of R rows.
    for t in range(start, end, R):
        rows, d_rows = (), ()
        for r in tl.static_range(R):
            m_t = m_d & (t + r < end)
            rows = rows + (masked(x + (t + r) * stride_x + o_d, mask=m_t),)
            d_rows = d_rows + (masked(dy + (t + r) * stride_dy + o_d, mask=m_t),)
        for r in tl.static_range(R):
            full = window + (wide(rows[r]),)
            b_dz = _activation_bwd(
                wide(d_rows[r]), full, weights, b_bias, normed, W, BD, BK, SILU, NORM
            )
            # The weight's gradient, one sum for each tap.
            added = ()
            for i in tl.static_range(W):
                added = added + (sums[i] + b_dz * full[i],)
            sums = added
            b_dbias += b_dz
            d_full = grads + (b_dz,)
            p = t + r - (W - 1)
            b_dx = _row_gradient(d_full, weights, d_final_state, p, eos, i_n, o_d, m_d, D, W)
            tl.store(dx + p * D + o_d, b_dx, mask=m_d & (p >= start) & (p < end))
            window, grads = full[1:], d_full[1:]
    # The next program owns the W - 1 rows after the run, and their share of the weight
    # gradient. Only the gradients of this run's last rows are completed here.
    done = start + tl.cdiv(end - start, R) * R
    for r in tl.static_range(W - 1):
        t = done + r
        m_t = m_d & (t < eos)
        full = window + (load_wide(x + t * stride_x + o_d, m_t),)
        b_dz = load_wide(dy + t * stride_dy + o_d, m_t)
        d_full = grads + (
            _activation_bwd(b_dz, full, weights, b_bias, normed, W, BD, BK, SILU, NORM),
        )
        p = t - (W - 1)
        b_dx = _row_gradient(d_full, weights, d_final_state, p, eos, i_n, o_d, m_d, D, W)
        tl.store(dx + p * D + o_d, b_dx, mask=m_d & (p >= start) & (p < end))
        window, grads = full[1:], d_full[1:]
    for i in tl.static_range(W):
        tl.store(d_weight + (i_t * W + i) * D + o_d, sums[i], mask=m_d)
    if d_bias is not None:
        tl.store(d_bias + i_t * D + o_d, b_dbias, mask=m_d)


@Kernel
def conv1d_final_state_kernel(
    x, initial, final_state, cu_seqlens, D, stride_x, W: constexpr, BD: constexpr
):
    """Write the last W - 1 inputs of each entry. An entry that is shorter takes the rest
    from its initial state."""
    blocks = tl.cdiv(D, BD)
    i_d, i_n = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_r, bos, eos = _entry(initial, cu_seqlens, i_n)
    o_d = i_d * BD + arange(BD)
    m_d = o_d < D
    for i in tl.static_range(W - 1):
        t = eos - (W - 1) + i
        b_x = load_wide(x + t * stride_x + o_d, m_d & (t >= bos))
        if initial[0] is not None:
            p_s = initial[0] + (i_r * D + o_d) * (W - 1) + (t - bos + W - 1)
            b_x += load_wide(p_s, m_d & (t < bos) & (i_r >= 0))
        p_f = final_state + (i_n * D + o_d) * (W - 1) + i
        tl.store(p_f, b_x, mask=m_d)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cost(outputs: costs.Outputs, x: Tensor, **_: Any) -> costs.ConvolutionCost:
    return costs.ConvolutionCost(x.numel())


def _outputs(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, widths: list[int], need_final: bool
) -> Outputs:
    T, D = x.shape
    first, second, third = (x.new_empty(T, width) for width in (*widths, 0, 0)[:3])
    entries = cu_seqlens.shape[0] - 1 if need_final else 0
    return first, second, third, x.new_empty(entries, D, weight.shape[1] - 1)


@operator(
    fake=lambda x, w, b, s, i, cu_seqlens, n, widths, silu, K, need_final: _outputs(
        x, w, cu_seqlens, widths, need_final
    ),
    kept_by=("selective",),
    cost=_cost,
)
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    state_index: Tensor | None,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    widths: list[int],
    silu: bool,
    norm_dim: int | None,
    output_final_state: bool,
) -> Outputs:
    """Convolve x [T, D] with weight [D, W] and bias [D], from initial_state [S, D, W-1],
    within entries cu_seqlens [N+1] int32. Returns three parts of y, and final_state. The
    parts are [T, width] for each of `widths`, whose sum is D; missing parts are empty.

    state_index: [>= N] int32, each entry's row in initial_state, -1 for zeros, no row
    twice; None: row n. chunk_index: [NT, 2] int32, runs of BT tokens as entry (-1: none)
    and run within it; an empty entry has one run. norm_dim: K; heads of K channels in the
    first two of three parts get length 1. final_state [N, D, W-1] holds the last inputs of
    each entry; it is empty unless `output_final_state`.
    """
    x = _rows(x)
    D = x.shape[1]
    W = weight.shape[1]
    N = cu_seqlens.numel() - 1
    *ys, final_state = outputs = _outputs(x, weight, cu_seqlens, widths, output_final_state)
    initial = None if initial_state is None else initial_state.contiguous(), state_index
    # One program for each run of tokens and block of channels.
    shape, blocks = _blocks(widths, FORWARD_CONFIG, norm_dim)
    sizes = D, *[*widths, 0][:2], blocks, x.stride(0)
    parts = _padded(ys[: len(widths)])
    conv1d_fwd_kernel[(chunk_index.shape[0] * blocks,)](
        x,
        weight.contiguous(),
        bias,
        initial,
        parts,
        cu_seqlens,
        chunk_index,
        *sizes,
        W=W,
        BT=BT,
        SILU=silu,
        **shape,
    )
    if output_final_state and W > 1:
        conv1d_final_state_kernel[blocks_of(D, 256) * N,](
            x, initial, final_state, cu_seqlens, D, x.stride(0), W=W, BD=256, num_warps=1
        )
    return outputs


def _gradients(x, dys, d_final_state, weight, bias, initial_state, *_):
    empty = x.new_empty(0)
    d_bias = torch.empty_like(bias) if bias is not None else empty
    d_state = (
        initial_state.new_empty(initial_state.shape) if initial_state is not None else empty.clone()
    )
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_bias, d_state


@operator(fake=_gradients, cost=_cost)
def conv1d_backward(
    x: Tensor,
    dys: list[Tensor],
    d_final_state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    state_index: Tensor | None,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    silu: bool,
    norm_dim: int | None,
) -> Outputs:
    """Return the gradients of x, weight, bias and initial_state, each in its input's dtype.
    The last two are empty where bias or initial_state is None.

    dys: [T, width] of each part of y."""
    x = _rows(x)
    dys = [_rows(dy) for dy in dys]
    T, D = x.shape
    W = weight.shape[1]
    NT = chunk_index.shape[0]
    widths = [dy.shape[1] for dy in dys]
    dx = x.new_empty(T, D)
    state = initial_state.contiguous() if initial_state is not None else None
    d_final = d_final_state.contiguous() if d_final_state is not None else None
    d_state = x.new_empty(0)
    if state is not None:  # rows without an entry get zeros
        d_state = torch.empty_like(state) if state_index is None else torch.zeros_like(state)
    # Partial sums of the gradients of weight and bias, one row for each run.
    d_weight = x.new_empty(NT, W, D, dtype=torch.float32)
    d_bias = None if bias is None else x.new_empty(NT, D, dtype=torch.float32)
    shape, blocks = _blocks(widths, BACKWARD_CONFIG, norm_dim)
    sizes = D, *[*widths, 0][:2], blocks, x.stride(0), _padded([dy.stride(0) for dy in dys])
    grads = d_final, dx, d_weight, d_bias, d_state
    conv1d_bwd_kernel[NT * blocks,](
        x, weight.contiguous(), bias, (state, state_index), _padded(dys), *grads, cu_seqlens, chunk_index, *sizes,
        W=W, BT=BT, SILU=silu, **shape,
    )  # fmt: skip
    d_bias = x.new_empty(0) if bias is None else d_bias.sum(0).to(bias.dtype)
    return dx, d_weight.sum(0).t().contiguous().to(weight.dtype), d_bias, d_state


def _blocks(
    widths: list[int], config: dict[str, int], norm_dim: int | None
) -> tuple[dict[str, int], int]:
    """Return `config` for blocks that hold complete heads, and the number of blocks over
    all parts."""
    K = norm_dim or 1
    BK = triton.next_power_of_2(K)
    BD = max(config["BD"], BK)
    blocks = sum(blocks_of(width, BD // BK * K) for width in widths)
    return config | {"NORM": norm_dim is not None, "K": K, "BK": BK, "BD": BD}, blocks


def _padded(parts: list[Any]) -> tuple[Any, ...]:
    """Pad `parts` with None to the three that the kernels take."""
    return (*parts, None, None)[:3]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.widths, ctx.silu, ctx.norm_dim, ctx.output_final_state = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    check_first_derivative()
    x, *saved = ctx.saved_tensors  # read once: checkpointing hands out recomputed tensors only once
    *dys, d_final_state = grads
    weight, bias, initial_state, *_ = saved
    d_final = d_final_state if ctx.output_final_state and weight.shape[1] > 1 else None
    dx, dw, db, ds = conv1d_backward(
        x, dys[: len(ctx.widths)], d_final, *saved, ctx.silu, ctx.norm_dim
    )
    d_inputs = dx, dw, db if bias is not None else None, ds if initial_state is not None else None
    return (*d_inputs, *[None] * 7)


register_autograd(conv1d, _backward, _setup_context)


def packed_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: States | None,
    boundaries: Boundaries,
    options: ConvolutionOptions,
) -> tuple[list[Tensor], Tensor | None]:
    """Convolve x [T, D] within documents, from initial [., D, W-1] or None (zeros). Returns
    y, [T, width] for each of `widths`, and the final state [N, D, W-1] or None."""
    chunks = boundaries.chunks.get(BT)
    chunk_index = (
        boundaries.derived(_chunk_index, x.shape[0], BT) if chunks is None else chunks.index
    )
    state, state_index = (
        (None, None) if initial is None else (initial.values.to(x.dtype), initial.index)
    )
    silu, need_final, widths, norm_dim = options
    inputs = x, weight, bias, state, state_index, boundaries.cu_seqlens, chunk_index
    *ys, final = conv1d(*inputs, widths, silu, norm_dim, need_final)
    return ys[: len(widths)], final if need_final else None


def _chunk_index(boundaries: Boundaries, tokens: int, size: int) -> Tensor:
    return chunks_of(boundaries.cu_seqlens, tokens, size).chunk_index
