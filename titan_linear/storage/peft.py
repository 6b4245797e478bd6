"""PEFT folders: the adapters of a Hugging Face model, as `peft` and `transformers` open them.

    adapter_config.json            rank, alpha, what is adapted
    adapter_model.safetensors      A and B by the names of transformers' modules; other parameters that were trained

An adapter there is of a matrix that may be several of our projections: A is theirs, and B's rows lie as the matrix's do
(`models/adapters.py`). Of stacked experts, A [E, r, inputs] lies as [E · r, inputs] and B [E, outputs, r] as
[outputs, r · E]. The base's fingerprint is in the header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_linear.config import Adapter as Options
from titan_linear.models.adapters import Placement, Source, live_layouts, shapes_of
from titan_linear.models.config import Adapter, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.families import FAMILIES
from titan_linear.models.layers import lora_name
from titan_linear.models.lora import adaptable, trained_names
from titan_linear.storage.files import read_json, replacing
from titan_linear.storage.hf_io import HEAD

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base"  # the fingerprint's key in the header


@dataclass(frozen=True)
class Matrix:
    """A matrix of theirs, or a stack of them, and our adapted weights in it."""

    name: str  # of theirs
    module: str  # where its A and B are
    shape: tuple[int, ...]  # of B as their module has it
    inputs: int
    A: str
    B: tuple[Placement, ...]  # of our parameters

    def key(self, part: str) -> str:
        return f"base_model.model.{self.module}.lora_{part}.weight"

    @property
    def experts(self) -> bool:
        return len(self.shape) == 3


@dataclass(frozen=True)
class Contents:
    matrices: tuple[Matrix, ...]
    extra: tuple[Placement, ...]  # other parameters, each a tensor of its own


def contents(model: ModelConfig, family: str) -> Contents:
    """What a PEFT folder of a model's adapters holds."""
    options = model.adapter
    with torch.device("meta"):
        base, adapted = Decoder(model.base), Decoder(model)
    weights, _ = adaptable(base)
    trained = trained_names(adapted)
    shapes = shapes_of(model) | {name: (*base.get_parameter(name).shape[:-1], options.rank) for name in weights}
    matrices, extra = [], []
    for source, placements in live_layouts(model.base, family, shapes):
        of_B = tuple(p for p in placements if lora_name(p.name, "B") in trained)
        if of_B:
            A = next(n for p in of_B if (n := lora_name(p.name, "A")) in trained)
            inputs = base.get_parameter(of_B[0].name).shape[-1]
            matrices.append(Matrix(source.name, source.name.removesuffix(".weight"), source.shape, inputs, A, of_B))
        elif placements[0].name in trained:
            extra += placements
    if model.tie_embeddings and (copies := [p for p in extra if p.name == "embedding.weight"]):
        shape = copies[0].shape  # peft's copy of the one is not tied to the other
        extra.append(Placement("embedding.weight", shape, (Source(HEAD, shape),), rows=None))
    return Contents(tuple(_nested(matrices)), tuple(extra))


def check_peft(model: ModelConfig, family: str) -> None:
    """Raise ValueError if `peft` cannot name some of the adapters."""
    held = contents(model, family)
    refused = [m.name for m in held.matrices if m.module.rpartition(".")[2] in FAMILIES[family].peft_refuses]
    refused += [p.sources[0].name for p in held.extra if not p.sources[0].name.endswith((".weight", ".bias"))]
    if refused:
        raise ValueError(
            f"peft takes no {refused[0]} of {family} ({len(refused)} such); titan-linear convert merge writes a whole "
            'model instead; or leave it out: adapter.targets = ["!layers.*.o_proj"], for example'
        )


def _nested(matrices: list[Matrix]) -> list[Matrix]:
    """Stacks are parameters of one module, of which peft wraps the last one last."""
    named = []
    for i, m in enumerate(matrices):
        owner = m.name.rpartition(".")[0]
        inner = any(other.experts and other.name.rpartition(".")[0] == owner for other in matrices[i + 1 :])
        module = owner + ".base_layer" * inner if m.experts else m.module
        named.append(replace(m, module=module))
    return named


# --- Out -------------------------------------------------------------------------------------------------------------


def peft_config(model: ModelConfig, family: str, options: Options, base: str) -> dict[str, Any]:
    """adapter_config.json. base: the folder or the name of the model that is adapted."""
    check_peft(model, family)
    held = contents(model, family)
    by_weight = FAMILIES[family].peft_weights
    modules = [m for m in held.matrices if not (m.experts or m.module.rpartition(".")[2] in by_weight)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "use_rslora": options.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": _short([m.module for m in modules]),
        "target_parameters": _short([m.name for m in held.matrices if m not in modules]) or None,
        "modules_to_save": _short([p.sources[0].name.rpartition(".")[0] for p in held.extra]) or None,
    }


# Whose adapters SGLang applies (python/sglang/srt/lora/utils.py), by a module's or an expert parameter's last name.
SERVED = re.compile(
    r"(q|k|v|o|out|in|gate|up|gate_up|down|fc[12]_latent|q_[ab]|kv_b)_proj|in_proj_(qkvz?|z)|kv_a_proj_with_mqa"
)


