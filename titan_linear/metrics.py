"""What a run reports: a console line, a line of metrics.jsonl and TensorBoard scalars per logged step.

All three show the same numbers under the same names. Rank 0 has the only logger.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from titan_linear.config import Config
from titan_linear.rundir import METRICS, cut_metrics

GIB = 2**30


def is_logged(config: Config, step: int) -> bool:
    """Whether `step` (from 1) is reported: the first, every log_freq-th, the last."""
    return step == 1 or step % config.metrics.log_freq == 0 or step == config.training.steps


def peak_memory_gib() -> float:
    """The most memory this process has had: of its GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


class MetricsLogger:
    """Writes metrics to the console, metrics.jsonl and tb/ in `job.dump_folder`.

    Args:
        start_step: the step this start goes on from (0: from the beginning); what was reported after it is cut.
        start_tokens: tokens seen up to that step.
    """

    def __init__(self, config: Config, *, start_step: int = 0, start_tokens: int = 0, out: TextIO | None = None):
        folder = config.job.dump_folder
        cut_metrics(folder, start_step)
        self.steps, self.out = config.training.steps, out or sys.stdout
        self.colour = self.out.isatty() and "NO_COLOR" not in os.environ
        self.file = open(Path(folder) / METRICS, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.board = _tensorboard(folder, start_step) if config.metrics.enable_tensorboard else None
        self.last = (time.perf_counter(), start_step, start_tokens)

    def log(
        self, step: int, *, loss: float, grad_norm: float, lr: float, tokens: int, memory_gib: float, **more: float
    ) -> None:
        """Report a training step.

        Args:
            loss: nats per token. tokens: seen by the whole run up to this step. more: further numbers by name.
        """
        then, last_step, last_tokens = self.last
        now = time.perf_counter()
        per_second = (tokens - last_tokens) / (now - then)
        eta = (self.steps - step) * (now - then) / (step - last_step)
        self.last = (now, step, tokens)
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "tokens_per_second": per_second}
        self._write(step, values | {"memory_gib": memory_gib} | more)
        self._print(step, [
            ("loss", f"{loss:.4f}", 32), ("grad", f"{grad_norm:.3g}", 33), ("lr", f"{lr:.2e}", 0),
            ("tok/s", f"{per_second:,.0f}", 36), ("mem", f"{memory_gib:.2f} GiB", 0), ("eta", _duration(eta), 0),
        ])  # fmt: skip

    def log_validation(self, step: int, loss: float, **more: float) -> None:
        """Report a validation after `step`: the loss in nats per token, and further numbers by name."""
        self._write(step, {"validation_loss": loss} | more)
        self._print(step, [("validation loss", f"{loss:.4f}", 35)])

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Time spent inside (validation, a save) counts for no step."""
        start = time.perf_counter()
        yield
        then, step, tokens = self.last
        self.last = (then + time.perf_counter() - start, step, tokens)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        # JSON has no NaN or infinity: such a number is null, and its text stands in "nonfinite".
        nonfinite = {key: value for key, value in values.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step} | values | dict.fromkeys(nonfinite)
        if nonfinite:
            line["nonfinite"] = ", ".join(f"{key} = {value}" for key, value in nonfinite.items())
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(key, value, step)
            self.board.flush()

    def _print(self, step: int, fields: list[tuple[str, str, int]]) -> None:
        width = len(str(self.steps))
        shown = [f"step {step:>{width}}/{self.steps}"]
        for name, text, colour in fields:
            shown.append(f"{name} \033[{colour}m{text}\033[0m" if self.colour else f"{name} {text}")
        print("  ".join(shown), file=self.out, flush=True)


def _tensorboard(folder: str, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

    return SummaryWriter(str(Path(folder) / "tb"), purge_step=start_step + 1)


def _duration(seconds: float) -> str:
    """ "42s", "3m05s", "2h07m", "3d04h"."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h{s // 60 % 60:02}m"
    return f"{s // 86400}d{s // 3600 % 24:02}h"
