"""Runs side by side: the progress of each, and the keys in which they differ.

titan-linear report outputs/debug
titan-linear report outputs/kda outputs/gdn outputs/hybrid --html report.html

With --html, a page shows also their curves and spikes.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from titan_linear.commands import command_parser, table
from titan_linear.commands.page import loss_of, page
from titan_linear.config import Training, toml_value
from titan_linear.distributed.process import refusing
from titan_linear.storage import rundir
from titan_linear.storage.files import Json, read_json, write_whole
from titan_linear.storage.rundir import METRICS, RUN_MANIFEST, SPIKES, config_in, json_lines

NONE = "–"
# Keys that differ between any two runs.
OWN = ("job.config_file", "job.dump_folder", "job.description")


class ReportLine(rundir.MetricsLine, extra="allow"):
    """The fields of a line of metrics that are read; the loss's reports are further fields."""

    loss: float | None = None
    validation_loss: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    skipped_steps: int = 0


def cell(
    lines: Sequence[ReportLine],
    key: str,
    form: str = "{:.4f}",
    of: Callable[[list[float]], float] = min,
) -> str:
    """Return `of` applied to a key's values, where they are given and finite."""
    values = [x for line in lines if (x := getattr(line, key, None)) is not None]
    return form.format(of(values)) if values else NONE


def standing(run: Path) -> dict[str, str]:
    """Return a run's row.

    It has the loss, its reports, tokens and step of the last line, medians of rates, and
    the most memory.
    """
    if not (run / METRICS).is_file():
        raise ValueError(f"'{run}' holds no {METRICS}; give the folder of a run (job.dump_folder)")
    lines = json_lines(run / METRICS, ReportLine)
    steps = [line for line in lines if "loss" in line.model_fields_set]
    last = steps[-1:] or [ReportLine(step=0)]
    # The first step of a start compiles, so its rates are left out if there are more.
    rated = steps[1:] or steps
    # A run that has just begun has no manifest yet, and earlier versions did not count.
    manifest = run / RUN_MANIFEST
    made = read_json(manifest, Json, "") if manifest.is_file() else {}
    return {
        "run": str(run),
        "parameters": f"{made['parameters']:,}" if "parameters" in made else NONE,
        "trained on": data_of(config_in(run).training),
        "step": cell(last, "step", "{}"),
        "loss": cell(last, "loss"),
        "best validation": cell(lines, "validation_loss"),
        **{name: cell(last, name) for name in loss_of(run).reports},
        "tokens": cell(last, "tokens", "{:,}"),
        "tokens/s": cell(rated, "tokens_per_second", "{:,.0f}", median),
        "MFU": cell(rated, "mfu", "{:.1%}", median),
        "GiB": cell(steps, "memory_gib", "{:.2f}", max),
        "skipped": cell(last, "skipped_steps", "{}"),
        "spikes": str(len(json_lines(run / SPIKES, ReportLine))),
    }


def data_of(training: Training) -> str:
    """Return the run's data, for example "jsonl /data/*.jsonl", or "web 3 + code 1"."""
    if training.mixture:
        return " + ".join(f"{source.name} {source.weight:g}" for source in training.mixture)
    return f"{training.dataset} {training.dataset_path}".strip()


def differences(runs: Sequence[Path]) -> list[list[str]]:
    """Return a row for each key that differs between runs: the key, and each run's value."""
    keys = [config_in(run).flat_keys() for run in runs]
    rows = []
    for key in keys[0]:
        values = [toml_value(of_run[key]) for of_run in keys]
        if key not in OWN and len(set(values)) > 1:
            rows.append([key, *values])
    return rows


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("titan-linear report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, and print its size"
    )
    args = parser.parse_args(argv)
    runs = [standing(run) for run in args.runs]
    keys = differences(args.runs)
    # There is a column for each property that any of the runs has.
    head = list(dict.fromkeys(chain.from_iterable(runs)))
    rows = []
    for run in runs:
        rows.append([run.get(name, NONE) for name in head])
    if args.html:
        write_whole(args.html, page(args.runs, list(zip(head, *rows, strict=True)), keys))
        print(f"{args.html}: {args.html.stat().st_size / 1000:,.0f} kB")
        return 0
    print(table(head, rows))
    if keys:
        print("\n" + table(["key", *map(str, args.runs)], keys))
    return 0
