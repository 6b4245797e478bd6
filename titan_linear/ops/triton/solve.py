"""The triangular system inside a chunk, for both delta rules: (I + N diag(b)) G = N for N
strictly lower, b = β.

G = (I + N b)⁻¹ N = N (I + b N)⁻¹, so (I + N b)⁻¹ = I − G b: the identity stays exact when G
is rounded. No power of N is formed, so collinear keys and β near 2 lose no accuracy.
Arithmetic is fp32, with each product as three bf16 products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.tiles import Kernel, arange, indices, masked, program


@triton.jit
def split(x):
    """Split fp32 x into two bf16 parts whose sum is x to 2^-16 of |x|. Truncating bits is
    cheaper than rounding twice."""
    hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return hi.to(tl.bfloat16), (x - hi).to(tl.bfloat16)


@triton.jit
def dot_fp32(a, b, CT):
    """Compute a @ b in fp32: IEEE for fp32 inputs, otherwise three bf16 products (relative
    error of an operand 2^-16)."""
    if CT == tl.float32:  # noqa: SIM300
        return tl.dot(a, b, input_precision="ieee")
    else:
        a1, a2 = split(a)
        b1, b2 = split(b)
        return tl.dot(a1, b1, acc=tl.dot(a1, b2, acc=tl.dot(a2, b1)))


@triton.jit
def lower_triangle(tile, i, j):
    """Return the address of element (i, j), j < i, of a strictly lower fp32 matrix stored
    in a tile of [64, 64] 16-bit numbers."""
    return tile.to(tl.pointer_type(tl.float32), bitcast=True) + (i * (i - 1) // 2 + j)


@triton.jit
def merge(N21, G11, G22, b1, b2, CT):
    """Compute G21 = (I − G22 b2) N21 (I − b1 G11) for pairs of blocks: each [pairs, B, B],
    b [pairs, 1, B]."""
    x = N21 - dot_fp32(N21 * b1, G11, CT)
    return x - dot_fp32(G22 * b2, x, CT)


@triton.jit
def factors(b, place):
    """Load b at `place`, or return 1 without b."""
    if b is None:
        return 1.0
    else:
        return tl.load(b + place)


@triton.jit
def solve(b, G, SCALED):
    """Write −G, or −G diag(b) with SCALED, in place of N [64, 64] at G. b is [64]; with b =
    None it is all ones, and I − G is written.

    Forward substitution runs in fp32 on 16×16 blocks, G_i = N_i − Σ_m N_im b_m G_m for m <
    i, with one column per lane. The blocks are then merged to 32 and 64 rows.
    """
    CT: constexpr = G.dtype.element_ty
    # Substitution in the four 16×16 blocks on the diagonal.
    lane = arange(64)
    first, column = lane // 16 * 16, lane % 16
    rows = ()
    scaled = ()  # b_m G_m
    for i in tl.static_range(16):
        x = masked(lower_triangle(G, first + i, first + column), mask=column < i)
        for m in tl.static_range(i):
            x -= tl.load(lower_triangle(G, first + i, first + m)) * scaled[m]
        rows, scaled = rows + (x,), scaled + (x * factors(b, first + i),)  # noqa: RUF005 (Triton joins tuples with +)
    tl.debug_barrier()  # lanes read each other's columns
    for i in tl.static_range(1, 16):
        tl.store(lower_triangle(G, first + i, first + column), rows[i], mask=column < i)
    tl.debug_barrier()

    # Merge pairs of 16×16 blocks to 32×32.
    block, i, j = (
        arange(2)[:, None, None] * 32,
        arange(16)[None, :, None],
        arange(16)[None, None, :],
    )
    G11 = masked(lower_triangle(G, block + i, block + j), mask=j < i)
    G22 = masked(lower_triangle(G, block + 16 + i, block + 16 + j), mask=j < i)
    p_21 = lower_triangle(G, block + 16 + i, block + j)
    G21 = merge(tl.load(p_21), G11, G22, factors(b, block + j), factors(b, block + 16 + j), CT)
    tl.debug_barrier()
    tl.store(p_21, G21)
    tl.debug_barrier()

    # Merge the two 32×32 blocks to 64×64.
    i, j = indices(32, 32)
    G11 = masked(lower_triangle(G, i, j), mask=j < i)
    G22 = masked(lower_triangle(G, 32 + i, 32 + j), mask=j < i)
    N21 = tl.load(lower_triangle(G, 32 + i, j))
    G21 = merge(N21, G11, G22, factors(b, j), factors(b, 32 + j), CT)
    tl.debug_barrier()
    b1, b2 = -1.0, -1.0
    if SCALED:
        b1, b2 = factors(b, j), factors(b, 32 + j)
    if b is None:
        one = tl.where(i == j, 1.0, 0.0)
        G11, G22 = G11 - one, G22 - one
    # Write the whole tile in its dtype, with zeros above the diagonal blocks.
    p_G = G + i * 64 + j
    tl.store(p_G, (G11 * b1).to(CT))
    tl.store(p_G + 32, tl.zeros([32, 32], CT))
    tl.store(p_G + 32 * 64, (G21 * b1).to(CT))
    tl.store(p_G + 32 * 64 + 32, (G22 * b2).to(CT))


@Kernel
def solve_kernel(b, G, STRIDE_B: constexpr, SCALED: constexpr):
    """Run `solve` for one (chunk, head)."""
    i = program()
    solve(b + i * STRIDE_B, G + i * 64 * 64, SCALED)
