"""Launches of the Triton kernels of chunked recurrences whose state only decays, by one
factor per head (SSD, Simple GLA).

Chunks have 64 tokens. A program of the scan holds the state [K, 64 columns] of one head in
registers from a document's first chunk to its last, and writes only o. Per token and head
it moves 2 V numbers. q, k and q kᵀ, which the heads of a group share, come from L2. A
program waits for most of a chunk's time, so two share a multiprocessor. Where heads are too
few for that, documents are cut into pieces, and the states of all parts before the last
piece are computed first, in a separate launch. (Segments, `split_documents.py`, would cut
backward too, which has twice as many programs, and would pay for the segments' gradients.)

For the gradients, two concurrent scans write the state before each chunk and the gradient
after it (2 K V / 64 numbers per token and head). Programs of two kernels then pass through
the heads of a group at one chunk. `pairs` accumulates the gradient of q kᵀ in registers and
writes dv. `carried` accumulates 64 columns of dq and dk, from that gradient and from the
state. A last kernel computes the gradients of decays from the sums that these kernels leave
per token and head. A program has 4 warps (8 would add up sums through shared memory), and
two share a multiprocessor. Where chunks and groups are few, the heads of a group are split
among programs, whose sums are added in order.

Traffic and products at T = 32768, 128 heads × 64, K = 128, G = 1, bf16, in GB and TFLOP
(and in ms at 4.2 TB/s and 700 TFLOP/s): forward 1.1 (0.26) and 0.24 (0.34); states 3.3
(0.77) and 0.14 (0.20); pairs 2.7 (0.64) and 0.14 (0.20); carried 3.2 (0.77), with v and do
read twice from L2, and 0.20 (0.29).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, float32
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.layout.boundaries import CHUNK as BT
from titan_linear.ops.layout.segments import SHORTEST
from titan_linear.ops.runtime.options import DecayInputs, DecayOptions
from titan_linear.ops.triton import ssd_hopper
from titan_linear.ops.triton import ssd_kernels as kernels
from titan_linear.ops.triton.chunks import ALL
from titan_linear.ops.triton.configs import Config, config
from titan_linear.ops.triton.stages import Given, Stages
from titan_linear.ops.triton.tiles import (
    Pair,
    blocks_of,
    chunk_tiles,
    empty_states,
    ragged_tiles,
    rows,
)

BH = 16  # heads per program of the kernels of decays
PROGRAMS = 256  # programs of `scan`, `carried` or `pairs` that fill a GPU, two per multiprocessor


class SSDScalars(NamedTuple):
    scale: float
    softplus: float
    low: float
    high: float
    parts: float  # numbers per sum of decays; with two, differences are as exact as their terms


class SSDTiles(NamedTuple):
    gates: Tensor  # [NT, HV, 1 + parts, BT] fp32: the decay summed in a chunk, in base 2, and Δ


def _sliced(kernel: str, k: Tensor, v: Tensor, gates: Tensor) -> Config:
    """Return constants of a kernel that takes V slice by slice. Slices are halved where the
    last one would otherwise be at most half full."""
    _, H, K = k.shape
    _, HV, V = v.shape
    chosen = config(kernel, k, max(K, V), BK=K, BV=max(1 << (V - 1).bit_length(), 16))
    BV = chosen["BV"]
    if BV > 16 and 0 < V % BV <= BV // 2:
        chosen["BV"] = BV // 2
    return {"R": HV // H, "K": K, "V": V, "PARTS": gates.shape[2] - 1} | chosen


def _of_decays(n: SSDScalars, parts: int) -> Config:
    """Return constants of a kernel that computes a chunk's decays or their gradients."""
    return {"BH": BH, "PARTS": parts - 1, "SOFTPLUS": bool(n.softplus), "num_warps": 4}


def _fetches(x: Tensor) -> bool:
    """Return whether the copy engine reads tiles. In float32, two stages of tiles do not
    fit."""
    return x.element_size() == 2


def _fetched(x: Tensor, columns: int | None = None) -> tuple[Tensor, int] | TensorDescriptor:
    """Return x [T, heads, dim] as scans read it: complete heads, or slices of `columns`
    columns."""
    dim = x.shape[2]
    columns = columns or dim
    return ragged_tiles(x, columns) if _fetches(x) and dim % columns == 0 else rows(x)


