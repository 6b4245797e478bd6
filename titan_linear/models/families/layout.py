"""What Hugging Face families are made of: layouts of tensors, and a config.json whose errors name the key.

Our names are those in `Decoder`; those of a layer's parameters are relative to the layer. A part of a model that
folders spell in several ways has several layouts: the first is written, any is read. Reading a config.json raises
ValueError for whatever a family does that our modules cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from titan_linear.models.config import MixerOptions, ModelConfig, mistake
from titan_linear.models.mixers import Attention
from titan_linear.models.rope import USES, RopeScaling


@dataclass(frozen=True)
class Layout:
    """Our parameters `ours`, interleaved group by group, are the tensors `theirs`, concatenated."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]  # a name with {e} stands for one tensor per expert
    groups: str | None = None  # the first mixer's option that is the number of groups; None: one group
    form: str = "matrix"  # the shape on disk: a key of `shape_on_disk`
    equal: bool = False  # `theirs` are of equal size (the last may be smaller), whatever the sizes of `ours`

    def shape_on_disk(self, rows: int, width: int, ours: tuple[int, ...], groups: int) -> tuple[int, ...]:
        return {
            "matrix": (rows,) if len(ours) == 1 else (rows, width),
            "conv": (rows, 1, width),
            "heads": (1, 1, rows, 1),
            "stacked": (ours[0], rows // ours[0], width),
            "vector": (1, 1, rows),
            "by group": (groups, rows // groups),
            "vectors": (len(self.ours), rows // len(self.ours)),
        }[self.form]


Spellings = tuple[Layout, ...]  # the layouts that one part of a model may have
Json = dict[str, object]
Names = Mapping[str, str]  # options of ours -> their keys in config.json
Options = TypeVar("Options", bound=MixerOptions)


@dataclass(frozen=True)
class OwnTokenizer:
    """`transformers` reads folders of these model types as if tokenizer.json were the family's own except for its
    vocabulary."""

    model_types: tuple[str, ...]
    fits: Callable[[Json], bool]  # whether a tokenizer.json is the family's except for its vocabulary


@dataclass(frozen=True)
class Family:
    model: tuple[Spellings, ...]
    layers: Mapping[tuple[type, ...], tuple[Spellings, ...]]  # by `Layer.kinds`, norms included
    mlp: tuple[Spellings, ...]
    experts: tuple[Spellings, ...]
    config_from_hf: Callable[[Json], ModelConfig]
    config_to_hf: Callable[[ModelConfig], Json]
    prefixes: tuple[str, ...] = ("model.",)  # possible ones of every name but lm_head's
    ignored: tuple[str, ...] = ()  # tensors that are no part of the language model, as regular expressions
    wrappers: tuple[str, ...] = ()  # architectures that contain this one as their language model
    own_tokenizer: OwnTokenizer | None = None
    ties: bool = True  # whether transformers ties the head where config.json says so; if not, folders have the head too
    mtp_layers: bool = False  # whether layers after the last predict further tokens: they are ignored
    float32: tuple[str, ...] = ()  # ends of names of our parameters that transformers keeps in float32 or wider


# --- Tensors ----------------------------------------------------------------------------------------------------------

GATES = ("A_log", "dt_bias")
ROUTER = ("router.weight", "selection_bias")


def spelled(ours: str, *theirs: str, **options: object) -> Spellings:
    """One of our parameters, which folders spell in any of the ways `theirs`."""
    return tuple(Layout((ours,), (name,), **options) for name in theirs)


def weights(ours: str, theirs: str, *same: str, **renamed: str) -> tuple[Spellings, ...]:
    """Tensors one to one: ours.NAME.weight is theirs.NAME.weight, or theirs.OTHER.weight for each NAME = OTHER."""
    names = {name: name for name in same} | renamed
    return tuple(spelled(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in names.items())


def fused(ours: tuple[str, ...], theirs: str, **options: object) -> Spellings:
    """Several of a mixer's projections in one tensor."""
    return (Layout(tuple(f"mixer.{n}.weight" for n in ours), (theirs,), **options),)


def convolutions(prefix: str, *, thirds: bool = False) -> Spellings:
    """Three tensors, or one over q, k and v; with `thirds` also three of equal size, whatever the widths of q, k, v."""
    ours = tuple(f"mixer.{x}_conv1d.weight" for x in "qkv")
    three = tuple(f"{prefix}{x}_conv1d.weight" for x in "qkv")
    one = Layout(ours, (f"{prefix}conv1d.weight",), form="conv")
    equal = (Layout(ours, three, form="conv", equal=True),) if thirds else ()
    return (Layout(ours, three, form="conv"), one, *equal)


def gates(theirs: str) -> tuple[Spellings, ...]:
    return tuple(spelled(f"mixer.{name}", f"{theirs}{name}") for name in GATES)


def self_attention(ours: str = "mixer.", theirs: str = "self_attn.", *norms: str) -> tuple[Spellings, ...]:
    """The four projections of softmax attention, and its norms."""
    return weights(ours, theirs, "q_proj", "k_proj", "v_proj", "o_proj", *norms)


def mamba2(theirs: str) -> tuple[Spellings, ...]:
    """A Mamba-2 mixer with mamba_ssm's fused tensors, and its own output norm."""
    of_conv = ("x_conv1d", "b_conv1d", "c_conv1d")
    return (
        fused(("z_proj", "x_proj", "b_proj", "c_proj", "dt_proj"), f"{theirs}in_proj.weight"),
        fused(of_conv, f"{theirs}conv1d.weight", form="conv"),
        (Layout(tuple(f"mixer.{name}.bias" for name in of_conv), (f"{theirs}conv1d.bias",)),),
        *gates(theirs),
        spelled("mixer.D", f"{theirs}D"),
        *weights("mixer.", theirs, o_norm="norm", o_proj="out_proj"),
    )


def swiglu(ours: str, *theirs: str) -> tuple[Spellings, ...]:
    """The three projections, in each spelling `theirs` of the module's name."""
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return tuple(spelled(ours + n, *(t + n for t in theirs)) for n in names)


def experts(places: tuple[str, str], gate: str, up: str, down: str) -> tuple[Spellings, ...]:
    """One tensor per expert and projection, or all experts stacked: the module's name for the first and the second."""
    disk, live = places
    apart = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    return tuple(
        (
            Layout((f"mlp.experts.{ours}",), tuple(f"{disk}experts.{{e}}.{name}.weight" for name in names)),
            *spelled(f"mlp.experts.{ours}", f"{live}experts.{ours}", form="stacked"),
        )
        for ours, names in apart.items()
    )


def outside_layers(embedding: str, norm: str) -> tuple[Spellings, ...]:
    """The embedding, the norm before the head, and the head."""
    return (
        *weights("", "", embedding=embedding),
        *weights("head.", "", norm=norm),
        *weights("", "", head="lm_head"),
    )


MODEL = outside_layers("embed_tokens", "norm")
NORMS = weights("", "", mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm")
MLP = swiglu("mlp.", "mlp.")

# --- config.json ------------------------------------------------------------------------------------------------------


class Keys:
    """A config.json whose errors name the key at fault."""

    def __init__(self, config: Json):
        self.config = config

    def __call__(self, key: str, *default: object) -> object:
        if key in self.config or default:
            return self.config.get(key, *default)
        raise ValueError(f"config.json: {key!r} is missing; fetch it again")

    def options(self, names: Names, **defaults: object) -> Json:
        """Our options of these names; those without a default must be there."""
        given = {ours: (defaults[ours],) for ours in defaults}
        return {ours: self(theirs, *given.get(ours, ())) for ours, theirs in names.items()}

    def only(self, key: str, *known: object) -> None:
        """Refuse a value that is not in `known`, of which the first is the default."""
        if (value := self.config.get(key, known[0])) not in known:
            raise ValueError(f"config.json: {key} = {value!r}; only {' or '.join(map(repr, known))} is known")

    def head_dim(self) -> int:
        """Of softmax attention; heads share the width unless a key says otherwise."""
        return self("head_dim", None) or self("hidden_size") // self("num_attention_heads")

    def rope(self, theta: float, fraction: float | None = None) -> Json:
        """Attention's options of positions; the arguments are defaults. NaN: there is no theta by default, and none
        may be given. No fraction: heads are rotated as a whole.
        These keys have had two names; the older one takes precedence, as in transformers. They may be given by type
        of layer."""
        rope = self("rope_scaling", None) or self("rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        if by_type := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise ValueError(f"config.json: rope_parameters has {by_type}, and no 'full_attention'; set that")
        read = {"rope_theta": rope.get("rope_theta", self("rope_theta", theta))}
        if read["rope_theta"] is None and not math.isnan(theta):
            raise ValueError("config.json: rope_theta = None, and attention of this architecture has positions")
        if fraction is not None:
            read["rotary_fraction"] = rope.get("partial_rotary_factor", self("partial_rotary_factor", fraction))
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind != "default":
            longest = self("max_position_embeddings", None)
            given = {"original_max_position_embeddings": longest, **rope, "rope_type": kind}
            used = {name: given.get(name) for name in USES.get(kind, USES["linear"])}
            scaling = {name: x for name, x in used.items() if x is not None}
            read["rope_scaling"] = RopeScaling(**{"factor": None, **scaling})
        return read

    def pattern(
        self,
        full: Callable[[Keys], MixerOptions],
        linear: Callable[[Keys], MixerOptions],
        is_full: Callable[[int], bool],
        **names: str,
    ) -> tuple[MixerOptions, ...]:
        """The mixers of one period of the layers. Only the keys of mixers that occur are required.

        is_full: which layers are, without layer_types; names: further ones of the two types.
        """
        read = {"full_attention": full, "linear_attention": linear}
        types = self("layer_types", None)
        if not types:
            types = ["full_attention" if is_full(i) else "linear_attention" for i in range(self("num_hidden_layers"))]
        types = [names.get(t, t) for t in types]
        if unknown := set(types) - set(read):
            raise ValueError(f"config.json: layer_types has {sorted(unknown)}; known are {sorted(read)}")
        if len(types) != self("num_hidden_layers"):
            raise ValueError(
                f"config.json: layer_types has {len(types)} layers; num_hidden_layers = {self('num_hidden_layers')} "
                "must be the same number"
            )
        mixers = {t: read[t](self) for t in set(types)}
        return shortest([mixers[t] for t in types])


def check_values(model: ModelConfig) -> None:
    """ValueError: the values from config.json are of no model."""
    if wrong := mistake(model):
        raise ValueError(f"config.json gives {wrong}; fetch it again")


def shortest(layers: list[MixerOptions]) -> tuple[MixerOptions, ...]:
    """The shortest pattern whose repetition gives these layers."""
    periods = (n for n in range(1, len(layers) + 1) if all(m == layers[i % n] for i, m in enumerate(layers)))
    return tuple(layers[: next(periods)])


def layer_types(config: ModelConfig) -> list[str]:
    return ["linear_attention" if layer.mixers[0].linear else "full_attention" for layer in config.layers]


def options_of(config: ModelConfig, kind: type[Options]) -> Options | None:
    """The options of the model's first layer of a kind; None: it has none. A family's layers of one kind are alike."""
    return next((mixer for mixer in config.mixers if isinstance(mixer, kind)), None)


def named(options: object, names: Names) -> Json:
    """The inverse of `Keys.options`."""
    return {theirs: getattr(options, ours) for ours, theirs in names.items()}


HEADS = dict(heads="num_attention_heads", kv_heads="num_key_value_heads")  # of softmax attention


def attention_to_hf(attention: Attention) -> Json:
    return named(attention, HEADS) | rope_to_hf(attention)


def rope_to_hf(attention: Attention) -> Json:
    """`rope_parameters`, and the context of YaRN."""
    positions = dict(rope_theta=attention.rope_theta, partial_rotary_factor=attention.rotary_fraction)
    if (rope := attention.rope_scaling) is None:
        return dict(rope_parameters=dict(rope_type="default", **positions))
    used = {name: x for name in USES[rope.rope_type] if (x := getattr(rope, name)) is not None}
    reached = rope.factor * rope.original_max_position_embeddings if rope.rope_type == "yarn" else None
    return dict(rope_parameters=used | positions, **({"max_position_embeddings": round(reached)} if reached else {}))


def time_step_limit(key: Keys) -> Json:
    """Mamba-2's limits of time steps. Folders have Infinity there, which JSON lacks, or an object for it."""
    given = key("time_step_limit", None) or (0.0, math.inf)
    limits = [float(x["__float__"]) if isinstance(x, dict) else 1.0 * x for x in given]
    if len(limits) != 2 or not limits[0] <= limits[1]:
        raise ValueError(f"config.json: time_step_limit = {limits}; give the lower limit, then the upper one")
    return dict(dt_min=limits[0], dt_max=limits[1])


def time_step_limit_to_hf(low: float, high: float) -> Json:
    """The key for limits other than 0 and infinity."""
    given = [{"__float__": "Infinity"} if math.isinf(x) else x for x in (low, high)]
    return {} if (low, high) == (0.0, math.inf) else {"time_step_limit": given}


# The options that every family gives the same names, except for those of norm_eps.
COMMON = dict(
    vocab_size="vocab_size",
    dim="hidden_size",
    num_layers="num_hidden_layers",
    norm_eps="rms_norm_eps",
    tie_embeddings="tie_word_embeddings",
    init_std="initializer_range",
)


def common_from_hf(key: Keys) -> Json:
    key.only("attention_bias", False)
    key.only("hidden_act", "silu", "swish")
    key.only("quantization_config", None)
    return key.options(COMMON, tie_embeddings=False, init_std=0.02)


def common_to_hf(config: ModelConfig) -> Json:
    fixed = dict(hidden_act="silu", attention_bias=False)
    return named(config, COMMON) | fixed | dict(layer_types=layer_types(config))


MAMBA2_SIZES = dict(
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    state_dim="mamba_d_state",
    groups="mamba_n_groups",
    conv_size="mamba_d_conv",
    conv_bias="mamba_conv_bias",
)  # in Granite's and Falcon's families
GDN_SIZES = dict(
    heads="linear_num_key_heads",
    v_heads="linear_num_value_heads",
    head_dim="linear_key_head_dim",
    v_head_dim="linear_value_head_dim",
    conv_size="linear_conv_kernel_dim",
)  # in Qwen's and OLMo's families
