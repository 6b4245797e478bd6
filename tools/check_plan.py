"""What the planner says of steps that were measured.

python -m tools.check_plan
python -m tools.check_plan --rates mine.json      # by rates that tools/bench_rates.py measured
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from titan_linear.commands import command_parser, table
from titan_linear.commands.plan import mean_length
from titan_linear.config import load_config
from titan_linear.distributed.process import refusing, run_command
from titan_linear.planner.machine import Machine, Rates, read_rates, shipped
from titan_linear.planner.memory import GIB, memory
from titan_linear.planner.timing import step
from titan_linear.run.build import model_without_tokenizer

MEASURED = Path(__file__).with_name("measured_steps.json")


class Measured(NamedTuple):
    """A row of MEASURED: a setting that tools/bench_train.py ran, and what it took."""

    setting: str  # the essentials of its keys
    gpu: str
    gpus: int
    keys: list[str]
    attention: str
    documents: str
    tokens_per_second: float | None  # per GPU
    memory_gib: float | None
    source: str


def predictions(measured: Rates | None = None) -> list[tuple[Measured, float, float]]:
    """Rows of MEASURED, each with the planned tokens per second per GPU and the planned GiB, by the rates that come
    with the package or by `measured`; without rows whose attention kernel the rates lack."""
    rows_planned = []
    for row in (Measured(**row) for row in json.loads(MEASURED.read_text(encoding="utf-8"))):
        rates = measured or read_rates(shipped()[row.gpu])
        if row.attention not in rates.attention:
            continue
        config = load_config(row.keys, cuda=True)
        mean = mean_length(row.documents)
        model = model_without_tokenizer(config)
        needed = sum(memory(config, model, row.gpus, mean).values()) / GIB
        planned = step(config, model, row.gpus, Machine(rates, 8, 50e9, row.attention), mean)
        rows_planned.append((row, planned.tokens_per_second / row.gpus, needed))
    return rows_planned


def checked(measured: Rates | None = None) -> str:
    """A table of all rows."""
    head = ("setting", "GPUs", "tokens/s/GPU", "planned", "time off by", "GiB", "planned", "off by")
    rows = []
    for row, speed, needed in predictions(measured):
        time = _beside(row.tokens_per_second, speed, "{:,.0f}", inverse=True)
        rows.append((row.setting, row.gpus, *time, *_beside(row.memory_gib, needed, "{:.1f}")))
    return table(head, rows)


def _beside(
    measured: float | None, planned: float, shape: str, inverse: bool = False
) -> tuple[str, str, str]:
    """Measured, planned, and by how much the plan is off; for speeds (inverse), by how much the planned time is."""
    if measured is None:
        return "–", shape.format(planned), "–"
    off = measured / planned - 1 if inverse else planned / measured - 1
    return shape.format(measured), shape.format(planned), f"{off:+.0%}"


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.check_plan", __doc__)
    parser.add_argument("--rates", type=Path, help="file written by tools.bench_rates")
    rates = parser.parse_args(argv).rates
    print(checked(read_rates(rates) if rates else None))
    return 0


if __name__ == "__main__":
    run_command(main)
