"""Metrics of a run: the console, metrics.jsonl, TensorBoard and W&B, per logged step.

All of them show the same numbers; TensorBoard lays them out in groups (`TAGS`). Rank 0 has
the only logger.
"""

import html
import json
import math
import os
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from titan_linear.config import Config, config_to_toml
from titan_linear.distributed.process import unescaped
from titan_linear.hooks.hook import Hook
from titan_linear.losses import LOSSES
from titan_linear.run.evaluate import Record, means, tiles, write_down
from titan_linear.step.optimizer import Moment
from titan_linear.storage.files import Json, open_own, write_whole
from titan_linear.storage.rundir import BOARD, METRICS, TELEMETRY, WANDB, append_lines, cut_metrics

GIB = 2**30
# Pixels along the side of one tile of an image.
TILE = 16
# Share of tokens without a label (such as documents' last ones) below which the console
# does not show the rate of labeled tokens.
FEW = 0.01
# TAGS maps names in metrics.jsonl to TensorBoard's; other names stay the same. CHARTS are
# its custom scalars: category → chart → tags, which are regular expressions.
TAGS, CHARTS = json.loads(
    Path(__file__).with_name("tensorboard.json").read_text(encoding="utf-8")
).values()


class IntervalWork(NamedTuple):
    """Work of all ranks since the previous report."""

    # FLOPs of the model (flops.py).
    flops: int
    # Number of tokens with a label.
    valid: int
    # Seconds in which the device had no work, for lack of data.
    waited: float


