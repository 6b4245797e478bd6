"""The base of all hooks, and the record of a step that they get."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from titan_linear.config import Config
from titan_linear.config.registry import TABLES
from titan_linear.run.session import Session
from titan_linear.step.feed import FeedStats
from titan_linear.step.optimizer import Moment


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on this rank."""

    step: int  # from 1
    # In the loss's unit.
    loss: float
    grad_norm: float
    lr: float
    # Steps of the run so far that were not finite.
    skipped: int
    # Whether the loss and the norm are; if not, the update left the weights unchanged.
    finite: bool
    # The run ends with this step, because of a signal.
    stops: bool
    fed: FeedStats
    # [micro-steps] float64, this rank's parts of the loss.
    losses: Tensor
    # The streams of each micro-step.
    streams: list[tuple[int, ...]]
    # The numbers that telemetry asked for.
    seen: list[float]
    # The loss's further reports, by name.
    reports: dict[str, float]
    # When the device had these numbers.
    moment: Moment

    @property
    def has_labels(self) -> bool:
        """Whether any token has a label; the loss means nothing otherwise."""
        return self.fed.valid > 0

    @property
    def numbers(self) -> dict[str, float | None]:
        """Return the numbers that are reported of every step."""
        losses: dict[str, float | None] = {"loss": self.loss, **self.reports}
        if not self.has_labels:
            losses = dict.fromkeys(losses)
        return {
            **losses,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped_steps": self.skipped,
        }


class Hook:
    """A hook, which is also a context around all steps of a start.

    Each rank of a run has an instance of every registered hook.
    """

    chosen_by = "hook"
    name: ClassVar[str]

    def __init__(self, config: Config, session: Session):
        self.config = config
        self.session = session

    def before_step(self, step: int) -> None:
        """Called when a step begins; steps count from 1."""

    def after_step(self, done: StepResult) -> None:
        """Called when the step's numbers are known.

        Nothing of the next step has been reported or saved yet.
        """

    def between_steps(self) -> AbstractContextManager[object]:
        """Return a context around a validation, a save, or other work between two steps."""
        return nullcontext()

    def after_validation(
        self, step: int, loss: float, reports: dict[str, float], text: str
    ) -> None:
        """Called after a validation with its loss and the loss's further reports.

        `text` is a sample of the model, if one is asked for.
        """

    def after_evaluation(self, step: int, records: list[dict[str, Any]]) -> None:
        """Called after an evaluation with its records (run/evaluate.py), which rank 0 has."""

    def after_save(self, step: int) -> None:
        """Called when a checkpoint of this step is saved, or is being saved."""

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave the context. `raised` is as for any context: all None after the last step."""


# Hooks that users' modules have registered.
HOOKS: dict[str, type[Hook]] = TABLES[Hook.chosen_by]
