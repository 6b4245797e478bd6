"""What traces of torch.profiler show of a GPU: busy time and exposed communication. Communication is NCCL's kernels,
and copies and writes between GPUs, on whatever CUDA stream they run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
Event = dict[str, Any]


def events_of(profile: torch.profiler.profile) -> list[Event]:
    """What ran on the device during a profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return on_device(events)


def on_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ON_DEVICE and e.get("ph") == "X"]


def communicates(event: Event) -> bool:
    """Whether it is an NCCL kernel or a copy between GPUs."""
    name = event["name"]
    return "nccl" in name.lower() or "PtoP" in name


def span_of(event: Event) -> tuple[float, float]:
    """Start and end, in µs."""
    return event["ts"], event["ts"] + event["dur"]


def busy(ran: Iterable[Event]) -> float:
    """Seconds in which at least one of them ran."""
    total, until = 0.0, 0.0
    for begin, end in sorted(map(span_of, ran)):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total / 1e6


def exposed(ran: Iterable[Event]) -> float:
    """Seconds in which only collectives ran."""
    ran = list(ran)
    return busy(ran) - busy(e for e in ran if not communicates(e))
