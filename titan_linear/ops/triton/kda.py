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
of N entries. Operators take named tuples as lists: `Inputs`, `Chunks`, `Tiles`, `States`.

Nothing here waits for the device. beta_range: None if beta is β; otherwise beta holds logits, β is beta_range times
their sigmoid, and dbeta is the gradient of the logits. gate: g is the log decay (0), or the raw input of the softplus
gate (1) or of the bounded gate (2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.runtime.options import Fields, Inputs, States
from titan_linear.ops.triton.chunks import Chunks
from titan_linear.ops.triton.configs import config, widest_slice
from titan_linear.ops.triton.kda_bwd import backward_scans_kernel, boundary_bwd_kernel, gradient_kernel, matrix_kernel
from titan_linear.ops.triton.kda_fwd import boundary_kernel, prepare_kernel, scan_kernel
from titan_linear.ops.triton.solve import solve_kernel
from titan_linear.ops.triton.tiles import (
    chunk_tiles,
    dense_heads,
    empty_boundary_gradients,
    empty_gradients,
    empty_states,
    ragged_tiles,
    sum_groups,
)

GATES = {"none": 0, "softplus": 1, "bounded": 2}


class Tiles(NamedTuple):
    """Of NT chunks of C = 64 tokens; the letters are those of kda_fwd."""

    qg: Tensor  # [NT, HV, K, C] scale·q·2^Γ
    kn: Tensor  # [NT, HV, K, C] −k·2^Γ
    kg: Tensor  # [NT, HV, K, C] k·2^(γ−Γ)
    decay: Tensor  # [NT, HV, K] fp32, 2^γ
    b: Tensor  # [NT, HV, C] fp32, β
    Aqk: Tensor | None  # [NT, HV, C, C]; None, like Gn: not computed again
    Gn: Tensor | None  # [NT, HV, C, C]


TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix operands: fp16's exponent cannot hold the factors of fast gates, so fp16 inputs use bf16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def _empty_tiles(inputs: Fields, chunks: list[Tensor], matrices: bool = True) -> Tiles:
    q, g, NT = Inputs(*inputs).q, Inputs(*inputs).g, Chunks(*chunks).chunk_index.shape[0]
    (_, HV, K), dtype = g.shape, compute_dtype(q.dtype)
    qg, kn, kg = (g.new_empty(NT, HV, K, CHUNK, dtype=dtype) for _ in range(3))
    decay, b = (g.new_empty(NT, HV, dim, dtype=torch.float32) for dim in (K, CHUNK))
    Aqk, Gn = (g.new_empty(NT, HV, CHUNK, CHUNK, dtype=dtype) if matrices else None for _ in range(2))
    return Tiles(qg, kn, kg, decay, b, Aqk, Gn)


def _launch_prepare(
    x: Inputs,
    tiles: Tiles,
    chunks: Chunks,
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    beta_range: float | None,
) -> None:
    (_, H, K), HV, NT, matrices = x.q.shape, x.g.shape[1], chunks.chunk_index.shape[0], tiles.Aqk is not None
    q, k, g, beta = map(dense_heads, (x.q, x.k, x.g, x.beta))
    fast = q.new_empty(NT, HV, dtype=torch.int32) if matrices and not safe_gate else None
    for safe in (safe_gate,) if fast is None else (True, False):  # see `is_fast`
        chosen = config(f"kda {'prepare' if matrices else 'recompute'}{' safe' if safe else ''}", q, K, BK=K)
        prepare_kernel[1 if matrices else K // chosen["BK"], HV, NT](
            q,
            k,
            g,
            beta,
            x.A_log,
            x.dt_bias,
            *tiles,
            fast,
            chunks.cu_seqlens,
            chunks.chunk_index,
            scale,
            lower_bound,
            q.stride(0),
            k.stride(0),
            g.stride(0),
            beta.stride(0),
            H=H,
            HV=HV,
            K=K,
            CT=TRITON_DTYPE[tiles.qg.dtype],
            GATE=gate,
            SAFE=safe,
            BETA_RANGE=beta_range,
            MATRICES=matrices,
            **chosen,
        )


@operator(cost=costs.over_inputs, of_driver=True, prepares="forward")
def kda_prepare(
    inputs: Fields,
    chunks: list[Tensor],
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> `Tiles`."""
    x, tiles = Inputs(*inputs), _empty_tiles(inputs, chunks)
    _launch_prepare(x, tiles, Chunks(*chunks), scale, lower_bound, gate, safe_gate, beta_range)
    chosen = config("solve", x.q, x.q.shape[2])
    solve_kernel[tiles.b.shape[0] * tiles.b.shape[1],](tiles.b, tiles.Gn, STRIDE_B=CHUNK, SCALED=False, **chosen)
    return tiles


@register_fake(kda_prepare)
def _(inputs, chunks, *_):
    return _empty_tiles(inputs, chunks)


@operator(cost=costs.over_inputs, of_driver=True, prepares="backward")
def kda_recompute(
    inputs: Fields,
    chunks: list[Tensor],
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> qg, kn, kg, decay, b."""
    x, tiles = Inputs(*inputs), _empty_tiles(inputs, chunks, matrices=False)
    _launch_prepare(x, tiles, Chunks(*chunks), scale, lower_bound, gate, safe_gate, beta_range)
    return tiles[:5]


@register_fake(kda_recompute)
def _(inputs, chunks, *_):
    return _empty_tiles(inputs, chunks, matrices=False)[:5]


def _scan_outputs(v, tiles, chunks, initial, final_rows) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(v, final_rows, Tiles(*tiles).qg.shape[2])


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def kda_scan(
    v: Tensor, tiles: list[Tensor], chunks: list[Tensor], initial: Fields, final_rows: int
) -> tuple[Tensor, Tensor]:
    """-> o [T, HV, V], final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
    made, where = Tiles(*tiles), Chunks(*chunks)
    o, final_state = _scan_outputs(v, tiles, chunks, initial, final_rows)
    (_, HV, K, _), V, N, v = made.qg.shape, v.shape[2], where.cu_seqlens.shape[0] - 1, dense_heads(v)
    chosen = config("kda scan", made.qg, K, BV=widest_slice(V))
    scan_kernel[V // chosen["BV"], N * HV](
        v,
        *made,
        *States(*initial),
        o,
        final_state if final_rows else None,
        where.cu_seqlens,
        where.chunk_offsets,
        v.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[made.qg.dtype],
        **chosen,
    )
    return o, final_state


register_fake(kda_scan)(_scan_outputs)


def _boundary_outputs(v, tiles, chunks, entries, wanted) -> tuple[Tensor, Tensor]:
    (_, HV, K, _), F = Tiles(*tiles).qg.shape, entries.shape[0]
    return empty_states(v, F, K), v.new_empty(F, HV, K, K, dtype=torch.float32)


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def kda_boundary(
    v: Tensor, tiles: list[Tensor], chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M [F, HV, K, K],
    its transition; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both for all."""
    made, where = Tiles(*tiles), Chunks(*chunks)
    S_ext, M = _boundary_outputs(v, tiles, chunks, entries, wanted)
    (F, HV, K, V), v = S_ext.shape, dense_heads(v)
    chosen = config("kda scan", made.qg, K, BV=min(K, widest_slice(V)))
    boundary_kernel[(V + K) // chosen["BV"], F * HV](
        v,
        made.kn,
        made.kg,
        made.decay,
        made.b,
        made.Gn,
        entries,
        wanted,
        S_ext,
        M,
        where.cu_seqlens,
        where.chunk_offsets,
        v.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[made.qg.dtype],
        **chosen,
    )
    return S_ext, M


register_fake(kda_boundary)(_boundary_outputs)


@operator(cost=costs.over_states, of_driver=True)
def kda_boundary_bwd(
    do: Tensor, tiles: list[Tensor], chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    made, where = Tiles(*tiles), Chunks(*chunks)
    dS_ext = empty_boundary_gradients(do, tiles, chunks, entries, wanted)
    (F, HV, K, V), do = dS_ext.shape, dense_heads(do)
    chosen = config("kda reverse", made.qg, K, BV=widest_slice(V))
    boundary_bwd_kernel[V // chosen["BV"], F * HV](
        do,
        *made,
        entries,
        wanted,
        dS_ext,
        where.cu_seqlens,
        where.chunk_offsets,
        do.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[made.qg.dtype],
        **chosen,
    )
    return dS_ext


register_fake(kda_boundary_bwd)(empty_boundary_gradients)


def _room_in_backward(inputs: Fields, **_: Any) -> int:
    """Bytes, for each chunk: states and their gradients, r and y, the gradients of two matrices; dq and dk of value
    heads that share them."""
    x = Inputs(*inputs)
    (T, HV, V), (_, H, K) = x.v.shape, x.k.shape
    shared = 2 * K if HV > H else 0
    return T * HV * (2 * K * V // CHUNK + 2 * V + 2 * CHUNK + shared) * x.v.element_size()


@operator(cost=costs.over_inputs, of_driver=True, temporary=_room_in_backward)
def kda_backward(
    do: Tensor,
    inputs: Fields,
    tiles: list[Tensor],
    chunks: list[Tensor],
    initial: Fields,
    d_final: Fields,
    need_d_initial: bool,
    scale: float,
    lower_bound: float,
    gate: int,
    safe_gate: bool,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of `Inputs` (each dense, in its input's dtype; those of A_log and dt_bias are empty if not
    given), and of the initial states, fp32 in their shape (empty unless needed; rows that belong to no entry stay
    unwritten)."""
    q, k, v, g, beta, A_log, dt_bias = Inputs(*inputs)
    made, states, final = Tiles(*tiles), States(*initial), States(*d_final)
    cu_seqlens, chunk_index, chunk_offsets = Chunks(*chunks)
    (T, H, K), (HV, V), NT, N, CT = q.shape, v.shape[1:], chunk_index.shape[0], cu_seqlens.shape[0] - 1, made.qg.dtype
    q, k, v, g, do = (dense_heads(x) for x in (q, k, v, g, do))
    h, dh = (v.new_empty(NT, HV, V, K, dtype=CT) for _ in range(2))
    r, y = (v.new_empty(NT, HV, V, CHUNK, dtype=CT) for _ in range(2))
    d_initial = v.new_empty(states.values.shape if need_d_initial else 0, dtype=torch.float32)
    scans = config("kda reverse", made.qg, K, BV=widest_slice(V))
    backward_scans_kernel[V // scans["BV"], N * HV, 2](
        v,
        do,
        *made,
        states.values,
        final.values,
        final.index,
        d_initial if need_d_initial else None,
        states.index,
        h,
        dh,
        r,
        y,
        cu_seqlens,
        chunk_offsets,
        v.stride(0),
        do.stride(0),
        HV=HV,
        K=K,
        V=V,
        CT=TRITON_DTYPE[CT],
        **scans,
    )

    dv, dbeta = v.new_empty(v.shape), beta.new_empty(beta.shape)
    dA, dK = (v.new_empty(NT, HV, CHUNK, CHUNK, dtype=CT) for _ in range(2))
    matrix_kernel[HV, NT](
        made.b,
        do,
        r,
        y,
        dA,
        dK,
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
    dg = g.new_empty(g.shape)
    parts = g.new_empty(2, NT if gate else 0, HV * K, dtype=torch.float32)  # of ddt_bias and dA_log
    limits = {"BK": K, "BV": widest_slice(V)}
    BF = config("kda gradient safe", q, K, **limits)["BK"]
    fast = None if safe_gate else g.new_empty(NT, HV, K // BF, dtype=torch.int32)
    for safe in (True,) if safe_gate else (True, False):  # see `is_fast`
        chosen = config(f"kda gradient{' safe' if safe else ''}", q, K, **limits)
        BK, BV = chosen["BK"], chosen["BV"]
        assert BF % BK == 0, "a program reads one flag"
        chunk_matrices = [chunk_tiles(x, BV, width) for x, width in ((r, CHUNK), (y, CHUNK), (h, BK), (dh, BK))]
        gradient_kernel[K // BK, HV, NT](
            q,
            k,
            g,
            A_log,
            dt_bias,
            made.b,
            ragged_tiles(do, CHUNK, BV),
            *chunk_matrices,
            dA,
            dK,
            dq,
            dk,
            dg,
            None if A_log is None else parts[1],
            None if dt_bias is None else parts[0],
            fast,
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
            BF=BF,
            CT=TRITON_DTYPE[CT],
            GATE=gate,
            SAFE=safe,
            **chosen,
        )
    if HV != H:
        dq, dk = sum_groups(dq, q), sum_groups(dk, k)
    ddt_bias, dA_log = parts.sum(1)
    dA_log = q.new_empty(0) if A_log is None else dA_log.view(HV, K).sum(1).view(A_log.shape).to(A_log.dtype)
    ddt_bias = q.new_empty(0) if dt_bias is None else ddt_bias.view(dt_bias.shape).to(dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial


register_fake(kda_backward)(empty_gradients)
