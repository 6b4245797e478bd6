"""Folder of a run, `job.dump_folder`: configuration, how a start resumes it, metrics.

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

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from titan_linear.config import (
    BYTES,
    Config,
    KeyRule,
    changed,
    config_to_toml,
    difference,
    flat_keys,
    keys_with,
    load_config,
)
from titan_linear.storage.files import parse_json, write_whole

T = TypeVar("T")
CONFIG, RUN_MANIFEST, METRICS, LOCK, BOARD = (
    "config.toml",
    "manifest.json",
    "metrics.jsonl",
    ".lock",
    "tb",
)
# Name in a checkpoint.
STEP_MANIFEST = "manifest.json"
RECORDERS = "flight_recorder"
TELEMETRY, SPIKES, EVALUATION, WANDB = (
    "telemetry.jsonl",
    "spikes.jsonl",
    "evaluation.jsonl",
    "wandb_id",
)
# The beginning of a config.toml.
MARK = "# The configuration of the run in"


def check_folders(config: Config) -> None:
    """Check that files which a run writes hours later can be written. Nothing is created.

    Raises:
        ValueError: something other than a folder is in the way, a folder may not be
            written, or a file is a link.
    """
    c, p = config.checkpoint, config.profiling
    # A run appends to these files.
    for name in (METRICS, TELEMETRY, SPIKES, EVALUATION):
        if (link := Path(config.job.dump_folder, name)).is_symlink():
            raise ValueError(
                f"job.dump_folder = {config.job.dump_folder!r}: '{link}' is a link, and a run appends to none; put the "
                "file itself there, or use another folder"
            )
    for key, folder, used in (
        ("checkpoint.folder", c.folder, c.enable),
        ("profiling.save_traces_folder", p.save_traces_folder, p.enable_profiling),
        (
            "profiling.save_memory_snapshot_folder",
            p.save_memory_snapshot_folder,
            p.enable_memory_snapshot,
        ),
    ):
        # The nearest existing ancestor must be a folder that may be written.
        path = Path(config.job.dump_folder).absolute() / folder
        there = next(part for part in (path, *path.parents) if os.path.lexists(part))
        if used and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            why = "may not be written in" if there.is_dir() else "is not a folder"
            raise ValueError(f"{key} = {folder!r} cannot be written: '{there}' {why}; use another")


def check_resume(config: Config) -> list[str]:
    """Compare with the run that the folder holds; return the changes as "key: old → new".

    Paths are compared as absolute. A folder in which nothing was trained yet holds no run.
    With job.start_anew, neither does a folder without a checkpoint.

    Raises:
        ValueError: a key that decided the steps so far differs; its old and new value are
            named.
    """
    folder = Path(config.job.dump_folder)
    if not _has_trained(config) or starts_anew(config):
        return []
    if not (folder / CONFIG).exists():
        if not _has_reported(config) and not saves_inside(config):
            raise ValueError(
                f"checkpoint.folder = {config.checkpoint.folder!r} holds checkpoints of another run than that of "
                f"job.dump_folder = '{folder}'; use another folder (checkpoint.initial_load_path begins a run from "
                "their weights)"
            )
        raise ValueError(
            f"job.dump_folder = '{folder}' holds a run without its {CONFIG}; use another folder"
        )
    # Compare all keys; some may change on resume.
    stored = _stored(folder)
    _check_checkpoints_are_used(config, stored)
    before, now = (flat_keys(_with_absolute_paths(c)) for c in (stored, config))
    differing = {key: (before[key], new) for key, new in now.items() if new != before[key]}
    refused = {key: pair for key, pair in differing.items() if not _may_change(key, *pair)}
    if refused:
        lines = "\n".join(f"  {key}: {difference(*pair)}" for key, pair in refused.items())
        more = "or begin again here: job.start_anew = true (it deletes nothing)"
        if _has_checkpoint(config):
            more = "whose checkpoint.initial_load_path may be this one, for its weights"
        raise ValueError(
            f"job.dump_folder = '{folder}' holds a run that cannot resume with other values of\n{lines}\n"
            f"restore them, or start a new run in another job.dump_folder, {more}"
        )
    return [
        f"{key}: {difference(*pair)}"
        for key, pair in differing.items()
        if not key.startswith("job.")
    ]


def _check_checkpoints_are_used(config: Config, stored: Config) -> None:
    """Raise ValueError if the run's checkpoints are not used.

    It would begin again and cut what it has reported.
    """
    c = config.checkpoint
    same = checkpoint_folder(config).resolve() == checkpoint_folder(stored).resolve()
    if not (c.enable and same) and _has_checkpoint(stored):
        key = f"folder = {c.folder!r}" if c.enable else "enable = false"
        raise ValueError(
            f"checkpoint.{key} would begin again in job.dump_folder = {config.job.dump_folder!r}, which holds a run "
            "with checkpoints; restore the key, or start a new run in another job.dump_folder"
        )


def _may_change(key: str, old: Any, new: Any) -> bool:
    return key in keys_with(KeyRule.MAY_CHANGE) or (
        key in keys_with(KeyRule.MAY_MOVE) and bool(old) and bool(new)
    )


def starts_anew(config: Config) -> bool:
    """Whether job.start_anew is set and applies: this folder's run left no checkpoint."""
    return config.job.start_anew and not any(
        _has_checkpoint(run) for run in (config, _stored(Path(config.job.dump_folder)))
    )


