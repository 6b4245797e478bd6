"""A model's whole state and the tensors of its Hugging Face folder, by the adapters' table, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from titan_linear.models.config import ModelConfig
from titan_linear.models.hf_mapping import Shapes, placements


def state_from_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, family: str
) -> dict[str, Tensor]:
    """Tensors of a folder -> our parameters by name, whole and each in its sources' dtype (the wider of several)."""
    table = placements(config, family, {name: tuple(t.shape) for name, t in tensors.items()})
    state = {}
    for placement in table:
        dtypes = (tensors[source.name].dtype for source, *_ in placement.pieces())
        out = torch.empty(
            placement.num_rows, placement.width, dtype=reduce(torch.promote_types, dtypes)
        )
        for source, start, stop, row in placement.pieces():
            out[row : row + stop - start] = tensors[source.name].reshape(-1, placement.width)[
                start:stop
            ]
        state[placement.name] = out.view(placement.shape)
    return state


def state_to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, family: str, on_disk: Shapes | None = None
) -> dict[str, Tensor]:
    """Our parameters by name -> tensors of a folder, in the spelling of `transformers` or of `on_disk`."""
    tensors: dict[str, Tensor] = {}
    for placement in placements(config, family, on_disk):
        ours = state[placement.name].reshape(-1, placement.width)
        for source, start, stop, row in placement.pieces():
            if source.name not in tensors:
                tensors[source.name] = torch.empty(source.shape, dtype=ours.dtype)
            tensors[source.name].view(-1, placement.width)[start:stop] = ours[
                row : row + stop - start
            ]
    return tensors
