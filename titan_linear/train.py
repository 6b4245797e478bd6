"""The trainer: `python -m titan_linear.train` in each process of a run (run/launch.py
starts them).

build   data and weights → mesh → model (meta → parallelize → allocate) → optimizer → weights → feed
step    batch → forward → backward, summed over micro-batches → update: sums over ranks, clipping, optimizer
loop    steps, saves and validations until the last step or a signal; everything else is a hook (hooks/)
"""

import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.config import Config, load_config
from titan_linear.distributed.ending import Ending, explain, report
from titan_linear.distributed.groups import host_group, on_rank_0, process_group
from titan_linear.distributed.hangs import Watch, watched
from titan_linear.distributed.process import (
    StopSignal,
    be_deterministic,
    die_with_parent,
    end,
    ignore_warnings_of_torch,
    outliving_readers,
    under_launcher,
)
from titan_linear.hooks import (
    HOOKS,
    Compilation,
    Exports,
    Grace,
    Hook,
    MemorySnapshots,
    Profiler,
    Report,
    Spikes,
    StepAbandoned,
    StepResult,
    Telemetry,
)
from titan_linear.run.best import LowestLoss, Validated
from titan_linear.run.build import rate_at
from titan_linear.run.console import finished, stopped, write_down
from titan_linear.run.data import RunData, with_epochs
from titan_linear.run.evaluate import Record, examine, open_prompts
from titan_linear.run.export import export_last
from titan_linear.run.generate import Validator
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import cleared
from titan_linear.run.reading import Reader
from titan_linear.run.session import join_group, session_of
from titan_linear.run.start import (
    build_checkpointer,
    build_loader,
    open_subject,
    saved_progress,
    set_weights,
)
from titan_linear.storage.rundir import CONFIG, RECORDERS
from titan_linear.storage.step_folders import Progress


