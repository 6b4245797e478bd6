"""Mapping between our parameters and the tensors of Hugging Face folders.

The mapping is data: names and layouts. Every tensor is read as a matrix of rows along its
last dimension (the elements of a vector are rows of one element), which leaves its bytes in
place. A `Layout` states that some of our parameters, interleaved group by group, equal some
tensors on disk, concatenated. `Placement`s follow from it: which row of which tensor is
which row of ours. A rank can therefore read just the rows that it owns, import and export
use the same table, and a test can prove that the table is a bijection.

    [q | k | v·r | z·r] per key head (Qwen3-Next)
        Layout((q, k, v, g), ("in_proj_qkvz",), groups="heads")
    one tensor per expert and projection
        Layout(("gate_up_proj",), ("{e}.gate_proj", "{e}.up_proj"))
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from titan_linear.models.config import (
    MOST_LAYERS,
    MixerOptions,
    ModelConfig,
    MoEConfig,
    differences,
    mistake,
)
from titan_linear.models.decoder import Decoder
from titan_linear.models.families import FAMILIES
from titan_linear.models.families.keys import Json, Keys
from titan_linear.models.families.layout import Family, Layout

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class StoredTensor(NamedTuple):
    """A tensor on disk."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Placement:
    """One of our parameters, whose rows are runs of rows of the concatenated `sources`."""

    name: str
    shape: Shape
    sources: tuple[StoredTensor, ...]
    # Runs (first, last + 1) of the concatenation; None: all of it, in order.
    rows: tuple[tuple[int, int], ...] | None = None

    @property
    def width(self) -> int:
        """Number of elements per row, in our parameter and in every source."""
        return _width(self.shape)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape) // self.width

    def pieces(
        self, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[StoredTensor, int, int, int]]:
        """Yield the pieces that fill our rows [first, last), in our order.

        A slice [a, b) of our first dimension is rows [a·n, b·n) with n = num_rows /
        shape[0].

        Yields:
            (source, first row, last row + 1, our row): rows of the source, and the row of
                ours where they start.
        """
        last = self.num_rows if last is None else last
        ends = list(accumulate(_rows(s.shape, self.width) for s in self.sources))
        ours = 0
        # `ours` is our row where the current run starts.
        for start, stop in self.rows or ((0, ends[-1]),):
            # The part of the run that falls into [first, last).
            a = start + max(first - ours, 0)
            b = stop - max(ours + stop - start - last, 0)
            # Split it where one source ends and the next begins.
            for source, end in zip(self.sources, ends):
                begin = end - _rows(source.shape, self.width)
                low = max(a, begin)
                high = min(b, end)
                if low < high:
                    yield source, low - begin, high - begin, ours + low - start
            ours += stop - start


def placements(config: ModelConfig, family: str, on_disk: Shapes | None = None) -> list[Placement]:
    """Return the placement of every parameter, in the order of `named_parameters`.

    Args:
        family: a key of FAMILIES, the name of the Hugging Face class.
        on_disk: names and shapes of a folder's tensors, for reading: placements then use
            the spelling found there. By default, for writing, they use the spelling that
            `transformers` writes.

    Raises:
        ValueError: parameters of ours without a tensor, tensors of another shape, or unused
            tensors; the message lists them all.
    """
    # Of each layout, choose the first spelling that is complete on disk, or else the most
    # complete one. Collect its placements and faults.
    ours = shapes_of(config)
    done: dict[str, Placement] = {}
    problems = []
    used = set()
    for spellings in _layouts(config, family, ours, on_disk):
        layout = min(spellings, key=lambda s: len(_wrong(s, on_disk)) / len(s.sources))
        problems += _wrong(layout, on_disk)
        used |= {source.name for source in layout.sources}
        done |= {placement.name: placement for placement in _placements(layout, ours)}
    # The table must cover the model; the folder must not hold anything else.
    uncovered = [name for name in ours if name not in done]
    assert not uncovered, f"{family} has no layout for {uncovered}"
    if on_disk is not None:
        used |= ignored(config, family, on_disk)
        problems += [
            f"{name} {list(shape)}: not used" for name, shape in on_disk.items() if name not in used
        ]
    if problems:
        raise ValueError(f"the tensors are not those of this {family}:\n  " + "\n  ".join(problems))
    return [done[name] for name in ours]


