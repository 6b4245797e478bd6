"""GDN for Hopper, in Gluon: `prepare`, scans, and gradients with V = 128. `gdn_kernels`
describes their algebra, and has the Triton versions for other dims and GPUs.

In a scan, a group of warps carries Sᵀ [BV, K] in registers. Its products have a register
operand on their left, so no computed value passes through shared memory between products.
Another warp loads tiles by the copy engine, and one more computes a chunk's factors from
its gates. The copy engine also writes the results, from tiles that are transposed on the
way.

For gradients, the copy engine loads all of a program's tiles before the program computes,
and each multiprocessor has two programs. One waits for its tiles while the other computes.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_at, chunks_in, entry_at, of_one_chunk
from titan_linear.ops.triton.configs import widest_slice
from titan_linear.ops.triton.gdn_kernels import store_gate_gradients, store_gates
from titan_linear.ops.triton.hopper import (
    END,
    SQUARE,
    VECTOR,
    GluonKernel,
    add,
    barriers,
    diagonal,
    each,
    fetch,
    indices,
    is_hopper,
    product,
    put,
    release,
    send,
    shared,
    solved,
    swizzled,
    turned,
    vector,
    visible,
)
from titan_linear.ops.triton.stages import Given
from titan_linear.ops.triton.tiles import (
    BT,
    Pair,
    place_in_row,
    read_state,
    rows,
    wide,
    write_state,
)

K = constexpr(128)
BV = constexpr(64)
CARRY = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [BV, K]
LEFT = constexpr(gl.DotOperandLayout(0, SQUARE.value, 2))
LEFT_OF_CARRY = constexpr(gl.DotOperandLayout(0, CARRY.value, 2))
OF_TOKENS = constexpr(gl.SliceLayout(0, SQUARE.value))
TOKENS = constexpr(gl.SliceLayout(1, SQUARE.value))
LANES = constexpr(gl.BlockedLayout([2], [32], [1], [0]))
EACH_WARP = constexpr(gl.BlockedLayout([2], [32], [4], [0]))
STATE = constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # rows of a state


def fits(k: Tensor, V: int) -> bool:
    """Return whether these kernels support keys like k [T, H, K] and values of V dims. At V
    = 192 they spill."""
    shaped = k.shape[2] == K.value and widest_slice(V) == V >= BV.value and k.element_size() == 2
    return shaped and is_hopper(k.device)


@GluonKernel
def prepare_kernel(
    q_desc, k_desc, A_desc, C_desc, g, beta, A_log, dt_bias, gates, chunks, scale, HV, R,
    K: constexpr, BETA_RANGE: constexpr,
):  # fmt: skip
    """Compute the gates, A and C of one chunk and value head. A pair's earlier token is its
    row, so that the same decays serve both matrices."""
    i_p = gl.program_id(0)
    i_t, i_hv = i_p // HV, i_p % HV
    start, n = chunk_at(chunks, i_t)
    dtype: constexpr = k_desc.dtype
    # Start loading q and k, and compute gates meanwhile.
    q_s, k_s = each(shared(dtype, 2, BT, K))
    bar = barriers(1).index(0)
    place = [END, start.to(gl.int32) + n, END - n, i_hv // R * K]
    mbarrier.expect(bar, 4 * BT * K)
    fetch(k_desc, place, bar, k_s)
    fetch(q_desc, place, bar, q_s)
    G_s, beta_s = vector(), vector()
    o_c = gl.arange(0, BT, EACH_WARP)
    b_G, b_beta = store_gates(
        o_c, g, beta, A_log, dt_bias, gates, i_p.to(gl.int64), start, n, HV, BETA_RANGE
    )
    G_s.store(b_G)
    beta_s.store(b_beta)
    o_j, o_i = indices(BT, BT, SQUARE)
    b_d = gl.exp2(
        gl.where(
            o_i >= o_j, G_s.load(OF_TOKENS)[None, :] - G_s.load(TOKENS)[:, None], -float("inf")
        )
    )
    # Products of pairs, then A, and C by the triangular solve.
    mbarrier.wait(bar, 0)
    b_n, b_a = product(k_s, turned(k_s)), product(k_s, turned(q_s))
    b_n, b_a = warpgroup_mma_wait(0, (b_n, b_a))
    tl.debug_barrier()
    A_s, C_s = each(shared(dtype, 1, BT, BT)) + each(shared(dtype, 1, BT, BT))
    turned(A_s).store((b_a * scale * b_d).to(dtype))
    b_g = solved(gl.where(o_i > o_j, -b_n * b_d, 0.0), beta_s)
    turned(C_s).store((-beta_s.load(TOKENS)[:, None] * b_g).to(dtype))
    visible()
    tma.async_copy_shared_to_global(A_desc, [i_p * BT, 0], A_s)
    tma.async_copy_shared_to_global(C_desc, [i_p * BT, 0], C_s)
    tma.store_wait(0)


def prepares(k: Tensor) -> bool:
    """Return whether `prepare_kernel` supports keys like k [T, H, K]."""
    return k.shape[2] in (BT.value, K.value) and k.element_size() == 2 and is_hopper(k.device)


def launch_prepare(given: Given, tiles: Any) -> None:
    x = given.x
    n = given.numbers
    NT, HV, _, _ = tiles.C.shape
    _, H, K = given.x.k.shape
    prepare_kernel[NT * HV,](
        swizzled(x.q, K), swizzled(x.k, K), *(swizzled(t, BT.value, BT.value) for t in (tiles.A, tiles.C)), rows(x.g),
        rows(x.beta), x.A_log, x.dt_bias, tiles.gates, given.chunks, n.scale, HV, HV // H, K=K,
        BETA_RANGE=n.beta_range or None, num_warps=4,
    )  # fmt: skip


@gluon.jit
def places(i_hv, i_v, V):
    """Return the offsets of Sᵀ in a state [HV, K, V]."""
    o_v, o_k = indices(BV, K, CARRY)
    return i_hv * (K * V) + o_k * V + i_v * BV + o_v


@gluon.jit
def _left(x, k, layout):
    return gl.convert_layout(x.to(k.dtype), layout)


@gluon.jit
def _factors(vectors, stage):
    """Load 2^G, β 2^(γ-G), β [1, BT], and 2^γ."""
    b_e = vectors.index(3 * stage).load(OF_TOKENS)
    b_w, b_beta = (
        vectors.index(3 * stage + 1).load(OF_TOKENS),
        vectors.index(3 * stage + 2).load(OF_TOKENS),
    )
    last = gl.sum(gl.where(gl.arange(0, BT, OF_TOKENS) == BT - 1, b_e, 0.0), 0)
    return b_e[None, :], b_w[None, :], b_beta[None, :], last


@gluon.jit
def _forward(tiles, vectors, bars, rooms, ends, V, STAGES):
    q_s, k_s, v_s, C_s, A_s = tiles
    ready, factors_ready, empty = bars
    states_s, rows_s, states_desc, rows_desc = rooms
    initial, final_state, span, scale, HV = ends
    start, length, first, i_n, i_hv, i_v = span
    o_s = places(i_hv, i_v, V)
    b_s = read_state(initial, i_n, HV * K * V, o_s)
    for i in range(chunks_in(length)):
        stage, phase = i % STAGES, i // STAGES & 1
        k, C = k_s.index(stage), C_s.index(stage)
        tile = (first + i).to(gl.int32) * HV + i_hv
        row = [END, start + length, END - length + i * BT, i_hv * V + i_v * BV]
        b_sd = b_s.to(k.dtype)
        # Products of the incoming state with k and q. Without q, the state is written to h.
        b_left = gl.convert_layout(b_sd, LEFT)
        mbarrier.wait(ready.index(stage), phase)
        b_x = product(b_left, turned(k))
        if q_s is not None:
            b_o = product(b_left, turned(q_s.index(stage)))
        else:
            put(states_desc, [tile * K, i_v * BV], states_s.index(i % 2), b_sd, 2)
        b_v = wide(turned(v_s.index(stage)).load(SQUARE))
        mbarrier.wait(factors_ready.index(stage), phase)
        b_e, b_w, b_beta, last = _factors(vectors, stage)
        if q_s is not None:
            b_x, b_o = warpgroup_mma_wait(0, (b_x, b_o))
        else:
            b_x = warpgroup_mma_wait(0, (b_x,))
        # X and Y of the chunk, and the state that leaves it.
        b_x = b_v - b_e * b_x
        b_y = product(_left(b_x, k, LEFT), turned(C))
        b_s *= last
        b_y = b_x - warpgroup_mma_wait(0, (b_y,))
        b_s = add(_left(b_w * b_y, k, LEFT_OF_CARRY), k, b_s)
        if q_s is not None:
            # The output from U. The stage is free after its products.
            b_u = _left(b_beta * b_y, k, LEFT)
            b_o = add(b_u, turned(A_s.index(stage)), (scale * b_e) * b_o)
            b_s, b_o = warpgroup_mma_wait(0, (b_s, b_o))
            release(empty.index(stage))
            put(rows_desc, row, rows_s.index(i % 2), b_o, 1)
        else:
            put(rows_desc, row, rows_s.index(i % 2), b_y, 2)
            b_s = warpgroup_mma_wait(0, (b_s,))
            release(empty.index(stage))
    tma.store_wait(0)
    write_state(final_state, i_n, HV * K * V, o_s, b_s)


@gluon.jit
def _backward(tiles, vectors, bars, rooms, ends, V, STAGES):
    q_s, k_s, do_s, C_s, A_s = tiles
    ready, factors_ready, empty = bars
    states_s, rows_s, states_desc, rows_desc = rooms
    d_final, d_initial, span, scale, HV = ends
    start, length, first, i_n, i_hv, i_v = span
    o_s = places(i_hv, i_v, V)
    b_ds = read_state(d_final, i_n, HV * K * V, o_s)
    NT = chunks_in(length)
    for n in range(NT):
        i = NT - 1 - n
        stage, phase = n % STAGES, n // STAGES & 1
        k, do = k_s.index(stage), turned(do_s.index(stage))
        tile = (first + i).to(gl.int32) * HV + i_hv
        b_dsd = b_ds.to(k.dtype)
        mbarrier.wait(ready.index(stage), phase)
        # dU, from the gradient of the state that leaves the chunk and from do.
        b_kds = product(gl.convert_layout(b_dsd, LEFT), turned(k))
        b_du = product(do, A_s.index(stage))
        put(states_desc, [tile * K, i_v * BV], states_s.index(n % 2), b_dsd, 2)
        mbarrier.wait(factors_ready.index(stage), phase)
        b_e, b_w, b_beta, last = _factors(vectors, stage)
        b_scaled = scale * vectors.index(3 * stage).load(gl.SliceLayout(0, LEFT_OF_CARRY))[None, :]
        b_do = (wide(do.load(LEFT_OF_CARRY)) * b_scaled).to(k.dtype)
        b_kds, b_du = warpgroup_mma_wait(0, (b_kds, b_du))
        # Z and dX, and the gradient of the state that enters.
        b_ds = add(b_do, q_s.index(stage), b_ds * last)
        b_z = b_w * b_kds + b_beta * b_du
        b_dx = product(_left(b_z, k, LEFT), C_s.index(stage))
        b_ds, b_dx = warpgroup_mma_wait(0, (b_ds, b_dx))
        b_dx = b_z - b_dx
        b_ds = add(_left(-b_e * b_dx, k, LEFT_OF_CARRY), k, b_ds)
        row = [END, start + length, END - length + i * BT, i_hv * V + i_v * BV]
        put(rows_desc, row, rows_s.index(n % 2), b_dx, 2)
        b_ds = warpgroup_mma_wait(0, (b_ds,))
        release(empty.index(stage))
    tma.store_wait(0)
    write_state(d_initial, i_n, HV * K * V, o_s, b_ds)


@gluon.jit
def _load(tiles, bars, descs, span, HV, R, V, STAGES, BACK):
    q_desc, k_desc, v_desc, C_desc, A_desc = descs
    q_s, k_s, v_s, C_s, A_s = tiles
    ready, _, empty = bars
    start, length, first, _, i_hv, i_v = span
    NT = chunks_in(length)
    for n in range(NT):
        i = NT - 1 - n if BACK else n
        stage = n % STAGES
        # Wait until the stage is free, then load all tiles of a chunk into it.
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        bar, end, row = ready.index(stage), start + length, END - length + i * BT
        tile = ((first + i).to(gl.int32) * HV + i_hv) * BT
        keys, values = [END, end, row, i_hv // R * K], [END, end, row, i_hv * V + i_v * BV]
        mbarrier.expect(bar, 2 * BT * (K + BV + BT) + (0 if q_desc is None else 2 * BT * (K + BT)))
        fetch(k_desc, keys, bar, k_s.index(stage))
        fetch(v_desc, values, bar, v_s.index(stage))
        fetch(C_desc, [tile, 0], bar, C_s.index(stage))
        if q_desc is not None:
            fetch(q_desc, keys, bar, q_s.index(stage))
            fetch(A_desc, [tile, 0], bar, A_s.index(stage))


@gluon.jit
def _make_factors(vectors, bars, gates, span, HV, STAGES, BACK):
    _, factors_ready, empty = bars
    _, length, first, _, i_hv, _ = span
    o_c = gl.arange(0, BT, LANES)
    NT = chunks_in(length)
    for n in range(NT):
        i = NT - 1 - n if BACK else n
        stage = n % STAGES
        p_g = gates + ((first + i) * HV + i_hv) * (2 * BT)
        b_G, b_beta, last = gl.load(p_g + o_c), gl.load(p_g + BT + o_c), gl.load(p_g + BT - 1)
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        # 2^G, β 2^(γ−G) and β.
        vectors.index(3 * stage).store(gl.exp2(b_G))
        vectors.index(3 * stage + 1).store(gl.exp2(last - b_G) * b_beta)
        vectors.index(3 * stage + 2).store(b_beta)
        mbarrier.arrive(factors_ready.index(stage))


@GluonKernel
def scan_kernel(
    k_desc, v_desc, C_desc, q_desc, A_desc,  # v is do with BACK; without o, q and A are None
    states_desc, rows_desc,  # outputs: h and y, None and o, or with BACK dh and dv
    gates, initial, final_state, listed, chunks, scale, HV, R,
    V: constexpr, STAGES: constexpr, BACK: constexpr,
):  # fmt: skip
    """Scan one entry's chunks for one head and BV columns of its state; with BACK, from the
    last chunk to the first."""
    i_v, _, i_n, i_hv = place_in_row(V // BV, HV)
    start, length, first = entry_at(chunks, listed, i_n)
    span = start.to(gl.int32), length, first, i_n, i_hv, i_v
    # Shared memory: stages of loaded tiles, and two tiles of each output.
    dtype: constexpr = k_desc.dtype
    q_s, A_s, states_s = None, None, None
    if q_desc is not None:
        q_s, A_s = shared(dtype, STAGES, BT, K), shared(dtype, STAGES, BT, BT)
    if states_desc is not None:
        states_s = shared(dtype, 2, K, BV)
    tiles = (
        q_s,
        shared(dtype, STAGES, BT, K),
        shared(dtype, STAGES, BT, BV),
        shared(dtype, STAGES, BT, BT),
        A_s,
    )
    rows_s = shared(dtype, 2, BT, BV)
    vectors = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BT], VECTOR)
    bars = barriers(STAGES), barriers(STAGES), barriers(STAGES)
    # Constants are passed in the calls, because in a tuple of their own they would become
    # tensors.
    descs = q_desc, k_desc, v_desc, C_desc, A_desc
    ends = initial, final_state, span, scale, HV
    rooms = states_s, rows_s, states_desc, rows_desc
    gl.warp_specialize(
        [
            (_backward if BACK else _forward, (tiles, vectors, bars, rooms, ends, V, STAGES)),
            (_load, (tiles, bars, descs, span, HV, R, V, STAGES, BACK)),
            (_make_factors, (vectors, bars, gates, span, HV, STAGES, BACK)),
        ],
        [1, 1],
        [40, 40],
    )


def _launch(
    given: Given,
    v: Tensor,
    states: Tensor | None,
    rows: Tensor,
    ends: tuple[Pair, Pair],
    BACK: bool,
) -> None:
    """Launch the scan. states: the chunks' states to write, or None. ends: the entries'
    states to read and to write."""
    x = given.x
    tiles = given.tiles
    _, HV, V = v.shape
    read: tuple[TensorDescriptor | None, ...] = None, None
    if BACK or states is None:
        read = swizzled(x.q, K.value), swizzled(tiles.A, BT.value, BT.value)
    written = (
        None if states is None else swizzled(states, BV.value, K.value),
        swizzled(rows, BV.value),
    )
    scan_kernel[given.listed_entries * HV * (V // BV.value),](
        swizzled(x.k, K.value), swizzled(v, BV.value), swizzled(tiles.C, BT.value, BT.value), *read, *written,
        tiles.gates, *ends, given.listed, given.chunks, given.numbers.scale, HV, HV // x.k.shape[1],
        V=V, STAGES=4 if read[0] is None else 3, BACK=BACK, num_warps=4, maxnreg=168,
    )  # fmt: skip


def launch_scan(
    given: Given, o: Tensor | None = None, final_state: Tensor | None = None, **states: Tensor
) -> None:
    h, rows = (states["h"], states["y"]) if o is None else (None, o)
    _launch(given, given.x.v, h, rows, (given.initial, (final_state, None)), BACK=False)


def launch_reverse(given: Given, d_initial: Pair, dh: Tensor, dv: Tensor) -> None:
    _launch(given, given.do, dh, dv, (given.d_final, d_initial), BACK=True)


@gluon.jit
def _half(rows, i):
    """Return one half of the channels of rows [BT, K]."""
    return rows.slice(BT * i, BT, 1)


@gluon.jit
def _products(a, first, second):
    """Start the products of a with the transposes of both."""
    return product(a, turned(first)), product(a, turned(second))


@gluon.jit
def _add(a, rows, first, second):
    """Start a @ rows, added to its halves."""
    return add(a, _half(rows, 0), first), add(a, _half(rows, 1), second)


@gluon.jit
def _read(rows, i):
    return wide(_half(rows, i).load(SQUARE))


@gluon.jit
def _write(desc, place, rows, first, second):
    """Write two halves of the channels through `rows`."""
    _half(rows, 0).store(first.to(desc.dtype))
    _half(rows, 1).store(second.to(desc.dtype))
    send(desc, place, rows)


@gluon.jit
def _given_product(initial, d_final, i_n, i_hv, HV):
    """Compute <S, dS'> from an entry's initial and final fp32 states."""
    o_k, o_v = indices(16, K, STATE)
    total = gl.zeros([16, K], gl.float32, STATE)
    for i in range(K // 16):
        o_s = i_hv * (K * K) + (i * 16 + o_k) * K + o_v
        total += read_state(initial, i_n, HV * K * K, o_s) * read_state(
            d_final, i_n, HV * K * K, o_s
        )
    return gl.sum(gl.sum(total, 1), 0)


@GluonKernel
def gradients_kernel(
    q_desc, k_desc, do_desc, y_desc, dv_desc, h_desc, dh_desc, dq_desc, dk_desc,
    gates, g, A_log, dt_bias, initial, d_final, dg, dbeta, d_gate, chunks, scale, HV, NT, R,
    BETA_RANGE: constexpr,
):  # fmt: skip
    """Compute the gradients like `gradients_kernel` of gdn_kernels. dh reuses the shared
    memory of do and dv."""
    i_p = gl.program_id(0)
    i_t, i_hv = i_p // HV, i_p % HV
    start, n = chunk_at(chunks, i_t)
    if n <= 0:
        if A_log is not None:
            gl.store(d_gate + i_p, 0.0)
            gl.store(d_gate + NT * HV + i_p, 0.0)
        return
    dtype: constexpr = k_desc.dtype
    # Start loading all tiles that fit at once.
    q_s, k_s, y_s = each(shared(dtype, 3, BT, K))
    do_s, dv_s = each(shared(dtype, 2, BT, K))
    h1, h2 = each(shared(dtype, 2, BT, K))
    keys_ready, values_ready, h_ready, dh1_ready, dh2_ready = each(barriers(5))
    end, row = start.to(gl.int32) + n, END - n
    keys, values = [END, end, row, i_hv // R * K], [END, end, row, i_hv * K]
    mbarrier.expect(keys_ready, 4 * BT * K)
    fetch(q_desc, keys, keys_ready, q_s)
    fetch(k_desc, keys, keys_ready, k_s)
    mbarrier.expect(values_ready, 6 * BT * K)
    fetch(do_desc, values, values_ready, do_s)
    fetch(y_desc, values, values_ready, y_s)
    fetch(dv_desc, values, values_ready, dv_s)
    mbarrier.expect(h_ready, 4 * BT * K)
    fetch(h_desc, [i_p * K, 0], h_ready, h1)
    fetch(h_desc, [i_p * K + BT, 0], h_ready, h2)

    o_i, o_j = gl.arange(0, BT, TOKENS), gl.arange(0, BT, OF_TOKENS)
    p_g = gates + i_p.to(gl.int64) * (2 * BT)
    b_G, last = gl.load(p_g + o_i), gl.load(p_g + BT - 1)
    b_e = gl.exp2(b_G)[:, None]
    b_betas = gl.load(p_g + BT + o_j)[None, :]
    o_i, o_j = o_i[:, None], o_j[None, :]
    b_d = gl.exp2(gl.where(o_i >= o_j, b_G[:, None] - gl.load(p_g + o_j), -float("inf")))
    # Products of pairs of tokens.
    mbarrier.wait(keys_ready, 0)
    b_a, b_kk = product(q_s, turned(k_s)), product(k_s, turned(k_s))
    mbarrier.wait(values_ready, 0)
    b_p, b_n = product(do_s, turned(y_s)), product(dv_s, turned(y_s))
    b_a, b_kk, b_p, b_n = warpgroup_mma_wait(0, (b_a, b_kk, b_p, b_n))
    b_p *= scale * b_d
    b_n = gl.where(o_i > o_j, -b_n * b_d, 0.0)
    # The gradients of G and beta, like `_pair_gradients`.
    b_w = b_p * b_a + b_n * b_kk
    b_own = diagonal(b_w)
    b_w = gl.where(o_i == o_j, 0.0, b_w)
    b_dg = gl.sum(b_w * b_betas, 1)
    b_db = gl.sum(gl.reshape(b_w, [4, BT // 4, BT]), 1)  # one sum per warp
    b_p, b_n = (b_p * b_betas).to(dtype), (b_n * b_betas).to(dtype)

    mbarrier.wait(h_ready, 0)
    # The share of the entering state in dq and dk.
    dq1, dq2 = _products(do_s, h1, h2)
    dk1, dk2 = _products(dv_s, h1, h2)
    dq1, dq2, dk1, dk2 = warpgroup_mma_wait(0, (dq1, dq2, dk1, dk2))
    tl.debug_barrier()
    # do and dv are no longer needed: load dh's first half in their place.
    dh1 = shared(dtype, 1, BT, K).index(0)
    mbarrier.expect(dh1_ready, 2 * BT * K)
    fetch(dh_desc, [i_p * K, 0], dh1_ready, dh1)
    p_s, n_s = each(shared(dtype, 2, BT, BT))
    p_s.store(b_p)
    n_s.store(b_n)
    visible()
    dq1 *= scale * b_e
    dq2 *= scale * b_e
    dk1 *= -b_e
    dk2 *= -b_e
    b_dg += gl.sum(
        dq1 * _read(q_s, 0) + dq2 * _read(q_s, 1) + dk1 * _read(k_s, 0) + dk2 * _read(k_s, 1), 1
    )
    # The share of pairs of tokens in dq and dk.
    dq1, dq2 = _add(p_s, k_s, dq1, dq2)
    dk1, dk2 = _add(n_s, k_s, dk1, dk2)
    dk1, dk2 = _add(turned(n_s), k_s, dk1, dk2)
    dk1, dk2 = _add(turned(p_s), q_s, dk1, dk2)
    dq1, dq2, dk1, dk2 = warpgroup_mma_wait(0, (dq1, dq2, dk1, dk2))
    tl.debug_barrier()
    dh2 = shared(dtype, 1, BT, K).index(0)
    mbarrier.expect(dh2_ready, 2 * BT * K)
    fetch(dh_desc, [i_p * K + BT, 0], dh2_ready, dh2)
    _write(dq_desc, values, q_s, dq1, dq2)

    mbarrier.wait(dh1_ready, 0)
    # The share of dS' in dk and dbeta, and <S, dS'>.
    ydh1, b_s = product(y_s, turned(dh1)), product(h1, turned(dh1))
    mbarrier.wait(dh2_ready, 0)
    ydh2 = product(y_s, turned(dh2))
    b_s = add(h2, turned(dh2), b_s)
    ydh1, ydh2, b_s = warpgroup_mma_wait(0, (ydh1, ydh2, b_s))
    b_w = gl.exp2(last - gl.load(p_g + gl.arange(0, BT, TOKENS)))
    b_dbs = b_w * gl.sum(ydh1 * _read(k_s, 0) + ydh2 * _read(k_s, 1), 1)
    b_w = (b_w * gl.load(p_g + BT + gl.arange(0, BT, TOKENS)))[:, None]
    dk1 += b_w * ydh1
    dk2 += b_w * ydh2

    b_sds = gl.sum(diagonal(b_s), 0)
    # For a document within one chunk, read the fp32 states.
    if initial[0] is not None and d_final[0] is not None:
        i_n, alone = of_one_chunk(chunks, i_t, n)
        if alone:
            b_sds = _given_product(initial, d_final, i_n, i_hv, HV)
    o_c = gl.arange(0, BT, EACH_WARP)
    b_beta, b_dbs = gl.load(p_g + BT + o_c), gl.convert_layout(b_dbs, EACH_WARP)
    b_db = gl.convert_layout(gl.sum(b_db, 0), EACH_WARP)
    b_dg = gl.convert_layout(b_dg, EACH_WARP) - b_beta * b_db
    # As in gdn_kernels, the last token has no later gates.
    b_later = gl.where(o_c < n - 1, b_beta * b_dbs, 0.0)
    store_gate_gradients(
        o_c, b_dg, b_later, b_db + gl.convert_layout(b_own, EACH_WARP) + b_dbs, b_beta, gl.exp2(last) * b_sds, g, A_log,
        dt_bias, dg, dbeta, d_gate, i_p, start, n, i_hv, HV, NT, BETA_RANGE,
    )  # fmt: skip
    # dk is written last, because reductions and conversions above may pass through memory
    # that the compiler considers free.
    _write(dk_desc, values, k_s, dk1, dk2)
    tma.store_wait(0)


def launch_gradients(
    given: Given, *, h: Tensor, dh: Tensor, y: Tensor, dv: Tensor, dq: Tensor, dk: Tensor, dg: Tensor, dbeta: Tensor,
    d_gate: Tensor,
) -> None:  # fmt: skip
    x = given.x
    n = given.numbers
    NT, HV, K, _ = h.shape
    gradients_kernel[NT * HV,](
        *(swizzled(t, K) for t in (x.q, x.k, given.do, y, dv)), *(swizzled(t, K, BT.value) for t in (h, dh)),
        swizzled(dq, K), swizzled(dk, K), given.tiles.gates, rows(x.g), x.A_log, x.dt_bias, given.initial,
        given.d_final, dg, dbeta, d_gate, given.chunks, n.scale, HV, NT, HV // x.k.shape[1],
        BETA_RANGE=n.beta_range or None, num_warps=4,
    )  # fmt: skip
