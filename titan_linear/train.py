"""The trainer: `python -m titan_linear.train` in each process of a run (see launch.py, which starts them).

build   tokenizer, streams, mesh, model (meta → parallelize → allocate), optimizer, weights, feed
step    micro-batches → summed loss over the global count of valid tokens → summed gradients → clip → AdamW
loop    steps, validation, metrics, checkpoints, until the last step or a signal
"""

from __future__ import annotations

import math
import os
import signal
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_linear.config import Config, hf_weights, load_config, micro_steps, schedule_steps, seq_len_at, tokens_at
from titan_linear.data import IGNORE, StreamLoader, build_tokenizer, num_labels, validation_batches
from titan_linear.distributed.ending import Ending, RunFailed, explain, report
from titan_linear.distributed.groups import (
    host_group,
    of_all_ranks,
    on_rank_0,
    process_group,
    set_timeout,
    without_timeout,
)
from titan_linear.distributed.hangs import Watch, watched
from titan_linear.distributed.process import (
    StopSignal,
    be_deterministic,
    die_with_parent,
    outliving_readers,
    own_device,
    under_launcher,
)
from titan_linear.models.init import initialise
from titan_linear.observe.flops import no_peak, peak_tflops, training_flops
from titan_linear.observe.metrics import (
    GarbageClock,
    Graphs,
    MetricsLogger,
    Work,
    clock_and_power,
    is_logged,
    peak_memory_gib,
    reserved_memory,
)
from titan_linear.observe.profiling import MemorySnapshots, Profiler, exposed_communication, pause, profiler
from titan_linear.observe.spikes import MicroLoss, Outliers, write_spike
from titan_linear.observe.telemetry import Seen, Telemetry
from titan_linear.ops.registry import start_lines
from titan_linear.proof import prove
from titan_linear.run.build import (
    build_dims,
    build_model,
    build_sharding,
    build_streams,
    check_alike,
    check_content,
    content_of,
    export,
    export_folder,
    file_groups,
    first_weights,
    mixed_precision,
    model_config,
    model_name,
    sums_replicas_once,
    tokenizer_path,
    uncompiled,
)
from titan_linear.run.exports import Exports
from titan_linear.run.generate import Sampling, generate
from titan_linear.run.grace import GivenUp, Grace
from titan_linear.run.preflight import preflight
from titan_linear.step.feed import Feed, FeedStats
from titan_linear.step.optimizer import build_optimizer
from titan_linear.step.passes import Passes
from titan_linear.step.update import StepEnd, rate_at
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.hf_io import gather, load_weights
from titan_linear.storage.rundir import (
    CONFIG,
    RECORDERS,
    check_resume,
    checkpoint_folder,
    claimed,
    copied_configuration,
    set_run_aside,
    starts_anew,
    write_config,
    write_manifest,
)
from titan_linear.storage.step_folders import Progress, known_progress, rewind
from titan_linear.storage.tensors import holds_optimizer, named_parameters


class NonFinite(RunFailed):
    """A loss or gradient is NaN or infinite. Every rank raises it; the update left the weights as they were."""