class Trainer:
    """A run on this rank, ready for its next step.

    `host` is a group of all ranks in which they wait while one rank works alone at its
    disk. Inside steps, hosts use the default group, which has the steps' time-out
    (`ParallelDims.groups`).
    """

    def __init__(self, config: Config):
        self.config = config = with_epochs(config)
        self.stop = StopSignal()
        join_group()
        self.host = host_group()

        # What is trained, on which devices, and from which weights.
        progress = saved_progress(config, self.host)
        self.origin = Origin.of(config)
        subject = open_subject(self.origin, progress, self.host)
        self.content = subject.content
        self.session = session_of(
            config, self.origin.model, optimizer=config.optimizer, host=self.host
        )
        self.model = self.session.model
        self.dims = self.session.dims
        self.loader = build_loader(config, subject.streams, self.dims)
        self.checkpointer = build_checkpointer(config)
        set_weights(self.origin, progress, self.session, self.loader, self.checkpointer)
        self.step, self.skipped = (progress.step, progress.skipped) if progress else (0, 0)
        # The step that is being computed.
        self.begun = self.step

        # A step: forward and backward passes, then the update.
        self.telemetry = Telemetry(
            self.session,
            config.metrics.telemetry_freq,
            config.training.seq_len,
            subject.streams,
            subject.groups,
        )
        self.passes = self.session.passes(
            iter(self.loader),
            micro_steps=config.micro_steps(dist.get_world_size()),
            watching=self.telemetry.watching,
        )
        self.feed = self.passes.feed
        self.session.update.telemetry = self.telemetry

        # Hooks that run in each step, and work that runs between steps.
        self.spikes = Spikes(
            config.job.dump_folder, config.training, subject.streams, config.metrics.spike_sigmas
        )
        self.grace = Grace(
            config.checkpoint.grace_seconds,
            self.stop,
            dist.group.WORLD,
            self.feed.micro_steps,
            self._save_seconds,
        )
        self.compilation = Compilation(config.training, config.comm, self.session)
        self.hooks: list[Hook] = [self.spikes, self.telemetry, self.grace, self.compilation]
        # Exists on rank 0 only.
        self.exports: Exports | None = None
        reader = Reader(config, self.origin.tokenizer, self.session)
        ask = self.grace.ask_validating
        self.evaluation = Validator(reader, subject.held_out, ask)
        self.lowest = on_rank_0(lambda: LowestLoss.so_far(config, self.step), self.host)
        self._keep_best()
        self.examine: Callable[[], list[Record]] | None = None
        if config.evaluation.freq:
            prompts = open_prompts(RunData(config, reader.tokenizer))
            self.examine = partial(examine, reader, prompts, ask)

    @property
    def _ended(self) -> bool:
        """Whether the last step is done, or the validation loss no longer falls."""
        return self.step == self.config.training.steps or self.lowest.ends_run

    def _keep_best(self) -> None:
        if self.checkpointer and self.config.validation.keep_best:
            self.checkpointer.best = self.lowest.step

    def _save_seconds(self) -> float:
        return self.checkpointer.seconds if self.checkpointer else 0.0

    # --- One step -------------------------------------------------------------------------

    def train_step(self) -> dict[str, float | None]:
        """Run one optimizer step over the next global_batch_size streams and return its
        numbers.

        The loss is None if no token has a label.

        The host waits for the device once per step, for the step's numbers. Before it
        waits, it queues all of the step's work and, if nothing comes between the two steps,
        the next step's first forward: so the device always has work. With offload the host
        waits before the update, because it computes the update itself.

        Raises:
            NonFinite: the loss or the norm is not finite, and training.on_nonfinite is "stop".
            StepAbandoned: a signal came, and there is no time to complete the step (grace.py).
        """
        self.begun = self.step + 1
        for hook in self.hooks:
            hook.before_step(self.begun)
        # Queue each micro-batch (batch → forward → backward) and the update.
        losses, streams = self.passes.run(self.grace.ask)
        lr = rate_at(self.config, self.begun)
        host_copy = self.session.update.run(losses, lr, self.stop.received)
        self.step = self.begun
        self.loader.advance()
        # Prepare the next batches and queue the first forward while the device computes.
        feed_stats = self.feed.take(prefetch=not self._ended)
        if not self._ended and self._next_follows():
            self.passes.begin()
        # Wait for this step's numbers. They tell all ranks of a signal that any rank has
        # received.
        numbers = host_copy.wait()
        self.stop.agreed = int(numbers.signal)
        if self.stop.agreed:
            self.passes.drop()
        finite = math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm)
        self.skipped += not finite
        result = StepResult(
            step=self.step,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            lr=lr,
            skipped=self.skipped,
            finite=finite,
            stops=bool(self.stop.agreed),
            fed=feed_stats,
            losses=losses.view(len(losses), -1)[:, 0],
            reports=dict(zip(self.passes.loss.reports, numbers.reports)),
            streams=streams,
            seen=numbers.seen,
            moment=host_copy.arrived,
        )
        # Every hook gets the same record of the step.
        for hook in self.hooks:
            hook.after_step(result)
        return result.numbers

    def _next_follows(self) -> bool:
        """Whether the next step follows at once.

        It does if no validation or save is due, the streams keep their length, and
        telemetry watches neither step.
        """
        following = self.step + 1
        watched = self.telemetry.on or self.telemetry.watches(following)
        return not (watched or self.compilation.changes_length(following) or any(self._due()))

    def _due(self) -> tuple[bool, ...]:
        """Whether a save, a validation and an evaluation follow this step, if no signal
        comes.
        """
        config = self.config
        v = config.validation
        validations = v.freq if v.enable else 0
        frequencies = config.checkpoint.interval, validations, config.evaluation.freq
        return tuple(freq > 0 and (self.step % freq == 0 or self._ended) for freq in frequencies)

    # --- The loop -------------------------------------------------------------------------

    def train(self) -> None:
        """Run steps until the last one, or until a signal, after which the run saves and
        ends.
        """
        self.hooks += [kind(self.config, self.session) for kind in HOOKS.values()]
        self.hooks += self._writing_hooks()
        with ExitStack() as hooks:
            # Enter the hooks, so that each of them can clean up when the loop ends or
            # raises.
            for hook in self.hooks:
                hooks.enter_context(hook)
            try:
                while not self._ended and not self.stop.agreed:
                    self.train_step()
                    self._save_and_validate()
                    if self.checkpointer:
                        self.checkpointer.look()
            except StepAbandoned as why:
                self._abandon(str(why))
        with self._between_steps():
            self._finish()

    def _writing_hooks(self) -> list[Hook]:
        """Return the hooks that write files into the run's folder.

        Before them, rank 0 writes the configuration and the description of the run.
        """
        config = self.config
        first = dist.get_rank() == 0
        folder = config.job.dump_folder
        hooks: list[Hook] = [MemorySnapshots(folder, config.profiling)]
        if first:
            write_down(self.origin, self.session, self.step)
            hooks.append(
                Report(config, self.session, self.step, self.telemetry, self.compilation.numbers)
            )
        if first and config.checkpoint.export_interval:
            self.exports = Exports(config, self.step, self.checkpointer.in_use)
            hooks.append(self.exports)
        # The profiler comes after the report: the next step pays for the time of writing a
        # trace.
        if config.profiling.enable_profiling:
            starts = self.step, self.feed.settle, self._between_steps
            hooks.append(Profiler(folder, config.profiling, *starts))
        return hooks

    def _between_steps(self) -> ExitStack:
        """A context for work between steps."""
        stack = ExitStack()
        for hook in self.hooks:
            stack.enter_context(hook.between_steps())
        return stack

    def _save_and_validate(self) -> None:
        """Save, validate and evaluate, if due after this step. After a signal, only save."""
        saves, validates, evaluates = (True, False, False) if self.stop.agreed else self._due()
        if not (saves or validates or evaluates):
            return
        with self._between_steps():
            # The save comes first, so that an error in validation costs no steps.
            if saves:
                self.save()
            if validates:
                v = self.config.validation
                loss, *reports = self.evaluation.validate()
                self.lowest.judge(Validated(self.step, loss))
                self._keep_best()
                named = dict(zip(self.passes.loss.reports, reports))
                text = self.evaluation.text(v.sample_prompt, v.sample_tokens)
                for hook in self.hooks:
                    hook.after_validation(self.step, loss, named, text)
            if evaluates:
                records = self.examine()
                for hook in self.hooks:
                    hook.after_evaluation(self.step, records)

    def validate(self) -> float:
        """Return nats per token over the held-out documents."""
        return self.evaluation.validate()[0]

    def save(self) -> None:
        if self.checkpointer is None:
            return
        model_only = self._ended and self.config.checkpoint.last_save_model_only
        progress = Progress(
            step=self.step,
            skipped=self.skipped,
            total_steps=self.config.schedule_steps,
            content=self.content,
        )
        self.checkpointer.save(
            self.step,
            self.model,
            None if model_only else self.session.optimizer,
            progress,
            self.loader,
        )
        for hook in self.hooks:
            hook.after_save(self.step)

    def _abandon(self, why: str) -> None:
        """Save and end after a signal that came between two micro-steps or during a
        validation.

        The state has not changed since the last step's end.
        """
        if why and dist.get_rank() == 0:
            grace = self.config.checkpoint.grace_seconds
            print(f"stopping after step {self.step}: {why} (checkpoint.grace_seconds = {grace})")
        self.passes.drop()
        self.session.optimizer.zero_grad(set_to_none=True)
        if self.step:
            with self._between_steps():
                self.save()

    def _finish(self) -> None:
        """Complete the run after its last step: finish the save under way, the export, the
        sample.
        """
        if self.checkpointer:
            self.checkpointer.wait()
        # A run that was not stopped exports its weights and writes a sample.
        if not self.stop.agreed:
            if self.config.checkpoint.last_save_in_hf:
                export_last(self.origin, self.model, self.step, self.content.base)
            text = self.evaluation.text(
                self.config.sample.prompt, self.config.sample.max_new_tokens
            )
            if text and dist.get_rank() == 0:
                print(f"--- sample\n{text}\n---")
        # Exports that still run keep their checkpoints. Older ones can be removed
        # afterwards.
        if self.exports:
            self.exports.finish(self.stop)
            self.checkpointer.prune(self.step)
            self.exports.report(self.stop)
        if dist.get_rank() == 0:
            folder = self.config.checkpoint_folder if self.checkpointer else None
            print(
                stopped(self.step, folder) if self.stop.agreed else finished(self.config, self.step)
            )


