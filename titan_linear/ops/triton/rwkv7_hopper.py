"""RWKV-7's `prepare` and gradients for Hopper, in Gluon, for K = V = 64. `rwkv7_kernels`
describes their algebra, and has the Triton versions for other shapes and GPUs.

The copy engine loads all of a program's tiles before the program computes, and each
multiprocessor has two programs, or three of `prepare`. One waits for its tiles while
another computes. Products read tiles [64, 64] in shared memory. Their results have channels
as rows and tokens as columns, so that sums over tokens take gates and their gradients from
registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.language import constexpr

from titan_linear.ops.runtime.options import DPLRInputs
from titan_linear.ops.triton.chunks import chunk_at
from titan_linear.ops.triton.hopper import (
    END,
    SQUARE,
    GluonKernel,
    add,
    barriers,
    diagonal,
    each,
    fetch,
    indices,
    inverse,
    is_hopper,
    left,
    product,
    room,
    rounded,
    send,
    solved,
    sums,
    swizzled,
    turned,
    vector,
    visible,
)
from titan_linear.ops.triton.stages import Given
from titan_linear.ops.triton.tiles import LOG2E, sigmoid, wide

C = constexpr(64)  # tokens of a chunk, K and V
TOKENS = constexpr(gl.SliceLayout(0, SQUARE.value))
CHANNELS = constexpr(gl.SliceLayout(1, SQUARE.value))


def fits(x: DPLRInputs) -> bool:
    """Return whether these kernels support heads and dtypes like x's."""
    wide = x.q.shape == x.v.shape and x.q.shape[2] == C.value
    dtypes = {t.dtype for t in x[:-1]}
    half = dtypes == {torch.bfloat16} and x.gk.dtype in (torch.bfloat16, torch.float32)
    return wide and half and is_hopper(x.q.device)


@gluon.jit
def _read(rows):
    """Read rows of tokens as [channels, tokens]."""
    return wide(turned(rows).load(SQUARE))


@gluon.jit
def _earlier(STRICT):
    """Return a mask [64, 64] of pairs whose column's token comes before its row's token, or
    is the same unless STRICT."""
    i, j = indices(C, C, SQUARE)
    return (j < i) if STRICT else (j <= i)


@gluon.jit
def _store_pairs(tile, x, STRICT):
    tile.store(rounded(gl.where(_earlier(STRICT), x, 0.0)))


@gluon.jit
def _log2_gates(w_s, RATE):
    """Return log decays in base 2 and, with RATE, the sigmoids that determine them."""
    b_w = _read(w_s)
    if RATE is None:
        return b_w * LOG2E, b_w
    else:
        rate = sigmoid(b_w)
        return rate * (RATE * LOG2E), rate


