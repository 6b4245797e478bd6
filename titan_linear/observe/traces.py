"""Read traces of torch.profiler: costs, busy time, exposed communication. Communication is NCCL's kernels, and copies
and writes between GPUs, on whatever CUDA stream they run. What a run does between its steps, such as a validation, is
left out (`stretches`)."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PAUSE = "titan_linear: between steps"  # name of a range on the host
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
    span: float  # seconds from the start of the first kernel or copy to the end of the last, less the pauses
    exposed: float  # seconds in which only collectives ran


def of_trace(events: Iterable[Event]) -> tuple[int, float, list[Cost]]:
    """Number of launches, seconds in which at least one of them ran, and the ten largest costs on a GPU."""
    ran = on_device(events)
    return len(ran), covered(ran) / 1e6, costs(ran)


def summary(events: Sequence[Event]) -> Summary:
    """Summarise what ran on a GPU, outside of pauses."""
    parts = [ran for part in stretches(events) if (ran := on_device(part))]
    ran = [event for part in parts for event in part]
    steps = {e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#")}
    spans = [union(map(span_of, part)) for part in parts]
    return Summary(
        steps=len(steps),
        span=sum(span[-1][1] - span[0][0] for span in spans) / 1e6,
        exposed=(covered(ran) - covered(e for e in ran if not communicates(e))) / 1e6,
    )


def stretches(events: Sequence[Event]) -> list[Sequence[Event]]:
    """A trace's events before, between and after its pauses. Traces without pauses, as of other programs, are one part.

    An event belongs to the part in which the host began it. For a kernel this is its launch: the host runs ahead of the
    device, on which a step's last kernels still run when the host is already in the pause.
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
    """Whether the event has the id that a launch shares with what it launched."""
    return "correlation" in event.get("args", {})


def on_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ON_DEVICE and e.get("ph") == "X"]


def communicates(event: Event) -> bool:
    """Whether it is an NCCL kernel or a copy between GPUs."""
    name = event["name"]
    return "nccl" in name.lower() or "PtoP" in name


def span_of(event: Event) -> tuple[float, float]:
    """Start and end, in µs."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Merge spans: in order, without overlaps."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def covered(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of them ran."""
    return sum(end - begin for begin, end in union(map(span_of, events)))


def costs(ran: Iterable[Event], rows: int = 10) -> list[Cost]:
    """The largest costs by name: times added up, over all streams."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for e in ran:
        by_name[_short(e["name"])].append(e["dur"])
    found = (Cost(name, sum(each) / 1e3, len(each)) for name, each in by_name.items())
    return sorted(found, key=lambda cost: -cost.ms)[:rows]


def _short(name: str) -> str:
    """A kernel's name without the parts that all names share."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|\s*\(.*$", "", name)
    return name if len(name) <= 100 else name[:97] + "…"


def events_of(profile: torch.profiler.profile, keep: Path | None = None) -> list[Event]:
    """The events of a profile that has ended; it is written to `keep` (.json or .json.gz), if given."""
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return read(path)


def read(path: Path) -> list[Event]:
    """The events of a Chrome trace, .json or .json.gz."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)["traceEvents"]
