"""Products in float8 with a scale for each row (torchao's recipe rowwise_with_gw_hp).

    y  = x Wᵀ     in float8: tokens of x, rows of W
    dx = dy W     in float8: tokens of dy, columns of W
    dW = dyᵀ x    in the dtype of x

A row is multiplied with a power of two, which makes its largest number 224 to 448, and rounded to e4m3: by at most 2⁻⁴
of a number, or 2⁻¹⁷ of the row's largest. This is plain code, which the compiler fuses with what made x; only the
product is an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator

Product = Callable[[Tensor, Tensor], Tensor]  # x [.., K], weight [N, K] -> x weightᵀ [.., N]
LARGEST = 448.0  # of e4m3
TINY = 2.0**-100  # rows of smaller numbers are scaled as if they had this one: 448 / TINY is finite
EXPONENT = 0x7F800000  # its bits in a float32
CAPABILITY = (8, 9)  # of a GPU that computes such products
MULTIPLE = 16  # of a row's length


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, C] -> e4m3 [R, C] and float32 [R, 1], powers of two, whose product is x, rounded. Of a row that is not
    finite one of the two is not."""
    largest = x.abs().amax(-1, keepdim=True).float()
    factor = ((LARGEST / largest.clamp(min=TINY)).view(torch.int32) & EXPONENT).view(torch.float32)
    return (x * factor).to(torch.float8_e4m3fn).contiguous(), 1 / factor


def _cost(outputs: costs.Outputs, a: Tensor, b: Tensor, **_: Any) -> costs.Product:
    return costs.Product(len(a), len(b), a.shape[1])


@operator(
    cost=_cost,
    fake=lambda a, b, scale_a, scale_b, dtype, emulate: a.new_empty(len(a), len(b), dtype=dtype),
)
def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, emulate: bool
) -> Tensor:
    """a [M, K], b [N, K] e4m3, scales of their rows [M, 1], [N, 1] -> a bᵀ [M, N] in `dtype`: bfloat16, or any float
    type if it is emulated, by a product in float32 or wider."""
    if emulate:
        wide = torch.promote_types(dtype, torch.float32)
        return (a.to(wide) @ b.to(wide).T * scale_a * scale_b.T).to(dtype)
    rows = F.ScalingType.RowWise
    return F.scaled_mm(
        a, b.T, scale_a, rows, scale_b.T, rows, output_dtype=dtype, use_fast_accum=True
    )


def float8_linear(x: Tensor, weight: Tensor, emulate: bool = False) -> Tensor:
    """x [.., K], weight [N, K] -> x weightᵀ [.., N], without a gradient."""
    a, scale_a = scaled_rows(x.flatten(0, -2))
    b, scale_b = scaled_rows(weight)
    return scaled_product(a, b, scale_a, scale_b, x.dtype, emulate).unflatten(0, x.shape[:-1])


def emulated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`float8_linear` on any device."""
    return float8_linear(x, weight, emulate=True)
