"""Tensors of a step-N folder: how DCP names, writes and reads model and optimizer state."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from titan_linear.distributed.groups import on_rank_0
from titan_linear.distributed.parts import whole
from titan_linear.models.lora import frozen_names, is_lora
from titan_linear.storage.files import progress
from titan_linear.storage.manifest import REMEDY, CheckpointReader, read_manifest
from titan_linear.storage.step_folders import describe, weights_path

# Maps a parameter's name to the whole tensor.
Weights = Callable[[str], Tensor]
# State of a model or an optimizer, by name.
State = dict[str, Any]
# `_compare` checks names, with better messages.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
# Parts of names that activation checkpointing and torch.compile add.
WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


def load_weights(path: Path, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Load weights in place, from a path that `weights_path` resolves.

    Args:
        group: a group of all ranks, or None in one process. Rank 0 chooses the checkpoint:
            while a run saves there, ranks may disagree about the newest.

    Raises:
        ValueError: no complete checkpoint is found, or it is of another model.
    """
    chosen = on_rank_0(lambda: weights_path(path), group) if group else weights_path(path)
    # The checkpoint of a run with adapters holds what it trains, any other all but adapters.
    parameters = saved_parameters(model)
    if not lacks_base(chosen):
        named = named_parameters(model)
        parameters = {name: p for name, p in named.items() if not is_lora(name)}
    read_state(chosen, {"model": parameters}, group)


def check_weights(path: Path, model: nn.Module) -> None:
    """Compare the tensors of a step-N folder with what a run saves of `model`.

    Names and sizes must be equal. The model may be on the meta device.

    Raises:
        ValueError: the folder is of another model.
    """
    _compare(path, CheckpointReader(path), {"model": saved_parameters(model)})


def stored_weights(path: Path) -> Weights:
    """Return a function from a name to the whole tensor of a step-N folder.

    A tensor is read when it is asked for, in one process.
    """
    reader = CheckpointReader(path)

    def get(name: str) -> Tensor:
        stored = reader.metadata.state_dict_metadata[f"model.{name}"]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        _fill(reader, {"model": {name: tensor}})
        return tensor

    return get


def read_state(path: Path, state: dict[str, State], group: dist.ProcessGroup | None) -> None:
    reader = CheckpointReader(path)
    _compare(path, reader, state)
    _fill(reader, state, group)


def _fill(
    reader: CheckpointReader, state: dict[str, State], group: dist.ProcessGroup | None = None
) -> None:
    try:
        dcp.load(
            state,
            storage_reader=reader,
            planner=_Planner(),
            process_group=group,
            no_dist=group is None,
        )
    except dcp.CheckpointException as failure:
        # A BaseException, the same on every rank.
        raise ValueError(
            f"'{reader.path}' cannot be loaded: {reasons(failure)}; {REMEDY}"
        ) from failure


class _Planner(dcp.DefaultLoadPlanner):
    """Shows how many of this rank's parts are loaded."""

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        self.bar = progress(None, "loading", len(new_plan.items))
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: Tensor) -> None:
        self.bar.update()


def holds_optimizer(path: Path) -> bool:
    """Whether a run can resume from this checkpoint; otherwise it holds only weights."""
    return any(name.startswith("optimizer.") for name in read_manifest(path).tensors)


def lacks_base(path: Path) -> bool:
    """Whether a checkpoint holds adapters, and not the weights that they leave frozen."""
    return any(map(is_lora, read_manifest(path).tensors))


# --- What is saved ---------------------------------------------------------------------------------------------------


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, without what wrappers add to names.

    A tied weight comes once, by its first name. The tensors share the memory of the model's
    parameters. A part of a tensor
    records its place in the whole one.
    """
    state = get_model_state_dict(model)
    first = dict(model.named_parameters())
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in first:
            del state[WRAPPERS.sub("", name)]
    return {name: whole(model, name, tensor) for name, tensor in state.items()}


def saved_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters to save: all, or with adapters only the trained ones."""
    frozen = {WRAPPERS.sub("", name) for name in frozen_names(model)}
    return {name: p for name, p in named_parameters(model).items() if name not in frozen}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Return the optimizer's state by weight, and its hyperparameters, which are not saved.

    A name is "state.layers.0.mlp.w1.weight.exp_avg", for example.
    """
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {name: value for name, value in flat.items() if name.startswith("state.")}
    return state, {name: value for name, value in flat.items() if name not in state}


def of_whole(moments: State, model: nn.Module) -> State:
    """Return the optimizer's state with each part's place in the whole tensor.

    See `named_parameters`. Step counts are not parts.
    """
    names = {name: name.removeprefix("state.").rpartition(".")[0] for name in moments}
    return {name: whole(model, names[name], x) if x.dim() else x for name, x in moments.items()}


def _compare(path: Path, reader: CheckpointReader, state: dict[str, State]) -> None:
    """Compare names and sizes. DCP would ignore tensors that only the checkpoint has."""
    saved = reader.metadata.state_dict_metadata
    if "optimizer" in state and not any(name.startswith("optimizer.") for name in saved):
        raise ValueError(
            f"'{path}' holds weights only (checkpoint.last_save_model_only), from which no run can resume; choose an "
            "earlier checkpoint.load_step, or start a new run with checkpoint.initial_load_path"
        )
    # First the names, then the sizes, of the model and of the optimizer.
    for part, values in state.items():
        shapes = {f"{part}.{name}": tuple(x.shape) for name, x in values.items()}
        there = {name: tuple(x.size) for name, x in saved.items() if name.startswith(f"{part}.")}
        if shapes.keys() != there.keys():
            lacks = sorted(shapes.keys() - there.keys())
            extra = sorted(there.keys() - shapes.keys())
            raise ValueError(
                f"'{path}' is of another model: it lacks {len(lacks)} of this model's tensors {lacks[:3]} and has "
                f"{len(extra)} others {extra[:3]}; use the configuration that it was saved with"
            )
        if other := [
            f"{name} {there[name]}, here {size}"
            for name, size in shapes.items()
            if there[name] != size
        ]:
            raise ValueError(
                f"'{path}' is of another model: {len(other)} tensors have another size: {'; '.join(other[:3])}; use "
                "the configuration that it was saved with, or if it is this one, the version of titan_linear"
            )


def reasons(failure: OSError | RuntimeError | dcp.CheckpointException) -> str:
    if not isinstance(failure, dcp.CheckpointException):
        return describe(failure)
    return "; ".join(
        f"rank {rank}: {describe(error)}" for rank, (error, _) in sorted(failure.failures.items())
    )
