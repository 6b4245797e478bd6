"""Checkpoints by DCP, whole or absent: the model, its optimizer and the run's progress.

Of a model with adapters, only the trained weights are saved.

    checkpoint/
      step-100/            whole: it got this name when everything in it was on disk
        __R_0.distcp       what rank R wrote; any other number of ranks can read it
        .metadata          DCP's own index, which we never open (manifest.py)
        progress.json      `Progress`: the step, and what the run trains on
        manifest.json      size and CRC-32 of every file above, the file of each slice of each
                           tensor, and a CRC-32 of this file itself
      step-200.tmp/        a save in progress, or what a killed save or removal left: the next save
                           removes it
      abandoned-DATE/      checkpoints of later steps, which the run left behind by resuming from an
                           earlier one
      rewound.json         the checkpoint.load_step to which the run has gone back; the same command
                           then resumes from the newest

A save fills step-N.tmp. Every rank computes the checksums of its own files while it writes
them, syncs the files and reads them back from the disk to compare. Rank 0 adds the manifest
and renames the folder. Only then are older checkpoints removed. So SIGKILL costs at most
the save in progress, and a disk's errors are noticed while the state can still be written
again. DCP notices a truncated file but not an altered one: `verify` reads everything. No
code in a checkpoint runs: tensors are loaded as weights only, and everything else is JSON.
"""

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from titan_linear.distributed.ending import RunFailed, peer_is_lost
from titan_linear.distributed.groups import of_all_ranks, on_rank_0
from titan_linear.storage.files import remove, sync
from titan_linear.storage.manifest import Checksums, Manifest, Stored, stored_tensors
from titan_linear.storage.rundir import STEP_MANIFEST
from titan_linear.storage.step_folders import (
    PROGRESS,
    Progress,
    check_step,
    checksum,
    complete_steps,
    describe,
    inspect,
    read_progress,
    set_steps_aside,
)
from titan_linear.storage.tensors import (
    FLAT,
    of_whole,
    optimizer_state,
    read_state,
    reasons,
    saved_parameters,
)

# Bytes that a save reads ahead from the device: DCP's default.
READ_AHEAD = 10_000_000
# Seconds that an async save may take to end when an error ends the run.
AT_LAST = 600.0


class SaveFailed(RunFailed, OSError):
    """A save failed, on every rank. Earlier checkpoints remain."""


