"""Folders step-N of a run: which are complete, which one to resume from, which are damaged."""

import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from pydantic import BaseModel

from titan_linear.storage.files import kind_of, progress, read_json, sync, write_whole
from titan_linear.storage.manifest import REMEDY, read_manifest
from titan_linear.storage.rundir import STEP_MANIFEST, checkpoints_of, set_aside

PROGRESS = "progress.json"
METADATA = ".metadata"
REWOUND = "rewound.json"
# Number of bytes read at a time.
BLOCK = 1 << 20


class Content(BaseModel):
    """Fingerprints of a run's model and data; paths may change."""

    tokenizer: str
    model: str
    # By the names of a mixture's sources, including its earlier phases; else by "".
    corpora: dict[str, str]
    # First stream and weights of each phase; empty without a mixture.
    mixture: list[tuple[int, dict[str, float]]]
    # Validation's own corpus.
    validation: str = ""
    # The weights that adapters leave frozen.
    base: str = ""
    # The columns of loss.scores.
    scores: str = ""


class Progress(BaseModel):
    """Everything that a checkpoint records besides tensors."""

    step: int
    # Steps left out because their loss or gradient was not finite.
    skipped: int = 0
    # The length of the learning rate's schedule.
    total_steps: int = 0
    # None for imported weights.
    content: Content | None = None


class Rewound(BaseModel):
    """The checkpoint.load_step to which a run has gone back."""

    load_step: int


# --- What is on disk -------------------------------------------------------------------------------------------------


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, ascending.

    Their contents are not read; see `verify`.
    """
    return sorted(step for step, path in _step_folders(folder) if _is_complete(path))


def find_step(folder: Path, load_step: int) -> int | None:
    """Return the step to resume from: `load_step`, or for −1 the newest complete one, or None.

    A run that has already gone back to `load_step` (see `rewind`) resumes from its newest
    checkpoint, too.

    Raises:
        ValueError: no complete checkpoint of `load_step` exists.
    """
    steps = complete_steps(folder)
    if load_step == -1 or (steps and steps[-1] > load_step == _rewound_to(folder)):
        return steps[-1] if steps else None
    check_step(folder, load_step)
    return load_step


def known_progress(folder: Path, load_step: int) -> Progress | None:
    """Return the progress in the checkpoint that a run resumes from (`find_step`).

    Returns None for a new run.
    """
    step = find_step(folder, load_step)
    return None if step is None else read_progress(folder / f"step-{step}")


def rewind(folder: Path, step: int, load_step: int) -> None:
    """Set later steps aside when a run resumes from an earlier `step`, and note it.

    Called on rank 0, after checkpoint.load_step has chosen the step. The note comes last,
    so that the next start completes a killed call. A start without a load_step removes the
    note; one with another load_step replaces it.

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
    """Set aside the checkpoints of this step and later ones.

    A run's steps ascend, so the run has left these behind.
    """
    # Include their exports.
    folders = _step_folders(folder) + _step_folders(folder, "-hf")
    set_aside(
        folder, sorted(path for number, path in folders if number >= step), why, "checkpoint: "
    )


def check_step(folder: Path, load_step: int) -> None:
    """Raise ValueError if `folder` has no complete checkpoint of the step `load_step`."""
    steps = complete_steps(folder)
    if load_step not in steps:
        raise ValueError(
            f"checkpoint.load_step = {load_step}: there is no complete checkpoint of this step in '{folder}'; "
            + (
                f"use one of {', '.join(map(str, steps))}, or -1 for the newest"
                if steps
                else "it has none: use -1 for a new start"
            )
        )


def weights_path(path: Path, key: str = "checkpoint.initial_load_path") -> Path:
    """Resolve a path to a step-N folder.

    The path is such a folder, a run's folder, or its checkpoint/; the last two give the
    newest complete checkpoint.

    Args:
        key: the name of the path in an error.

    Raises:
        ValueError: no complete checkpoint is found.
    """
    # A run's folder has a manifest.json, too.
    if _is_complete(path) and ((path / PROGRESS).exists() or (path / METADATA).exists()):
        return path
    for folder in (path, checkpoints_of(path)):
        if steps := complete_steps(folder):
            return folder / f"step-{steps[-1]}"
    raise ValueError(
        f"{key} = '{path}' is neither a whole checkpoint (a step-N folder with its {STEP_MANIFEST}) nor a folder of "
        f"them, nor the folder of a run that has one; {kind_of(path, 'give one of these')}"
    )


def verify(path: Path) -> None:
    """Read a complete checkpoint and compare every file with the manifest, on the CPU.

    No process group is needed.

    Raises:
        ValueError: a file is missing, or has another size or checksum.
    """
    others = [step for step in complete_steps(path.parent) if path.name != f"step-{step}"]
    remedy = "restore it from a copy, or " + (
        f"use another step: checkpoint.load_step = {', '.join(map(str, others))} (for another run's: "
        "checkpoint.initial_load_path)"
        if others
        else "start a new run in another job.dump_folder"
    )
    # Threads read the files; the first difference stops them.
    files = read_manifest(path, remedy).files
    stop = Event()
    # Leaving the pool waits for its threads.
    with ThreadPoolExecutor() as pool:
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
        finally:
            # Also after a signal.
            stop.set()


def read_progress(path: Path) -> Progress:
    """Return everything that a checkpoint records besides tensors."""
    return read_json(path / PROGRESS, Progress, REMEDY)


def _step_folders(folder: Path, suffix: str = "") -> list[tuple[int, Path]]:
    return [
        (int(match[1]), path)
        for path in folder.glob("step-*")
        if (match := re.fullmatch(rf"step-(0|[1-9]\d*){suffix}", path.name))
    ]


def _is_complete(path: Path) -> bool:
    return (path / STEP_MANIFEST).is_file()


def inspect(file: Path, stop: Event | None = None) -> list[int] | str:
    """Return a file's [size in bytes, CRC-32], or its problem as text.

    Reading stops once `stop` is set.
    """
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
    """Return [size in bytes, CRC-32] of these bytes appended to what `before` describes."""
    size, crc = before or (0, 0)
    return [size + memoryview(data).nbytes, zlib.crc32(data, crc)]


def describe(error: BaseException) -> str:
    """Return an error as one line: the system's words for what it refused, and the file."""
    if not isinstance(error, OSError):
        return repr(error)
    return (error.strerror or str(error)) + (f": '{error.filename}'" if error.filename else "")
