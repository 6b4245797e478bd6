"""Traces of the PyTorch profiler, one every `profiling.profile_freq` steps."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from titan_linear.config import Config


class _Nothing:
    """What `profiler` gives where no trace is wanted."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def step(self) -> None:
        pass


def profiler(config: Config) -> Any:
    """A context whose `step()` is called after every training step. Each rank writes its own Chrome traces."""
    p = config.profiling
    if not p.enable_profiling:
        return _Nothing()
    folder, rank = Path(config.job.dump_folder) / p.save_traces_folder, os.environ["RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    active, warmup = 1, min(3, p.profile_freq - 1)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=p.profile_freq - warmup - active, warmup=warmup, active=active),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(folder / f"rank{rank}_step{trace.step_num}.json")),
    )