class MetricsLogger(Hook):
    """Writes metrics to the console, metrics.jsonl and tb/ in `job.dump_folder`.

    Time between lines is measured on the device. The host waits for room in the launch
    queue while it queues the next step, so it learns of a finished step late, unless it is
    the last.

    Args:
        device: where steps are computed.
        start_step: the step this start resumes from (0: from the beginning); later lines
            are removed.
        start_tokens: tokens seen up to that step.
        gpus: number of GPUs that share the work.
        peak_tflops: peak of one GPU; None: not known, and there is no MFU.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        start_step: int = 0,
        start_tokens: int = 0,
        gpus: int = 1,
        peak_tflops: float | None = None,
        out: TextIO | None = None,
    ):
        self.folder = Path(config.job.dump_folder)
        cut_metrics(config.job.dump_folder, start_step)
        self.steps = config.training.steps
        self.reports = LOSSES[config.loss.name].reports
        self.out = out or sys.stdout
        self.gpus = gpus
        self.peak_tflops = peak_tflops
        self.colour = self.out.isatty() and "NO_COLOR" not in os.environ
        # `close` closes the file.
        self.file = open_own(self.folder / METRICS, "a")
        # Objects with the interface of TensorBoard's writer.
        self.boards: list[Any] = []
        if config.metrics.enable_tensorboard:
            board = _tensorboard(
                self.folder.absolute(), start_step, config, with_mfu=peak_tflops is not None
            )
            self.boards.append(board)
        if config.metrics.enable_wandb:
            notes = config.job.description or None
            self.boards.append(WandbBoard(self.folder.absolute(), notes, config.model_dump()))
        self.device = device
        # Moment, step and tokens of the last line, and the pauses since then.
        self.last = (Moment(device), start_step, start_tokens)
        self.pauses: list[tuple[Moment, Moment]] = []

    def log(
        self,
        step: int,
        *,
        moment: Moment,
        loss: float | None,
        grad_norm: float,
        lr: float,
        tokens: int,
        memory_gib: float,
        work: IntervalWork | None = None,
        **more: float,
    ) -> None:
        """Report a training step.

        Args:
            moment: when the device had the step's numbers.
            loss: None: no token has a label.
            tokens: tokens seen by the whole run up to this step.
            work: work done since the previous report.
            more: further numbers by name; the console shows the ones that the loss reports.
        """
        # Rates since the last line, without the pauses for validations and saves.
        then, last_step, last_tokens = self.last
        seconds = moment.since(then) - sum(end.since(begin) for begin, end in self.pauses)
        per_second = (tokens - last_tokens) / seconds
        rates = {} if work is None else self._rates(work, seconds)
        step_seconds = seconds / (step - last_step)
        # The time of a step is on the boards only: it can be computed from the file's
        # numbers.
        for board in self.boards:
            board.add_scalar(TAGS["step_seconds"], step_seconds, step)
        self.last = (moment, step, tokens)
        self.pauses = []
        # All numbers go into metrics.jsonl, and a selection to the console.
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_second": per_second,
        }
        self._write(step, values | rates | {"memory_gib": memory_gib} | more)
        labelled = rates.get("valid_tokens_per_second", per_second)
        valid = [("valid", f"{labelled:9,.0f}", 36)] if labelled < (1 - FEW) * per_second else []
        self._print(
            step,
            [
                ("loss", _four_decimals(loss), 32),
                ("grad", _three_digits(grad_norm), 33),
                ("lr", f"{lr:.2e}", 0),
                *((name, _four_decimals(more[name]), 0) for name in self.reports if name in more),
                ("tok/s", f"{per_second:9,.0f}", 36),
                *valid,
                *_shown(rates),
                ("mem", f"{memory_gib:.2f} GiB", 0),
                ("eta", _duration((self.steps - step) * step_seconds), 0),
            ],
        )

    def _rates(self, work: IntervalWork, seconds: float) -> dict[str, float]:
        """Return the rates of the run.

        They are valid tokens per second of the whole run, TFLOP/s of one GPU, their share
        of its peak, and the share of time without data.
        """
        tflops = work.flops / seconds / self.gpus / 1e12
        mfu = {} if self.peak_tflops is None else {"mfu": tflops / self.peak_tflops}
        return {
            "valid_tokens_per_second": work.valid / seconds,
            "tflops": tflops,
            **mfu,
            "data_wait": min(work.waited / seconds, 1.0),
        }

    def log_telemetry(self, step: int, seen: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the quantities observed in a step (telemetry.py).

        In TensorBoard, numbers by head or expert are histograms.
        """
        append_lines(self.folder / TELEMETRY, [{"step": step, **seen}])
        for board in self.boards:
            for quantity, found in seen.items():
                for where, value in found.items():
                    value = np.array(value)
                    if not value.ndim:
                        board.add_scalar(_tag(quantity, where), value, step)
                    elif len(finite := value[np.isfinite(value)]):
                        # TensorBoard refuses an empty histogram.
                        board.add_histogram(_tag(quantity, where), finite, step)
            board.flush()

    def after_validation(
        self, step: int, loss: float, reports: dict[str, float], text: str
    ) -> None:
        self._write(
            step, {f"validation_{name}": value for name, value in {"loss": loss, **reports}.items()}
        )
        shown = [(name, f"{value:.4f}", 0) for name, value in reports.items()]
        self._print(step, [("validation loss", f"{loss:.4f}", 35), *shown])
        if text:
            print(f"--- sample, step {step}\n{text}\n---", file=self.out, flush=True)
            for board in self.boards:
                board.add_text("sample", textwrap.indent(text, "    "), step)
                board.flush()

    def after_evaluation(self, step: int, records: list[Record]) -> None:
        """Write the scores of each prompt.

        TensorBoard has means by length, and an image of scores by depth (down) and length.
        """
        write_down(records, step, self.folder)
        scores = means(records, "task", "length")
        # The console shows a score for each task and length.
        self._print(
            step,
            [
                (f"{task} {length}", f"{of['score']:.3f}", 35)
                for (task, length), of in scores.items()
            ],
        )
        for board in self.boards:
            for (task, *where), numbers in means(records, "task", "length", "position").items():
                for name, value in numbers.items():
                    board.add_scalar(
                        f"evaluation_{name}/{'_'.join(str(x) for x in [task, *where] if x)}",
                        value,
                        step,
                    )
            # Tasks with depths also get an image.
            for task in dict.fromkeys(
                record["task"] for record in records if record["depth"] is not None
            ):
                *_, image = tiles(record for record in records if record["task"] == task)
                board.add_image(
                    f"evaluation/{task}", np.kron(image, np.ones((TILE, TILE)))[None], step
                )
            board.flush()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Exclude the time spent inside (validation, a save) from the steps' times."""
        begin = Moment(self.device)
        yield
        self.pauses.append((begin, Moment(self.device)))

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.close()

    def close(self) -> None:
        self.file.close()
        for board in self.boards:
            board.close()

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        # JSON has no NaN or infinity: such a number is null, and "nonfinite" has its text.
        known = {key: value for key, value in values.items() if value is not None}
        nonfinite = {key: value for key, value in known.items() if not math.isfinite(value)}
        line: Json = {"step": step, **values} | dict.fromkeys(nonfinite)
        if nonfinite:
            line["nonfinite"] = ", ".join(f"{key} = {value}" for key, value in nonfinite.items())
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
        for board in self.boards:
            for key, value in known.items():
                board.add_scalar(TAGS.get(key, key), value, step)
            board.flush()

    def _print(self, step: int, fields: list[tuple[str, str, int]]) -> None:
        width = len(str(self.steps))
        shown = [f"step {step:>{width}}/{self.steps}"]
        for name, text, colour in fields:
            shown.append(f"{name} \033[{colour}m{text}\033[0m" if self.colour else f"{name} {text}")
        print("  ".join(shown), file=unescaped(self.out), flush=True)


