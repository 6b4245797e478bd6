"""KDA's `prepare` and gradients for Hopper, in Gluon, for gates that `half_decays`
supports. `kda_kernels` describes their algebra, and has the Triton versions for other
gates, shapes and GPUs.

The copy engine loads all of a program's tiles before the program computes, and each
multiprocessor has two programs. One waits for its tiles while the other computes. Tiles
have channels as rows, and tokens of one half of a chunk as columns. Pairs of two halves
then need no mask, and products read parts of the chunk's matrices in place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language import constexpr

from titan_linear.ops.runtime.options import Inputs
from titan_linear.ops.triton.chunks import chunk_at
from titan_linear.ops.triton.hopper import (
    END,
    HALF,
    SQUARE,
    GluonKernel,
    add,
    barriers,
    diagonal,
    each,
    fetch,
    halves,
    indices,
    inverse,
    is_hopper,
    joined,
    left,
    product,
    room,
    rounded,
    send,
    shared,
    solved,
    sums,
    swizzled,
    turned,
    vector,
    visible,
)
from titan_linear.ops.triton.kda_kernels import gate_gradient, gate_rate
from titan_linear.ops.triton.stages import Given
from titan_linear.ops.triton.tiles import LOG2E, load_beta, log2_gate, rows, sigmoid, softplus, wide

C = constexpr(64)  # tokens of a chunk, and channels of a program
D = constexpr(128)  # K and V
CHANNELS = constexpr(gl.SliceLayout(1, HALF.value))
TOKENS = constexpr(gl.SliceLayout(0, HALF.value))
SUMS = constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # [32, 32]
WORDS = constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def fits(x: Inputs) -> bool:
    """Return whether this kernel supports heads and dtypes like x's."""
    return (
        x.q.shape == x.v.shape
        and x.q.shape[2] == D.value
        and x.q.dtype == torch.bfloat16
        and is_hopper(x.q.device)
    )


@gluon.jit
def _part(matrix, i, j):
    """Return the part of a chunk's matrix with rows of half i and columns of half j."""
    return matrix.slice(32 * i, 32, 0).slice(32 * j, 32, 1)


@gluon.jit
def _turned(rows, i):
    """Return the tokens of half i of rows [C, C], as [C, 32]."""
    return turned(rows.slice(32 * i, 32, 0))


@gluon.jit
def _read(rows, i):
    return wide(_turned(rows, i).load(HALF))


@gluon.jit
def _of_tokens(vector, i):
    return vector.slice(32 * i, 32).load(TOKENS)[None, :]


@gluon.jit
def _write(desc, place, rows, first, second):
    """Write the rows of two halves through `rows`."""
    _turned(rows, 0).store(first.to(desc.dtype))
    _turned(rows, 1).store(second.to(desc.dtype))
    send(desc, place, rows)


@gluon.jit
def _is_token(i, n):
    return gl.arange(0, 32, TOKENS)[None, :] < n - 32 * i


@gluon.jit
def _log2_gates(g_s, i, rate, bias, lower_bound, n, GATE):
    """Return the gates of half i, like `log2_gates`."""
    raw = _read(g_s, i)
    if GATE > 0:
        raw += bias
        raw = -rate * softplus(raw) if GATE == 1 else lower_bound * sigmoid(rate * raw)
        raw = gl.where(_is_token(i, n), raw, 0.0)
    return raw * LOG2E if GATE == 2 else log2_gate(raw)


@gluon.jit
def _store_sums(sums_s):
    """Store the matrix `sums` for which Σ_i x_i sums_ij is the sum up to j, minus half of
    the total."""
    o_i, o_j = indices(32, 32, SUMS)
    sums_s.store(gl.where(o_i <= o_j, 0.5, -0.5).to(gl.bfloat16))


@gluon.jit
def _half_decays(g_s, sums_s, rate, bias, lower_bound, n, GATE):
    """Return the results of `half_decays`, with 2^x of each half in place of x."""
    x1 = sums(_log2_gates(g_s, 0, rate, bias, lower_bound, n, GATE), sums_s)
    x2 = sums(_log2_gates(g_s, 1, rate, bias, lower_bound, n, GATE), sums_s)
    x1, x2 = warpgroup_mma_wait(0, (x1, x2))
    first, second = gl.min(x1, 1), gl.min(x2, 1)
    gamma, far = 2.0 * (first + second), 2.0 * first
    reference1, reference2, middle = (
        gl.floor(first + 0.5),
        gl.floor(second + far + 0.5),
        gl.floor(far + 0.5),
    )
    E1 = gl.exp2(x1 + (first - reference1)[:, None])
    E2 = gl.exp2(x2 + (second + far - reference2)[:, None])
    return E1, E2, reference1, reference2, middle, gamma