def set_run_aside(config: Config) -> None:
    """Move the files of a run without checkpoints into abandoned-DATE/ (`starts_anew`)."""
    folder = Path(config.job.dump_folder)
    p = config.profiling
    files = (CONFIG, RUN_MANIFEST, METRICS, TELEMETRY, SPIKES, EVALUATION, WANDB, BOARD, RECORDERS)
    traces = [
        name
        for name in (p.save_traces_folder, p.save_memory_snapshot_folder)
        if not Path(name).is_absolute()
    ]
    left = dict.fromkeys(Path(os.path.normpath(name)) for name in (*files, *traces))
    # Traces may lie in tb: a folder takes its content along.
    whole = [folder / path for path in left if not left.keys() & set(path.parents)]
    set_aside(folder, [path for path in whole if path.exists()], "job.start_anew = true")


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


def finished_without_checkpoint(config: Config) -> bool:
    """Whether the metrics reach the last step, without a checkpoint to resume from."""
    metrics = Path(config.job.dump_folder) / METRICS
    if _has_checkpoint(config) or not metrics.exists():
        return False
    *lines, _torn = metrics.read_text(encoding="utf-8").split("\n")
    return bool(lines) and _step(metrics, len(lines), lines[-1]) >= config.training.steps


def copied_configuration(config: Config) -> str:
    """Return a warning if a copy of a run's config.toml starts its original run, or "".

    The copy lies elsewhere than in the folder of that run.
    """
    path = Path(os.path.expanduser(config.job.config_file))
    # A pipe can be read only once.
    if not path.is_file() or not _is_of_a_run(path):
        return ""
    its_folder = load_config(["--job.config_file", str(path)]).job.dump_folder
    folder = Path(config.job.dump_folder)
    if absolute(its_folder) != absolute(str(folder)) or path.absolute().parent == folder.absolute():
        # Another folder was given, or the file belongs to this run.
        return ""
    here = path.absolute().parent
    moved = (
        f"; --job.dump_folder '{here}' resumes where it lies"
        if path.with_name(RUN_MANIFEST).exists()
        else ""
    )
    return (
        f"warning: '{path}' is the configuration of the run in '{folder}', and this start writes there; "
        f"--job.dump_folder FOLDER writes into another{moved}"
    )


def _is_of_a_run(file: Path) -> bool:
    with file.open(encoding="utf-8-sig") as lines:
        return lines.readline().startswith(MARK) or (
            file.name == CONFIG and file.with_name(RUN_MANIFEST).exists()
        )


