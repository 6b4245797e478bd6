"""Models by name and flavor, and the keys of [model] that change their sizes.

There are our own models, in the sizes of FLA's 340M and 1.3B configurations, and published
ones.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from titan_linear.models.config import BESIDE, Entry, ModelConfig, MoEConfig, mistake, mixers_of
from titan_linear.models.hf_mapping import config_from_hf
from titan_linear.models.mixers import MIXERS
from titan_linear.models.mlps import Dense
from titan_linear.models.rope import RopeScaling

# Options or keys, by name.
Options = Mapping[str, Any]
# Entries of a pattern that are not mixers.
ALONE = Dense.name, MoEConfig.name


def _model(config: dict[str, Any], flavor: str) -> ModelConfig:
    """Read the model of a config.json.

    The selection biases of debug models move, which a config.json cannot express.
    """
    model = config_from_hf(config)[1]
    if flavor == "debug" and model.moe and model.moe.selection_bias:
        return replace(model, moe=replace(model.moe, bias_update_rate=1e-3))
    return model


def _read(file: Path) -> dict[str, ModelConfig]:
    """Read the flavors of a model."""
    flavors = json.loads(file.read_text())
    return {flavor: _model(config, flavor) for flavor, config in flavors.items()}


FILES = sorted(Path(__file__).with_name("families").glob("configs/*.json"))
MODELS = {file.stem: _read(file) for file in FILES}
# Our own models, in the sizes of FLA's 340M and 1.3B. The debug flavors have grouped value
# heads, QK-norm and an output gate.
OWN = {name: MODELS[name] for name in ("kda", "gdn", "hybrid")}


def preset(name: str, flavor: str) -> ModelConfig:
    """Return the model of `model.name` and `model.flavor`; ValueError for unknown names."""
    if name not in MODELS:
        raise ValueError(f"model.name = {name!r} is unknown; use one of {', '.join(MODELS)}")
    if flavor not in MODELS[name]:
        raise ValueError(
            f"model.flavor = {flavor!r} is unknown for {name!r}; use one of {', '.join(MODELS[name])}, and keys for "
            "other sizes: model.dim, num_layers, hidden_dim, pattern, and a table for each mixer, model.kda.heads"
        )
    return MODELS[name][flavor]


def resized(model: ModelConfig, keys: Options) -> ModelConfig:
    """Return the model with the changes given by the keys of [model].

    These are sizes, the pattern, and options of mixers and experts.

    Args:
        keys: keys of [model]. Keys that are not fields of the model or of its parts are
            ignored; 0, "", [] and {} change nothing.

    Raises:
        ValueError: a mixer or an option does not exist, is missing, has another type, or
            contradicts another; or the layers do not repeat the pattern a whole number of
            times.
    """
    # Sizes and experts.
    names = "vocab_size", "dim", "num_layers", "hidden_dim", "mtp_layers"
    sizes = {name: keys[name] for name in names if keys[name]}
    if keys["moe"]:
        sizes["moe"] = _with_options(model.moe or MoEConfig, keys["moe"], "model.moe")
    # The options of each mixer start from the model's first mixer of that kind.
    bases: dict[str, Any] = dict(MIXERS)
    for entry in reversed(model.pattern):
        bases |= {mixer.name: mixer for mixer in mixers_of(entry)}
    kinds = keys["pattern"] or [_name(entry) for entry in model.pattern]
    used = [name for kind in kinds for name in kind.split(BESIDE)]
    # Names in the pattern and tables of [model] must be mixers, and tables must be used.
    for kind in kinds:
        if kind not in ALONE and not MIXERS.keys() >= set(kind.split(BESIDE)):
            known = ", ".join((*MIXERS, *ALONE))
            raise ValueError(
                f"model.pattern = {kinds} has {kind!r}; use {known}, or mixers with {BESIDE} between them"
            )
    for name in keys["mixers"]:
        if name not in MIXERS:
            raise ValueError(
                f"model.{name} is neither a key nor a mixer; mixers are {', '.join(MIXERS)}"
            )
        if name not in used:
            raise ValueError(
                f"model.{name} is not used: model.pattern = {kinds} has no {name!r}; add it, or remove it"
            )
    # Build the pattern, then check the whole model.
    pattern = tuple(
        _entry(entry, bases, keys["mixers"]) for entry in keys["pattern"] or model.pattern
    )
    one_branch = model.one_branch or any(name in ALONE for name in kinds)
    model = replace(model, pattern=pattern, one_branch=one_branch, **sizes)
    if wrong := mistake(model):
        raise ValueError(f"[model] gives {wrong}; correct it there")
    if keys["pattern"] and model.num_layers % (period := len(pattern)):
        fitting = period * max(1, round(model.num_layers / period))
        raise ValueError(
            f"model.pattern = {kinds} has {period} layers, which num_layers = {model.num_layers} does not repeat as a "
            f"whole; set model.num_layers to a multiple, such as {fitting}, or write the pattern of all layers"
        )
    return model


def _name(entry: Entry) -> str:
    return (
        entry if isinstance(entry, str) else BESIDE.join(mixer.name for mixer in mixers_of(entry))
    )


def _entry(entry: Entry | str, bases: Options, given: Options) -> Any:
    """Return an entry of a pattern with the options that the keys give.

    Args:
        entry: an entry, or its name, whose mixers are looked up in `bases`.
    """
    if entry in ALONE:
        return entry
    parts = (
        [bases[name] for name in entry.split(BESIDE)]
        if isinstance(entry, str)
        else mixers_of(entry)
    )
    mixers = tuple(
        _with_options(part, given.get(part.name, {}), f"model.{part.name}") for part in parts
    )
    return mixers if len(mixers) > 1 else mixers[0]


def _with_options(base: Any, given: Options, where: str) -> Any:
    """Return `base` with the given options. If it is a class, other options are the defaults.

    The value "" stands for None.

    Args:
        where: name of the table in messages.
    """
    known = {field.name: field for field in fields(base)}
    # All names must be known.
    for name in given:
        if name not in known:
            raise ValueError(f"{where}.{name} is not a key; {where} has {', '.join(known)}")
    options = {name: None if value == "" else value for name, value in given.items()}
    # The scaling of rotary positions is a table within the table.
    if isinstance(rope := options.get("rope_scaling"), dict):
        options["rope_scaling"] = _with_options(RopeScaling, rope, f"{where}.rope_scaling")
    if not isinstance(base, type):
        return replace(base, **options)
    # Options of a class without a default are required.
    lacking = [
        name for name, field in known.items() if field.default is MISSING and name not in options
    ]
    if lacking:
        raise ValueError(
            f"{where} lacks {', '.join(lacking)}, which this model.flavor does not have; give them"
        )
    return base(**options)


def flavors() -> str:
    """Return a table of all models, and the options of their parts, for people to read."""
    lines = [
        f"{'model.name':<14}{'model.flavor':<20}{'layers':>6}{'dim':>7}{'vocabulary':>12}  layers of each kind"
    ]
    for name, sizes in MODELS.items():
        for flavor, config in sizes.items():
            experts = f"; {config.moe.num_experts} experts" if config.moe else ""
            row = f"{name:<14}{flavor:<20}{config.num_layers:>6}{config.dim:>7}{config.vocab_size:>12}"
            lines.append(f"{row}  {config.composition}{experts}")
    lines += [
        "",
        "Options, by table of [model], and defaults where the flavor has no such layers (Size: int; Above0: float):",
    ]
    kinds = {**MIXERS, "moe": MoEConfig, "attention.rope_scaling": RopeScaling}
    lines += [f"  model.{name}: {_options(kind)}" for name, kind in kinds.items()]
    return "\n".join(lines)


def _options(kind: type) -> str:
    """Return names and types of the options, with their defaults."""
    shown = []
    for field in fields(kind):
        default = "" if field.default is MISSING else f" = {field.default!r}"
        shown.append(f"{field.name} {field.type}{default}")
    return ", ".join(shown)
