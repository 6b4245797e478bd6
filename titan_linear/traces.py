"""What the events of a trace of torch.profiler say: costs, busy time, communication that nothing hides. Collectives are
NCCL's kernels, copies and writes between GPUs, whatever streams they run on. What a run does between its steps, such as
a validation, is no part of them, and is left out (`stretches`)."""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PAUSE = "titan_linear: between steps"  # a range of the host
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = dict[str, Any]
Spans = list[tuple[float, float]]


class Cost(NamedTuple):
    name: str
    ms: float
    calls: int


class Summary(NamedTuple):
    steps: int  # of training that the trace holds; 0: it does not say
    launches: int  # kernels and copies
    span: float  # seconds between the first one's beginning and the last one's end, less the pauses
    busy: float  # seconds in which one of them ran
    communication: float  # seconds in which a collective ran
    exposed: float  # and nothing else did


def of_trace(events: Iterable[Event]) -> tuple[int, float, list[Cost]]:
    """Launches, the seconds in which one of them ran, and the ten largest costs of what ran on a GPU."""
    ran = on_device(events)
    return len(ran), length(union(map(span_of, ran))) / 1e6, costs(ran)


def summary(events: Sequence[Event]) -> Summary:
    """Of what ran on a GPU, between pauses."""
    parts = [ran for part in stretches(events) if (ran := on_device(part))]
    ran, spans = [e for part in parts for e in part], [union(map(span_of, part)) for part in parts]
    steps = {e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#")}
    busy, others = length(union(map(span_of, ran))), length(union(span_of(e) for e in ran if not communicates(e)))
    seconds = (
        sum(of_part[-1][1] - of_part[0][0] for of_part in spans), busy,
        length(union(span_of(e) for e in ran if communicates(e))), busy - others,
    )  # fmt: skip
    return Summary(len(steps), len(ran), *(us / 1e6 for us in seconds))


def stretches(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Those before, between and after a trace's pauses; of a trace without, as of other programs, all of them.

    An event belongs where the host was when it began it. A kernel's beginning is its launch: the host runs ahead of the
    device, on which a step's last kernels still run when the host is in the pause already.
    """
    timed = [e for e in events if e.get("ph") == "X"]
    pauses = union(span_of(e) for e in timed if e["name"] == PAUSE and e.get("cat") == "user_annotation")
    if not pauses:
        return [events]
    launched = {e["args"]["correlation"]: e["ts"] for e in timed if e.get("cat") in LAUNCHES and _correlated(e)}
    found: list[list[Event]] = [[] for _ in range(len(pauses) + 1)]
    for e in timed:
        begun = launched.get(e["args"]["correlation"], e["ts"]) if _correlated(e) else e["ts"]
        n = bisect_right(pauses, begun, key=lambda pause: pause[0])  # pauses that began before
        if not n or begun >= pauses[n - 1][1]:
            found[n].append(e)
    return found


def _correlated(event: Event) -> bool:
    """Whether it has a number that a launch and what it launched have in common."""
    return "correlation" in event.get("args", {})


def on_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ON_DEVICE and e.get("ph") == "X"]


def communicates(event: Event) -> bool:
    """By NCCL, by copies from one GPU's memory to another's, or written there (`ops/triton/puts.py`)."""
    name = event["name"]
    return "nccl" in name.lower() or "PtoP" in name or name == "put_kernel"


def span_of(event: Event) -> tuple[float, float]:
    """Beginning and end, µs."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """In order, without overlaps."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def costs(ran: Iterable[Event], rows: int = 10) -> list[Cost]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for e in ran:
        by_name[_short(e["name"])].append(e["dur"])
    return _largest(by_name, rows)


def own_costs(events: Iterable[Event], rows: int = 10) -> list[Cost]:
    """Operators of the host by their own time: that of operators inside them is theirs."""
    by_name: dict[str, list[float]] = defaultdict(list)
    threads: dict[Any, list[Event]] = defaultdict(list)
    for e in events:
        if e.get("cat") == "cpu_op" and e.get("ph") == "X":
            threads[e.get("pid"), e.get("tid")].append(e)
    for ops in threads.values():
        inside: list[tuple[float, str, int]] = []  # operators that have not ended: end, name, place of their time
        for e in sorted(ops, key=lambda e: (e["ts"], -e["dur"])):
            while inside and e["ts"] >= inside[-1][0]:
                inside.pop()
            if inside:
                _, outer, place = inside[-1]
                by_name[outer][place] -= e["dur"]
            by_name[e["name"]].append(e["dur"])
            inside.append((span_of(e)[1], e["name"], len(by_name[e["name"]]) - 1))
    return _largest(by_name, rows)


def _largest(by_name: dict[str, list[float]], rows: int) -> list[Cost]:
    found = (Cost(name, sum(each) / 1e3, len(each)) for name, each in by_name.items())
    return sorted(found, key=lambda cost: -cost.ms)[:rows]


def _short(name: str) -> str:
    """A kernel's name without what all have."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|\s*\(.*$", "", name)
    return name if len(name) <= 100 else name[:97] + "…"


def events_of(profile: torch.profiler.profile, keep: Path | None = None) -> list[Event]:
    """Those of a profile that has ended, and which is written to `keep` (.json or .json.gz)."""
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return read(path)


def read(path: Path) -> list[Event]:
    """The events of a Chrome trace. ValueError: the file holds none."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            found = json.load(file)["traceEvents"]
        if not isinstance(found, list) or not all(map(_is_event, found)):
            raise TypeError("traceEvents is no list of events")
        return found
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{path}' is no trace ({error}); give a .json or .json.gz that torch.profiler wrote, of a run those in "
            "profiling.save_traces_folder"
        ) from None


def _is_event(found: object) -> bool:
    """What is read of one, where it took time, is there."""
    return isinstance(found, dict) and (
        found.get("ph") != "X"
        or (isinstance(found.get("name"), str) and all(map(_is_time, (found.get("ts"), found.get("dur")))))
    )


def _is_time(found: object) -> bool:
    return isinstance(found, int | float) and math.isfinite(found)
