"""Checkpoints: model, optimizer and progress, written with torch.distributed.checkpoint (DCP) and whole or absent.

    checkpoint/
      step-100/            whole: it got this name when everything in it was on disk
        __R_0.distcp       what rank R wrote; any other number of ranks can read it
        .metadata          DCP: which file holds which slice of which tensor
        progress.json      `Progress`: the step, and what the run trains on
        manifest.json      size and CRC-32 of every file above
      step-200.tmp/        a save in progress, or what a killed save or removal left: the next save removes it
      abandoned-DATE/      checkpoints of later steps, which the run left behind by resuming from an earlier one
      rewound.json         the checkpoint.load_step that the run has gone back to; the same command then resumes from
                           the newest

A save fills step-N.tmp. Every rank computes the checksums of its own files while it writes them, syncs the files and
reads them back from the disk to compare; rank 0 adds the manifest and renames. Only then are older checkpoints removed.
So SIGKILL costs at most the save in progress, and what a disk alters is noticed while the state can still be written
again. DCP notices a truncated file but not an altered one: `verify` reads everything. No code in a checkpoint runs:
tensors are loaded as weights only, and the pickle in .metadata may refer only to the classes that it needs (`Reader`).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from titan_linear.config import Config
from titan_linear.data import Phase
from titan_linear.distributed.ending import RunFailed, is_gone
from titan_linear.distributed.groups import of_all_ranks, on_rank_0
from titan_linear.distributed.parts import whole
from titan_linear.files import remove, sync, write_whole
from titan_linear.rundir import checkpoint_folder, checkpoints_of, set_aside

MANIFEST, PROGRESS, METADATA, REWOUND = "manifest.json", "progress.json", ".metadata", "rewound.json"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)  # `_compare` checks names with better messages
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what checkpointing and torch.compile add to names
BLOCK = 1 << 20  # bytes read at a time
AT_LAST = 600.0  # seconds for an async save to end, when an error ends the run
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


class Content(BaseModel):
    """What a run trains, and on what, by fingerprints of the content: paths may change."""

    tokenizer: str
    model: str
    corpora: dict[str, str]  # by the names of a mixture's sources, with those of its earlier phases; else by ""
    mixture: list[Phase]  # without a mixture none
    validation: str = ""  # a corpus of its own


class Progress(BaseModel):
    """What a checkpoint records besides tensors."""

    step: int
    skipped: int = 0  # steps left out because their loss or gradient was not finite
    total_steps: int = 0  # of the learning rate's schedule
    content: Content | None = None  # None: imported weights


class SaveFailed(RunFailed, OSError):
    """A save failed, on every rank; earlier checkpoints remain."""


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank calls every method, in the same order.

    Args:
        folder: holds the step-N folders; on a file system that all ranks share.
        async_mode: "disabled", or "async": `save` returns once the state is copied to host memory, which is held until
            the save ends.
        keep_latest_k: checkpoints older than the latest k are removed; 0 keeps all.
        verify: read back from the disk what was written, and if it differs write it once more.
        group: a gloo group of all ranks that nothing else uses; one is made by default. An async save communicates in
            it while training uses the others.
    """

    def __init__(
        self,
        folder: Path,
        *,
        async_mode: str = "disabled",
        keep_latest_k: int = 10,
        verify: bool = True,
        group: dist.ProcessGroup | None = None,
    ):
        if async_mode not in ("disabled", "async"):
            raise ValueError(f"checkpoint.async_mode = {async_mode!r} must be 'disabled' or 'async'")
        self.folder, self.keep_latest_k, self.verify = Path(folder), keep_latest_k, verify
        self.group = group or dist.new_group(backend="gloo")
        self.rank = dist.get_rank(self.group)
        self._saved: tuple[int, bool] | None = None  # the step last saved or loaded; with its optimizer?
        self.in_use: set[int] = set()  # steps that an export is to read: they are not removed
        self._longest = 0.0  # seconds of the longest save
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if async_mode == "async" else None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        dataloader: Stateful | None = None,
    ) -> None:
        """Save as step-N; without an optimizer, the weights only. What this run already has at this step stays.

        If the async save before this one failed, this one is not async, so that no second save is missed unnoticed.

        Raises:
            SaveFailed: this save failed on any rank.
        """
        at_once = not self.is_saved() or self._thread is None
        if self._saved in ((step, True), (step, optimizer is not None)):
            return
        begun, state = time.monotonic(), {"model": named_parameters(model)}
        if optimizer is not None:
            state["optimizer"] = _of_whole(_optimizer_state(model, optimizer)[0], model)
            if dataloader:
                state["dataloader"] = dataloader.state_dict()
        if at_once:
            self._timed(begun, step, state, progress)
        else:
            # A plain copy to host memory. A stager of torch 2.11 is good for one save: its second fails.
            staged = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
            self._pending = self._thread.submit(self._timed, begun, step, staged, progress)

    @property
    def seconds(self) -> float:
        """What another save would take: as long as the longest so far, twice that if one is under way; 0: unknown."""
        under_way = self._pending is not None and not self._pending.done()
        return self._longest * (2 if under_way else 1)

    def wait(self) -> None:
        """Finish an async save.

        Raises:
            SaveFailed: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def look(self) -> None:
        """Raise at once what ended an async save on this rank alone; what ended it on all is told by the next save."""
        if self._pending and self._pending.done() and not isinstance(self._pending.exception(), (SaveFailed, NoneType)):
            self.wait()

    def finish(self) -> None:
        """Before this process ends for another error: wait for the async save under way."""
        if self._pending is None or self._pending.done():
            return
        print(f"rank {self.rank}: waiting for the save under way, {AT_LAST:.0f} s at most", file=sys.stderr, flush=True)
        futures.wait([self._pending], AT_LAST)

    def is_saved(self) -> bool:
        """Wait for the async save under way, if any; return whether it succeeded: the same on all ranks."""
        try:
            self.wait()
        except SaveFailed as failed:
            if self.rank == 0:
                print(f"warning: {failed}", flush=True)
            return False
        return True

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        dataloader: Stateful | None = None,
    ) -> Progress:
        """Load step-N in place, saved under any degrees of parallelism; returns the progress saved with it.

        The optimizer's moments are loaded; its hyperparameters stay as this run has set them. Without an optimizer,
        only the weights are loaded.

        Raises:
            ValueError: it is not there, holds weights only, or is of another model.
        """
        self.wait()
        path = self.folder / f"step-{on_rank_0(lambda: _whole_step(self.folder, step), self.group)}"
        state = {"model": named_parameters(model)}
        if optimizer is None:
            _read(path, state, self.group)
        else:
            optimizer.zero_grad()  # if there are gradients, DCP cannot make the state that it loads into
            moments, rest = _optimizer_state(model, optimizer)
            state["optimizer"] = _of_whole(moments, model)
            if dataloader:
                state["dataloader"] = dataloader.state_dict()
            _read(path, state, self.group)
            if dataloader:
                dataloader.load_state_dict(state["dataloader"])
            set_optimizer_state_dict(model, optimizer, moments | rest, options=FLAT)
        self._saved = (step, optimizer is not None)
        return read_progress(path)

    def load_weights(self, path: Path, model: nn.Module) -> None:
        """Load another run's weights in place, from a path that `weights_path` resolves.

        Rank 0 decides which checkpoint that is: while the other run saves, ranks may see different ones as the newest.

        Raises:
            ValueError: there is no whole checkpoint, or it is of another model.
        """
        chosen = on_rank_0(lambda: weights_path(path), self.group)
        _read(chosen, {"model": named_parameters(model)}, self.group)

    def save_lazily(
        self,
        step: int,
        read: Mapping[str, Callable[[], torch.Tensor]],
        shapes: Mapping[str, torch.Tensor],
        progress: Progress,
    ) -> None:
        """Save weights that are read one by one; by name, how to read each, and each on the meta device."""
        self.wait()
        self._write(step, {"model": dict(shapes)}, progress, _LazyPlanner(read))

    def _write(
        self, step: int, state: dict[str, Any], progress: Progress, planner: dcp.SavePlanner | None = None
    ) -> None:
        """Do everything that touches the disk; in async mode on a thread of its own."""
        tmp = self.folder / f"step-{step}.tmp"
        try:
            files, altered = self._fill(tmp, state, progress, planner)
            if altered:
                if self.rank == 0:
                    print(f"warning: saving step-{step}: {altered}; it is written once more", flush=True)
                files, altered = self._fill(tmp, state, progress, planner)
            if altered:
                raise OSError(altered)
            self._together(lambda: self.rank == 0 and self._commit(step, tmp, files))
            self._saved = (step, "optimizer" in state)
            self._together(lambda: self.rank == 0 and self.prune(step))
        except (OSError, RuntimeError, dcp.CheckpointException) as failure:  # the same on every rank
            if is_gone(failure):
                raise
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)  # the disk may be full
            raise SaveFailed(f"saving step-{step} in '{self.folder}' failed: {_reasons(failure)}") from failure

    def _timed(self, begun: float, *arguments: Any) -> None:
        self._write(*arguments)
        self._longest = max(self._longest, time.monotonic() - begun)

    def _fill(
        self, tmp: Path, state: dict[str, Any], progress: Progress, planner: dcp.SavePlanner | None
    ) -> tuple[dict[str, list[int]], str]:
        """Write everything but the manifest; return [size, CRC-32] of each file, and which files the disk altered."""
        text = progress.model_dump_json(indent=2) + "\n"
        self._together(lambda: self.rank == 0 and self._prepare(tmp, text))
        writer = _Writer(tmp, sync_files=False)  # it would sync before its last block is written
        dcp.save(state, storage_writer=writer, planner=planner, process_group=self.group)
        own = writer.fs.written | ({PROGRESS: _sum(text.encode())} if self.rank == 0 else {})
        parts = self._together(lambda: (own, self._sync(tmp, own)))
        files = {name: entry for part, _ in parts for name, entry in part.items()}
        return files, "; ".join(f"rank {rank}: {names}" for rank, (_, names) in enumerate(parts) if names)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; return their results in rank order. An error of any rank is raised on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            if not isinstance(failure, (OSError, RuntimeError)):  # a fault of this program
                traceback.print_exc()
            error = f"rank {self.rank}: {describe(failure)}"
        outcomes = of_all_ranks((result, error), self.group)
        if errors := [error for _, error in outcomes if error]:
            raise OSError("; ".join(errors))
        return [result for result, _ in outcomes]

    def _prepare(self, tmp: Path, progress: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove(tmp)
        for leftover in self.folder.glob("step-*.tmp"):
            _discard(leftover)
        tmp.mkdir()
        (tmp / PROGRESS).write_text(progress)

    def _sync(self, tmp: Path, own: dict[str, list[int]]) -> str:
        """Sync files to the disk; a message that names those that read back differently, else ""."""
        files = [sync(tmp / name, forget=self.verify) for name in own]
        altered = [file.name for file in files if self.verify and _inspect(file) != own[file.name]]
        return f"{', '.join(altered)} on the disk is not what was written" if altered else ""

    def _commit(self, step: int, tmp: Path, files: dict[str, list[int]]) -> None:
        for name, (size, _) in files.items():
            if not (tmp / name).exists() or (tmp / name).stat().st_size != size:
                raise OSError(f"{name} of another node is not there: checkpoints need a file system that nodes share")
        text = json.dumps({"files": files}, indent=2)
        (tmp / MANIFEST).write_text(text)
        if altered := self._sync(tmp, {MANIFEST: _sum(text.encode())}):
            raise OSError(altered)
        sync(tmp)
        _set_aside(self.folder, step, f"this run came to step {step} another way")
        tmp.rename(self.folder / f"step-{step}")
        sync(self.folder)

    def prune(self, step: int) -> None:
        """Remove the oldest checkpoints beyond keep_latest_k, counting that of `step`, which is whole; those in use
        stay.

        A removal that fails is only a warning: all else is done.
        """
        older = [old for old in whole_steps(self.folder) if old < step]
        too_many = older[: max(0, len(older) + 1 - self.keep_latest_k)] if self.keep_latest_k else []
        for old in (old for old in too_many if old not in self.in_use):
            _discard(self.folder / f"step-{old}")


def _discard(path: Path) -> None:
    """Remove what is no longer needed, or warn that it stays."""
    doomed = path.with_suffix(".tmp")  # a removal that is cut short leaves no broken step-N
    try:
        remove(path.rename(doomed))
    except OSError as error:
        print(f"warning: '{path}' is no longer needed and could not be removed: {error.strerror or error}", flush=True)


class _Summed(FileSystem):
    """A file system that computes the checksums of bytes before they go to the disk."""

    def __init__(self) -> None:
        self.written: dict[str, list[int]] = {}  # name → [size, CRC-32]

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _Stream(stream, self.written.setdefault(Path(path).name, [0, 0])) if mode == "wb" else stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Stream:
    """A file that is written from its beginning to its end; `entry` becomes its [size, CRC-32]."""

    def __init__(self, stream: Any, entry: list[int]):
        self.stream, self.entry = stream, entry

    def write(self, data: Any) -> int:
        self.entry[:] = _sum(data, self.entry)
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self.fs = _Summed()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Raise the disk's own error where PyTorch, in handling it, raises another about its unfinished archive."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failure:
            error: BaseException | None = failure
            while error is not None and not isinstance(error, OSError):
                error = error.__context__
            raise error or failure from None


class _LazyPlanner(dcp.DefaultSavePlanner):
    """A planner that reads each tensor only when it is written."""

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]):
        super().__init__()
        self.read = {f"model.{name}": get for name, get in read.items()}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.read[index.fqn]()


def load_weights(path: Path, model: nn.Module) -> None:
    """Load weights in place, in one process, from a path that `weights_path` resolves.

    Raises:
        ValueError: there is no whole checkpoint, or it is of another model.
    """
    _read(weights_path(path), {"model": named_parameters(model)}, group=None)


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


def _read(path: Path, state: dict[str, dict[str, Any]], group: dist.ProcessGroup | None) -> None:
    reader = Reader(path)
    _compare(path, reader, state)
    try:
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failure:  # a BaseException, the same on every rank
        raise ValueError(f"'{path}' cannot be loaded: {_reasons(failure)}; restore it from a copy") from failure


# --- What is on disk -------------------------------------------------------------------------------------------------


def whole_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in `folder`, ascending. Their contents are not read; see `verify`."""
    return sorted(step for step, path in _step_folders(Path(folder)).items() if _is_whole(path))


