"""Checkpoints as Hugging Face folders, while the run goes on: checkpoint.export_interval.

A process on rank 0's machine, of the lowest priority and without a GPU, reads a finished checkpoint and writes
step-N-hf beside it, one tensor at a time (run/export.py); no step waits for it, and it dies with that rank. A failure
is a warning, also one to start the process. A process that is killed is started again, once. An export that a kill of
the run or a stop cut short is made at the next start, as long as the checkpoint is there; if the run is finished, that
start only names it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from typing import IO

from titan_linear.config import Config
from titan_linear.distributed.process import StopSignal
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.run.export import command, export_folder, lacks_export, not_exported
from titan_linear.storage.rundir import checkpoint_folder
from titan_linear.storage.step_folders import describe, whole_steps


class Exports(Hook):
    """The exports of a run, on rank 0.

    Args:
        step: the step that the run begins or resumes from.
        in_use: steps whose checkpoints must not be removed; this adds each step until it is exported.
    """

    def __init__(self, config: Config, step: int, in_use: set[int]):
        self.config = config
        self.folder = checkpoint_folder(config)
        self.in_use = in_use
        self.waiting: list[int] = []
        self.process: subprocess.Popen | None = None  # exports step-`exporting`
        self.exporting: int | None = None
        self.again: set[int] = set()  # steps whose process was killed
        self.output: IO[str]
        for saved in whole_steps(self.folder):
            if saved <= step:
                self.after_save(saved)

    def after_save(self, step: int) -> None:
        """Export step-N once it is whole, if that is asked for."""
        if lacks_export(self.config, step) and step not in (*self.waiting, self.exporting):
            self.waiting.append(step)
            self.in_use.add(step)

    def after_step(self, done: StepResult) -> None:
        self.look()

    def look(self) -> None:
        """Start the next export if it can start, and report one that has ended, without waiting."""
        if self.process and self.process.poll() is not None:
            self._say()
        if self.waiting and not self.process and (whole := self._whole()):
            self._begin(whole[0])

    def finish(self, stop: StopSignal) -> None:
        """Wait for all exports, unless the run is asked to stop. No save follows, and no checkpoint is in use."""
        while not (stop.received or stop.agreed):
            self.look()
            # what still waits is not whole, and never will be
            if not self.process and not self._whole():
                break
            time.sleep(0.05)
        if self.process:
            self.process.kill()
            self.process.wait()
            self.waiting.insert(0, self.exporting)
        self.in_use.clear()

    def report(self, stop: StopSignal) -> None:
        """Say which exports are not made, once the checkpoints are removed that were kept for them."""
        whole = self._whole()
        if gone := [f"step-{step}" for step in self.waiting if step not in whole]:
            print(f"warning: not exported: {', '.join(gone)} (no checkpoint there any more)")
        if whole and not stop.agreed:  # the run is complete: no later start will make these
            print(not_exported(whole))

    def _whole(self) -> list[int]:
        """Those of the waiting steps whose checkpoints are whole."""
        whole = whole_steps(self.folder)
        return [step for step in self.waiting if step in whole]

    def _begin(self, step: int) -> None:
        self.waiting.remove(step)
        self.exporting = step
        checkpoint = self.folder / f"step-{step}"
        dtype = self.config.checkpoint.export_dtype
        try:
            # Whatever bytes the process writes are shown.
            self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self.process = subprocess.Popen(
                command(checkpoint, export_folder(self.config, step), dtype),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )
        except OSError as error:
            self._ended(f"no process starts: {describe(error)}")

    def _say(self) -> None:
        self.output.seek(0)
        said = self.output.read().strip().splitlines() or [f"exit code {self.process.returncode}"]
        self.output.close()
        if self.process.returncode < 0 and self.exporting not in self.again:
            self.again.add(self.exporting)
            self.waiting.append(self.exporting)
            said.append("its process was killed; it starts again")
        self._ended("" if self.process.returncode == 0 else said[-1].removeprefix("error: "))

    def _ended(self, problem: str) -> None:
        step = self.exporting
        self.exporting = self.process = None
        if step not in self.waiting:
            self.in_use.discard(step)
        failed = f"warning: exporting step-{step} failed: {problem}"
        print(failed if problem else f"exported '{export_folder(self.config, step)}'")
