"""PEFT folders: adapters of a Hugging Face model, as `peft` and `transformers` open them.

    adapter_config.json            rank, alpha, what is adapted
    adapter_model.safetensors      A and B by the names of transformers' modules; other parameters
                                   that were trained

A matrix adapted there may be several of our projections: they share A, and B's rows lie as
the matrix's rows do (`models/hf_mapping.py`). For stacked experts, A [E, r, inputs] is stored
as [E · r, inputs] and B [E, outputs, r] as [outputs, r · E]. The header holds the base's
fingerprint and the run's keys that change the base's config.json, for which the folder has
no other place.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from safetensors import safe_open
from torch import Tensor

from titan_linear.config import Adapter as Options
from titan_linear.models.config import LoraConfig, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.families import FAMILIES
from titan_linear.models.hf_mapping import Placement, Shape, StoredTensor, live_layouts, shapes_of
from titan_linear.models.layers import lora_name
from titan_linear.models.lora import adaptable
from titan_linear.storage.files import Json, json_bytes, read_json
from titan_linear.storage.hf_io import HEAD, read_header
from titan_linear.storage.hf_writing import Destination, plan_tensors, write_tensors
from titan_linear.storage.tensors import Weights

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, Tensor]
# The names of the header's entries.
BASE = "base"
KEYS = "keys"
KEPT = re.compile(r"--(model\.attention\.rope_(theta|scaling)|training\.seq_len)=")
# The prefix of names.
PREFIX = "base_model.model."


# Keys of adapter_config.json for the keys of [adapter].
OPTIONS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}


class Settings(BaseModel):
    """The keys of adapter_config.json that are read, with peft's defaults. Others are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    base_model_name_or_path: str | None = None
    r: PositiveInt = 8
    lora_alpha: PositiveFloat = 8
    use_rslora: bool | None = False
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None


class PeftTensor(NamedTuple):
    """A tensor of a folder, whose rows are runs of our parameters' rows."""

    name: str
    # The transformers module that peft wraps or copies.
    module: str
    # B of experts is [E, outputs, r].
    shape: Shape
    parts: tuple[Placement, ...]
    # "A", "B", or "" for a parameter that is trained as a whole.
    lora: str = ""

    @property
    def of(self) -> str:
        """Return the name of the transformers parameter that is adapted or trained."""
        return self.parts[0].sources[0].name

    @property
    def stacked(self) -> bool:
        return self.lora == "B" and len(self.shape) == 3

    @property
    def on_disk(self) -> Shape:
        """Return the shape in the file."""
        return tuple(self.laid(torch.empty(self.shape, device="meta")).shape)

    def laid(self, x: Tensor) -> Tensor:
        """Convert from `shape` to the layout in the file."""
        return x.permute(1, 2, 0).flatten(1) if self.stacked else x

    def lifted(self, x: Tensor) -> Tensor:
        """Convert from the layout in the file to `shape`."""
        return x.unflatten(1, (-1, self.shape[0])).permute(2, 0, 1) if self.stacked else x


def contents(model: ModelConfig, family: str) -> list[PeftTensor]:
    """Return the tensors of a PEFT folder for a model's adapters."""
    with torch.device("meta"):
        adapted = Decoder(model)
    weights, _ = adaptable(adapted)
    ours = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    # B has the outputs of the weight that it adapts, and as many columns as the rank.
    shapes = shapes_of(model) | {
        name: (*adapted.get_parameter(name).shape[:-1], model.adapter.rank) for name in weights
    }
    held: list[PeftTensor] = []
    for source, placements in reversed(list(live_layouts(model.base, family, shapes))):
        of_B = tuple(
            replace(p, name=B) for p in placements if (B := lora_name(p.name, "B")) in ours
        )
        module = source.name.rpartition(".")[0]
        if of_B:
            # A stack of experts is a parameter of a module. If peft adapts several
            # parameters of one module, it wraps the last one last.
            path = module + ".base_layer" * any(x.lora and x.module == module for x in held)
            of_A = next(name for p in placements if (name := lora_name(p.name, "A")) in ours)
            lies = (math.prod(ours[of_A][:-1]), ours[of_A][-1])
            A = Placement(of_A, ours[of_A], (StoredTensor("", lies),))
            for part, shape, parts in (("B", source.shape, of_B), ("A", lies, (A,))):
                held.append(
                    PeftTensor(f"{PREFIX}{path}.lora_{part}.weight", module, shape, parts, part)
                )
        elif placements[0].name in ours:
            held.append(PeftTensor(PREFIX + source.name, module, source.shape, tuple(placements)))
    if model.tie_embeddings and (
        copies := [x for x in held if x.parts[0].name == "embedding.weight"]
    ):
        # peft's copy of the embedding is not tied to its copy of the head.
        shape = copies[0].shape
        other = Placement("embedding.weight", shape, (StoredTensor(HEAD, shape),))
        held.insert(0, PeftTensor(PREFIX + HEAD, HEAD.rpartition(".")[0], shape, (other,)))
    return held[::-1]


