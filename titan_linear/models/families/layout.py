"""Building blocks of Hugging Face families: layouts of tensors, and a table of keys.

The table of the keys of config.json is described in keys.py.

Our names are the names in `Decoder`; names of a layer's parameters are relative to the
layer. Folders may spell a part of a model in several ways. It then has several layouts: the
first is written, and any is read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_linear.models.families.keys import Json, Part
from titan_linear.models.mixers import MIXERS

Names = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Equality of our parameters, interleaved by group, with concatenated tensors."""

    ours: Names
    # A name with {e} stands for one tensor per expert.
    theirs: Names
    # The first mixer's option with the number of groups; None: one group.
    groups: str | None = None
    # The shape on disk: a key of `shape_on_disk`.
    form: str = "matrix"
    # Whether `theirs` are of equal size (the last may be smaller), whatever the sizes of
    # `ours`.
    equal: bool = False

    def shape_on_disk(
        self, rows: int, width: int, ours: tuple[int, ...], groups: int
    ) -> tuple[int, ...]:
        return {
            "matrix": (rows,) if len(ours) == 1 else (rows, width),
            "conv": (rows, 1, width),
            "heads": (1, 1, rows, 1),
            "stacked": (ours[0], rows // ours[0], width),
            "vector": (1, 1, rows),
            "by group": (groups, rows // groups),
            "vectors": (len(self.ours), rows // len(self.ours)),
        }[self.form]


# The possible layouts of one part of a model, and of several parts.
Spellings = tuple[Layout, ...]
Parts = tuple[Spellings, ...]


class OwnTokenizer(NamedTuple):
    """The family's own tokenizer.

    `transformers` reads folders of these model types as if tokenizer.json were the family's
    own, except for its vocabulary.
    """

    model_types: Names
    # Whether a tokenizer.json is the family's own, except for its vocabulary.
    fits: Callable[[Json], bool]


class MTP(NamedTuple):
    """Layers that predict further tokens."""

    # The key of config.json with the number of further tokens.
    key: str
    # Parts that these layers have in addition to a layer's usual parts.
    parts: Parts
    # Prefix of the j-th of these layers; "": their numbers continue after the other layers.
    place: str = "mtp.layers.{j}."
    # Most further tokens that the family allows.
    most: int | None = None
    # Their number without the key.
    implied: int = 0


@dataclass(frozen=True)
class Family:
    chosen_by = "architectures"
    # The architecture in config.json.
    name: str
    # The table of config.json.
    keys: Part
    model: Parts
    # By `Layer.kinds`, norms included.
    layers: Mapping[tuple[type, ...], Parts]
    mlp: Parts
    experts: Parts
    # Possible prefixes of every name except lm_head's.
    prefixes: Names = ("model.",)
    # Regular expressions of tensors outside the language model.
    ignored: Names = ()
    # Architectures that contain this one as their language model, or are equal to it.
    wrappers: Names = ()
    # Whether transformers ties the head if config.json says so. If not, folders contain the
    # head too.
    ties: bool = True
    mtp: MTP | None = None
    # Modules for which `peft` accepts no adapter in this architecture.
    peft_refuses: Names = ()
    # Modules that `peft` mistakes for experts, unless their weights are named.
    peft_weights: Names = ()
    # Name endings of our parameters that transformers keeps in float32 or wider.
    float32: Names = ()
    own_tokenizer: OwnTokenizer | None = None


def read_family(
    name: str,
    keys: Part,
    own_tokenizer: OwnTokenizer | None = None,
    tensors: Json | None = None,
) -> Family:
    """Read a family's fields from `tensors`, by default the content of tensors/NAME.json.

    A table there lists, for our parameters, each spelling of their tensors: names, alone or
    in a table of fields of `Layout`.
    """
    if tensors is None:
        tensors = json.loads((Path(__file__).with_name("tensors") / f"{name}.json").read_text())
    has: dict[str, Any] = {
        field: tuple(x) if isinstance(x, list) else x for field, x in tensors.items()
    }
    # Layouts: outside the layers, of MLPs and experts, and of each kind of layer.
    has |= {part: _parts(has[part]) for part in ("model", "mlp", "experts")}
    has["layers"] = {_kinds(kinds): _parts(parts) for kinds, parts in has["layers"].items()}
    if mtp := has.pop("mtp", None):
        has["mtp"] = MTP(**mtp | {"parts": _parts(mtp["parts"])})
    return Family(name, keys, own_tokenizer=own_tokenizer, **has)


def _kinds(names: str) -> tuple[type, ...]:
    return tuple(MIXERS[name] for name in names.split())


def _parts(table: Json) -> Parts:
    parts = []
    for ours, spellings in table.items():
        parts.append(tuple(_layout(ours, theirs) for theirs in spellings))
    return tuple(parts)


def _layout(ours: str, theirs: str | Json) -> Layout:
    options = {"theirs": theirs} if isinstance(theirs, str) else theirs
    return Layout(
        **options | {"ours": tuple(ours.split()), "theirs": tuple(options["theirs"].split())}
    )
