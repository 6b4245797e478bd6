"""Runs side by side: where each stands, and the keys in which they differ; as a page, also their curves and spikes.

titan-linear report outputs/debug
titan-linear report outputs/kda outputs/gdn outputs/hybrid --html report.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from titan_linear.commands import command_parser, table
from titan_linear.commands.page import page
from titan_linear.config import Training, flat_keys, load_config, toml_value
from titan_linear.distributed.process import refusing
from titan_linear.storage import rundir
from titan_linear.storage.files import write_whole
from titan_linear.storage.rundir import CONFIG, METRICS, SPIKES, json_lines

HEAD = (
    "run",
    "trained on",
    "step",
    "loss",
    "best validation",
    "tokens",
    "tokens/s",
    "MFU",
    "GiB",
    "skipped",
    "spikes",
)
# keys that differ between any two runs
OWN = ("job.config_file", "job.dump_folder", "job.description")


class Line(rundir.Line):
    """What is read of a line of metrics."""

    loss: float | None = None
    validation_loss: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    skipped_steps: int = 0


def numbers(lines: Sequence[Line], key: str) -> list[float]:
    """A key's values, where it is given and finite."""
    return [getattr(line, key) for line in lines if getattr(line, key) is not None]


def standing(run: Path) -> list[str]:
    """A run's row under HEAD: loss, tokens and step of its last line, medians of rates, the most memory."""
    if not (run / METRICS).is_file():
        raise ValueError(f"'{run}' holds no {METRICS}; give the folder of a run (job.dump_folder)")
    lines = json_lines(run / METRICS, Line)
    steps = [line for line in lines if "loss" in line.model_fields_set]
    rates = numbers(steps[1:] or steps, "tokens_per_second")
    mfu = numbers(steps[1:] or steps, "mfu")
    validations = numbers(lines, "validation_loss")
    memory = numbers(steps, "memory_gib")
    last = steps[-1] if steps else Line(step=0)
    return [
        str(run),
        data_of(load_config(["--job.config_file", str(run / CONFIG)]).training),
        str(last.step),
        f"{last.loss:.4f}" if numbers([last], "loss") else "–",
        f"{min(validations):.4f}" if validations else "–",
        f"{last.tokens:,}",
        f"{median(rates):,.0f}" if rates else "–",
        f"{median(mfu):.1%}" if mfu else "–",
        f"{max(memory):.2f}" if memory else "–",
        str(last.skipped_steps),
        str(len(json_lines(run / SPIKES, Line))),
    ]


def data_of(training: Training) -> str:
    """For example "jsonl /data/*.jsonl", or "web 3 + code 1"."""
    if training.mixture:
        return " + ".join(f"{source.name} {source.weight:g}" for source in training.mixture)
    return f"{training.dataset} {training.dataset_path}".strip()


def differences(runs: Sequence[Path]) -> list[list[str]]:
    """A row for each key that is not the same in all runs: the key, and each run's value."""
    keys = [flat_keys(load_config(["--job.config_file", str(run / CONFIG)])) for run in runs]
    shown = [{key: toml_value(value) for key, value in each.items()} for each in keys]
    rows = [[key, *(each[key] for each in shown)] for key in shown[0] if key not in OWN]
    return [row for row in rows if len(set(row[1:])) > 1]


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("titan-linear report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, and print its size"
    )
    args = parser.parse_args(argv)
    rows, keys = [standing(run) for run in args.runs], differences(args.runs)
    if args.html:
        write_whole(args.html, page(args.runs, list(zip(HEAD, *rows, strict=True)), keys))
        print(f"{args.html}: {args.html.stat().st_size / 1000:,.0f} kB")
        return 0
    print(table(HEAD, rows))
    if keys:
        print("\n" + table(["key", *map(str, args.runs)], keys))
    return 0
