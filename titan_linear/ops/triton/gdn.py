"""The chunked gated delta rule (GDN) in Triton: launches of its kernels.

The inputs and the tiles (2 × 64 numbers of the inputs' dtype and two of fp32 per token and
head) are kept between forward and backward.

q, k [T, H, K], v [T, HV, V], g, beta [T, HV], HV = R·H. With A_log [HV], g is raw and the
gate is -exp(A_log) softplus(g + dt_bias).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK as BT
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs
from titan_linear.ops.triton import gdn_hopper
from titan_linear.ops.triton import gdn_kernels as kernels
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


class GDNScalars(NamedTuple):
    scale: float
    # 0: beta is β; otherwise beta holds logits, and β is this times their sigmoid
    beta_range: float | None


class GDNTiles(NamedTuple):
    """Tiles of NT chunks with BT = 64 tokens each. The letters are defined in gdn_kernels."""

    C: Tensor  # [NT, HV, BT, BT]
    A: Tensor  # [NT, HV, BT, BT]
    gates: Tensor  # [NT, HV, 2, BT] fp32: G in base 2, β; past an entry's end, the last G and zero


def _sliced(kernel: str, k: Tensor, HV: int, V: int) -> Config:
    """Return constants of a kernel that holds all K rows of a state and takes its V columns
    slice by slice."""
    H, K = k.shape[1:]
    return {"R": HV // H, "K": K, "V": V} | config(kernel, k, K, BV=min(K, widest_slice(V)))


class GDNStages(Stages):
    name = "gdn"
    inputs = Inputs
    prepared = Inputs._fields
    tiles = GDNTiles
    numbers = GDNScalars
    kept = GDNTiles._fields

    def numbers_of(self, x: Inputs, options: DeltaRuleOptions) -> GDNScalars:
        return GDNScalars(options.scale, options.beta_range)

    def tile_shapes(self, x: Inputs, numbers: GDNScalars) -> Any:
        matrix = x.k.dtype, x.g.shape[1], BT, BT
        return GDNTiles(C=matrix, A=matrix, gates=(torch.float32, x.g.shape[1], 2, BT))

    def launch_prepare(self, given: Given, tiles: GDNTiles) -> None:
        x = given.x
        numbers = given.numbers
        if gdn_hopper.prepares(x.k):
            return gdn_hopper.launch_prepare(given, tiles)
        _, H, K = x.k.shape
        NT, HV, _, _ = tiles.C.shape
        streams = *map(rows, (x.q, x.k, x.g, x.beta)), x.A_log, x.dt_bias
        constants = {"R": HV // H, "K": K, "BETA_RANGE": numbers.beta_range or None} | config(
            "gdn prepare", x.k, K
        )
        kernels.prepare_kernel[NT * HV,](
            *streams, tiles, given.chunks, numbers.scale, HV, **constants
        )
        # Solve the chunks' triangular systems in place, from N to C.
        beta = tiles.gates[:, :, 1]
        solve_kernel[NT * HV,](
            beta, tiles.C, STRIDE_B=2 * BT, SCALED=True, **config("solve", x.k, K)
        )

    def launch_scan(self, given: Given, **outputs: Any) -> None:
        x = given.x
        tiles = given.tiles
        _, HV, V = x.v.shape
        K = x.k.shape[2]
        if "M" not in outputs and gdn_hopper.fits(x.k, V):
            return gdn_hopper.launch_scan(given, **outputs)
        kernel = "gdn boundary" if "M" in outputs else "gdn states"
        if "o" in outputs:
            kernel = "gdn scan"
            outputs |= {"q_desc": ragged_tiles(x.q, K), "A_desc": chunk_tiles(tiles.A)}
        chosen = _sliced(kernel, x.k, HV, V)
        # Slices of the transition's columns follow the slices of V.
        columns = V + K if "M" in outputs else V
        BV = chosen["BV"]
        programs = given.listed_entries * HV * (columns // BV)
        kernels.scan_kernel[programs,](
            ragged_tiles(x.k, K), ragged_tiles(x.v, BV), chunk_tiles(tiles.C), tiles.gates, given.initial,
            given.listed, given.chunks, given.numbers.scale, HV, **outputs, **chosen,
        )  # fmt: skip

    def launch_reverse(self, given: Given, d_initial: Pair, **outputs: Tensor) -> None:
        x = given.x
        tiles = given.tiles
        _, HV, V = given.do.shape
        K = x.k.shape[2]
        if outputs and gdn_hopper.fits(x.k, V):
            return gdn_hopper.launch_reverse(given, d_initial, **outputs)
        # Scan in Triton, slice by slice of V.
        chosen = _sliced("gdn reverse" if outputs else "gdn boundary", x.k, HV, V)
        programs = given.listed_entries * HV * (V // chosen["BV"])
        kernels.reverse_kernel[programs,](
            ragged_tiles(x.q, K), ragged_tiles(x.k, K), ragged_tiles(given.do, chosen["BV"]), chunk_tiles(tiles.C),
            chunk_tiles(tiles.A), tiles.gates, given.d_final, d_initial, given.listed, given.chunks,
            given.numbers.scale, HV, **outputs, **chosen,
        )  # fmt: skip

    def launch_backward(self, given: Given, d_initial: Tensor | None) -> tuple[Tensor | None, ...]:
        x = given.x
        NT, HV, _, _ = given.tiles.C.shape
        _, _, K = x.k.shape
        V = x.v.shape[2]
        h, dh = (x.k.new_empty(NT, HV, K, V) for _ in range(2))
        y, dv = (x.v.new_empty(x.v.shape) for _ in range(2))
        # Recompute the states, then scan their gradients in reverse.
        self.launch_scan(given, h=h, y=y)
        self.launch_reverse(given, (d_initial, given.initial[1]), dh=dh, dv=dv)
        dq, dk, dg, dbeta, *of_heads = _gradients(given, h, dh, y, dv)
        return dq, dk, dv, dg, dbeta, *of_heads

    def room(self, x: Inputs) -> int:
        """Return the bytes of each chunk's states, their gradients and y, and of dq and dk
        per value head where value heads share keys."""
        T, HV, V = x.v.shape
        _, H, K = x.k.shape
        shared = 2 * K if HV > H else 0
        return T * HV * (2 * K * V // BT + V + shared) * x.v.element_size()


GDN = GDNStages()


def _gradients(
    given: Given, h: Tensor, dh: Tensor, y: Tensor, dv: Tensor
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dg, dbeta, dA_log and ddt_bias."""
    x = given.x
    tiles = given.tiles
    numbers = given.numbers
    T, H, K = x.k.shape
    NT, HV, _, V = h.shape
    dq, dk = (x.q.new_empty(T, HV, K) for _ in range(2))
    dg = x.g.new_empty(x.g.shape)
    dbeta = x.beta.new_empty(x.beta.shape)
    d_gate = x.k.new_empty(2, 0 if x.A_log is None else NT, HV, dtype=torch.float32)
    if K == V and gdn_hopper.fits(x.k, V):
        gdn_hopper.launch_gradients(
            given, h=h, dh=dh, y=y, dv=dv, dq=dq, dk=dk, dg=dg, dbeta=dbeta, d_gate=d_gate
        )
    else:
        chosen = _sliced("gdn gradients", x.k, HV, V)
        BV = chosen["BV"]
        chosen["BETA_RANGE"] = numbers.beta_range or None
        kernels.gradients_kernel[NT * HV,](
            rows(x.q), rows(x.k), ragged_tiles(x.k, K), ragged_tiles(given.do, BV), ragged_tiles(y, BV),
            ragged_tiles(dv, BV), chunk_tiles(h, BV, K), chunk_tiles(dh, BV, K), tiles.gates, rows(x.g), x.A_log,
            x.dt_bias, given.initial, given.d_final, dq, dk, dg, dbeta, d_gate, given.chunks, numbers.scale, HV, NT,
            **chosen,
        )  # fmt: skip
    # Value heads that share a key head add up their dq and dk.
    if HV > H:
        dq = sum_groups(dq, x.q)
        dk = sum_groups(dk, x.k)
    # Two sums, because outputs of an operator may not share memory.
    dA_log = gradient_like(x.A_log, d_gate[0].sum(0))
    ddt_bias = gradient_like(x.dt_bias, d_gate[1].sum(0))
    return dq, dk, dg, dbeta, dA_log, ddt_bias