def _tiles(v: Tensor, do: Tensor, BV: int, BK: int, *states: Tensor) -> tuple[Any, ...]:
    """Return v, do and the chunks' states [NT, HV, K, V] as the gradient kernels read them."""
    blocks = (chunk_tiles(h, BV, BK) if _fetches(v) else h for h in states)
    return _fetched(v, BV), _fetched(do, BV), *blocks


def _wide(D: Tensor | None, HV: int) -> bool:
    """Return whether each channel has its own factor."""
    return D is not None and D.numel() > HV


def _scores(q: Tensor, k: Tensor, NT: int, chunks: tuple[Tensor, ...]) -> Tensor:
    """Compute q kᵀ of each chunk, [NT, H, BT, BT]."""
    _, H, K = k.shape
    scores = k.new_empty(NT, H, BT, BT)
    kernels.scores_kernel[NT * H,](
        rows(q), rows(k), scores, chunks, H, K=K, **config("ssd groups", k, K)
    )
    return scores


def _pieces(T: int, N: int, programs: int) -> int:
    """Return the number of pieces that the scan cuts each entry into, so that two programs
    share each multiprocessor: 1, 2, 4 or 8.

    programs: number of programs per entry.
    """
    pieces = 1
    while 2 * pieces * N * programs <= PROGRAMS and 2 * pieces * N * SHORTEST <= T and pieces < 8:
        pieces *= 2
    return pieces


def _before_last_piece(given: Given, pieces: int) -> tuple[Tensor | None, Tensor | None, int]:
    """Compute, for each part of an entry before its last piece, the last state from a zero
    state and the factor of an initial state.

    Also returns the number of parts per entry, twice the number of pieces, so that the
    parts fill the GPU too.
    """
    if pieces == 1:
        return None, None, 1
    x = given.x
    parts = 2 * pieces
    n = parts - 2
    S_ext = empty_states(x.v, given.all_entries * n, x.k.shape[2])
    M = S_ext.new_empty(*S_ext.shape[:2], 1)
    _launch_boundary(given, x.k, x.v, S_ext, M, 1.0, n, parts)
    return S_ext, M, parts


def _launch_boundary(
    given: Given,
    x: Tensor,
    y: Tensor,
    S_ext: Tensor,
    M: Tensor | None,
    scale: float,
    n: int = 1,
    parts: int = 1,
) -> None:
    """Compute the last states of the listed entries from zero states, or of the first n of
    the `parts` of all entries."""
    F, HV, _, V = S_ext.shape
    gates = given.tiles.gates
    chosen = _sliced("ssd boundary", x, y, gates) | {"REVERSE": M is None}
    tiles = _fetched(x), _fetched(y, chosen["BV"])
    grid = (F * HV * blocks_of(V, chosen["BV"]),)
    kernels.boundary_kernel[grid](
        *tiles, gates, S_ext, M, given.chunks, given.listed, scale, HV, n, parts, **chosen
    )


def _splits(NT: int, H: int, R: int) -> int:
    """Return the number of programs among which the heads of a group are split at each
    chunk: a power of two that divides R."""
    splits = 1
    while splits * NT * H < PROGRAMS and R % (2 * splits) == 0:
        splits *= 2
    return splits


