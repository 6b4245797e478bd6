"""What Hugging Face families are made of: layouts of tensors, and a table of the keys of config.json (keys.py).

Our names are those in `Decoder`; those of a layer's parameters are relative to the layer. A part of a model that
folders spell in several ways has several layouts: the first is written, any is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_linear.models.families.keys import Json, Part
from titan_linear.models.mixers import MIXERS


@dataclass(frozen=True)
class Layout:
    """Our parameters `ours`, interleaved group by group, are the tensors `theirs`, concatenated."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]  # a name with {e} stands for one tensor per expert
    # the first mixer's option that is the number of groups; None: one group
    groups: str | None = None
    form: str = "matrix"  # the shape on disk: a key of `shape_on_disk`
    # `theirs` are of equal size (the last may be smaller), whatever the sizes of `ours`
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


Spellings = tuple[Layout, ...]  # the layouts that one part of a model may have


@dataclass(frozen=True)
class OwnTokenizer:
    """`transformers` reads folders of these model types as if tokenizer.json were the family's own except for its
    vocabulary."""

    model_types: tuple[str, ...]
    # whether a tokenizer.json is the family's except for its vocabulary
    fits: Callable[[Json], bool]


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
    keys: Part  # of config.json
    model: tuple[Spellings, ...]
    layers: Mapping[tuple[type, ...], tuple[Spellings, ...]]  # by `Layer.kinds`, norms included
    mlp: tuple[Spellings, ...]
    experts: tuple[Spellings, ...]
    prefixes: tuple[str, ...] = ("model.",)  # possible ones of every name but lm_head's
    # tensors that are no part of the language model, as regular expressions
    ignored: tuple[str, ...] = ()
    # architectures that contain this one as their language model, or are it
    wrappers: tuple[str, ...] = ()
    # whether transformers ties the head where config.json says so; if not, folders have the head too
    ties: bool = True
    mtp: MTP | None = None
    # modules of which `peft` takes no adapter in this architecture
    peft_refuses: tuple[str, ...] = ()
    # those that it takes for experts', unless their weights are named
    peft_weights: tuple[str, ...] = ()
    # ends of names of our parameters that transformers keeps in float32 or wider
    float32: tuple[str, ...] = ()
    own_tokenizer: OwnTokenizer | None = None


def read_family(name: str, keys: Part, own_tokenizer: OwnTokenizer | None) -> Family:
    """A family with what is in tensors/NAME.json: fields of `Family`. A table there has, for our parameters, each
    spelling of the tensors that they are: names, alone or in a table of fields of `Layout`."""
    file = Path(__file__).with_name("tensors") / f"{name}.json"
    has: dict[str, Any] = {
        field: tuple(x) if isinstance(x, list) else x
        for field, x in json.loads(file.read_text()).items()
    }
    has |= {part: _parts(has[part]) for part in ("model", "mlp", "experts")}
    has["layers"] = {
        tuple(MIXERS[kind] for kind in kinds.split()): _parts(parts)
        for kinds, parts in has["layers"].items()
    }
    if mtp := has.pop("mtp", None):
        has["mtp"] = MTP(**mtp | {"parts": _parts(mtp["parts"])})
    return Family(keys, own_tokenizer=own_tokenizer, **has)


def _parts(table: Json) -> tuple[Spellings, ...]:
    return tuple(
        tuple(_layout(ours, theirs) for theirs in spellings) for ours, spellings in table.items()
    )


def _layout(ours: str, theirs: str | Json) -> Layout:
    options = {"theirs": theirs} if isinstance(theirs, str) else theirs
    return Layout(
        **options | {"ours": tuple(ours.split()), "theirs": tuple(options["theirs"].split())}
    )