def find_step(folder: Path, load_step: int) -> int | None:
    """The step to resume from: `load_step`, or for −1 the newest whole one, None if there is none.

    A run that has gone back to `load_step` already (see `rewind`) resumes from its newest, too.

    Raises:
        ValueError: there is no whole checkpoint of `load_step`.
    """
    steps = whole_steps(folder)
    if load_step == -1 or (steps and steps[-1] > load_step == _rewound_to(folder)):
        return steps[-1] if steps else None
    return _whole_step(folder, load_step)


def known_progress(config: Config, load_step: int) -> Progress | None:
    """What is saved in the checkpoint that a run resumes from (`find_step`); None for a new run, and without
    checkpoints."""
    folder = checkpoint_folder(config)
    step = find_step(folder, load_step) if config.checkpoint.enable else None
    return None if step is None else read_progress(folder / f"step-{step}")


def rewind(folder: Path, step: int, load_step: int) -> None:
    """Set later steps aside, and note that, when a run resumes from `step` as checkpoint.load_step chose.

    If this is killed half-way, the next start does the rest: the note comes last. A start without a load_step removes
    the note, one with another load_step replaces it. On rank 0.

    Raises:
        ValueError: the folder cannot be written.
    """
    try:
        if load_step == -1:
            (folder / REWOUND).unlink(missing_ok=True)
        elif _rewound_to(folder) != load_step:
            _set_aside(folder, step + 1, f"this run resumes from checkpoint.load_step = {load_step}")
            write_whole(folder / REWOUND, json.dumps({"load_step": load_step}) + "\n")
            sync(folder)
    except OSError as error:
        raise ValueError(
            f"checkpoint.load_step = {load_step}: '{folder}' cannot be written: {describe(error)}; make room or give "
            "the permission, and start again"
        ) from error


