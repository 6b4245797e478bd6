"""The chunked gated delta rule (GDN) in Triton: the stages of a forward and backward pass, as operators.

    prepare        (q, k, g, beta) -> tiles                                     chunk-parallel
    recompute      (q, k, g, beta) -> tiles but C                               prepare again, for backward
    scan           (q, k, v, tiles, initial_state) -> o, final_state            sequential in a head
    boundary       (k, v, tiles, some entries) -> S_ext, M                      for context parallelism
    boundary_bwd   (q, k, do, tiles, some entries) -> dS_ext
    backward       (all of these) -> gradients                                  two scans, then chunk-parallel

A pass keeps its inputs and C (64 numbers per token and head) between forward and backward.

q, k [T, H, K], v [T, HV, V], g, beta [T, HV] are flat packed streams (`tiles.py`: any stride between tokens), HV = R·H,
of N entries; `Chunks` (cu_seqlens, chunk_index, chunk_offsets) says where these lie. The tiles of NT chunks of BT = 64
tokens (see gdn_kernels for the letters) are

    C, A [NT, HV, BT, BT]                         gates [NT, HV, 2, BT] fp32: cumulative gate in base 2, β
    norms [NT, H, 2, BT] fp32: 1 / |q|, 1 / |k|; empty without l2norm

Nothing here waits for the device. beta_range: None if beta is β; otherwise beta holds logits, β is beta_range times
their sigmoid, and dbeta is the gradient of the logits. With A_log [HV], g is raw and the gate is
-exp(A_log) softplus(g + dt_bias).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK as BT
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.triton import gdn_kernels as kernels
from titan_linear.ops.triton.configs import Config, config, widest_slice
from titan_linear.ops.triton.solve import solve_kernel
from titan_linear.ops.triton.tiles import chunk_tiles, dense_heads, empty_gradients, empty_states, row_tiles


def _precision(x: Tensor) -> str:
    """Precision of dots with fp32 operands; bf16 and fp16 operands are exact in the tensor cores' fp32 sums."""
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def _constants(k: Tensor, HV: int, norms: Tensor) -> dict[str, int | bool | str]:
    """Constants of every kernel but prepare."""
    return {"R": HV // k.shape[1], "K": k.shape[2], "BT": BT, "NORM": norms.numel() > 0, "PREC": _precision(k)}


def _sliced(kernel: str, k: Tensor, V: int) -> Config:
    """The configuration of a kernel that takes all K rows of a state, and its V columns slice by slice."""
    K, S = k.shape[2], widest_slice(V)
    return config(kernel, k, max(K, S), BV=min(K, S))


def _recomputed(k: Tensor, g: Tensor, chunk_index: Tensor, l2norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty A, gates, norms."""
    NT, HV = chunk_index.shape[0], g.shape[1]
    gates = k.new_empty(NT, HV, 2, BT, dtype=torch.float32)
    norms = k.new_empty((NT, k.shape[1], 2, BT) if l2norm else 0, dtype=torch.float32)
    return k.new_empty(NT, HV, BT, BT), gates, norms


def _launch_prepare(q, k, g, beta, A_log, dt_bias, C, A, gates, norms, cu_seqlens, chunk_index, scale, beta_range):
    """C: None in backward, which has it from forward."""
    (_, H, K), HV, NT = q.shape, g.shape[1], chunk_index.shape[0]
    q, k, g, beta = (dense_heads(x) for x in (q, k, g, beta))
    kernels.prepare_kernel[(NT * HV,)](
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        C,
        A,
        gates,
        norms,
        cu_seqlens,
        chunk_index,
        scale,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        HV,
        R=HV // H,
        K=K,
        BT=BT,
        NORM=norms.numel() > 0,
        BETA_RANGE=beta_range,
        PREC=_precision(k),
        **config("gdn recompute" if C is None else "gdn prepare", k, K),
    )


@operator(kind="delta rule", of_driver=True, prepares="forward")
def gdn_prepare(
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
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> C, A, gates, norms."""
    A, gates, norms = _recomputed(k, g, chunk_index, l2norm)
    C = torch.empty_like(A)
    _launch_prepare(q, k, g, beta, A_log, dt_bias, C, A, gates, norms, cu_seqlens, chunk_index, scale, beta_range)
    solve_kernel[(C.shape[0] * C.shape[1],)](
        gates[:, :, 1], C, STRIDE_B=2 * BT, SCALED=True, **config("solve", k, k.shape[2])
    )
    return C, A, gates, norms


@register_fake(gdn_prepare)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunk_index, chunk_offsets, scale, l2norm, beta_range):
    A, gates, norms = _recomputed(k, g, chunk_index, l2norm)
    return torch.empty_like(A), A, gates, norms


@operator(kind="delta rule", of_driver=True, prepares="backward")
def gdn_recompute(
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
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> A, gates, norms."""
    A, gates, norms = _recomputed(k, g, chunk_index, l2norm)
    _launch_prepare(q, k, g, beta, A_log, dt_bias, None, A, gates, norms, cu_seqlens, chunk_index, scale, beta_range)
    return A, gates, norms


@register_fake(gdn_recompute)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunk_index, chunk_offsets, scale, l2norm, beta_range):
    return _recomputed(k, g, chunk_index, l2norm)


def _scan_outputs(k: Tensor, v: Tensor, final_rows: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(v, final_rows, k.shape[2])


@operator(kept_by=("selective",), kind="delta rule", of_driver=True)
def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    C: Tensor,
    A: Tensor,
    gates: Tensor,
    norms: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    initial_state: Tensor | None,
    state_index: Tensor | None,
    final_index: Tensor | None,
    final_rows: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """-> o [T, HV, V], final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
    K, (_, HV, V), N = k.shape[2], v.shape, cu_seqlens.shape[0] - 1
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    o, final_state = _scan_outputs(k, v, final_rows)
    chosen = _sliced("gdn scan", k, V)
    BV = chosen["BV"]
    kernels.scan_kernel[(N * HV * (V // BV),)](
        row_tiles(q, BT, K),
        row_tiles(k, BT, K),
        row_tiles(v, BT, BV),
        chunk_tiles(C, BT, BT),
        chunk_tiles(A, BT, BT),
        gates,
        norms,
        initial_state,
        state_index,
        o,
        final_state if final_rows else None,
        final_index,
        cu_seqlens,
        chunk_offsets,
        scale,
        HV,
        V=V,
        **_constants(k, HV, norms),
        **chosen,
    )
    return o, final_state


@register_fake(gdn_scan)
def _(
    q,
    k,
    v,
    C,
    A,
    gates,
    norms,
    cu_seqlens,
    chunk_index,
    chunk_offsets,
    initial_state,
    state_index,
    final_index,
    final_rows,
    scale,
):
    return _scan_outputs(k, v, final_rows)


def _boundary_outputs(k: Tensor, v: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    F, HV, K = entries.shape[0], v.shape[1], k.shape[2]
    return empty_states(v, F, K), v.new_empty(F, HV, K, K, dtype=torch.float32)


@operator(kept_by=("selective",), kind="delta rule", of_driver=True)
def gdn_boundary(
    k: Tensor,
    v: Tensor,
    C: Tensor,
    A: Tensor,
    gates: Tensor,
    norms: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M [F, HV, K, K],
    its transition; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both for all."""
    K, (_, HV, V), F = k.shape[2], v.shape, entries.shape[0]
    k, v = dense_heads(k), dense_heads(v)
    S_ext, M = _boundary_outputs(k, v, entries)
    chosen = _sliced("gdn boundary", k, V)
    BV = chosen["BV"]
    kernels.boundary_kernel[(F * HV * ((V + K) // BV),)](
        row_tiles(k, BT, K),
        row_tiles(v, BT, BV),
        chunk_tiles(C, BT, BT),
        gates,
        norms,
        entries,
        wanted,
        S_ext,
        M,
        cu_seqlens,
        chunk_offsets,
        HV,
        V=V,
        **_constants(k, HV, norms),
        **chosen,
    )
    return S_ext, M


@register_fake(gdn_boundary)
def _(k, v, C, A, gates, norms, cu_seqlens, chunk_index, chunk_offsets, entries, wanted):
    return _boundary_outputs(k, v, entries)


@operator(kind="delta rule", of_driver=True)
def gdn_boundary_bwd(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    C: Tensor,
    A: Tensor,
    gates: Tensor,
    norms: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
    scale: float,
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    K, (_, HV, V), F = k.shape[2], do.shape, entries.shape[0]
    q, k, do = dense_heads(q), dense_heads(k), dense_heads(do)
    dS_ext = empty_states(do, F, K)
    chosen = _sliced("gdn boundary", k, V)
    BV = chosen["BV"]
    kernels.boundary_bwd_kernel[(F * HV * (V // BV),)](
        row_tiles(q, BT, K),
        row_tiles(k, BT, K),
        row_tiles(do, BT, BV),
        chunk_tiles(C, BT, BT),
        chunk_tiles(A, BT, BT),
        gates,
        norms,
        entries,
        wanted,
        dS_ext,
        cu_seqlens,
        chunk_offsets,
        scale,
        HV,
        V=V,
        **_constants(k, HV, norms),
        **chosen,
    )
    return dS_ext


@register_fake(gdn_boundary_bwd)
def _(q, k, do, C, A, gates, norms, cu_seqlens, chunk_index, chunk_offsets, entries, wanted, scale):
    return empty_states(do, entries.shape[0], k.shape[2])


def _room_in_backward(k: Tensor, v: Tensor, **_: Any) -> int:
    """Bytes, for each chunk: states and their gradients, y."""
    (T, HV, V), K = v.shape, k.shape[-1]
    return T * HV * (2 * K * V // BT + V) * v.element_size()


@operator(kind="delta rule", of_driver=True, temporary=_room_in_backward)
def gdn_backward(
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
    C: Tensor,
    A: Tensor,
    gates: Tensor,
    norms: Tensor,
    cu_seqlens: Tensor,
    chunk_index: Tensor,
    chunk_offsets: Tensor,
    scale: float,
    l2norm: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, dg, dbeta, dA_log, ddt_bias (each dense, in its input's dtype; the last two are empty where A_log
    or dt_bias is None), d_initial_state, fp32 in initial_state's shape (empty unless needed; rows that belong to no
    entry stay unwritten)."""
    (T, H, K), (_, HV, V), NT, N = k.shape, v.shape, chunk_index.shape[0], cu_seqlens.shape[0] - 1
    q, k, v, g, do = (dense_heads(x) for x in (q, k, v, g, do))
    constants = {"V": V} | _constants(k, HV, norms)
    states, reverse, chosen = (_sliced(f"gdn {name}", k, V) for name in ("states", "reverse", "gradients"))
    q_rows, k_rows, C_tiles = row_tiles(q, BT, K), row_tiles(k, BT, K), chunk_tiles(C, BT, BT)
    h, y = k.new_empty(NT, HV, K, V), v.new_empty(v.shape)
    kernels.states_kernel[(N * HV * (V // states["BV"]),)](
        k_rows,
        row_tiles(v, BT, states["BV"]),
        C_tiles,
        gates,
        norms,
        initial_state,
        state_index,
        h,
        y,
        cu_seqlens,
        chunk_offsets,
        HV,
        **constants,
        **states,
    )

    dh, dv = torch.empty_like(h), v.new_empty(v.shape)
    d_initial = v.new_empty(initial_state.shape if need_d_initial else 0, dtype=torch.float32)
    kernels.reverse_kernel[(N * HV * (V // reverse["BV"]),)](
        q_rows,
        k_rows,
        row_tiles(do, BT, reverse["BV"]),
        C_tiles,
        chunk_tiles(A, BT, BT),
        gates,
        norms,
        d_final_state,
        final_index,
        dh,
        dv,
        d_initial if need_d_initial else None,
        state_index,
        cu_seqlens,
        chunk_offsets,
        scale,
        HV,
        **constants,
        **reverse,
    )

    dq, dk = (q.new_empty(T, HV, K) for _ in range(2))
    dg, dbeta = g.new_empty(g.shape), beta.new_empty(beta.shape)
    d_gate = None if A_log is None else k.new_empty(2, NT, HV, dtype=torch.float32)
    rows = [row_tiles(x, BT, chosen["BV"]) for x in (do, y, dv)]
    kernels.gradients_kernel[(NT * HV,)](
        q_rows,
        k_rows,
        *rows,
        chunk_tiles(h, K, chosen["BV"]),
        chunk_tiles(dh, K, chosen["BV"]),
        gates,
        norms,
        g,
        A_log,
        dt_bias,
        initial_state,
        state_index,
        d_final_state,
        final_index,
        dq,
        dk,
        dg,
        dbeta,
        d_gate,
        cu_seqlens,
        chunk_index,
        scale,
        g.stride(0),
        HV,
        NT,
        BETA_RANGE=beta_range,
        **constants,
        **chosen,
    )
    if HV > H:
        dq, dk = (x.view(T, H, HV // H, K).sum(2) for x in (dq, dk))
    dA_log, ddt_bias = (
        q.new_empty(0) if x is None else d_gate[i].sum(0).view(x.shape).to(x.dtype)
        for i, x in enumerate((A_log, dt_bias))
    )
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial


register_fake(gdn_backward)(empty_gradients)
