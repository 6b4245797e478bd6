"""Hugging Face folders, read and checked; a rank reads the rows that it owns.

    config.json                      the model (models/families/)
    model-00001-of-00003.safetensors ...
    model.safetensors.index.json     tensor -> file; a single file is model.safetensors, without an
                                     index
    tokenizer.json, ...              the tokenizer (data/corpus/tokenizer.py)
    modeling_titan_linear.py         the model, where transformers does not have it (models/families/remote.py)

`models/hf_mapping.py` maps rows of tensors on disk to rows of our parameters; this module
moves the bytes. A folder is checked as a whole from its headers (`open_folder`,
`check_folder`) before any tensor is read. Pickle files are never opened, because loading
them can run code. hf_writing.py writes such folders.
"""

import hashlib
import json
import math
import shlex
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from titan_linear.models.config import ModelConfig, differences
from titan_linear.models.hf_mapping import (
    Placement,
    Shape,
    Shapes,
    config_from_hf,
    config_to_hf,
    placements,
)
from titan_linear.models.init import owned, runs
from titan_linear.storage.files import Json, progress, read_json
from titan_linear.storage.tensors import named_parameters

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Options that no tensor depends on.
POSITIONS = ("attention.rope_theta", "attention.rope_scaling")
# Number of a folder's problems that a message names.
LISTED = 5
# Number of bytes moved at a time.
BLOCK = 64 << 20


@dataclass(frozen=True)
class OnDisk:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    # Its dtype as the file names it: "BF16".
    code: str
    shape: Shape
    # Its bytes [begin, end) in the file.
    begin: int
    end: int

    def blocks(self) -> Iterator[bytes]:
        """Yield its bytes, BLOCK at a time."""
        with open(self.file, "rb") as file:
            file.seek(self.begin)
            for at in range(self.begin, self.end, BLOCK):
                yield file.read(min(BLOCK, self.end - at))


class Index(BaseModel):
    weight_map: dict[str, str]  # tensor -> file name


@dataclass(frozen=True)
class Folder:
    path: Path
    config: Json  # config.json
    tensors: dict[str, OnDisk]

    @cached_property
    def shapes(self) -> Shapes:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def fingerprint(self) -> str:
        """Return a hash of all tensors, independent of the files that hold them."""
        with ThreadPoolExecutor() as pool:
            entries = pool.map(_fingerprinted, self.tensors.values())
            listed = sorted(progress(entries, f"reading {self.path.name}"))
        return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def _fingerprinted(tensor: OnDisk) -> tuple[object, ...]:
    """Return what a fingerprint is made of: name, dtype, shape and CRC-32."""
    crc = 0
    for block in tensor.blocks():
        crc = zlib.crc32(block, crc)
    return tensor.name, tensor.code, tensor.shape, crc


# --- Looking at a folder ---------------------------------------------------------------------------------------------


def read_model(path: Path, mtp_layers: int = 0) -> tuple[str, ModelConfig]:
    """Return (family, model) of a folder's config.json, as `config_from_hf` reads it.

    Raises:
        ValueError: config.json is missing, or describes an unsupported model.
    """
    config = read_config(path)
    try:
        return config_from_hf(config, mtp_layers)
    except ValueError as error:
        raise ValueError(f"'{path / CONFIG}': {error}") from None


def read_config(path: Path) -> Json:
    return read_json(path / CONFIG, Json, f"give a Hugging Face folder: {download(path)}")


def download(path: Path) -> str:
    """Return the command that fetches a published folder of this name."""
    return f"hf download OWNER/{shlex.quote(path.name)} --local-dir {shlex.quote(str(path))}"


def open_folder(path: Path) -> Folder:
    """Read a folder's tensors from its files' headers, and check that no byte is missing.

    Raises:
        ValueError: naming the file, and the tensor if one is at fault.
    """
    where = _index(path)
    headers = {file: read_header(path / file) for file in sorted(set(where.values()))}
    # All tensors of the files, indexed or not. For duplicates, the index decides.
    tensors: dict[str, OnDisk] = {}
    for header in headers.values():
        tensors |= header
    for name, file in where.items():
        if name not in headers[file]:
            raise ValueError(
                f"'{path / file}' lacks tensor {name!r}, which {INDEX} says it holds; fetch it again"
            )
        tensors[name] = headers[file][name]
    config = read_config(path) if (path / CONFIG).is_file() else {}
    return Folder(path, config, tensors)


