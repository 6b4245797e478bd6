"""A save, a resume, and the step after it: the same as without."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.build import build_model, build_sharding, mixed_precision, progress_at
from titan_linear.checkpoint import Checkpointer, named_parameters
from titan_linear.data import build_dataloader
from titan_linear.distributed.feed import Feed
from titan_linear.distributed.groups import unhurried_group
from titan_linear.distributed.mesh import ParallelDims, build_mesh
from titan_linear.distributed.parallelize import counted_parameters, sum_gradients
from titan_linear.gradients import Passes
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.optim import build_optimizer, learning_rate, step_numbers, update
from titan_linear.proof.findings import Finding, Findings
from titan_linear.proof.ops import repeatable
from titan_linear.proof.subject import STREAMS, MoreDocuments, Subject, narrowed

BEFORE = 2  # steps before the save
PARAMETERS = 32_000_000  # that are saved: more would be the same, and wait for a disk


@dataclass
class Run:
    """What the trainer has of a run in one process."""

    subject: Subject
    dims: ParallelDims
    host: dist.ProcessGroup
    model: Decoder
    optimizer: torch.optim.AdamW
    step: int = 0

    def begin(self, cursor: int) -> None:
        """Take batches from this stream on."""
        config = self.subject.config
        loader = build_dataloader(
            MoreDocuments(self.subject.streams), global_batch_size=STREAMS, local_batch_size=1, dp_rank=0, dp_degree=1,
            cursor=cursor,
        )  # fmt: skip
        sharding = build_sharding(config, self.model.config, self.dims, self.subject.device)
        precision = mixed_precision(config, self.model, self.dims)
        self.feed = Feed(
            iter(loader), sharding, micro_steps=STREAMS, copies=1, host=self.host, device=self.subject.device
        )
        self.passes = Passes(self.model, self.feed, precision, config.training.loss_chunk_size)

    def next_step(self) -> tuple[float, tuple[int, ...]]:
        """One step; its loss and its streams. The step after is fetched, as the trainer does."""
        config, (losses, streams) = self.subject.config, self.passes.run()
        sum_gradients(self.model, self.dims)
        numbers = step_numbers(losses.sum(), counted_parameters(self.model, self.dims), 0)
        self.step += 1
        lr = learning_rate(self.step, config.optimizer.lr, config.lr_scheduler, config.training.steps)
        update(self.optimizer, numbers, lr, config.training.max_norm)
        self.feed.prefetch()
        self.optimizer.zero_grad(set_to_none=True)
        return numbers[0].item(), tuple(i for own in streams for i in own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's states, by name; copies."""
        found = {f"weight {name}": p.detach().clone() for name, p in named_parameters(self.model).items()}
        for name, p in self.model.named_parameters():
            for key, x in self.optimizer.state.get(p, {}).items():
                found[f"optimizer state {key} of {name}"] = torch.as_tensor(x).detach().clone()
        return found


def resume(subject: Subject) -> Findings:
    """Saved after some steps and loaded into a new model, a run is where it was, and its next step is the same one."""
    one = _on_one_rank(subject)
    offload = one.config.training.enable_cpu_offload
    dims, host = build_mesh(subject.device.type, 1, 1, 1, cpu_offload=offload), unhurried_group()
    with tempfile.TemporaryDirectory(prefix="titan_linear-doctor-") as folder, repeatable():
        run = _new(one, dims, host)
        initialise(run.model, one.config.debug.seed, named_parameters(run.model))
        run.begin(0)
        for _ in range(BEFORE):
            run.next_step()
        saved = run.tensors()
        checkpointer = Checkpointer(Path(folder), async_mode=one.config.checkpoint.async_mode, group=unhurried_group())
        checkpointer.save(run.step, run.model, run.optimizer, progress_at(one.config, run.step, 0))
        checkpointer.wait()
        loss, streams = run.next_step()

        other = _new(one, dims, host)
        with torch.no_grad():
            for p in other.model.parameters():
                p.zero_()
        progress = checkpointer.load(run.step - 1, other.model, other.optimizer)
        yield from _compared("what is loaded", saved, other.tensors())
        yield Finding("resume", "the step it resumes from", abs(int(progress["step"]) - BEFORE), 0)
        other.step = int(progress["step"])
        other.begin(int(progress["cursor"]))
        loss_again, streams_again = other.next_step()
        wrong = len(set(streams) ^ set(streams_again))
        where = f"the cursor {progress['cursor']} gives streams {streams_again}, not {streams}" if wrong else ""
        yield Finding("resume", "streams of the next step that are others", wrong, 0, where)
        yield Finding("resume", "the next step's loss, difference", abs(loss - loss_again), 0)
        yield from _compared("what the next step leaves", run.tensors(), other.tensors())


def _compared(what: str, want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> Findings:
    wrong = [n for n in dict.fromkeys([*want, *got]) if n not in got or n not in want or not _same(want[n], got[n])]
    where = ", ".join(wrong[:2]) + (f" and {len(wrong) - 2} more" if len(wrong) > 2 else "")
    yield Finding("resume", f"{what}: of {len(want)} weights and optimizer states, others", len(wrong), 0, where)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.to(b.device), b)


def _new(subject: Subject, dims: ParallelDims, host: dist.ProcessGroup) -> Run:
    model = build_model(subject.config, subject.model, dims, subject.device)
    return Run(subject, dims, host, model, build_optimizer(model, subject.config.optimizer))


def _on_one_rank(subject: Subject) -> Subject:
    """Narrow, uncompiled, with a global batch that it takes."""
    c = subject.config
    t = c.training.model_copy(update={"global_batch_size": STREAMS, "local_batch_size": 1})
    p = c.parallelism.model_copy(update={
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 1, "context_parallel_degree": 1,
        "tensor_parallel_degree": 1, "expert_parallel_degree": 1,
    })  # fmt: skip
    compiled = c.compile.model_copy(update={"enable": False})
    model, _ = narrowed(subject.model, c, PARAMETERS)
    return replace(
        subject, model=model, config=c.model_copy(update={"training": t, "parallelism": p, "compile": compiled})
    )