class Trainer:
    """A run on this rank, ready for its next step.

    host: a group of all ranks, in which they wait while one rank works alone at its disk. Inside steps hosts use the
    default group, which has the steps' time-out (`ParallelDims.groups`).
    """

    def __init__(self, config: Config):
        self.config, self.stop = config, StopSignal()
        self.device, self.host = own_device(), host_group()
        self.tokenizer = build_tokenizer(tokenizer_path(config))
        known = self._known()
        self.streams, self.held_out = build_streams(config, self.tokenizer, known)
        dist.barrier(self.host)  # wait for nodes that first had to write their token cache
        model = model_config(config, self.tokenizer)
        self.content = content_of(config, self.tokenizer, model, self.streams, self.held_out)
        if known:  # a restart has no preflight
            check_content(config, known.content, self.content)
        check_alike(config, self.content, self.host)
        self.dims = build_dims(config, self.device)
        self.model = build_model(config, model, self.dims, self.device)
        self.precision = mixed_precision(config, self.model, self.dims)
        self.sharding = build_sharding(config, self.model.config, self.dims, self.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.checkpointer = self._build_checkpointer()
        self.loader = self._build_loader()
        self.step, self.skipped = self._set_weights(known)
        self.begun = self.step  # the step that is being computed
        dist.barrier(self.host)  # some disks are slower
        self.feed = self._build_feed()
        self.fed = FeedStats()  # since the last report
        self.grace = Grace(config.checkpoint.grace_seconds, self.stop, dist.group.WORLD)
        self.exports: Exports | None = None  # on rank 0
        groups = file_groups(config, self.streams)
        self.telemetry = Telemetry(config, self.model, self.dims, self.device, self.streams, groups)
        loss_chunk = config.training.loss_chunk_size
        self.passes = Passes(
            self.model,
            self.feed,
            self.precision,
            loss_chunk,
            self.telemetry.watching,
            sums_replicas_once(config, self.dims),
        )
        self.end = StepEnd(config, self.model, self.dims, self.optimizer, self.telemetry)
        self.seen: Seen = {}  # what telemetry saw in the last step
        # The number of rows that reach a rank's experts varies: the second pass compiles for any number.
        self.compiling = 2 if config.compile.enable and self.dims.ep > 1 else 1  # number of first steps that compile
        self.garbage, self.graphs = GarbageClock(), Graphs(self.compiling) if config.compile.enable else None
        self.outliers = Outliers(config.metrics.spike_sigmas)

    def _build_checkpointer(self) -> Checkpointer | None:
        c = self.config.checkpoint
        if not c.enable:
            return None
        folder = checkpoint_folder(self.config)
        return Checkpointer(
            folder, async_mode=c.async_mode, keep_latest_k=c.keep_latest_k, verify=c.verify, group=host_group()
        )

    def _known(self) -> Progress | None:
        """The progress saved in the checkpoint that this run resumes from; None for a new run."""
        return on_rank_0(lambda: known_progress(self.config, self.config.checkpoint.load_step), self.host)

    def _set_weights(self, known: Progress | None) -> tuple[int, int]:
        """Load the run's checkpoint of this progress, or the weights that the run begins from, or draw them.

        Returns: (steps done, steps skipped).
        """
        c = self.config.checkpoint
        if known:
            step = known.step
            folder = checkpoint_folder(self.config)
            # A restart after the last save, which may hold weights only: what is left to do needs no more.
            ended = step >= self.config.training.steps
            whole = not ended or on_rank_0(lambda: holds_optimizer(folder / f"step-{step}"), self.host)
            self.checkpointer.load(step, self.model, self.optimizer if whole else None, self.loader)
            on_rank_0(lambda: rewind(folder, step, c.load_step), self.host)
            return step, known.skipped
        if hf_weights(self.config):
            load_weights(Path(hf_weights(self.config)), self.model)
        elif c.enable and c.initial_load_path:
            self.checkpointer.load_weights(Path(c.initial_load_path), self.model)
        else:
            initialise(self.model, self.config.debug.seed, named_parameters(self.model))
        return 0, 0

    def _build_loader(self) -> StreamLoader:
        t = self.config.training
        return StreamLoader(
            self.streams,
            global_batch_size=t.global_batch_size,
            local_batch_size=t.local_batch_size,
            dp_rank=self.dims.dp_rank,
            dp_degree=self.dims.dp,
            num_workers=t.num_workers,
        )

    def _build_feed(self) -> Feed:
        dims = self.dims
        return Feed(
            iter(self.loader),
            self.sharding,
            micro_steps=micro_steps(self.config, dist.get_world_size()),
            copies=dims.copies,
            host=dist.group.WORLD,
            device=self.device,
        )

    @property
    def _ended(self) -> bool:
        """Whether the last step is done."""
        return self.step == self.config.training.steps

    # --- One step ----------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float | None]:
        """Do one optimizer step over the next global_batch_size streams, and return its numbers; the loss is None if
        no token has a label.

        The host waits for the device once, for the step's numbers, after it has queued all of the step's work and, if
        nothing comes between, the next step's first forward: so the device always has work. With offload the host
        waits before the update, because it computes the update itself.

        Raises:
            GivenUp: a signal came, and there is no time to complete the step (grace.py).
        """
        self.begun = self.step + 1
        self.grace.begin()
        self.telemetry.begin(self.begun)
        losses, streams = self.passes.run(lambda done: self.grace.heed(done, self._save_seconds))
        reading = self.end.run(losses, self.begun, self.stop.received)
        self.step = self.begun
        self.loader.advance()
        has_labels = self._prepare_next()
        loss, grad_norm, stop, *seen = reading.wait()
        self.seen = self.telemetry.named(seen) if seen else {}
        self.stop.agreed = int(stop)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if (has_labels or not finite) and (spike := self.outliers.judge(loss, grad_norm)):
            self._note(spike, losses, streams)
        if not finite:
            self._leave_out(loss, grad_norm, losses, streams)
        if self.stop.agreed:
            self.passes.drop()
        self.grace.end()
        lr = rate_at(self.config, self.step)
        return {"loss": loss if has_labels else None, "grad_norm": grad_norm, "lr": lr, "skipped_steps": self.skipped}

    def _prepare_next(self) -> bool:
        """While the device computes, fetch the next step's batches and, if nothing comes between, queue its first
        forward.

        Returns: whether any token of this step has a label.
        """
        if not self._ended:
            self.feed.prefetch()
        fed = self.feed.take()
        self.fed += fed
        if not self._ended and self._goes_on():
            self.passes.begin()
        return fed.valid > 0

    def _goes_on(self) -> bool:
        """Whether the next step follows at once: no validation or save is due, streams keep their length, and telemetry
        watches neither step."""
        alike = seq_len_at(self.config.training, self.step) == seq_len_at(self.config.training, self.step + 1)
        watched = self.telemetry.on or self.telemetry.watches(self.step + 1)
        return alike and not watched and not any(self._due())

    def _note(self, spike: dict[str, Any], losses: torch.Tensor, streams: list[tuple[int, ...]]) -> None:
        """Write down the step's streams and their losses. Every rank calls it."""
        own = [MicroLoss(i, num_labels(self.streams, i), x) for i, x in zip(streams, losses.tolist(), strict=True)]
        reports = of_all_ranks(own, dist.group.WORLD)
        if dist.get_rank() == 0:
            write_spike(self.config.job.dump_folder, self.step, spike, reports)

    def _leave_out(self, loss: float, norm: float, losses: torch.Tensor, streams: list[tuple[int, ...]]) -> None:
        """Skip and count this step, which has not touched the weights, or stop the run."""
        if self.config.training.on_nonfinite == "skip":
            self.skipped += 1
            return
        raise NonFinite(
            f"step {self.step}: loss = {loss}, gradient norm = {norm}; {self._blame(losses, streams)}. The weights are "
            "those of the step before; training.on_nonfinite = 'skip' goes past such steps"
        )

    def _blame(self, losses: torch.Tensor, streams: list[tuple[int, ...]]) -> str:
        """Which ranks found a loss that is not finite, and on which streams. Every rank calls it."""
        bad = [i for own, x in zip(streams, losses.tolist(), strict=True) if not math.isfinite(x) for i in own]
        reports = of_all_ranks(bad, dist.group.WORLD)
        if any(reports):
            return "; ".join(f"rank {r}: streams {', '.join(map(str, x))}" for r, x in enumerate(reports) if x)
        first, G = (self.step - 1) * self.config.training.global_batch_size, self.config.training.global_batch_size
        return f"every loss is finite, a gradient is not; the step's streams are {first} to {first + G - 1}"

    # --- The loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run steps until the last one, or until a signal, which ends the run after a save."""
        logger = self._begin()
        with profiler(self.config, self.step) as profile, self.garbage, MemorySnapshots(self.config) as snapshots:
            try:
                self._loop(logger, profile, snapshots)
            except GivenUp as why:
                self._give_up(str(why))
        with self._unhurried():
            self._finish()
        if logger:
            logger.close()

    def _loop(self, logger: MetricsLogger | None, profile: Profiler | None, snapshots: MemorySnapshots) -> None:
        first, compiling = self.step + 1, self.compiling
        while self.step < self.config.training.steps and not self.stop.agreed:
            compiling = self.compiling if self._lengthen() else compiling
            numbers, compiling = self.train_step(), compiling - 1
            if profile:
                self.feed.settle()  # a collective that gloo ends after the profiler's window writes to freed memory
            self._look_at_graphs("a step that telemetry looks into" if self.telemetry.on else "training")
            traced = profile.step() if profile else None
            snapshots.after(self.step)
            if compiling == 0:  # everything is compiled and connected
                dist.all_reduce(torch.zeros(1))  # a barrier of the hosts
                set_timeout(self.dims.groups, self._timeout)
            if logger and (is_logged(self.config, self.step) or self.step == first or self.stop.agreed):
                self._report(logger, numbers)
            if traced and (exposed := exposed_communication(traced, self.host)) and logger:
                logger.log_exposed(self.step, *exposed)
            if logger and self.seen:
                logger.log_telemetry(self.step, self.seen)
            if (warning := self.grace.warning(self.feed.micro_steps, self._save_seconds)) and dist.get_rank() == 0:
                print(warning, flush=True)
            self._validate_and_save(logger)
            if self.checkpointer:
                self.checkpointer.look()
            if self.exports:
                self.exports.look()

    def _lengthen(self) -> bool:
        """Prepare for a change of the streams' length at the next step; return whether there is one.

        Layers are compiled again for the new length, which may exceed the time-out of a step.
        """
        t = self.config.training
        before, now = seq_len_at(t, self.step), seq_len_at(t, self.step + 1)
        if before == now or not self.step:
            return False
        if dist.get_rank() == 0:
            print(f"from step {self.step + 1} on streams have {now} tokens (before: {before})", flush=True)
        set_timeout(self.dims.groups, timedelta(seconds=self.config.comm.init_timeout_seconds))
        if self.config.compile.enable:
            torch.compiler.reset()  # else the length would become dynamic, or there would be too many to compile
            self.graphs.forget()
        return True

    def _look_at_graphs(self, kind: str) -> None:
        """After passes of this kind, warn if layers were compiled again."""
        if self.graphs and dist.get_rank() == 0 and (warning := self.graphs.after(kind)):
            print(f"step {self.step}: {warning}", flush=True)

    def _give_up(self, why: str) -> None:
        """Save and end after a signal that came between two micro-steps or while validating.

        Nothing has changed since the last step's end.
        """
        if why and dist.get_rank() == 0:
            grace = self.config.checkpoint.grace_seconds
            print(f"stopping after step {self.step}: {why} (checkpoint.grace_seconds = {grace})", flush=True)
        self.passes.drop()
        self.optimizer.zero_grad(set_to_none=True)
        if self.step:
            with self._unhurried():
                self.save()

    @property
    def _save_seconds(self) -> float:
        return self.checkpointer.seconds if self.checkpointer else 0.0

    def _report(self, logger: MetricsLogger, numbers: dict[str, float | None]) -> None:
        """This step's numbers, and what the steps since the last report did."""
        fed, self.fed = self.fed, FeedStats()
        work = Work(training_flops(self.model.config, fed.documents), fed.valid, fed.waited)
        of_step = {"data_seconds": fed.seconds, "gc_seconds": self.garbage.take()}
        more = {name: seconds / max(fed.steps, 1) for name, seconds in of_step.items()}
        more |= reserved_memory() | clock_and_power(self.device)
        if fed.most_pairs:  # the model has softmax layers
            more["work_balance"] = fed.work_balance(self.dims.dp * self.dims.cp)
        if self.graphs:
            more |= self.graphs.counts()
        if self.config.training.seq_len_schedule:
            more["seq_len"] = seq_len_at(self.config.training, self.step)
        logger.log(self.step, tokens=self._tokens(), memory_gib=peak_memory_gib(), work=work, **numbers, **more)

    def _due(self) -> tuple[bool, bool]:
        """Whether a validation and a save follow this step, if no signal comes."""
        v, interval = self.config.validation, self.config.checkpoint.interval
        return v.enable and (self.step % v.freq == 0 or self._ended), self.step % interval == 0 or self._ended

    def _validate_and_save(self, logger: MetricsLogger | None) -> None:
        """Validate and save, if due after this step. After a signal: save alone."""
        validates, saves = (False, True) if self.stop.agreed else self._due()
        if not (validates or saves):
            return
        with pause(), self._unhurried(), self.garbage.untimed(), logger.untimed() if logger else nullcontext():
            if saves:  # first, so that an error in validation costs no steps
                self.save()
            if validates:
                self._validate(logger)

    def _validate(self, logger: MetricsLogger | None) -> None:
        v, loss = self.config.validation, self.validate()
        self._look_at_graphs("validation")
        if logger:
            logger.log_validation(self.step, loss)
        if v.sample_tokens:
            text = self._sample(v.sample_prompt, v.sample_tokens)
            if logger:
                logger.log_text(self.step, "sample", text)

    def _finish(self) -> None:
        """Complete the run after its last step: the save under way, the export, the sample."""
        if self.checkpointer:
            self.checkpointer.wait()
        if not self.stop.agreed:
            if self.config.checkpoint.last_save_in_hf:
                self._export()
            self._print_sample()
        if self.exports:
            self.exports.finish(self.stop)
            self.checkpointer.prune(self.step)  # checkpoints that were kept for exports

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.config.comm.train_timeout_seconds)

    def _unhurried(self) -> AbstractContextManager[None]:
        """A context for work between steps: one rank may take long at the disk while others wait in a collective."""
        return without_timeout(self.dims.groups, self.host, self._timeout)

    def _begin(self) -> MetricsLogger | None:
        """On rank 0, write down and print what the run is made of, and return its logger."""
        if dist.get_rank() != 0:
            return None
        if starts_anew(self.config):
            set_run_aside(self.config)
        write_config(self.config)
        write_manifest(
            self.config,
            world_size=dist.get_world_size(),
            degrees=self.dims.degrees,
            implementations={op: choice.implementation for op, choice in self.model.implementations.items()},
        )
        if self.config.checkpoint.export_interval:
            self.exports = Exports(self.config, self.step, self.checkpointer.in_use)
        parameters = sum(p.numel() for p in named_parameters(self.model).values())
        peak = peak_tflops(self.config, self.device)
        lines = [
            f"model {model_name(self.config)}: {parameters:,} parameters",
            *start_lines(self.model.implementations),
            uncompiled(self.config, self.device),
            f"mesh {self.dims.description}",
            self.sharding.uneven(self.config.training.local_batch_size * self.config.training.seq_len),
            f"resuming from step {self.step}" if self.step else first_weights(self.config),
            no_peak(self.config, self.device) if peak is None else "",
        ]
        print("\n".join(filter(None, lines)), flush=True)
        return MetricsLogger(
            self.config, start_step=self.step, start_tokens=self._tokens(), gpus=dist.get_world_size(), peak_tflops=peak
        )

    def _tokens(self) -> int:
        return tokens_at(self.config.training, self.step)

    def save(self) -> None:
        if self.checkpointer is None:
            return
        model_only = self._ended and self.config.checkpoint.last_save_model_only
        progress = Progress(
            step=self.step,
            skipped=self.skipped,
            total_steps=schedule_steps(self.config),
            content=self.content,
        )
        self.checkpointer.save(self.step, self.model, None if model_only else self.optimizer, progress, self.loader)
        if self.exports:
            self.exports.add(self.step)

    def _export(self) -> None:
        """The weights as a Hugging Face folder, step-N-hf."""
        path, dtype = export_folder(self.config), self.config.checkpoint.export_dtype
        export(path, self.config, self.model.config, self.tokenizer, gather(self.model), dtype=dtype)
        if dist.get_rank() == 0:
            print(f"exported '{path}'", flush=True)

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token over the held-out documents (or the first validation.steps streams of them)."""
        v = self.config.validation
        batches = validation_batches(
            self.held_out,
            local_batch_size=v.local_batch_size,
            dp_rank=self.dims.dp_rank,
            dp_degree=self.dims.dp,
            limit=v.steps,
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            self.grace.heed_validating()
            tokens, labels, plan = self.sharding(batch)
            with self.precision:
                total[0] += self.model(tokens, plan, labels, loss_chunk=self.config.training.loss_chunk_size)
            total[1] += (labels != IGNORE).sum()
        dist.all_reduce(total)
        return (total[0] / total[1] * self.dims.tp).item()  # all ranks of tp have counted the same labels

    def _print_sample(self) -> None:
        """Print the sample of the run's end."""
        if s := self.config.sample.max_new_tokens:
            text = self._sample(self.config.sample.prompt, s)
            if dist.get_rank() == 0:
                print(f"--- sample\n{text}\n---", flush=True)

    def _sample(self, prompt: str, tokens: int) -> str:
        """Return the prompt and the model's continuation. Every rank calls it, however the model is split."""
        s = self.config.sample
        # Compiled graphs are for streams, not for a text that grows by a token at each call.
        uncompiled = torch.compiler.set_stance("force_eager") if self.config.compile.enable else nullcontext()
        with self.precision, uncompiled:
            (text,) = generate(
                self.model,
                self.tokenizer,
                [prompt],
                max_new_tokens=tokens,
                device=self.device,
                sampling=Sampling(s.temperature, s.top_p, self.config.debug.seed),
            )
        return text


