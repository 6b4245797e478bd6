"""manifest.json of a checkpoint: checksums of its files, and places of its tensors' slices.

The slices repeat DCP's own .metadata. That file is a pickle, which is never opened: a
pickle can alter a class in the whole process, even if only classes of metadata are allowed.
Other programs may need it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, model_validator
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from titan_linear.storage.files import read_json
from titan_linear.storage.rundir import STEP_MANIFEST

REMEDY = "restore it from a copy"
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# The name of a file → [size, CRC-32].
Checksums = dict[str, list[int]]


class Strict(BaseModel):
    """A model in which any unknown key or other type is damage."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Chunk(Strict):
    """A slice of a tensor, and its bytes in a file."""

    offsets: list[int]
    sizes: list[int]
    # This field and the rest have the names that DCP's reader asks for.
    relative_path: str
    offset: int
    length: int
    transform_descriptors: ClassVar[tuple[str, ...]] = ()


class Stored(Strict):
    """A tensor of a checkpoint."""

    dtype: str
    size: list[int]
    chunks: list[Chunk]


class Manifest(Strict):
    files: Checksums
    tensors: dict[str, Stored]
    # CRC-32 of the other fields.
    checksum: int = 0

    def signed(self) -> Manifest:
        content = self.model_dump_json(exclude={"checksum"}).encode()
        return self.model_copy(update={"checksum": zlib.crc32(content)})

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if self.checksum != self.signed().checksum:
            raise ValueError("it does not have its checksum")
        if outside := [name for name in self.files if "/" in name]:
            raise ValueError(f"it names a file of another folder, {outside[0]!r}")
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                if chunk.relative_path not in self.files:
                    raise ValueError(f"it has no checksum of {chunk.relative_path!r}")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"there is no dtype {tensor.dtype!r}")
        return self


def read_manifest(checkpoint: Path, remedy: str = REMEDY) -> Manifest:
    """Return the manifest of a step-N folder.

    Raises:
        Unreadable: it is missing or damaged.
    """
    return read_json(checkpoint / STEP_MANIFEST, Manifest, remedy)


def stored_tensors(
    metadata: Metadata, results: Iterable[Iterable[WriteResult]]
) -> dict[str, Stored]:
    """Return the tensors that DCP has written, from the arguments of `Writer.finish`."""
    # The place of each slice, by tensor and offsets.
    where = {result.index: result.storage_data for result in chain.from_iterable(results)}
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        stored = Stored(dtype=str(tensor.properties.dtype), size=list(tensor.size), chunks=[])
        for chunk in tensor.chunks:
            at = where[MetadataIndex(name, chunk.offsets)]
            stored.chunks.append(
                Chunk(
                    offsets=list(chunk.offsets),
                    sizes=list(chunk.sizes),
                    relative_path=at.relative_path,
                    offset=at.offset,
                    length=at.length,
                )
            )
        tensors[name] = stored
    return tensors


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader of a step-N folder, with `read_manifest` in place of the pickle."""

    def read_metadata(self) -> Metadata:
        return self.metadata

    @cached_property
    def metadata(self) -> Metadata:
        """Return the folder's metadata.

        Raises:
            Unreadable: the manifest is missing or damaged.
        """
        tensors = {}
        where: dict[MetadataIndex, Chunk] = {}
        for name, stored in read_manifest(Path(self.path)).tensors.items():
            chunks = []
            for chunk in stored.chunks:
                offsets = torch.Size(chunk.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
                where[MetadataIndex(name, offsets)] = chunk
            properties = TensorProperties(DTYPES[stored.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.size), chunks)
        return Metadata(tensors, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))
