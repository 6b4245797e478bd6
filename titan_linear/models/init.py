"""Initial weights: each parameter is drawn whole from (seed, its name), then sliced.

So they depend on nothing else: not on how parameters are sharded, nor on the order in which they are drawn.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder

NEVER_CENTRED = ("o_norm", "kv_norm")  # norms × weight in every model


def generator(seed: int, *name: object) -> torch.Generator:
    """A CPU generator that depends on (seed, name) alone."""
    digest = hashlib.sha256(repr((seed, *name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter in place. Parameters may be sharded; each rank draws the whole and keeps its slice."""
    for name, parameter in model.named_parameters():
        value = draw(name, parameter.shape, model.config, generator(seed, name)).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
        parameter.copy_(value)


def draw(name: str, shape: torch.Size, config: ModelConfig, rng: torch.Generator) -> torch.Tensor:
    """A parameter's initial value in float32, as flash-linear-attention's layers and models draw it."""
    leaf, owner = name.rsplit(".", 1)[-1], name.split(".")
    if leaf == "A_log":
        mixer = config.layers[int(owner[1])]
        if mixer == "kda" and config.kda_lower_bound is not None:
            return torch.zeros(shape)
        low = 1.0 if mixer == "kda" else 0.0  # exp(A_log) uniform on (low, 16]
        return torch.log(16 - (16 - low) * torch.rand(shape, generator=rng))
    if leaf == "dt_bias":  # softplus(dt_bias) log-uniform on [1e-3, 0.1]
        dt = torch.exp(torch.rand(shape, generator=rng) * math.log(100) + math.log(1e-3))
        return dt + torch.log(-torch.expm1(-dt))
    if leaf in ("bias", "selection_bias"):
        return torch.zeros(shape)
    if owner[-2].endswith("norm"):
        return torch.zeros(shape) if config.zero_centred_norm and owner[-2] not in NEVER_CENTRED else torch.ones(shape)
    return torch.randn(shape, generator=rng) * config.init_std


def count_parameters(config: ModelConfig) -> int:
    """How many parameters training can change; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters() if p.requires_grad)


def no_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: norms, biases, A_log and dt_bias."""
    return {name for name, p in model.named_parameters() if p.dim() < 2}
