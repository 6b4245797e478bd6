"""Floating-point operations of a training step, and peak rates of GPUs.

Only products count, with a multiplication and its addition as two operations: projections,
convolutions, attention on the pairs that the mask leaves, the delta rule by chunks, SwiGLU
or the experts that a token is routed to, and the head. Backward is twice forward: one
product for each of the two gradients. It is once forward where adapters leave a weight
frozen (4 operations per parameter and token instead of 6). A base model that serves as the
loss's reference has a forward pass of its own.

Elementwise work, the embedding lookup, and recomputation (by activation checkpointing or
inside a kernel's backward pass) do not count. Products with weights are derived from the
modules; mixers state the others.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import MoE

# Dense bfloat16 TFLOP/s from NVIDIA's data sheets. Keys are words of the GPU's name; the
# first match counts.
PEAK_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}


def training_flops(model: ModelConfig, documents: Documents) -> int:
    """Return the FLOPs of forward and backward over these documents, of the whole run."""
    # Frozen weights have no gradients.
    _, frozen = _with_weights(model)
    flops = 3 * forward_flops(model, documents) - documents.tokens * frozen
    if model.base_is_reference:
        flops += forward_flops(replace(model.base, mtp_layers=0), documents)
    return flops


def forward_flops(model: ModelConfig, documents: Documents) -> int:
    mixers = sum(mixer.flops(documents) for layer in model.layers for mixer in layer.mixers)
    weights, _ = _with_weights(model)
    return mixers + documents.tokens * weights


@cache
def _with_weights(model: ModelConfig) -> tuple[int, int]:
    """Return the FLOPs per token of products with weights: with all, and with frozen ones."""
    with torch.device("meta"):
        decoder = Decoder(model)

    def counted(frozen: bool) -> int:
        heads = (1 + model.mtp_layers) * token_flops(decoder.head, frozen)
        return token_flops(decoder.layers, frozen) + heads

    return counted(False), counted(True)


def token_flops(module: nn.Module, frozen: bool = False) -> int:
    """Return the FLOPs per token of products with the module's matrices and convolutions.

    This is twice the number of their elements. With `frozen`, only frozen weights count. Of
    experts, only the `top_k` that a token is routed to count.
    """

    def counted(part: nn.Module) -> list[nn.Parameter]:
        return [p for p in part.parameters() if p.dim() > 1 and not (frozen and p.requires_grad)]

    # Count all elements, then subtract the experts that a token is not routed to.
    elements = sum(p.numel() for p in counted(module))
    for moe in (m for m in module.modules() if isinstance(m, MoE)):
        experts = sum(p[0].numel() for p in counted(moe.experts))
        elements -= (moe.config.num_experts - moe.config.top_k) * experts
    return 2 * elements


def peak_tflops(configured: float, compute: str, device: torch.device) -> float | None:
    """Return the peak TFLOP/s of one GPU: metrics.peak_tflops, or the known rate.

    None: the rate is unknown, or compute is not bfloat16.
    """
    if configured:
        return configured
    if device.type != "cuda" or compute != "bfloat16":
        return None
    return known_peak(torch.cuda.get_device_name(device))


def no_peak(compute: str, device: torch.device) -> str:
    """Return the console's line for a `peak_tflops` of None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return f"no MFU: the peak of {name} in {compute} is not known; metrics.peak_tflops gives it"


def known_peak(name: str) -> float | None:
    """Return the peak TFLOP/s of a whole GPU with this name.

    None: unknown, or a part of a GPU (MIG).
    """
    if "MIG" in name:
        return None
    return next(
        (peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None
    )
