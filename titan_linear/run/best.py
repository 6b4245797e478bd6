"""The lowest validation loss of a run: which checkpoint to keep, and when to end early."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from titan_linear.config import Config, Validation
from titan_linear.storage.rundir import METRICS, MetricsLine, json_lines


class Validated(NamedTuple):
    """A validation of a run."""

    step: int
    # Nats per token.
    loss: float


class ValidationLine(MetricsLine):
    """A line of metrics; the loss is None if it is not finite, or if the line is a step's."""

    validation_loss: float | None = None


class LowestLoss:
    """The validation with the lowest loss among the validations of a run so far.

    Args:
        earlier: the validations before this start, in order.
    """

    def __init__(self, validation: Validation, earlier: Iterable[Validated] = ()):
        self.patience = validation.patience
        self.step = 0
        self.loss = math.inf
        # Validations since then.
        self.since = 0
        for validated in earlier:
            self.judge(validated)

    @classmethod
    def so_far(cls, config: Config, step: int) -> "LowestLoss":
        """Read the metrics in the run's folder, up to this step."""
        lines = json_lines(Path(config.job.dump_folder) / METRICS, ValidationLine)
        earlier = [
            Validated(line.step, line.validation_loss)
            for line in lines
            if line.validation_loss is not None and line.step <= step
        ]
        return cls(config.validation, earlier)

    def judge(self, validated: Validated) -> None:
        self.since += 1
        if validated.loss < self.loss:
            self.step, self.loss = validated
            self.since = 0

    @property
    def ends_run(self) -> bool:
        """Whether the loss has not fallen in validation.patience validations in a row."""
        return 0 < self.patience <= self.since
