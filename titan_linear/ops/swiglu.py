"""SwiGLU and the projection that follows it: (silu(gate) · up) Wᵀ (Shazeer 2020).

Of the activations only gate and up are saved for backward, side by side as one product gave them: the pass that
computes their gradients recomputes the input of the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.float8 import Product
from titan_linear.ops.runtime.operators import check_first_derivative
from titan_linear.ops.runtime.options import check_floats
from titan_linear.ops.runtime.support import Choice, Op
from titan_linear.ops.triton.configs import with_kernels

Pair = tuple[Tensor, Tensor]


def swiglu(
    gate_up: Tensor,
    weight: Tensor,
    impl: str | Choice = "auto",
    product: Product = F.linear,
    disable_recompute: bool = False,
) -> Tensor:
    """gate_up [.., 2 H], gate before up, weight [D, H] -> [.., D]. Elementwise work is done in float32 or wider.

    impl: "torch", "triton", or "auto" (ops/runtime/support.py). product: of x [.., K] and weight [N, K], x weightᵀ.
    disable_recompute: keep the input of the projection too.
    Raises ValueError for shapes that do not fit, or integers.
    """
    if weight.dim() != 2 or not gate_up.dim() or gate_up.shape[-1] != 2 * weight.shape[1]:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} and weight {tuple(weight.shape)} must be [.., 2 H] and [D, H]"
        )
    check_floats(gate_up=gate_up, weight=weight)
    name = SWIGLU.implementation(impl, gate_up.device, gate_up.dtype)
    return _SwiGLU.apply(gate_up, weight, name, product, disable_recompute)


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _backward(gate_up: Tensor, dy: Tensor, again: bool) -> Pair:
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, -1)
    dy, sigmoid = dy.to(wide), gate.sigmoid()
    silu = gate * sigmoid
    d = torch.cat([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * silu], -1)
    return d.to(gate_up.dtype), (silu * up if again else d.new_empty(0)).to(gate_up.dtype)


def _triton() -> tuple[Callable[..., Tensor], Callable[..., Pair]]:
    from titan_linear.ops.triton import swiglu as kernels  # Triton is available on Linux only

    return kernels.swiglu_forward, kernels.swiglu_backward


SWIGLU = Op("swiglu", with_kernels(_triton, lambda: (_forward, _backward), slower="slower"))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, name: str, product: Product, keep: bool) -> Tensor:
        activated = SWIGLU.load(name)[0](gate_up.contiguous())
        ctx.save_for_backward(gate_up, weight, activated if keep else None)
        ctx.name, ctx.product = name, product
        return product(activated, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        check_first_derivative()
        gate_up, weight, activated = ctx.saved_tensors
        dy = dy.to(weight.dtype)  # dy has autocast's dtype if only forward ran in autocast
        dx = ctx.product(dy, weight.T).contiguous()
        d, again = SWIGLU.load(ctx.name)[1](gate_up.contiguous(), dx, activated is None)
        activated = again if activated is None else activated
        dweight = dy.reshape(-1, dy.shape[-1]).T @ activated.reshape(-1, activated.shape[-1])
        return d, dweight, None, None, None
