"""Low-rank adapters of a frozen model (LoRA, arXiv 2106.09685).

Each projection adds s (x Aᵀ) Bᵀ to its output.

A [r, inputs] and B [outputs, r] are parameters next to the weight, and are split like it: B
by rows, A by columns. Projections that form one matrix in a Hugging Face folder share A,
because an adapter of that matrix has one A. Each of stacked experts has its own A and B.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titan_linear.models.config import LoraConfig
from titan_linear.models.draws import uniform, zeros
from titan_linear.models.layers import LowRankUpdate, Projection, lora_name
from titan_linear.models.mlps.moe import Experts

# Patterns of the default targets.
ALL = ("layers",)


def add_adapters(model: nn.Module, options: LoraConfig) -> None:
    """Freeze all parameters except `options.extra`, and add adapters to `options.targets`."""
    weights, others = adaptable(model)
    targets = fitting(weights, options.targets or ALL)
    extra = fitting(others, options.extra)
    for name, p in model.named_parameters():
        p.requires_grad_(name in extra)
    for name in targets:
        _add(model, name, first_of(name, options, targets), options)


def first_of(name: str, options: LoraConfig, adapted: Collection[str]) -> str:
    """Return the weight whose module holds A: the first adapted weight of those sharing it."""
    together = next((names for names in options.shared if name in names), (name,))
    return next(other for other in together if other in adapted)


def _add(model: nn.Module, name: str, first: str, options: LoraConfig) -> None:
    """Add B, and also A if the weight is `first_of` the weights that share it."""
    weight = model.get_parameter(name)
    *outer, outputs, inputs = weight.shape
    owner, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    A, B = (lora_name(leaf, part) for part in "AB")
    if first == name:
        setattr(module, A, nn.Parameter(weight.new_empty(*outer[:1], options.rank, inputs)))
    setattr(module, B, nn.Parameter(weight.new_empty(*outer, outputs, options.rank)))
    module.initial = getattr(module, "initial", {}) | {A: uniform(1 / math.sqrt(inputs)), B: zeros}
    if isinstance(module, Projection):
        module.lora = LowRankUpdate(options.factor, model.get_submodule(first.rpartition(".")[0]))
    else:
        module.lora[leaf] = options.factor


def is_lora(name: str) -> bool:
    """Whether this is the name of an adapter's A or B."""
    return "lora_" in name


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that adapters leave frozen.

    The storage, the dtype and the export of parameters depend on these names. A model
    without adapters has no such parameters.
    """
    parameters = dict(model.named_parameters())
    if not any(map(is_lora, parameters)):
        return set()
    return {name for name, p in parameters.items() if not p.requires_grad}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Make the model compute the same as its base inside this context."""
    with ExitStack() as restored:
        for module in model.modules():
            if isinstance(module, (Projection, Experts)):
                restored.callback(setattr, module, "lora", module.lora)
                module.lora = ()
        yield


def adaptable(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the weights that may have adapters, and the other trainable parameters.

    Weights of projections and of experts may have adapters.
    """
    weights = []
    for path, module in model.named_modules():
        if isinstance(module, Projection):
            weights.append(f"{path}.weight")
        elif isinstance(module, Experts):
            weights += [f"{path}.{name}" for name in module.hidden_matrices]
    return weights, [
        name for name, p in model.named_parameters() if p.requires_grad and name not in weights
    ]


def fitting(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the names of which some part matches a pattern: "mixer", "layers.3", "*norm".

    Names matching a pattern that follows a "!" are left out.
    """

    def fits(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in patterns)

    # Patterns with "!" alone exclude from all default targets.
    without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    of = [pattern for pattern in patterns if not pattern.startswith("!")] or [*ALL] * bool(without)
    return [name for name in names if fits(name, of) and not fits(name, without)]


def described(model: nn.Module) -> str:
    """Describe what is adapted, trained or out of reach, by share of the base.

    The text is "" for a model without adapters.
    """
    options = model.config.adapter
    if options is None:
        return ""
    own = dict(model.named_parameters())
    base = {name: p for name, p in own.items() if not is_lora(name)}
    total = sum(p.numel() for p in base.values())
    # Elements of the base's parameters, by kind and by name without the layer's number.
    kinds: dict[str, Counter[str]] = {
        "adapted": Counter(),
        "trained": Counter(),
        "no adapter reaches": Counter(),
    }
    for name, p in base.items():
        frozen = "adapted" if lora_name(name, "B") in own else "no adapter reaches"
        kinds["trained" if p.requires_grad else frozen][
            re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        ] += p.numel()
    # One line for the totals, then one for each kind.
    trained = sum(p.numel() for p in own.values() if p.requires_grad)
    lines = [
        f"adapters of rank {options.rank}: {trained:,} parameters are trained; of the base's {total:,}"
    ]
    for kind, sizes in kinds.items():
        named = ", ".join(f"{name} {n / total:.2%}" for name, n in sizes.most_common())
        lines += [f"{kind}: {sizes.total() / total:.2%}: {named}"] if sizes else []
    return "\n".join(lines)


def check_adapters(base: nn.Module, options: LoraConfig | None, multiple: int = 1) -> None:
    """Raise ValueError if a pattern matches nothing, or the rank is too high.

    The rank must not exceed a projection's number of inputs.

    Args:
        multiple: the rank must be a multiple of this for adapters of experts.
    """
    if options is None:
        return
    weights, others = adaptable(base)
    # Every pattern must match something.
    for key, patterns, names in (
        ("targets", options.targets, weights),
        ("train_extra", options.extra, others),
    ):
        for pattern in patterns:
            if not fitting(names, [pattern.removeprefix("!")]):
                ends = sorted(
                    {".".join(name.removesuffix(".weight").split(".")[-2:]) for name in names}
                )
                raise ValueError(
                    f"adapter.{key}: {pattern!r} fits none of the model's {', '.join(ends)}; correct it"
                )
    # The rank must fit each weight.
    for name in fitting(weights, options.targets or ALL):
        *experts, _, inputs = base.get_parameter(name).shape
        if options.rank > inputs:
            raise ValueError(
                f"adapter.rank = {options.rank} is above the {inputs} channels that {name} reads; use at most {inputs},"
                " or adapter.targets that leave it out"
            )
        if experts and options.rank % multiple:
            raise ValueError(
                f"adapter.rank = {options.rank}: {name} and others are experts, whose products on a GPU take multiples "
                f"of {multiple}; use {math.ceil(options.rank / multiple) * multiple}, or adapter.targets without them"
            )
