"""A start's questions to the folder of its run, and the configuration written there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_linear.config import (
    Config,
    KeyRule,
    absolute,
    config_to_toml,
    difference,
    keys_with,
    load_config,
)
from titan_linear.storage.files import write_whole
from titan_linear.storage.run_lock import Unlockable, lock_folder
from titan_linear.storage.rundir import (
    BOARD,
    CONFIG,
    LINES,
    METRICS,
    RECORDERS,
    RUN_MANIFEST,
    STEP_MANIFEST,
    WANDB,
    last_step,
    set_aside,
    stored_config,
)

# The beginning of a config.toml.
MARK = "# The configuration of the run in"


class RunFolder:
    """The folder of a configuration's run, `job.dump_folder`.

    A folder in which nothing was trained yet holds no run. With job.start_anew, neither
    does a folder without a checkpoint.
    """

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.job.dump_folder)
        self.metrics = self.path / METRICS

    def check_writable(self) -> None:
        """Check that files which a run writes hours later can be written.

        Nothing is created.

        Raises:
            ValueError: something other than a folder is in the way, a folder may not be
                written, or a file is a link.
        """
        c = self.config.checkpoint
        p = self.config.profiling
        # A run appends to these files.
        for link in (self.path / name for name in LINES):
            if link.is_symlink():
                raise ValueError(
                    f"job.dump_folder = {self.config.job.dump_folder!r}: '{link}' is a link, and a run appends to "
                    "none; put the file itself there, or use another folder"
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
            path = self.path.absolute() / folder
            there = next(part for part in (path, *path.parents) if os.path.lexists(part))
            if used and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                why = "may not be written in" if there.is_dir() else "is not a folder"
                raise ValueError(
                    f"{key} = {folder!r} cannot be written: '{there}' {why}; use another"
                )

    def check_resume(self) -> list[str]:
        """Compare with the run that the folder holds; return the changes as "key: old → new".

        Paths are compared as absolute.

        Raises:
            ValueError: a key that decided the steps so far differs; its old and new value
                are named.
        """
        if not self._has_trained or self.starts_anew:
            return []
        if not (self.path / CONFIG).exists():
            if not self._has_reported and not self.saves_inside:
                raise ValueError(
                    f"checkpoint.folder = {self.config.checkpoint.folder!r} holds checkpoints of another run than that "
                    f"of job.dump_folder = '{self.path}'; use another folder (checkpoint.initial_load_path begins a "
                    "run from their weights)"
                )
            raise ValueError(
                f"job.dump_folder = '{self.path}' holds a run without its {CONFIG}; use another folder"
            )
        # Compare all keys; some may change on resume.
        self._check_checkpoints_are_used()
        before = self._before.config.stored().flat_keys()
        now = self.config.stored().flat_keys()
        differing = {key: (before[key], new) for key, new in now.items() if new != before[key]}
        refused = {key: pair for key, pair in differing.items() if not _may_change(key, *pair)}
        if refused:
            lines = "\n".join(f"  {key}: {difference(*pair)}" for key, pair in refused.items())
            more = "or begin again here: job.start_anew = true (it deletes nothing)"
            if self.has_checkpoint:
                more = "whose checkpoint.initial_load_path may be this one, for its weights"
            raise ValueError(
                f"job.dump_folder = '{self.path}' holds a run that cannot resume with other values of\n{lines}\n"
                f"restore them, or start a new run in another job.dump_folder, {more}"
            )
        return [
            f"{key}: {difference(*pair)}"
            for key, pair in differing.items()
            if not key.startswith("job.")
        ]

    def _check_checkpoints_are_used(self) -> None:
        """Raise ValueError if the checkpoints of the run in the folder are not used.

        It would begin again and cut what it has reported.
        """
        c = self.config.checkpoint
        same = (
            self.config.checkpoint_folder.resolve()
            == self._before.config.checkpoint_folder.resolve()
        )
        if not (c.enable and same) and self._before.has_checkpoint:
            key = f"folder = {c.folder!r}" if c.enable else "enable = false"
            raise ValueError(
                f"checkpoint.{key} would begin again in job.dump_folder = {self.config.job.dump_folder!r}, which holds "
                "a run with checkpoints; restore the key, or start a new run in another job.dump_folder"
            )

    @property
    def starts_anew(self) -> bool:
        """Whether job.start_anew is set and applies: this folder's run left no checkpoint."""
        return self.config.job.start_anew and not (
            self.has_checkpoint or self._before.has_checkpoint
        )

    def set_run_aside(self) -> None:
        """Move the files of a run without checkpoints into abandoned-DATE/ (`starts_anew`)."""
        p = self.config.profiling
        files = (CONFIG, RUN_MANIFEST, *LINES, WANDB, BOARD, RECORDERS)
        traces = [
            name
            for name in (p.save_traces_folder, p.save_memory_snapshot_folder)
            if not Path(name).is_absolute()
        ]
        left = dict.fromkeys(Path(os.path.normpath(name)) for name in (*files, *traces))
        # Traces may lie in tb: a folder takes its content along.
        moved = [self.path / path for path in left if not left.keys() & set(path.parents)]
        set_aside(self.path, list(filter(Path.exists, moved)), "job.start_anew = true")

    @property
    def finished_without_checkpoint(self) -> bool:
        """Whether the metrics reach the last step, without a checkpoint to resume from."""
        if self.has_checkpoint or not self.metrics.exists():
            return False
        return last_step(self.metrics) >= self.config.training.steps

    @property
    def copied_configuration(self) -> str:
        """A warning if a copy of a run's config.toml starts its original run, or "".

        The copy lies elsewhere than in the folder of that run.
        """
        path = Path(os.path.expanduser(self.config.job.config_file))
        # A pipe can be read only once.
        if not path.is_file() or not _is_of_a_run(path):
            return ""
        its_folder = load_config(["--job.config_file", str(path)]).job.dump_folder
        here = path.absolute().parent
        if absolute(its_folder) != absolute(str(self.path)) or here == self.path.absolute():
            # Another folder was given, or the file belongs to this run.
            return ""
        moved = (
            f"; --job.dump_folder '{here}' resumes where it lies"
            if path.with_name(RUN_MANIFEST).exists()
            else ""
        )
        return (
            f"warning: '{path}' is the configuration of the run in '{self.path}', and this start writes there; "
            f"--job.dump_folder FOLDER writes into another{moved}"
        )

    def write_config(self) -> None:
        """Write config.toml, which starts the same run from anywhere."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = f"{MARK} '{self.config.job.dump_folder}'; with another job.dump_folder it starts the same run anew\n\n"
        write_whole(self.path / CONFIG, text + config_to_toml(self.config.stored()))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder inside `with`, and the checkpoints' if it lies elsewhere.

        Another run with the same checkpoint.folder would mix its checkpoints with these. A
        disk for checkpoints alone may have no locks.

        Raises:
            ValueError: another run holds a folder, or it cannot be written or locked.
        """
        with ExitStack() as held:
            held.enter_context(lock_folder(str(self.path)))
            if self.config.checkpoint.enable and not self.saves_inside:
                folder = str(self.config.checkpoint_folder.resolve())
                with suppress(Unlockable):
                    held.enter_context(lock_folder(folder, "checkpoint.folder"))
            yield

    # --- What is in the folder --------------------------------------------------------

    @property
    def _before(self) -> RunFolder:
        """The folder as the configuration stored in it describes it."""
        return RunFolder(stored_config(self.path))

    @property
    def saves_inside(self) -> bool:
        """Whether the run's checkpoints lie in its folder."""
        return self.config.checkpoint_folder.resolve().is_relative_to(self.path.resolve())

    @property
    def has_checkpoint(self) -> bool:
        return any(self._saved(f"step-*[0-9]/{STEP_MANIFEST}"))

    @property
    def _has_trained(self) -> bool:
        """Whether this folder's run has trained; runs in folders below it do not count."""
        return self._has_reported or any(self._saved("step-*"))

    @property
    def _has_reported(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def _saved(self, pattern: str) -> Iterator[Path]:
        """Return the paths among the run's checkpoints that match.

        With checkpoint.enable = false, checkpoints outside the run's folder belong to
        another run.
        """
        if self.config.checkpoint.enable or self.saves_inside:
            return self.config.checkpoint_folder.glob(pattern)
        return iter(())


def _may_change(key: str, old: Any, new: Any) -> bool:
    moves = key in keys_with(KeyRule.MAY_MOVE) and bool(old) and bool(new)
    return moves or key in keys_with(KeyRule.MAY_CHANGE)


def _is_of_a_run(file: Path) -> bool:
    with file.open(encoding="utf-8-sig") as lines:
        return lines.readline().startswith(MARK) or (
            file.name == CONFIG and file.with_name(RUN_MANIFEST).exists()
        )
