"""A save and a resume: state and next step are the same as without them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config
from titan_linear.distributed.groups import host_group, of_all_ranks
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parts import local_tensor
from titan_linear.proof.findings import Finding, Findings, Note, of_count
from titan_linear.proof.ops import repeatable
from titan_linear.proof.subject import STREAMS, MoreDocuments, ProofSubject, narrowed
from titan_linear.run.build import build_dims, rate_at
from titan_linear.run.session import session_of
from titan_linear.run.start import build_loader
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.step_folders import Progress
from titan_linear.storage.tensors import named_parameters, saved_parameters

# Number of steps before the save.
BEFORE = 2
# The most parameters that are saved: more would prove nothing new, and wait for a disk.
PARAMETERS = 32_000_000


class ResumingRank:
    """A session with a loader on one rank, which takes steps as the trainer does."""

    def __init__(self, subject: ProofSubject, dims: ParallelDims, host: dist.ProcessGroup):
        """Prepare a run with initial weights."""
        self.config = subject.config
        self.host = host
        self.step = 0
        optimizer = self.config.optimizer
        self.session = session_of(
            self.config, subject.model, dims=dims, optimizer=optimizer, host=host
        )
        self.session.initialise(self.config.debug.seed)
        self.state = self.session.model, self.session.optimizer
        self.loader = build_loader(self.config, MoreDocuments(subject.streams), dims)

    def begin(self) -> None:
        """Take batches from the loader's next stream on."""
        batches = iter(self.loader)
        self.passes = self.session.passes(batches, micro_steps=STREAMS, host=self.host)

    def next_step(self) -> tuple[float, tuple[int, ...]]:
        """Take one step; return its loss and all ranks' streams.

        The next step is prefetched, as by the trainer.
        """
        losses, streams = self.passes.run()
        self.step += 1
        self.loader.advance()
        reading = self.session.update.run(losses, rate_at(self.config, self.step))
        self.passes.feed.prefetch()
        ranks = of_all_ranks([i for of_rank in streams for i in of_rank], self.host)
        return reading.wait().loss, tuple(sorted({i for of_rank in ranks for i in of_rank}))

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of this rank's parts of the weights and optimizer states, by name."""
        model, optimizer = self.state
        copies = {f"weight {name}": _copy(p) for name, p in named_parameters(model).items()}
        for name, p in model.named_parameters():
            for key, x in optimizer.state.get(p, {}).items():
                copies[f"optimizer state {key} of {name}"] = _copy(torch.as_tensor(x))
        return copies


def _copy(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach().clone()


def resume(subject: ProofSubject) -> Findings:
    """Check that a run saved after some steps and loaded into a new model is the same.

    It must have the same state and take the same next step.
    """
    one = replace(subject, config=_on_one_rank(subject.config))
    yield from _resumed("resume", one, build_dims(one.config, subject.device))


def of_processes(subject: ProofSubject) -> Findings:
    """Check the same for the run's own processes and split, under torchrun.

    Every rank calls this, for the same findings.
    """
    dims = build_dims(subject.config, subject.device)
    taken = replace(subject, config=_taken(subject.config, dims.dp))
    yield from _resumed(f"resume, {dims.description}", taken, dims)


def _resumed(check: str, subject: ProofSubject, dims: ParallelDims) -> Findings:
    host = host_group()
    config = subject.config
    model, _ = narrowed(subject.model, config.parallelism, PARAMETERS)
    subject = replace(subject, model=model)
    with _shared_folder(host) as folder, repeatable():
        if folder is None:
            why = "processes of several machines have no folder in common to save in"
            yield Note(f"{check}: {why}")
            return
        # Take some steps, save, and take one more.
        run = ResumingRank(subject, dims, host)
        run.begin()
        for _ in range(BEFORE):
            run.next_step()
        saved = run.tensors()
        checkpointer = Checkpointer(
            folder, async_mode=config.checkpoint.async_mode, group=host_group()
        )
        checkpointer.save(run.step, *run.state, Progress(step=run.step), run.loader)
        checkpointer.wait()
        loss, streams = run.next_step()

        # Load the save into a model whose parameters are all zero.
        other = ResumingRank(subject, dims, host)
        with torch.no_grad():
            for p in saved_parameters(other.session.model).values():
                local_tensor(p).zero_()
        progress = checkpointer.load(run.step - 1, *other.state, other.loader)
        yield _compared(check, "what is loaded", saved, other)
        yield Finding(check, "the step it resumes from", abs(progress.step - BEFORE), 0)
        # Take the same step again: streams, loss and state must be equal.
        other.step = progress.step
        next_stream = other.loader.next_stream
        other.begin()
        loss_again, streams_again = other.next_step()
        wrong = len(set(streams) ^ set(streams_again))
        where = (
            f"the next stream {next_stream} gives streams {streams_again}, not {streams}"
            if wrong
            else ""
        )
        yield Finding(check, "streams of the next step that are others", wrong, 0, where)
        yield Finding(check, "the next step's loss, difference", abs(loss - loss_again), 0)
        yield _compared(check, "what the next step leaves", run.tensors(), other)


@contextmanager
def _shared_folder(host: dist.ProcessGroup) -> Iterator[Path | None]:
    """Yield a temporary folder for all ranks; None: not all of them see it."""
    first = dist.get_rank(host) == 0
    with (
        tempfile.TemporaryDirectory(prefix="titan_linear-doctor-")
        if first
        else nullcontext() as made
    ):
        folder = Path(of_all_ranks(made, host)[0])
        yield folder if all(of_all_ranks(folder.is_dir(), host)) else None
        dist.barrier(host)


def _compared(check: str, what: str, want: dict[str, Tensor], run: ResumingRank) -> Finding:
    """Compare the tensors of all ranks in `run` with the earlier ones."""
    got = run.tensors()
    differing = [
        n
        for n in dict.fromkeys([*want, *got])
        if n not in got or n not in want or not torch.equal(want[n].to(got[n].device), got[n])
    ]
    ranks = of_all_ranks(differing, run.host)
    wrong = [
        f"{n}, rank {rank}" if len(ranks) > 1 else n
        for rank, names in enumerate(ranks)
        for n in names
    ]
    what = f"{what}: of {len(want)} weights and optimizer states, others"
    return of_count(check, what, wrong, shown=2)


def _on_one_rank(config: Config) -> Config:
    data = "data_parallel_replicate", "data_parallel_shard", "fsdp_shard"
    kinds = *data, "context_parallel", "tensor_parallel", "expert_parallel"
    return _taken(config.changed({f"parallelism.{name}_degree": 1 for name in kinds}), 1)


def _taken(config: Config, dp: int) -> Config:
    """Return the config uncompiled, with a global batch for `dp` data-parallel ranks."""
    batch = {
        "training.global_batch_size": STREAMS * dp,
        "training.local_batch_size": 1,
        "training.num_workers": 0,
    }
    return config.changed(batch | {"compile.enable": False})
