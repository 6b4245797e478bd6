"""Scan of states that only decay, for Hopper, in Gluon, with K = 128 and V = 64.
`ssd_kernels` describes its algebra, and has the Triton version for other dims and GPUs.

Two groups of warps carry the transposed states [V, K] of two neighboring heads of a group
in registers, so q, k and q kᵀ are loaded once for both. Another warp loads tiles by the
copy engine, and one more computes factors from gates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.language import constexpr

from titan_linear.ops.runtime.options import DecayInputs
from titan_linear.ops.triton.chunks import chunks_in, entry_at
from titan_linear.ops.triton.gdn_hopper import (
    BV,
    LANES,
    LEFT,
    LEFT_OF_CARRY,
    OF_TOKENS,
    TOKENS,
    K,
    places,
)
from titan_linear.ops.triton.gdn_hopper import fits as fits_gdn
from titan_linear.ops.triton.hopper import (
    END,
    SQUARE,
    VECTOR,
    GluonKernel,
    add,
    barriers,
    fetch,
    indices,
    product,
    put,
    release,
    shared,
    swizzled,
    turned,
    visible,
)
from titan_linear.ops.triton.tiles import BT, read_state, wide, write_state

STAGES = constexpr(3)


def fits(x: DecayInputs) -> bool:
    """Return whether this kernel supports heads and dtypes like x's."""
    _, H, _ = x.k.shape
    _, HV, V = x.v.shape
    shaped = BV.value == V and HV // H % 2 == 0 and fits_gdn(x.k, V)
    return shaped and (x.D is None or x.D.numel() == HV)


@gluon.jit
def _vector(vectors, stage, i, PART, layout):
    """Load vector i of `_make_factors` for one of the two heads."""
    return vectors.index(4 * stage + i).slice(PART * BT, BT, 0).load(layout)


@gluon.jit
def _outputs(tiles, vectors, bars, ends, span, PART):
    """Scan the chunks of one of the two heads: its o and its state."""
    q_s, k_s, v_s, scores_s, pairs_s, rows_s = tiles
    ready, factors_ready, empty = bars
    o_desc, D, initial, S_ext, M, first, before, final_state = ends
    start, length, _, begin, until, i_n, i_hv, HV = span
    i_hv += PART
    pairs, o_s = pairs_s.index(PART), places(i_hv, 0, BV)
    b_s = read_state(initial, i_n, HV * K * BV, o_s)
    # Fold the states of all parts before this piece.
    if S_ext is not None:
        for i in range(first, first + before):
            b_s = b_s * gl.load(M + i * HV + i_hv) + gl.load(S_ext + i * (HV * K * BV) + o_s)
    if D is not None:
        skip = wide(gl.load(D + i_hv))
    o_i, o_j = indices(BT, BT, SQUARE)
    for n in range(until - begin):
        stage, phase = n % STAGES, n // STAGES & 1
        k, v = k_s.index(stage), turned(v_s.index(stage).slice(PART * BV, BV, 1))
        b_left = gl.convert_layout(b_s.to(k.dtype), LEFT)
        mbarrier.wait(ready.index(stage), phase)
        b_o = product(b_left, turned(q_s.index(stage)))
        mbarrier.wait(factors_ready.index(stage), phase)
        b_G = _vector(vectors, stage, 0, PART, OF_TOKENS)
        # q kᵀ of the chunk, decayed and weighted by time steps.
        b_d = _vector(vectors, stage, 0, PART, TOKENS)[:, None] - b_G[None, :]
        b_m = wide(scores_s.index(stage).load(SQUARE)) * gl.exp2(
            gl.where(o_i >= o_j, b_d, -float("inf"))
        )
        pairs.store((b_m * _vector(vectors, stage, 3, PART, OF_TOKENS)[None, :]).to(k.dtype))
        visible()
        # Decay the state, and weight the chunk's writes to it.
        b_w = _vector(vectors, stage, 2, PART, gl.SliceLayout(0, LEFT_OF_CARRY))[None, :]
        b_w = (wide(v.load(LEFT_OF_CARRY)) * b_w).to(k.dtype)
        b_s *= gl.exp2(gl.sum(gl.where(gl.arange(0, BT, OF_TOKENS) == BT - 1, b_G, 0.0), 0))
        # The output and the new state. The stage is free after their products.
        b_o = _vector(vectors, stage, 1, PART, OF_TOKENS)[None, :] * warpgroup_mma_wait(0, (b_o,))
        b_o = add(v, turned(pairs), b_o)
        b_s = add(b_w, k, b_s)
        b_v = wide(v.load(SQUARE))
        b_s, b_o = warpgroup_mma_wait(0, (b_s, b_o))
        release(empty.index(stage))
        if D is not None:
            b_o += skip * b_v
        place = [END, start + length, END - length + (begin + n) * BT, i_hv * BV]
        put(o_desc, place, rows_s.index(n % 2 * 2 + PART), b_o, 1)
    tma.store_wait(0)
    if until * BT >= length:
        write_state((final_state, None), i_n, HV * K * BV, o_s, b_s)


