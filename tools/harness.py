"""Shared parts of the benchmarks: processes, timing, tables, and where and when figures are measured."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.commands import line, table
from titan_linear.distributed.groups import of_all_ranks
from titan_linear.distributed.process import own_device
from titan_linear.step.optimizer import Moment

ROOT = Path(__file__).parents[1]
COMMIT = "TITAN_LINEAR_COMMIT"  # environment variable: the commit, where there is no git
PACKAGES = ("torch", "triton", "flash-attn-4", "fla-core", "tilelang", "flash-qla")
GIB = 2**30
ROUNDS = 40
WARMUP = 2
FORWARD = "forward"
BOTH = "forward + backward"
TIMES = dict.fromkeys((FORWARD, BOTH, "host"), ".2f")  # columns
Inputs = dict[str, Tensor]
Row = dict[str, Any]
Columns = Mapping[str, str]  # title: the field of a row → format


# --- Arguments and processes -----------------------------------------------------------------------------------------


def split_keys(argv: list[str]) -> tuple[list[str], list[str]]:
    """A tool's own arguments, and the run's keys after `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def be_alone() -> None:
    """Without torchrun, describe a group of this process alone in the environment."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port


def is_first() -> bool:
    """Whether this is the first process, which prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str, **options: Any) -> None:
    if is_first():
        print(text, flush=True, **options)


def largest(*numbers: float) -> list[float]:
    """The largest of each number over all ranks."""
    ranks = of_all_ranks(numbers, dist.group.WORLD) if dist.is_initialized() else [numbers]
    return list(map(max, zip(*ranks)))


# --- Timing ----------------------------------------------------------------------------------------------------------


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timing(NamedTuple):
    """Seconds of the slowest rank."""

    device: float  # the median, from the first kernel to the last
    host: float  # to queue the work; the least of all rounds, since others use the host too


class Stopwatch:
    """Times work on a device, with a cold cache and the host ahead, as in a training step.

    Before each round a quarter of a GPU's memory is written, which takes some milliseconds on any GPU.
    """

    def __init__(self, device: torch.device | None = None):
        self.device = device or own_device()
        self.gpu = self.device.type == "cuda"
        size = torch.cuda.get_device_properties(self.device).total_memory // 4 if self.gpu else 1
        self.flush = torch.empty(size, dtype=torch.uint8, device=self.device)

    def head_start(self) -> None:
        """Let ranks start together, and keep the device busy while the host queues work."""
        synchronise()
        if dist.is_initialized():
            dist.barrier()
        self.flush.zero_()

    def time(self, work: Callable[[], object], rounds: int = ROUNDS) -> Timing:
        """Time work on all ranks, which all call this."""
        for _ in range(WARMUP):
            work()
        seconds = []
        host = []
        for _ in range(rounds):
            self.head_start()
            begin = Moment(self.device)
            work()
            end = Moment(self.device)
            seconds.append(end.since(begin))
            host.append(end.time - begin.time)
        return Timing(*largest(median(seconds), min(host)))


class TimedFunction:
    """A function on given inputs, whose forward pass, and forward and backward, are timed.

    Args:
        fn: called with the inputs by name; gives a tensor.
    """

    def __init__(self, fn: Callable[..., Tensor], x: Inputs):
        # Inputs are leaves; the output's gradient is drawn once.
        inputs = {name: t.detach().requires_grad_() for name, t in x.items()}
        self.fn = partial(fn, **inputs)
        self.leaves = [*inputs.values()]
        self.output = self.fn().detach()
        self.dy = torch.randn_like(self.output)

    def forward(self) -> None:
        with torch.no_grad():
            self.fn()

    def both(self) -> None:
        with torch.autograd.set_multithreading_enabled(False):  # as in the trainer
            torch.autograd.grad(self.fn(), self.leaves, self.dy)

    def times(self, watch: Stopwatch) -> Row:
        """Milliseconds on the GPU, and of the host to queue both passes."""
        forward = watch.time(self.forward)
        both = watch.time(self.both)
        times = {FORWARD: forward.device, BOTH: both.device, "host": both.host}
        return {name: 1e3 * seconds for name, seconds in times.items()}

    def peak(self) -> float:
        """The most GiB above the inputs."""
        self.both()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        return (torch.cuda.max_memory_allocated() - before) / GIB


# --- Where and when --------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """Run a command and return what it prints; nothing if it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except FileNotFoundError:
        return ""


def commit() -> str:
    """The commit of this code, with "+" if files differ from it."""
    head = output_of("git", "rev-parse", "--short", "HEAD")
    changed = output_of("git", "status", "--porcelain", "--", ".", ":!docs/results")
    return f"{head}{'+' if changed else ''}" if head else os.environ.get(COMMIT, "unknown")


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Packages that are installed."""
    return {found.name: found.version for found in distributions() if found.name in names}


def header() -> str:
    """Where, when and with what figures are measured."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    packages = [f"{name} {version}" for name, version in sorted(versions().items())]
    return ", ".join([where, str(date.today()), f"commit {commit()}", *packages])


# --- Tables ----------------------------------------------------------------------------------------------------------


def cells(columns: Columns, row: Row) -> list[str]:
    """A row's figures as text, "–" for None and for what it lacks."""
    texts = []
    for name, form in columns.items():
        texts.append("–" if row.get(name) is None else format(row[name], form))
    return texts


class Table:
    """A table whose rows the first process prints as they come."""

    def __init__(self, columns: Columns):
        self.columns = columns
        self.rows: list[Row] = []
        self.measured = header()
        say(f"{self.measured}\n\n{table([*columns], [])}")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(line(cells(self.columns, row)))

    def write(self, file: str, **about: Any) -> None:
        """Write all figures to a JSON file."""
        if is_first():
            found = {"measured": self.measured, **about, "rows": self.rows}
            Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
