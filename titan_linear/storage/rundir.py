"""Folder of a run, `job.dump_folder`: its files, stored configuration and metrics.

    config.toml      the resolved configuration; starts the same run again
    manifest.json    what the run was made with: versions, commit, hardware, ... (run_manifest.py)
    metrics.jsonl    a line per logged step
    telemetry.jsonl  measurements inside every metrics.telemetry_freq-th step
    evaluation.jsonl results of evaluations, a line per prompt
    spikes.jsonl     steps whose loss was an outlier or not finite, with their streams
    tb/              metrics and telemetry for TensorBoard
    checkpoint/      step-N/
    .lock            held by the run that writes here (run_lock.py)

Until everything has been checked, only the lock is written, and a refused start removes it.
Only rank 0 writes.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from titan_linear.config import Config, load_config
from titan_linear.storage.files import open_own, parse_json, write_whole

T = TypeVar("T")
CONFIG = "config.toml"
RUN_MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LOCK = ".lock"
BOARD = "tb"
# Name in a checkpoint.
STEP_MANIFEST = "manifest.json"
RECORDERS = "flight_recorder"
TELEMETRY = "telemetry.jsonl"
SPIKES = "spikes.jsonl"
EVALUATION = "evaluation.jsonl"
WANDB = "wandb_id"
# Files with a line per step, to which a run appends.
LINES = (METRICS, TELEMETRY, SPIKES, EVALUATION)


def set_aside(folder: Path, paths: Sequence[Path], why: str, what: str = "") -> None:
    """Move these paths of a folder, if any, into its abandoned-DATE/, and report it."""
    if paths:
        aside = unused(folder / time.strftime("abandoned-%Y%m%d-%H%M%S"))
        names = []
        for path in paths:
            name = path.relative_to(folder)
            (aside / name.parent).mkdir(parents=True, exist_ok=True)
            path.rename(aside / name)
            names.append(str(name))
        print(f"{what}{', '.join(names)} moved to '{aside}': {why}")


def unused(path: Path) -> Path:
    """Return this path, or if it exists, one with a number added that does not exist."""
    return next(
        new
        for n in count()
        if not (new := path.with_name(f"{path.name}-{n}") if n else path).exists()
    )


def checkpoints_of(run: Path) -> Path:
    """Return the folder of the checkpoints of the run in the folder `run`.

    Raises:
        ValueError: its config.toml cannot be read.
    """
    return stored_config(run).checkpoint_folder


def config_in(run: Path) -> Config:
    """Return the configuration stored in the folder `run`."""
    return load_config(["--job.config_file", str(run / CONFIG)])


def stored_config(run: Path) -> Config:
    """Return the configuration stored by this folder's run, with the folder's present path.

    Without one, return the defaults.
    """
    stored = config_in(run) if (run / CONFIG).is_file() else Config()
    return stored.changed({"job.dump_folder": str(run)})


def config_of(checkpoint: Path) -> Config:
    """Return the configuration of the run of a step-N folder (`config_path`)."""
    return config_in(config_path(checkpoint).parent)


def config_path(checkpoint: Path) -> Path:
    """Return the config.toml of the run that a step-N folder belongs to.

    Raises:
        ValueError: no folder above it is a run's folder.
    """
    for folder in checkpoint.resolve().parents:
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise ValueError(
        f"no folder above '{checkpoint}' has the {CONFIG} of its run; keep checkpoints in their run's folder, and of "
        "one that titan-linear convert from-hf made give the Hugging Face folder"
    )


def cut_metrics(folder: str, step: int) -> None:
    """Drop the lines after `step`, and torn last lines, from files written line by line.

    Raises:
        ValueError: a line before the last is not a line of metrics.
    """
    paths = (Path(folder) / name for name in LINES)
    for path in filter(Path.exists, paths):
        text = path.read_text(encoding="utf-8")
        *lines, _torn = text.split("\n")
        kept = "".join(
            f"{line}\n" for number, line in enumerate(lines, 1) if _step(path, number, line) <= step
        )
        if kept != text:
            write_whole(path, kept)


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line of a file, or 0."""
    *lines, _torn = metrics.read_text(encoding="utf-8").split("\n")
    return _step(metrics, len(lines), lines[-1]) if lines else 0


def json_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the lines of a .jsonl file, if it exists, without an unfinished last line."""
    if not path.is_file():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    try:
        return [parse_json(line, kind) for line in lines]
    except ValueError as error:
        raise ValueError(f"'{path}' has a line that no run writes ({error}); repair it") from None


def append_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append values to a .jsonl file, which is made if it does not exist.

    Numbers that are not finite become text, because JSON cannot express them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path, "a") as file:
        for value in values:
            text = json.dumps(value)
            finite = json.loads(text, parse_constant=lambda name: str(float(name)))
            file.write(json.dumps(finite) + "\n")


class MetricsLine(BaseModel):
    """The field that every line of metrics has."""

    step: int


def _step(path: Path, number: int, line: str) -> int:
    try:
        return parse_json(line, MetricsLine).step
    except ValueError:
        raise ValueError(
            f"{path}, line {number}, is not a line of metrics: {line[:80]!r}; repair or move it"
        ) from None
