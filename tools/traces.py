"""Events of a torch.profiler trace: how many ran on a GPU, and how long."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
Event = dict[str, Any]


def events_of(profile: torch.profiler.profile) -> list[Event]:
    """Read what ran on the device during a profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return on_device(events)


def on_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ON_DEVICE and e.get("ph") == "X"]


def busy(ran: Iterable[Event]) -> float:
    """Seconds in which at least one of them ran."""
    total, until = 0.0, 0.0
    for begin, duration in sorted((event["ts"], event["dur"]) for event in ran):
        end = begin + duration
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total / 1e6