@gluon.jit
def _fetch_keys(descs, rooms, gates_ready, keys_ready, place):
    """Start loading a chunk's gates, and then its q, k, a and b."""
    mbarrier.expect(gates_ready, C * C * descs[0].dtype.primitive_bitwidth // 8)
    fetch(descs[0], place, gates_ready, rooms[0])
    mbarrier.expect(keys_ready, 8 * C * C)
    for i in gl.static_range(1, 5):
        fetch(descs[i], place, keys_ready, rooms[i])


@gluon.jit
def _decays(w_s, ready, ones_s, n, RATE):
    """Wait for a chunk's gates, and return the gates in base 2 [channels, tokens]; γ and
    the reference [channels]; and 2^(Γ − reference). ones_s: a free buffer."""
    ones_s.store(gl.where(_earlier(False), 1.0, 0.0).to(gl.bfloat16))
    visible()
    mbarrier.wait(ready, 0)
    g, _ = _log2_gates(w_s, RATE)
    if RATE is not None:
        g = gl.where(gl.arange(0, C, TOKENS)[None, :] < n, g, 0.0)
    x = sums(g, turned(ones_s))
    gamma = gl.sum(g, 1)
    reference = gl.floor(0.5 * gamma + 0.5)
    x = warpgroup_mma_wait(0, (x,))
    return g, gamma, reference, gl.exp2(x - reference[:, None])


@gluon.jit
def _decay_keys(k_s, a_s, b_s, g, E):
    """Multiply a, k and b by their decays relative to the reference, in place."""
    turned(a_s).store(rounded(_read(a_s) * E * gl.exp2(-g)))
    E_inverse = inverse(E)
    turned(k_s).store(rounded(_read(k_s) * E_inverse))
    turned(b_s).store(rounded(_read(b_s) * E_inverse))
    visible()


@GluonKernel
def prepare_kernel(
    q_desc, k_desc, v_desc, a_desc, b_desc, w_desc, P_desc, U_desc, Q_desc, T_desc,
    O_desc,  # None if T is read instead of computed
    decay, chunks, scale, H, RATE: constexpr,
):  # fmt: skip
    """Compute the tiles of one (chunk, head), like `prepare_kernel` of rwkv7_kernels. Its
    tiles are computed transposed, so that w and u, in registers, are the left operands of
    the products that read them."""
    i_t, i_h = gl.program_id(0) // H, gl.program_id(0) % H
    start, n = chunk_at(chunks, i_t)
    if n <= 0:
        return
    tile = gl.program_id(0) * C
    # Start loading all inputs; gates come first.
    w_s, q_s, k_s, a_s, b_s, v_s, ones_s = (
        room(w_desc.dtype),
        room(),
        room(),
        room(),
        room(),
        room(),
        room(),
    )
    gates_ready, keys_ready, ready = each(barriers(3))
    place = [END, start.to(gl.int32) + n, END - n, i_h * C]
    descs, rooms = (w_desc, q_desc, k_desc, a_desc, b_desc), (w_s, q_s, k_s, a_s, b_s)
    _fetch_keys(descs, rooms, gates_ready, keys_ready, place)
    mbarrier.expect(ready, 2 * C * C if O_desc is not None else 4 * C * C)
    fetch(v_desc, place, ready, v_s)
    if O_desc is None:
        T_s = room()
        fetch(T_desc, [tile, 0], ready, T_s)

    g, gamma, reference, E = _decays(w_s, gates_ready, ones_s, n, RATE)
    channels = gl.arange(0, C, CHANNELS)
    gl.store(decay + tile.to(gl.int64) + channels, gl.exp2(gamma))
    to_start, to_end_s = gl.exp2(reference)[:, None], vector()
    to_end_s.store(gl.exp2(gamma - reference))
    mbarrier.wait(keys_ready, 0)
    # q̃ in two bf16 parts, so that Q is rounded once.
    q_tilde = _read(q_s) * (scale * E)
    high, rest_s = rounded(q_tilde), room()
    turned(q_s).store(high)
    turned(rest_s).store(rounded(q_tilde - wide(high)))
    _decay_keys(k_s, a_s, b_s, g, E)

    # Forward solves for T; backward has kept it.
    if O_desc is not None:
        b_T = warpgroup_mma_wait(0, (product(b_s, turned(a_s)),))
        i, j = indices(C, C, SQUARE)
        b_T = solved(gl.where(i < j, b_T, 0.0), None)
        T_s = room()
        turned(T_s).store(rounded(gl.where(i == j, 1.0, b_T)))
        send(T_desc, [tile, 0], T_s)
    # Products of pairs, masked, into shared memory.
    A_qb, A_ak = product(q_s, turned(b_s)), product(a_s, turned(k_s))
    A_qb, A_ak = warpgroup_mma_wait(0, (A_qb, A_ak))
    qb_s, ak_s = room(), room()
    _store_pairs(qb_s, A_qb, False)
    _store_pairs(ak_s, A_ak, True)
    visible()

    # u and w, transposed.
    mbarrier.wait(ready, 0)
    b_u, b_w = product(turned(v_s), turned(ak_s)), product(turned(a_s), turned(T_s))
    if O_desc is not None:
        A_qk = product(q_s, turned(k_s))
        A_qk, b_u, b_w = warpgroup_mma_wait(0, (A_qk, b_u, b_w))
        tl.debug_barrier()
        _store_pairs(ak_s, A_qk, False)
    else:
        b_u, b_w = warpgroup_mma_wait(0, (b_u, b_w))
    b_u = product(left(rounded(b_u)), turned(T_s))
    b_w = left(rounded(b_w * to_start))
    b_u = warpgroup_mma_wait(0, (b_u,))
    b_u = left(rounded(b_u))
    # The tiles P and Q.
    b_P, b_Q = product(b_w, b_s), add(b_w, turned(qb_s), (_read(q_s) + _read(rest_s)) * to_start)
    b_P, b_Q = warpgroup_mma_wait(0, (b_P, b_Q))
    tl.debug_barrier()
    to_end = to_end_s.load(TOKENS)[None, :]
    turned(a_s).store(rounded(b_P * to_end))
    turned(q_s).store(rounded(b_Q))
    send(P_desc, [tile, 0], a_s)
    send(Q_desc, [tile, 0], q_s)
    # The tiles U and O.
    b_U = add(b_u, b_s, product(turned(v_s), k_s))
    if O_desc is not None:
        b_O = add(b_u, turned(qb_s), product(turned(v_s), turned(ak_s)))
        b_U, b_O = warpgroup_mma_wait(0, (b_U, b_O))
        tl.debug_barrier()
        turned(v_s).store(rounded(b_O))
        send(O_desc, [tile, 0], v_s)
    else:
        b_U = warpgroup_mma_wait(0, (b_U,))
        tl.debug_barrier()
    turned(k_s).store(rounded(b_U * to_end))
    send(U_desc, [tile, 0], k_s)
    tma.store_wait(0)


def launch_prepare(given: Given, tiles: Any) -> None:
    NT, H, K, _ = tiles.U.shape
    O = tiles.O
    made = (swizzled(t, K, K) for t in (tiles.P, tiles.U, tiles.Q, tiles.inverse))
    prepare_kernel[NT * H,](
        *(swizzled(t, K) for t in given.x), *made, None if O is None else swizzled(O, K, K), tiles.decay, given.chunks,
        given.numbers.scale, H, RATE=given.numbers.rate or None, num_warps=4, maxnreg=168,
    )  # fmt: skip


@GluonKernel
def gradient_kernel(
    q_desc, k_desc, v_desc, a_desc, b_desc, w_desc, do_desc, T_desc, h_desc, dh_desc,
    dq_desc, dk_desc, dv_desc, da_desc, db_desc, dw_desc, chunks, scale, H, RATE: constexpr,
):  # fmt: skip
    """Compute the gradients of one (chunk, head), like `gradient_kernel` of rwkv7_kernels."""
    tile = gl.program_id(0)
    i_t, i_h = tile // H, tile % H
    start, n = chunk_at(chunks, i_t)
    if n <= 0:
        return
    enters = tile + gl.load(chunks[1] + 2 * i_t) * H
    # Start loading all inputs; gates come first, then keys.
    w_s, q_s, k_s, a_s, b_s, v_s, do_s = (
        room(w_desc.dtype),
        room(),
        room(),
        room(),
        room(),
        room(),
        room(),
    )
    h_s, dh_s, leaves_s, T_s, y_s, z_s = room(), room(), room(), room(), room(), room()
    gates_ready, keys_ready, ready, last_ready = each(barriers(4))
    place = [END, start.to(gl.int32) + n, END - n, i_h * C]
    descs, rooms = (w_desc, q_desc, k_desc, a_desc, b_desc), (w_s, q_s, k_s, a_s, b_s)
    _fetch_keys(descs, rooms, gates_ready, keys_ready, place)
    mbarrier.expect(ready, 12 * C * C)
    fetch(dh_desc, [tile * C, 0], ready, dh_s)
    fetch(h_desc, [(enters + H) * C, 0], ready, leaves_s)
    fetch(h_desc, [enters * C, 0], ready, h_s)
    fetch(T_desc, [tile * C, 0], ready, T_s)
    fetch(v_desc, place, ready, v_s)
    fetch(do_desc, place, ready, do_s)

    g, gamma, reference, E = _decays(w_s, gates_ready, z_s, n, RATE)
    to_start, to_end = gl.exp2(reference)[:, None], gl.exp2(gamma - reference)[:, None]
    mbarrier.wait(keys_ready, 0)
    turned(q_s).store(rounded(_read(q_s) * (scale * E)))
    _decay_keys(k_s, a_s, b_s, g, E)

    # Products of pairs, into buffers that are free at this point, and dγ.
    ak_s, qb_s, qk_s = leaves_s, y_s, z_s
    A_qb, A_qk = product(q_s, turned(b_s)), product(q_s, turned(k_s))
    A_qb, A_qk = warpgroup_mma_wait(0, (A_qb, A_qk))
    mbarrier.wait(ready, 0)
    A_ak = product(a_s, turned(k_s))
    b_ds = product(leaves_s, turned(dh_s))  # its diagonal: Σ_v S' ⊙ dS'
    _store_pairs(qb_s, A_qb, False)
    _store_pairs(qk_s, A_qk, False)
    A_ak, b_ds = warpgroup_mma_wait(0, (A_ak, b_ds))
    tl.debug_barrier()
    dgamma = diagonal(b_ds)
    _store_pairs(ak_s, A_ak, True)
    h_s.store(rounded(wide(h_s.load(SQUARE)) * to_start))
    dh_s.store(rounded(wide(dh_s.load(SQUARE)) * to_end))
    visible()

    # y, z and dv.
    b_y = add(turned(v_s), turned(ak_s), product(turned(h_s), turned(a_s)))
    b_z = add(turned(do_s), qb_s, product(turned(dh_s), turned(b_s)))
    b_dv = add(turned(do_s), qk_s, product(turned(dh_s), turned(k_s)))
    b_y, b_z, b_dv = warpgroup_mma_wait(0, (b_y, b_z, b_dv))
    b_y = product(left(rounded(b_y)), turned(T_s))
    b_z = product(left(rounded(b_z)), T_s)
    b_y, b_z = warpgroup_mma_wait(0, (b_y, b_z))
    tl.debug_barrier()
    b_z = rounded(b_z)
    b_dv = add(left(b_z), ak_s, b_dv)
    turned(y_s).store(rounded(b_y))
    turned(z_s).store(b_z)
    b_dv = warpgroup_mma_wait(0, (b_dv,))
    visible()

    # The gradients of the products of pairs.
    A_qk, A_qb = product(do_s, turned(v_s)), product(do_s, turned(y_s))
    b_dv = rounded(b_dv)
    A_qk, A_qb = warpgroup_mma_wait(0, (A_qk, A_qb))
    A_ak, A_ab = product(z_s, turned(v_s)), product(z_s, turned(y_s))
    qk_s, qb_s = room(), room()
    _store_pairs(qk_s, A_qk, False)
    _store_pairs(qb_s, A_qb, False)
    A_ak, A_ab = warpgroup_mma_wait(0, (A_ak, A_ab))
    ab_s = T_s
    _store_pairs(ak_s, A_ak, True)
    _store_pairs(ab_s, A_ab, True)
    visible()

    # dk and db, and their share of dΓ.
    b_dk = add(turned(a_s), ak_s, add(turned(q_s), qk_s, product(dh_s, turned(v_s))))
    b_db = add(turned(a_s), ab_s, add(turned(q_s), qb_s, product(dh_s, turned(y_s))))
    b_dk, b_db = warpgroup_mma_wait(0, (b_dk, b_db))
    # dΓ takes the rounded operands. A pair (i, j) then gives +x at i and −x at j, which
    # cancel in dw.
    b_dw = -(_read(k_s) * b_dk + _read(b_s) * b_db)
    E_inverse = inverse(E)
    tl.debug_barrier()
    turned(v_s).store(b_dv)
    turned(dh_s).store(rounded(b_dk * E_inverse))
    turned(y_s).store(rounded(b_db * E_inverse))
    send(dv_desc, place, v_s)
    send(dk_desc, place, dh_s)
    send(db_desc, place, y_s)
    # dq and da, and their share of dΓ.
    b_dq = add(
        turned(b_s), turned(qb_s), add(turned(k_s), turned(qk_s), product(h_s, turned(do_s)))
    )
    b_da = add(turned(b_s), turned(ab_s), add(turned(k_s), turned(ak_s), product(h_s, turned(z_s))))
    b_dq, b_da = warpgroup_mma_wait(0, (b_dq, b_da))
    given = _read(a_s) * b_da
    b_dw += _read(q_s) * b_dq + given
    tma.store_wait(0)
    tl.debug_barrier()
    # Load the gates again for da and dw.
    dw_s = room(w_desc.dtype)
    mbarrier.expect(last_ready, C * C * w_desc.dtype.primitive_bitwidth // 8)
    fetch(w_desc, place, last_ready, dw_s)
    turned(do_s).store(rounded(scale * b_dq * E))
    mbarrier.wait(last_ready, 0)
    g, rate = _log2_gates(dw_s, RATE)
    turned(z_s).store(rounded(b_da * E * gl.exp2(-g)))
    ones_s = ak_s
    ones_s.store(gl.where(_earlier(False), 1.0, 0.0).to(gl.bfloat16))
    send(dq_desc, place, do_s)
    send(da_desc, place, z_s)
    # dw sums dΓ over later tokens; a's gate excludes its own token.
    b_dw = sums(b_dw, ones_s)
    b_dw = warpgroup_mma_wait(0, (b_dw,))
    b_dw += dgamma[:, None] - given
    if RATE is not None:
        b_dw *= RATE * rate * (1.0 - rate)
    turned(dw_s).store(b_dw.to(w_desc.dtype))
    send(dw_desc, place, dw_s)
    tma.store_wait(0)


def launch_gradient(given: Given, h: Tensor, dh: Tensor, grads: list[Tensor]) -> None:
    numbers = given.numbers
    NT, H, K, _ = given.tiles.U.shape
    chunked = (swizzled(t, K, K) for t in (given.tiles.inverse, h, dh))
    gradient_kernel[NT * H,](
        *(swizzled(t, K) for t in (*given.x, given.do)), *chunked, *(swizzled(t, K) for t in grads), given.chunks,
        numbers.scale, H, RATE=numbers.rate or None, num_warps=4,
    )  # fmt: skip