def check_folder(
    path: Path, model: ModelConfig, free: Collection[str] = ()
) -> tuple[Folder, list[Placement]]:
    """Open a folder and locate each parameter in it.

    A folder must hold exactly the tensors of `model`.

    Args:
        free: options in which the folder's model may differ, if a config.json of its family
            can express it.

    Raises:
        ValueError: naming file and tensor, or an option.
    """
    # The folder's model may differ in free options only.
    family, theirs = read_model(path, model.mtp_layers)
    changed = differences(theirs, model)
    if differing := [
        f"{option} = {a!r} (this run: {b!r})"
        for option, (a, b) in changed.items()
        if option not in free
    ]:
        raise ValueError(
            f"'{path / CONFIG}' is another model: {', '.join(differing)}; use model.flavor = 'hf', or this model's "
            "folder"
        )
    # Raises if the family cannot express the change.
    if changed:
        config_to_hf(family, model)
    return locate(path, family, model)


def locate(path: Path, family: str, model: ModelConfig) -> tuple[Folder, list[Placement]]:
    """Open a folder of this family, and return where each of our parameters lies in it.

    Raises:
        ValueError: tensors are missing, unused or of another shape, a dtype cannot be read,
            or a head differs from the embedding to which it is tied. The message names the
            first problems.
    """
    folder = open_folder(path)
    try:
        places = placements(model, family, folder.shapes)
    except ValueError as error:
        head, *problems = str(error).split("\n  ")
        said = [_with_file(problem, folder) for problem in problems[:LISTED]]
        if len(problems) > LISTED:
            said.append(f"and {len(problems) - LISTED} more")
        raise ValueError(f"'{folder.path}': {head} " + "; ".join(said)) from None
    # Every tensor must have a dtype that can be read.
    for source in chain.from_iterable(placement.sources for placement in places):
        tensor = folder.tensors[source.name]
        if tensor.code not in DTYPES:
            raise ValueError(
                f"'{tensor.file}': tensor {tensor.name!r} is {tensor.code}; {', '.join(DTYPES)} can be read: convert it"
            )
    if model.tie_embeddings and HEAD in folder.tensors:
        (embedding,) = (place for place in places if place.name == "embedding.weight")
        _check_tied(folder, embedding.sources[0].name)
    return folder, places


def _check_tied(folder: Folder, embedding: str) -> None:
    """Refuse a head on disk that differs from the embedding to which config.json ties it.

    The head would be lost.
    """
    head = folder.tensors[HEAD]
    other = folder.tensors[embedding]
    if head.shape == other.shape:
        reader = RowReader(folder)
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
    """Return the tensors of a safetensors file.

    The file has 8 bytes of length, a JSON header, and the tensors' bytes without gaps.

    Raises:
        ValueError: the file cannot be read, or safetensors refuses it because it is cut
            short or its header is malformed.
    """
    if file.exists() and not file.is_file():
        raise ValueError(f"'{file}' is not a regular file; fetch it again")
    try:
        # safe_open checks the header, and that the file has all bytes that it declares.
        with open(file, "rb") as stream, safe_open(file, "np"):
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(
            f"'{file}' cannot be read: {error.strerror}; give the permission, or fetch it again"
        ) from None
    except SafetensorError as error:
        raise ValueError(
            f"'{file}' is cut short or no safetensors file ({error}); fetch it again"
        ) from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, described in header.items():
        begin, end = (8 + length + offset for offset in described["data_offsets"])
        tensors[name] = OnDisk(
            name, file, described["dtype"], tuple(described["shape"]), begin, end
        )
    return tensors


