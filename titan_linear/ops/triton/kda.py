"""Kimi Delta Attention in Triton: launches of its kernels.

The inputs, Aqk and Gn (2 × 64 numbers of the compute dtype per token and head) are kept
between forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs
from titan_linear.ops.triton import kda_hopper
from titan_linear.ops.triton import kda_kernels as kernels
from titan_linear.ops.triton.configs import Config, config, widest_slice
from titan_linear.ops.triton.solve import solve_kernel
from titan_linear.ops.triton.stages import Given, Stages
from titan_linear.ops.triton.tiles import (
    Pair,
    chunk_tiles,
    gradient_like,
    ragged_tiles,
    rows,
    sum_groups,
)


class KDAScalars(NamedTuple):
    scale: float
    lower_bound: float
    # g is the log decay (0), or the raw input of the softplus gate (1) or the bounded gate
    # (2)
    gate: float
    safe_gate: float
    # 0: beta is β; otherwise beta holds logits, and β is this times their sigmoid
    beta_range: float | None


class KDATiles(NamedTuple):
    """Tiles of NT chunks with C = 64 tokens each. The letters are defined in kda_kernels."""

    qg: Tensor  # [NT, HV, K, C] scale·q·2^Γ
    kn: Tensor  # [NT, HV, K, C] −k·2^Γ
    kg: Tensor  # [NT, HV, K, C] k·2^(γ−Γ)
    decay: Tensor  # [NT, HV, K] fp32, 2^γ
    b: Tensor  # [NT, HV, C] fp32, β
    Aqk: Tensor | None  # [NT, HV, C, C]; None, like Gn, when recomputed for backward
    Gn: Tensor | None  # [NT, HV, C, C]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix operands. fp16 inputs use bf16, because fp16's exponent
    cannot hold the factors of fast gates."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def _constants(tiles: KDATiles, kernel: str, V: int, BV: int) -> Config:
    """Return constants of a kernel that loops over an entry's chunks. BV: upper bound on
    the columns of a slice."""
    _, HV, K, _ = tiles.qg.shape
    return {"HV": HV, "K": K, "V": V, **config(kernel, tiles.qg, K, BV=BV)}


def _of_gates(x: Inputs, n: KDAScalars) -> Config:
    """Return constants of a kernel that reads a chunk's gates."""
    _, H, K = x.q.shape
    return {"H": H, "HV": x.v.shape[1], "K": K, "GATE": int(n.gate)}


def _passes(safe_gate: float, safe: str, any_gate: str) -> list[tuple[str, bool]]:
    """Return the kernels to launch, and whether each relies on bounded gates; see
    `is_fast`."""
    return [(safe, True)] if safe_gate else [(safe, True), (any_gate, False)]


