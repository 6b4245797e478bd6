"""Steps that compile: the first ones, and the first after a change of the streams' length.

They may take longer than the other steps, which should compile nothing.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titan_linear.config import Comm, Training
from titan_linear.distributed.groups import set_timeout, without_timeout
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.run.session import Session


class Compilation(Hook):
    """Gives the ranks time to compile, and warns of layers that are compiled again."""

    def __init__(
        self,
        training: Training,
        comm: Comm,
        session: Session,
    ):
        self.training = training
        self.comm = comm
        self.host = session.host
        self.dims = dims = session.dims
        compiled = session.options.compile.enable
        # The number of rows that reach a rank's experts varies, so the second pass compiles
        # for any number.
        self.first_steps = 2 if compiled and dims.ep > 1 else 1
        # Number of steps that may still compile.
        self.left = self.first_steps
        # Layers compile as one graph only on GPUs without expert parallelism. On a CPU,
        # operators are PyTorch code. Around exchanges of experts' rows, layers are in parts
        # by design.
        whole = dims.mesh.device_type == "cuda" and dims.ep == 1
        self.graphs = Graphs(self.first_steps, whole) if compiled else None

    def changes_length(self, step: int) -> bool:
        """Whether streams of this step have another length than in the step before."""
        t = self.training
        return (
            bool(t.seq_len_schedule) and step > 1 and t.seq_len_at(step - 1) != t.seq_len_at(step)
        )

    def before_step(self, step: int) -> None:
        if not self.changes_length(step):
            return
        # Compiling takes longer than a step's time-out allows: use the longer one.
        if dist.get_rank() == 0:
            before, now = (self.training.seq_len_at(n) for n in (step - 1, step))
            print(f"from step {step} on streams have {now} tokens (before: {before})")
        set_timeout(self.dims.groups, timedelta(seconds=self.comm.init_timeout_seconds))
        self.left = self.first_steps
        if self.graphs:
            # Otherwise the length would become dynamic, or there would be too many graphs
            # to keep.
            torch.compiler.reset()
            self.graphs.forget()

    def after_step(self, done: StepResult) -> None:
        self._look("a step that telemetry looks into" if done.seen else "training", done.step)
        self.left -= 1
        # From now on everything is compiled and connected: use the steps' time-out again.
        if self.left == 0:
            # This is a barrier of the hosts.
            dist.all_reduce(torch.zeros(1))
            set_timeout(self.dims.groups, self._timeout)

    def after_validation(
        self, step: int, loss: float, reports: dict[str, float], text: str
    ) -> None:
        self._look("validation", step)

    def after_evaluation(self, step: int, records: list[dict[str, Any]]) -> None:
        self._look("evaluation", step)

    def between_steps(self) -> AbstractContextManager[None]:
        """Suspend the time-out: one rank may work long at the disk while others wait in a
        collective.
        """
        return without_timeout(self.dims.groups, self.host, self._timeout)

    def numbers(self) -> Mapping[str, float]:
        return self.graphs.counts() if self.graphs else {}

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.comm.train_timeout_seconds)

    def _look(self, kind: str, step: int) -> None:
        """After passes of this kind, warn if layers were compiled again."""
        if self.graphs and dist.get_rank() == 0 and (warning := self.graphs.after(kind)):
            print(f"step {step}: {warning}")


class Graphs:
    """Counts the graphs that torch.compile has made of layers in this process.

    A kind of pass (training, validation) compiles its graphs in its first `passes` runs.
    Documents change from batch to batch, but the graphs should stay the same. whole: each
    layer should be one graph.
    """

    def __init__(self, passes: int = 1, whole: bool = False) -> None:
        # This import is slow, but the module is loaded anyway where layers are compiled.
        from torch._dynamo.utils import counters

        self._counters = counters
        self._known = 0
        self._warned = False
        self._passes = passes
        self._seen = Counter[str]()
        self._whole = whole

    def counts(self) -> dict[str, int]:
        """Return numbers to log."""
        breaks = sum(self._counters["graph_break"].values())
        return {"compiled_graphs": self._counters["stats"]["unique_graphs"], "graph_breaks": breaks}

    def after(self, kind: str) -> str:
        """Return a warning if layers were compiled in parts or again, else "".

        Call it after a pass of this kind. It warns once.
        """
        # New graphs are expected in the first passes of a kind only.
        graphs, breaks = self.counts().values()
        more = graphs - self._known
        self._known = graphs
        self._seen[kind] += 1
        expected = self._seen[kind] <= self._passes
        in_parts = self._whole and breaks > 0
        if self._warned or not (in_parts or (more and not expected)):
            return ""
        self._warned = True
        if in_parts:
            return (
                f"warning: layers are compiled in parts (graph_breaks = {breaks}); "
                "TORCH_LOGS=graph_breaks says where"
            )
        return (
            f"warning: {kind} compiled layers again, {more} graphs more (compiled_graphs = {graphs}); each time takes "
            "time, and TORCH_LOGS=recompiles says why"
        )

    def forget(self) -> None:
        """Expect all layers to be compiled anew."""
        self._seen.clear()
