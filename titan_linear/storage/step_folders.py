"""The step-N folders of a run: which are whole, which one a run resumes from, whether the disk has altered them."""

from __future__ import annotations

import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from pydantic import BaseModel

from titan_linear.config import Config
from titan_linear.storage.files import kind_of, progress, read_json, sync, write_whole
from titan_linear.storage.manifest import REMEDY, read_manifest
from titan_linear.storage.rundir import STEP_MANIFEST, checkpoint_folder, checkpoints_of, set_aside

PROGRESS, METADATA, REWOUND = "progress.json", ".metadata", "rewound.json"
BLOCK = 1 << 20  # bytes read at a time


class Content(BaseModel):
    """What a run trains, and on what, by fingerprints of the content: paths may change."""

    tokenizer: str
    model: str
    # by the names of a mixture's sources, with those of its earlier phases; else by ""
    corpora: dict[str, str]
    # first stream and weights of each phase; without a mixture none
    mixture: list[tuple[int, dict[str, float]]]
    validation: str = ""  # a corpus of its own
    base: str = ""  # the weights that adapters leave frozen
    scores: str = ""  # the columns of loss.scores


class Progress(BaseModel):
    """What a checkpoint records besides tensors."""

    step: int
    skipped: int = 0  # steps left out because their loss or gradient was not finite
    total_steps: int = 0  # of the learning rate's schedule
    content: Content | None = None  # None: imported weights


class Rewound(BaseModel):
    """The checkpoint.load_step that a run has gone back to."""

    load_step: int


# --- What is on disk -------------------------------------------------------------------------------------------------


def whole_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in `folder`, ascending. Their contents are not read; see `verify`."""
    return sorted(step for step, path in _step_folders(folder).items() if _is_whole(path))


def find_step(folder: Path, load_step: int) -> int | None:
    """The step to resume from: `load_step`, or for −1 the newest whole one, None if there is none.

    A run that has gone back to `load_step` already (see `rewind`) resumes from its newest, too.

    Raises:
        ValueError: there is no whole checkpoint of `load_step`.
    """
    steps = whole_steps(folder)
    if load_step == -1 or (steps and steps[-1] > load_step == _rewound_to(folder)):
        return steps[-1] if steps else None
    return whole_step(folder, load_step)


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
            set_steps_aside(
                folder, step + 1, f"this run resumes from checkpoint.load_step = {load_step}"
            )
            write_whole(folder / REWOUND, Rewound(load_step=load_step).model_dump_json() + "\n")
            sync(folder)
    except OSError as error:
        raise ValueError(
            f"checkpoint.load_step = {load_step}: '{folder}' cannot be written: {describe(error)}; make room or give "
            "the permission, and start again"
        ) from error


def _rewound_to(folder: Path) -> int | None:
    file = folder / REWOUND
    return read_json(file, Rewound, "move it away").load_step if file.exists() else None


def set_steps_aside(folder: Path, step: int, why: str) -> None:
    """Set aside checkpoints of this step and later ones: a run's steps ascend, so the run has left these behind."""
    # and their exports
    folders = [*_step_folders(folder).items(), *_step_folders(folder, "-hf").items()]
    set_aside(
        folder, sorted(path for number, path in folders if number >= step), why, "checkpoint: "
    )


def whole_step(folder: Path, load_step: int) -> int:
    steps = whole_steps(folder)
    if load_step not in steps:
        raise ValueError(
            f"checkpoint.load_step = {load_step}: there is no whole checkpoint of this step in '{folder}'; "
            + (
                f"use one of {_list(steps)}, or -1 for the newest"
                if steps
                else "it has none: use -1 for a new start"
            )
        )
    return load_step


def weights_path(path: Path, key: str = "checkpoint.initial_load_path") -> Path:
    """Resolve a path to a step-N folder: itself, or the newest whole one of a run's folder or of its checkpoint/.

    Args:
        key: what the error calls the path.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    # a run has a manifest.json too
    if _is_whole(path) and ((path / PROGRESS).exists() or (path / METADATA).exists()):
        return path
    for folder in (path, checkpoints_of(path)):
        if steps := whole_steps(folder):
            return folder / f"step-{steps[-1]}"
    raise ValueError(
        f"{key} = '{path}' is neither a whole checkpoint (a step-N folder with its {STEP_MANIFEST}) nor a folder of "
        f"them, nor the folder of a run that has one; {kind_of(path, 'give one of these')}"
    )


def verify(path: Path) -> None:
    """Read a whole checkpoint and compare every file with the manifest. CPU only; no process group.

    Raises:
        ValueError: a file is missing, or has another size or checksum.
    """
    others = [step for step in whole_steps(path.parent) if path.name != f"step-{step}"]
    remedy = "restore it from a copy, or " + (
        f"use another step: checkpoint.load_step = {_list(others)} (for another run's: checkpoint.initial_load_path)"
        if others
        else "start a new run in another job.dump_folder"
    )
    files, stop = read_manifest(path, remedy).files, Event()
    with ThreadPoolExecutor() as pool:  # leaving it waits for its threads
        try:
            entries = progress(
                pool.map(lambda name: inspect(path / name, stop), files),
                f"verifying {path}",
                len(files),
            )
            for name, found in zip(files, entries, strict=True):
                if found != files[name]:
                    problem = (
                        found
                        if isinstance(found, str)
                        else "was altered since it was saved (size or checksum)"
                    )
                    raise ValueError(f"checkpoint file '{path / name}' {problem}; {remedy}")
        finally:  # also after a signal
            stop.set()


def read_progress(path: Path) -> Progress:
    """What a checkpoint records besides tensors."""
    return read_json(path / PROGRESS, Progress, REMEDY)


def _step_folders(folder: Path, suffix: str = "") -> dict[int, Path]:
    matches = [
        (re.fullmatch(rf"step-(0|[1-9]\d*){suffix}", path.name), path)
        for path in folder.glob("step-*")
    ]
    return {int(match[1]): path for match, path in matches if match}


def _is_whole(path: Path) -> bool:
    return (path / STEP_MANIFEST).is_file()


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def inspect(file: Path, stop: Event | None = None) -> list[int] | str:
    """A file's [size in bytes, CRC-32], or what is wrong with it. Once `stop` is set, it is read no further."""
    try:
        return _measure(file, stop) if file.is_file() else "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _measure(file: Path, stop: Event | None) -> list[int]:
    entry = [0, 0]
    with file.open("rb") as stream:
        while not (stop and stop.is_set()) and (block := stream.read(BLOCK)):
            entry = checksum(block, entry)
    return entry


def checksum(data: Any, before: list[int] | None = None) -> list[int]:
    """[size in bytes, CRC-32] of these bytes appended to those that `before` describes."""
    size, crc = before or (0, 0)
    return [size + memoryview(data).nbytes, zlib.crc32(data, crc)]


def describe(error: BaseException) -> str:
    """An error in a line: the system's words for what it refused, and which file."""
    if not isinstance(error, OSError):
        return repr(error)
    return (error.strerror or str(error)) + (f": '{error.filename}'" if error.filename else "")
