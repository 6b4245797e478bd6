"""The weights of a session for another program, a sampler for example: one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import Placement, placements
from titan_linear.storage.hf_writing import find_family, gather, kept_dtype, tied_head
from titan_linear.storage.peft import placed
from titan_linear.storage.tensors import named_parameters


class WeightInfo(NamedTuple):
    """A tensor that an iteration yields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """Whole tensors under Hugging Face names, or under PEFT's if the model has adapters.

    Each iteration yields (name, tensor) of the weights as they are then. Parameters are
    gathered one at a time, so every rank iterates, in step with the others.
    """

    def __init__(self, model: Decoder, family: str = "", dtype: torch.dtype | None = None):
        """Prepare the names.

        Args:
            family: the architecture (docs/hugging_face.md); by default the first that
                holds the model.
            dtype: of the tensors, at least float32 for `Family.float32`; by default, of the
                parameters.

        Raises:
            ValueError: no architecture holds the model.
        """
        self.model = model
        self.family = family or find_family(model.config.base)
        self.dtype = dtype

    def metadata(self) -> list[WeightInfo]:
        """Return name, dtype and shape of every tensor, in order. Nothing is gathered."""
        parameters = named_parameters(self.model)
        found: dict[str, WeightInfo] = {}
        for part in self._placed()[0]:
            dtype = self._dtype(part.name, parameters[part.name].dtype)
            for source, *_ in part.pieces():
                # A tensor comes when its last piece does.
                found.pop(source.name, None)
                found[source.name] = WeightInfo(source.name, dtype, source.shape)
        return list(found.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        parts, get = self._placed()
        begun: dict[str, Tensor] = {}
        # A tensor is complete when no piece of it is missing.
        missing = Counter(source.name for part in parts for source, *_ in part.pieces())
        for part in parts:
            parameter = get(part.name).detach()
            rows = parameter.to(self._dtype(part.name, parameter.dtype)).reshape(-1, part.width)
            for source, start, stop, row in part.pieces():
                tensor = begun.setdefault(source.name, rows.new_empty(source.shape))
                tensor.view(-1, part.width)[start:stop] = rows[row : row + stop - start]
                missing[source.name] -= 1
                if not missing[source.name]:
                    yield source.name, begun.pop(source.name)

    def _placed(self) -> tuple[list[Placement], Callable[[str], Tensor]]:
        """Return the places of our parameters in the tensors, and a function to whole ones."""
        config = self.model.config
        get = gather(self.model)
        if config.adapter:
            return placed(config, self.family, get)
        return placements(config, self.family) + tied_head(config, self.family), get

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return kept_dtype(name, self.family, self.dtype) if self.dtype else dtype
