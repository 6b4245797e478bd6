"""RWKV-7 in Triton: the stages of a chunked forward and backward pass, as operators.

    prepare        inputs -> tiles                                              chunk-parallel
    recompute      (inputs, T) -> tiles but T and O                             prepare again, for backward
    scan           (tiles, initial_state) -> o, final_state                     sequential in a head
    boundary       (tiles, some entries) -> S_ext, M                            for context parallelism
    boundary_bwd   (do, tiles, some entries) -> dS_ext
    backward       (all of these) -> gradients                                  both scans at once, then chunk-parallel

At T = 32768, 64 heads × 64, bf16, in GB (and ms at 4.2 TB/s): forward reads the inputs (1.6), writes T (0.3), writes
and reads four tiles (2.1), writes o: 4.3 (1.0); backward reads inputs and T twice, makes three tiles, h and dh, and
writes six gradients: 8.1 (1.9). Products: 0.2 TFLOP forward, 0.8 backward. T is kept between them, 128 bytes per token
and head.

q, k, v, a, b, w [T, H, K or V] are flat packed streams (`tiles.py`: any stride between tokens) of N entries. Operators
take named tuples as lists: `DPLRInputs`, `Chunks`, `Tiles`, `States`. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.runtime.options import DPLRInputs, Fields, States
from titan_linear.ops.triton import rwkv7_kernels as kernels
from titan_linear.ops.triton.chunks import Chunks
from titan_linear.ops.triton.configs import config, widest_slice
from titan_linear.ops.triton.kda import TRITON_DTYPE, compute_dtype
from titan_linear.ops.triton.tiles import dense_heads, empty_boundary_gradients, empty_gradients, empty_states


class Tiles(NamedTuple):
    """Of NT chunks of C = 64 tokens; the letters are those of rwkv7_kernels."""

    P: Tensor  # [NT, H, K, K]
    U: Tensor  # [NT, H, K, V]
    Q: Tensor  # [NT, H, C, K]
    decay: Tensor  # [NT, H, K] fp32, 2^γ
    inverse: Tensor  # [NT, H, C, C], T
    O: Tensor | None  # [NT, H, C, V]; None: not computed again


def _constants(tiles: Tiles) -> dict[str, Any]:
    _, H, K, V = tiles.U.shape
    return {"H": H, "K": K, "V": V, "CT": TRITON_DTYPE[tiles.U.dtype]}


def _empty_tiles(inputs: list[Tensor], chunks: list[Tensor], inverse: Tensor | None) -> Tiles:
    x, NT, C = DPLRInputs(*inputs), Chunks(*chunks).chunk_index.shape[0], CHUNK
    (_, H, K), V = x.q.shape, x.v.shape[2]

    def empty(*shape: int) -> Tensor:
        return x.q.new_empty(NT, H, *shape, dtype=compute_dtype(x.q.dtype))

    decay = x.q.new_empty(NT, H, K, dtype=torch.float32)
    T, O = (empty(C, C), empty(C, V)) if inverse is None else (inverse, None)
    return Tiles(empty(K, K), empty(K, V), empty(C, K), decay, T, O)


def _prepare(
    inputs: list[Tensor], chunks: list[Tensor], inverse: Tensor | None, scale: float, lower_bound: float | None
) -> Tiles:
    tiles, where, x = _empty_tiles(inputs, chunks, inverse), Chunks(*chunks), [dense_heads(t) for t in inputs]
    kernels.prepare_kernel[tiles.U.shape[1], tiles.U.shape[0]](
        *x,
        *tiles,
        where.cu_seqlens,
        where.chunk_index,
        scale,
        *(t.stride(0) for t in x),
        **_constants(tiles),
        LOWER_BOUND=lower_bound,
        **config("rwkv7 prepare", tiles.U, x[0].shape[2]),
    )
    return tiles


@operator(cost=costs.over_inputs, of_driver=True, prepares="forward")
def rwkv7_prepare(
    inputs: list[Tensor], chunks: list[Tensor], scale: float, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> `Tiles`. lower_bound: None, or that of log decays of which gk holds logits."""
    return _prepare(inputs, chunks, None, scale, lower_bound)


@register_fake(rwkv7_prepare)
def _(inputs, chunks, scale, lower_bound):
    return _empty_tiles(inputs, chunks, None)


