"""Floating-point operations of a training step, and the peak of the GPU that does them.

Only products count, a multiplication and its addition as two operations: projections, convolutions, attention on the
pairs that the mask leaves, the delta rule by chunks, SwiGLU or the experts that a token is sent to, the head. Backward
is twice forward, a product for each of the two gradients, or once where adapters leave a weight frozen (4 operations a
parameter and token, not 6). A base that is the loss's reference has a forward of its own. Not counted: elementwise
work, the embedding's lookup, and recomputation, by activation checkpointing or inside a kernel's backward pass.
Products with weights follow from these; mixers state the others.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from titan_linear.config import Config
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import MoE

# Dense bfloat16 TFLOP/s of a GPU, from NVIDIA's data sheets, by words of its name; the first match counts.
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
    """FLOPs of forward and backward over these documents, of the whole run."""
    flops = 3 * forward_flops(model, documents)
    if model.adapter:
        flops -= documents.tokens * _with_weights(model, frozen=True)
    if model.adapter and model.adapter.base_is_reference:
        flops += forward_flops(replace(model.base, mtp_layers=0), documents)
    return flops


def forward_flops(model: ModelConfig, documents: Documents) -> int:
    mixers = sum(mixer.flops(documents) for layer in model.layers for mixer in layer.mixers)
    return mixers + documents.tokens * _with_weights(model)


@cache
def _with_weights(model: ModelConfig, frozen: bool = False) -> int:
    """Per token, of all products with weights."""
    with torch.device("meta"):
        decoder = Decoder(model)
    heads = (1 + model.mtp_layers) * token_flops(decoder.head, frozen)
    return token_flops(decoder.layers, frozen) + heads


def token_flops(module: nn.Module, frozen: bool = False) -> int:
    """Of products with the module's matrices and convolutions, or the frozen ones, per token: twice their elements; of
    experts, those that a token is sent to."""

    def counted(part: nn.Module) -> list[nn.Parameter]:
        return [p for p in part.parameters() if p.dim() > 1 and not (frozen and p.requires_grad)]

    elements = sum(p.numel() for p in counted(module))
    for moe in (m for m in module.modules() if isinstance(m, MoE)):
        experts = sum(p[0].numel() for p in counted(moe.experts))
        elements -= (moe.config.num_experts - moe.config.top_k) * experts
    return 2 * elements


def peak_tflops(config: Config, device: torch.device) -> float | None:
    """Peak TFLOP/s of one GPU: metrics.peak_tflops, or that known for its name. None: unknown, or not for bfloat16."""
    if config.metrics.peak_tflops:
        return config.metrics.peak_tflops
    if device.type != "cuda" or config.training.mixed_precision_param != "bfloat16":
        return None
    return known_peak(torch.cuda.get_device_name(device))


def no_peak(config: Config, device: torch.device) -> str:
    """The console's line where `peak_tflops` is None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    compute = config.training.mixed_precision_param
    return f"no MFU: the peak of {name} in {compute} is not known; metrics.peak_tflops gives it"


def known_peak(name: str) -> float | None:
    """Peak TFLOP/s of a whole GPU of this name. None: unknown, or a part of a GPU (MIG)."""
    if "MIG" in name:
        return None
    return next(
        (peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None
    )
