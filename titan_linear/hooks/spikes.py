"""Steps whose loss stands out, recorded with their streams in spikes.jsonl.

commands/batch.py reads that file. A step that is not finite ends the run, or is skipped:
training.on_nonfinite.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import torch.distributed as dist

from titan_linear.config import Training
from titan_linear.data import Streams
from titan_linear.distributed.ending import RunFailed
from titan_linear.distributed.groups import of_all_ranks
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.storage.files import Json
from titan_linear.storage.rundir import SPIKES, append_lines

# Most and fewest losses that a loss is compared with.
LAST = 128
LEAST = 16


class NonFinite(RunFailed):
    """A loss or gradient is NaN or infinite.

    Every rank raises it; the update left the weights unchanged.
    """


class Spikes(Hook):
    """Records steps whose loss is an outlier or not finite; ends the run after the latter
    if asked.

    Args:
        folder: the run's folder.
        sigmas: as in `Outliers`.
    """

    def __init__(self, folder: str, training: Training, streams: Streams, sigmas: float):
        self.folder = folder
        self.training = training
        self.streams = streams
        self.outliers = Outliers(sigmas)

    def after_step(self, done: StepResult) -> None:
        if (done.has_labels or not done.finite) and (
            spike := self.outliers.judge(done.loss, done.grad_norm)
        ):
            self._write(done, spike)
        if not done.finite and self.training.on_nonfinite == "stop":
            raise NonFinite(
                f"step {done.step}: loss = {done.loss}, gradient norm = {done.grad_norm}; {self._where(done)}. The "
                "weights are those of the step before; training.on_nonfinite = 'skip' goes past such steps"
            )

    def _write(self, done: StepResult, spike: Json) -> None:
        """Write the step's streams and their losses, of all ranks."""
        parts = zip(done.streams, done.losses.tolist(), strict=True)
        own = [MicroLoss(streams, self._weight(streams), loss) for streams, loss in parts]
        ranks = of_all_ranks(own, dist.group.WORLD)
        if dist.get_rank() == 0:
            write_spike(self.folder, done.step, spike, ranks)

    def _weight(self, streams: Sequence[int]) -> float:
        return sum(float(self.streams[i].columns["weights"].sum(dtype=float)) for i in streams)

    def _where(self, done: StepResult) -> str:
        """Return which ranks found a loss that is not finite, and on which streams."""
        parts = zip(done.streams, done.losses.tolist(), strict=True)
        bad = [stream for streams, loss in parts if not math.isfinite(loss) for stream in streams]
        ranks = of_all_ranks(bad, dist.group.WORLD)
        if any(ranks):
            return "; ".join(
                f"rank {r}: streams {', '.join(map(str, own))}"
                for r, own in enumerate(ranks)
                if own
            )
        # Only a gradient is not finite, so no stream can be blamed.
        size = self.training.global_batch_size
        first = (done.step - 1) * size
        return f"every loss is finite, a gradient is not; the step's streams are {first} to {first + size - 1}"


class MicroLoss(NamedTuple):
    """A rank's part of a micro-batch's loss."""

    streams: tuple[int, ...]
    # The weight of its labels.
    weight: float
    # This part of the step's loss: its terms over the step's weight.
    part: float


class Outliers:
    """Finds losses more than `sigmas` standard deviations above the mean of recent losses.

    The losses are the last ones of this start. With sigmas = 0, only losses that are not
    finite are found.
    """

    def __init__(self, sigmas: float):
        self.sigmas = sigmas
        self.last = deque[float](maxlen=LAST)

    def judge(self, loss: float, grad_norm: float) -> Json | None:
        """Return the fields to write about a step, or None. Ranks with the same numbers
        agree.
        """
        numbers = {"loss": loss, "grad_norm": grad_norm}
        if not all(map(math.isfinite, numbers.values())):
            return {"why": "not finite", **numbers}
        # Compare with the losses before this one, once there are enough of them.
        before = list(self.last)
        self.last.append(loss)
        if not self.sigmas or len(before) < LEAST:
            return None
        mean = fmean(before)
        sigma = pstdev(before)
        if loss <= mean + self.sigmas * sigma:
            return None
        return {"why": "outlier", **numbers, "mean": mean, "sigma": sigma}


def write_spike(folder: str, step: int, spike: Json, ranks: Iterable[Sequence[MicroLoss]]) -> None:
    """Append a line: the fields that `judge` returned, and the loss of every micro-batch.

    ranks: the micro-batches of each rank. A micro-batch's loss is summed over the ranks
    that share it.
    """
    # Collect the parts of each micro-batch from the ranks that share its streams.
    parts: dict[tuple[int, ...], list[MicroLoss]] = {}
    for micro_loss in (m for own in ranks for m in own):
        parts.setdefault(micro_loss.streams, []).append(micro_loss)
    # Parts are relative to the step's weight; losses are relative to the micro-batch's.
    total = sum(of[0].weight for of in parts.values())
    micro_batches = []
    for streams, of in sorted(parts.items()):
        weight = of[0].weight
        loss = sum(m.part for m in of) * total / weight if weight else 0.0
        micro_batches.append({"streams": streams, "weight": weight, "loss": loss})
    append_lines(Path(folder) / SPIKES, [{"step": step, **spike, "micro_batches": micro_batches}])