def joined(config: ModelConfig, family: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of our parameters that `transformers` writes as one tensor."""
    parts = _layouts(config, family, shapes_of(config), None)
    return tuple(spellings[0].ours for spellings in parts if len(spellings[0].ours) > 1)


def live_layouts(
    config: ModelConfig, family: str, ours: Shapes
) -> Iterator[tuple[StoredTensor, list[Placement]]]:
    """Yield each tensor of `transformers`' module that consists of parameters of ours.

    Args:
        ours: shapes of our parameters.
    """
    for spellings in _layouts(config, family, ours, None, "model."):
        layout = spellings[-1]
        if len(layout.sources) == 1:
            yield layout.sources[0], list(_placements(layout, ours))


def shapes_of(config: ModelConfig) -> Shapes:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config.base).named_parameters()}


def ignored(config: ModelConfig, family: str, on_disk: Shapes) -> set[str]:
    """Return the names of a folder's tensors that can be ignored.

    These are tensors outside the language model (vision, multi-token prediction, a tied
    head) and tensors without effect (without elements, or the gate of a shared expert that
    does not exist).
    """
    patterns = list(FAMILIES[family].ignored)
    if config.tie_embeddings:
        patterns.append(r"lm_head\.weight")
    if config.moe is not None and config.moe.shared_hidden_dim == 0:
        patterns.append(r".*\.shared_expert_gate\.weight")
    found = {
        n for n, shape in on_disk.items() if 0 in shape or any(re.fullmatch(p, n) for p in patterns)
    }
    # Layers that predict further tokens, if the model leaves them out.
    if (mtp := FAMILIES[family].mtp) and not config.mtp_layers:
        layer = re.compile(r"(mtp)\..*" if mtp.place else r".*layers\.(\d+)\..*")
        of_layers = ((n, layer.fullmatch(n)) for n in on_disk)
        found |= {n for n, m in of_layers if m and (mtp.place or int(m[1]) >= config.num_layers)}
    return found


def config_from_hf(config: Json, mtp_layers: int = 0) -> tuple[str, ModelConfig]:
    """Read the dict of a config.json.

    Args:
        mtp_layers: number of further tokens that the model should predict: all that the
            folder's layers predict, or 0.

    Returns:
        (family, model).

    Raises:
        ValueError: an architecture or an option that is not supported.
    """
    given = config.get("architectures")
    architecture = given[0] if isinstance(given, list) and given else None
    for name, family in FAMILIES.items():
        if architecture in (name, *family.wrappers):
            if mtp_layers and mtp_layers != (depth := _depth(family, config)):
                raise ValueError(
                    f"model.mtp_layers = {mtp_layers}, but the layers of config.json predict {depth} further tokens "
                    f"({family.mtp.key if family.mtp else 'its architecture has none'}); set it to {depth}"
                )
            return name, replace(_read(family, config), mtp_layers=mtp_layers)
    if "ssm_cfg" in config:
        raise ValueError(
            f"config.json: ssm_cfg = {config['ssm_cfg']!r}: mamba_ssm's own format is not read; give a folder of "
            "transformers"
        )
    raise ValueError(
        f"architectures = {given}: unknown; give a folder of one of {', '.join(FAMILIES)}"
    )


def mtp_depth(config: Json) -> int:
    """Return the number of further tokens that the layers of a config.json predict."""
    return _depth(FAMILIES[config_from_hf(config)[0]], config)


def _depth(family: Family, config: Json) -> int:
    return (family.mtp and _text(config).get(family.mtp.key, family.mtp.implied)) or 0


def _text(config: Json) -> Json:
    """Return the language model's keys, which may be in text_config.

    `transformers` reads tie_word_embeddings outside of text_config.
    """
    outside = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config, **(config.get("text_config") or {}), **outside}


def _read(family: Family, config: Json) -> ModelConfig:
    """Read the model of a config.json.

    Raises:
        ValueError: a value has the wrong type for its key, or is one that no model can
            have.
    """
    try:
        text = _text(config)
        if type(n := text.get("num_hidden_layers")) is int and n > MOST_LAYERS:
            raise ValueError(
                f"config.json: num_hidden_layers = {n} is above {MOST_LAYERS:,}; fetch it again"
            )
        model = family.keys.read(Keys(text))
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json: a value is of another kind than its key's ({error}); fetch it again"
        ) from None
    if wrong := mistake(model):
        raise ValueError(f"config.json gives {wrong}; fetch it again")
    return model


def config_to_hf(family: str, config: ModelConfig) -> Json:
    """Write the dict of a config.json without special tokens.

    Raises:
        ValueError: the model does not fit this family.
    """
    # The family must have all of the model's layers.
    if family not in FAMILIES:
        raise ValueError(f"family = {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    if unknown := {
        layer.name for layer in config.layers if layer.kinds not in FAMILIES[family].layers
    }:
        raise ValueError(
            f"{family} cannot hold this model: it has no layers {', '.join(sorted(unknown))}; use another"
        )
    # Write the keys; layers that predict further tokens have a key of their own.
    keys = FAMILIES[family].keys
    mtp = FAMILIES[family].mtp
    depth = config.mtp_layers
    config = replace(config, mtp_layers=0)
    written = keys.write(config)
    if depth and not (mtp and depth <= (mtp.most or depth)):
        raise ValueError(
            f"{family} cannot hold this model: mtp_layers = {depth}; use another, or {mtp.most if mtp else 0}"
        )
    if depth:
        written[mtp.key] = depth
    # Read the keys back: they must describe the same model.
    if found := differences(config, keys.read(Keys(written))):
        said = ", ".join(f"{option} = {ours!r}" for option, (ours, _) in found.items())
        raise ValueError(f"{family} cannot hold this model: {said}; use another")
    # Special tokens are null, because the defaults of transformers belong to one model.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [family], **written, **tokens}


# --- From the table to placements -------------------------------------------------------


class _Resolved(NamedTuple):
    """A layout applied to one layer: our names, and the sources with their shapes."""

    ours: tuple[str, ...]
    sources: tuple[StoredTensor, ...]
    groups: int


def _layouts(
    config: ModelConfig, family: str, ours: Shapes, on_disk: Shapes | None, prefix: str = ""
) -> Iterator[list[_Resolved]]:
    """Yield the possible spellings of every part of the model."""
    has = FAMILIES[family]
    # On disk, names may have one of several prefixes.
    (embedding,) = has.model[0][0].theirs
    prefix = prefix or next(
        (p for p in has.prefixes if on_disk and p + embedding in on_disk), has.prefixes[0]
    )
    num_experts = config.moe.num_experts if config.moe else 0
    # Parts outside the layers.
    for spellings in has.model:
        if set(spellings[0].ours) <= ours.keys():
            yield [_resolve(layout, "", prefix, ours) for layout in spellings]
    # Parts of each layer, including the layers that predict further tokens.
    for i, layer in enumerate(config.layers):
        mine = f"layers.{i}."
        theirs = f"{prefix}layers.{i}."
        more = has.mtp.parts if i >= config.num_layers else ()
        if more and has.mtp.place:
            theirs = has.mtp.place.format(j=i - config.num_layers)
        mixer = layer.mixers[0] if layer.mixers else None
        of_mlp = has.experts if isinstance(layer.mlp, MoEConfig) else has.mlp
        for spellings in has.layers[layer.kinds] + of_mlp + more:
            fitting = [s for s in spellings if all(mine + name in ours for name in s.ours)]
            if fitting:
                yield [_resolve(s, mine, theirs, ours, mixer, num_experts) for s in fitting]


def _resolve(
    layout: Layout,
    mine: str,
    theirs: str,
    ours: Shapes,
    mixer: MixerOptions | None = None,
    num_experts: int = 0,
) -> _Resolved:
    names = tuple(mine + name for name in layout.ours)
    width = _width(ours[names[0]])
    counts = [_rows(ours[name], width) for name in names]
    # Names on disk, one per expert if the layout has `{e}`.
    experts = range(num_experts) if "{e}" in layout.theirs[0] else (0,)
    prefixed = [t if t.startswith(("lm_head", "mtp.")) else theirs + t for t in layout.theirs]
    on_disk = [t.replace("{e}", str(e)) for e in experts for t in prefixed]
    # Rows of each source: the same as ours, or equal shares of all rows.
    if len(on_disk) == len(names) and not layout.equal:
        rows = counts
    else:
        step = -(-sum(counts) // len(on_disk))
        rows = [min(step, sum(counts) - i * step) for i in range(len(on_disk))]
    groups = getattr(mixer, layout.groups) if layout.groups else 1
    shapes = [layout.shape_on_disk(n, width, ours[names[0]], groups) for n in rows]
    return _Resolved(names, tuple(map(StoredTensor, on_disk, shapes)), groups)


def _wrong(layout: _Resolved, on_disk: Shapes | None) -> list[str]:
    """List the sources that are missing or have another shape; none where nothing is on disk."""
    problems: list[str] = []
    if on_disk is None:
        return problems
    for source in layout.sources:
        there = on_disk.get(source.name)
        shape = list(source.shape)
        if there is None:
            problems.append(f"{source.name}: missing, {shape} for {', '.join(layout.ours)}")
        elif tuple(there) != source.shape:
            problems.append(f"{source.name}: shape {list(there)}, not {shape}")
    return problems


def _placements(layout: _Resolved, ours: Shapes) -> Iterator[Placement]:
    """Yield the placements of a layout.

    Group g of the sources contains group g of each parameter in turn.
    """
    width = _width(ours[layout.ours[0]])
    sizes = [_rows(ours[name], width) // layout.groups for name in layout.ours]
    starts = [0, *accumulate(sizes)]
    group = sum(sizes)
    for name, size, start in zip(layout.ours, sizes, starts):
        runs = tuple((g * group + start, g * group + start + size) for g in range(layout.groups))
        yield Placement(name, ours[name], layout.sources, None if len(layout.ours) == 1 else runs)


def _width(shape: Shape) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _rows(shape: Shape, width: int) -> int:
    return math.prod(shape) // width
