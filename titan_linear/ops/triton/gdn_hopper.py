"""GDN's scans for Hopper, in Gluon. `gdn_kernels` has their algebra, and them in Triton for other dims and GPUs.

A group of warps carries Sᵀ [BV, K] in registers. Its products have a register operand on their left, so that nothing
that is computed passes through shared memory from one to the next. One more warp loads tiles by the copy engine, and
one makes a chunk's factors from its gates. The copy engine writes too, from tiles that are transposed on the way.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from titan_linear.ops.triton.chunks import entry_at, listed_entries
from titan_linear.ops.triton.configs import widest_slice
from titan_linear.ops.triton.hopper import END, VECTOR, barriers, is_hopper, shared, swizzled
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.stages import Given
from titan_linear.ops.triton.tiles import BT, Pair, read_state, write_state

K = constexpr(128)
BV = constexpr(64)
COLUMNS = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [BV, BT]
CARRY = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [BV, K]
LEFT = constexpr(gl.DotOperandLayout(0, COLUMNS.value, 2))
LEFT_OF_CARRY = constexpr(gl.DotOperandLayout(0, CARRY.value, 2))
OF_TOKENS = constexpr(gl.SliceLayout(0, COLUMNS.value))
LANES = constexpr(gl.BlockedLayout([2], [32], [1], [0]))


def fits(k: Tensor, V: int) -> bool:
    """Whether these kernels take keys like k [T, H, K] and values of V dims; at V = 192 they spill."""
    shaped = k.shape[2] == K.value and widest_slice(V) == V >= BV.value and k.element_size() == 2
    return shaped and is_hopper(k.device)


@gluon.jit
def _places(i_hv, i_v, V: gl.constexpr):
    """Of Sᵀ in a state [HV, K, V]."""
    o_v = gl.arange(0, BV, gl.SliceLayout(1, CARRY))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, CARRY))[None, :]
    return i_hv * (K * V) + o_k * V + i_v * BV + o_v


@gluon.jit
def _product(a, b):
    """a @ b [BV, BT], under way."""
    return warpgroup_mma(a, b, gl.zeros([BV, BT], gl.float32, COLUMNS), use_acc=False, is_async=True)


@gluon.jit
def _left(x, k, layout: gl.constexpr):
    return gl.convert_layout(x.to(k.dtype), layout)


@gluon.jit
def _put(desc, place, shape: gl.constexpr, buffers, n, b_x, pending: gl.constexpr):
    """Write xᵀ, by one of two buffers in turn; `pending` writes may go on meanwhile."""
    tile = buffers.index(n % 2)
    tma.store_wait(pending)
    tile.permute((1, 0)).store(b_x.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, tile.reshape(shape))


@gluon.jit
def _release(bar):
    fence_async_shared()
    mbarrier.arrive(bar)


@gluon.jit
def _factors(vectors, stage):
    """2^G, β 2^(γ-G), β [1, BT], and 2^γ."""
    b_e = vectors.index(3 * stage).load(OF_TOKENS)
    b_w, b_beta = vectors.index(3 * stage + 1).load(OF_TOKENS), vectors.index(3 * stage + 2).load(OF_TOKENS)
    last = gl.sum(gl.where(gl.arange(0, BT, OF_TOKENS) == BT - 1, b_e, 0.0), 0)
    return b_e[None, :], b_w[None, :], b_beta[None, :], last


@gluon.jit
def _forward(tiles, vectors, bars, rooms, ends, V: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr):
    q_s, k_s, v_s, C_s, A_s = tiles
    ready, factors_ready, empty = bars
    states_s, rows_s, states_desc, rows_desc = rooms
    initial, final_state, span, scale, HV = ends
    start, length, first, i_n, i_hv, i_v = span
    places = _places(i_hv, i_v, V)
    b_s = read_state(initial, i_n, HV * K * V, places)
    for i in range((length + BT - 1) // BT):
        stage, phase = i % STAGES, i // STAGES & 1
        k, C = k_s.index(stage), C_s.index(stage)
        tile = (first + i).to(gl.int32) * HV + i_hv
        row = [END, start + length, END - length + i * BT, i_hv * V + i_v * BV]
        b_sd = b_s.to(k.dtype)
        b_left = gl.convert_layout(b_sd, LEFT)
        mbarrier.wait(ready.index(stage), phase)
        b_x = _product(b_left, k.permute((1, 0)))
        if OUT:
            b_o = _product(b_left, q_s.index(stage).permute((1, 0)))
        else:
            _put(states_desc, [tile * K, i_v * BV], [K, BV], states_s, i, b_sd, 2)
        b_v = v_s.index(stage).permute((1, 0)).load(COLUMNS).to(gl.float32)
        mbarrier.wait(factors_ready.index(stage), phase)
        b_e, b_w, b_beta, last = _factors(vectors, stage)
        if OUT:
            b_x, b_o = warpgroup_mma_wait(0, (b_x, b_o))
        else:
            b_x = warpgroup_mma_wait(0, (b_x,))
        b_x = b_v - b_e * b_x
        b_y = _product(_left(b_x, k, LEFT), C.permute((1, 0)))
        b_s *= last
        b_y = b_x - warpgroup_mma_wait(0, (b_y,))
        b_s = warpgroup_mma(_left(b_w * b_y, k, LEFT_OF_CARRY), k, b_s, is_async=True)
        if OUT:
            b_u = _left(b_beta * b_y, k, LEFT)
            b_o = warpgroup_mma(b_u, A_s.index(stage).permute((1, 0)), (scale * b_e) * b_o, is_async=True)
            b_s, b_o = warpgroup_mma_wait(0, (b_s, b_o))
            _release(empty.index(stage))
            _put(rows_desc, row, [1, 1, BT, BV], rows_s, i, b_o, 1)
        else:
            _put(rows_desc, row, [1, 1, BT, BV], rows_s, i, b_y, 2)
            b_s = warpgroup_mma_wait(0, (b_s,))
            _release(empty.index(stage))
    tma.store_wait(0)
    write_state(final_state, i_n, HV * K * V, places, b_s)


@gluon.jit
def _backward(tiles, vectors, bars, rooms, ends, V: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr):
    q_s, k_s, do_s, C_s, A_s = tiles
    ready, factors_ready, empty = bars
    states_s, rows_s, states_desc, rows_desc = rooms
    d_final, d_initial, span, scale, HV = ends
    start, length, first, i_n, i_hv, i_v = span
    places = _places(i_hv, i_v, V)
    b_ds = read_state(d_final, i_n, HV * K * V, places)
    NT = (length + BT - 1) // BT
    for n in range(NT):
        i = NT - 1 - n
        stage, phase = n % STAGES, n // STAGES & 1
        k, do = k_s.index(stage), do_s.index(stage).permute((1, 0))
        tile = (first + i).to(gl.int32) * HV + i_hv
        b_dsd = b_ds.to(k.dtype)
        mbarrier.wait(ready.index(stage), phase)
        b_kds = _product(gl.convert_layout(b_dsd, LEFT), k.permute((1, 0)))
        b_du = _product(do, A_s.index(stage))
        _put(states_desc, [tile * K, i_v * BV], [K, BV], states_s, n, b_dsd, 2)
        mbarrier.wait(factors_ready.index(stage), phase)
        b_e, b_w, b_beta, last = _factors(vectors, stage)
        b_scaled = scale * vectors.index(3 * stage).load(gl.SliceLayout(0, LEFT_OF_CARRY))[None, :]
        b_do = (do.load(LEFT_OF_CARRY).to(gl.float32) * b_scaled).to(k.dtype)
        b_kds, b_du = warpgroup_mma_wait(0, (b_kds, b_du))
        b_ds = warpgroup_mma(b_do, q_s.index(stage), b_ds * last, is_async=True)
        b_z = b_w * b_kds + b_beta * b_du
        b_dx = _product(_left(b_z, k, LEFT), C_s.index(stage))
        b_ds, b_dx = warpgroup_mma_wait(0, (b_ds, b_dx))
        b_dx = b_z - b_dx
        b_ds = warpgroup_mma(_left(-b_e * b_dx, k, LEFT_OF_CARRY), k, b_ds, is_async=True)
        row = [END, start + length, END - length + i * BT, i_hv * V + i_v * BV]
        _put(rows_desc, row, [1, 1, BT, BV], rows_s, n, b_dx, 2)
        b_ds = warpgroup_mma_wait(0, (b_ds,))
        _release(empty.index(stage))
    tma.store_wait(0)
    write_state(d_initial, i_n, HV * K * V, places, b_ds)


@gluon.jit
def _load(tiles, bars, descs, span, HV, R, V: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr):
    q_desc, k_desc, v_desc, C_desc, A_desc = descs
    q_s, k_s, v_s, C_s, A_s = tiles
    ready, _, empty = bars
    start, length, first, _, i_hv, i_v = span
    NT = (length + BT - 1) // BT
    for n in range(NT):
        i = NT - 1 - n if BACK else n
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        bar, end, row = ready.index(stage), start + length, END - length + i * BT
        tile = ((first + i).to(gl.int32) * HV + i_hv) * BT
        keys, values = [END, end, row, i_hv // R * K], [END, end, row, i_hv * V + i_v * BV]
        mbarrier.expect(bar, 2 * BT * (K + BV + BT) + (0 if q_desc is None else 2 * BT * (K + BT)))
        tma.async_copy_global_to_shared(k_desc, keys, bar, k_s.index(stage).reshape([1, 1, BT, K]))
        tma.async_copy_global_to_shared(v_desc, values, bar, v_s.index(stage).reshape([1, 1, BT, BV]))
        tma.async_copy_global_to_shared(C_desc, [tile, 0], bar, C_s.index(stage))
        if q_desc is not None:
            tma.async_copy_global_to_shared(q_desc, keys, bar, q_s.index(stage).reshape([1, 1, BT, K]))
            tma.async_copy_global_to_shared(A_desc, [tile, 0], bar, A_s.index(stage))


@gluon.jit
def _make_factors(vectors, bars, gates, span, HV, STAGES: gl.constexpr, BACK: gl.constexpr):
    _, factors_ready, empty = bars
    _, length, first, _, i_hv, _ = span
    o_c = gl.arange(0, BT, LANES)
    NT = (length + BT - 1) // BT
    for n in range(NT):
        i = NT - 1 - n if BACK else n
        stage = n % STAGES
        p_g = gates + ((first + i) * HV + i_hv) * (2 * BT)
        b_G, b_beta, last = gl.load(p_g + o_c), gl.load(p_g + BT + o_c), gl.load(p_g + BT - 1)
        mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
        vectors.index(3 * stage).store(gl.exp2(b_G))
        vectors.index(3 * stage + 1).store(gl.exp2(last - b_G) * b_beta)
        vectors.index(3 * stage + 2).store(b_beta)
        mbarrier.arrive(factors_ready.index(stage))


@partial(Kernel, jit=gluon.jit)
def scan_kernel(
    k_desc, v_desc, C_desc, q_desc, A_desc,  # v: do with BACK; q and A: None where no o is wanted
    states_desc, rows_desc,  # h and y, None and o, or with BACK dh and dv
    gates, initial, final_state, listed, chunks, scale, HV, R,
    V: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Scan one entry's chunks, for one head and BV columns of its state; with BACK, from the last to the first."""
    blocks: gl.constexpr = V // BV
    i_v, i_nh = gl.program_id(0) % blocks, (gl.program_id(0) // blocks).to(gl.int64)
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(gl.int32)
    start, length, first = entry_at(chunks, listed, i_n)
    span = start.to(gl.int32), length, first, i_n, i_hv, i_v
    dtype: gl.constexpr = k_desc.dtype
    q_s, A_s, states_s = None, None, None
    if q_desc is not None:
        q_s, A_s = shared(dtype, STAGES, BT, K), shared(dtype, STAGES, BT, BT)
    if states_desc is not None:
        states_s = shared(dtype, 2, K, BV)
    tiles = q_s, shared(dtype, STAGES, BT, K), shared(dtype, STAGES, BT, BV), shared(dtype, STAGES, BT, BT), A_s
    rows_s = shared(dtype, 2, BT, BV)
    vectors = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BT], VECTOR)
    bars = barriers(STAGES), barriers(STAGES), barriers(STAGES)
    # Constants stand in the calls: in a tuple of its own they would become tensors.
    descs = q_desc, k_desc, v_desc, C_desc, A_desc
    ends = initial, final_state, span, scale, HV
    rooms = states_s, rows_s, states_desc, rows_desc
    gl.warp_specialize(
        [
            (_backward if BACK else _forward, (tiles, vectors, bars, rooms, ends, V, STAGES, q_desc is not None)),
            (_load, (tiles, bars, descs, span, HV, R, V, STAGES, BACK)),
            (_make_factors, (vectors, bars, gates, span, HV, STAGES, BACK)),
        ],
        [1, 1],
        [40, 40],
    )


