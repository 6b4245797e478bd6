"""Hugging Face folders for writing, which hf_io.py reads.

Ranks gather one parameter at a time, and rank 0 writes its rows in their places. The folder
gets its name once it is on disk.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan_linear.models.config import ModelConfig, differences
from titan_linear.models.families import FAMILIES
from titan_linear.models.families.remote import MODELING
from titan_linear.models.hf_mapping import (
    Placement,
    Shape,
    StoredTensor,
    config_from_hf,
    config_to_hf,
    ignored,
    placements,
)
from titan_linear.ops.runtime.support import short
from titan_linear.storage.checkpoint import SaveFailed
from titan_linear.storage.files import Json, json_bytes, progress, read_inside, replacing
from titan_linear.storage.hf_io import (
    CONFIG,
    DTYPES,
    HEAD,
    INDEX,
    POSITIONS,
    SINGLE,
    Folder,
    OnDisk,
    check_folder,
    read_header,
)
from titan_linear.storage.step_folders import describe
from titan_linear.storage.tensors import Weights, named_parameters

CODES = {dtype: code for code, dtype in DTYPES.items()}
# The content of files by name.
Files = Mapping[str, bytes]
# Bytes per file.
SHARD = 5 * 10**9
TOKENIZER = "tokenizer.json"
# Keys of config.json for the length of the longest text.
LENGTHS = ("max_position_embeddings", "model_max_length")


class UnfitTokenizer(ValueError):
    """`transformers` would read another tokenizer from a folder than the folder has."""


class Destination(NamedTuple):
    """Everything that an export writes besides tensors."""

    family: str
    # The folder whose tensor names are kept.
    like: Path | None
    # Files of the tokenizer, and generation_config.json.
    files: Files
    # Special tokens, in config.json.
    tokens: Json


class Planned(NamedTuple):
    """A tensor to be written."""

    code: str
    shape: Shape
    # Its size in bytes.
    size: int


def find_family(model: ModelConfig, tokenizer: Files | None = None) -> str:
    """Return the first Hugging Face architecture for this model and tokenizer.

    Raises:
        ValueError: none can hold both.
    """
    reasons = []
    kinds = {layer.kinds for layer in model.layers}
    # Collect the reasons of families that have the layers but cannot hold the model.
    for family, has in FAMILIES.items():
        if kinds <= set(has.layers) and (has.experts if model.moe else has.mlp):
            try:
                check_tokenizer(family, config_to_hf(family, model), tokenizer or {})
            except ValueError as error:
                reasons.append(str(error))
            else:
                return family
    names = sorted({layer.name for layer in model.layers})
    why = "; ".join(reasons) or f"none has layers {', '.join(names)}"
    raise ValueError(
        f"no Hugging Face architecture holds this model: {why}; choose another preset, or no export"
    )


def check_tokenizer(family: str, config: Json, tokenizer: Files) -> None:
    """Refuse a tokenizer that `transformers` would alter, given this config.json."""
    theirs = FAMILIES[family].own_tokenizer
    kind = config.get("model_type")
    if not theirs or kind not in theirs.model_types or TOKENIZER not in tokenizer:
        return
    if not theirs.fits(json.loads(tokenizer[TOKENIZER])):
        raise UnfitTokenizer(
            f"{family}: transformers reads every tokenizer of model_type = {kind!r} as if it were the family's "
            "own, and would give other tokens than the model is trained on; set model.tokenizer_path to that one"
        )


@torch.no_grad()
def gather(model: nn.Module) -> Weights:
    """Return a function from a name to the whole parameter, on every rank.

    Ranks must ask for the same names in the same order.
    """
    # Take these instead of the model's own parameters, which after a forward pass may be
    # whole and in the dtype of compute.
    parameters = named_parameters(model)

    def get(name: str) -> Tensor:
        p = parameters[name]
        if not isinstance(p, DTensor):
            return p
        # Undo the cuts, from the last to the first.
        placements = list(p.placements)
        for dim in reversed(range(len(placements))):
            placements[dim] = Replicate()
            p = p.redistribute(placements=placements)
        return p.to_local()

    return get


def tied_head(model: ModelConfig, family: str) -> list[Placement]:
    """Return the placement of a tied head, where the family needs the head as a tensor."""
    if not model.tie_embeddings or FAMILIES[family].ties:
        return []
    shape = (model.vocab_size, model.dim)
    return [Placement("embedding.weight", shape, (StoredTensor(HEAD, shape),))]


def write_folder(
    path: Path,
    model: ModelConfig,
    family: str,
    get: Weights,
    *,
    dtype: torch.dtype | None,
    like: Path | None = None,
    tokenizer: Files | None = None,
    extra: Json | None = None,
    longest: int = 0,
    shard_bytes: int = SHARD,
) -> None:
    """Write a folder that `transformers` opens.

    Every rank calls this and holds one parameter at a time; rank 0 writes.

    Args:
        family: the architecture (models/families/); with `like`, the architecture of
            `like`.
        get: returns the whole parameter of a name; see `gather`.
        dtype: the dtype of every tensor, at least float32 for `Family.float32`. With None,
            each tensor keeps the dtype that it has in `like`.
        like: a folder of the same model, up to positions, that gives the names,
            config.json, and parts that we do not have (vision, multi-token prediction,
            processors). By default, they are as in `transformers`.
        extra: further keys of config.json, which replace the keys of `like`. Tokens replace
            a list of `like` only if it does not contain them.
        longest: number of tokens of the longest training text; `like` may allow longer
            ones.

    Raises:
        ValueError: `like` is of another model, or the architecture cannot hold the model.
        SaveFailed: (on every rank) the folder could not be written, or another process is
            writing it.
    """
    source, parts = (
        check_folder(like, model, POSITIONS) if like else (None, placements(model, family))
    )
    if source is None or HEAD in source.tensors:
        parts += tied_head(model, family)
    # Copy tensors outside the language model, except a stale copy of the embedding.
    others = sorted(ignored(model, family, source.shapes) - {HEAD}) if source else []
    copied = [source.tensors[name] for name in others]
    config = _config_json(model, family, dtype, source, extra or {}, longest)
    files = {CONFIG: json_bytes(config)} | beside(config, like) | dict(tokenizer or {})
    plan = plan_tensors(parts, family, dtype, source, copied)
    write_tensors(path, plan, parts, get, files, copied, shard_bytes=shard_bytes)


def write_tensors(
    path: Path,
    plan: Mapping[str, Planned],
    parts: list[Placement],
    get: Weights,
    files: Files,
    copied: Sequence[OnDisk] = (),
    *,
    single: str = SINGLE,
    header: Mapping[str, str] | None = None,
    shard_bytes: float = SHARD,
) -> None:
    """Write a folder of tensors and other files, whole or not at all.

    Every rank calls this; see `write_folder`.

    Args:
        plan: the tensors of `parts`, and the `copied` ones.
        single: the name of the file of tensors, if one is enough.
        header: additional entries of that file's header.
    """
    failure: OSError | RuntimeError | None = None
    left = iter(progress(parts, f"writing {path.name}"))
    # Rank 0 writes each parameter once it is gathered.
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            with replacing(path) as folder:
                tensors = _create(folder, plan, shard_bytes, single, header)
                for placement in left:
                    _write_rows(tensors, placement, get(placement.name))
                for tensor in copied:
                    _copy_bytes(tensor, tensors[tensor.name])
                for name, content in files.items():
                    (folder / name).parent.mkdir(exist_ok=True)
                    (folder / name).write_bytes(content)
        except (OSError, RuntimeError) as error:
            failure = error
    # Other ranks take part in gathering. After a failure, so does rank 0: ranks wait for
    # each other.
    for placement in left:
        get(placement.name)
    # Rank 0's failure is raised on every rank.
    outcome = [failure and describe(failure)]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, 0)
    if outcome[0]:
        raise SaveFailed(f"writing '{path}' failed: {outcome[0]}") from failure


def plan_tensors(
    parts: list[Placement],
    family: str,
    dtype: torch.dtype | None,
    source: Folder | None = None,
    copied: Sequence[OnDisk] = (),
) -> dict[str, Planned]:
    """Return all tensors to write, in order."""
    plan = {}
    for placement in parts:
        wide = dtype and placement.name.endswith(FAMILIES[family].float32)
        kept = torch.promote_types(dtype, torch.float32) if wide else dtype
        for tensor in placement.sources:
            code = CODES[kept] if kept else source.tensors[tensor.name].code
            size = math.prod(tensor.shape) * DTYPES[code].itemsize
            plan[tensor.name] = Planned(code, tensor.shape, size)
    return plan | {t.name: Planned(t.code, t.shape, t.end - t.begin) for t in copied}


def with_tokens(table: Json, tokens: Json) -> Json:
    """Return settings with these tokens, except where a list already contains the token."""
    lists = {name: known for name, known in table.items() if isinstance(known, list)}
    return table | {name: x for name, x in tokens.items() if x not in lists.get(name, ())}


def _config_json(
    model: ModelConfig,
    family: str,
    dtype: torch.dtype | None,
    source: Folder | None,
    extra: Json,
    longest: int,
) -> Json:
    config: Json = dict(source.config) if source else config_to_hf(family, model)
    tables = [config]
    # transformers opens the language model alone from this table.
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        tables.append(config["text_config"])
    for table in tables:
        table |= with_tokens(table, extra)
        if dtype is not None:
            table["dtype"] = short(dtype)
            # The older name.
            table.pop("torch_dtype", None)
    text = tables[-1]
    longest = max(longest, *(text.get(name) or 0 for name in LENGTHS))
    _lengthen(text, longest)
    # A scale of positions may follow from the length.
    _, theirs = config_from_hf(config, model.mtp_layers)
    if differences(theirs, model):
        _change(text, config_to_hf(family, theirs), config_to_hf(family, model))
        _lengthen(text, longest)
    return config


def _lengthen(config: Json, longest: int) -> None:
    """Allow texts of this length in a config.json."""
    names = [name for name in LENGTHS if name in config] or LENGTHS[:1]
    if longest:
        config |= {name: max(longest, config.get(name) or 0) for name in names}


def _change(config: Json, before: Json, now: Json) -> None:
    """Change a config.json where `now` differs from `before`. Other entries of tables stay."""
    for key, value in now.items():
        if value != before.get(key):
            if isinstance(value, dict):
                names = before.get(key) or ()
                entries = (config.get(key) or {}).items()
                kept = {n: x for n, x in entries if n not in names and not isinstance(x, dict)}
                value = kept | value
            config[key] = value
    # rope_parameters replaces these older keys.
    for older in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        config.pop(older, None)


def beside(config: Json, like: Path | None) -> Files:
    """Return settings of generation and processors from `like`, and needed Python files.

    The Python files are the ones that config.json's `auto_map` needs: ours, or the files of
    `like`, which are not inspected.
    """
    # An entry is "REPOSITORY--MODULE.CLASS", or without the repository.
    classes = [str(name).rpartition("--")[2] for name in config.get("auto_map", {}).values()]
    named = {name.partition(".")[0] + ".py" for name in classes}
    copied = ["*processor_config.json", "chat_template.json", "generation_config.json"]
    ours = [MODELING] if MODELING.name in named else []
    if named and not ours:
        copied.append("*.py")
    theirs = read_inside(like, *copied) if like else {}
    return theirs | {file.name: file.read_bytes() for file in ours}


def _create(
    folder: Path,
    plan: Mapping[str, Planned],
    shard_bytes: float,
    single: str = SINGLE,
    header: Mapping[str, str] | None = None,
) -> dict[str, OnDisk]:
    """Create the files of weights in their full size, and their index.

    Each row is then written in its place as it comes.
    """
    # Names of tensors, by file.
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in plan.items():
        if groups[-1] and filled + tensor.size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.size
    # Create the files, and read their headers back for the tensors' places.
    tensors: dict[str, OnDisk] = {}
    for i, names in enumerate(groups, 1):
        file = folder / f"model-{i:05}-of-{len(groups):05}.safetensors"
        if len(groups) == 1:
            file = folder / single
        _write_header(file, header, {name: plan[name] for name in names})
        tensors |= read_header(file)
    # Several files need an index.
    if len(groups) > 1:
        where = {name: tensor.file.name for name, tensor in tensors.items()}
        total = sum(tensor.size for tensor in plan.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return tensors


def _write_rows(tensors: Mapping[str, OnDisk], placement: Placement, parameter: Tensor) -> None:
    """Write the rows of one of our parameters into the tensors that they belong to."""
    rows = parameter.detach().reshape(-1, placement.width).cpu()
    for source, start, stop, row in placement.pieces():
        tensor = tensors[source.name]
        ours = rows[row : row + stop - start]
        values = ours.to(DTYPES[tensor.code]).contiguous()
        if (values.isinf() & ours.isfinite()).any():
            raise OSError(
                f"{source.name} has values beyond {tensor.code}'s range; choose a wider dtype"
            )
        with open(tensor.file, "r+b") as file:
            file.seek(tensor.begin + start * placement.width * values.element_size())
            file.write(values.view(torch.uint8).numpy())


def _write_header(file: Path, said: Mapping[str, str] | None, plan: Mapping[str, Planned]) -> None:
    """Create a safetensors file in its full size, with holes in place of tensors."""
    header: Json = {"__metadata__": {"format": "pt", **(said or {})}}
    end = 0
    for name, tensor in plan.items():
        header[name] = {
            "dtype": tensor.code,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size],
        }
        end += tensor.size
    text = json.dumps(header).encode()
    # Tensors begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _copy_bytes(source: OnDisk, target: OnDisk) -> None:
    with open(target.file, "r+b") as file:
        file.seek(target.begin)
        file.writelines(source.blocks())