def check_peft(model: ModelConfig, family: str) -> None:
    """Raise ValueError if `peft` cannot name some of the adapters."""
    held = contents(model, family)
    modules = FAMILIES[family].peft_refuses
    refused = [x for x in held if x.lora == "B" and x.module.rpartition(".")[2] in modules]
    remedy = 'by adapter.targets = ["!layers.*.o_proj"], for example'
    if not refused:
        refused = [x for x in held if not x.name.endswith((".weight", ".bias"))]
        remedy = "of adapter.train_extra"
    if refused:
        raise ValueError(
            f"peft takes no {refused[0].of} of {family} ({len(refused)} such); leave it out {remedy}, or export "
            "nothing and have titan-linear convert merge write a whole model"
        )


# --- Out -------------------------------------------------------------------------------------------------------------


def peft_config(model: ModelConfig, family: str, options: Options, base: str) -> Json:
    """Return adapter_config.json.

    Args:
        base: the folder or name of the adapted model.
    """
    held = contents(model, family)
    # An adapter is named by its module, or by its weight for stacked experts and
    # peft_weights.
    by_weight = FAMILIES[family].peft_weights
    adapted = [x for x in held if x.lora == "B"]
    modules = [x for x in adapted if not (x.stacked or x.module.rpartition(".")[2] in by_weight)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{key: getattr(options, name) for key, name in OPTIONS.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": _short([x.module for x in modules]),
        "target_parameters": _short([x.of for x in adapted if x not in modules]) or None,
        "modules_to_save": _short([x.module for x in held if not x.lora]) or None,
    }


# Modules whose adapters SGLang applies (python/sglang/srt/lora/utils.py), by the last name
# of a module or an expert parameter.
SERVED = re.compile(
    r"(q|k|v|o|out|in|gate|up|gate_up|down|fc[12]_latent|q_[ab]|kv_b)_proj|in_proj_(qkvz?|z)|kv_a_proj_with_mqa"
)


def not_served(config: Json, architecture: str = "") -> str:
    """Return a line about what servers leave out of a PEFT folder, or "".

    Args:
        config: the folder's adapter_config.json.
        architecture: the architecture of the base.
    """
    adapted, whole = (
        sorted(
            {
                name.removesuffix(".weight").rpartition(".")[2]
                for key in keys
                for name in config[key] or []
            }
        )
        for keys in (("target_modules", "target_parameters"), ("modules_to_save",))
    )
    others = [name for name in adapted if not SERVED.fullmatch(name)]
    said = [f"SGLang leaves out the adapters of {', '.join(others)}"] * bool(others)
    # vllm/lora/peft_helper.py
    said += [f"vLLM takes none with modules_to_save ({', '.join(whole)})"] * bool(whole)
    # The modules of these architectures have other names (vllm issue 48019).
    if architecture.endswith("ForConditionalGeneration"):
        said.append(f"vLLM applies none to {architecture}")
    return f"{'; '.join(said)}: serve what titan-linear convert merge writes" if said else ""


def _short(names: list[str]) -> list[str]:
    """Return names from the layer's number on, which peft finds under any prefix."""
    return [re.sub(r"^.*?(?=layers\.)", "", name) for name in names]


def placed(model: ModelConfig, family: str, get: Weights) -> tuple[list[Placement], Weights]:
    """Return the placements of a folder's tensors, and a function to our parameters.

    Args:
        get: returns the whole parameter of a name.
    """
    stacks: dict[str, PeftTensor] = {}
    parts: list[Placement] = []
    for held in contents(model, family):
        source = StoredTensor(held.name, held.on_disk)
        if held.stacked:
            # B of experts is one parameter of ours, in another layout.
            (part,) = held.parts
            stacks[part.name] = held
            parts.append(Placement(part.name, source.shape, (source,)))
        else:
            parts += [replace(part, sources=(source,)) for part in held.parts]

    def laid(name: str) -> Tensor:
        if name not in stacks:
            return get(name)
        held = stacks[name]
        return held.laid(get(name).reshape(held.shape))

    return parts, laid


def write_peft(
    path: Path,
    config: Json,
    model: ModelConfig,
    to: Destination,
    get: Weights,
    dtype: torch.dtype | None,
    base: str,
    keys: list[str],
) -> None:
    """Write a PEFT folder as `write_folder` does.

    Args:
        config: adapter_config.json.
        dtype: None stands for float32.
        base: the base's fingerprint.
        keys: the run's keys that change the base's config.json, as arguments (KEPT).
    """
    parts, laid = placed(model, to.family, get)
    write_tensors(
        path,
        plan_tensors(parts, to.family, dtype or torch.float32),
        parts,
        laid,
        {PEFT_CONFIG: json_bytes(config), **to.files},
        single=PEFT_WEIGHTS,
        header={BASE: base, KEYS: "\n".join(keys)},
        shard_bytes=math.inf,
    )


def settings_of(path: Path) -> Json:
    """Return a folder's adapter_config.json."""
    settings = read_json(path / PEFT_CONFIG, Settings, "give a folder that peft has written")
    return settings.model_dump()


def keys_of(path: Path) -> list[str]:
    """Return the arguments given to `write_peft`; none in a folder of another program."""
    with safe_open(path / PEFT_WEIGHTS, "pt") as file:
        header = file.metadata() or {}
    return [line for line in header.get(KEYS, "").splitlines() if KEPT.match(line)]


def spellings(path: Path, family: str) -> dict[str, str]:
    """Map the names that we write to the names of a folder's tensors.

    The folder's names may come from an architecture that contains ours.
    """
    before = re.compile(f"{PREFIX}({'|'.join(sorted(FAMILIES[family].prefixes, reverse=True))})")
    return {before.sub(f"{PREFIX}model.", name): name for name in read_header(path / PEFT_WEIGHTS)}


def options_of(path: Path, model: ModelConfig, family: str) -> Json:
    """Return the keys of [adapter] with which a run would write this folder."""
    config = settings_of(path)
    there = spellings(path, family)
    everything = [
        x
        for x in contents(replace(model, adapter=LoraConfig(1, 1.0, extra=("*",))), family)
        if x.name in there
    ]
    return {
        "enable": True,
        **{name: config[key] or False for key, name in OPTIONS.items()},
        "targets": [
            re.sub("[._]lora_B$", "", p.name) for x in everything if x.lora == "B" for p in x.parts
        ],
        "train_extra": [x.parts[0].name for x in everything if not x.lora],
    }


# --- In --------------------------------------------------------------------------------------------------------------

UNREADABLE = {
    "peft_type": "LORA",
    "use_dora": False,
    "alora_invocation_tokens": None,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
}
# Initializations that take A and B from the base's weights, and change these.
OF_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_peft(path: Path, model: ModelConfig, family: str, options: Options, base: str) -> Tensors:
    """Return our parameters that a folder holds, by name.

    Raises:
        ValueError: its adapters do not fit `options`, it has another base, or it is not as
            `peft` writes it.
    """
    _check_options(path, options)
    names = spellings(path, family)
    with safe_open(path / PEFT_WEIGHTS, "pt") as file:
        check_base((file.metadata() or {}).get(BASE, ""), base, path)
        tensors = {ours: file.get_tensor(name) for ours, name in names.items()}
    return _ours(path, contents(model, family), tensors)


def check_base(theirs: str, base: str, path: Path) -> None:
    """Raise ValueError if both fingerprints are known and differ.

    Args:
        path: the folder or checkpoint with the adapters of `theirs`.
    """
    if theirs and base and theirs != base:
        raise ValueError(
            f"'{path}' has the adapters of another base (fingerprint {theirs}; this one has {base}); give theirs"
        )


def _check_options(path: Path, options: Options) -> None:
    config = settings_of(path)
    asked = {key: getattr(options, name) for key, name in OPTIONS.items()}
    # Options must be equal; null and false are the same.
    for key, ours in (asked | UNREADABLE).items():
        theirs = config.get(key)
        if theirs != ours and not (theirs in (None, False) and not ours):
            remedy = (
                f"set adapter.{OPTIONS[key]} to that"
                if key in OPTIONS
                else "such adapters are not read"
            )
            raise ValueError(
                f"'{path / PEFT_CONFIG}': {key} = {theirs!r}, and the run has {ours!r}; {remedy}"
            )
    # Some initializations have changed the base.
    if str(begun := config.get("init_lora_weights")).startswith(OF_THE_BASE):
        raise ValueError(
            f"'{path / PEFT_CONFIG}': init_lora_weights = {begun!r} changes the base; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )


def _ours(path: Path, contents: list[PeftTensor], tensors: Tensors) -> Tensors:
    found: Tensors = {}
    _check_copies(path, contents, tensors)
    for held in contents:
        tensor = tensors.pop(held.name, None)
        if tensor is None or tensor.shape != held.on_disk:
            there = "missing" if tensor is None else list(tensor.shape)
            raise ValueError(
                f"'{path / PEFT_WEIGHTS}': {held.name} is {there}, not {list(held.on_disk)}; correct adapter.targets "
                "or adapter.train_extra"
            )
        # Take the rows that our parameters need, and clear them. Any other row must be
        # zero.
        rows = held.lifted(tensor).reshape(-1, held.parts[0].width)
        for part in held.parts:
            runs = [rows[start:stop] for _, start, stop, _ in part.pieces()]
            found[part.name] = torch.cat(runs).view(part.shape)
            for run in runs:
                run.zero_()
        if rows.any():
            raise ValueError(
                f"'{path / PEFT_WEIGHTS}': {held.name} adapts more of {held.of} than the run does; correct "
                "adapter.targets"
            )
    if tensors:
        raise ValueError(
            f"'{path / PEFT_WEIGHTS}' has {next(iter(tensors))} ({len(tensors)} such), which the run does not train; "
            "correct adapter.targets or adapter.train_extra"
        )
    return found


def _check_copies(path: Path, contents: list[PeftTensor], tensors: Tensors) -> None:
    """Check that the copies of an embedding and its tied head are one matrix.

    The one copy of a folder whose weights peft has tied is made two.
    """
    names = [x.name for x in contents if not x.lora and x.parts[0].name == "embedding.weight"]
    present = [name for name in names if name in tensors]
    # The embedding is not trained, or not tied.
    if len(names) < 2 or not present:
        return
    if len(present) == 2:
        if torch.equal(*(tensors[name] for name in names)):
            return
        problem = f"{' and '.join(names)} are not equal"
    else:
        if settings_of(path).get("ensure_weight_tying"):
            tensors |= {name: tensors[present[0]].clone() for name in names}
            return
        (absent,) = set(names).difference(present)
        problem = f"{present[0]} was trained apart from {absent} (ensure_weight_tying = false)"
    raise ValueError(
        f"'{path / PEFT_WEIGHTS}': {problem}, and the base has one matrix for both "
        "(tie_word_embeddings = true); train them with peft's ensure_weight_tying, or on a base that has two"
    )
