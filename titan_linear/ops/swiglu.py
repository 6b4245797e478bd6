"""SwiGLU and the projection that follows it: (silu(factor · gate) · up) Wᵀ (Shazeer 2020).

The only activations saved for backward are gate and up, side by side as one product
computed them. The pass that computes their gradients recomputes the input of the
projection.
"""

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
    """Apply SwiGLU and the projection W: gate_up [.., 2 H], gate before up, weight [D, H]
    -> [.., D].

    Elementwise work is done in float32 or wider.

    Args:
        impl: "torch", "triton", or "auto" (ops/runtime/support.py).
        product: computes x weightᵀ from x [.., K] and weight [N, K].
        gate_factor: factor on the gate.
        lora_A: [r, H]; if given, the result is a pair with the adapter's low-rank product
            [.., r].

    Raises:
        ValueError: shapes do not fit, or a tensor has an integer dtype.
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
        ctx.name = name
        ctx.product = product
        ctx.factor = factor
        activated = SWIGLU.load(name).activate(gate_up.contiguous(), None, True, factor)
        y = product(activated, weight)
        return y if lora_A is None else (y, F.linear(activated, lora_A))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlow: Tensor | None = None) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        gate_up, weight, lora_A = ctx.saved_tensors
        # If only forward ran in autocast, dy has autocast's dtype. The input of the
        # projection gets gradients from the weight and from the adapter.
        dy = dy.to(weight.dtype)
        dactivated = ctx.product(dy, weight.T)
        if lora_A is not None:
            dactivated = dactivated + dlow @ lora_A
        # The kernel recomputes the input of the projection, which the weights' gradients
        # need.
        backward = SWIGLU.load(ctx.name).activate_backward
        d, activated = backward(
            gate_up.contiguous(), None, dactivated.contiguous(), True, ctx.factor
        )
        _, of_weight, of_A, *_ = ctx.needs_input_grad
        x = activated.reshape(-1, activated.shape[-1])
        dweight = dy.reshape(-1, dy.shape[-1]).T @ x if of_weight else None
        dA = dlow.reshape(-1, dlow.shape[-1]).T @ x if of_A else None
        return d, dweight, dA, None, None, None