class Checkpointer:
    """Saves and loads the checkpoints of one run.

    Every rank calls every method, in the same order.

    Args:
        folder: contains the step-N folders, on a file system that all ranks share.
        async_mode: "disabled", or "async": `save` returns once the state is copied to host
            memory, which stays in use until the save ends.
        keep_latest_k: checkpoints older than the latest k are removed; 0 keeps all.
        verify: read written files back from the disk, and write once more if they differ.
        group: a gloo group of all ranks that nothing else uses; by default a new one. An
            async save communicates in it while training uses other groups.
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
        self.folder = folder
        self.keep_latest_k = keep_latest_k
        self.verify = verify
        self.group = group or dist.new_group(backend="gloo")
        self.rank = dist.get_rank(self.group)
        # The step last saved or loaded, and whether with its optimizer.
        self._saved: tuple[int, bool] | None = None
        # Steps that an export still has to read: they are not removed.
        self.in_use: set[int] = set()
        # The step with the lowest validation loss, which is kept too; 0: none is.
        self.best = 0
        # Seconds of the longest save.
        self._longest = 0.0
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if async_mode == "async":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        dataloader: Stateful | None = None,
    ) -> None:
        """Save as step-N; without an optimizer, only the weights.

        A checkpoint that this run already has at this step stays. If the previous async
        save failed, this one is not async, so that no second failure goes unnoticed.

        Raises:
            SaveFailed: this save failed on any rank.
        """
        # Wait for the previous save. Nothing is left to do if this step was saved before.
        at_once = not self.is_saved() or self._thread is None
        if self._saved in ((step, True), (step, optimizer is not None)):
            return
        begun = time.monotonic()
        # Collect the state.
        state = {"model": saved_parameters(model)}
        if optimizer is not None:
            state["optimizer"] = of_whole(optimizer_state(model, optimizer)[0], model)
            if dataloader:
                state["dataloader"] = dataloader.state_dict()
        if at_once:
            self._timed(begun, step, state, progress)
        else:
            # A plain copy to host memory. A stager of torch 2.11 works for one save: its
            # second fails.
            staged = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
            self._pending = self._thread.submit(self._timed, begun, step, staged, progress)

    @property
    def seconds(self) -> float:
        """Return how long another save would take; 0 if unknown.

        This is the longest duration so far, twice that while a save is under way.
        """
        under_way = self._pending is not None and not self._pending.done()
        return self._longest * (2 if under_way else 1)

    def wait(self) -> None:
        """Finish an async save.

        Raises:
            SaveFailed: it failed.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def look(self) -> None:
        """Raise at once an error that ended an async save on this rank alone.

        The next save reports an error that ended it on all ranks.
        """
        save = self._pending
        if save and save.done() and not isinstance(save.exception(), (SaveFailed, NoneType)):
            self.wait()

    def finish(self) -> None:
        """Wait for the async save under way, before another error ends this process."""
        if self._pending is None or self._pending.done():
            return
        print(
            f"rank {self.rank}: waiting for the save under way, {AT_LAST:.0f} s at most",
            file=sys.stderr,
        )
        futures.wait([self._pending], AT_LAST)

    def is_saved(self) -> bool:
        """Wait for the async save under way, if any, and return whether it succeeded.

        The result is the same on all ranks.
        """
        try:
            self.wait()
        except SaveFailed as failed:
            if self.rank == 0:
                print(f"warning: {failed}")
            return False
        return True

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        dataloader: Stateful | None = None,
    ) -> Progress:
        """Load step-N in place and return the progress saved with it.

        It may have been saved under any degrees of parallelism. The optimizer's moments are
        loaded; its hyperparameters stay as this run has set them. Without an optimizer,
        only the weights are loaded.

        Raises:
            ValueError: it does not exist, holds only weights, or is of another model.
        """
        self.wait()
        on_rank_0(lambda: check_step(self.folder, step), self.group)
        path = self.folder / f"step-{step}"
        state = {"model": saved_parameters(model)}
        if optimizer is not None:
            # With gradients present, DCP cannot make the state to load into.
            optimizer.zero_grad()
            moments, rest = optimizer_state(model, optimizer)
            state["optimizer"] = of_whole(moments, model)
            if dataloader:
                state["dataloader"] = dataloader.state_dict()
        read_state(path, state, self.group)
        if optimizer is not None:
            if dataloader:
                dataloader.load_state_dict(state["dataloader"])
            set_optimizer_state_dict(model, optimizer, moments | rest, options=FLAT)
        self._saved = (step, optimizer is not None)
        return read_progress(path)

    def save_lazily(
        self,
        step: int,
        read: Mapping[str, Callable[[], Tensor]],
        shapes: Mapping[str, Tensor],
        progress: Progress,
    ) -> None:
        """Save weights that are read one by one.

        Args:
            read: a function for each name that reads the weight.
            shapes: the weights by name, on the meta device.
        """
        self.wait()
        self._write(step, {"model": dict(shapes)}, progress, _LazyPlanner(read))

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        progress: Progress,
        planner: dcp.SavePlanner | None = None,
    ) -> None:
        """Do everything that touches the disk; in async mode, on a separate thread."""
        tmp = self.folder / f"step-{step}.tmp"
        try:
            # Write once more if the disk has altered a file.
            manifest, altered = self._fill(tmp, state, progress, planner)
            if altered:
                if self.rank == 0:
                    print(f"warning: saving step-{step}: {altered}; it is written once more")
                manifest, altered = self._fill(tmp, state, progress, planner)
            if altered:
                raise OSError(altered)
            # Only a committed checkpoint lets older ones be removed.
            self._first(lambda: self._commit(step, tmp, manifest))
            self._saved = (step, "optimizer" in state)
            self._first(lambda: self.prune(step))
        except (OSError, RuntimeError, dcp.CheckpointException) as failure:
            # The same failure on every rank.
            if peer_is_lost(failure):
                raise
            if self.rank == 0:
                # The disk may be full.
                shutil.rmtree(tmp, ignore_errors=True)
            raise SaveFailed(
                f"saving step-{step} in '{self.folder}' failed: {reasons(failure)}"
            ) from failure

    def _timed(self, begun: float, *arguments: Any) -> None:
        self._write(*arguments)
        self._longest = max(self._longest, time.monotonic() - begun)

    def _fill(
        self,
        tmp: Path,
        state: dict[str, Any],
        progress: Progress,
        planner: dcp.SavePlanner | None,
    ) -> tuple[Manifest, str]:
        """Write everything but the manifest.

        Returns the manifest (on rank 0 with the tensors), and which files the disk altered.
        """
        content = (progress.model_dump_json(indent=2) + "\n").encode()
        self._first(lambda: self._prepare(tmp, content))
        # Nothing is read ahead of a state that is already in host memory: reading ahead
        # waits for the device's queue, which waits for other ranks, and one of them may be
        # waiting for us.
        ahead = 0 if self._thread else READ_AHEAD
        writer = _Writer(tmp, ahead)
        dcp.save(state, storage_writer=writer, planner=planner, process_group=self.group)
        # Collect the checksums of all ranks.
        sums = writer.fs.written | ({PROGRESS: checksum(content)} if self.rank == 0 else {})
        every: Checksums = {}
        altered: list[str] = []
        parts = self._together(lambda: (sums, self._sync(tmp, sums)))
        for rank, (of_rank, names) in enumerate(parts):
            every |= of_rank
            if names:
                altered.append(f"rank {rank}: {names}")
        manifest = Manifest.model_construct(files=every, tensors=writer.tensors)
        return manifest, "; ".join(altered)

    def _first(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0, as `_together` does."""
        self._together(work if self.rank == 0 else lambda: None)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; return their results in rank order.

        An error of any rank is raised on all.
        """
        result = None
        error = None
        try:
            result = work()
        except Exception as failure:
            # Any other exception is a fault of this program.
            if not isinstance(failure, (OSError, RuntimeError)):
                traceback.print_exc()
            error = f"rank {self.rank}: {describe(failure)}"
        outcomes = of_all_ranks((result, error), self.group)
        if errors := [error for _, error in outcomes if error]:
            raise OSError("; ".join(errors))
        return [result for result, _ in outcomes]

    def _prepare(self, tmp: Path, progress: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove(tmp)
        for leftover in self.folder.glob("step-*.tmp"):
            _discard(leftover)
        tmp.mkdir()
        (tmp / PROGRESS).write_bytes(progress)

    def _sync(self, tmp: Path, sums: Checksums) -> str:
        """Sync files to the disk.

        Returns a message that names the files that read back differently, else "".
        """
        files = [sync(tmp / name, forget=self.verify) for name in sums]
        altered = [file.name for file in files if self.verify and inspect(file) != sums[file.name]]
        return f"{', '.join(altered)} on the disk is not what was written" if altered else ""

    def _commit(self, step: int, tmp: Path, manifest: Manifest) -> None:
        # Every rank's files must be visible here.
        for name, (size, _) in manifest.files.items():
            if not (tmp / name).exists() or (tmp / name).stat().st_size != size:
                raise OSError(
                    f"{name} of another node is not there: checkpoints need a file system that nodes share"
                )
        # The manifest comes last, and the name after it.
        content = manifest.signed().model_dump_json().encode()
        (tmp / STEP_MANIFEST).write_bytes(content)
        if altered := self._sync(tmp, {STEP_MANIFEST: checksum(content)}):
            raise OSError(altered)
        sync(tmp)
        set_steps_aside(self.folder, step, f"this run came to step {step} another way")
        tmp.rename(self.folder / f"step-{step}")
        sync(self.folder)

    def prune(self, step: int) -> None:
        """Remove the oldest checkpoints beyond keep_latest_k.

        The complete checkpoint of `step` counts; the best checkpoint, and those in use, stay.
        A failed removal is only a warning, because everything else is done.
        """
        if not self.keep_latest_k:
            return
        older = [old for old in complete_steps(self.folder) if old < step]
        for old in older[: max(0, len(older) + 1 - self.keep_latest_k)]:
            if old not in {*self.in_use, self.best}:
                _discard(self.folder / f"step-{old}")


def _discard(path: Path) -> None:
    """Remove an obsolete path, or warn that it stays."""
    try:
        # A removal that is cut short leaves no broken step-N.
        remove(path.rename(path.with_suffix(".tmp")))
    except OSError as error:
        print(
            f"warning: '{path}' is no longer needed and could not be removed: {error.strerror or error}"
        )


class _Summed(FileSystem):
    """A file system that computes the checksums of bytes before they go to the disk."""

    def __init__(self) -> None:
        self.written: Checksums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode == "wb":
                stream = _Stream(stream, self.written.setdefault(Path(path).name, [0, 0]))
            yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@dataclass
class _Stream:
    """A file that is written from beginning to end; `entry` becomes its [size, CRC-32]."""

    stream: Any
    entry: list[int]

    def write(self, data: Any) -> int:
        self.entry[:] = checksum(data, self.entry)
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Writer(dcp.FileSystemWriter):
    fs: _Summed

    def __init__(self, path: Path, ahead: int):
        # DCP would sync before its last block is written, so files are synced later.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=ahead)
        self.fs = _Summed()
        # On rank 0, once everything is written.
        self.tensors: dict[str, Stored] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.tensors = stored_tensors(metadata, results)

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Raise the disk's own error.

        PyTorch, when handling it, raises another error about its unfinished archive.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failure:
            error: BaseException | None = failure
            while error is not None and not isinstance(error, OSError):
                error = error.__context__
            raise error or failure from None


class _LazyPlanner(dcp.DefaultSavePlanner):
    """A planner that reads each tensor only when it is written."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]):
        super().__init__()
        self.read = {f"model.{name}": get for name, get in read.items()}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read[index.fqn]()