@gluon.jit
def _load(tiles, bars, descs, span, H, R):
    q_s, k_s, v_s, scores_s, _, _ = tiles
    q_desc, k_desc, v_desc, scores_desc = descs
    ready, _, empty = bars
    start, length, first, begin, until, _, i_hv, _ = span
    i_h = i_hv // R
    for n in range(until - begin):
        # Wait until both heads have released the stage.
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        bar, end, row = ready.index(stage), start + length, END - length + (begin + n) * BT
        keys = [END, end, row, i_h * K]
        mbarrier.expect(
            bar, 7 * BT * K
        )  # q, k, v of two heads, and half as much q kᵀ, 2 bytes each
        fetch(q_desc, keys, bar, q_s.index(stage))
        fetch(k_desc, keys, bar, k_s.index(stage))
        fetch(
            scores_desc,
            [((first + begin + n).to(gl.int32) * H + i_h) * BT, 0],
            bar,
            scores_s.index(stage),
        )
        fetch(v_desc, [END, end, row, i_hv * BV], bar, v_s.index(stage))


@gluon.jit
def _make_factors(vectors, bars, gates, span, scale):
    _, factors_ready, empty = bars
    _, _, first, begin, until, _, i_hv, HV = span
    o_c = gl.arange(0, 2 * BT, LANES)
    o_h = o_c // BT * BT
    o_g = o_h + o_c
    for n in range(until - begin):
        stage = n % STAGES
        p_g = gates + ((first + begin + n) * HV + i_hv) * (2 * BT)
        b_G, b_dt, last = (
            gl.load(p_g + o_g),
            gl.load(p_g + BT + o_g),
            gl.load(p_g + 2 * o_h + BT - 1),
        )
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        # G, scale 2^G, 2^(γ−G) Δ and scale Δ, for both heads.
        vectors.index(4 * stage).store(b_G)
        vectors.index(4 * stage + 1).store(scale * gl.exp2(b_G))
        vectors.index(4 * stage + 2).store(gl.exp2(last - b_G) * b_dt)
        vectors.index(4 * stage + 3).store(scale * b_dt)
        mbarrier.arrive(factors_ready.index(stage))


@GluonKernel
def scan_kernel(
    q_desc, k_desc, v_desc, scores_desc, o_desc, gates, D, initial, S_ext, M, final_state, chunks, listed, scale, HV, R,
    pieces, parts,
):  # fmt: skip
    """Scan like `scan_kernel` of ssd_kernels, for two heads."""
    dtype: gl.constexpr = k_desc.dtype
    i_np = 2 * gl.program_id(0)
    i_hv, i_np = i_np % HV, (i_np // HV).to(gl.int64)
    i_p, i_n = (i_np % pieces).to(gl.int32), i_np // pieces
    start, length, first = entry_at(chunks, listed, i_n)
    NT, in_piece = chunks_in(length), parts // pieces
    span = (
        start.to(gl.int32),
        length,
        first,
        i_p * NT // pieces,
        (i_p + 1) * NT // pieces,
        i_n,
        i_hv,
        HV,
    )
    ends = o_desc, D, initial, S_ext, M, i_n * (parts - in_piece), i_p * in_piece, final_state
    # Shared memory: stages of loaded tiles, scores and output tiles of both heads.
    q_s, k_s, v_s = (
        shared(dtype, STAGES, BT, K),
        shared(dtype, STAGES, BT, K),
        shared(dtype, STAGES, BT, K),
    )
    tiles = (
        q_s,
        k_s,
        v_s,
        shared(dtype, STAGES, BT, BT),
        shared(dtype, 2, BT, BT),
        shared(dtype, 4, BT, BV),
    )
    vectors = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 2 * BT], VECTOR)
    bars = barriers(STAGES), barriers(STAGES), barriers(STAGES, 2)
    descs = q_desc, k_desc, v_desc, scores_desc
    gl.warp_specialize(
        [
            (_outputs, (tiles, vectors, bars, ends, span, 0)),
            (_outputs, (tiles, vectors, bars, ends, span, 1)),
            (_load, (tiles, bars, descs, span, HV // R, R)),
            (_make_factors, (vectors, bars, gates, span, scale)),
        ],
        [4, 1, 1],
        [208, 40, 40],
    )


def launch_scan(x: DecayInputs, scores: Tensor, o: Tensor, programs: int, *more: Any) -> None:
    """Launch the scan. programs: one per head."""
    tiles = *(swizzled(t, K.value) for t in (x.q, x.k, x.v)), swizzled(scores, BT.value, BT.value)
    scan_kernel[programs // 2,](*tiles, swizzled(o, BV.value), *more, num_warps=4, maxnreg=168)
