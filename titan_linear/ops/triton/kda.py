"""Kimi Delta Attention in Triton: the stages of a chunked forward and backward pass, as operators.

    prepare        (q, k, g, beta) -> tiles                                     chunk-parallel
    recompute      (q, k, g, beta) -> tiles but Aqk and Gn                      prepare again, for backward
    scan           (v, tiles, initial_state) -> o, final_state                  sequential in a head
    boundary       (v, tiles, some entries) -> S_ext, M                         for context parallelism
    boundary_bwd   (do, tiles, some entries) -> dS_ext
    backward       (all of these) -> gradients                                  two scans, then chunk-parallel

A pass keeps its inputs, Aqk and Gn (2 × 64 numbers of the compute dtype per token and head) between forward and
backward.

q, k [T, H, K], v [T, HV, V], g [T, HV, K], beta [T, HV] are flat packed streams (`tiles.py`: any stride between tokens)
of N entries; `Chunks` (cu_seqlens, chunk_index, chunk_offsets) says where these lie. The tiles of NT chunks of C = 64
tokens (see kda_fwd for the letters) are

    qg [NT, HV, K, C] scale·q·2^Γ     kn [NT, HV, K, C] −k·2^Γ     kg [NT, HV, K, C] k·2^(γ−Γ)
    decay [NT, HV, K] fp32, 2^γ       b [NT, HV, C] fp32, β        Aqk, Gn [NT, HV, C, C]

Nothing here waits for the device. beta_range: None if beta is β; otherwise beta holds logits, β is beta_range times
their sigmoid, and dbeta is the gradient of the logits. gate: g is the log decay (0), or the raw input of the softplus
gate (1) or of the bounded gate (2).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.triton.configs import config, widest_slice
from titan_linear.ops.triton.kda_bwd import (
    boundary_bwd_kernel,
    gradient_kernel,
    matrix_kernel,
    norm_gradient_kernel,
    reverse_scan_kernel,
)
from titan_linear.ops.triton.kda_fwd import boundary_kernel, prepare_kernel, scan_kernel
from titan_linear.ops.triton.launch import blocks_of
from titan_linear.ops.triton.solve import solve_kernel
from titan_linear.ops.triton.tiles import chunk_tiles, dense_heads, empty_gradients, empty_states, row_tiles

GATES = {"none": 0, "softplus": 1, "bounded": 2}
TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix operands: fp16's exponent cannot hold the factors of fast gates, so fp16 inputs use bf16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def _recomputed(q: Tensor, g: Tensor, chunk_index: Tensor) -> tuple[Tensor, ...]:
    """Empty qg, kn, kg, decay, b."""
    (_, HV, K), NT, dtype = g.shape, chunk_index.shape[0], _compute_dtype(q.dtype)
    keys = (g.new_empty(NT, HV, K, CHUNK, dtype=dtype) for _ in range(3))
    return *keys, *(g.new_empty(NT, HV, dim, dtype=torch.float32) for dim in (K, CHUNK))


def _matrices(q: Tensor, g: Tensor, chunk_index: Tensor) -> tuple[Tensor, Tensor]:
    """Empty Aqk and Gn."""
    shape = chunk_index.shape[0], g.shape[1], CHUNK, CHUNK
    return g.new_empty(shape, dtype=_compute_dtype(q.dtype)), g.new_empty(shape, dtype=_compute_dtype(q.dtype))


def _launch_prepare(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    tiles,
    cu_seqlens,
    chunk_index,
    scale,
    lower_bound,
    gate,
    safe_gate,
    l2norm,
    beta_range,
) -> None:
    """tiles: all of them, or all but Aqk and Gn."""
    (_, H, K), HV, NT, MATRICES = q.shape, g.shape[1], chunk_index.shape[0], len(tiles) == 7
    q, k, g, beta = (dense_heads(x) for x in (q, k, g, beta))
    chosen = config(f"kda {'prepare' if MATRICES else 'recompute'}{' safe' if safe_gate else ''}", q, K, BK=K)
    prepare_kernel[1 if MATRICES else K // chosen["BK"], HV, NT](
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        *tiles,
        *(() if MATRICES else (None, None)),
        cu_seqlens,
        chunk_index,
        scale,
        lower_bound,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        H=H,
        HV=HV,
        K=K,
        CT=TRITON_DTYPE[tiles[0].dtype],
        GATE=gate,
        SAFE=safe_gate,
        L2NORM=l2norm,
        BETA_RANGE=beta_range,
        MATRICES=MATRICES,
        **chosen,
    )


@operator(kind="delta rule", of_driver=True, prepares="forward")
def kda_prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> qg, kn, kg, decay, b, Aqk, Gn."""
    tiles = *_recomputed(q, g, chunk_index), *_matrices(q, g, chunk_index)
    _launch_prepare(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        tiles,
        cu_seqlens,
        chunk_index,
        scale,
        lower_bound,
        gate,
        safe_gate,
        l2norm,
        beta_range,
    )
    b, Gn = tiles[4], tiles[6]
    chosen = config("solve", q, q.shape[2])
    solve_kernel[b.shape[0] * b.shape[1],](b, Gn, STRIDE_B=CHUNK, SCALED=False, **chosen)
    return tiles