def _rewound_to(folder: Path) -> int | None:
    file = folder / REWOUND
    try:
        return json.loads(file.read_bytes())["load_step"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}', which this program writes, cannot be read: {error!r}; move it away") from None


def _set_aside(folder: Path, step: int, why: str) -> None:
    """Set aside checkpoints of this step and later ones: a run's steps ascend, so the run has left these behind."""
    folders = [*_step_folders(folder).items(), *_step_folders(folder, "-hf").items()]  # and their exports
    set_aside(folder, sorted(path for number, path in folders if number >= step), why, "checkpoint: ")


def _whole_step(folder: Path, load_step: int) -> int:
    steps = whole_steps(folder)
    if load_step not in steps:
        raise ValueError(
            f"checkpoint.load_step = {load_step}: there is no whole checkpoint of this step in '{folder}'; "
            + (f"use one of {_list(steps)}, or -1 for the newest" if steps else "it has none: use -1 for a new start")
        )
    return load_step


def weights_path(path: Path, key: str = "checkpoint.initial_load_path") -> Path:
    """Resolve a path to a step-N folder: itself, or the newest whole one of a run's folder or of its checkpoint/.

    Args:
        key: what the error calls the path.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    path = Path(path)
    if _is_whole(path) and ((path / PROGRESS).exists() or (path / METADATA).exists()):  # a run has a manifest.json too
        return path
    for folder in (path, checkpoints_of(path)):
        if steps := whole_steps(folder):
            return folder / f"step-{steps[-1]}"
    raise ValueError(
        f"{key} = '{path}' is neither a whole checkpoint (a step-N folder with its {MANIFEST}) nor a folder of them, "
        "nor the folder of a run that has one; give one of these"
    )


def verify(path: Path) -> None:
    """Read a whole checkpoint and compare every file with the manifest. CPU only; no process group.

    Raises:
        ValueError: a file is missing, or has another size or checksum.
    """
    path = Path(path)
    others = [step for step in whole_steps(path.parent) if path.name != f"step-{step}"]
    remedy = "restore it from a copy, or " + (
        f"use another step: checkpoint.load_step = {_list(others)} (for another run's: checkpoint.initial_load_path)"
        if others
        else "start a new run in another job.dump_folder"
    )
    files, stop = _read_manifest(path, remedy), Event()
    with ThreadPoolExecutor() as pool:  # leaving it waits for its threads
        try:
            for name, found in zip(files, pool.map(lambda name: _inspect(path / name, stop), files), strict=True):
                if found != files[name]:
                    problem = found if isinstance(found, str) else "was altered since it was saved (size or checksum)"
                    raise ValueError(f"checkpoint file '{path / name}' {problem}; {remedy}")
        finally:  # also after a signal
            stop.set()


def holds_optimizer(path: Path) -> bool:
    """Whether a run can resume from this checkpoint; otherwise it holds the weights only."""
    names = Reader(path).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)


def read_progress(path: Path) -> Progress:
    """What a checkpoint records besides tensors."""
    return Progress.model_validate_json((path / PROGRESS).read_bytes())


def _step_folders(folder: Path, suffix: str = "") -> dict[int, Path]:
    matches = [(re.fullmatch(rf"step-(0|[1-9]\d*){suffix}", path.name), path) for path in folder.glob("step-*")]
    return {int(match[1]): path for match, path in matches if match}


def _is_whole(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _read_manifest(path: Path, remedy: str) -> dict[str, list[int]]:
    try:
        return json.loads((path / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):  # absent, or not what was written
        raise ValueError(f"checkpoint file '{path / MANIFEST}' is missing or damaged; {remedy}") from None


def _inspect(file: Path, stop: Event | None = None) -> list[int] | str:
    """A file's [size in bytes, CRC-32], or what is wrong with it. Once `stop` is set, it is read no further."""
    try:
        return _measure(file, stop)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _measure(file: Path, stop: Event | None) -> list[int]:
    entry = [0, 0]
    with file.open("rb") as stream:
        while not (stop and stop.is_set()) and (block := stream.read(BLOCK)):
            entry = _sum(block, entry)
    return entry


def _sum(data: Any, before: list[int] | None = None) -> list[int]:
    """[size in bytes, CRC-32] of these bytes appended to those that `before` describes."""
    size, crc = before or (0, 0)
    return [size + memoryview(data).nbytes, zlib.crc32(data, crc)]


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


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's state by weight, "state.layers.0.mlp.w1.weight.exp_avg"; and its hyperparameters, which are not
    saved."""
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {name: value for name, value in flat.items() if name.startswith("state.")}
    return state, {name: value for name, value in flat.items() if name not in state}


def _of_whole(moments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
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


def _reasons(failure: OSError | RuntimeError | dcp.CheckpointException) -> str:
    if not isinstance(failure, dcp.CheckpointException):
        return describe(failure)
    return "; ".join(f"rank {rank}: {describe(error)}" for rank, (error, _) in sorted(failure.failures.items()))


def describe(error: BaseException) -> str:
    """An error in a line: the system's words for what it refused, and which file."""
    if not isinstance(error, OSError):
        return repr(error)
    return (error.strerror or str(error)) + (f": '{error.filename}'" if error.filename else "")
