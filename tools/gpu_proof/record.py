"""The record of a proof: for each number of GPUs of a kind, the newest result of each line."""

import json
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from titan_linear.commands import table
from tools.gpu_proof.schedule import Result
from tools.harness import ROOT, output_of, versions

COMMITTED = ROOT / "docs" / "results" / "gpu_proof.json"
RATES = {"rate-kda": "KDA 340M packed, tokens/s", "rate-hybrid": "hybrid 1.3B 32k, tokens/s"}
Records = dict[str, dict[str, Any]]


class Gpus(NamedTuple):
    """The GPUs that are visible, all of one kind. names: as CUDA_VISIBLE_DEVICES has them. gib: memory of each."""

    kind: str
    names: list[str]
    gib: float
    driver: str

    @property
    def key(self) -> str:
        return f"{len(self.names)} × {self.kind}"


REHEARSAL = Gpus("CPU", [], 0.0, "none")


def find_gpus() -> Gpus:
    """ValueError: there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = "nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader,nounits"
    found = output_of(*query.split(), *(["-i", visible] if visible else []))
    rows = [line.split(", ") for line in found.splitlines() if line.count(", ") == 3]
    if not rows or visible == "":
        raise ValueError("nvidia-smi shows no GPU; --cpu-rehearsal tests this command without one")
    indices, kinds, mib, drivers = zip(*rows)
    names = visible.split(",") if visible else [*indices]
    return Gpus(kinds[0], names, min(map(float, mib)) / 1024, drivers[0])


# --- Reading, writing and showing ------------------------------------------------------------------------------------


def read(file: Path) -> Records:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def recorded_rate(records: Records, kind: str, name: str) -> float:
    """Tokens/s of a line, the newest on GPUs of this kind, however many there were; 0: there is none."""
    rates = {"": 0.0}  # by date
    for record in records.values():
        line = record["lines"].get(name)
        if line and record["kind"] == kind and line["tokens_per_second"]:
            rates[line["date"]] = line["tokens_per_second"]
    return rates[max(rates)]


def add(records: Records, gpus: Gpus, result: Result, at: str) -> None:
    """Put a line's result in the place of its last one. at: the commit."""
    lines = records.get(gpus.key, {}).get("lines", {})
    lines[result.job.name] = {
        "passed": result.passed,
        "figure": result.figure.text,
        "seconds": round(result.seconds),
        "tokens_per_second": round(result.figure.tokens_per_second),
        "commit": at,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }
    records[gpus.key] = {
        "kind": gpus.kind,
        "python": platform.python_version(),
        "driver": gpus.driver,
        **versions(("torch", "triton")),
        "lines": lines,
    }


def write(records: Records, file: Path) -> None:
    text = json.dumps(records, indent=1, ensure_ascii=False, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def page(records: Records) -> str:
    """The table of docs/results.md: of each GPU, the lines of the newest commit, and the rates."""
    rows = []
    for key, record in sorted(records.items()):
        lines = record["lines"]
        newest = max(lines.values(), key=lambda line: line["date"])
        here = {name: line for name, line in lines.items() if line["commit"] == newest["commit"]}
        failed = [name for name, line in here.items() if not line["passed"]]
        state = f"{len(here) - len(failed)} of {len(here)}"
        rates = [
            f"{lines[name]['tokens_per_second']:,}" if name in lines else "–" for name in RATES
        ]
        rows.append(
            [key, newest["commit"], newest["date"][:10], ", ".join([state, *failed]), *rates]
        )
    return table(["GPUs", "commit", "date", "lines that hold", *RATES.values()], rows)