class KDAStages(Stages):
    name = "kda"
    inputs = Inputs
    prepared = Inputs._fields
    tiles = KDATiles
    numbers = KDAScalars
    kept = "Aqk", "Gn"
    again = "qg", "kn", "kg", "decay", "b"

    def numbers_of(self, x: Inputs, options: DeltaRuleOptions) -> KDAScalars:
        gate = 0
        if options.gate_in_kernel:
            gate = 1 if options.lower_bound is None else 2
        return KDAScalars(
            options.scale, options.lower_bound, gate, options.safe_gate, options.beta_range
        )

    def any_gate(self, numbers: KDAScalars) -> bool:
        return not numbers.safe_gate

    def tile_shapes(self, x: Inputs, numbers: KDAScalars) -> Any:
        _, HV, K = x.g.shape
        C = CHUNK
        dtype = compute_dtype(x.q.dtype)
        keys = dtype, HV, K, C
        matrix = dtype, HV, C, C
        return KDATiles(
            qg=keys,
            kn=keys,
            kg=keys,
            decay=(torch.float32, HV, K),
            b=(torch.float32, HV, C),
            Aqk=matrix,
            Gn=matrix,
        )

    def launch_prepare(self, given: Given, tiles: KDATiles) -> None:
        x = given.x
        n = given.numbers
        NT, HV, K, _ = tiles.qg.shape
        matrices = given.tiles.Aqk is None
        # Aqk and Gn, if they were kept, are not computed again.
        if not matrices:
            tiles = tiles._replace(Aqk=None, Gn=None)
        if kda_hopper.prepares(x, n.safe_gate, n.gate):
            return kda_hopper.launch_prepare(given, tiles)
        # Without safe_gate a second kernel recomputes the chunks that the first one flags
        # in `fast`.
        fast = x.q.new_empty(NT, HV, dtype=torch.int32) if matrices and not n.safe_gate else None
        kernel = "kda prepare" if matrices else "kda recompute"
        passes = _passes(n.safe_gate, f"{kernel} safe", kernel)
        streams = *map(rows, (x.q, x.k, x.g, x.beta)), x.A_log, x.dt_bias
        constants = _of_gates(x, n) | {"BETA_RANGE": n.beta_range or None, "MATRICES": matrices}
        for kernel, safe in passes if matrices else passes[-1:]:
            chosen = config(kernel, x.q, K, BK=K)
            slices = 1 if matrices else K // chosen["BK"]
            kernels.prepare_kernel[NT * HV * slices,](
                *streams, tiles, fast, given.chunks, n.scale, n.lower_bound, SAFE=safe, **constants, **chosen
            )  # fmt: skip
        if matrices:
            solve_kernel[NT * HV,](
                tiles.b, tiles.Gn, STRIDE_B=CHUNK, SCALED=False, **config("solve", x.q, K)
            )

    def launch_scan(self, given: Given, **outputs: Tensor | None) -> None:
        tiles = given.tiles
        V = given.x.v.shape[2]
        K = tiles.qg.shape[2] if "M" in outputs else 0
        constants = _constants(tiles, "kda scan", V, min(K or V, widest_slice(V)))
        programs = given.listed_entries * constants["HV"] * ((V + K) // constants["BV"])
        kernels.scan_kernel[programs,](
            rows(given.x.v),
            tiles,
            given.initial,
            given.listed,
            given.chunks,
            **outputs,
            **constants,
        )

    def launch_reverse(self, given: Given, d_initial: Pair, **outputs: Tensor) -> None:
        tiles = given.tiles
        V = given.do.shape[2]
        constants = _constants(tiles, "kda reverse", V, widest_slice(V))
        programs = given.listed_entries * constants["HV"] * (V // constants["BV"])
        kernels.backward_scans_kernel[2 * programs if outputs else programs,](
            rows(given.do), rows(given.x.v), tiles, given.initial, given.d_final, d_initial, given.listed,
            given.chunks, **outputs, **constants,
        )  # fmt: skip

    def launch_backward(self, given: Given, d_initial: Tensor | None) -> tuple[Tensor | None, ...]:
        x = given.x
        tiles = given.tiles
        V = given.do.shape[2]
        NT, HV, K, C = tiles.qg.shape
        # States at the chunk boundaries, the chunks' writes, and the gradients of both.
        h, dh = (tiles.qg.new_empty(NT, HV, V, K) for _ in range(2))
        r, y = (tiles.qg.new_empty(NT, HV, V, C) for _ in range(2))
        self.launch_reverse(given, (d_initial, given.initial[1]), h=h, dh=dh, r=r, y=y)
        # dv, dβ, and the gradients of the chunks' two matrices.
        dv = x.v.new_empty(x.v.shape)
        dbeta = x.beta.new_empty(x.beta.shape)
        dA, dK = (tiles.qg.new_empty(NT, HV, C, C) for _ in range(2))
        constants = _constants(tiles, "kda matrix", V, widest_slice(V))
        constants["BETA_RANGE"] = given.numbers.beta_range or None
        kernels.matrix_kernel[NT * HV,](
            rows(given.do), tiles.b, r, y, dA, dK, dv, dbeta, given.chunks, given.numbers.scale, **constants
        )  # fmt: skip
        dq, dk, dg, dA_log, ddt_bias = _gradients(given, h, dh, r, y, dA, dK)
        return dq, dk, dv, dg, dbeta, dA_log, ddt_bias

    def room(self, x: Inputs) -> int:
        """Return the bytes of each chunk's states, their gradients, r, y and the gradients
        of two matrices, and of dq and dk per value head where value heads share keys."""
        T, HV, V = x.v.shape
        _, H, K = x.k.shape
        shared = 2 * K if HV > H else 0
        return T * HV * (2 * K * V // CHUNK + 2 * V + 2 * CHUNK + shared) * x.v.element_size()


KDA = KDAStages()


def _gradients(
    given: Given, h: Tensor, dh: Tensor, r: Tensor, y: Tensor, dA: Tensor, dK: Tensor
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dg, dA_log and ddt_bias."""
    x = given.x
    tiles = given.tiles
    n = given.numbers
    T, H, K = x.q.shape
    NT, HV, V, _ = h.shape
    C = CHUNK
    # With grouped value heads, each value head writes its own dq and dk in fp32. They are
    # summed below.
    dq, dk = (
        x.q.new_empty(T, HV, K, dtype=x.q.dtype if HV == H else torch.float32) for _ in range(2)
    )
    dg = x.g.new_empty(x.g.shape)
    # Partial sums of the gradients of dt_bias and A_log, one row per chunk.
    dbias_part, dA_part = parts = x.g.new_empty(2, NT if n.gate else 0, HV * K, dtype=torch.float32)
    limits = {"BK": K, "BV": widest_slice(V)}
    # The first kernel flags blocks of BF channels with gates too fast for it.
    BF = config("kda gradient safe", x.q, K, **limits)["BK"]
    fast = None if n.safe_gate else x.g.new_empty(NT, HV, K // BF, dtype=torch.int32)
    constants = _of_gates(x, n) | {"V": V, "BF": BF}
    dA_sums = None if x.A_log is None else dA_part
    dbias_sums = None if x.dt_bias is None else dbias_part
    passes = _passes(n.safe_gate, "kda gradient safe", "kda gradient")
    if kda_hopper.fits(x):
        kda_hopper.launch_gradient(
            given, r=r, y=y, h=h, dh=dh, dA=dA, dK=dK, dq=dq, dk=dk, dg=dg, dA_part=dA_sums,
            dbias_part=dbias_sums, fast=fast,
        )  # fmt: skip
        passes = passes[1:]
    for kernel, safe in passes:
        chosen = config(kernel, x.q, K, **limits)
        BK = chosen["BK"]
        BV = chosen["BV"]
        assert BF % BK == 0, "a program reads one flag"
        kernels.gradient_kernel[NT * HV * (K // BK),](
            rows(x.q), rows(x.k), rows(x.g), ragged_tiles(given.do, BV), chunk_tiles(r, C, BV), chunk_tiles(y, C, BV),
            chunk_tiles(h, BK, BV), chunk_tiles(dh, BK, BV), x.A_log, x.dt_bias, tiles.b, dA, dK, dq, dk, dg,
            dA_sums, dbias_sums, fast, given.chunks, n.scale, n.lower_bound, SAFE=safe, **constants, **chosen,
        )  # fmt: skip
    # Add up the value heads' shares, and the chunks' partial sums.
    if HV != H:
        dq = sum_groups(dq, x.q)
        dk = sum_groups(dk, x.k)
    ddt_bias, dA_log = parts.sum(1)
    dA_log = gradient_like(x.A_log, dA_log.view(HV, K).sum(1))
    return dq, dk, dg, dA_log, gradient_like(x.dt_bias, ddt_bias)
