"""Chunked recurrences whose state only decays, by one factor for each head (SSD, Simple GLA), in Triton: the stages of
a forward and backward pass, as operators, and behind the driver's interface (`ops/recurrence.py`, `Rule`).

    prepare        (g, A, dt_bias) -> gates                                     chunk-parallel
    scan           (q, k, v, D, gates, initial_state) -> o, final_state         sequential in a head
    boundary       (k, v, gates, some entries) -> S_ext, M                      for context parallelism
    boundary_bwd   (q, do, gates, some entries) -> dS_ext
    backward       (all of these) -> gradients                                  states, then chunk-parallel

Chunks have 64 tokens. A program of the scan holds the state [K, 64 columns] of one head in registers from a document's
first chunk to its last, and writes o alone: per token and head it moves 2 V numbers, and q, k and q kᵀ, which the heads
of a group share, come from L2. Most of a chunk's time it waits: two share a multiprocessor, and where heads are too few
for that, documents are cut into pieces, and the states of all parts before the last piece are found first, by
themselves. (Segments, `split_documents.py`, would cut backward too, which has twice as many programs, and would pay for
their gradients.)

For the gradients, states before and their gradients behind each chunk are written by two scans side by side (2 K V / 64
numbers per token and head). Then programs of two kernels pass through the heads of a group at one chunk: `carried` adds
dq and dk in fp32 registers, `pairs` adds the gradient of q kᵀ and writes dv; they leave five numbers per token and
head, of which a last kernel makes the gradients of decays. A program has 4 warps, and two share a multiprocessor. Where
chunks and groups are few, heads of a group are split among programs, whose sums are added in order.

At T = 32768, 128 heads × 64, K = 128, G = 1, bf16, in GB and TFLOP, at 4.2 TB/s and 700 TFLOP/s in ms: forward 1.1
(0.26) and 0.24 (0.34); states 3.3 (0.77) and 0.14 (0.20); carried 3.2 (0.77) and 0.27 (0.39); pairs 2.7 (0.64) and 0.14
(0.20).

q, k [T, H, K], v [T, HV, V], g [T, HV] are flat packed streams (`tiles.py`: any stride between tokens), HV = R·H, of N
entries. Operators take named tuples as lists: `DecayInputs`, `Chunks`, `States`. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, float32
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.layout.boundaries import CHUNK as BT
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.segments import SHORTEST
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.runtime.options import DecayInputs, DecayOptions, States
from titan_linear.ops.triton import ssd_kernels as kernels
from titan_linear.ops.triton.chunks import Chunks
from titan_linear.ops.triton.configs import Config, config
from titan_linear.ops.triton.delta_rule import TritonRule, given_states, whole_or_split
from titan_linear.ops.triton.split_documents import SplitDocuments
from titan_linear.ops.triton.tiles import (
    blocks_of,
    chunk_tiles,
    dense_heads,
    empty_gradients,
    empty_states,
    ragged_tiles,
)

BH = 16  # heads of a program on decays
PROGRAMS = 256  # of `scan`, `carried` or `pairs` that fill a GPU, two on a multiprocessor


def _power_of_two(V: int) -> int:
    return max(1 << (V - 1).bit_length(), 16)


def _sliced(kernel: str, k: Tensor, V: int) -> Config:
    """The configuration of a kernel that takes V slice by slice. Halves of slices serve where the last one would
    otherwise be half empty."""
    chosen = config(kernel, k, max(k.shape[2], V), BV=_power_of_two(V))
    BV = chosen["BV"]
    return chosen | {"BV": BV // 2} if BV > 16 and 0 < V % BV <= BV // 2 else chosen


def _constants(k: Tensor, v: Tensor, gates: Tensor) -> dict[str, int]:
    dims = {"R": v.shape[1] // k.shape[1], "K": k.shape[2], "V": v.shape[2], "BT": BT}
    return dims | {"PARTS": gates.shape[2] - 1}


def _fetches(x: Tensor) -> bool:
    """Whether scans read by the copy engine. In float32 two stages of its tiles do not fit."""
    return x.element_size() == 2


def _fetched(x: Tensor, columns: int | None = None) -> Tensor | TensorDescriptor:
    """x [T, heads, dim] as scans read it: a head, or slices of it of so many columns."""
    dim = x.shape[2]
    columns = columns or dim
    return ragged_tiles(x, BT, columns) if _fetches(x) and dim % columns == 0 else x


def _wide(D: Tensor | None, HV: int) -> bool:
    """Whether each channel has a factor of its own."""
    return D is not None and D.numel() > HV


def _empty_gates(g: Tensor, chunk_index: Tensor, parts: int) -> Tensor:
    return g.new_empty(chunk_index.shape[0], g.shape[1], 1 + parts, BT, dtype=float32)


@operator(of_driver=True, prepares="forward")
def ssd_prepare(
    g: Tensor,
    A: Tensor | None,
    dt_bias: Tensor | None,
    chunks: list[Tensor],
    parts: int,
    softplus: bool,
    low: float,
    high: float,
) -> Tensor:
    """-> gates [NT, HV, 1 + parts, BT] fp32: the decay summed in a chunk, in base 2, and Δ. parts: of the sums; with
    two, differences of them are as exact as their terms."""
    where, HV = Chunks(*chunks), g.shape[1]
    g, gates = dense_heads(g), _empty_gates(g, where.chunk_index, parts)
    kernels.prepare_kernel[(len(gates) * blocks_of(HV, BH),)](
        g,
        A,
        dt_bias,
        gates,
        where.cu_seqlens,
        where.chunk_index,
        low,
        high,
        g.stride(0),
        HV,
        BT=BT,
        BH=BH,
        PARTS=parts,
        SOFTPLUS=softplus,
        num_warps=4,
    )
    return gates


@register_fake(ssd_prepare)
def _(g, A, dt_bias, chunks, parts, softplus, low, high):
    return _empty_gates(g, Chunks(*chunks).chunk_index, parts)


def _scores(q: Tensor, k: Tensor, where: Chunks) -> Tensor:
    """q kᵀ of each chunk [NT, H, BT, BT]."""
    (_, H, K), NT = k.shape, where.chunk_index.shape[0]
    scores = k.new_empty(NT, H, BT, BT)
    by_chunk = where.cu_seqlens, where.chunk_index
    of_groups = config("ssd groups", k, K)
    kernels.scores_kernel[(NT * H,)](q, k, scores, *by_chunk, q.stride(0), k.stride(0), H, K=K, BT=BT, **of_groups)
    return scores


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def ssd_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    D: Tensor | None,
    gates: Tensor,
    chunks: list[Tensor],
    initial: list[Tensor | None],
    final_rows: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """-> o [T, HV, V], final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
    where, states = Chunks(*chunks), States(*initial)
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    o, final_state = v.new_empty(v.shape), empty_states(v, final_rows, k.shape[2])
    (_, HV, V), N = v.shape, where.cu_seqlens.shape[0] - 1
    chosen, scores = _sliced("ssd scan", k, V), _scores(q, k, where)
    slices = blocks_of(V, chosen["BV"])
    pieces = _pieces(len(v), N, HV * slices)
    S_ext, M, parts = _before_last_piece(k, v, gates, chunks, pieces)
    kernels.scan_kernel[(N * HV * pieces * slices,)](
        _fetched(q),
        _fetched(k),
        _fetched(v, chosen["BV"]),
        chunk_tiles(scores, BT, BT) if _fetches(k) else scores,
        gates,
        D,
        states.values,
        states.index,
        S_ext,
        M,
        o,
        final_state if final_rows else None,
        where.cu_seqlens,
        where.chunk_offsets,
        scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HV,
        pieces,
        parts,
        WIDE=_wide(D, HV),
        FETCH=_fetches(k),
        **_constants(k, v, gates),
        **chosen,
    )
    return o, final_state