class SSDStages(Stages):
    name = "ssd"
    inputs = DecayInputs
    prepared = "g", "A", "dt_bias"
    tiles = SSDTiles
    numbers = SSDScalars
    kept = ()

    def numbers_of(self, x: DecayInputs, options: DecayOptions) -> SSDScalars:
        low, high = options.dt_limit
        parts = 2 if x.q.dtype == float32 else 1
        return SSDScalars(options.scale, options.dt_softplus, low, high, parts)

    def tile_shapes(self, x: DecayInputs, numbers: SSDScalars) -> Any:
        return SSDTiles(gates=(float32, x.g.shape[1], 1 + int(numbers.parts), BT))

    def launch_prepare(self, given: Given, tiles: SSDTiles) -> None:
        x = given.x
        gates = tiles.gates
        n = given.numbers
        NT, HV, parts, _ = gates.shape
        constants = _of_decays(n, parts)
        kernels.prepare_kernel[NT * blocks_of(HV, BH),](
            rows(x.g), x.A, x.dt_bias, gates, given.chunks, n.low, n.high, HV, **constants
        )

    def launch_scan(self, given: Given, **outputs: Tensor | None) -> None:
        if "M" in outputs:
            _launch_boundary(given, given.x.k, given.x.v, outputs["final_state"], outputs["M"], 1.0)
        else:
            self._launch_outputs(given, **outputs)

    def launch_reverse(self, given: Given, d_initial: Pair, **outputs: Tensor) -> None:
        dS_ext, _ = d_initial
        _launch_boundary(given, given.x.q, given.do, dS_ext, None, given.numbers.scale)

    def _launch_outputs(self, given: Given, o: Tensor, final_state: Tensor | None) -> None:
        x = given.x
        gates = given.tiles.gates
        chunks = given.chunks
        T, HV, V = x.v.shape
        N = given.all_entries
        chosen = _sliced("ssd scan", x.k, x.v, gates)
        scores = _scores(x.q, x.k, len(gates), chunks)
        slices = blocks_of(V, chosen["BV"])
        pieces = _pieces(T, N, HV * slices)
        S_ext, M, parts = _before_last_piece(given, pieces)
        # The Hopper kernel takes the same arguments in the same order.
        programs = N * HV * pieces
        R = chosen.pop("R")
        more = (
            gates, x.D, given.initial, S_ext, M, final_state, chunks, ALL, given.numbers.scale, HV, R, pieces, parts
        )  # fmt: skip
        if ssd_hopper.fits(x):
            return ssd_hopper.launch_scan(x, scores, o, programs, *more)
        scores = chunk_tiles(scores) if _fetches(x.k) else scores
        tiles = _fetched(x.q), _fetched(x.k), _fetched(x.v, chosen["BV"]), scores
        kernels.scan_kernel[programs * slices,](*tiles, o, *more, WIDE=_wide(x.D, HV), **chosen)

    def transition(self, K: int) -> tuple[int, ...]:
        return (1,)

    def launch_backward(self, given: Given, d_initial: Tensor | None) -> tuple[Tensor | None, ...]:
        x = given.x
        h, dh = _states(given, d_initial)
        chunk = _chunk_gradients(given, h, dh)
        # Gradients of the heads' parameters, and dq and dk summed over splits.
        dg, dA, d_bias, d_skip = _gate_gradients(given, chunk)
        d_skip = d_skip if chunk.dD is None else chunk.dD.sum(0)
        pairs = (x.A, dA), (x.D, d_skip), (x.dt_bias, d_bias)
        of_heads = (None if p is None else d.to(p.dtype, copy=True) for p, d in pairs)
        of_groups = (d[0] if len(d) == 1 else d.sum(0).to(x.k.dtype) for d in (chunk.dq, chunk.dk))
        return *of_groups, chunk.dv, dg, *of_heads

    def room(self, x: DecayInputs) -> int:
        """Return the bytes of each chunk's states, their gradients and a group's dE; and,
        in fp32, of a head's `sums`, `passed` and `products` of each slice of columns."""
        T, H, K = x.k.shape
        _, HV, V = x.v.shape
        size = x.v.element_size()
        keys = blocks_of(K, 64)
        slices = blocks_of(V, 128 // size)
        chunk = 2 * HV * K * V // BT + H * BT
        return T * (chunk * size + 4 * HV * (slices * (3 + 2 * keys) + keys * V // BT))


SSD = SSDStages()


def _states(given: Given, d_initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the state before each chunk and the gradient of the state after it, both
    [NT, HV, K, V]."""
    x = given.x
    gates = given.tiles.gates
    NT, HV, _, _ = gates.shape
    K = x.k.shape[2]
    V = x.v.shape[2]
    h, dh = (x.v.new_empty(NT, HV, K, V) for _ in range(2))
    chosen = _sliced("ssd states", x.k, x.v, gates)
    BV = chosen["BV"]
    kernels.states_kernel[2 * given.all_entries * HV * blocks_of(V, BV),](
        _fetched(x.q), _fetched(x.k), _fetched(x.v, BV), _fetched(given.do, BV), gates, given.initial, given.d_final,
        h, dh, d_initial, given.chunks, ALL, given.numbers.scale, HV, **chosen,
    )  # fmt: skip
    return h, dh


class ChunkGradients(NamedTuple):
    """Gradients and sums per chunk and head, or per chunk and one of `splits` parts of a
    group's heads."""

    dv: Tensor  # [T, HV, V]
    dE: Tensor  # [NT, H, splits, BT, BT], E transposed
    own: Tensor  # [NT, H, BT] fp32, <q, k> of each token
    sums: Tensor  # [NT, HV, slices, 3, BT] fp32
    dD: Tensor | None  # [NT, HV·V] fp32, if each channel has its own factor
    dq: Tensor  # [splits, T, H, K], like dk in fp32 if splits > 1
    dk: Tensor
    passed: Tensor  # [NT, HV, slices, 2, BT] fp32
    products: Tensor  # [NT, HV, slices, BV] fp32: columns of S times columns of dS'


def _chunk_gradients(given: Given, h: Tensor, dh: Tensor) -> ChunkGradients:
    x = given.x
    gates = given.tiles.gates
    do = given.do
    T, H, K = x.k.shape
    NT, HV, _, V = h.shape
    # Launch constants, and how heads and columns are divided among programs.
    of_pairs, of_carried = (
        _sliced(f"ssd {kernel}", x.k, x.v, gates) for kernel in ("pairs", "carried")
    )
    R = of_carried["R"]
    BK = of_carried["BK"]
    BV = of_carried["BV"]
    wide = _wide(x.D, HV)
    splits = _splits(NT, H, R)
    slices = blocks_of(V, BV) * (K // BK)
    scale = given.numbers.scale
    # Splits are summed later, so they stay in fp32.
    sums = x.k if splits == 1 else gates
    grads = ChunkGradients(
        dv=x.v.new_empty(x.v.shape),
        dE=x.k.new_empty(NT, H, splits, BT, BT),
        own=gates.new_empty(NT, H, BT),
        sums=gates.new_empty(NT, HV, blocks_of(V, of_pairs["BV"]), 3, BT),
        dD=gates.new_zeros(NT, HV * V) if wide else None,
        dq=sums.new_empty(splits, T, H, K),
        dk=sums.new_empty(splits, T, H, K),
        passed=gates.new_empty(NT, HV, slices, 2, BT),
        products=gates.new_empty(NT, HV, slices, BV),
    )
    programs = NT * H * splits
    heads = R // splits
    # dv and dE come from pairs of tokens; then dq and dk from dE and the states.
    tiles = _tiles(x.v, do, of_pairs["BV"], K, dh)
    kernels.pairs_kernel[programs,](
        rows(x.q), rows(x.k), *tiles, gates, x.D, grads.dv, grads.dE, grads.own, grads.sums, grads.dD, given.chunks,
        scale, HV, heads, WIDE=wide, **of_pairs,
    )  # fmt: skip
    tiles = _tiles(x.v, do, BV, BK, h, dh)
    kernels.carried_kernel[programs * (K // BK),](
        rows(x.q), rows(x.k), *tiles, gates, grads.dE, grads.dq, grads.dk, grads.passed, grads.products, given.chunks,
        scale, T, HV, heads, **of_carried,
    )  # fmt: skip
    return grads


def _gate_gradients(given: Given, chunk: ChunkGradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dg, and the heads' gradients of A, dt_bias and D, summed over chunks."""
    x = given.x
    gates = given.tiles.gates
    n = given.numbers
    NT, HV, parts, _ = gates.shape
    _, H, K = x.k.shape
    V = x.v.shape[2]
    dg = x.g.new_empty(x.g.shape)
    d_heads = gates.new_empty(3, NT, HV)
    # The kernel adds up the slices that the two kernels before it wrote.
    slices = {
        "BV": chunk.products.shape[3],
        "PASSED": chunk.passed.shape[2],
        "SLICES": chunk.sums.shape[2],
    }
    constants = {"R": HV // H, "K": K, "V": V} | slices | _of_decays(n, parts)
    kernels.gates_kernel[NT * blocks_of(HV, BH),](
        rows(x.g), x.A, x.dt_bias, gates, chunk.passed, chunk.products, chunk.sums, chunk.own, given.initial,
        given.d_final, dg, d_heads, given.chunks, n.low, n.high, HV, NT, **constants,
    )  # fmt: skip
    return dg, *d_heads.sum(1)