def _launch(given: Given, v: Tensor, states: Tensor | None, rows: Tensor, ends: tuple[Pair, Pair], BACK: bool) -> None:
    """states: of chunks; ends: the states of entries that are read and written."""
    x, tiles, (_, HV, V) = given.x, given.tiles, v.shape
    read: tuple[TensorDescriptor | None, ...] = None, None
    if BACK or states is None:
        read = swizzled(x.q, K.value), swizzled(tiles.A, BT.value, BT.value)
    written = None if states is None else swizzled(states, BV.value, K.value), swizzled(rows, BV.value)
    scan_kernel[(listed_entries(given.listed, given.chunks) * HV * (V // BV.value),)](
        swizzled(x.k, K.value), swizzled(v, BV.value), swizzled(tiles.C, BT.value, BT.value), *read, *written,
        tiles.gates, *ends, given.listed, given.chunks, given.numbers.scale, HV, HV // x.k.shape[1],
        V=V, STAGES=4 if read[0] is None else 3, BACK=BACK, num_warps=4, maxnreg=168,
    )  # fmt: skip


def launch_scan(given: Given, o: Tensor | None = None, final_state: Tensor | None = None, **states: Tensor) -> None:
    h, rows = (states["h"], states["y"]) if o is None else (None, o)
    _launch(given, given.x.v, h, rows, (given.initial, (final_state, None)), BACK=False)


def launch_reverse(given: Given, d_initial: Pair, dh: Tensor, dv: Tensor) -> None:
    _launch(given, given.do, dh, dv, (given.d_final, d_initial), BACK=True)