@operator(cost=costs.over_inputs, of_driver=True, prepares="backward")
def rwkv7_recompute(
    inputs: list[Tensor], chunks: list[Tensor], inverse: Tensor, scale: float, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> P, U, Q, decay."""
    return _prepare(inputs, chunks, inverse, scale, lower_bound)[:4]


@register_fake(rwkv7_recompute)
def _(inputs, chunks, inverse, scale, lower_bound):
    return _empty_tiles(inputs, chunks, inverse)[:4]


def _loop(tiles: Tiles, kernel: str = "rwkv7 loop") -> dict[str, Any]:
    """Constants of kernels that go through an entry's chunks."""
    _, _, K, V = tiles.U.shape
    return _constants(tiles) | config(kernel, tiles.U, max(K, V), BV=min(K, widest_slice(V)))


def _scan_outputs(v, tiles, chunks, initial, final_rows) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(v, final_rows, Tiles(*tiles).U.shape[2])


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def rwkv7_scan(
    v: Tensor, tiles: Fields, chunks: list[Tensor], initial: Fields, final_rows: int
) -> tuple[Tensor, Tensor]:
    """-> o like v, final_state [final_rows, H, K, V] fp32 (0 rows: none is written)."""
    made, (cu_seqlens, _, chunk_offsets) = Tiles(*tiles), Chunks(*chunks)
    o, final_state = _scan_outputs(v, tiles, chunks, initial, final_rows)
    constants = _loop(made, "rwkv7 scan")
    kernels.scan_kernel[v.shape[2] // constants["BV"], (len(cu_seqlens) - 1) * v.shape[1]](
        made.P,
        made.U,
        made.Q,
        made.decay,
        made.O,
        *States(*initial),
        o,
        final_state if final_rows else None,
        cu_seqlens,
        chunk_offsets,
        **constants,
    )
    return o, final_state


register_fake(rwkv7_scan)(_scan_outputs)


def _boundary_outputs(tiles, chunks, entries, wanted) -> tuple[Tensor, Tensor]:
    (_, H, K, V), decay = Tiles(*tiles).U.shape, Tiles(*tiles).decay
    return tuple(decay.new_empty(entries.shape[0], H, K, columns) for columns in (V, K))


def _boundary_cost(outputs: costs.Outputs, tiles: Fields, chunks: list[Tensor], **_: Any) -> costs.Recurrence:
    NT, *dims = Tiles(*tiles).U.shape
    N = len(Chunks(*chunks).cu_seqlens) - 1
    return costs.Recurrence((NT - N + 1) * CHUNK, *dims)  # NT is the most chunks that N entries may have


@operator(kept_by=("selective",), cost=_boundary_cost, of_driver=True)
def rwkv7_boundary(
    tiles: Fields, chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, H, K, V], each listed entry's last state from a zero state, and M [F, H, K, K],
    its transition; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both for all."""
    made, (cu_seqlens, _, chunk_offsets) = Tiles(*tiles), Chunks(*chunks)
    (S_ext, M), constants = _boundary_outputs(tiles, chunks, entries, wanted), _loop(made)
    F, H, K, V = S_ext.shape
    kernels.boundary_kernel[(V + K) // constants["BV"], F * H](
        made.P, made.U, made.decay, entries, wanted, S_ext, M, cu_seqlens, chunk_offsets, **constants
    )
    return S_ext, M


register_fake(rwkv7_boundary)(_boundary_outputs)


@operator(cost=costs.over_states, of_driver=True)
def rwkv7_boundary_bwd(
    do: Tensor, tiles: Fields, chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, H, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    made, (cu_seqlens, _, chunk_offsets), do = Tiles(*tiles), Chunks(*chunks), dense_heads(do)
    dS_ext, constants = empty_boundary_gradients(do, tiles, chunks, entries, wanted), _loop(made)
    F, H, _, V = dS_ext.shape
    kernels.boundary_bwd_kernel[V // constants["BV"], F * H](
        do, made.P, made.Q, made.decay, entries, wanted, dS_ext, cu_seqlens, chunk_offsets, do.stride(0), **constants
    )
    return dS_ext


register_fake(rwkv7_boundary_bwd)(empty_boundary_gradients)


def _room_in_backward(inputs: list[Tensor], **_: Any) -> int:
    """Bytes, for each chunk: states, their gradients, and exponents."""
    x = DPLRInputs(*inputs)
    return 2 * x.v.numel() * x.k.shape[-1] // CHUNK * x.v.element_size() + 4 * x.k.numel()


@operator(cost=costs.over_inputs, of_driver=True, temporary=_room_in_backward)
def rwkv7_backward(
    do: Tensor,
    inputs: list[Tensor],
    tiles: Fields,
    chunks: list[Tensor],
    initial: Fields,
    d_final: Fields,
    need_d_initial: bool,
    scale: float,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of `DPLRInputs` (each dense, in its input's dtype), and of the initial states, fp32 in their
    shape (empty unless needed; rows that belong to no entry stay unwritten)."""
    made, states, (cu_seqlens, chunk_index, chunk_offsets) = Tiles(*tiles), States(*initial), Chunks(*chunks)
    x = [dense_heads(t) for t in (do, *inputs)]
    (NT, H, K, V), constants, N = made.U.shape, _loop(made), len(cu_seqlens) - 1
    h, dh = made.U.new_empty(NT + N, H, K, V), torch.empty_like(made.U)
    d_initial = do.new_empty(states.values.shape if need_d_initial else 0, dtype=torch.float32)
    kernels.states_kernel[V // constants["BV"], N * H, 2](
        x[0],
        made.P,
        made.U,
        made.Q,
        made.decay,
        *states,
        *States(*d_final),
        h,
        dh,
        d_initial if need_d_initial else None,
        cu_seqlens,
        chunk_offsets,
        x[0].stride(0),
        **constants,
    )
    grads = [t.new_empty(t.shape) for t in inputs]
    exponents = do.new_empty(NT, H, CHUNK + 1, K, dtype=torch.float32)
    kernels.gradient_kernel[H, NT](
        *x,
        made.inverse,
        h,
        dh,
        *grads,
        exponents,
        cu_seqlens,
        chunk_index,
        scale,
        *(t.stride(0) for t in x),
        **_constants(made),
        LOWER_BOUND=lower_bound,
        **config("rwkv7 gradient", made.U, K),
    )
    return *grads, d_initial


register_fake(rwkv7_backward)(empty_gradients)