# --- One process of a run -----------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Join the run's processes and train; return the exit code.

    An error is printed by `report`, or inside the process group by `Ending.leave`.
    """
    die_with_parent()
    ignore_warnings_of_torch()
    # SIGUSR1 asks for a memory snapshot (profiling.py). It is ignored except while the
    # trainer runs. The launcher blocks it in its workers until here.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    with outliving_readers():
        try:
            join(load_config(argv))
        except Exception as error:
            return report(error)
    # torchrun takes any other exit code as a failure.
    return 0


def join(config: Config) -> None:
    if config.debug.deterministic:
        be_deterministic()
    folder = Path(config.job.dump_folder)
    with (
        process_group(timedelta(seconds=config.comm.init_timeout_seconds)) as ending,
        ExitStack() as held,
    ):
        watch = held.enter_context(
            watched(folder / RECORDERS, ending.store, config.comm.train_timeout_seconds)
        )
        # Under torchrun, rank 0 checks the run and tokenizes here. The other ranks have
        # joined and can wait.
        if not under_launcher():
            world_size = dist.get_world_size()
            node_size = int(os.environ["LOCAL_WORLD_SIZE"])
            clearance = cleared(config, sys.argv[1:], world_size, node_size)
            on_rank_0(lambda: held.enter_context(clearance), host_group())
        try:
            train(config, watch, ending)
        # Tell the user which command predicts the memory that the run needs.
        except torch.OutOfMemoryError as error:
            plan = f"titan-linear plan --gpus {dist.get_world_size()} --job.config_file {folder / CONFIG}"
            raise torch.OutOfMemoryError(
                f"{explain(error)[1]}; what a run needs: {plan}"
            ) from error


def train(config: Config, watch: Watch, ending: Ending) -> None:
    trainer = Trainer(config)
    watch.step = lambda: trainer.begun
    watch.signal = trainer.stop.arrived
    if trainer.checkpointer:
        ending.finish = trainer.checkpointer.finish
    with trainer.stop:
        trainer.train()
    trainer.stop.report()


if __name__ == "__main__":
    end(main(sys.argv[1:]))
