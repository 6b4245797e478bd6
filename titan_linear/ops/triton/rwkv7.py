"""RWKV-7 in Triton: launches of its kernels.

Traffic at T = 32768, 64 heads × 64, bf16, in GB (and ms at 4.2 TB/s): forward reads the
inputs (1.6), writes T (0.3), writes and reads four tiles (2.1) and writes o: 4.3 (1.0).
Backward reads inputs and T twice, makes three tiles, h and dh, and writes six gradients:
8.1 (1.9). Products take 0.2 TFLOP in forward and 0.8 in backward. T is kept between the
two, 128 bytes per token and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.options import DPLRInputs, DPLROptions
from titan_linear.ops.triton import rwkv7_hopper
from titan_linear.ops.triton import rwkv7_kernels as kernels
from titan_linear.ops.triton.configs import Config, config, widest_slice
from titan_linear.ops.triton.kda import compute_dtype
from titan_linear.ops.triton.stages import Given, Stages
from titan_linear.ops.triton.tiles import Pair, rows


class RWKV7Scalars(NamedTuple):
    scale: float
    # 0: gk is the log decay; otherwise it holds logits, whose sigmoids times this are
    rate: float | None


class RWKV7Tiles(NamedTuple):
    """Tiles of NT chunks with C = 64 tokens each. The letters are defined in rwkv7_kernels."""

    P: Tensor  # [NT, H, K, K]
    U: Tensor  # [NT, H, K, V]
    Q: Tensor  # [NT, H, C, K]
    decay: Tensor  # [NT, H, K] fp32, 2^γ
    inverse: Tensor  # [NT, H, C, C], T
    O: Tensor | None  # [NT, H, C, V]; None when recomputed for backward


def _of_chunks(kernel: str, tiles: RWKV7Tiles, numbers: RWKV7Scalars) -> Config:
    """Return constants of a kernel that works on each chunk independently."""
    _, H, K, V = tiles.U.shape
    return {"H": H, "K": K, "V": V, "RATE": numbers.rate or None} | config(kernel, tiles.U, K)


def _loop(tiles: RWKV7Tiles, kernel: str = "rwkv7 loop") -> Config:
    """Return constants of a kernel that loops over an entry's chunks."""
    _, H, K, V = tiles.U.shape
    return {"H": H, "K": K, "V": V} | config(kernel, tiles.U, max(K, V), BV=min(K, widest_slice(V)))


class RWKV7Stages(Stages):
    name = "rwkv7"
    inputs = DPLRInputs
    prepared = DPLRInputs._fields
    tiles = RWKV7Tiles
    numbers = RWKV7Scalars
    kept = ("inverse",)
    again = "P", "U", "Q", "decay"

    def numbers_of(self, x: DPLRInputs, options: DPLROptions) -> RWKV7Scalars:
        return RWKV7Scalars(options.scale, options.rate)

    def tile_shapes(self, x: DPLRInputs, numbers: RWKV7Scalars) -> Any:
        _, H, K = x.q.shape
        V = x.v.shape[2]
        C = CHUNK
        dtype = compute_dtype(x.q.dtype)
        return RWKV7Tiles(
            P=(dtype, H, K, K),
            U=(dtype, H, K, V),
            Q=(dtype, H, C, K),
            decay=(torch.float32, H, K),
            inverse=(dtype, H, C, C),
            O=(dtype, H, C, V),
        )

    def launch_prepare(self, given: Given, tiles: RWKV7Tiles) -> None:
        x = given.x
        numbers = given.numbers
        if rwkv7_hopper.fits(x):
            return rwkv7_hopper.launch_prepare(given, tiles)
        constants = _of_chunks("rwkv7 prepare", tiles, numbers)
        NT, H, *_ = tiles.U.shape
        kernels.prepare_kernel[NT * H,](
            *map(rows, x), tiles, given.chunks, numbers.scale, **constants
        )

    def launch_scan(self, given: Given, **outputs: Tensor | None) -> None:
        tiles = given.tiles
        chosen = _loop(tiles, "rwkv7 scan" if "o" in outputs else "rwkv7 loop")
        columns = chosen["V"] + (chosen["K"] if "M" in outputs else 0)
        programs = given.listed_entries * chosen["H"] * (columns // chosen["BV"])
        kernels.scan_kernel[programs,](
            tiles, given.initial, given.listed, given.chunks, **outputs, **chosen
        )

    def launch_reverse(self, given: Given, d_initial: Pair, **outputs: Tensor) -> None:
        chosen = _loop(given.tiles)
        programs = given.listed_entries * chosen["H"] * (chosen["V"] // chosen["BV"])
        kernels.states_kernel[2 * programs if outputs else programs,](
            rows(given.do), given.tiles, given.initial, given.d_final, d_initial, given.listed, given.chunks,
            **outputs, **chosen,
        )  # fmt: skip

    def launch_backward(self, given: Given, d_initial: Tensor | None) -> list[Tensor]:
        x = given.x
        tiles = given.tiles
        NT, H, K, V = tiles.U.shape
        # States at the chunk boundaries, and their gradients.
        h = tiles.U.new_empty(NT + given.all_entries, H, K, V)
        dh = torch.empty_like(tiles.U)
        self.launch_reverse(given, (d_initial, given.initial[1]), h=h, dh=dh)
        # Gradients of the inputs, chunk by chunk.
        grads = [t.new_empty(t.shape) for t in x]
        if rwkv7_hopper.fits(x):
            rwkv7_hopper.launch_gradient(given, h, dh, grads)
            return grads
        exponents = dh.new_empty(NT, H, CHUNK + 1, K, dtype=torch.float32)
        constants = _of_chunks("rwkv7 gradient", tiles, given.numbers)
        kernels.gradient_kernel[NT * H,](
            rows(given.do), *map(rows, x), tiles.inverse, h, dh, *grads, exponents, given.chunks, given.numbers.scale,
            **constants,
        )  # fmt: skip
        return grads

    def room(self, x: DPLRInputs) -> int:
        """Return the bytes of each chunk's states, their gradients, and the exponents
        unless they stay on the chip."""
        exponents = 0 if rwkv7_hopper.fits(x) else 4 * x.k.numel()
        return 2 * x.v.numel() * x.k.shape[-1] // CHUNK * x.v.element_size() + exponents


RWKV7 = RWKV7Stages()
