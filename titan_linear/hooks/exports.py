"""Checkpoints as Hugging Face folders, while the run continues: checkpoint.export_interval.

A process on rank 0's machine, of the lowest priority and without a GPU, reads a finished
checkpoint and writes step-N-hf next to it, one tensor at a time (run/export.py). No step
waits for it, and it dies with rank 0. A failure is a warning, also a failure to start the
process. A process that is killed is started again, once.

An export that was cut short, because the run was killed or stopped, is made at the next
start, as long as the checkpoint is there. If the run is finished, that start only names the
export.
"""

import os
import subprocess
import tempfile
import time
from typing import IO

from titan_linear.config import Config
from titan_linear.distributed.process import StopSignal
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.run.export import command, export_folder, lacks_export, not_exported
from titan_linear.storage.step_folders import complete_steps, describe


class Exports(Hook):
    """The exports of a run, on rank 0.

    Args:
        step: the step that the run begins or resumes from.
        in_use: steps whose checkpoints must not be removed; this adds each step until it is
            exported.
    """

    def __init__(self, config: Config, step: int, in_use: set[int]):
        self.config = config
        self.folder = config.checkpoint_folder
        self.in_use = in_use
        self.waiting: list[int] = []
        # Exports the checkpoint step-`exporting`.
        self.process: subprocess.Popen | None = None
        self.exporting: int | None = None
        # Steps whose process was killed.
        self.again: set[int] = set()
        self.output: IO[str]
        # Checkpoints of earlier starts may still lack their exports.
        for saved in complete_steps(self.folder):
            if saved <= step:
                self.after_save(saved)

    def after_save(self, step: int) -> None:
        """Queue step-N for export once it is complete, if an export is due."""
        if lacks_export(self.config, step) and step not in (*self.waiting, self.exporting):
            self.waiting.append(step)
            self.in_use.add(step)

    def after_step(self, done: StepResult) -> None:
        self.look()

    def look(self) -> None:
        """Report an export that has ended and start the next one if possible, without
        waiting.
        """
        if self.process and self.process.poll() is not None:
            self._say()
        if self.waiting and not self.process and (whole := self._whole()):
            self._begin(whole[0])

    def finish(self, stop: StopSignal) -> None:
        """Wait for all exports, unless the run is asked to stop.

        No save follows, and no checkpoint is in use afterwards.
        """
        while not (stop.received or stop.agreed):
            self.look()
            # A checkpoint that is still incomplete now will never be complete.
            if not self.process and not self._whole():
                break
            time.sleep(0.05)
        # After a signal, kill the export under way and name it among the missing ones.
        if self.process:
            self.process.kill()
            self.process.wait()
            self.waiting.insert(0, self.exporting)
        self.in_use.clear()

    def report(self, stop: StopSignal) -> None:
        """Print which exports are missing, once checkpoints kept for exports are removed."""
        whole = self._whole()
        if gone := [f"step-{step}" for step in self.waiting if step not in whole]:
            print(f"warning: not exported: {', '.join(gone)} (no checkpoint there any more)")
        # The run is complete, so no later start will make these exports.
        if whole and not stop.agreed:
            print(not_exported(whole))

    def _whole(self) -> list[int]:
        """Return the waiting steps whose checkpoints are complete."""
        complete = complete_steps(self.folder)
        return [step for step in self.waiting if step in complete]

    def _begin(self, step: int) -> None:
        self.waiting.remove(step)
        self.exporting = step
        try:
            # Bytes that are not UTF-8 are shown escaped.
            self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self.process = subprocess.Popen(
                command(
                    self.folder / f"step-{step}",
                    export_folder(self.config, step),
                    self.config.checkpoint.export_dtype,
                ),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )
        except OSError as error:
            self._ended(f"no process starts: {describe(error)}")

    def _say(self) -> None:
        code = self.process.returncode
        self.output.seek(0)
        said = self.output.read().strip().splitlines() or [f"exit code {code}"]
        self.output.close()
        # A process that was killed is started again, once.
        if code < 0 and self.exporting not in self.again:
            self.again.add(self.exporting)
            self.waiting.append(self.exporting)
            said.append("its process was killed; it starts again")
        self._ended(said[-1].removeprefix("error: ") if code else "")

    def _ended(self, problem: str) -> None:
        step = self.exporting
        self.exporting = self.process = None
        if step not in self.waiting:
            self.in_use.discard(step)
        failed = f"warning: exporting step-{step} failed: {problem}"
        print(failed if problem else f"exported '{export_folder(self.config, step)}'")
