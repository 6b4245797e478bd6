"""Checkpoints as Hugging Face folders, while the run goes on: checkpoint.export_interval.

A process on rank 0's machine, of the lowest priority and without a GPU, reads a finished checkpoint and writes
step-N-hf beside it, one tensor at a time; no step waits for it, and it dies with that rank. A failure is a warning,
also one to start the process. A process that is killed is started again, once. An export that a kill of the run or a
stop cut short is made at the next start, as long as the checkpoint is there; if the run is finished, that start only
names it.

python -m titan_linear.run.exports CHECKPOINT FOLDER DTYPE      does what that process does
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config, hf_assets, hf_weights
from titan_linear.data import Tokenizer
from titan_linear.distributed.process import StopSignal, ignore_warnings_of_torch, refusing
from titan_linear.models.adapters import config_to_hf
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.run.build import DTYPES, model_config, open_tokenizer, tokenizer_path, unallocated
from titan_linear.step.hooks import Hook, StepResult
from titan_linear.storage.hf_io import CONFIG, read_config, read_model
from titan_linear.storage.hf_writing import check_tokenizer, find_family, gather, write_folder
from titan_linear.storage.rundir import checkpoint_folder, config_of
from titan_linear.storage.step_folders import describe, verify, weights_path, whole_steps
from titan_linear.storage.tensors import check_weights, stored_weights

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16, "source": None}
FAMILY_OF = {"qwen3-next": "Qwen3NextForCausalLM"}  # by model.name, if several architectures can hold the model

# The program of an export's process; its arguments are the parent's process id and those of `main`. It attends to the
# parent first, because this module takes seconds to import, in which the parent may die.
START = """
import sys
from titan_linear.distributed.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from titan_linear.run.exports import main
sys.exit(main(sys.argv[2:]))
"""


def export_folder(config: Config, step: int = 0) -> Path:
    """The Hugging Face folder of a step; by default that of the run's last step."""
    return checkpoint_folder(config) / f"step-{step or config.training.steps}-hf"


def is_exported(config: Config, step: int = 0) -> bool:
    """Whether that folder is there, which has its name once it is whole, and not emptied."""
    return (export_folder(config, step) / CONFIG).is_file()


def lacks_export(config: Config, step: int) -> bool:
    """Whether checkpoint.export_interval asks for an export of step-N that is not there."""
    c = config.checkpoint
    last = c.last_save_in_hf and step == config.training.steps  # the run exports that one itself
    wanted = c.export_interval and step % c.export_interval == 0 and not last
    return bool(wanted) and not is_exported(config, step)


def not_exported(steps: Sequence[int]) -> str:
    """A line that tells the user which steps were not exported."""
    return f"not exported: {', '.join(f'step-{step}' for step in steps)}; titan-linear convert to-hf does it"


def export_family(config: Config, model: ModelConfig, tokenizer: Tokenizer, like: str = "") -> str:
    """The architecture under which a run's model and tokenizer are saved. ValueError: none can hold them."""
    files = tokenizer.hugging_face_files()
    like = like or hf_weights(config)
    if not (like or hf_assets(config)):
        return FAMILY_OF.get(config.model.name) or find_family(model, files)
    family, _ = read_model(Path(like or hf_assets(config)))
    check_tokenizer(family, read_config(Path(like)) if like else config_to_hf(family, model), files)
    return family


def export(
    path: Path,
    config: Config,
    model: ModelConfig,
    tokenizer: Tokenizer,
    get: Callable[[str], Tensor],
    *,
    dtype: str,
    like: str = "",
) -> None:
    """Write the weights of a run as a Hugging Face folder. Every rank calls it; see `write_folder`.

    Args:
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.
    """
    like = like or hf_weights(config)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}
    if like and tokenizer_path(config) == str(Path(like) / "tokenizer.json"):  # its own: it has others of them
        tokens = {name: token for name, token in tokens.items() if token is not None}
    write_folder(
        path,
        model,
        export_family(config, model, tokenizer, like),
        get,
        dtype=EXPORT_DTYPES[dtype],
        like=Path(like) if like else None,
        tokenizer=tokenizer.hugging_face_files(),
        extra=tokens,
        longest=config.training.seq_len,
    )


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str, like: str = "") -> None:
    """Write a checkpoint as a Hugging Face folder, in one process that holds one tensor at a time.

    Args:
        checkpoint: a path that `weights_path` resolves, in its run's folder.
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.

    Raises:
        ValueError: there is no such checkpoint, it is damaged or of another model, or no architecture holds its model.
        SaveFailed: the folder could not be written.
    """
    checkpoint = weights_path(checkpoint, key="CHECKPOINT")
    verify(checkpoint)
    run = config_of(checkpoint)
    if dtype == "source" and not (like or hf_weights(run)):
        raise ValueError("--export-dtype source: this run did not begin from a Hugging Face folder; name one by --like")
    tokenizer = open_tokenizer(run)
    model = model_config(run, tokenizer)
    check_weights(checkpoint, unallocated(model, torch.float32))
    export(folder, run, model, tokenizer, stored_weights(checkpoint), dtype=dtype, like=like)


def export_last(config: Config, model: Decoder, tokenizer: Tokenizer) -> None:
    """Write the run's last weights as a Hugging Face folder, step-N-hf. Every rank calls it."""
    path = export_folder(config)
    dtype = config.checkpoint.export_dtype
    export(path, config, model.config, tokenizer, gather(model), dtype=dtype)
    if dist.get_rank() == 0:
        print(f"exported '{path}'")


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
            if not self.process and not self._whole():  # what still waits is not whole, and never will be
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


def command(checkpoint: Path, folder: Path, dtype: str) -> list[str]:
    return [sys.executable, "-c", START, str(os.getpid()), str(checkpoint), str(folder), dtype]


@refusing
def main(argv: list[str]) -> int:
    os.nice(19)
    ignore_warnings_of_torch()
    checkpoint, folder, dtype = argv
    export_checkpoint(Path(checkpoint), Path(folder), dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
