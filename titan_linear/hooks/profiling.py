"""Traces of the PyTorch profiler and snapshots of a GPU's memory.

Traces are made every `profiling.profile_freq` steps, snapshots on request.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from titan_linear.config import Profiling
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.storage.files import write_whole

RECORDING = (torch.profiler.ProfilerAction.RECORD, torch.profiler.ProfilerAction.RECORD_AND_SAVE)
# Latest allocations and frees that a memory snapshot holds.
EVENTS = 100_000


class Profiler(Hook):
    """Writes Chrome traces of each rank, each with a table of its largest costs.

    Args:
        run: the run's folder.
        done: steps of the run before this start.
        settle: waits for the collective that the host has begun for the next step. A
            collective that gloo completes after the profiler has stopped writes to freed
            memory.
        between_steps: the trainer's context in which a trace is ended and written.
    """

    def __init__(
        self,
        run: str,
        profiling: Profiling,
        done: int,
        settle: Callable[[], None],
        between_steps: Callable[[], ExitStack],
    ):
        self.done = done
        self.settle = settle
        self.between = between_steps
        self.keys = p = profiling
        self.folder = Path(run) / p.save_traces_folder
        self.rank = os.environ["RANK"]
        self.folder.mkdir(parents=True, exist_ok=True)
        # Each cycle of profile_freq steps ends with the warm-up and the recorded steps.
        active = p.profiler_active
        warmup = min(p.profiler_warmup, p.profile_freq - p.profiler_active)
        schedule = torch.profiler.schedule(
            wait=p.profile_freq - warmup - active,
            warmup=warmup,
            active=active,
            repeat=p.profile_count,
        )
        # PyTorch warns that a trace has only its own steps, which is intended.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        self.profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        # Steps since the last trace, and number of traces written.
        self.recorded = 0
        self.traces = 0

    def __enter__(self) -> Profiler:
        self.profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is not None:
            # The profiler would wait for the device, which may wait for a rank that has
            # failed.
            return
        self.profile.__exit__(*raised)
        # Tell the user if the run was too short for a trace.
        if self.rank == "0" and not self.traces:
            p = self.keys
            first = p.profile_freq - p.profiler_active + 1
            print(
                f"no trace was written: the first begins with step {first} of a start (profiling.profile_freq = "
                f"{p.profile_freq}), and this run ended sooner",
            )

    def after_step(self, done: StepResult) -> None:
        # The step that completes a trace also writes it, in a pause of the steps' time.
        self.settle()
        self.recorded += self.profile.current_action in RECORDING
        writes = self.profile.current_action == torch.profiler.ProfilerAction.RECORD_AND_SAVE
        with self.between() if writes else nullcontext():
            self.profile.step()

    def _write(self, trace: torch.profiler.profile) -> None:
        """Write a trace, if it has steps.

        A trace that the run's end leaves empty would have the name of the trace before it.
        """
        if not self.recorded:
            return
        self.recorded = 0
        self.traces += 1
        path = self.folder / f"rank{self.rank}_step{self.done + trace.step_num}.json"
        # If the path were a link, PyTorch would write through it.
        path.unlink(missing_ok=True)
        trace.export_chrome_trace(str(path))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        costs = trace.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=30)
        write_whole(path.with_suffix(".txt"), costs)


class MemorySnapshots(Hook):
    """Inside `with`, SIGUSR1 asks this process for a snapshot of its GPU's memory.

    It is written after a step. With profiling.enable_memory_snapshot a snapshot has the
    latest allocations and the places in the code where they were made. One is then also
    written when memory runs out: by the allocator's observer, before the error unwinds the
    stack and so frees memory. Without it, a snapshot has only the current allocations.
    https://pytorch.org/memory_viz shows snapshots.
    """

    def __init__(self, run: str, profiling: Profiling):
        self.folder = Path(run) / profiling.save_memory_snapshot_folder
        self.history = profiling.enable_memory_snapshot
        self.asked = False

    def __enter__(self) -> MemorySnapshots:
        if self.history and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=EVENTS)
            own: Any = torch._C
            # The observer stays for the life of the process: it cannot be detached.
            own._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self.previous = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self.previous)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.asked = True

    def after_step(self, done: StepResult) -> None:
        if self.asked:
            self.asked = False
            self._write(f"step{done.step}", sys.stdout)

    def _out_of_memory(self, device: int, wanted: int, allocated: int, free: int) -> None:
        """Write a snapshot. An OSError is printed, not raised: it would hide the
        allocator's error.
        """
        try:
            self._write("out_of_memory", sys.stderr)
        except OSError as error:
            print(
                f"rank {os.environ['RANK']}: no snapshot of the GPU's memory: {error}",
                file=sys.stderr,
            )

    def _write(self, name: str, said: TextIO) -> None:
        """Write a snapshot of this process's GPU into the run's folder, and print its path."""
        rank = os.environ["RANK"]
        line = "there is no GPU, and no snapshot of its memory"
        if torch.cuda.is_available():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank{rank}_{name}.pickle"
            path.unlink(missing_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            line = f"'{path}' is a snapshot of the GPU's memory"
        print(f"rank {rank}: {line}", file=said)
