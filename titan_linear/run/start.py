"""How a run starts: what it trains, on which data, and from which weights."""

from typing import NamedTuple

import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.data import FileGroups, StreamLoader, Streams
from titan_linear.distributed.groups import host_group, on_rank_0
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.run.data import RunData, check_alike, check_content, content_of
from titan_linear.run.origin import Origin
from titan_linear.run.session import Session
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.step_folders import Content, Progress, known_progress, rewind
from titan_linear.storage.tensors import holds_optimizer


class Subject(NamedTuple):
    """The data on which a run trains, and the record of its model and data."""

    streams: Streams
    held_out: Streams | None
    # Groups of files, by which telemetry reports losses separately.
    groups: FileGroups | None
    content: Content


def saved_progress(config: Config, host: dist.ProcessGroup) -> Progress | None:
    """Return the progress in the checkpoint that this run resumes from, or None."""
    if not config.checkpoint.enable:
        return None
    folder = config.checkpoint_folder
    step = config.checkpoint.load_step
    return on_rank_0(lambda: known_progress(folder, step), host)


def open_subject(origin: Origin, progress: Progress | None, host: dist.ProcessGroup) -> Subject:
    """Open the data on which all ranks train.

    Raises:
        ValueError: the run has trained another model or other data so far, or ranks differ.
    """
    config = origin.config
    data = RunData(config, origin.tokenizer)
    streams, held_out = data.streams(progress)
    # Wait for nodes that first had to write their token cache.
    dist.barrier(host)
    base = on_rank_0(lambda: origin.base_fingerprint, host)
    content = content_of(origin, streams, held_out, base)
    # A restart has no preflight.
    if progress:
        check_content(config, progress.content, content)
    check_alike(config.flat_keys(), content, host)
    return Subject(streams, held_out, data.groups(streams), content)


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
    origin: Origin,
    progress: Progress | None,
    session: Session,
    loader: StreamLoader,
    checkpointer: Checkpointer | None,
) -> None:
    """Load the run's checkpoint of this progress, or the weights that the run begins from."""
    config = origin.config
    model = session.model
    host = session.host
    if progress is None:
        origin.load(model, host)
    else:
        origin.load_frozen(model, host)
        folder = config.checkpoint_folder
        step = progress.step
        # A restart after the last save, which may hold only weights: no step remains, so
        # the optimizer is not needed.
        ended = step >= config.training.steps
        whole = not ended or on_rank_0(lambda: holds_optimizer(folder / f"step-{step}"), host)
        checkpointer.load(step, model, session.optimizer if whole else None, loader)
        on_rank_0(lambda: rewind(folder, step, config.checkpoint.load_step), host)
    # Some disks are slower.
    dist.barrier(host)
