"""The trainer: `python -m titan_linear.train` in each process of a run (see launch.py, which starts them).

build      tokenizer, corpus, mesh, model (meta → parallelize → allocate → initialise), optimizer, checkpoint
train_step micro-batches → summed loss over the global count of valid tokens → summed gradients → clip → AdamW
train      steps, validation, metrics, checkpoints, until the last step or a signal
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.build import (
    DTYPES,
    build_model,
    build_streams,
    checkpoint_folder,
    export,
    export_folder,
    model_config,
    tokenizer_path,
)
from titan_linear.checkpoint import Checkpointer, SaveFailed, find_step, whole_steps
from titan_linear.config import Config, data_parallel_degrees, hf_weights, load_config
from titan_linear.data import IGNORE, Batch, build_dataloader, build_tokenizer, validation_batches
from titan_linear.distributed.batch import BatchSharding
from titan_linear.distributed.experts import move_selection_biases
from titan_linear.distributed.groups import process_group, set_timeout
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.parallelize import reduce_replicated
from titan_linear.generate import Sampling, generate
from titan_linear.hf_io import gather, load_weights
from titan_linear.metrics import MetricsLogger, is_logged, peak_memory_gib
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.ops.implementations import chosen_implementations
from titan_linear.optim import build_optimizer, gradient_norm, learning_rate, scale_gradients
from titan_linear.preflight import preflight
from titan_linear.process import StopSignal, be_deterministic, die_with_parent, own_device, under_launcher
from titan_linear.profiling import profiler
from titan_linear.rundir import check_resume, lock_folder, write_config, write_manifest


class NonFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are still good."""


