"""The weights of a session for another program, a sampler for example: one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import placements
from titan_linear.storage.hf_io import DTYPES
from titan_linear.storage.hf_writing import find_family, gather, plan_tensors, tied_head
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
        """Choose names and dtype.

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

        def without_values(name: str) -> Tensor:
            p = parameters[name]
            return torch.empty(p.shape, dtype=p.dtype, device="meta")

        tensors = self._tensors(without_values)
        return [WeightInfo(name, x.dtype, tuple(x.shape)) for name, x in tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors(gather(self.model))

    def _tensors(self, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, given a function from names to whole parameters of ours."""
        config = self.model.config
        if config.adapter:
            parts, get = placed(config, self.family, get)
        else:
            parts = placements(config, self.family) + tied_head(config, self.family)
        plan = plan_tensors(parts, self.family, self.dtype) if self.dtype else {}
        begun: dict[str, Tensor] = {}
        # A tensor is complete when no piece of it is missing.
        missing = Counter(source.name for part in parts for source, *_ in part.pieces())
        for part in parts:
            rows = get(part.name).detach().reshape(-1, part.width)
            for source, start, stop, row in part.pieces():
                name = source.name
                if name not in begun:
                    dtype = DTYPES[plan[name].code] if plan else rows.dtype
                    begun[name] = rows.new_empty(source.shape, dtype=dtype)
                begun[name].view(-1, part.width)[start:stop] = rows[row : row + stop - start]
                missing[name] -= 1
                if not missing[name]:
                    yield name, begun.pop(name)