def not_served(config: Mapping[str, Any]) -> str:
    """A line that says what servers leave out of a folder with this adapter_config.json; "" if nothing."""
    adapted, whole = (
        sorted({name.rpartition(".")[2] for key in keys for name in config[key] or []})
        for keys in (("target_modules", "target_parameters"), ("modules_to_save",))
    )
    others = [name for name in adapted if not SERVED.fullmatch(name)]
    said = [f"SGLang leaves out the adapters of {', '.join(others)}"] * bool(others)
    said += [f"vLLM takes none with modules_to_save ({', '.join(whole)})"] * bool(whole)  # vllm/lora/peft_helper.py
    return f"{'; '.join(said)}: serve what titan-linear convert merge writes" if said else ""


def _short(names: list[str]) -> list[str]:
    """From the layer's number on, as peft finds them whatever comes before."""
    return [name[name.index("layers.") :] if "layers." in name else name for name in names]


def peft_tensors(model: ModelConfig, family: str, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """get: name -> the whole parameter; all ranks call it for the same names in the same order."""
    tensors, held = {}, contents(model, family)
    for m in held.matrices:
        A = get(m.A)
        B = torch.zeros(m.shape, dtype=A.dtype)
        for placement in m.B:
            rows = get(lora_name(placement.name, "B")).reshape(-1, placement.width)
            for _, start, stop, row in placement.pieces():
                B.view(-1, placement.width)[start:stop] = rows[row : row + stop - start]
        tensors[m.key("A")] = A.flatten(0, -2)
        tensors[m.key("B")] = B.permute(1, 2, 0).flatten(1) if m.experts else B
    for placement in held.extra:
        (source,) = placement.sources
        tensors[f"base_model.model.{source.name}"] = get(placement.name).reshape(source.shape)
    return tensors


def write_peft(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: str) -> None:
    """Write a folder, whole or not at all. base: the base's fingerprint."""
    with replacing(path) as folder:
        content = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        save_file(content, folder / PEFT_WEIGHTS, {"format": "pt", BASE: base})
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def options_of(path: Path, model: ModelConfig, family: str) -> dict[str, Any]:
    """The keys of [adapter] of which a folder is what a run writes."""
    config = read_json(path / PEFT_CONFIG, dict[str, Any], "give a folder that peft has written")
    there = safe_open(path / PEFT_WEIGHTS, "pt").keys()
    everything = contents(replace(model, adapter=Adapter(1, 1.0)), family)
    return {
        "enable": True,
        "rank": config["r"],
        "alpha": float(config["lora_alpha"]),
        "rslora": bool(config.get("use_rslora")),
        "targets": [p.name for m in everything.matrices if m.key("B") in there for p in m.B],
        "train_extra": [
            placed[0].name
            for source, placed in live_layouts(model.base, family, shapes_of(model))
            if f"base_model.model.{source.name}" in there
        ],
    }


# --- In --------------------------------------------------------------------------------------------------------------

UNREADABLE = {"use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False}


def read_peft(path: Path, model: ModelConfig, family: str, options: Options, base: str) -> dict[str, Tensor]:
    """Our parameters that a folder holds, by name.

    Raises:
        ValueError: it is of other adapters than `options`, of another base, or not as `peft` writes it.
    """
    _check_options(path, options)
    with safe_open(path / PEFT_WEIGHTS, "pt") as file:
        check_base((file.metadata() or {}).get(BASE, ""), base, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return _ours(path, contents(model, family), options.rank, tensors)


def check_base(theirs: str, base: str, path: Path) -> None:
    """Raise ValueError if the fingerprints of both are known, and differ. path: of what is of `theirs`."""
    if theirs and base and theirs != base:
        raise ValueError(
            f"'{path}' has the adapters of another base (fingerprint {theirs}; this one has {base}); give theirs"
        )


def _check_options(path: Path, options: Options) -> None:
    config = read_json(path / PEFT_CONFIG, dict[str, Any], "give a folder that peft has written")
    asked = {"r": options.rank, "lora_alpha": options.alpha, "use_rslora": options.rslora}
    for key, ours in (asked | UNREADABLE).items():
        theirs = config.get(key)
        if theirs != ours and not (theirs in (None, False) and not ours):
            name = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}.get(key)
            remedy = f"set adapter.{name} to that" if name else "such adapters are not read"
            raise ValueError(f"'{path / PEFT_CONFIG}': {key} = {theirs!r}, and the run has {ours!r}; {remedy}")


def _ours(path: Path, held: Contents, rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def take(key: str, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.pop(key, None)
        if tensor is None or tuple(tensor.shape) != shape:
            there = "missing" if tensor is None else f"{list(tensor.shape)}"
            raise ValueError(f"'{path / PEFT_WEIGHTS}': {key} is {there}, not {list(shape)}; correct adapter.targets")
        return tensor

    for m in held.matrices:
        E = m.shape[0] if m.experts else 1
        A = take(m.key("A"), (E * rank, m.inputs))
        B = take(m.key("B"), (m.shape[-2], rank * E))
        found[m.A] = A.unflatten(0, (E, rank)) if m.experts else A
        B = B.unflatten(1, (rank, E)).permute(2, 0, 1) if m.experts else B
        for placement in m.B:
            rows = [B.reshape(-1, rank)[start:stop] for _, start, stop, _ in placement.pieces()]
            found[lora_name(placement.name, "B")] = torch.cat(rows).view(placement.shape)
    for placement in held.extra:
        (source,) = placement.sources
        found[placement.name] = take(f"base_model.model.{source.name}", source.shape).view(placement.shape)
    if tensors:
        raise ValueError(
            f"'{path / PEFT_WEIGHTS}' has {next(iter(tensors))} ({len(tensors)} such), which the run does not train; "
            "correct adapter.targets or adapter.train_extra"
        )
    return found
