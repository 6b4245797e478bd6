"""Which implementation each op will run: decided once at start, printed, and kept with the run."""

from __future__ import annotations

import torch

from titan_linear.ops.options import select


def chosen_implementations(impl: str, device: torch.device) -> dict[str, str]:
    """op -> implementation for model.impl. Softmax attention runs PyTorch's own kernels whatever it says."""
    try:
        chosen = select(impl, device)
    except ValueError as error:
        raise ValueError(f"model.{error}") from None
    return dict.fromkeys(("chunk_kda", "chunk_gated_delta_rule", "causal_conv1d"), chosen) | {"attention": "torch"}
