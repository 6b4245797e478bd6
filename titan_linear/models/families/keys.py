"""A family's config.json: one table of keys, by which it is read and written.

A part of a model (the model itself, a mixer, its experts) has rows; a row reads some keys to options of ours and writes
them back. Reading raises ValueError, which names the key, for whatever a family does that our modules cannot. Keys are
written in the order of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_linear.models.config import MixerOptions, ModelConfig, MoEConfig, mistake, mixers_of
from titan_linear.models.mixers import Attention, Mamba2
from titan_linear.models.rope import USES, RopeScaling

Json = dict[str, Any]


class Keys:
    """A config.json whose errors name the key at fault."""

    def __init__(self, config: Json):
        self.config = config

    def __call__(self, key: str, *default: object) -> Any:
        if key in self.config or default:
            return self.config.get(key, *default)
        raise ValueError(f"config.json: {key!r} is missing; fetch it again")

    def rope(self, theta: float, fraction: float | None = None) -> Json:
        """Attention's options of positions; the arguments are defaults. NaN: there is no theta by default, and none
        may be given. No fraction: heads are rotated as a whole.
        These keys have had two names; the older one takes precedence, as in transformers. They may be given by type
        of layer."""
        rope = self("rope_scaling", None) or self("rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        if by_type := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise ValueError(
                f"config.json: rope_parameters has {by_type}, and no 'full_attention'; set that"
            )
        read = {"rope_theta": rope.get("rope_theta", self("rope_theta", theta))}
        if read["rope_theta"] is None and not math.isnan(theta):
            raise ValueError(
                "config.json: rope_theta = None, and attention of this architecture has positions"
            )
        if fraction is not None:
            read["rotary_fraction"] = rope.get(
                "partial_rotary_factor", self("partial_rotary_factor", fraction)
            )
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind != "default":
            longest = self("max_position_embeddings", None)
            given = {"original_max_position_embeddings": longest, **rope, "rope_type": kind}
            used = {name: given.get(name) for name in USES.get(kind, USES["linear"])}
            scaling = {name: x for name, x in used.items() if x is not None}
            read["rope_scaling"] = RopeScaling(**{"factor": None, **scaling})
        return read


# --- Rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    read: Callable[[Keys], Json] = lambda key: {}  # options of the part
    write: Callable[[Any], Json] = lambda part: {}  # keys


class Part:
    def __init__(self, kind: type, *rows: Row, **fixed: object):
        """fixed: options that no key gives."""
        self.kind = kind
        self.rows = rows
        self.fixed = fixed

    def read(self, key: Keys) -> Any:
        options = {name: x for row in self.rows for name, x in row.read(key).items()}
        return self.kind(**options, **self.fixed)

    def write(self, part: Any) -> Json:
        return {name: x for row in self.rows for name, x in row.write(part).items()}


def table(model_type: str, *rows: Row, **fixed: object) -> Part:
    """Of the whole model."""
    return Part(ModelConfig, written(model_type=model_type), *rows, **fixed)


def plain(**names: str | tuple[str, object]) -> Row:
    """Our options = their key, or (key, default): one without a default must be there. Of several names in one string
    the first that is there is read, and the first is written."""
    return _by_name(0, names)


def overruled(**names: str | tuple[str, object]) -> Row:
    """As `plain`, but the last name is written."""
    return _by_name(-1, names)


def _by_name(place: int, names: dict[str, str | tuple[str, object]]) -> Row:
    keys = {ours: (name,) if isinstance(name, str) else name for ours, name in names.items()}

    def read(key: Keys, spellings: str, *default: object) -> object:
        known = spellings.split()
        return key(next((name for name in known if name in key.config), known[place]), *default)

    return Row(
        lambda key: {ours: read(key, *name) for ours, name in keys.items()},
        lambda part: {name[0].split()[place]: getattr(part, ours) for ours, name in keys.items()},
    )


def derived(**options: Callable[[Keys], object]) -> Row:
    """Options that follow from keys which other rows write."""
    return Row(lambda key: {ours: read(key) for ours, read in options.items()})


def either(ours: str, theirs: str, other: Callable[[Keys], object], *default: object) -> Row:
    """A key that may be null or 0: `other` says what it then is. Without a default it must be there."""
    return Row(
        lambda key: {ours: key(theirs, *default) or other(key)},
        lambda part: {theirs: getattr(part, ours)},
    )


def changed(
    ours: str,
    theirs: str,
    read: Callable[[Any], Any],
    write: Callable[[Any], Any],
    *default: object,
) -> Row:
    """A key that says our option in another way."""
    return Row(
        lambda key: {ours: read(key(theirs, *default))},
        lambda part: {theirs: write(getattr(part, ours))},
    )


def only(names: str, *known: object) -> Row:
    """Keys that must have a value in `known`, of which the first is the default."""

    def read(key: Keys) -> Json:
        for name in names.split():
            if (value := key(name, known[0])) not in known:
                raise ValueError(
                    f"config.json: {name} = {value!r}; only {' or '.join(map(repr, known))} is known"
                )
        return {}

    return Row(read)


def always(name: str, *known: object) -> Row:
    """As `only`, and the first is written."""
    return Row(only(name, *known).read, lambda part: {name: known[0]})


def written(**keys: object) -> Row:
    """Keys that say nothing to us."""
    return Row(write=lambda part: keys)


def beta_range(theirs: str, default: bool) -> Row:
    """Whether eigenvalues may be negative."""
    return changed(
        "beta_range",
        theirs,
        lambda negative: 2.0 if negative else 1.0,
        lambda beta: beta == 2.0,
        default,
    )


def mixer(options: Part) -> Row:
    """The keys of the model's first layer of a kind, if it has any; a family's layers of one kind are alike. Rows of a
    pattern read them."""

    def write(model: ModelConfig) -> Json:
        mixers = [
            x for entry in model.pattern for x in mixers_of(entry) if isinstance(x, options.kind)
        ]
        return options.write(mixers[0]) if mixers else {}

    return Row(write=write)


def experts(
    given: Callable[[Keys], bool],
    *rows: Row,
    otherwise: Callable[[ModelConfig], Json] = lambda model: {},
    **fixed: object,
) -> Row:
    """The experts, if `given`; else the keys `otherwise`."""
    options = Part(MoEConfig, *rows, **fixed)
    return Row(
        lambda key: {"moe": options.read(key)} if given(key) else {},
        lambda model: options.write(model.moe) if model.moe else otherwise(model),
    )


# --- Rows of several families ----------------------------------------------------------------------------------------


def share_of_width(key: Keys) -> int:
    return key("hidden_size") // key("num_attention_heads")


def names_of_model(
    norm_eps: str | tuple[str, object], num_layers: str | tuple[str, object] = "num_hidden_layers"
) -> Row:
    return plain(
        vocab_size="vocab_size",
        dim="hidden_size",
        num_layers=num_layers,
        norm_eps=norm_eps,
        tie_embeddings=("tie_word_embeddings", False),
        init_std=("initializer_range", 0.02),
    )


USUAL = (
    always("hidden_act", "silu", "swish"),
    always("attention_bias", False),
    only("quantization_config", None),
)
COMMON = (names_of_model("rms_norm_eps"), *USUAL)
HEADS = plain(heads="num_attention_heads", kv_heads="num_key_value_heads")  # of softmax attention
# heads share the width unless a key says otherwise
HEAD_DIM = either("head_dim", "head_dim", share_of_width, None)
HIDDEN_DIM = plain(hidden_dim="intermediate_size")
MAMBA2_DIMS = plain(
    heads="mamba_n_heads",
    head_dim=("mamba_d_head", "auto"),
    state_dim="mamba_d_state",
    groups=("mamba_n_groups", 1),
    conv_size=("mamba_d_conv", 4),
    conv_bias=("mamba_conv_bias", True),
)
UNGROUPED = (  # heads that share the width, each with keys of its own unless one key says otherwise
    plain(heads="num_attention_heads"),
    either("kv_heads", "num_key_value_heads", lambda key: key("num_attention_heads"), None),
    derived(head_dim=share_of_width),
)


def rope(theta: float, fraction: float | None = None) -> Row:
    return Row(lambda key: key.rope(theta, fraction), write_rope)


def write_rope(attention: Attention) -> Json:
    """`rope_parameters`, and the context of YaRN."""
    positions = dict(
        rope_theta=attention.rope_theta, partial_rotary_factor=attention.rotary_fraction
    )
    if (rope := attention.rope_scaling) is None:
        return dict(rope_parameters=dict(rope_type="default", **positions))
    used = {name: x for name in USES[rope.rope_type] if (x := getattr(rope, name)) is not None}
    reached = rope.reached if rope.rope_type == "yarn" else None
    return dict(
        rope_parameters=used | positions,
        **({"max_position_embeddings": round(reached)} if reached else {}),
    )


def _read_time_step_limit(key: Keys) -> Json:
    given = key("time_step_limit", None) or (0.0, math.inf)
    limits = [float(x["__float__"]) if isinstance(x, dict) else 1.0 * x for x in given]
    if len(limits) != 2 or not limits[0] <= limits[1]:
        raise ValueError(
            f"config.json: time_step_limit = {limits}; give the lower limit, then the upper one"
        )
    return dict(dt_min=limits[0], dt_max=limits[1])


def _write_time_step_limit(mamba: Mamba2) -> Json:
    limits = (mamba.dt_min, mamba.dt_max)
    shown = [{"__float__": "Infinity"} if math.isinf(x) else x for x in limits]
    return {} if limits == (0.0, math.inf) else {"time_step_limit": shown}


# Mamba-2's limits of time steps. Folders have Infinity there, which JSON lacks, or an object for it.
TIME_STEP_LIMIT = Row(_read_time_step_limit, _write_time_step_limit)


def write_layer_types(model: ModelConfig, linear: str = "linear_attention") -> Json:
    return dict(
        layer_types=[linear if x.mixers[0].linear else "full_attention" for x in model.layers]
    )


def layer_types(
    full: Part,
    linear: Part,
    is_full: Callable[[Keys, int], bool],
    write: Callable[[ModelConfig], Json] = write_layer_types,
    **names: str,
) -> Row:
    """The mixers of one period of the layers, and their keys. Only those of mixers that occur are required.

    is_full: which layers are, without layer_types; names: further ones of the two types.
    """
    parts = {"full_attention": full, "linear_attention": linear}

    def read(key: Keys) -> Json:
        count = key("num_hidden_layers")
        types = key("layer_types", None)
        if not types:
            types = [
                "full_attention" if is_full(key, i) else "linear_attention" for i in range(count)
            ]
        types = [names.get(t, t) for t in types]
        if unknown := set(types) - set(parts):
            raise ValueError(
                f"config.json: layer_types has {sorted(unknown)}; known are {sorted(parts)}"
            )
        as_many_as_layers("layer_types", types, count)
        mixers = {t: parts[t].read(key) for t in set(types)}
        return {"pattern": shortest([mixers[t] for t in types])}

    return Row(
        read, lambda model: write(model) | mixer(linear).write(model) | mixer(full).write(model)
    )


def as_many_as_layers(name: str, listed: list[str], count: int) -> None:
    if len(listed) != count:
        raise ValueError(
            f"config.json: {name} has {len(listed)} layers; num_hidden_layers = {count} must be the same number"
        )


def shortest(layers: list[MixerOptions]) -> tuple[MixerOptions, ...]:
    """The shortest pattern whose repetition gives these layers."""
    periods = (
        n
        for n in range(1, len(layers) + 1)
        if all(m == layers[i % n] for i, m in enumerate(layers))
    )
    return tuple(layers[: next(periods)])


def check_values(model: ModelConfig) -> None:
    """ValueError: the values from config.json are of no model."""
    if wrong := mistake(model):
        raise ValueError(f"config.json gives {wrong}; fetch it again")