@register_fake(ssd_scan)
def _(q, k, v, D, gates, chunks, initial, final_rows, scale):
    return v.new_empty(v.shape), empty_states(v, final_rows, k.shape[2])


def _pieces(T: int, N: int, programs: int) -> int:
    """Into how many pieces entries are cut for the scan, so that two programs share each multiprocessor: 1, 2, 4 or 8.
    programs: of an entry."""
    pieces = 1
    while 2 * pieces * N * programs <= PROGRAMS and 2 * pieces * N * SHORTEST <= T and pieces < 8:
        pieces *= 2
    return pieces


def _before_last_piece(
    k: Tensor, v: Tensor, gates: Tensor, chunks: list[Tensor], pieces: int
) -> tuple[Tensor | None, Tensor | None, int]:
    """Of each part of an entry before its last piece: its last state from a zero state, and the factor of any other;
    and into how many parts an entry is cut. With two pieces four, to fill the GPU with parts too."""
    if pieces == 1:
        return None, None, 1
    parts = max(pieces, 4)
    rows = parts - parts // pieces
    M = gates.new_empty((Chunks(*chunks).cu_seqlens.shape[0] - 1) * rows, v.shape[1], 1)
    return _boundary(k, v, gates, chunks, None, None, M, 1.0, rows, parts), M, parts


