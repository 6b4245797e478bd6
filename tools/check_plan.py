"""Steps that were measured, compared with what the planner predicts.

python -m tools.check_plan
python -m tools.check_plan --rates mine.json      # by rates that tools/bench_rates.py measured
"""

import json
from pathlib import Path
from typing import NamedTuple

from titan_linear.commands import command_parser, table
from titan_linear.commands.plan import mean_length
from titan_linear.config import load_config
from titan_linear.distributed.process import refusing, run_command
from titan_linear.planner.machine import Machine, Rates, read_rates, shipped
from titan_linear.planner.memory import GIB, PlannedRank
from titan_linear.planner.timing import step
from titan_linear.run.origin import Origin

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
    for fields in json.loads(MEASURED.read_text(encoding="utf-8")):
        row = Measured(**fields)
        rates = measured or read_rates(shipped()[row.gpu])
        if row.attention not in rates.attention:
            continue
        config = load_config(row.keys, cuda=True)
        mean = mean_length(row.documents)
        model = Origin.of(config).definition
        rank = PlannedRank(config, model, row.gpus, mean)
        planned = step(rank, Machine(rates, 8, 50e9, row.attention))
        rows_planned.append((row, planned.tokens_per_second / row.gpus, rank.needs / GIB))
    return rows_planned


def checked(measured: Rates | None = None) -> str:
    """A table of all rows. Of speeds, the planned time is compared."""
    head = ("setting", "GPUs", "tokens/s/GPU", "planned", "time off by", "GiB", "planned", "off by")
    rows = []
    for row, speed, needed in predictions(measured):
        time = memory = "–", "–"
        if row.tokens_per_second is not None:
            off = row.tokens_per_second / speed - 1
            time = f"{row.tokens_per_second:,.0f}", f"{off:+.0%}"
        if row.memory_gib is not None:
            memory = f"{row.memory_gib:.1f}", f"{needed / row.memory_gib - 1:+.0%}"
        speeds = time[0], f"{speed:,.0f}", time[1]
        rows.append([row.setting, row.gpus, *speeds, memory[0], f"{needed:.1f}", memory[1]])
    return table(head, rows)


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.check_plan", __doc__)
    parser.add_argument("--rates", type=Path, help="file written by tools.bench_rates")
    rates = parser.parse_args(argv).rates
    print(checked(read_rates(rates) if rates else None))
    return 0


if __name__ == "__main__":
    run_command(main)