@gluon.jit
def _put(rows, first, second):
    """Store two halves of tokens, with channels as rows."""
    rows.store(joined(first, second, SQUARE).to(gl.bfloat16))


@GluonKernel
def prepare_kernel(
    # Descriptors of A and G are None if these are not wanted.
    q_desc, k_desc, g_desc, qg_desc, kn_desc, kg_desc, A_desc, G_desc,
    beta, A_log, dt_bias, decay, b, chunks, scale, lower_bound, HV, R, GATE: constexpr, BETA_RANGE: constexpr,
):  # fmt: skip
    """Compute the tiles like `prepare_kernel` of kda_kernels with SAFE, followed by
    `solve`. A pair's earlier token is its row."""
    tile = gl.program_id(0)
    i_t, i_h = tile // HV, tile % HV
    start, n = chunk_at(chunks, i_t)
    q_s, k_s = each(shared(gl.bfloat16, 2, C, C)), each(shared(gl.bfloat16, 2, C, C))
    size: constexpr = g_desc.dtype.primitive_bitwidth
    # Two buffers, since each becomes free for the tiles computed from it.
    g_s = room(g_desc.dtype), room(g_desc.dtype)
    sums_s = gl.allocate_shared_memory(gl.bfloat16, [32, 32], gl.NVMMASharedLayout(64, 16, 2))
    b_s = vector()
    bars = each(barriers(2))
    end, row = start.to(gl.int32) + n, END - n
    # Start loading both halves of the channels.
    for i_k in gl.static_range(2):
        mbarrier.expect(bars[i_k], C * C * (4 + size // 8))
        fetch(g_desc, [END, end, row, i_h * D + i_k * C], bars[i_k], g_s[i_k])
        fetch(k_desc, [END, end, row, i_h // R * D + i_k * C], bars[i_k], k_s[i_k])
        fetch(q_desc, [END, end, row, i_h // R * D + i_k * C], bars[i_k], q_s[i_k])
    _store_sums(sums_s)
    # Store β.
    o_c = gl.arange(0, C, WORDS)
    b_b = load_beta(beta, o_c, start, n, i_h, BETA_RANGE)
    gl.store(b + tile.to(gl.int64) * C + o_c, b_b)
    b_s.store(b_b)
    fence_async_shared()
    rate = gate_rate(A_log, i_h)
    if A_desc is not None:
        # Pairs with later tokens of each half, for k and for q.
        first, second = gl.zeros([C, C], gl.float32, SQUARE), gl.zeros([C, C], gl.float32, SQUARE)
    for i_k in gl.static_range(2):
        channels = i_k * C + gl.arange(0, C, CHANNELS)
        bias = 0.0
        if dt_bias is not None:
            bias = wide(gl.load(dt_bias + (i_h * D + channels)))[:, None]
        q, k = q_s[i_k], k_s[i_k]
        mbarrier.wait(bars[i_k], 0)
        E1, E2, reference1, reference2, middle, gamma = _half_decays(
            g_s[i_k], sums_s, rate, bias, lower_bound, n, GATE
        )
        gl.store(decay + tile.to(gl.int64) * D + channels, gl.exp2(gamma))
        start1 = gl.exp2(reference1).to(gl.bfloat16)[:, None]
        start2 = gl.exp2(reference2).to(gl.bfloat16)[:, None]
        b_k1, b_k2 = _read(k, 0), _read(k, 1)
        W1, W2 = b_k1 * inverse(E1), b_k2 * inverse(E2)
        kE1, kE2 = rounded(b_k1 * E1), rounded(b_k2 * E2)
        qE1, qE2 = rounded(scale * _read(q, 0) * E1), rounded(scale * _read(q, 1) * E2)
        near, far = each(shared(gl.bfloat16, 2, C, C))
        tma.store_wait(0)
        tl.debug_barrier()
        if A_desc is not None:
            down1 = gl.exp2(middle - reference1).to(gl.bfloat16)[:, None]
            down2 = gl.exp2(reference2 - middle).to(gl.bfloat16)[:, None]
            kW1 = rounded(W1)
            near.slice(0, 32, 1).store(kW1)  # the other half is not read
            _put(far, kW1 * down1 * down2, rounded(W2))
            _put(q, kE1, qE1)
            _put(k, kE2, qE2)
            visible()
            first = add(turned(near), q, first)
            second = add(turned(far), k, second)
            first, second = warpgroup_mma_wait(0, (first, second))
            tl.debug_barrier()
        # Write the tiles of these channels.
        _put(q, qE1 * start1, qE2 * start2)
        _put(k, -kE1 * start1, -kE2 * start2)
        _put(
            near,
            W1 * gl.exp2(gamma - reference1)[:, None],
            W2 * gl.exp2(gamma - reference2)[:, None],
        )
        visible()
        place = [tile * D + i_k * C, 0]
        tma.async_copy_shared_to_global(qg_desc, place, q)
        tma.async_copy_shared_to_global(kn_desc, place, k)
        tma.async_copy_shared_to_global(kg_desc, place, near)
    tma.store_wait(0)
    if A_desc is not None:
        tl.debug_barrier()
        # Solve, and write Aqk and −G.
        o_j, o_i = indices(C, C, SQUARE)
        A_s, G_s = q_s[0], k_s[0]
        n1, a1 = halves(first, HALF)
        n2, a2 = halves(second, HALF)
        turned(A_s).store(gl.where(o_i >= o_j, joined(a1, a2, SQUARE), 0.0).to(gl.bfloat16))
        turned(G_s).store(
            solved(gl.where(o_i > o_j, -joined(n1, n2, SQUARE), 0.0), b_s).to(gl.bfloat16)
        )
        visible()
        tma.async_copy_shared_to_global(A_desc, [tile * C, 0], A_s)
        tma.async_copy_shared_to_global(G_desc, [tile * C, 0], G_s)
        tma.store_wait(0)


def prepares(x: Inputs, safe_gate: float, gate: float) -> bool:
    """Return whether `prepare_kernel` supports heads, dtypes and gates like x's."""
    gates = safe_gate and gate != 1 and x.g.dtype == (torch.bfloat16 if gate else torch.float32)
    return (
        bool(gates)
        and x.q.shape[2] == D.value
        and x.q.dtype == torch.bfloat16
        and is_hopper(x.q.device)
    )


def launch_prepare(given: Given, tiles: Any) -> None:
    x = given.x
    n = given.numbers
    NT, HV, *_ = tiles.qg.shape
    prepare_kernel[NT * HV,](
        *(swizzled(t, C.value) for t in (x.q, x.k, x.g)),
        *(None if t is None else swizzled(t, C.value, C.value) for t in (*tiles[:3], tiles.Aqk, tiles.Gn)),
        rows(x.beta), x.A_log, x.dt_bias, tiles.decay, tiles.b, given.chunks, n.scale, n.lower_bound, HV,
        HV // x.k.shape[1], GATE=int(n.gate), BETA_RANGE=n.beta_range or None, num_warps=4, maxnreg=168,
    )  # fmt: skip


@GluonKernel
def gradient_kernel(
    q_desc, k_desc, g_desc, do_desc, r_desc, y_desc, h_desc, dh_desc, dA_desc, dK_desc, dq_desc, dk_desc, dg_desc,
    A_log, dt_bias, b, dA_part, dbias_part, fast, chunks, scale, lower_bound, HV, GATE: constexpr,
):  # fmt: skip
    """Compute the gradients of one (chunk, head, half of K), like `gradient_kernel` of
    kda_kernels with SAFE, for K = V = 128."""
    i_k, tile = gl.program_id(0) % (D // C), gl.program_id(0) // (D // C)
    i_t, i_h = tile // HV, tile % HV
    start, n = chunk_at(chunks, i_t)
    channels = i_k * C + gl.arange(0, C, CHANNELS)
    o_part = tile.to(gl.int64) * D + channels
    if fast is not None:
        fast += tile * (D // C) + i_k
    # A surplus program writes zeros to its partial sums.
    if n <= 0:
        if fast is not None:
            gl.store(fast, 0)
        if dA_part is not None:
            gl.store(dA_part + o_part, gl.zeros([C], gl.float32, CHANNELS))
        if dbias_part is not None:
            gl.store(dbias_part + o_part, gl.zeros([C], gl.float32, CHANNELS))
        return
    q_s, k_s, dA_s, dK_s, do1_s, do2_s = each(shared(gl.bfloat16, 6, C, C))
    h_s, y_s = each(shared(gl.bfloat16, 2, D, C))
    size: constexpr = g_desc.dtype.primitive_bitwidth
    g_s = room(g_desc.dtype)
    sums_s = gl.allocate_shared_memory(gl.bfloat16, [32, 32], gl.NVMMASharedLayout(64, 16, 2))
    b_s = vector()
    keys_ready, ready, last_ready = each(barriers(3))
    end, row = start.to(gl.int32) + n, END - n
    place = [END, end, row, i_h * D + i_k * C]
    # Start loading all tiles that fit at once; gates, keys and queries come first.
    mbarrier.expect(keys_ready, C * C * (4 + size // 8))
    fetch(g_desc, place, keys_ready, g_s)
    fetch(k_desc, place, keys_ready, k_s)
    fetch(q_desc, place, keys_ready, q_s)
    mbarrier.expect(ready, 2 * C * (3 * D + 2 * C))
    fetch(h_desc, [tile * D, i_k * C], ready, h_s)
    fetch(do_desc, [END, end, row, i_h * D], ready, do1_s)
    fetch(do_desc, [END, end, row, i_h * D + C], ready, do2_s)
    fetch(y_desc, [tile * D, 0], ready, y_s)
    fetch(dA_desc, [tile * C, 0], ready, dA_s)
    fetch(dK_desc, [tile * C, 0], ready, dK_s)

    _store_sums(sums_s)
    b_s.store(gl.load(b + tile.to(gl.int64) * C + gl.arange(0, C, WORDS)))
    fence_async_shared()
    rate, bias = gate_rate(A_log, i_h), 0.0
    if dt_bias is not None:
        bias = wide(gl.load(dt_bias + (i_h * D + channels)))[:, None]
    # Decays, and queries and keys relative to the references.
    mbarrier.wait(keys_ready, 0)
    E1, E2, reference1, reference2, middle, gamma = _half_decays(
        g_s, sums_s, rate, bias, lower_bound, n, GATE
    )
    if fast is not None:
        gl.store(
            fast, (gl.min(gl.minimum(reference1, reference2 - middle), 0) < -118.0).to(gl.int32)
        )
    down1 = gl.exp2(middle - reference1).to(gl.bfloat16)[:, None]
    down2 = gl.exp2(reference2 - middle).to(gl.bfloat16)[:, None]
    start1, start2 = gl.exp2(reference1)[:, None], gl.exp2(reference2)[:, None]
    end1, end2 = gl.exp2(gamma - reference1)[:, None], gl.exp2(gamma - reference2)[:, None]
    b_k1, b_k2 = _read(k_s, 0), _read(k_s, 1)
    kW1, kW2 = rounded(b_k1 * inverse(E1)), rounded(b_k2 * inverse(E2))
    kE1, kE2 = rounded(b_k1 * E1), rounded(b_k2 * E2)
    qE1, qE2 = rounded(_read(q_s, 0) * E1), rounded(_read(q_s, 1) * E2)

    mbarrier.wait(ready, 0)
    # The share of the entering state in dq and dk.
    b_dq = product(turned(h_s.slice(0, C)), turned(do1_s))
    b_dq = add(turned(h_s.slice(C, C)), turned(do2_s), b_dq)
    b_dk = product(turned(h_s), y_s)
    b_dq, b_dk = warpgroup_mma_wait(0, (b_dq, b_dk))
    tl.debug_barrier()
    # y and do are no longer needed: load r and dh in their place.
    dh_s, r1_s, r2_s = y_s, do1_s, do2_s
    mbarrier.expect(last_ready, 4 * C * D)
    fetch(r_desc, [tile * D, 0], last_ready, r1_s)
    fetch(r_desc, [tile * D + C, 0], last_ready, r2_s)
    fetch(dh_desc, [tile * D, i_k * C], last_ready, dh_s)

    dq1, dq2 = halves(b_dq, HALF)
    dk1, dk2 = halves(b_dk, HALF)
    # The share of pairs of tokens in dq and in dk of the reads.
    far_kW = kW1 * down1 * down2
    dq1 = add(left(kW1), turned(_part(dA_s, 0, 0)), dq1 * (scale * start1))
    dq2 = add(left(kW2), turned(_part(dA_s, 1, 1)), dq2 * (scale * start2))
    dq2 = add(left(far_kW), turned(_part(dA_s, 1, 0)), dq2)
    dk1 = add(left(kW1), turned(_part(dK_s, 0, 0)), dk1 * (-_of_tokens(b_s, 0) * start1))
    dk2 = add(left(kW2), turned(_part(dK_s, 1, 1)), dk2 * (-_of_tokens(b_s, 1) * start2))
    dk2 = add(left(far_kW), turned(_part(dK_s, 1, 0)), dk2)
    dq1, dq2, dk1, dk2 = warpgroup_mma_wait(0, (dq1, dq2, dk1, dk2))
    # dΓ takes the rounded operands. A pair (i, j) then gives +x at i and −x at j, which
    # cancel in dg.
    sum1 = wide(qE1) * dq1 + wide(kE1) * dk1
    sum2 = wide(qE2) * dq2 + wide(kE2) * dk2
    mbarrier.wait(last_ready, 0)
    b_dkm = product(turned(dh_s.slice(0, C)), r1_s)
    b_dkm = add(turned(dh_s.slice(C, C)), r2_s, b_dkm)
    _write(dq_desc, place, q_s, dq1 * E1, dq2 * E2)
    dk1 *= E1
    dk2 *= E2
    b_dkm = warpgroup_mma_wait(0, (b_dkm,))
    # dk of the writes, from dS' and from pairs of tokens.
    dkm1, dkm2 = halves(b_dkm, HALF)
    dkm1 *= _of_tokens(b_s, 0) * end1
    dkm2 *= _of_tokens(b_s, 1) * end2
    dgamma = gl.sum(dkm1 * wide(kW1) + dkm2 * wide(kW2), 1)
    dkm1 = add(left(qE1), _part(dA_s, 0, 0), dkm1)
    dkm2 = add(left(qE2), _part(dA_s, 1, 1), dkm2)
    dkm1 = add(left(kE1), _part(dK_s, 0, 0), dkm1)
    dkm2 = add(left(kE2), _part(dK_s, 1, 1), dkm2)
    dkm1 = add(left(qE2 * down1 * down2), _part(dA_s, 1, 0), dkm1)
    dkm1 = add(left(kE2 * down1 * down2), _part(dK_s, 1, 0), dkm1)
    dkm1, dkm2 = warpgroup_mma_wait(0, (dkm1, dkm2))
    sum1 -= wide(kW1) * dkm1
    sum2 -= wide(kW2) * dkm2
    _write(dk_desc, place, k_s, dk1 + dkm1 * inverse(E1), dk2 + dkm2 * inverse(E2))

    # dg sums dΓ over later tokens, from half sums and totals.
    dg1, dg2 = sums(sum1, turned(sums_s)), sums(sum2, turned(sums_s))
    b_ds = product(turned(h_s), dh_s)  # its diagonal: Σ_v S ⊙ dS'
    total2 = gl.sum(sum2, 1)
    dg1, dg2, b_ds = warpgroup_mma_wait(0, (dg1, dg2, b_ds))
    ds = gl.convert_layout(diagonal(b_ds), CHANNELS)
    later2 = dgamma + gl.exp2(gamma) * ds + 0.5 * total2
    dg1 += (later2 + 0.5 * (total2 + gl.sum(sum1, 1)))[:, None]
    dg2 += later2[:, None]
    if GATE > 0:
        dg1 = gl.where(_is_token(0, n), dg1, 0.0)
        dg1, d_rate1 = gate_gradient(dg1, _read(g_s, 0) + bias, rate, lower_bound, GATE)
        dg2 = gl.where(_is_token(1, n), dg2, 0.0)
        dg2, d_rate2 = gate_gradient(dg2, _read(g_s, 1) + bias, rate, lower_bound, GATE)
        if dA_part is not None:
            gl.store(dA_part + o_part, gl.sum(d_rate1 + d_rate2, 1))
        if dbias_part is not None:
            gl.store(dbias_part + o_part, gl.sum(dg1 + dg2, 1))
    _write(dg_desc, place, g_s, dg1, dg2)
    tma.store_wait(0)


def launch_gradient(
    given: Given, *, r: Tensor, y: Tensor, h: Tensor, dh: Tensor, dA: Tensor, dK: Tensor, dq: Tensor, dk: Tensor,
    dg: Tensor, dA_part: Tensor | None, dbias_part: Tensor | None, fast: Tensor | None,
) -> None:  # fmt: skip
    x = given.x
    n = given.numbers
    NT, HV, K, _ = given.tiles.qg.shape
    gradient_kernel[NT * HV * (K // C.value),](
        *(swizzled(t, C.value) for t in (x.q, x.k, x.g, given.do)), swizzled(r, C.value, C.value),
        *(swizzled(t, C.value, K) for t in (y, h, dh)), *(swizzled(t, C.value, C.value) for t in (dA, dK)),
        *(swizzled(t, C.value) for t in (dq, dk, dg)), x.A_log, x.dt_bias, given.tiles.b, dA_part, dbias_part, fast,
        given.chunks, n.scale, n.lower_bound, HV, GATE=int(n.gate), num_warps=4,
    )  # fmt: skip
