"""Low-rank adapters of a frozen model (LoRA, arXiv 2106.09685): each projection adds s (x Aᵀ) Bᵀ to its output.

A [r, inputs] and B [outputs, r] are parameters beside the weight, and split as it is: B as its rows, A as its columns.
Projections that are one matrix in a Hugging Face folder share A, for an adapter of that matrix has one. Each of stacked
experts has its own A and B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from titan_linear.models.config import Adapter
from titan_linear.models.draws import uniform, zeros
from titan_linear.models.layers import Adapted, Projection, lora_name
from titan_linear.models.mlps.moe import Experts


def add_adapters(model: nn.Module, options: Adapter) -> None:
    """Freeze all parameters but those of `options.extra`, and add adapters to `options.targets`.

    Raises:
        ValueError: a pattern fits nothing, or the rank is above what a projection reads.
    """
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    targets = chosen(adaptable(model), options.targets or ("layers",), "targets", "projection")
    extra = chosen(names - set(adaptable(model)), options.extra, "train_extra", "other parameter")
    for name, p in model.named_parameters():
        p.requires_grad_(name in extra)
    first = {}
    for names in options.shared:
        together = [name for name in names if name in targets]
        first |= dict.fromkeys(together, together[0] if together else "")
    for name in sorted(targets):
        _add(model, name, first.get(name, name), options)


def _add(model: nn.Module, name: str, first: str, options: Adapter) -> None:
    """Add A and B of a weight; A only if it is the first of those that share it."""
    weight = model.get_parameter(name)
    *outer, outputs, inputs = weight.shape
    if options.rank > inputs:
        raise ValueError(
            f"adapter.rank = {options.rank} is above the {inputs} channels that {name} reads; use at most {inputs}, or "
            "adapter.targets that leave it out"
        )
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    A, B = (lora_name(leaf, part) for part in "AB")
    if first == name:
        setattr(module, A, nn.Parameter(weight.new_empty(*outer[:1], options.rank, inputs)))
    setattr(module, B, nn.Parameter(weight.new_empty(*outer, outputs, options.rank)))
    module.initial = getattr(module, "initial", {}) | {A: uniform(1 / math.sqrt(inputs)), B: zeros}
    if isinstance(module, Projection):
        module.lora = Adapted(options.factor, (model.get_submodule(first.rpartition(".")[0]),))
    else:
        module.adapters[leaf] = options.factor


def adaptable(model: nn.Module) -> list[str]:
    """Weights that may have adapters: of projections in layers, and of experts."""
    weights = []
    for path, module in model.named_modules():
        if isinstance(module, Projection):
            weights.append(f"{path}.weight")
        elif isinstance(module, Experts):
            weights += [f"{path}.{name}" for name in module.hidden_matrices]
    return weights


def chosen(names: Iterable[str], patterns: Iterable[str], key: str, what: str) -> set[str]:
    """The names of which a pattern fits some parts: "mixer", "layers.3", "*norm". ValueError: one fits none."""
    found = set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(f".{name}.", f"*.{pattern}.*")}
        if not fitting:
            some = ", ".join(dict.fromkeys(name.split(".", 2)[-1] for name in sorted(names)))
            raise ValueError(f"adapter.{key}: {pattern!r} fits no {what}; there are {some}")
        found |= fitting
    return found