def _tensorboard(
    folder: Path,
    start_step: int,
    config: Config,
    *,
    with_mfu: bool,
) -> Any:
    """Return a writer of tb/NAME, which TensorBoard shows as the run NAME.

    NAME is the name of the run's folder.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

    # `purge_step` removes points that a resumed run will write again.
    board = SummaryWriter(str(folder / BOARD / folder.name), purge_step=start_step + 1)
    telemetry = config.metrics.telemetry_freq
    groups = config.metrics.loss_by_source
    # Charts that some configurations have no numbers for are left out.
    drawn = {
        "MFU": with_mfu,
        "by position in the document": telemetry,
        "by source": telemetry and (config.training.mixture or groups),
        "tokens by source": groups,
        "gradient norm by layer": telemetry,
        "update norm by layer": telemetry,
        "fragmentation": torch.cuda.is_available(),
    }
    charts = {
        group: {name: ["Multiline", tags] for name, tags in of.items() if drawn.get(name, True)}
        for group, of in CHARTS.items()
    }
    board.add_custom_scalars(charts)
    # Indented text is shown as code.
    text = textwrap.indent(config_to_toml(config), "    ")
    board.add_text("configuration", text, start_step)
    return board


def _tag(quantity: str, where: str) -> str:
    """Return TensorBoard's name of a telemetry quantity.

    Its groups are in alphabetical order, and the first two are open.
    """
    return f"{quantity if '_by_' in quantity else f'per_layer_{quantity}'}/{where}"


class WandbBoard:
    """Weights & Biases, with the interface of TensorBoard's writer.

    Steps are logged as a number of their own, because a run that resumes from an earlier
    step logs some steps a second time.
    """

    def __init__(self, folder: Path, notes: str | None, configuration: Json):
        import wandb  # optional

        # All starts of a run share one id, and so one run there.
        known = folder / WANDB
        if not known.exists():
            write_whole(known, uuid.uuid4().hex)
        self.wandb = wandb
        self.run = wandb.init(
            id=known.read_text(encoding="utf-8"),
            resume="allow",
            name=folder.name,
            dir=str(folder),
            notes=notes,
            config=configuration,
        )
        self.run.define_metric("*", step_metric="step")
        self.pending: Json = {}

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.pending |= {"step": step, tag: float(value)}

    def add_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        self.pending |= {"step": step, tag: self.wandb.Histogram(values)}

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.pending |= {"step": step, tag: self.wandb.Image(image[0])}

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.pending |= {
            "step": step,
            tag: self.wandb.Html(f"<pre>{html.escape(textwrap.dedent(text))}</pre>"),
        }

    def flush(self) -> None:
        if self.pending:
            self.run.log(self.pending)
        self.pending = {}

    def close(self) -> None:
        self.flush()
        self.run.finish()


def _shown(rates: dict[str, float]) -> list[tuple[str, str, int]]:
    """Return the rates of `_rates` that the console shows: name, text and color."""
    percent = "{:5.1%}".format
    shown = {
        "tflops": ("TFLOP/s", _three_digits, 36),
        "mfu": ("mfu", percent, 36),
        "data_wait": ("wait", percent, 0),
    }
    return [
        (name, text(rates[key]), colour)
        for key, (name, text, colour) in shown.items()
        if key in rates
    ]


def _four_decimals(x: float | None) -> str:
    return f"{'none':>7}" if x is None else f"{x:7.4f}"


def _three_digits(x: float) -> str:
    return f"{x:#.3g}".removesuffix(".").rjust(8)


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
