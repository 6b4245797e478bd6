"""The page of `titan-linear report --html`: curves and tables of runs, in one file without
scripts.

Matplotlib draws each chart as SVG, as wide as a telephone's screen, so that a column of
them is readable there and several columns fit a monitor or paper. Ink has the color of the
page's text, which is light on dark if the reader's browser is.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Template
from markupsafe import Markup

from titan_linear.commands import batch
from titan_linear.data.tasks import LOSS
from titan_linear.losses import LOSSES
from titan_linear.losses.loss import LossFunction
from titan_linear.run.evaluate import means, tiles
from titan_linear.storage.files import Json
from titan_linear.storage.rundir import (
    CONFIG,
    EVALUATION,
    METRICS,
    SPIKES,
    TELEMETRY,
    config_in,
    json_lines,
)

# Key of metrics.jsonl → caption of its chart.
CURVES = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
    "mfu": "MFU",
    "memory_gib": "memory, GiB",
}
# Names of axes, and quantity of telemetry.jsonl → axis of its chart.
POSITION = "position in the document"
LENGTH = "length"
SOURCE = "source"
SEEN = {"loss_by_position": POSITION, "loss_by_depth": "tokens later", "loss_by_source": SOURCE}
# Outputs of commands that the user kept in the run's folder: file → command.
WORDS = {"plan.txt": "plan", "doctor.txt": "doctor"}
# Number of spikes shown of each run, and number of lines shown of each spike.
LAST_SPIKES = 4
SPIKE_LINES = 16
Points = Iterable[tuple[Any, Any]]
# Pairs of caption and SVG.
Charts = list[tuple[str, Markup]]


class RunHistory(NamedTuple):
    folder: Path
    # Lines of metrics, and spikes, whose steps are not all logged.
    steps: list[Json]
    # Telemetry: quantity → layer, position or source → the last observation.
    seen: dict[str, Json]
    spikes: list[Json]
    # Records of the last evaluation.
    scores: list[Json]


def page(
    folders: Sequence[Path], standing: Sequence[Sequence[str]], differences: Sequence[Sequence[str]]
) -> str:
    """Return the page as HTML.

    standing: a row for each property, with a cell for each run. differences: likewise, a
    row for each key.
    """
    if not find_spec("matplotlib"):
        raise ValueError(
            "--html draws with matplotlib, which is not installed; pip install 'titan_linear[report]'"
        )
    # matplotlib is an optional dependency.
    from matplotlib.colors import to_hex

    # The template lays out what these functions return.
    runs = [read(folder) for folder in folders]
    charts = {
        "Curves": curves(runs),
        "Loss by position, further token and source": losses(runs),
        "Recall": recall(runs),
        "Inside, by layer": layers(runs),
    }
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, trim_blocks=True)
    return template.render(
        runs={str(folder): to_hex(f"C{n}") for n, folder in enumerate(folders)},
        tables={"Where they stand": standing, "Keys that differ": differences},
        charts=charts,
        texts={
            "Spikes, with the documents of the worst first": {
                run.folder: spikes(run) for run in runs
            },
            "What the planner and the doctor said": {folder: words(folder) for folder in folders},
        },
    )


def read(folder: Path) -> RunHistory:
    metrics, telemetry, spikes, scores = (
        json_lines(folder / name, Json) for name in (METRICS, TELEMETRY, SPIKES, EVALUATION)
    )
    seen: dict[str, Json] = {}
    # A watched step covers a few layers only, so the latest of each layer are combined.
    for line in telemetry:
        for quantity in line.keys() - {"step"}:
            seen.setdefault(quantity, {}).update(line[quantity])
    steps = sorted(metrics + spikes, key=lambda line: line["step"])
    last = [line for line in scores if line["step"] == scores[-1]["step"]]
    return RunHistory(folder, steps, seen, spikes, last)


def loss_of(run: Path) -> type[LossFunction]:
    return LOSSES[config_in(run).loss.name]


# --- Charts -------------------------------------------------------------------------------


def curves(runs: Sequence[RunHistory]) -> Charts:
    kinds = dict.fromkeys(loss_of(run.folder) for run in runs)
    unit = " or ".join(dict.fromkeys(loss.unit for loss in kinds))
    captions = {"loss": f"training loss, {unit}", "validation_loss": f"validation loss, {unit}"}
    for loss in kinds:
        for name, caption in loss.reports.items():
            captions |= {name: caption, f"validation_{name}": f"validation {caption}"}
    charts = []
    for key, caption in (captions | CURVES).items():
        points = []
        for run in runs:
            points.append([(line["step"], line.get(key)) for line in run.steps])
        charts += drawn(caption, "step", points)
    return charts


def losses(runs: Sequence[RunHistory]) -> Charts:
    """Return charts of the last losses by position, by further token and by source.

    Positions are the first of a bin; further tokens are by how many tokens later.
    """
    charts = []
    for quantity, axis in SEEN.items():
        # "$" begins a formula in matplotlib.
        number = (lambda name: name.replace("$", r"\$")) if axis == SOURCE else int
        points = []
        for run in runs:
            points.append([(number(x), y) for x, y in run.seen.get(quantity, {}).items()])
        charts += drawn("nats per token", axis, points)
    return charts


def layers(runs: Sequence[RunHistory]) -> Charts:
    """Return charts of each layer's last telemetry: a dot for each head or expert.

    Runs are side by side.
    """
    charts = []
    for quantity in sorted(set().union(*(run.seen for run in runs))):
        points = []
        for n, run in enumerate(runs):
            dots = []
            # A layer's dots lie above its number, shifted a little for each run.
            for where, numbers in run.seen.get(quantity, {}).items():
                if layer := re.match(r"layers\.(\d+)", where):
                    x = int(layer[1]) + 0.1 * n
                    dots += [(x, y) for y in np.atleast_1d(numbers)]
            points.append(dots)
        charts += drawn(quantity.replace("_", " "), "layer", points)
    return charts


def recall(runs: Sequence[RunHistory]) -> Charts:
    """Return charts of each task in the last evaluation.

    They show scores by length (of a text, by position), and each run's by length and depth.
    """
    charts = []
    for task in dict.fromkeys(line["task"] for run in runs for line in run.scores):
        by, axis = ("position", POSITION) if task == LOSS else ("length", LENGTH)
        points: list[Points] = []
        tiles_of_runs: Charts = []
        for run in runs:
            lines = [line for line in run.scores if line["task"] == task]
            points.append(sorted((x, y["score"]) for (x,), y in means(lines, by).items()))
            if any(line["depth"] is not None for line in lines):
                tiles_of_runs += tiled(f"{task}, {run.folder}", lines)
        charts += drawn(task, axis, points) + tiles_of_runs
    return charts


def drawn(caption: str, axis: str, points: Sequence[Points]) -> Charts:
    """Return a chart of each run's points, or no chart if there are no points.

    A y that is not a finite number (null or text in a file) is left out. The axis is
    logarithmic if the numbers lie far apart.
    """
    finite = []
    values = []
    for of_run in points:
        pairs = [(x, float(y)) for x, y in of_run if y is not None and math.isfinite(float(y))]
        finite.append(pairs)
        values += [y for _, y in pairs]
    if not values:
        return []
    with axes_of(caption) as (axes, charts):
        for pairs in finite:
            # Many points are drawn as a line alone.
            style = ".-" if len(pairs) < 33 else "-"
            if axis == "layer":
                style = "."
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], style)
        axes.set_xlabel(axis)
        # Lengths and positions double from bin to bin.
        if axis in (POSITION, LENGTH):
            axes.set_xscale("log", base=2)
        elif axis != SOURCE:
            axes.locator_params("x", integer=True, min_n_ticks=1)
        # Scores by length are never on a logarithmic axis.
        if axis != LENGTH and 0 < 30 * min(values) < max(values):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter("")
    return charts


def tiled(caption: str, lines: Sequence[Json]) -> Charts:
    """Return a chart with a tile for each length and depth: the darker, the lower the
    score.
    """
    lengths, depths, scores = tiles(lines)
    with axes_of(caption) as (axes, charts):
        axes.imshow(scores, vmin=0, vmax=1, aspect="auto")
        for (y, x), score in np.ndenumerate(scores):
            text = "" if np.isnan(score) else f"{score:.2f}"
            axes.text(x, y, text, ha="center", va="center", color="w" if score < 0.6 else "k")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(xlabel="length", ylabel="depth")
        axes.grid(False)
    return charts


@contextmanager
def axes_of(caption: str) -> Iterator[tuple[Any, Charts]]:
    """Yield axes to draw on, and a list that has the chart afterwards."""
    from matplotlib import style
    from matplotlib.figure import Figure

    charts: Charts = []
    file = io.StringIO()
    with style.context(Path(__file__).with_suffix(".mplstyle")):
        figure = Figure()
        yield figure.subplots(), charts
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata)
    # Ids of groups are the same in every chart, so they are removed from the page.
    svg = re.sub(r' id="[\w.]+_\d+"', "", file.getvalue())
    svg = svg[svg.index("<svg") :].replace("#010203", "currentColor")
    charts.append((caption, Markup(svg)))


# --- Words --------------------------------------------------------------------------------


def spikes(run: RunHistory) -> list[str]:
    """Return the output of `titan-linear batch` for the run's last spikes, or its error.

    An error is usual, for example where the corpus is gone.
    """
    texts = []
    for number, spike in list(enumerate(run.spikes, 1))[-LAST_SPIKES:]:
        argv = ["--spike", str(number), "--job.config_file", str(run.folder / CONFIG)]
        try:
            lines = batch.lines_of(argv)
            texts.append("\n".join(islice(lines, SPIKE_LINES)))
        except ValueError as error:
            texts.append(f"step {spike['step']}: {error}")
    return texts


def words(folder: Path) -> list[str]:
    """Return the output of the planner and the doctor that the user kept.

    Where it was not kept, return the command that keeps it.
    """
    texts = []
    for name, command in WORDS.items():
        kept = folder / name
        keep = f"titan-linear {command} --job.config_file {folder / CONFIG} | tee {kept}"
        texts.append(kept.read_text(encoding="utf-8") if kept.is_file() else keep)
    return texts
