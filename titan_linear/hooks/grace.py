"""Stops with a deadline: after a signal the machine has checkpoint.grace_seconds left.

    step  |-- micro-step --|-- micro-step --|-- micro-step --|-- update --| save
          ^ask             ^ask             ^ask                          ^ask

Weights and moments change only in the update. Until then the state is exactly the state
after the previous step, and the work done in this step can be discarded. Before each
micro-step, and each batch of a validation, all ranks ask each other whether one has
received a signal. If so, and the rest of the step and a save would take longer than the
time left, they abandon the step and save at once. Otherwise the step is completed and saved
as without a deadline. This costs a few bytes between the hosts, while devices compute.

Python handles a signal only when the host is done waiting for the device. So the time
counts from when the ranks last asked and there was no signal.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_linear.distributed.process import StopSignal
from titan_linear.hooks.hook import Hook, StepResult

# Share of grace_seconds that a save is assumed to take until one has been measured.
UNKNOWN = 0.5


class StepAbandoned(Exception):
    """Work in progress is discarded, on every rank; the message gives the reason.

    The state is the state at the end of the last step.
    """


@dataclass(eq=False)
class Grace(Hook):
    """The time left for a stop. Every rank calls every method, in the same order.

    Args:
        seconds: time after a signal; 0: as long as it takes, and ranks do not ask each
            other.
        host: a group of all ranks, with gloo on the hosts.
        micro_steps: number of micro-steps in a step.
        save_seconds: returns the measured time of a save; 0: none was measured.
    """

    seconds: int
    stop: StopSignal
    host: dist.ProcessGroup | None
    micro_steps: int
    save_seconds: Callable[[], float]
    # Time of the last step.
    step_seconds: float = math.inf
    # The first step compiles and connects, so its time does not predict the others'.
    first: bool = True
    warned: bool = False

    def __post_init__(self) -> None:
        # When the step began, and when the ranks last asked and there was no signal.
        self.begun = self.clear = time.monotonic()

    def before_step(self, step: int) -> None:
        self.begun = time.monotonic()

    def after_step(self, done: StepResult) -> None:
        if not self.first:
            self.step_seconds = time.monotonic() - self.begun
        self.first = False
        if (warning := self.warning()) and dist.get_rank() == 0:
            print(warning)

    def ask(self, done: int) -> None:
        """Ask all ranks for a signal, before a micro-step.

        done: number of this step's micro-steps that are done.

        Raises:
            StepAbandoned: the run stops here.
        """
        if not self._asks:
            return
        # Agree on the signal and on the longest times of any rank.
        now = time.monotonic()
        rest = max(0.0, self.step_seconds - (now - self.begun))
        signal, since, rest, save = self._ask(now - self.clear, rest, self._save())
        # Before the first micro-step nothing is lost. Later, abandon the step if time is
        # short.
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
        """Ask all ranks for a signal, before a batch of a validation.

        A validation is not completed after a signal.

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
        """Return the signal of any rank, or 0, and the longest of all ranks' times."""
        asked = torch.tensor([self.stop.received, *seconds], dtype=torch.float64)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.host)
        return asked.tolist()

    def warning(self) -> str:
        """Return a warning, once, if a signal may come too late for a save; else ""."""
        if not self.seconds or self.warned or math.isinf(self.step_seconds):
            return ""
        # In the worst case a signal comes just after the ranks have asked.
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