@register_fake(kda_prepare)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunk_index, *_):
    return *_recomputed(q, g, chunk_index), *_matrices(q, g, chunk_index)


@operator(kind="delta rule", of_driver=True, prepares="backward")
def kda_recompute(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> qg, kn, kg, decay, b."""
    tiles = _recomputed(q, g, chunk_index)
    _launch_prepare(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        tiles,
        cu_seqlens,
        chunk_index,
        scale,
        lower_bound,
        gate,
        safe_gate,
        l2norm,
        beta_range,
    )
    return tiles


@register_fake(kda_recompute)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunk_index, *_):
    return _recomputed(q, g, chunk_index)


def _launch_scan(v, tiles, initial_state, state_index, o, final_state, final_index, h, r, cu_seqlens, chunk_offsets):
    """None stands for an input left out, or an output not written."""
    _, HV, K, _ = tiles[0].shape
    V, N, v = v.shape[2], cu_seqlens.shape[0] - 1, dense_heads(v)
    chosen = config("kda scan", tiles[0], K, BV=widest_slice(V))
    scan_kernel[V // chosen["BV"], N * HV](
        v,
        *tiles,
        initial_state,
        state_index,
        o,
        final_state,
        final_index,
        h,
        r,
        cu_seqlens,
        chunk_offsets,
        v.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[tiles[0].dtype],
        **chosen,
    )


def _scan_outputs(v: Tensor, qg: Tensor, final_rows: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(v, final_rows, qg.shape[2])


@operator(kept_by=("selective",), kind="delta rule", of_driver=True)
def kda_scan(
    v: Tensor,
    qg: Tensor,
    kn: Tensor,
    kg: Tensor,
    decay: Tensor,
    b: Tensor,
    Aqk: Tensor,
    Gn: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    initial_state: Tensor | None,
    state_index: Tensor | None,
    final_index: Tensor | None,
    final_rows: int,
) -> tuple[Tensor, Tensor]:
    """-> o [T, HV, V], final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
    o, final_state = _scan_outputs(v, qg, final_rows)
    tiles, final = (qg, kn, kg, decay, b, Aqk, Gn), final_state if final_rows else None
    _launch_scan(v, tiles, initial_state, state_index, o, final, final_index, None, None, cu_seqlens, chunk_offsets)
    return o, final_state


@register_fake(kda_scan)
def _(v, qg, *others):
    return _scan_outputs(v, qg, others[-1])


def _boundary_outputs(v: Tensor, qg: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    (_, HV, K, _), F = qg.shape, entries.shape[0]
    return empty_states(v, F, K), v.new_empty(F, HV, K, K, dtype=torch.float32)


@operator(kept_by=("selective",), kind="delta rule", of_driver=True)
def kda_boundary(
    v: Tensor,
    qg: Tensor,
    kn: Tensor,
    kg: Tensor,
    decay: Tensor,
    b: Tensor,
    Aqk: Tensor,
    Gn: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M [F, HV, K, K],
    its transition; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both for all."""
    (S_ext, M), v, (_, HV, K, _), V = _boundary_outputs(v, qg, entries), dense_heads(v), qg.shape, v.shape[2]
    chosen = config("kda scan", qg, K, BV=min(K, widest_slice(V)))
    boundary_kernel[(V + K) // chosen["BV"], entries.shape[0] * HV](
        v,
        kn,
        kg,
        decay,
        b,
        Gn,
        entries,
        wanted,
        S_ext,
        M,
        cu_seqlens,
        chunk_offsets,
        v.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[qg.dtype],
        **chosen,
    )
    return S_ext, M


@register_fake(kda_boundary)
def _(v, qg, kn, kg, decay, b, Aqk, Gn, cu_seqlens, chunk_index, chunk_offsets, entries, wanted):
    return _boundary_outputs(v, qg, entries)


@operator(kind="delta rule", of_driver=True)
def kda_boundary_bwd(
    do: Tensor,
    qg: Tensor,
    kn: Tensor,
    kg: Tensor,
    decay: Tensor,
    b: Tensor,
    Aqk: Tensor,
    Gn: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    (_, HV, K, _), V, do = qg.shape, do.shape[2], dense_heads(do)
    dS_ext = empty_states(do, entries.shape[0], K)
    chosen = config("kda reverse", qg, K, BV=widest_slice(V))
    boundary_bwd_kernel[V // chosen["BV"], entries.shape[0] * HV](
        do,
        qg,
        kn,
        kg,
        decay,
        b,
        Aqk,
        Gn,
        entries,
        wanted,
        dS_ext,
        cu_seqlens,
        chunk_offsets,
        do.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[qg.dtype],
        **chosen,
    )
    return dS_ext


@register_fake(kda_boundary_bwd)
def _(do, qg, kn, kg, decay, b, Aqk, Gn, cu_seqlens, chunk_index, chunk_offsets, entries, wanted):
    return empty_states(do, entries.shape[0], qg.shape[2])


def _norm_gradients(q: Tensor, k: Tensor, dqn: Tensor, dkn: Tensor) -> tuple[Tensor, Tensor]:
    """dq and dk [T, H, K], from the gradients [T, HV, K] of the normalised q and k."""
    (T, H, K), ROWS = q.shape, 4096 // q.shape[2]
    dq, dk = q.new_empty(T, H, K), k.new_empty(T, H, K)
    norm_gradient_kernel[blocks_of(T * H, ROWS), 2](
        q, k, dqn, dkn, dq, dk, T, q.stride(0), k.stride(0), H=H, HV=dqn.shape[1], K=K, ROWS=ROWS
    )
    return dq, dk


def _room_in_backward(k: Tensor, v: Tensor, **_: Any) -> int:
    """Bytes, for each chunk: states and their gradients, r and y, the gradients of two matrices."""
    (T, HV, V), K = v.shape, k.shape[-1]
    return T * HV * (2 * K * V // CHUNK + 2 * V + 2 * CHUNK) * v.element_size()


@operator(kind="delta rule", of_driver=True, temporary=_room_in_backward)
def kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    do: Tensor,
    initial_state: Tensor | None,
    state_index: Tensor | None,
    d_final_state: Tensor | None,
    final_index: Tensor | None,
    need_d_initial: bool,
    qg: Tensor,
    kn: Tensor,
    kg: Tensor,
    decay: Tensor,
    b: Tensor,
    Aqk: Tensor,
    Gn: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, dg, dbeta, dA_log, ddt_bias (each dense, in its input's dtype; the last two are empty where A_log
    or dt_bias is None), d_initial_state, fp32 in initial_state's shape (empty unless needed; rows that belong to no
    entry stay unwritten)."""
    (T, H, K), (HV, V), NT, N, CT = q.shape, v.shape[1:], chunk_index.shape[0], cu_seqlens.shape[0] - 1, qg.dtype
    q, k, g, do = (dense_heads(x) for x in (q, k, g, do))
    tiles = (qg, kn, kg, decay, b, Aqk, Gn)
    h, dh = (v.new_empty(NT, HV, V, K, dtype=CT) for _ in range(2))
    r, y = (v.new_empty(NT, HV, V, CHUNK, dtype=CT) for _ in range(2))
    d_initial = v.new_empty(initial_state.shape if need_d_initial else 0, dtype=torch.float32)
    _launch_scan(v, tiles, initial_state, state_index, None, None, None, h, r, cu_seqlens, chunk_offsets)
    reverse = config("kda reverse", qg, K, BV=widest_slice(V))
    reverse_scan_kernel[V // reverse["BV"], N * HV](
        do,
        *tiles,
        d_final_state,
        final_index,
        d_initial if need_d_initial else None,
        state_index,
        dh,
        y,
        cu_seqlens,
        chunk_offsets,
        do.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[CT],
        **reverse,
    )

    dv, dbeta, diagonal = v.new_empty(v.shape), beta.new_empty(beta.shape), torch.empty_like(b)
    dA, dK = (v.new_empty(NT, HV, CHUNK, CHUNK, dtype=CT) for _ in range(2))
    matrix_kernel[HV, NT](
        b,
        do,
        r,
        y,
        dA,
        dK,
        diagonal,
        dv,
        dbeta,
        cu_seqlens,
        chunk_index,
        scale,
        do.stride(0),
        HV=HV,
        V=V,
        CT=TRITON_DTYPE[CT],
        BETA_RANGE=beta_range,
        **config("kda matrix", q, K, BV=widest_slice(V)),
    )

    # With grouped value heads, each value head writes its own dq and dk in fp32; they are summed below.
    dq, dk = (q.new_empty(T, HV, K, dtype=q.dtype if HV == H else torch.float32) for _ in range(2))
    chosen = config(f"kda gradient{' safe' if safe_gate else ''}", q, K, BK=K, BV=widest_slice(V))
    BK, BV, dg = chosen["BK"], chosen["BV"], g.new_empty(g.shape)
    dA_part = None if A_log is None else g.new_empty(NT, HV, K // BK, dtype=torch.float32)
    dbias_part = None if dt_bias is None else g.new_empty(NT, HV * K, dtype=torch.float32)
    chunk_matrices = [chunk_tiles(x, BV, width) for x, width in ((r, CHUNK), (y, CHUNK), (h, BK), (dh, BK))]
    gradient_kernel[K // BK, HV, NT](
        q,
        k,
        g,
        A_log,
        dt_bias,
        b,
        row_tiles(do, CHUNK, BV),
        *chunk_matrices,
        dA,
        dK,
        diagonal,
        dq,
        dk,
        dg,
        dA_part,
        dbias_part,
        cu_seqlens,
        chunk_index,
        scale,
        lower_bound,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        H=H,
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[CT],
        GATE=gate,
        SAFE=safe_gate,
        L2NORM=l2norm,
        **chosen,
    )
    if l2norm:
        dq, dk = _norm_gradients(q, k, dq, dk)
    elif HV != H:
        dq, dk = (x.unflatten(1, (H, HV // H)).sum(2).to(q.dtype) for x in (dq, dk))
    dA_log = q.new_empty(0) if A_log is None else dA_part.sum((0, 2)).view(A_log.shape).to(A_log.dtype)
    ddt_bias = q.new_empty(0) if dt_bias is None else dbias_part.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial


register_fake(kda_backward)(empty_gradients)
