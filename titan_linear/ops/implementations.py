"""Which implementation each op will run: decided once at start, printed, and kept with the run."""

from __future__ import annotations

import torch

from titan_linear.ops import convolution, delta_rule
from titan_linear.ops.options import select


def chosen_implementations(impl: str, device: torch.device) -> dict[str, str]:
    """op -> implementation for model.impl. Softmax attention runs PyTorch's own kernels whatever it says."""
    try:
        delta = select(impl, delta_rule.IMPLEMENTATIONS, device)
        conv = select(impl, convolution.IMPLEMENTATIONS, device)
    except ValueError as error:
        raise ValueError(f"model.{error}") from None
    return {"chunk_kda": delta, "chunk_gated_delta_rule": delta, "causal_conv1d": conv, "attention": "torch"}
