"""Matrix products in float8 with one scale per row (torchao's recipe rowwise_with_gw_hp).

    y  = x Wᵀ     in float8: tokens of x, rows of W
    dx = dy W     in float8: tokens of dy, columns of W
    dW = dyᵀ x    in the dtype of x

A row is multiplied by a power of two that brings its largest number to 224 … 448, and
rounded to e4m3. The rounding error is at most 2⁻⁴ of a number, or 2⁻¹⁷ of the row's
largest. The scaling is plain code, which the compiler fuses with the code that computes x;
only the product is an operator.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator

# x [.., K], weight [N, K] -> x weightᵀ [.., N]
Product = Callable[[Tensor, Tensor], Tensor]
LARGEST = 448.0  # largest number of e4m3
# Rows of smaller numbers are scaled as if this were their largest, so that 448 / TINY is
# finite.
TINY = 2.0**-100
EXPONENT = 0x7F800000  # exponent bits of a float32
CAPABILITY = (8, 9)  # lowest compute capability of a GPU with float8 products
MULTIPLE = 16  # a row's length must be a multiple of this


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and round rows: x [R, C] -> e4m3 [R, C] and float32 scales [R, 1].

    Scales are powers of two. The product of the two results is x, rounded. For a row that
    is not finite, either of the two is not finite.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    # Keep only the exponent bits, which rounds the factor down to a power of two.
    factor = ((LARGEST / largest.clamp(min=TINY)).view(torch.int32) & EXPONENT).view(torch.float32)
    return (x * factor).to(torch.float8_e4m3fn).contiguous(), 1 / factor


def _cost(outputs: costs.Outputs, a: Tensor, b: Tensor, **_: Any) -> costs.ProductCost:
    return costs.ProductCost(len(a), len(b), a.shape[1])


@operator(
    cost=_cost,
    fake=lambda a, b, scale_a, scale_b, dtype, emulate: a.new_empty(len(a), len(b), dtype=dtype),
)
def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    """Compute a bᵀ [M, N] in `dtype` from a [M, K] and b [N, K] in e4m3, and scales of
    their rows [M, 1], [N, 1].

    The GPU's product gives bfloat16. With `emulate` the dtype may be any float dtype, and
    the product is computed in float32 or wider.
    """
    if emulate:
        wide = torch.promote_types(dtype, torch.float32)
        return (a.to(wide) @ b.to(wide).T * scale_a * scale_b.T).to(dtype)
    rows = F.ScalingType.RowWise
    return F.scaled_mm(
        a, b.T, scale_a, rows, scale_b.T, rows, output_dtype=dtype, use_fast_accum=True
    )


def float8_linear(x: Tensor, weight: Tensor, emulate: bool = False) -> Tensor:
    """Return x weightᵀ [.., N] for x [.., K] and weight [N, K], without a gradient."""
    a, scale_a = scaled_rows(x.flatten(0, -2))
    b, scale_b = scaled_rows(weight)
    return scaled_product(a, b, scale_a, scale_b, x.dtype, emulate).unflatten(0, x.shape[:-1])


def emulated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `float8_linear` on any device."""
    return float8_linear(x, weight, emulate=True)