class Trainer:
    def __init__(self, config: Config):
        self.config = config
        self.stop = StopSignal()
        self.device = own_device()
        replicate, shard = data_parallel_degrees(config, dist.get_world_size())
        self.dims = build_mesh(self.device.type, replicate, shard, config.parallelism.context_parallel_degree)
        self.tokenizer = build_tokenizer(tokenizer_path(config))
        self.streams, self.held_out = build_streams(config, self.tokenizer)
        self.model = self._build_model(model_config(config, self.tokenizer))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        p = config.parallelism
        self.sharding = BatchSharding.of(
            self.model.config, self.dims, self.device, DTYPES[config.training.mixed_precision_param],
            layout=p.context_parallel_layout, softmax_method=p.context_parallel_method,
            linear_method=p.context_parallel_linear_method, impl=config.model.impl,
        )  # fmt: skip
        self.step, self.skipped = 0, 0
        self.checkpointer = self._build_checkpointer()
        self.batches = self._batches()

    def _build_model(self, model_config: ModelConfig) -> Decoder:
        model = build_model(self.config, model_config, self.dims, self.device)
        if not self._loads_weights():
            initialise(model, self.config.debug.seed)
        return model

    def _loads_weights(self) -> bool:
        """Whether a checkpoint or a folder fills every parameter, so that none need be drawn."""
        c = self.config.checkpoint
        from_elsewhere = bool(c.initial_load_path) or c.initial_load_in_hf
        return c.enable and (from_elsewhere or bool(whole_steps(checkpoint_folder(self.config))))

    def _build_checkpointer(self) -> Checkpointer | None:
        """The run's checkpoints; goes on from the one that the configuration asks for."""
        c = self.config.checkpoint
        if not c.enable:
            return None
        checkpointer = Checkpointer(
            checkpoint_folder(self.config), async_mode=c.async_mode, keep_latest_k=c.keep_latest_k
        )
        step = find_step(checkpoint_folder(self.config), c.load_step)
        if step is not None:
            progress = checkpointer.load(step, self.model, self.optimizer)
            self.step, self.skipped = int(progress["step"]), int(progress["skipped"])
        elif hf_weights(self.config):
            load_weights(Path(hf_weights(self.config)), self.model)
        elif c.initial_load_path:
            checkpointer.load_weights(Path(c.initial_load_path), self.model)
        return checkpointer

    def _batches(self) -> Iterator[Batch]:
        t = self.config.training
        self.loader = build_dataloader(
            self.streams, global_batch_size=t.global_batch_size, local_batch_size=t.local_batch_size,
            dp_rank=self.dims.dp_rank, dp_degree=self.dims.dp, cursor=self.step * t.global_batch_size,
            num_workers=t.num_workers,
        )  # fmt: skip
        return iter(self.loader)

    # --- One step ----------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimizer step over the next global_batch_size streams; its numbers."""
        t = self.config.training
        micro_steps = t.global_batch_size // (self.dims.dp * t.local_batch_size)
        batches = [next(self.batches) for _ in range(micro_steps)]
        valid = self._global_sum(float(sum(int((b.labels != IGNORE).sum()) for b in batches))) / self.dims.cp
        losses = torch.stack([self._forward_backward(batch, valid) for batch in batches])
        reduce_replicated(self.model)
        norm = gradient_norm(self.model.parameters(), self.dims.shard_group)
        # One reduction brings the loss and a signal that any rank has received: all ranks stop at the same step.
        loss, self.stop.agreed = self._sum_and_max(losses.double().sum(), self.stop.received)
        grad_norm = norm.item()  # read once, before the optimizer's work is queued
        self.step += 1
        lr = learning_rate(self.step, self.config.optimizer.lr, self.config.lr_scheduler, t.steps)
        if finite := self._is_finite(loss, grad_norm, losses, batches):
            scale_gradients(self.model.parameters(), norm, t.max_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        move_selection_biases(self.model, apply=finite)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr, "skipped_steps": self.skipped}

    def _forward_backward(self, batch: Batch, valid: float) -> torch.Tensor:
        """This rank's part of the loss of one micro-batch; gradients are added up."""
        tokens, labels, packed = self.sharding(batch)
        loss = self.model(tokens, packed, labels, loss_chunk=self.config.training.loss_chunk_size) / max(valid, 1)
        loss.backward()
        return loss.detach()

    def _global_sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _sum_and_max(self, loss: torch.Tensor, number: int) -> tuple[float, int]:
        """(sum of the losses, the highest signal number) over all ranks, in one collective."""
        row = torch.stack([loss, loss.new_tensor(float(number))])
        rows = row.new_empty(2 * dist.get_world_size())
        dist.all_gather_into_tensor(rows, row)
        return rows[0::2].sum().item(), int(rows[1::2].max().item())

    def _is_finite(self, loss: float, norm: float, losses: torch.Tensor, batches: list[Batch]) -> bool:
        """Whether the step may touch the weights. Otherwise it is skipped and counted, or the run stops."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        if self.config.training.on_nonfinite == "skip":
            self.skipped += 1
            return False
        raise NonFinite(
            f"step {self.step}: loss = {loss}, gradient norm = {norm}; {self._blame(losses, batches)}. The weights are "
            "those of the step before; training.on_nonfinite = 'skip' goes past such steps"
        )

    def _blame(self, losses: torch.Tensor, batches: list[Batch]) -> str:
        """Which ranks found a loss that is not finite, and on which streams. Every rank calls it."""
        bad = [i for b, x in zip(batches, losses.tolist(), strict=True) if not math.isfinite(x) for i in b.streams]
        reports: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(reports, bad)
        if any(reports):
            return "; ".join(f"rank {r}: streams {', '.join(map(str, x))}" for r, x in enumerate(reports) if x)
        first, G = (self.step - 1) * self.config.training.global_batch_size, self.config.training.global_batch_size
        return f"every loss is finite, a gradient is not; the step's streams are {first} to {first + G - 1}"

    # --- The loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Steps until the last, or until a signal, which ends the run after a save."""
        config, start = self.config, self.step
        logger = self._logger()
        with profiler(config) as profile:
            while self.step < config.training.steps and not self.stop.agreed:
                numbers = self.train_step()
                profile.step()
                if self.step == start + 1:
                    self._shorten_timeouts()
                last = self.step == config.training.steps
                if logger and (is_logged(config, self.step) or self.step == start + 1 or self.stop.agreed):
                    logger.log(self.step, tokens=self._tokens(), memory_gib=peak_memory_gib(), **numbers)
                with logger.untimed() if logger else nullcontext():
                    if config.validation.enable and (self.step % config.validation.freq == 0 or last):
                        self._report_validation(logger)
                    if self.step % config.checkpoint.interval == 0 or last or self.stop.agreed:
                        self.save(last)
        if self.checkpointer:
            self.checkpointer.wait()
        if not self.stop.agreed:
            if config.checkpoint.last_save_in_hf:
                self._export()
            self._sample()
        if logger:
            logger.close()

    def _shorten_timeouts(self) -> None:
        """Once the first step has compiled and connected everything."""
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
        set_timeout([dist.group.WORLD, *self.dims.groups], timeout)

    def _logger(self) -> MetricsLogger | None:
        if dist.get_rank() != 0:
            return None
        choices = chosen_implementations(self.config.model.impl, self.device)
        write_config(self.config)
        write_manifest(
            self.config, world_size=dist.get_world_size(), degrees=self.dims.degrees, implementations=choices
        )
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"model {self.config.model.name}/{self.config.model.flavor}: {parameters:,} parameters", flush=True)
        print("ops " + ", ".join(f"{op}: {name}" for op, name in choices.items()), flush=True)
        print("mesh " + " × ".join(f"{name} {n}" for name, n in self.dims.degrees.items()), flush=True)
        if self.step:
            print(f"going on from step {self.step}", flush=True)
        return MetricsLogger(self.config, start_step=self.step, start_tokens=self._tokens())

    def _tokens(self) -> int:
        return self.step * self.config.training.global_batch_size * self.config.training.seq_len

    def save(self, last: bool) -> None:
        if self.checkpointer is None:
            return
        model_only = last and self.config.checkpoint.last_save_model_only
        cursor = self.step * self.config.training.global_batch_size
        progress = {"step": self.step, "cursor": cursor, "tokens": self._tokens(), "skipped": self.skipped}
        data = {"corpus": self.streams.corpus.fingerprint, "tokenizer": self.tokenizer.fingerprint}
        self.checkpointer.save(self.step, self.model, None if model_only else self.optimizer, progress | data)

    def _export(self) -> None:
        """The weights as a Hugging Face folder, step-N-hf."""
        path = export_folder(self.config)
        dtype = self.config.checkpoint.export_dtype
        export(path, self.config, self.model.config, self.tokenizer, gather(self.model), dtype=dtype)
        if dist.get_rank() == 0:
            print(f"exported '{path}'", flush=True)

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token over the held-out documents (or the first validation.steps batches of them)."""
        v = self.config.validation
        batches = validation_batches(
            self.held_out, local_batch_size=v.local_batch_size, dp_rank=self.dims.dp_rank, dp_degree=self.dims.dp
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i, batch in enumerate(batches):
            if i == v.steps:
                break
            tokens, labels, packed = self.sharding(batch)
            total[0] += self.model(tokens, packed, labels, loss_chunk=self.config.training.loss_chunk_size)
            total[1] += (labels != IGNORE).sum()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _report_validation(self, logger: MetricsLogger | None) -> None:
        loss = self.validate()
        if logger:
            logger.log_validation(self.step, loss)

    def _sample(self) -> None:
        s = self.config.sample
        if not s.max_new_tokens:
            return
        (text,) = generate(
            self.model, self.tokenizer, [s.prompt], max_new_tokens=s.max_new_tokens, device=self.device,
            sampling=Sampling(s.temperature, s.top_p, self.config.debug.seed), impl=self.config.model.impl,
        )  # fmt: skip
        if dist.get_rank() == 0:
            print(f"--- sample\n{text}\n---", flush=True)


def main(argv: list[str]) -> int:
    """One process of a run; its exit code. A user's mistake or a non-finite loss is one line, not a traceback."""
    die_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # torch about itself
    try:
        config = load_config(argv)
        return _run(config)
    except (ValueError, NonFinite, SaveFailed) as error:
        if int(os.environ.get("RANK", "0")) == 0 or isinstance(error, ValueError):  # the others are alike on all ranks
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 3


def _run(config: Config) -> int:
    if config.debug.deterministic:
        be_deterministic()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lock = None
    if not under_launcher() and rank == 0:  # started by torchrun: what the launcher checks is checked here
        lock = lock_folder(config.job.dump_folder)
        check_resume(config)
        preflight(config, world_size)
    with process_group(timedelta(seconds=config.comm.init_timeout_seconds)):
        stopped = _train(config)
    if lock is not None:
        lock.close()
    return 128 + stopped if stopped and not under_launcher() else 0


def _train(config: Config) -> int:
    """Build and train; the signal that ended it, or 0."""
    trainer = Trainer(config)
    with trainer.stop:
        trainer.train()
    return trainer.stop.agreed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
