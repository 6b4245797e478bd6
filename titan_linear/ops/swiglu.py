"""SwiGLU and the projection that follows it: (silu(factor · gate) · up) Wᵀ (Shazeer 2020).

Of the activations only gate and up are saved for backward, side by side as one product gave them: the pass that
computes their gradients recomputes the input of the projection.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.float8 import Product
from titan_linear.ops.runtime.operators import check_first_derivative
from titan_linear.ops.runtime.options import check_floats
from titan_linear.ops.runtime.support import Choice, Op
from titan_linear.ops.torch import activations as in_torch
from titan_linear.ops.triton.configs import with_kernels

Pair = tuple[Tensor, Tensor]


def swiglu(
    gate_up: Tensor,
    weight: Tensor,
    impl: str | Choice = "auto",
    product: Product = F.linear,
    gate_factor: float = 1.0,
    lora_A: Tensor | None = None,
) -> Tensor | Pair:
    """gate_up [.., 2 H], gate before up, weight [D, H] -> [.., D], with lora_A [r, H] also the [.., r] that it gives.
    Elementwise work is done in float32 or wider.

    impl: "torch", "triton", or "auto" (ops/runtime/support.py). product: of x [.., K] and weight [N, K], x weightᵀ.
    Raises ValueError for shapes that do not fit, or integers.
    """
    if weight.dim() != 2 or not gate_up.dim() or gate_up.shape[-1] != 2 * weight.shape[1]:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} and weight {tuple(weight.shape)} must be [.., 2 H] and [D, H]"
        )
    check_floats(gate_up=gate_up, weight=weight)
    name = SWIGLU.implementation(impl, gate_up.device, gate_up.dtype)
    return _SwiGLU.apply(gate_up, weight, lora_A, name, product, float(gate_factor))


def _triton() -> Any:
    from titan_linear.ops.triton import activations  # Triton is available on Linux only

    return activations


SWIGLU = Op("swiglu", with_kernels(_triton, lambda: in_torch, slower="slower"))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        lora_A: Tensor | None,
        name: str,
        product: Product,
        factor: float,
    ) -> Tensor | Pair:
        ctx.save_for_backward(gate_up, weight, lora_A)
        ctx.name, ctx.product, ctx.factor = name, product, factor
        activated = SWIGLU.load(name).activate(gate_up.contiguous(), None, True, factor)
        y = product(activated, weight)
        return y if lora_A is None else (y, F.linear(activated, lora_A))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlow: Tensor | None = None) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        gate_up, weight, lora_A = ctx.saved_tensors
        dy = dy.to(weight.dtype)  # dy has autocast's dtype if only forward ran in autocast
        dactivated = ctx.product(dy, weight.T)
        if lora_A is not None:
            dactivated = dactivated + dlow @ lora_A
        backward = SWIGLU.load(ctx.name).activate_backward
        d, activated = backward(
            gate_up.contiguous(), None, dactivated.contiguous(), True, ctx.factor
        )
        _, of_weight, of_A, *_ = ctx.needs_input_grad
        x = activated.reshape(-1, activated.shape[-1])
        dweight = dy.reshape(-1, dy.shape[-1]).T @ x if of_weight else None
        dA = dlow.reshape(-1, dlow.shape[-1]).T @ x if of_A else None
        return d, dweight, dA, None, None, None