# --- One process of a run --------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Return the exit code. What ends the run is said by `report`, or inside the process group by `Ending.leave`."""
    die_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about torch's own code
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # except while it trains (profiling.py)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the launcher blocks it
    try:
        return _run(load_config(argv))
    except Exception as error:
        return report(error)


def _run(config: Config) -> int:
    """Join the run's processes, train, and return the exit code."""
    if config.debug.deterministic:
        be_deterministic()
    folder = Path(config.job.dump_folder)
    with process_group(timedelta(seconds=config.comm.init_timeout_seconds)) as ending, ExitStack() as held:
        watch = held.enter_context(watched(folder / RECORDERS, ending.store, config.comm.train_timeout_seconds))
        if not under_launcher():  # torchrun: once joined, the others can wait while rank 0 checks and tokenises
            on_rank_0(lambda: _claim(config, held), host_group())
        try:
            return _train(config, watch, ending)
        except torch.OutOfMemoryError as error:
            plan = f"titan-linear plan --gpus {dist.get_world_size()} --job.config_file {folder / CONFIG}"
            raise torch.OutOfMemoryError(f"{explain(error)[1]}; what a run needs: {plan}") from error


def _claim(config: Config, held: ExitStack) -> None:
    """Do what the launcher does before it starts a process; `held` keeps the folders' locks."""
    if warning := copied_configuration(config):
        print(warning, flush=True)
    held.enter_context(claimed(config))
    for change in check_resume(config):
        print(f"resuming with {change}", flush=True)
    preflight(config, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    if config.doctor.at_start:
        prove(sys.argv[1:], dist.get_world_size())


def _train(config: Config, watch: Watch, ending: Ending) -> int:
    trainer = Trainer(config)
    watch.step, watch.signal = lambda: trainer.begun, trainer.stop.arrived
    if trainer.checkpointer:
        ending.finish = trainer.checkpointer.finish
    with trainer.stop:
        trainer.train()
    trainer.stop.report()
    return 0  # to torchrun anything else is a failure


if __name__ == "__main__":
    with outliving_readers():
        code = main(sys.argv[1:])
    sys.exit(code)
