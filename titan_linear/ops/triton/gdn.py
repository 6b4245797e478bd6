"""The chunked gated delta rule (GDN) on the GPU: its stages, as operators.

Stages, all functional, on flat packed streams (q, k [T, H, K], v [T, HV, V], HV = R·H) with cu_seqlens [N+1] int32 on
the device. Nothing here waits for the device: grids are upper bounds, programs find their chunk in a table.

    prepare        (q, k, g, beta) -> table, offsets, C, A, gates, norms          chunk-parallel
    recompute      (q, k, g, beta) -> A, gates, norms                             prepare again, for backward
    scan           (+ v, initial_state) -> o, final_state                          sequential in a head
    boundary       (some entries) -> S_ext, M                                      for context parallelism
    boundary_bwd   (some entries, do) -> dS_ext
    states         (k, v, initial_state) -> h, y                                   the scan again, for backward
    reverse        (q, k, do, d_final_state) -> dh, dv, d_initial_state            sequential, from the end
    gradients      (those) -> dq, dk, dg, dbeta, dA_log, ddt_bias                  chunk-parallel

What is kept between forward and backward, besides the inputs: table, offsets, C, and with `disable_recompute` A, gates
and norms. See docs/kernels.md for bytes and times.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.triton import gdn_kernels as kernels
from titan_linear.ops.triton.chunks import CHUNK as BT
from titan_linear.ops.triton.chunks import chunk_table, max_chunks
from titan_linear.ops.triton.configs import config
from titan_linear.ops.triton.library import operator, register_fake
from titan_linear.ops.triton.solve import solve_kernel


def _precision(x: torch.Tensor) -> str:
    """Of the dots of fp32 operands; bf16 and fp16 operands are exact in the tensor cores' fp32 sums."""
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] with dense heads and tokens any multiple of 16 bytes apart, as the copy engine wants it."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) * x.element_size() % 16 == 0
    return x if dense and x.data_ptr() % 16 == 0 else x.contiguous()


def _rows(x: torch.Tensor, width: int) -> TensorDescriptor:
    """x [T, heads, dim] as the matrix [T, heads·dim], read in tiles of a chunk by `width` columns."""
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [BT, width])