def _boundary(
    x: Tensor,
    y: Tensor,
    gates: Tensor,
    chunks: list[Tensor],
    entries: Tensor | None,
    wanted: Tensor | None,
    M: Tensor | None,
    scale: float,
    rows: int = 1,
    parts: int = 1,
) -> Tensor:
    """The last states of listed entries from zero states, or of the first `rows` of all entries' `parts`."""
    where, x, y = Chunks(*chunks), dense_heads(x), dense_heads(y)
    _, HV, V = y.shape
    F = (where.cu_seqlens.shape[0] - 1) * rows if entries is None else entries.shape[0]
    S_ext, chosen = empty_states(y, F, x.shape[2]), _sliced("ssd pass", x, V)
    kernels.boundary_kernel[(F * HV * blocks_of(V, chosen["BV"]),)](
        _fetched(x),
        _fetched(y, chosen["BV"]),
        gates,
        entries,
        wanted,
        S_ext,
        M,
        where.cu_seqlens,
        where.chunk_offsets,
        scale,
        x.stride(0),
        y.stride(0),
        HV,
        rows,
        parts,
        FETCH=_fetches(x),
        REVERSE=M is None,
        **_constants(x, y, gates),
        **chosen,
    )
    return S_ext


@operator(kept_by=("selective",), cost=costs.over_states, of_driver=True)
def ssd_boundary(
    k: Tensor, v: Tensor, gates: Tensor, chunks: list[Tensor], entries: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """entries [F] int32 -> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M [F, HV, 1], the
    factor of any other; fp32. wanted [F] int32: what is written for each, 0 nothing, 1 S_ext, 2 both; None: both."""
    M = v.new_empty(entries.shape[0], v.shape[1], 1, dtype=float32)
    return _boundary(k, v, gates, chunks, entries, wanted, M, 1.0), M


@register_fake(ssd_boundary)
def _(k, v, gates, chunks, entries, wanted):
    F, HV = entries.shape[0], v.shape[1]
    return empty_states(v, F, k.shape[2]), v.new_empty(F, HV, 1, dtype=float32)


@operator(cost=costs.over_states, of_driver=True)
def ssd_boundary_bwd(
    do: Tensor, q: Tensor, gates: Tensor, chunks: list[Tensor], entries: Tensor, wanted: Tensor | None, scale: float
) -> Tensor:
    """entries [F] int32 -> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last
    state has none. wanted [F] int32: 0 leaves an entry's unwritten; None: all are written."""
    return _boundary(q, do, gates, chunks, entries, wanted, None, scale)


@register_fake(ssd_boundary_bwd)
def _(do, q, gates, chunks, entries, wanted, scale):
    return empty_states(do, entries.shape[0], q.shape[2])


def _splits(NT: int, H: int, R: int) -> int:
    """Among how many programs the heads of a group are split at each chunk: a power of two that divides R."""
    splits = 1
    while splits * NT * H < PROGRAMS and R % (2 * splits) == 0:
        splits *= 2
    return splits


def _room_in_backward(inputs: list[Tensor | None], **_: Any) -> int:
    """Bytes, for each chunk: states and their gradients; in fp32, dq, dk and dE of a group, and a head's `sums` and
    `taken` of each slice of 64 columns."""
    x = DecayInputs(*inputs)
    (T, H, K), (_, HV, V) = x.k.shape, x.v.shape
    states = 2 * HV * K * V // BT * x.v.element_size()
    return T * (states + 4 * H * (2 * K + BT) + 4 * HV * 5 * blocks_of(V, 64))


@operator(cost=costs.over_inputs, of_driver=True, temporary=_room_in_backward)
def ssd_backward(
    do: Tensor,
    inputs: list[Tensor | None],
    tiles: list[Tensor],
    chunks: list[Tensor],
    initial: list[Tensor | None],
    d_final: list[Tensor | None],
    need_d_initial: bool,
    scale: float,
    softplus: bool,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of `DecayInputs` (each dense, in its input's dtype; empty if not given), and of the initial
    states, fp32 in their shape (empty unless needed; rows that belong to no entry stay unwritten)."""
    q, k, v, g, A, D, dt_bias = DecayInputs(*inputs)
    (gates,), where, states, final = tiles, Chunks(*chunks), States(*initial), States(*d_final)
    q, k, v, g, do = (dense_heads(x) for x in (q, k, v, g, do))
    (T, H, K), (_, HV, V) = k.shape, v.shape
    NT, N, R = where.chunk_index.shape[0], where.cu_seqlens.shape[0] - 1, HV // H
    constants, given = _constants(k, v, gates), (*states, *final)
    strides = [x.stride(0) for x in (q, k, v, do)]
    by_chunk = where.cu_seqlens, where.chunk_index

    h, dh = (v.new_empty(NT, HV, K, V) for _ in range(2))
    d_initial = v.new_empty(states.values.shape if need_d_initial else 0, dtype=float32)
    chosen = _sliced("ssd pass", k, V)
    kernels.states_kernel[(2 * N * HV * blocks_of(V, chosen["BV"]),)](
        _fetched(q),
        _fetched(k),
        _fetched(v, chosen["BV"]),
        _fetched(do, chosen["BV"]),
        gates,
        *given,
        h,
        dh,
        d_initial if need_d_initial else None,
        where.cu_seqlens,
        where.chunk_offsets,
        scale,
        *strides,
        HV,
        FETCH=_fetches(k),
        **constants,
        **chosen,
    )

    splits, dv = _splits(NT, H, R), v.new_empty(v.shape)
    dq_parts, dk_parts = (k.new_empty(splits, T, H, K, dtype=float32) for _ in range(2))
    dE, own = gates.new_empty(splits, NT, H, BT, BT), gates.new_empty(NT, H, BT)
    of_carried, of_pairs = (_sliced(f"ssd {what}", k, V) for what in ("carried", "pairs"))
    BV, grid = of_carried["BV"], (NT * H * splits,)
    slices, slices_of_pairs = blocks_of(V, BV), blocks_of(V, of_pairs["BV"])
    taken, products = (gates.new_empty(NT, HV, slices, size) for size in (BT, BV))
    sums = gates.new_empty(NT, HV, slices_of_pairs, 4, BT)
    streams, common = (v, do, gates), (*by_chunk, scale, *strides, T, HV, NT, R // splits)
    kernels.carried_kernel[grid](
        q, *streams, h, dh, dq_parts, dk_parts, taken, products, *common, **constants, **of_carried
    )
    wide = _wide(D, HV)
    dD = gates.new_zeros(NT, HV * V) if wide else None
    kernels.pairs_kernel[grid](
        q, k, *streams, D, dh, dv, dE, own, sums, dD, *common, WIDE=wide, **constants, **of_pairs
    )

    dq, dk = q.new_empty(T, H, K), k.new_empty(T, H, K)
    of_groups = {"K": K, "BT": BT, **config("ssd groups", k, K)}
    kernels.groups_kernel[(NT * H,)](
        q,
        k,
        dE,
        dq_parts,
        dk_parts,
        dq,
        dk,
        *by_chunk,
        q.stride(0),
        k.stride(0),
        T,
        H,
        NT,
        splits,
        **of_groups,
    )

    dg = g.new_empty(T, HV)
    d_heads = gates.new_empty(3, NT, HV)
    kernels.gates_kernel[(NT * blocks_of(HV, BH),)](
        g,
        A,
        dt_bias,
        gates,
        taken,
        products,
        sums,
        own,
        *given,
        dg,
        d_heads,
        *by_chunk,
        low,
        high,
        g.stride(0),
        HV,
        NT,
        **constants,
        BV=BV,
        BH=BH,
        TAKEN=slices,
        SLICES=slices_of_pairs,
        SOFTPLUS=softplus,
        num_warps=4,
    )
    dA, d_bias, d_skip = d_heads.sum(1)
    parts = (A, dA), (D, d_skip if dD is None else dD.sum(0)), (dt_bias, d_bias)
    of_heads = (q.new_empty(0) if x is None else part.to(x.dtype, copy=True) for x, part in parts)
    return dq, dk, dv, dg, *of_heads, d_initial


register_fake(ssd_backward)(empty_gradients)


class TritonDecay(TritonRule):
    kept_tiles = ()
    backward_operator = staticmethod(ssd_backward)

    def __init__(self, inputs: DecayInputs, options: DecayOptions, chunks: Chunks, kept: Sequence[Tensor]):
        self.inputs, self.chunks = inputs, list(chunks)
        low, high = options.dt_limit
        steps = {"softplus": options.dt_softplus, "low": low, "high": high}
        self.scale, self.numbers = options.scale, {"scale": options.scale, **steps}
        parts = 2 if inputs.q.dtype == float32 else 1
        self.tiles = [ssd_prepare(inputs.g, inputs.A, inputs.dt_bias, self.chunks, parts, **steps)]

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        x, rows = self.inputs, self._entries(need_final)
        return ssd_scan(x.q, x.k, x.v, x.D, *self.tiles, self.chunks, given_states(initial), rows, self.scale)

    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ssd_boundary(self.inputs.k, self.inputs.v, *self.tiles, self.chunks, entries, wanted)

    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return ssd_boundary_bwd(do, self.inputs.q, *self.tiles, self.chunks, entries, wanted, self.scale)


def triton_decay(
    inputs: DecayInputs,
    options: DecayOptions,
    boundaries: Boundaries,
    differentiable: bool,
    kept: Sequence[Tensor] = (),
) -> TritonDecay | SplitDocuments:
    """The kernels for these inputs; long documents are cut into segments where that fills the GPU. `differentiable`
    changes nothing here."""
    return whole_or_split(TritonDecay, inputs, options, boundaries, kept)
