"""How a run starts: what it trains, on which data, and from which weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.data import FileGroups, StreamLoader, Streams, Tokenizer
from titan_linear.distributed.groups import host_group, on_rank_0
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise, owned
from titan_linear.run.build import family_of, model_config, open_tokenizer
from titan_linear.run.data import RunData, base_of, check_alike, check_content, content_of
from titan_linear.run.session import Session
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.hf_io import load_weights as load_hf_weights
from titan_linear.storage.peft import read_peft
from titan_linear.storage.rundir import config_of
from titan_linear.storage.step_folders import (
    Content,
    Progress,
    known_progress,
    rewind,
    weights_path,
)
from titan_linear.storage.tensors import (
    holds_adapters,
    holds_optimizer,
    is_adapter,
    load_weights,
    named_parameters,
)


class Subject(NamedTuple):
    """The model that a run trains, and its data."""

    tokenizer: Tokenizer
    streams: Streams
    held_out: Streams | None
    # Groups of files, by which telemetry reports losses separately.
    groups: FileGroups | None
    model: ModelConfig
    content: Content


def saved_progress(config: Config, host: dist.ProcessGroup) -> Progress | None:
    """Return the progress in the checkpoint that this run resumes from, or None."""
    if not config.checkpoint.enable:
        return None
    folder, step = config.checkpoint_folder, config.checkpoint.load_step
    return on_rank_0(lambda: known_progress(folder, step), host)


def open_subject(config: Config, known: Progress | None, host: dist.ProcessGroup) -> Subject:
    """Open the model and data that all ranks train.

    Raises:
        ValueError: the run has trained another model or other data so far, or ranks differ.
    """
    tokenizer = open_tokenizer(config)
    data = RunData(config, tokenizer)
    streams, held_out = data.streams(known)
    # Wait for nodes that first had to write their token cache.
    dist.barrier(host)
    model = model_config(config, tokenizer)
    base = on_rank_0(lambda: base_of(config), host)
    content = content_of(config, tokenizer, model, streams, held_out, base)
    # A restart has no preflight.
    if known:
        check_content(config, known.content, content)
    check_alike(config.flat_keys(), content, host)
    return Subject(tokenizer, streams, held_out, data.groups(streams), model, content)


def build_checkpointer(config: Config) -> Checkpointer | None:
    c = config.checkpoint
    if not c.enable:
        return None
    return Checkpointer(
        config.checkpoint_folder,
        async_mode=c.async_mode,
        keep_latest_k=c.keep_latest_k,
        verify=c.verify,
        group=host_group(),
    )


def build_loader(config: Config, streams: Streams, dims: ParallelDims) -> StreamLoader:
    t = config.training
    return StreamLoader(
        streams,
        global_batch_size=t.global_batch_size,
        local_batch_size=t.local_batch_size,
        dp_rank=dims.dp_rank,
        dp_degree=dims.dp,
        num_workers=t.num_workers,
    )


def set_weights(
    config: Config,
    known: Progress | None,
    session: Session,
    loader: StreamLoader,
    checkpointer: Checkpointer | None,
) -> None:
    """Load the run's checkpoint of this progress, or the weights that the run begins from.

    With adapters, load both.
    """
    model, host = session.model, session.host
    # With adapters, the checkpoint holds only the trained weights: the base is loaded
    # first.
    if known is None or model.config.adapter:
        set_first_weights(config, model, host)
    if known is None:
        load_adapters(config, model)
    else:
        folder, step = config.checkpoint_folder, known.step
        # A restart after the last save, which may hold only weights: no step remains, so
        # the optimizer is not needed.
        ended = step >= config.training.steps
        whole = not ended or on_rank_0(lambda: holds_optimizer(folder / f"step-{step}"), host)
        checkpointer.load(step, model, session.optimizer if whole else None, loader)
        on_rank_0(lambda: rewind(folder, step, config.checkpoint.load_step), host)
    # Some disks are slower.
    dist.barrier(host)


def set_first_weights(
    config: Config, model: Decoder, host: dist.ProcessGroup | None = None
) -> None:
    """Load or draw the weights that the run begins from.

    If they are adapters of another run, that run's first weights are set before. Without a
    group, the call runs in one process.
    """
    c, drawn = config.checkpoint, named_parameters(model)
    # Whatever the folder or checkpoint does not hold is drawn: adapters, or the whole
    # model.
    if path := config.hf_weights or (c.enable and c.initial_load_path):
        if config.hf_weights:
            load_hf_weights(Path(path), model)
        elif holds_adapters(saved := weights_path(Path(path))):
            set_first_weights(config_of(saved), model, host)
            return load_weights(saved, model, host)
        else:
            load_weights(Path(path), model, host)
        drawn = {name: p for name, p in drawn.items() if is_adapter(name)}
    initialise(model, config.debug.seed, drawn)


def load_adapters(config: Config, model: Decoder) -> None:
    """Load the adapters of adapter.initial_load_path, if it is set."""
    if path := config.adapter.initial_load_path:
        family, parameters = family_of(model.config, config), named_parameters(model)
        for name, tensor in read_peft(Path(path), model.config, family, config.adapter, "").items():
            # A rank copies the part of the tensor that it owns.
            local, offsets = owned(parameters[name])
            local.copy_(
                tensor[tuple(slice(at, at + n) for at, n in zip(offsets, local.shape, strict=True))]
            )
