"""Which implementation each op will run: decided once at start, printed, and kept with the run."""

from __future__ import annotations

import torch

from titan_linear.ops import convolution, delta_rule
from titan_linear.ops.options import select


def chosen_implementations(impl: str, device: torch.device) -> dict[str, str]:
    """op -> implementation for `impl`. Softmax attention runs PyTorch's own kernels whatever `impl` says."""
    delta = select(impl, delta_rule.IMPLEMENTATIONS, device)
    return {
        "chunk_kda": delta,
        "chunk_gated_delta_rule": delta,
        "causal_conv1d": select(impl, convolution.IMPLEMENTATIONS, device),
        "attention": "torch",
    }
