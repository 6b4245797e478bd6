"""The tensors of a step-N folder: how a model's and an optimizer's state is named, written and read by DCP."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from titan_linear.distributed.parts import whole
from titan_linear.storage.step_folders import METADATA, describe, weights_path

FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)  # `_compare` checks names with better messages
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what checkpointing and torch.compile add to names
# What .metadata may refer to, dtypes aside. BytesStorageMetadata is left out: DCP unpickles what that announces.
METADATA_NAMES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # the latter is Python 3.13's name for it
}


def load_weights(path: Path, model: nn.Module) -> None:
    """Load weights in place, in one process, from a path that `weights_path` resolves.

    Raises:
        ValueError: there is no whole checkpoint, or it is of another model.
    """
    read_state(weights_path(path), {"model": named_parameters(model)}, group=None)


def check_weights(path: Path, model: nn.Module) -> None:
    """Compare names and sizes of the tensors of a step-N folder with a model's, which may be on the meta device.

    Raises:
        ValueError: it is of another model.
    """
    _compare(path, Reader(path), {"model": named_parameters(model)})


def stored_weights(path: Path) -> Callable[[str], torch.Tensor]:
    """name -> the whole tensor of a step-N folder, read when it is asked for, in one process."""
    metadata = Reader(path).read_metadata().state_dict_metadata

    def get(name: str) -> torch.Tensor:
        stored = metadata[f"model.{name}"]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        dcp.load({"model": {name: tensor}}, storage_reader=Reader(path), no_dist=True)
        return tensor

    return get


class Reader(dcp.FileSystemReader):
    """DCP's reader of a step-N folder; the pickle of its metadata can refer only to classes of metadata."""

    def read_metadata(self) -> Metadata:
        """Raise ValueError, with the file and the name in question, if .metadata is damaged or refers to anything
        else."""
        file = Path(self.path) / METADATA
        try:
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            metadata.storage_meta.load_id = self.load_id
        except _Refused as refused:
            raise ValueError(
                f"checkpoint file '{file}' is refused: it refers to {refused}, as no checkpoint of ours does, and "
                "loading it could run code; get the checkpoint anew, from a source that you trust"
            ) from None
        except Exception as error:  # damaged pickles raise anything
            raise ValueError(f"checkpoint file '{file}' cannot be read ({error!r}); restore it from a copy") from error
        return metadata


class _Refused(Exception):
    """A name that .metadata must not refer to."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in METADATA_NAMES:
            raise _Refused(f"{module}.{name}")
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)


def read_state(path: Path, state: dict[str, dict[str, Any]], group: dist.ProcessGroup | None) -> None:
    reader = Reader(path)
    _compare(path, reader, state)
    try:
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failure:  # a BaseException, the same on every rank
        raise ValueError(f"'{path}' cannot be loaded: {reasons(failure)}; restore it from a copy") from failure


def holds_optimizer(path: Path) -> bool:
    """Whether a run can resume from this checkpoint; otherwise it holds the weights only."""
    names = Reader(path).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)


# --- What is saved ---------------------------------------------------------------------------------------------------


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by name, without what wrappers add to names; a tied weight once, by its first name. They share the memory
    of the model's own; a part of a tensor says where it lies in the whole one."""
    state = get_model_state_dict(model)
    first = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in first:
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            del state[name]
    return {name: whole(model, name, tensor) for name, tensor in state.items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's state by weight, "state.layers.0.mlp.w1.weight.exp_avg"; and its hyperparameters, which are not
    saved."""
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {name: value for name, value in flat.items() if name.startswith("state.")}
    return state, {name: value for name, value in flat.items() if name not in state}


def of_whole(moments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The optimizer's state, whose parts say where they lie in the whole tensors, as in `named_parameters`; counts of
    steps are no parts."""
    names = {name: name.removeprefix("state.").rpartition(".")[0] for name in moments}
    return {name: whole(model, names[name], x) if x.dim() else x for name, x in moments.items()}


def _compare(path: Path, reader: Reader, state: dict[str, dict[str, Any]]) -> None:
    """Compare names and sizes. DCP would ignore what the checkpoint has and the model lacks."""
    saved = reader.read_metadata().state_dict_metadata
    if "optimizer" in state and not any(name.startswith("optimizer.") for name in saved):
        raise ValueError(
            f"'{path}' holds weights only (checkpoint.last_save_model_only), from which no run can resume; choose an "
            "earlier checkpoint.load_step, or start a new run with checkpoint.initial_load_path"
        )
    for part, values in state.items():
        wanted = {f"{part}.{name}": tuple(x.shape) for name, x in values.items()}
        there = {name: tuple(x.size) for name, x in saved.items() if name.startswith(f"{part}.")}
        if wanted.keys() != there.keys():
            lacks, extra = sorted(wanted.keys() - there.keys()), sorted(there.keys() - wanted.keys())
            raise ValueError(
                f"'{path}' is of another model: it lacks {len(lacks)} of this model's tensors {lacks[:3]} and has "
                f"{len(extra)} others {extra[:3]}; use the configuration that it was saved with"
            )
        if other := [f"{name} {there[name]}, here {size}" for name, size in wanted.items() if there[name] != size]:
            raise ValueError(
                f"'{path}' is of another model: {len(other)} tensors have another size: {'; '.join(other[:3])}; use "
                "the configuration that it was saved with, or if it is this one, the version of titan_linear"
            )


def reasons(failure: OSError | RuntimeError | dcp.CheckpointException) -> str:
    if not isinstance(failure, dcp.CheckpointException):
        return describe(failure)
    return "; ".join(f"rank {rank}: {describe(error)}" for rank, (error, _) in sorted(failure.failures.items()))
