"""Reports of a run's steps, on rank 0: their numbers, this machine's, validations,
telemetry.
"""

import resource
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from titan_linear.config import Config
from titan_linear.hooks.hook import StepResult
from titan_linear.hooks.metrics import GIB, IntervalWork, MetricsLogger
from titan_linear.hooks.telemetry import Telemetry
from titan_linear.run.session import Session
from titan_linear.step.feed import FeedStats
from titan_linear.step.flops import peak_tflops, training_flops


class Report(MetricsLogger):
    """Writes a line for the first step of a start, every metrics.log_freq-th, and the last.

    Args:
        step: steps of the run before this start.
        numbers: returns further numbers of a line.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        step: int,
        telemetry: Telemetry,
        numbers: Callable[[], dict[str, float]],
    ):
        self.config = config
        self.model = session.model.config
        self.dims = session.dims
        self.telemetry = telemetry
        self.numbers = numbers
        self.first = step + 1
        self.fed = FeedStats()
        super().__init__(
            config,
            session.device,
            start_step=step,
            start_tokens=config.training.tokens_at(step),
            gpus=self.dims.mesh.size(),
            peak_tflops=peak_tflops(
                config.metrics.peak_tflops, config.training.mixed_precision_param, session.device
            ),
        )

    def after_step(self, done: StepResult) -> None:
        self.fed += done.fed
        steps = self.config.training.steps
        freq = self.config.metrics.log_freq
        if is_logged(done.step, steps, freq) or done.step == self.first or done.stops:
            self._log(done)
        if self.telemetry.seen:
            self.log_telemetry(done.step, self.telemetry.seen)

    def _log(self, done: StepResult) -> None:
        """Log this step's numbers, and the work since the last line."""
        t = self.config.training
        fed = self.fed
        self.fed = FeedStats()
        # Some numbers exist for some runs only.
        more = (
            {"data_seconds": fed.seconds / fed.steps}
            | reserved_memory()
            | clock_and_power(self.device)
        )
        # Only models with softmax layers count pairs of tokens.
        if fed.most_pairs:
            more["work_balance"] = fed.work_balance(self.dims.dp * self.dims.cp)
        if fed.apart != fed.documents.tokens:
            more["share_computed"] = fed.documents.tokens / fed.apart
        if t.seq_len_schedule:
            more["seq_len"] = t.seq_len_at(done.step)
        self.log(
            done.step,
            moment=done.moment,
            tokens=t.tokens_at(done.step),
            memory_gib=peak_memory_gib(),
            work=IntervalWork(training_flops(self.model, fed.documents), fed.valid, fed.waited),
            **done.numbers,
            **more,
            **self.numbers(),
        )


def is_logged(step: int, steps: int, freq: int) -> bool:
    """Whether `step` (from 1) of `steps` is reported: the first, every freq-th, the last."""
    return step in (1, steps) or step % freq == 0


def peak_memory_gib() -> float:
    """Return this process's peak memory: allocated on its GPU if there is one, else
    resident.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def reserved_memory() -> dict[str, float]:
    """Return the memory of this process's GPU that PyTorch has reserved, and fragmentation.

    The first is the peak, in GiB. Fragmentation is the share of the currently reserved
    memory that is idle in blocks partly in use. Empty on a CPU.
    """
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    held = stats.get("reserved_bytes.all.current", 0)
    idle = stats.get("inactive_split_bytes.all.current", 0)
    return {
        "memory_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "memory_fragmentation": idle / max(held, 1),
    }


def clock_and_power(device: torch.device) -> dict[str, float]:
    """Return the SM clock (MHz) and the power (W) of this process's GPU.

    Empty on a CPU, without nvidia-ml-py, and if the driver does not provide them.
    """
    if device.type != "cuda" or not find_spec("pynvml"):
        return {}
    import pynvml

    try:
        return {
            "sm_clock_mhz": torch.cuda.clock_rate(device),
            "power_watts": torch.cuda.power_draw(device) / 1e3,
        }
    except pynvml.NVMLError:
        return {}
