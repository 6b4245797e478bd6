"""Initial weights: element i of each parameter is a function of (seed, its name, i).

A rank draws only what it owns. Weights depend neither on how parameters are sharded nor on
the order in which they are drawn. A module's `initial` determines how its parameters are
drawn. Other parameters are normal, and biases of linear layers are zero, as in
flash-linear-attention's layers and models.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.draws import Draw, Elements, normal, stream, zeros

# Elements drawn at once: what fits in caches on a CPU; many per launch on a GPU.
BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 22}


@torch.no_grad()
def initialise(model: Decoder, seed: int, parameters: Mapping[str, Tensor] | None = None) -> None:
    """Fill every parameter in place; each rank draws the part of a DTensor that it owns.

    Args:
        parameters: parameters by name, needed if the model's own do not tell of which whole
            they are a part (`named_parameters` in storage/tensors.py).
    """
    for name, parameter in (
        dict(model.named_parameters()) if parameters is None else parameters
    ).items():
        owner, _, leaf = name.rpartition(".")
        draw = draw_of(model.get_submodule(owner), leaf, model.config.init_std)
        local, offsets = owned(parameter)
        fill(local, tuple(parameter.shape), offsets, draw, stream(seed, name))


def owned(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and the part's offset in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    (own,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(own.offsets)


def draw_of(module: nn.Module, leaf: str, std: float) -> Draw:
    """Return how the parameter `leaf` of a module is drawn."""
    if isinstance(module, nn.Linear) and leaf == "bias":
        return zeros
    return getattr(module, "initial", {}).get(leaf, normal(std))


def fill(
    local: Tensor,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    draw: Draw,
    stream: tuple[int, int],
) -> None:
    """Fill `local`, the part of a parameter [shape] at `offsets`, on its device.

    Draws are rounded to float32.
    """
    # Map local elements to elements of the whole parameter.
    flat = local.view(-1)
    length, shifts = runs(tuple(local.shape), shape, offsets)
    shift = torch.from_numpy(shifts).to(flat.device)
    # Draw block by block.
    block = BLOCKS[flat.device.type]
    for begin in range(0, len(flat), block):
        out = flat[begin : begin + block]
        element = torch.arange(begin, begin + len(out), device=flat.device)
        element += shift[element // length] if len(shift) > 1 else shift
        out.copy_(draw(Elements(stream, element)).float())


def runs(
    sizes: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[int, np.ndarray]:
    """Locate a box [sizes] at `offsets` in a tensor [shape], both flattened.

    The box consists of runs of equal length.

    Returns:
        (length, shift [runs] int64): element j of the box is element j + shift[j // length]
        of the tensor.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # All dimensions after `cut` are whole.
    cut = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    starts = np.zeros(1, np.int64)
    for d in range(cut):
        starts = np.add.outer(starts, (offsets[d] + np.arange(sizes[d])) * strides[d]).ravel()
    length = math.prod(sizes[cut:])
    starts += offsets[cut] * strides[cut] - np.arange(len(starts)) * length
    return length, starts


def count_parameters(config: ModelConfig) -> int:
    """Return the number of trainable parameters; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters() if p.requires_grad)
