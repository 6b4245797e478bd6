"""The base of all hooks, and what it is told of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_linear.step.feed import FeedStats
from titan_linear.step.optimizer import Moment


@dataclass(frozen=True)
class StepResult:
    """What a step has shown, on this rank."""

    step: int  # from 1
    loss: float  # in the loss's unit
    grad_norm: float
    lr: float
    skipped: int  # steps of the run so far that were not finite
    finite: bool  # loss and norm; if not, the weights are those of the step before
    stops: bool  # the run ends with this step, for a signal
    fed: FeedStats
    losses: Tensor  # [micro-steps] float64, this rank's parts of the loss
    streams: list[tuple[int, ...]]  # of each micro-step
    seen: list[float]  # what telemetry asked for
    reports: dict[str, float]  # of the loss
    moment: Moment  # when the device had these numbers

    @property
    def has_labels(self) -> bool:
        """Whether any token has one; the loss means nothing without."""
        return self.fed.valid > 0

    @property
    def numbers(self) -> dict[str, float | None]:
        """What is reported of every step."""
        loss = self.loss if self.has_labels else None
        reports = {name: value if self.has_labels else None for name, value in self.reports.items()}
        return {
            "loss": loss,
            **reports,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped_steps": self.skipped,
        }


class Hook:
    """A hook is a context around all steps of a start, too."""

    def before_step(self, step: int) -> None:
        """A step begins; steps count from 1."""

    def after_step(self, done: StepResult) -> None:
        """Its numbers are known; nothing of the next one has been reported or saved yet."""

    def between_steps(self) -> AbstractContextManager[object]:
        """A context around a validation, a save, and what else takes time between two steps."""
        return nullcontext()

    def after_validation(
        self, step: int, loss: float, reports: dict[str, float], text: str
    ) -> None:
        """A validation ended with this loss, with what else the loss reports, and with this sample of
        the model, if one is asked for."""

    def after_evaluation(self, step: int, records: list[dict[str, Any]]) -> None:
        """An evaluation ended with these records (run/evaluate.py); rank 0 has them."""

    def after_save(self, step: int) -> None:
        """A checkpoint of this step is saved, or is being saved."""

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *raised: object) -> None:
        """raised: as for any context; all None after the last step."""
