"""Steps whose loss stands out, written down with their streams: spikes.jsonl, which tools/show_batch.py reads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from titan_linear.storage.files import open_own
from titan_linear.storage.rundir import SPIKES, json_line

LAST, LEAST = 128, 16  # most and fewest losses that one is compared with


class MicroLoss(NamedTuple):
    """A rank's part of a micro-batch's loss."""

    streams: tuple[int, ...]
    num_labels: int
    part: float  # of the step's loss: nats over the step's tokens


class Outliers:
    """Finds losses more than `sigmas` standard deviations above the mean of the last ones of this start.

    sigmas: 0: only losses that are not finite.
    """

    def __init__(self, sigmas: float):
        self.sigmas, self.last = sigmas, deque[float](maxlen=LAST)

    def judge(self, loss: float, grad_norm: float) -> dict[str, Any] | None:
        """What to write about a step, or None. Ranks with the same numbers agree."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return {"why": "not finite", "loss": loss, "grad_norm": grad_norm}
        before = list(self.last)
        self.last.append(loss)
        if not self.sigmas or len(before) < LEAST:
            return None
        mean, sigma = fmean(before), pstdev(before)
        if loss <= mean + self.sigmas * sigma:
            return None
        return {"why": "outlier", "loss": loss, "grad_norm": grad_norm, "mean": mean, "sigma": sigma}


def write_spike(folder: str, step: int, spike: dict[str, Any], ranks: Iterable[Sequence[MicroLoss]]) -> None:
    """Append a line: what `judge` returned, and nats per token of every micro-batch, summed over ranks that share it.

    ranks: the micro-batches of each rank.
    """
    parts: dict[tuple[int, ...], list[MicroLoss]] = {}
    for micro_loss in (m for own in ranks for m in own):
        parts.setdefault(micro_loss.streams, []).append(micro_loss)
    tokens = sum(of[0].num_labels for of in parts.values())
    micro_batches = []
    for streams, of in sorted(parts.items()):
        num_labels = of[0].num_labels
        loss = sum(m.part for m in of) * tokens / num_labels if num_labels else 0.0
        micro_batches.append({"streams": streams, "tokens": num_labels, "loss": loss})
    line = {"step": step, **spike, "micro_batches": micro_batches}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open_own(Path(folder) / SPIKES, "a") as file:
        file.write(json_line(line))
