"""A family's config.json: one table of keys, by which it is both read and written.

A part of a model (the model itself, a mixer, its experts) has rows. A row converts some
keys into options of ours, and writes them back. Reading raises ValueError, which names the
key, for whatever a family supports and our modules do not. Keys are written in the order of
the rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_linear.models.config import MixerOptions, ModelConfig, MoEConfig, mixers_of
from titan_linear.models.mixers import Attention, Mamba2
from titan_linear.models.rope import USES, RopeScaling

Json = dict[str, Any]
# A key, or (key, default).
Name = str | tuple[str, object]


@dataclass
class Keys:
    """A config.json whose errors name the key at fault."""

    config: Json

    def __call__(self, key: str, *default: object) -> Any:
        if key in self.config or default:
            return self.config.get(key, *default)
        raise ValueError(f"config.json: {key!r} is missing; fetch it again")

    def rope(self, theta: float, fraction: float | None = None) -> Json:
        """Read attention's options of positions.

        These keys have had two names; the older one takes precedence, as in transformers.
        They may be given per type of layer.

        Args:
            theta: default of rope_theta. NaN: it has no default, and may be null.
            fraction: default share of each head that is rotated; None: whole heads.
        """
        rope = self("rope_scaling", None) or self("rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        # Other tables per type of layer are not supported.
        if by_type := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise ValueError(
                f"config.json: rope_parameters has {by_type}, and no 'full_attention'; set that"
            )
        # Base, and share of each head.
        read = {"rope_theta": rope.get("rope_theta", self("rope_theta", theta))}
        if read["rope_theta"] is None and not math.isnan(theta):
            raise ValueError(
                "config.json: rope_theta = None, and attention of this architecture has positions"
            )
        if fraction is not None:
            read["rotary_fraction"] = rope.get(
                "partial_rotary_factor", self("partial_rotary_factor", fraction)
            )
        # Scaling to longer contexts: keep the keys that its type uses.
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind != "default":
            longest = self("max_position_embeddings", None)
            given = {"original_max_position_embeddings": longest, **rope, "rope_type": kind}
            used = {name: given.get(name) for name in USES.get(kind, USES["linear"])}
            scaling = {name: x for name, x in used.items() if x is not None}
            read["rope_scaling"] = RopeScaling(**{"factor": None, **scaling})
        return read


# --- Rows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    # From keys to options of the part.
    read: Callable[[Keys], Json] = lambda key: {}
    # From the part to keys.
    write: Callable[[Any], Json] = lambda part: {}


class Part:
    def __init__(self, kind: type, *rows: Row, **fixed: object):
        """Describe a part of class `kind`.

        Args:
            fixed: options that no key determines.
        """
        self.kind = kind
        self.rows = rows
        self.fixed = fixed

    def read(self, key: Keys) -> Any:
        options = {name: x for row in self.rows for name, x in row.read(key).items()}
        return self.kind(**options, **self.fixed)

    def write(self, part: Any) -> Json:
        return {name: x for row in self.rows for name, x in row.write(part).items()}


def table(model_type: str, *rows: Row, **fixed: object) -> Part:
    """Return the table of a whole model."""
    return Part(ModelConfig, written(model_type=model_type), *rows, **fixed)


def plain(**names: Name) -> Row:
    """Map our options to their keys: ours = key, or (key, default).

    A key without a default is required. If a string has several names, the first that
    exists is read, and the first is written.
    """
    return _by_name(0, names)


def overruled(**names: Name) -> Row:
    """Do the same as `plain`, but write the last name."""
    return _by_name(-1, names)


# `place` is the index of the name that is written.
def _by_name(place: int, names: dict[str, Name]) -> Row:
    keys = {ours: (name,) if isinstance(name, str) else name for ours, name in names.items()}

    def read(key: Keys, spellings: str, *default: object) -> object:
        known = spellings.split()
        return key(next((name for name in known if name in key.config), known[place]), *default)

    return Row(
        lambda key: {ours: read(key, *name) for ours, name in keys.items()},
        lambda part: {name[0].split()[place]: getattr(part, ours) for ours, name in keys.items()},
    )


def derived(**options: Callable[[Keys], object]) -> Row:
    """Derive options from keys that other rows write."""
    return Row(lambda key: {ours: read(key) for ours, read in options.items()})


def either(ours: str, theirs: str, other: Callable[[Keys], object], *default: object) -> Row:
    """Map a key that may be null or 0; `other` then returns its value.

    Without a default, the key is required.
    """
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
    """Map a key that expresses our option in another way."""
    return Row(
        lambda key: {ours: read(key(theirs, *default))},
        lambda part: {theirs: write(getattr(part, ours))},
    )


def only(names: str, *known: object) -> Row:
    """Require keys to have a value in `known`, of which the first is the default."""

    def read(key: Keys) -> Json:
        for name in names.split():
            if (value := key(name, known[0])) not in known:
                raise ValueError(
                    f"config.json: {name} = {value!r}; only {' or '.join(map(repr, known))} is known"
                )
        return {}

    return Row(read)


def always(name: str, *known: object) -> Row:
    """Do the same as `only`, and write the first value."""
    return Row(only(name, *known).read, lambda part: {name: known[0]})


def written(**keys: object) -> Row:
    """Write keys that mean nothing to us."""
    return Row(write=lambda part: keys)


def beta_range(theirs: str, default: bool) -> Row:
    """Map a boolean: whether eigenvalues may be negative."""
    return changed(
        "beta_range",
        theirs,
        lambda negative: 2.0 if negative else 1.0,
        lambda beta: beta == 2.0,
        default,
    )


def mixer(options: Part) -> Row:
    """Write the keys of the model's first mixer of a kind, if it has any.

    All layers of one kind are equal in a family. Rows of a pattern read the keys.
    """

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
    """Map the experts if `given`; otherwise write the keys of `otherwise`."""
    options = Part(MoEConfig, *rows, **fixed)
    return Row(
        lambda key: {"moe": options.read(key)} if given(key) else {},
        lambda model: options.write(model.moe) if model.moe else otherwise(model),
    )


# --- Rows of several families -----------------------------------------------------------


# The usual size of a head.
def share_of_width(key: Keys) -> int:
    return key("hidden_size") // key("num_attention_heads")


def names_of_model(norm_eps: Name, num_layers: Name = "num_hidden_layers") -> Row:
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
COMMON = names_of_model("rms_norm_eps"), *USUAL
# Heads of softmax attention.
HEADS = plain(heads="num_attention_heads", kv_heads="num_key_value_heads")
# Heads share the width unless a key differs.
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
# Heads share the width; key heads are as many as query heads unless a key differs.
UNGROUPED = (
    plain(heads="num_attention_heads"),
    either("kv_heads", "num_key_value_heads", lambda key: key("num_attention_heads"), None),
    derived(head_dim=share_of_width),
)


def rope(theta: float, fraction: float | None = None) -> Row:
    return Row(lambda key: key.rope(theta, fraction), write_rope)


def write_rope(attention: Attention) -> Json:
    """Write `rope_parameters`, and the context length of YaRN."""
    positions = {
        "rope_theta": attention.rope_theta,
        "partial_rotary_factor": attention.rotary_fraction,
    }
    if (rope := attention.rope_scaling) is None:
        return {"rope_parameters": {"rope_type": "default", **positions}}
    used = {name: x for name in USES[rope.rope_type] if (x := getattr(rope, name)) is not None}
    reached = rope.reached if rope.rope_type == "yarn" else None
    longest = {"max_position_embeddings": round(reached)} if reached else {}
    return {"rope_parameters": used | positions, **longest}


# A limit may be an object that stands for Infinity.
def _read_time_step_limit(key: Keys) -> Json:
    given = key("time_step_limit", None) or (0.0, math.inf)
    limits = [float(x["__float__"]) if isinstance(x, dict) else 1.0 * x for x in given]
    if len(limits) != 2 or not limits[0] <= limits[1]:
        raise ValueError(
            f"config.json: time_step_limit = {limits}; give the lower limit, then the upper one"
        )
    return {"dt_min": limits[0], "dt_max": limits[1]}


def _write_time_step_limit(mamba: Mamba2) -> Json:
    limits = mamba.dt_min, mamba.dt_max
    shown = [{"__float__": "Infinity"} if math.isinf(x) else x for x in limits]
    return {} if limits == (0.0, math.inf) else {"time_step_limit": shown}


# Mamba-2's limits of time steps. Folders contain Infinity, which JSON lacks, or an object
# in its place.
TIME_STEP_LIMIT = Row(_read_time_step_limit, _write_time_step_limit)


def write_layer_types(model: ModelConfig, linear: str = "linear_attention") -> Json:
    return {
        "layer_types": [linear if x.mixers[0].linear else "full_attention" for x in model.layers]
    }


def layer_types(
    full: Part,
    linear: Part,
    is_full: Callable[[Keys, int], bool],
    write: Callable[[ModelConfig], Json] = write_layer_types,
    **names: str,
) -> Row:
    """Map the mixers of one period of the layers, and their keys.

    Only the keys of mixers that occur are required.

    Args:
        is_full: whether a layer has full attention, if the folder has no layer_types.
        names: further names of the two types.
    """
    parts = {"full_attention": full, "linear_attention": linear}

    def read(key: Keys) -> Json:
        count = key("num_hidden_layers")
        types = key("layer_types", None)
        # Types as listed, or by index, under their usual names.
        if not types:
            types = [
                "full_attention" if is_full(key, i) else "linear_attention" for i in range(count)
            ]
        types = [names.get(t, t) for t in types]
        if unknown := set(types) - set(parts):
            raise ValueError(
                f"config.json: layer_types has {sorted(unknown)}; known are {sorted(parts)}"
            )
        # One mixer for each type, arranged in the shortest pattern.
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
    """Return the shortest pattern whose repetition gives these layers."""
    n = 1
    while any(layer != layers[i % n] for i, layer in enumerate(layers)):
        n += 1
    return tuple(layers[:n])
