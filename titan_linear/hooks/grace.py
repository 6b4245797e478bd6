"""Stops with a deadline: after a signal the machine may be there for only checkpoint.grace_seconds more.

    step  |-- micro-step --|-- micro-step --|-- micro-step --|-- update --| save
          ^ask             ^ask             ^ask                          ^ask

Weights and moments change only in the update, so until then the state is exactly that of the step before, and what has
been computed of a step can be given up. Before each micro-step (and each batch of a validation) all ranks ask each
other whether one has got a signal. If so, and the rest of the step and a save would take longer than the time left,
they give the step up and save at once; otherwise it is completed and saved as without a deadline. This costs a few
bytes between the hosts, while devices compute.

Python handles a signal only when the host is done waiting for the device, so the time counts from when the ranks last
asked and there was no signal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from titan_linear.distributed.process import StopSignal
from titan_linear.hooks.hook import Hook, StepResult

UNKNOWN = 0.5  # of the time: assumed for a save until one has been done


class StepAbandoned(Exception):
    """What is being computed is given up, on every rank; the state is that of the last step's end. The message says
    why."""


class Grace(Hook):
    """The time left for a stop. Every rank calls every method, in the same order.

    Args:
        seconds: time after a signal; 0: as long as it takes, and ranks do not ask each other.
        host: a group of all ranks, with gloo on the hosts.
        micro_steps: number of them in a step.
        save_seconds: gives the measured time of a save; 0: none was measured.
    """

    def __init__(
        self,
        seconds: int,
        stop: StopSignal,
        host: dist.ProcessGroup | None,
        micro_steps: int,
        save_seconds: Callable[[], float],
    ):
        self.seconds, self.stop, self.host = seconds, stop, host
        self.micro_steps, self.save_seconds = micro_steps, save_seconds
        self.step_seconds = math.inf  # of the last step
        self.begun = self.clear = time.monotonic()  # when the step began; when there was no signal
        # the first step compiles and connects: its time tells nothing of the others'
        self.first = True
        self.warned = False

    def before_step(self, step: int) -> None:
        self.begun = time.monotonic()

    def after_step(self, done: StepResult) -> None:
        if not self.first:
            self.step_seconds = time.monotonic() - self.begun
        self.first = False
        if (warning := self.warning()) and dist.get_rank() == 0:
            print(warning)

    def ask(self, done: int) -> None:
        """Ask all ranks for a signal, before a micro-step. done: number of this step's micro-steps that are done.

        Raises:
            StepAbandoned: the run stops here.
        """
        if not self._asks:
            return
        now = time.monotonic()
        rest = max(0.0, self.step_seconds - (now - self.begun))
        signal, since, rest, save = self._ask(now - self.clear, rest, self._save())
        if not signal:
            self.clear = now
        elif not done or since + rest + save > self.seconds:
            self.stop.agreed = int(signal)
            raise StepAbandoned(
                f"the rest of the step begun would take {rest:.0f} s and a save {save:.0f} s"
                if done
                else ""
            )

    def ask_validating(self) -> None:
        """Ask all ranks, before a batch of a validation: after a signal it is not completed.

        Raises:
            StepAbandoned: the run stops here.
        """
        if self._asks and (signal := self._ask()[0]):
            self.stop.agreed = int(signal)
            raise StepAbandoned("validation is not completed")

    @property
    def _asks(self) -> bool:
        return bool(self.seconds) and not self.stop.agreed

    def _ask(self, *seconds: float) -> list[float]:
        """The signal of any rank, or 0, and the longest of all ranks' times."""
        asked = torch.tensor([self.stop.received, *seconds], dtype=torch.float64)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.host)
        return asked.tolist()

    def warning(self) -> str:
        """A warning, once, if a signal may come too late for a save; else ""."""
        if not self.seconds or self.warned or math.isinf(self.step_seconds):
            return ""
        longest = self.step_seconds / self.micro_steps
        save = self._save()
        if self.seconds >= longest + save:
            return ""
        self.warned = True
        assumed = "" if self.save_seconds() else " (assumed: none was done yet)"
        return (
            f"warning: checkpoint.grace_seconds = {self.seconds} may be too short for a save after a signal: a "
            f"micro-step takes {longest:.0f} s and a save {save:.0f} s{assumed}; without one the run resumes from its "
            "newest checkpoint (checkpoint.interval)"
        )

    def _save(self) -> float:
        return self.save_seconds() or UNKNOWN * self.seconds
