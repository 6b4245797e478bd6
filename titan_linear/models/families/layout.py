"""What Hugging Face families are made of: layouts of tensors, and a table of the keys of config.json (keys.py).

Our names are those in `Decoder`; those of a layer's parameters are relative to the layer. A part of a model that
folders spell in several ways has several layouts: the first is written, any is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_linear.models.families.keys import Json, Part


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


@dataclass(frozen=True)
class OwnTokenizer:
    """`transformers` reads folders of these model types as if tokenizer.json were the family's own except for its
    vocabulary."""

    model_types: tuple[str, ...]
    fits: Callable[[Json], bool]  # whether a tokenizer.json is the family's except for its vocabulary


@dataclass(frozen=True)
class MTP:
    """The layers that predict further tokens."""

    key: str  # of config.json: for how many
    parts: tuple[Spellings, ...]  # of what they have beside layers
    place: str = "mtp.layers.{j}."  # of the j-th of them; "": numbered on after the others
    most: int | None = None  # of such tokens
    implied: int = 0  # their number without the key


@dataclass(frozen=True)
class Family:
    model: tuple[Spellings, ...]
    layers: Mapping[tuple[type, ...], tuple[Spellings, ...]]  # by `Layer.kinds`, norms included
    mlp: tuple[Spellings, ...]
    experts: tuple[Spellings, ...]
    keys: Part  # of config.json
    prefixes: tuple[str, ...] = ("model.",)  # possible ones of every name but lm_head's
    ignored: tuple[str, ...] = ()  # tensors that are no part of the language model, as regular expressions
    wrappers: tuple[str, ...] = ()  # architectures that contain this one as their language model
    own_tokenizer: OwnTokenizer | None = None
    ties: bool = True  # whether transformers ties the head where config.json says so; if not, folders have the head too
    mtp: MTP | None = None
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
MTP_PARTS = weights("", "", "enorm", "hnorm", "eh_proj", final_norm="final_layernorm")
NORMS = weights("", "", mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm")
MLP = swiglu("mlp.", "mlp.")