def _index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    # Several files, listed in an index.
    if (path / INDEX).is_file():
        where = read_json(path / INDEX, Index, "fetch it again").weight_map
        for name, file in where.items():
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(
                    f"'{path / INDEX}' names a file outside its folder, {file!r}, for tensor {name!r}; get the folder "
                    "from a source that you trust"
                )
            if not (path / file).is_file():
                raise ValueError(
                    f"'{path / file}' is missing: {INDEX} says it holds tensor {name!r}; fetch it again"
                )
        if (path / SINGLE).is_file() and SINGLE not in where.values():
            raise ValueError(
                f"'{path}' holds {SINGLE} beside the files of {INDEX}; remove those that are not the model's"
            )
        return where
    # A single file.
    if (path / SINGLE).is_file():
        return dict.fromkeys(read_header(path / SINGLE), SINGLE)
    # No weights that can be read: find the best remedy.
    pickles = sorted(chain.from_iterable(map(path.glob, PICKLES)))
    remedy = "give the folder of a model with its weights"
    if shards := sorted(path.glob("*.safetensors")):
        remedy = f"fetch {INDEX} too, which says what {shards[0].name} and other shards hold"
    elif pickles:
        remedy = (
            f"{pickles[0].name} is a pickle file, which is never loaded: convert it to safetensors"
        )
    raise ValueError(f"'{path}' holds neither {INDEX} nor {SINGLE}; {remedy}")


# --- Reading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(path: Path, model: nn.Module) -> None:
    """Fill every parameter of a `Decoder` in place, in its own dtype.

    A rank reads only its own part of a sharded parameter.

    Raises:
        ValueError: the folder does not hold the model.
    """
    family, _ = read_model(path)
    folder, places = locate(path, family, model.config)
    reader = RowReader(folder)
    parameters = named_parameters(model)
    for placement in progress(places, f"loading {path.name}"):
        reader.fill(placement, *owned(parameters[placement.name]))


class RowReader:
    """Reads rows of a folder's tensors.

    A file is mapped into memory from its first use on, for as long as the reader is there.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self.open: dict[Path, Any] = {}

    def fill(self, placement: Placement, local: Tensor, offsets: Shape) -> None:
        """Fill `local`, the part of the placement's parameter that begins at `offsets`."""
        if local.numel() == 0:
            return
        # For a vector, each element is a row.
        matrix = local.dim() > 1
        rows = local.view(-1, local.shape[-1] if matrix else 1)
        columns = slice(offsets[-1], offsets[-1] + local.shape[-1]) if matrix else slice(None)
        leading = slice(-1) if matrix else slice(None)
        # Read the runs of rows that the part covers, from every tensor that holds some of
        # them. Row j of the part is row j + shift of the whole parameter.
        box = local.shape[leading], placement.shape[leading], offsets[leading]
        length, shifts = runs(*box)
        for i, shift in enumerate(shifts.tolist()):
            begin = i * length + shift
            for source, start, stop, row in placement.pieces(begin, begin + length):
                tensor = self.folder.tensors[source.name]
                row -= shift
                for values in self.rows(tensor, start, stop, placement.width):
                    rows[row : row + len(values)].copy_(values[:, columns])
                    row += len(values)

    def whole(self, placement: Placement, dtype: torch.dtype) -> Tensor:
        """Return the whole parameter of the placement."""
        out = torch.empty(placement.shape, dtype=dtype)
        self.fill(placement, out, (0,) * out.dim())
        return out

    def rows(self, tensor: OnDisk, start: int, stop: int, width: int) -> Iterator[Tensor]:
        """Yield rows [start, stop) of a tensor viewed as [-1, width], a block at a time."""
        if tensor.file not in self.open:
            self.open[tensor.file] = safe_open(tensor.file, "pt")
        on_disk = self.open[tensor.file].get_slice(tensor.name)
        rows = math.prod(tensor.shape) // width
        # Rows per index of the first dimension, along which slices are read.
        per_index = rows // tensor.shape[0]
        block = max(1, BLOCK // (per_index * width * 4)) * per_index
        for a in range(start, stop, block):
            b = min(a + block, stop)
            low = a // per_index
            values = on_disk[low : -(-b // per_index)].reshape(-1, width)
            yield values[a - low * per_index : b - low * per_index]