def _tiles(x: torch.Tensor) -> TensorDescriptor:
    """x [NT, HV, BT, BT], one tile of a chunk and head at a time."""
    return TensorDescriptor(x, [x.numel() // BT, BT], [BT, 1], [BT, BT])


def _states(x: torch.Tensor, width: int) -> TensorDescriptor:
    """x [NT, HV, K, V], `width` columns of one chunk's and head's state at a time."""
    K, V = x.shape[2:]
    return TensorDescriptor(x, [x.numel() // V, V], [V, 1], [K, width])


def _scalars(k: torch.Tensor, HV: int, NT: int, l2norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty gates [NT, HV, 2, BT] and norms [NT, H, 2, BT] fp32, the latter without elements unless l2norm."""
    gates = k.new_empty(NT, HV, 2, BT, dtype=torch.float32)
    return gates, k.new_empty((NT, k.shape[1], 2, BT) if l2norm else (0,), dtype=torch.float32)


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


@operator
def gdn_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> table [NT, 2] int32 (entry or -1, chunk in it), offsets [N+1] int32 (first row of each entry),
    C [NT, HV, BT, BT], gates [NT, HV, 2, BT] fp32 (cumulated gate in base 2, beta), norms [NT, H, 2, BT] fp32 (1 / |q|,
    1 / |k|; empty without l2norm), A [NT, HV, BT, BT]. NT bounds the number of chunks.

    q, k [T, H, K]; g, beta [T, HV]; with A_log [HV] g is raw and the gate is -exp(A_log) softplus(g + dt_bias).
    """
    (T, H, K), HV = q.shape, g.shape[1]
    q, k, g, beta = _heads(q), _heads(k), g.contiguous(), beta.contiguous()
    NT = max_chunks(T, cu_seqlens.numel() - 1, BT)
    table, offsets = chunk_table(cu_seqlens, BT, NT)
    C, A = k.new_empty(NT, HV, BT, BT), k.new_empty(NT, HV, BT, BT)
    gates, norms = _scalars(k, HV, NT, l2norm)
    kernels.prepare_kernel[(NT * HV,)](
        q, k, g, beta, A_log, dt_bias, C, A, gates, norms, cu_seqlens, table, scale, q.stride(0), k.stride(0), HV,
        R=HV // H, K=K, BT=BT, GATE=A_log is not None, DT_BIAS=dt_bias is not None, NORM=l2norm, PREC=_precision(k),
        **config("gdn prepare", k, K),
    )  # fmt: skip
    solve_kernel[(NT * HV,)](gates[:, :, 1], C, STRIDE_B=2 * BT, SCALED=True, **config("solve", k, K))
    return table, offsets, C, gates, norms, A


@register_fake(gdn_prepare)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, l2norm):
    NT, HV = max_chunks(q.shape[0], cu_seqlens.shape[0] - 1, BT), g.shape[1]
    C, A = k.new_empty(NT, HV, BT, BT), k.new_empty(NT, HV, BT, BT)
    gates, norms = _scalars(k, HV, NT, l2norm)
    return cu_seqlens.new_empty(NT, 2), torch.empty_like(cu_seqlens), C, gates, norms, A


@operator
def gdn_recompute(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> A, gates, norms as `gdn_prepare` gives them."""
    (_, H, K), HV, NT = q.shape, g.shape[1], table.shape[0]
    q, k, g, beta = _heads(q), _heads(k), g.contiguous(), beta.contiguous()
    A, (gates, norms) = k.new_empty(NT, HV, BT, BT), _scalars(k, HV, NT, l2norm)
    kernels.prepare_kernel[(NT * HV,)](
        q, k, g, beta, A_log, dt_bias, None, A, gates, norms, cu_seqlens, table, scale, q.stride(0), k.stride(0), HV,
        R=HV // H, K=K, BT=BT, GATE=A_log is not None, DT_BIAS=dt_bias is not None, NORM=l2norm, PREC=_precision(k),
        **config("gdn recompute", k, K),
    )  # fmt: skip
    return A, gates, norms


@register_fake(gdn_recompute)
def _(q, k, g, beta, A_log, dt_bias, table, cu_seqlens, scale, l2norm):
    HV, NT = g.shape[1], table.shape[0]
    return k.new_empty(NT, HV, BT, BT), *_scalars(k, HV, NT, l2norm)


@operator
def gdn_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> o [T, HV, V], final_state [N, HV, K, V] fp32 (empty unless asked for)."""
    (_, H, K), (T, HV, V), N = k.shape, v.shape, cu_seqlens.numel() - 1
    q, k, v = _heads(q), _heads(k), _heads(v)
    o = v.new_empty(T, HV, V)
    final_state = torch.empty((N, HV, K, V) if output_final_state else 0, dtype=torch.float32, device=v.device)
    chosen = config("gdn scan", k, max(K, V), BV=min(K, V))
    kernels.scan_kernel[(N * HV * (V // chosen["BV"]),)](
        _rows(q, K), _rows(k, K), _rows(v, chosen["BV"]), _tiles(C), _tiles(A), gates, norms,
        _dense(initial_state), o, final_state, cu_seqlens, offsets, scale, HV,
        R=HV // H, K=K, V=V, BT=BT, NORM=norms.numel() > 0,
        INITIAL=initial_state is not None, FINAL=output_final_state, PREC=_precision(k), **chosen,
    )  # fmt: skip
    return o, final_state


@register_fake(gdn_scan)
def _(q, k, v, offsets, C, A, gates, norms, initial_state, cu_seqlens, scale, output_final_state):
    shape = (cu_seqlens.shape[0] - 1, v.shape[1], k.shape[2], v.shape[2]) if output_final_state else (0,)
    return v.new_empty(v.shape), v.new_empty(shape, dtype=torch.float32)


@operator
def gdn_boundary(
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    C: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    entries: torch.Tensor,
    cu_seqlens: torch.Tensor,
    need_m: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V] (last states from zero states), M [F, HV, K, K] or empty."""
    (_, H, K), (_, HV, V), F = k.shape, v.shape, entries.numel()
    k, v = _heads(k), _heads(v)
    fp32 = {"dtype": torch.float32, "device": v.device}
    S_ext = torch.empty(F, HV, K, V, **fp32)
    M = torch.empty((F, HV, K, K) if need_m else 0, **fp32)
    chosen = config("gdn boundary", k, max(K, V), BV=min(K, V))
    blocks = (V + (K if need_m else 0)) // chosen["BV"]
    kernels.boundary_kernel[(F * HV * blocks,)](
        _rows(k, K), _rows(v, chosen["BV"]), _tiles(C), gates, norms, entries, S_ext, M, cu_seqlens, offsets, HV,
        R=HV // H, K=K, V=V, BT=BT, NORM=norms.numel() > 0, NEED_M=need_m, PREC=_precision(k), **chosen,
    )  # fmt: skip
    return S_ext, M


@register_fake(gdn_boundary)
def _(k, v, offsets, C, gates, norms, entries, cu_seqlens, need_m):
    F, HV, K, V = entries.shape[0], v.shape[1], k.shape[2], v.shape[2]
    fp32 = {"dtype": torch.float32}
    return v.new_empty((F, HV, K, V), **fp32), v.new_empty((F, HV, K, K) if need_m else (0,), **fp32)


@operator
def gdn_boundary_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    offsets: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    entries: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V]: the first states' gradients when the last states have none."""
    (_, H, K), (_, HV, V), F = k.shape, do.shape, entries.numel()
    q, k, do = _heads(q), _heads(k), _heads(do)
    dS_ext = torch.empty(F, HV, K, V, dtype=torch.float32, device=do.device)
    chosen = config("gdn boundary", k, max(K, V), BV=min(K, V))
    kernels.boundary_bwd_kernel[(F * HV * (V // chosen["BV"]),)](
        _rows(q, K), _rows(k, K), _rows(do, chosen["BV"]), _tiles(C), _tiles(A), gates, norms, entries, dS_ext,
        cu_seqlens, offsets, scale, HV, R=HV // H, K=K, V=V, BT=BT, NORM=norms.numel() > 0, PREC=_precision(k),
        **chosen,
    )  # fmt: skip
    return dS_ext


@register_fake(gdn_boundary_bwd)
def _(q, k, do, offsets, C, A, gates, norms, entries, cu_seqlens, scale):
    return do.new_empty((entries.shape[0], do.shape[1], k.shape[2], do.shape[2]), dtype=torch.float32)


@operator
def gdn_states(
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    C: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> h [NT, HV, K, V], the state that enters each chunk; y [T, HV, V]."""
    (_, H, K), (T, HV, V), N = k.shape, v.shape, cu_seqlens.numel() - 1
    k, v = _heads(k), _heads(v)
    h, y = k.new_empty(C.shape[0], HV, K, V), v.new_empty(T, HV, V)
    chosen = config("gdn states", k, max(K, V), BV=min(K, V))
    kernels.states_kernel[(N * HV * (V // chosen["BV"]),)](
        _rows(k, K), _rows(v, chosen["BV"]), _tiles(C), gates, norms, _dense(initial_state), h, y,
        cu_seqlens, offsets, HV, R=HV // H, K=K, V=V, BT=BT, NORM=norms.numel() > 0,
        INITIAL=initial_state is not None, PREC=_precision(k), **chosen,
    )  # fmt: skip
    return h, y


@register_fake(gdn_states)
def _(k, v, offsets, C, gates, norms, initial_state, cu_seqlens):
    return k.new_empty(C.shape[0], v.shape[1], k.shape[2], v.shape[2]), v.new_empty(v.shape)


@operator
def gdn_reverse(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    offsets: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    d_final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dh [NT, HV, K, V], the gradient of the state that leaves each chunk; dv [T, HV, V]; d_initial_state fp32."""
    (_, H, K), (T, HV, V), N = k.shape, do.shape, cu_seqlens.numel() - 1
    q, k, do = _heads(q), _heads(k), _heads(do)
    dh, dv = k.new_empty(C.shape[0], HV, K, V), do.new_empty(T, HV, V)
    d_initial = torch.empty(N, HV, K, V, dtype=torch.float32, device=do.device)
    chosen = config("gdn reverse", k, max(K, V), BV=min(K, V))
    kernels.reverse_kernel[(N * HV * (V // chosen["BV"]),)](
        _rows(q, K), _rows(k, K), _rows(do, chosen["BV"]), _tiles(C), _tiles(A), gates, norms, _dense(d_final_state),
        dh, dv, d_initial, cu_seqlens, offsets, scale, HV,
        R=HV // H, K=K, V=V, BT=BT, NORM=norms.numel() > 0, D_FINAL=d_final_state is not None, PREC=_precision(k),
        **chosen,
    )  # fmt: skip
    return dh, dv, d_initial


@register_fake(gdn_reverse)
def _(q, k, do, offsets, C, A, gates, norms, d_final_state, cu_seqlens, scale):
    states = (C.shape[0], do.shape[1], k.shape[2], do.shape[2])
    d_initial = do.new_empty((cu_seqlens.shape[0] - 1, *states[1:]), dtype=torch.float32)
    return k.new_empty(states), do.new_empty(do.shape), d_initial


@operator
def gdn_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    y: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor,
    table: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    d_final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dg, dbeta, dA_log, ddt_bias, each in its input's dtype; the last two empty where they are None."""
    (T, H, K), (_, HV, V), NT = k.shape, y.shape, table.shape[0]
    q, k, do, g = _heads(q), _heads(k), _heads(do), g.contiguous()
    dq, dk = q.new_empty(T, HV, K), k.new_empty(T, HV, K)
    dg, dbeta = g.new_empty(T, HV), beta.new_empty(T, HV)
    d_gate = torch.empty((2, NT, HV) if A_log is not None else 0, dtype=torch.float32, device=k.device)
    chosen = config("gdn gradients", k, max(K, V), BV=min(K, V))
    rows, states = [_rows(x, chosen["BV"]) for x in (do, y, dv)], [_states(x, chosen["BV"]) for x in (h, dh)]
    kernels.gradients_kernel[(NT * HV,)](
        _rows(q, K), _rows(k, K), *rows, *states, gates, norms, g, A_log, dt_bias, _dense(initial_state),
        _dense(d_final_state), dq, dk, dg, dbeta, d_gate, cu_seqlens, table, scale, HV, NT,
        R=HV // H, K=K, V=V, BT=BT, GATE=A_log is not None, DT_BIAS=dt_bias is not None, NORM=norms.numel() > 0,
        EDGES=initial_state is not None and d_final_state is not None, PREC=_precision(k), **chosen,
    )  # fmt: skip
    if HV > H:
        dq, dk = (x.view(T, H, HV // H, K).sum(2) for x in (dq, dk))
    none = k.new_empty(0)
    dA_log = d_gate[0].sum(0).to(A_log.dtype) if A_log is not None else none
    return dq, dk, dg, dbeta, dA_log, d_gate[1].sum(0).to(dt_bias.dtype) if dt_bias is not None else none.clone()


@register_fake(gdn_gradients)
def _(
    q, k, do, h, y, dh, dv, table, gates, norms, g, beta, A_log, dt_bias, initial_state, d_final_state, cu_seqlens,
    scale,
):  # fmt: skip
    dA_log = A_log.new_empty(A_log.shape) if A_log is not None else k.new_empty(0)
    ddt_bias = dt_bias.new_empty(dt_bias.shape) if dt_bias is not None else k.new_empty(0)
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), g.new_empty(g.shape), beta.new_empty(beta.shape), dA_log, ddt_bias,
    )  # fmt: skip