def absolute(path: str) -> str:
    """Make a path, or several separated by commas, absolute; "" stays."""
    parts = [path] if os.path.exists(path) else path.split(",")
    return ",".join(
        os.path.abspath(os.path.expanduser(part.strip())) for part in parts if part.strip()
    )


def checkpoint_folder(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def checkpoints_of(run: Path) -> Path:
    """Return the folder of the checkpoints of the run in the folder `run`.

    Raises:
        ValueError: its config.toml cannot be read.
    """
    return checkpoint_folder(_stored(run))


def _stored(run: Path) -> Config:
    """Return the configuration stored by this folder's run, with the folder's present path.

    Without one, return the defaults.
    """
    stored = (
        load_config(["--job.config_file", str(run / CONFIG)])
        if (run / CONFIG).is_file()
        else Config()
    )
    return changed(stored, {"job.dump_folder": str(run)})


def config_of(checkpoint: Path) -> Config:
    """Return the configuration of the run of a step-N folder (`config_path`)."""
    return load_config(["--job.config_file", str(config_path(checkpoint))])


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


def _has_trained(config: Config) -> bool:
    """Whether this folder's run has trained; runs in folders below it do not count."""
    return _has_reported(config) or any(_saved(config, "step-*"))


def _has_reported(config: Config) -> bool:
    metrics = Path(config.job.dump_folder) / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def _has_checkpoint(config: Config) -> bool:
    return any(_saved(config, f"step-*[0-9]/{STEP_MANIFEST}"))


def _saved(config: Config, pattern: str) -> Iterator[Path]:
    """Return the paths among the run's checkpoints that match.

    With checkpoint.enable = false, checkpoints outside the run's folder belong to another
    run.
    """
    return (
        checkpoint_folder(config).glob(pattern)
        if config.checkpoint.enable or saves_inside(config)
        else iter(())
    )


def saves_inside(config: Config) -> bool:
    return (
        checkpoint_folder(config).resolve().is_relative_to(Path(config.job.dump_folder).resolve())
    )


def write_config(config: Config) -> None:
    """Write config.toml with absolute paths, so that it starts the same run from anywhere."""
    config = _with_absolute_paths(config)
    # Once begun anew, this is a run like any other. Its config.toml must not set it aside
    # again.
    written = changed(config, {"job.start_anew": False})
    folder = config.job.dump_folder
    text = f"{MARK} '{folder}'; with another job.dump_folder it starts the same run anew\n\n"
    write_whole(Path(folder) / CONFIG, text + config_to_toml(written))


def _with_absolute_paths(config: Config) -> Config:
    values = flat_keys(config)
    mixture = [
        source.model_copy(update={"dataset_path": absolute(source.dataset_path)})
        for source in config.training.mixture
    ]
    paths = {key: absolute(values[key]) for key in keys_with(KeyRule.PATH)}
    if config.model.tokenizer_path == BYTES:
        del paths["model.tokenizer_path"]
    return changed(config, paths | {"training.mixture": mixture})


def cut_metrics(folder: str, step: int) -> None:
    """Drop the lines after `step`, and torn last lines, from files written line by line.

    Raises:
        ValueError: a line before the last is not a line of metrics.
    """
    for name in (METRICS, TELEMETRY, SPIKES, EVALUATION):
        if (Path(folder) / name).exists():
            _cut(Path(folder) / name, step)


def _cut(path: Path, step: int) -> None:
    text = path.read_text(encoding="utf-8")
    *lines, _torn = text.split("\n")
    kept = "".join(
        f"{line}\n" for number, line in enumerate(lines, 1) if _step(path, number, line) <= step
    )
    if kept != text:
        write_whole(path, kept)


def json_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the lines of a .jsonl file, if it exists, without an unfinished last line."""
    if not path.is_file():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    try:
        return [parse_json(line, kind) for line in lines]
    except ValueError as error:
        raise ValueError(f"'{path}' has a line that no run writes ({error}); repair it") from None


def json_line(value: Mapping[str, Any]) -> str:
    """Return a line of a .jsonl file.

    Numbers that are not finite become text, because JSON cannot express them.
    """
    return json.dumps(_finite(value), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
