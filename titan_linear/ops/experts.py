"""Ops of a mixture of experts: products with one matrix per group of rows, and means over whole streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.exchange.collectives import sum_ranks
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime.operators import kept
from titan_linear.ops.runtime.support import Choice, Implementation, Op, Target, dtype_in, instead_of, on_gpu


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, impl: str | Choice = "auto") -> Tensor:
    """y_i = W_e x_i for rows x_i of group e; rows of a group are adjacent, and groups are in order.

    x [M, I], weight [E, O, I], counts [E] int64 that sum to M -> y [M, O]. Differentiable in x and weight.
    In bfloat16 on CUDA it is one kernel of PyTorch if I and O are multiples of 8; else a loop over groups, for which,
    on CUDA, the host waits for the counts.
    """
    _, O, I = weight.shape
    return GROUPED_LINEAR.load(GROUPED_LINEAR.implementation(impl, x.device, x.dtype, I=I, O=O))(x, weight, counts)


def _grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))


@torch.compiler.disable
def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    groups = zip(x.split(counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def rows_of_16_bytes(t: Target) -> str | None:
    """Rows of all matrices, gradients too, must be multiples of 16 bytes; each dim is the length of some rows."""
    step = 16 // t.dtype.itemsize
    uneven = (f"rows of {n} are no multiple of {step} numbers (16 bytes)" for n in t.dims.values() if n % step)
    return next(uneven, None)


GROUPED_LINEAR = Op(
    "grouped_linear",
    {
        "grouped_mm": Implementation(lambda: _grouped_mm, (on_gpu, dtype_in(torch.bfloat16), rows_of_16_bytes)),
        "loop": Implementation(
            lambda: _loop, remark=instead_of("grouped_mm", "every layer with experts waits for the GPU")
        ),
    },
)


@kept
@torch.no_grad()
def stream_means(x: Tensor, num_streams: int, cp_context: CPContext | None) -> Tensor:
    """x [T, E], this rank's tokens, one stream after another -> [num_streams, E], means over whole streams."""
    means = x.unflatten(0, (num_streams, -1)).mean(1)
    if cp_context is not None and cp_context.world_size > 1:  # ranks have equal parts of every stream
        means = sum_ranks(means, cp_context.group_name) / cp_context.world_size
    return means
