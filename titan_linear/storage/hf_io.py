"""Hugging Face folders: a rank reads the rows that it owns; writing goes one tensor at a time.

    config.json                      the model (models/families/)
    model-00001-of-00003.safetensors ...
    model.safetensors.index.json     tensor -> file; a single file is model.safetensors, without an index
    tokenizer.json, ...              the tokenizer (data/corpus/tokenizer.py)
    modeling_titan_linear.py, rope.py  the model, where transformers does not have it (models/families/remote.py)

`models/adapters.py` says which rows of which tensors on disk are which rows of our parameters; this module moves the
bytes. A folder is checked as a whole from its headers (`open_folder`, `check_folder`) before any tensor is read. Pickle
files are never opened, because loading them can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan_linear.models.adapters import Placement, Source, config_from_hf, config_to_hf, ignored, placements
from titan_linear.models.config import ModelConfig, differences
from titan_linear.models.families import FAMILIES
from titan_linear.models.families.remote import MODELING, ROPE
from titan_linear.models.init import owned, runs
from titan_linear.ops.runtime.support import short
from titan_linear.storage.checkpoint import SaveFailed
from titan_linear.storage.files import alone, beside, finish_replacing, read_json, remove, replace, sync
from titan_linear.storage.step_folders import describe
from titan_linear.storage.tensors import named_parameters

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER = "tokenizer.json"
Files = Mapping[str, bytes]  # by name
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
POSITIONS = ("attention.rope_theta", "attention.rope_scaling")  # options that no tensor depends on
LISTED = 5  # problems of a folder that a message names
BLOCK = 64 << 20  # bytes moved at a time
SHARD = 5 * 10**9  # bytes per file


@dataclass(frozen=True)
class OnDisk:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    code: str  # its dtype: "BF16"
    shape: tuple[int, ...]
    begin: int  # its bytes [begin, end) in the file
    end: int


class Index(BaseModel):
    weight_map: dict[str, str]  # tensor -> file name


class Planned(NamedTuple):
    """A tensor that is to be written."""

    code: str
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass(frozen=True)
class Folder:
    path: Path
    config: dict[str, Any]  # config.json
    tensors: dict[str, OnDisk]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


# --- Looking at a folder ---------------------------------------------------------------------------------------------


def read_model(path: Path) -> tuple[str, ModelConfig]:
    """(family, model) of a folder's config.json.

    Raises:
        ValueError: there is none, or it describes a model that we do not have.
    """
    config = read_config(path)
    try:
        return config_from_hf(config)
    except ValueError as error:
        raise ValueError(f"'{Path(path) / CONFIG}': {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    return read_json(Path(path) / CONFIG, dict[str, Any], "give a Hugging Face folder, or fetch it again")


def open_folder(path: Path) -> Folder:
    """Read a folder's tensors from the headers of its files, and check that every byte that they promise is there.

    Raises:
        ValueError: naming the file, and the tensor if one is at fault.
    """
    path = Path(path)
    where = _index(path)
    headers = {file: read_header(path / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in headers[file]:
            raise ValueError(f"'{path / file}' lacks tensor {name!r}, which {INDEX} says it holds; fetch it again")
    config = read_config(path) if (path / CONFIG).is_file() else {}
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}  # indexed or not
    return Folder(path, config, tensors | {name: headers[file][name] for name, file in where.items()})


def check_folder(path: Path, model: ModelConfig, free: Collection[str] = ()) -> tuple[Folder, list[Placement]]:
    """Open a folder and locate each parameter in it; refuse one that does not hold exactly the tensors of `model`.

    free: options in which the folder's model may differ, if a config.json of its family can say so.

    Raises:
        ValueError: naming file and tensor, or an option.
    """
    family, theirs = read_model(path)
    changed = differences(theirs, model)
    if found := {option: pair for option, pair in changed.items() if option not in free}:
        differing = ", ".join(f"{option} = {a!r} (this run: {b!r})" for option, (a, b) in found.items())
        raise ValueError(
            f"'{Path(path) / CONFIG}' is another model: {differing}; use model.flavor = 'hf', or this model's folder"
        )
    if changed:
        config_to_hf(family, model)
    folder = open_folder(path)
    return folder, locate(folder, family, model)


def locate(folder: Folder, family: str, model: ModelConfig) -> list[Placement]:
    """Where each of our parameters lies in the folder.

    Raises:
        ValueError: tensors are missing, unused, or have another shape; or one has a dtype that cannot be read, or is a
            head that differs from the embedding to which it is tied. The message names the first of them.
    """
    try:
        found = placements(model, family, folder.shapes)
    except ValueError as error:
        head, *problems = str(error).split("\n  ")
        said = [_with_file(problem, folder) for problem in problems[:LISTED]]
        said += [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise ValueError(f"'{folder.path}': {head} " + "; ".join(said)) from None
    for tensor in (folder.tensors[source.name] for placement in found for source in placement.sources):
        if tensor.code not in DTYPES:
            raise ValueError(
                f"'{tensor.file}': tensor {tensor.name!r} is {tensor.code}; {', '.join(DTYPES)} can be read: convert it"
            )
    if model.tie_embeddings and HEAD in folder.tensors:
        _check_tied(folder, next(p.sources[0].name for p in found if p.name == "embedding.weight"))
    return found


def _check_tied(folder: Folder, embedding: str) -> None:
    """Refuse a head on disk that differs from the embedding to which config.json ties it: it would be lost."""
    head = folder.tensors[HEAD]
    other = folder.tensors[embedding]
    if head.shape == other.shape:
        with ExitStack() as files:
            reader = RowReader(folder, files)
            blocks = (reader.rows(tensor, 0, *head.shape) for tensor in (head, other))
            if all(torch.equal(a, b) for a, b in zip(*blocks, strict=True)):
                return
    raise ValueError(
        f"'{folder.path}': {HEAD} is not {embedding}, though {CONFIG} has tie_word_embeddings = true; set it to false"
    )


def _with_file(problem: str, folder: Folder) -> str:
    tensor = folder.tensors.get(problem.partition(": ")[0])
    return problem if tensor is None else f"{problem} (in {tensor.file.name})"


def read_header(file: Path) -> dict[str, OnDisk]:
    """The tensors of a safetensors file (8 bytes of length, a JSON header, the tensors' bytes without gaps).

    Raises:
        ValueError: the file cannot be read, or safetensors refuses it: cut short, or its header malformed.
    """
    try:
        # safe_open checks the header, and that the file has each byte that it promises.
        with open(file, "rb") as stream, safe_open(file, "np"):
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"'{file}' cannot be read: {error.strerror}; give the permission, or fetch it again") from None
    except SafetensorError as error:
        raise ValueError(f"'{file}' is cut short or no safetensors file ({error}); fetch it again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, described in header.items():
        begin, end = (8 + length + offset for offset in described["data_offsets"])
        tensors[name] = OnDisk(name, file, described["dtype"], tuple(described["shape"]), begin, end)
    return tensors


def _index(path: Path) -> dict[str, str]:
    """tensor -> file name."""
    if (path / INDEX).is_file():
        where = read_json(path / INDEX, Index, "fetch it again").weight_map
        for name, file in where.items():
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(
                    f"'{path / INDEX}' names a file outside its folder, {file!r}, for tensor {name!r}; get the folder "
                    "from a source that you trust"
                )
            if not (path / file).is_file():
                raise ValueError(f"'{path / file}' is missing: {INDEX} says it holds tensor {name!r}; fetch it again")
        if (path / SINGLE).is_file() and SINGLE not in where.values():
            raise ValueError(
                f"'{path}' holds {SINGLE} beside the files of {INDEX}; remove those that are not the model's"
            )
        return where
    if (path / SINGLE).is_file():
        return dict.fromkeys(read_header(path / SINGLE), SINGLE)
    pickles = [file.name for pattern in PICKLES for file in sorted(path.glob(pattern))]
    remedy = "give the folder of a model with its weights"
    if shards := sorted(path.glob("*.safetensors")):
        remedy = f"fetch {INDEX} too, which says what {shards[0].name} and other shards hold"
    elif pickles:
        remedy = f"{pickles[0]} is a pickle file, which is never loaded: convert it to safetensors"
    raise ValueError(f"'{path}' holds neither {INDEX} nor {SINGLE}; {remedy}")


# --- Reading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(path: Path, model: nn.Module) -> None:
    """Fill every parameter of a `Decoder` in place, in its own dtype. A rank reads only what it owns of sharded ones.

    Raises:
        ValueError: the folder does not hold the model.
    """
    folder, (family, _) = open_folder(path), read_model(path)
    parameters = named_parameters(model)
    with ExitStack() as files:
        reader = RowReader(folder, files)
        for placement in locate(folder, family, model.config):
            reader.fill(placement, *owned(parameters[placement.name]))


class RowReader:
    """Reads rows of a folder's tensors; a file is mapped into memory from its first use until `files` closes."""

    def __init__(self, folder: Folder, files: ExitStack):
        self.folder, self.files, self.open = folder, files, {}

    def fill(self, placement: Placement, local: Tensor, offsets: tuple[int, ...]) -> None:
        """Fill `local`, the part of the placement's parameter that begins at `offsets`."""
        if local.numel() == 0:
            return
        matrix = local.dim() > 1  # else a vector: its elements are rows
        rows = local.view(-1, local.shape[-1] if matrix else 1)
        columns = slice(offsets[-1], offsets[-1] + local.shape[-1]) if matrix else slice(None)
        leading = slice(-1) if matrix else slice(None)
        for first, begin, end in row_runs(local.shape[leading], placement.shape[leading], offsets[leading]):
            for source, start, stop, row in placement.pieces(begin, end):
                row += first - begin
                for values in self.rows(self.folder.tensors[source.name], start, stop, placement.width):
                    rows[row : row + len(values)].copy_(values[:, columns])
                    row += len(values)

    def whole(self, placement: Placement, dtype: torch.dtype) -> Tensor:
        """The whole of the placement's parameter."""
        out = torch.empty(placement.shape, dtype=dtype)
        self.fill(placement, out, (0,) * out.dim())
        return out

    def rows(self, tensor: OnDisk, start: int, stop: int, width: int) -> Iterator[Tensor]:
        """Rows [start, stop) of a tensor viewed as [-1, width], a block at a time."""
        if tensor.file not in self.open:
            self.open[tensor.file] = self.files.enter_context(safe_open(tensor.file, "pt"))
        on_disk = self.open[tensor.file].get_slice(tensor.name)
        rows = math.prod(tensor.shape) // width
        per_index = rows // tensor.shape[0]  # rows per index of the first dimension, along which slices are read
        block = max(1, BLOCK // (per_index * width * 4)) * per_index
        for a in range(start, stop, block):
            b = min(a + block, stop)
            low = a // per_index
            yield on_disk[low : -(-b // per_index)].reshape(-1, width)[a - low * per_index : b - low * per_index]


def row_runs(
    sizes: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Where a box lies in an array [shape] of rows, both flattened: (j, a, b), box rows from j on are rows [a, b)."""
    length, shifts = runs(tuple(sizes), tuple(shape), tuple(offsets))
    for i, shift in enumerate(shifts.astype("int64").tolist()):
        first = i * int(length)
        yield first, first + shift, first + shift + int(length)


# --- Writing ---------------------------------------------------------------------------------------------------------


def find_family(model: ModelConfig, tokenizer: Files | None = None) -> str:
    """The first Hugging Face architecture that holds this model and whose folders can have this tokenizer.

    Raises:
        ValueError: none does.
    """
    reasons = []
    kinds = {type(layer.mixer) for layer in model.layers}
    for family, has in FAMILIES.items():
        if kinds <= set(has.layers) and (has.experts if model.moe else has.mlp):
            try:
                check_tokenizer(family, config_to_hf(family, model), tokenizer or {})
            except ValueError as error:
                reasons.append(str(error))
            else:
                return family
    why = "; ".join(reasons) or f"none has layers {', '.join(sorted({layer.name for layer in model.layers}))}"
    raise ValueError(f"no Hugging Face architecture holds this model: {why}; choose another preset, or no export")


def check_tokenizer(family: str, config: Mapping[str, Any], tokenizer: Files) -> None:
    """Refuse a tokenizer that `transformers` would not read as it is from a folder with this config.json."""
    own = FAMILIES[family].own_tokenizer
    kind = config.get("model_type")
    if TOKENIZER in tokenizer and own and kind in own.model_types and not own.fits(json.loads(tokenizer[TOKENIZER])):
        raise ValueError(
            f"{family}: transformers reads every tokenizer of model_type = {kind!r} as if it were the family's "
            "own, and would give other tokens than the model is trained on; set model.tokenizer_path to that one"
        )


@torch.no_grad()
def gather(model: nn.Module) -> Callable[[str], Tensor]:
    """A function name -> the whole parameter, on every rank; ranks must ask for the same names in the same order."""
    # Not the model's own parameters, which after a forward may be whole and in the dtype of compute.
    parameters = named_parameters(model)

    def get(name: str) -> Tensor:
        p = parameters[name]
        if not isinstance(p, DTensor):
            return p
        for dim in reversed(range(p.device_mesh.ndim)):  # undo the cuts, from the last to the first
            p = p.redistribute(placements=[*p.placements[:dim], Replicate(), *p.placements[dim + 1 :]])
        return p.to_local()

    return get


def write_folder(
    path: Path,
    model: ModelConfig,
    family: str,
    get: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None,
    like: Path | None = None,
    tokenizer: Files | None = None,
    extra: Mapping[str, object] | None = None,
    shard_bytes: int = SHARD,
) -> None:
    """Write a folder that `transformers` opens. It gets its name once everything in it is on disk.

    Every rank calls this and gets the parameters in turn, holding one at a time; rank 0 writes.

    Args:
        family: the architecture (models/families/); with `like`, that of `like`.
        get: name -> the whole parameter; see `gather`.
        dtype: of every tensor; None: each has the dtype of the tensor of its name in `like`.
        like: a folder of the same model, but for positions, from which to take the names, config.json and the tensors
            of no concern to us (vision, multi-token prediction); by default names and config.json are those that
            `transformers` writes.
        tokenizer: its files.
        extra: further keys of config.json, which also replace those of `like`.

    Raises:
        ValueError: `like` is of another model; the architecture cannot hold the model.
        SaveFailed: on every rank, if the folder could not be written or another process is writing it.
    """
    path, temporary = Path(path), beside(path, "tmp")
    source, found = (None, placements(model, family)) if like is None else check_folder(like, model, POSITIONS)
    if model.tie_embeddings and not FAMILIES[family].ties and (source is None or HEAD in source.tensors):
        shape = (model.vocab_size, model.dim)
        found.append(Placement("embedding.weight", shape, (Source(HEAD, shape),), rows=None))
    # Those that are no part of the language model, except a stale copy of the embedding.
    others = sorted(ignored(model, family, source.shapes) - {HEAD}) if source else []
    copied = [source.tensors[name] for name in others]
    config = _config_json(model, family, dtype, source, extra or {})
    writer = _Writer(temporary, _plan(found, dtype, source, copied), shard_bytes)
    failure: OSError | RuntimeError | None = None

    def attempt(work: Callable[..., None], *arguments: object) -> None:
        """Call `work` on rank 0 until a call fails. Gathering goes on after that: the other ranks wait in it."""
        nonlocal failure
        if failure is None and (not dist.is_initialized() or dist.get_rank() == 0):
            try:
                work(*arguments)
            except (OSError, RuntimeError) as error:
                failure = error

    with ExitStack() as held:
        attempt(held.enter_context, alone(path))
        attempt(finish_replacing, path)
        attempt(writer.begin)
        for placement in found:
            attempt(writer.write, placement, get(placement.name))
        attempt(writer.finish, copied, config, _code(config, like) | dict(tokenizer or {}))
        attempt(replace, temporary, path)
    _raise_everywhere(path, failure)


def _raise_everywhere(path: Path, failure: OSError | RuntimeError | None) -> None:
    """Raise rank 0's failure, if any, on every rank."""
    outcome = [None if failure is None else describe(failure)]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, 0)
    if outcome[0] is not None:
        raise SaveFailed(f"writing '{path}' failed: {outcome[0]}") from failure


def _plan(
    found: list[Placement], dtype: torch.dtype | None, source: Folder | None, copied: list[OnDisk]
) -> dict[str, Planned]:
    """Everything to write, in order."""
    plan = {}
    for tensor in (s for placement in found for s in placement.sources):
        code = CODES[dtype] if dtype else source.tensors[tensor.name].code
        plan[tensor.name] = Planned(code, tensor.shape, math.prod(tensor.shape) * DTYPES[code].itemsize)
    return plan | {t.name: Planned(t.code, t.shape, t.end - t.begin) for t in copied}


def _config_json(
    model: ModelConfig, family: str, dtype: torch.dtype | None, source: Folder | None, extra: Mapping[str, object]
) -> dict[str, Any]:
    changes = dict(extra) if dtype is None else {**extra, "dtype": short(dtype)}
    if source is None:
        return config_to_hf(family, model, **changes)
    config = {**source.config, **changes}
    tables = [config]
    if isinstance(config.get("text_config"), dict):  # from which transformers opens the language model alone
        config["text_config"] = {**config["text_config"], **changes}
        tables.append(config["text_config"])
    if dtype is not None:
        for table in tables:
            table.pop("torch_dtype", None)  # the older name
    _, theirs = config_from_hf(source.config)
    if differences(theirs, model):
        _change(tables[-1], config_to_hf(family, theirs), config_to_hf(family, model))
    return config


def _change(config: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Have a config.json say `now` where it differs from `before`. What else a key's table says is kept."""
    for key, value in now.items():
        if value != before.get(key):
            old = (config.get(key) if isinstance(value, dict) else None) or {}
            known = before.get(key) or ()
            kept = {name: x for name, x in old.items() if name not in known and not isinstance(x, dict)}
            config[key] = kept | value if kept else value
    for older in ("rope_scaling", "rope_theta", "partial_rotary_factor"):  # what rope_parameters says now
        config.pop(older, None)


def _code(config: Mapping[str, Any], like: Path | None) -> dict[str, bytes]:
    """The Python files that config.json's `auto_map` needs: ours, or those of `like`, without looking into them."""
    named = {str(name).rpartition("--")[2].partition(".")[0] + ".py" for name in config.get("auto_map", {}).values()}
    if like is None or MODELING.name in named:
        return {file.name: file.read_bytes() for file in (MODELING, ROPE)} if MODELING.name in named else {}
    return {file.name: file.read_bytes() for file in Path(like).glob("*.py")} if named else {}


class _Writer:
    """Writes the files of a folder: headers first, so that every row has its place and can be written as it comes."""

    def __init__(self, path: Path, plan: Mapping[str, Planned], shard_bytes: int):
        groups: list[list[str]] = [[]]  # names of tensors, by file
        filled = 0
        for name, tensor in plan.items():
            if groups[-1] and filled + tensor.size > shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += tensor.size
        files = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        self.path, self.plan = path, plan
        self.groups = dict(zip(files if len(groups) > 1 else [SINGLE], groups))
        self.tensors: dict[str, OnDisk] = {}

    def begin(self) -> None:
        """Create the files in their full size, and the index."""
        remove(self.path)  # left by an export that was killed
        self.path.mkdir()
        for file, names in self.groups.items():
            _write_header(self.path / file, {name: self.plan[name] for name in names})
            self.tensors |= read_header(self.path / file)
        if len(self.groups) > 1:
            where = {name: tensor.file.name for name, tensor in self.tensors.items()}
            total = sum(tensor.size for tensor in self.plan.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (self.path / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, placement: Placement, parameter: Tensor) -> None:
        """Write the rows of one of our parameters into the tensors that they belong to."""
        rows = parameter.detach().reshape(-1, placement.width).cpu()
        for source, start, stop, row in placement.pieces():
            tensor = self.tensors[source.name]
            given = rows[row : row + stop - start]
            values = given.to(DTYPES[tensor.code]).contiguous()
            if (values.isinf() & given.isfinite()).any():
                raise OSError(f"{source.name} has values beyond {tensor.code}'s range; choose a wider dtype")
            with open(tensor.file, "r+b") as file:
                file.seek(tensor.begin + start * placement.width * values.element_size())
                file.write(values.view(torch.uint8).numpy())

    def finish(self, copied: list[OnDisk], config: Mapping[str, Any], files: Files) -> None:
        """Write everything but the weights, then sync all files to disk."""
        for tensor in copied:
            _copy_bytes(tensor, self.tensors[tensor.name])
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, content in {CONFIG: text.encode(), **files}.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_bytes(content)
        for file in [*self.path.rglob("*"), self.path]:
            sync(file)


def _write_header(file: Path, plan: Mapping[str, Planned]) -> None:
    """Create a safetensors file in its full size, whose tensors are still holes."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in plan.items():
        header[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _copy_bytes(source: OnDisk, target: OnDisk) -> None:
    with open(source.file, "rb") as read, open(target.file, "r+b") as write:
        read.seek(source.begin)
        write.seek(target.begin)
        for at in range(source.begin, source.end, BLOCK):
            write.write(read.read(min(BLOCK, source.end - at)))
