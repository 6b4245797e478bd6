"""The chunked gated delta rule (GDN) in Triton: the stages of a forward and backward pass, as operators.

    prepare        (q, k, g, beta) -> tiles                                     chunk-parallel
    scan           (q, k, v, tiles, initial_state) -> o, final_state            sequential in a head
    boundary       (k, v, tiles, some entries) -> S_ext, M                      for context parallelism
    boundary_bwd   (q, k, do, tiles, some entries) -> dS_ext
    backward       (all of these) -> gradients                                  two scans, then chunk-parallel

A pass keeps its inputs and the tiles (2 × 64 numbers and two of fp32 per token and head) between forward and backward.

q, k [T, H, K], v [T, HV, V], g, beta [T, HV] are flat packed streams (`tiles.py`: any stride between tokens), HV = R·H,
of N entries. Operators take named tuples as lists: `Inputs`, `Chunks`, `Tiles`, `States`.

Nothing here waits for the device. beta_range: None if beta is β; otherwise beta holds logits, β is beta_range times
their sigmoid, and dbeta is the gradient of the logits. With A_log [HV], g is raw and the gate is
-exp(A_log) softplus(g + dt_bias).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK as BT
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.runtime.options import Fields, Inputs, States
from titan_linear.ops.triton import gdn_kernels as kernels
from titan_linear.ops.triton.chunks import Chunks
from titan_linear.ops.triton.configs import Config, config, widest_slice
from titan_linear.ops.triton.solve import solve_kernel
from titan_linear.ops.triton.tiles import (
    chunk_tiles,
    dense_heads,
    empty_gradients,
    empty_states,
    ragged_tiles,
    sum_groups,
)


class Tiles(NamedTuple):
    """Of NT chunks of BT = 64 tokens; the letters are those of gdn_kernels."""

    C: Tensor  # [NT, HV, BT, BT]
    A: Tensor  # [NT, HV, BT, BT]
    gates: Tensor  # [NT, HV, 2, BT] fp32: cumulative gate in base 2, β


def _precision(x: Tensor) -> str:
    """Precision of dots with fp32 operands; bf16 and fp16 operands are exact in the tensor cores' fp32 sums."""
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def _constants(k: Tensor, HV: int) -> dict[str, int | bool | str]:
    """Constants of every kernel but prepare."""
    return {"R": HV // k.shape[1], "K": k.shape[2], "BT": BT, "PREC": _precision(k)}


def _sliced(kernel: str, k: Tensor, V: int) -> Config:
    """The configuration of a kernel that takes all K rows of a state, and its V columns slice by slice."""
    K = k.shape[2]
    return config(kernel, k, K, BV=min(K, widest_slice(V)))


def _empty_tiles(inputs: Fields, chunks: list[Tensor], *_: Any) -> Tiles:
    k, HV, NT = Inputs(*inputs).k, Inputs(*inputs).g.shape[1], Chunks(*chunks).chunk_index.shape[0]
    C, A = (k.new_empty(NT, HV, BT, BT) for _ in range(2))
    return Tiles(C, A, k.new_empty(NT, HV, 2, BT, dtype=torch.float32))


@operator(cost=costs.over_inputs, of_driver=True)
def gdn_prepare(
    inputs: Fields,
    chunks: list[Tensor],
    scale: float,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> `Tiles`."""
    x, where, tiles = Inputs(*inputs), Chunks(*chunks), _empty_tiles(inputs, chunks)
    (_, H, K), (NT, HV, _, _) = x.q.shape, tiles.C.shape
    q, k, g, beta = map(dense_heads, (x.q, x.k, x.g, x.beta))
    kernels.prepare_kernel[(NT * HV,)](
        q,
        k,
        g,
        beta,
        x.A_log,
        x.dt_bias,
        *tiles,
        where.cu_seqlens,
        where.chunk_index,
        scale,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        HV,
        R=HV // H,
        K=K,
        BT=BT,
        BETA_RANGE=beta_range,
        PREC=_precision(k),
        **config("gdn prepare", k, K),
    )
    solve_kernel[(NT * HV,)](tiles.gates[:, :, 1], tiles.C, STRIDE_B=2 * BT, SCALED=True, **config("solve", k, K))
    return tiles


register_fake(gdn_prepare)(_empty_tiles)


def _scan_outputs(k: Tensor, v: Tensor, final_rows: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(v, final_rows, k.shape[2])


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: list[Tensor],
    chunks: list[Tensor],
    initial: Fields,
    final_rows: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """-> o [T, HV, V], final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
    made, where, states = Tiles(*tiles), Chunks(*chunks), States(*initial)
    K, (_, HV, V), N = k.shape[2], v.shape, where.cu_seqlens.shape[0] - 1
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    o, final_state = _scan_outputs(k, v, final_rows)
    chosen = _sliced("gdn scan", k, V)
    BV = chosen["BV"]
    kernels.scan_kernel[(N * HV * (V // BV),)](
        ragged_tiles(q, BT, K),
        ragged_tiles(k, BT, K),
        ragged_tiles(v, BT, BV),
        chunk_tiles(made.C, BT, BT),
        chunk_tiles(made.A, BT, BT),
        made.gates,
        states.values,
        states.index,
        o,
        final_state if final_rows else None,
        where.cu_seqlens,
        where.chunk_offsets,
        scale,
        HV,
        V=V,
        **_constants(k, HV),
        **chosen,
    )
    return o, final_state


@register_fake(gdn_scan)
def _(q, k, v, tiles, chunks, initial, final_rows, scale):
    return _scan_outputs(k, v, final_rows)


def _boundary_outputs(k, v, tiles, chunks, entries, wanted) -> tuple[Tensor, Tensor]:
    F, HV, K = entries.shape[0], v.shape[1], k.shape[2]
    return empty_states(v, F, K), v.new_empty(F, HV, K, K, dtype=torch.float32)


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def gdn_boundary(
    k: Tensor, v: Tensor, tiles: list[Tensor], chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M [F, HV, K, K],
    its transition; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both for all."""
    made, where = Tiles(*tiles), Chunks(*chunks)
    k, v = dense_heads(k), dense_heads(v)
    S_ext, M = _boundary_outputs(k, v, tiles, chunks, entries, wanted)
    F, HV, K, V = S_ext.shape
    chosen = _sliced("gdn boundary", k, V)
    BV = chosen["BV"]
    kernels.boundary_kernel[(F * HV * ((V + K) // BV),)](
        ragged_tiles(k, BT, K),
        ragged_tiles(v, BT, BV),
        chunk_tiles(made.C, BT, BT),
        made.gates,
        entries,
        wanted,
        S_ext,
        M,
        where.cu_seqlens,
        where.chunk_offsets,
        HV,
        V=V,
        **_constants(k, HV),
        **chosen,
    )
    return S_ext, M


register_fake(gdn_boundary)(_boundary_outputs)


@operator(cost=costs.over_states, of_driver=True)
def gdn_boundary_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    tiles: list[Tensor],
    chunks: list[Tensor],
    entries: Tensor,
    wanted: Tensor | None,
    scale: float,
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    made, where = Tiles(*tiles), Chunks(*chunks)
    q, k, do = dense_heads(q), dense_heads(k), dense_heads(do)
    dS_ext = empty_states(do, entries.shape[0], k.shape[2])
    F, HV, K, V = dS_ext.shape
    chosen = _sliced("gdn boundary", k, V)
    BV = chosen["BV"]
    kernels.boundary_bwd_kernel[(F * HV * (V // BV),)](
        ragged_tiles(q, BT, K),
        ragged_tiles(k, BT, K),
        ragged_tiles(do, BT, BV),
        chunk_tiles(made.C, BT, BT),
        chunk_tiles(made.A, BT, BT),
        made.gates,
        entries,
        wanted,
        dS_ext,
        where.cu_seqlens,
        where.chunk_offsets,
        scale,
        HV,
        V=V,
        **_constants(k, HV),
        **chosen,
    )
    return dS_ext


@register_fake(gdn_boundary_bwd)
def _(do, q, k, tiles, chunks, entries, wanted, scale):
    return empty_states(do, entries.shape[0], k.shape[2])


def _room_in_backward(inputs: Fields, **_: Any) -> int:
    """Bytes, for each chunk: states and their gradients, y; dq and dk of value heads that share them."""
    x = Inputs(*inputs)
    (T, HV, V), (_, H, K) = x.v.shape, x.k.shape
    shared = 2 * K if HV > H else 0
    return T * HV * (2 * K * V // BT + V + shared) * x.v.element_size()


@operator(cost=costs.over_inputs, of_driver=True, temporary=_room_in_backward)
def gdn_backward(
    do: Tensor,
    inputs: Fields,
    tiles: list[Tensor],
    chunks: list[Tensor],
    initial: Fields,
    d_final: Fields,
    need_d_initial: bool,
    scale: float,
    beta_range: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of `Inputs` (each dense, in its input's dtype; those of A_log and dt_bias are empty if not
    given), and of the initial states, fp32 in their shape (empty unless needed; rows that belong to no entry stay
    unwritten)."""
    q, k, v, g, beta, A_log, dt_bias = Inputs(*inputs)
    made, states, final = Tiles(*tiles), States(*initial), States(*d_final)
    gates = made.gates
    cu_seqlens, chunk_index, chunk_offsets = Chunks(*chunks)
    (T, H, K), (_, HV, V), NT, N = k.shape, v.shape, chunk_index.shape[0], cu_seqlens.shape[0] - 1
    q, k, v, g, do = (dense_heads(x) for x in (q, k, v, g, do))
    constants = {"V": V} | _constants(k, HV)
    forward, reverse, chosen = (_sliced(f"gdn {name}", k, V) for name in ("states", "reverse", "gradients"))
    q_rows, k_rows, C_tiles = ragged_tiles(q, BT, K), ragged_tiles(k, BT, K), chunk_tiles(made.C, BT, BT)
    h, y = k.new_empty(NT, HV, K, V), v.new_empty(v.shape)
    kernels.states_kernel[(N * HV * (V // forward["BV"]),)](
        k_rows,
        ragged_tiles(v, BT, forward["BV"]),
        C_tiles,
        gates,
        states.values,
        states.index,
        h,
        y,
        cu_seqlens,
        chunk_offsets,
        HV,
        **constants,
        **forward,
    )

    dh, dv = torch.empty_like(h), v.new_empty(v.shape)
    d_initial = v.new_empty(states.values.shape if need_d_initial else 0, dtype=torch.float32)
    kernels.reverse_kernel[(N * HV * (V // reverse["BV"]),)](
        q_rows,
        k_rows,
        ragged_tiles(do, BT, reverse["BV"]),
        C_tiles,
        chunk_tiles(made.A, BT, BT),
        gates,
        final.values,
        final.index,
        dh,
        dv,
        d_initial if need_d_initial else None,
        states.index,
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
    rows = [ragged_tiles(x, BT, chosen["BV"]) for x in (do, y, dv)]
    kernels.gradients_kernel[(NT * HV,)](
        q,
        k,
        k_rows,
        *rows,
        chunk_tiles(h, K, chosen["BV"]),
        chunk_tiles(dh, K, chosen["BV"]),
        gates,
        g,
        A_log,
        dt_bias,
        states.values,
        states.index,
        final.values,
        final.index,
        dq,
        dk,
        dg,
        dbeta,
        d_gate,
        cu_seqlens,
        chunk_index,
        scale,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        HV,
        NT,
        BETA_RANGE=beta_range,
        **constants,
        **chosen,
    )
    if HV > H:
        dq, dk = sum_groups(dq, q), sum_groups(dk, k)
    dA_log, ddt_bias = (
        q.new_empty(0) if x is None else d_gate[i].sum(0).view(x.shape).to(x.dtype)
        for i, x in enumerate((A_log, dt_bias))
    )
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial


register_fake(gdn_backward)(empty_gradients)
