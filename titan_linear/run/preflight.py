"""Checks before any process starts: corpus, tokenizer, model and checkpoint.

Checks of the keys alone are in config/checks.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from titan_linear.config import Config, LRScheduler, Sample, Validation, check_config
from titan_linear.data import (
    MixedStreams,
    Streams,
    TaskSample,
    Tokenizer,
    TreeStreams,
    verify_changed,
    verify_corpus,
)
from titan_linear.data.tasks import LOSS, TASKS
from titan_linear.models.config import ModelConfig
from titan_linear.run.best import LowestLoss
from titan_linear.run.build import unallocated
from titan_linear.run.console import exchanged_of_trees, finished, vocabulary
from titan_linear.run.data import RunData, check_content, content_of, tokens_of, with_epochs
from titan_linear.run.evaluate import open_prompts
from titan_linear.run.export import check_exports, is_exported, lacks_export, not_exported
from titan_linear.run.folder import RunFolder
from titan_linear.run.model_checks import check_model
from titan_linear.run.origin import Origin
from titan_linear.step.optimizer import learning_rate
from titan_linear.storage.hf_io import read_config
from titan_linear.storage.step_folders import (
    REWOUND,
    Progress,
    complete_steps,
    find_step,
    read_progress,
    verify,
)
from titan_linear.storage.tensors import check_weights, holds_optimizer

# Environment variables of the run's own processes.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def cleared(
    config: Config, argv: list[str], world_size: int, node_size: int, *, first: bool = True
) -> Iterator[None]:
    """Run all checks, report how the run resumes, and lock its folders inside `with`.

    Args:
        argv: the run's command line, for the doctor.
        node_size: number of processes on this node.
        first: whether this is node 0, which holds the locks for all nodes and has the
            doctor check the run.

    Raises:
        ValueError, SystemExit: as `RunFolder`, `preflight` and `prove`.
    """
    config = with_epochs(config)
    if epochs := config.training.epochs:
        print(f"training.epochs = {epochs}: {config.training.steps:,} steps")
    folder = RunFolder(config)
    if warning := folder.copied_configuration:
        print(warning)
    with folder.claimed() if first else nullcontext():
        for change in folder.check_resume():
            print(f"resuming with {change}")
        preflight(config, world_size, node_size)
        if config.doctor.at_start and first:
            prove(argv, world_size)
        yield


def preflight(config: Config, world_size: int, node_size: int | None = None) -> None:
    """Run all checks that need no process, and build the token cache once.

    The cache has a progress bar.

    Args:
        node_size: number of processes on this machine; None for all.

    Raises:
        ValueError: a corpus, tokenizer, model or checkpoint cannot be used.
        SystemExit: the run in this folder is finished.
    """
    # Keys, packages, and a folder whose run is finished.
    check_config(config, world_size)
    folder = RunFolder(config)
    if folder.finished_without_checkpoint and not config.job.start_anew:
        print(
            f"the run in {config.job.dump_folder!r} is finished and left no checkpoint: --job.start_anew true trains "
            "it again (and sets its metrics aside), another job.dump_folder starts another run"
        )
        raise SystemExit(0)
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        raise ValueError(
            "metrics.enable_wandb = true needs the package wandb, which is not installed; pip install wandb, or set it "
            "to false"
        )
    # The model and its tokenizer.
    origin = Origin.of(config)
    tokenizer = origin.tokenizer
    print(tokenizer.summary)
    model = origin.model
    if line := vocabulary(origin, model, tokenizer):
        print(line)
    check_prompts(config.validation, config.sample, tokenizer)
    if warning := check_model(model, config, world_size, node_size or world_size):
        print(warning)
    # The checkpoint comes before the corpus, which may take hours to tokenise.
    progress = _check_checkpoint(origin)
    folder.check_writable()
    check_mixture_step(config.training.mixture_from_step, config.job.dump_folder, progress)
    data = RunData(config, tokenizer)
    streams, held_out = _check_data(data, model, progress)
    if progress:
        content = content_of(origin, streams, held_out, origin.base_fingerprint)
        check_content(config, progress.content, content)
    if config.evaluation.freq:
        check_evaluation(data, model, origin.assets)


def _check_data(
    data: RunData, model: ModelConfig, progress: Progress | None
) -> tuple[Streams, Streams | None]:
    """Check every corpus against its checksums, and return the streams cut from them."""
    t = data.training
    for corpus in data.corpora():
        (verify_corpus if t.verify == "always" else verify_changed)(corpus)
        print(corpus.summary)
    streams, held_out = data.streams(progress)
    if isinstance(streams, MixedStreams):
        print(streams.summary(t.steps * t.global_batch_size))
    for source in streams.sources.values():
        # A corpus of tokens may hold a document that is longer than a stream.
        source.runs(0)
        if isinstance(source, TreeStreams) and source.summary:
            print(source.summary)
    if line := exchanged_of_trees(data.parallelism, model, streams):
        print(line)
    # A corpus smaller than a step may be intended, in a trial; one smaller than a stream is
    # not.
    try:
        data.check_size(tokens_of(streams))
    except ValueError as error:
        if tokens_of(streams) < t.seq_len:
            raise
        print(f"warning: {error}")
    if held_out is not None:
        check_held_out(held_out, data.validation.steps)
    if groups := data.groups(streams):
        print(groups.summary)
    return streams, held_out


def _check_checkpoint(origin: Origin) -> Progress | None:
    """Check that the run's checkpoint, or its first weights, are whole and fit this model.

    Exports must fit the model, too.

    Returns:
        The progress saved in the checkpoint that the run resumes from; None for a new run.
    """
    config = origin.config
    steps = config.training.steps
    c = config.checkpoint
    folder = config.checkpoint_folder
    exports = check_exports(origin)
    step = find_step(folder, c.load_step) if c.enable else None
    # A new run begins from these weights, and exports may be like them.
    origin.check(new=step is None, exports=exports)
    if step is None:
        return None
    checkpoint = folder / f"step-{step}"
    verify(checkpoint)
    # Say where a resumed run stands, and end here if it is finished.
    rewound = c.load_step not in (-1, step)
    if step > steps and c.load_step == -1:
        raise ValueError(
            f"training.steps = {steps} is less than the {step} steps that the run in "
            f"{config.job.dump_folder!r} has done; give more, or go back to a step before: checkpoint.load_step"
        )
    if rewound:
        print(
            f"resuming from step {step}: the run went back to checkpoint.load_step = {c.load_step} before; to do so "
            f"again, move '{folder / REWOUND}' away",
        )
    ended = step >= steps or LowestLoss.so_far(config, step).ends_run
    if ended and (c.load_step == -1 or rewound):
        print(finished(config, step))
        if c.last_save_in_hf and not is_exported(config, step):
            print(
                f"its Hugging Face folder is not there; titan-linear convert to-hf '{folder}' FOLDER makes one"
            )
        if lacking := [saved for saved in complete_steps(folder) if lacks_export(config, saved)]:
            print(not_exported(lacking))
        raise SystemExit(0)
    # A run that continues needs the optimizer, the same model and the same schedule.
    if not holds_optimizer(checkpoint):
        raise ValueError(
            f"'{checkpoint}' holds weights only (checkpoint.last_save_model_only): no run can resume from it; "
            "start a new run with checkpoint.initial_load_path, or resume from an earlier checkpoint.load_step"
        )
    check_weights(checkpoint, unallocated(origin.model))
    progress = read_progress(checkpoint)
    check_schedule(steps, config.optimizer.lr, config.lr_scheduler, progress)
    return progress


def check_schedule(steps: int, lr: float, schedule: LRScheduler, progress: Progress) -> None:
    """Check that the last finished step keeps its learning rate.

    An explicit lr_scheduler.total_steps may change it. If the rate of one step agrees, so
    do the rates of earlier steps, because schedules can only differ in length.

    Args:
        steps: training.steps, to which the schedule extends now.
        progress: the steps that are done, and the length of the schedule so far.
    """
    step = progress.step
    length = progress.total_steps
    if schedule.total_steps:
        return
    # Compare the rate of this step under the old and the new length.
    then, now = (learning_rate(step, lr, schedule, n) for n in (length, steps))
    if then != now:
        keep = (
            f"lr_scheduler.total_steps = {length}"
            if length >= steps
            else f"training.steps to at most {length}"
        )
        raise ValueError(
            f"training.steps = {steps} would change the learning rate of the {step} steps that are done, which decays "
            f"until training.steps (lr_scheduler.total_steps = 0), and that was {length}; set {keep} to keep the "
            f"schedule, or lr_scheduler.total_steps = {steps} to resume with the new one"
        )


def check_prompts(v: Validation, s: Sample, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a prompt has no tokens: some tokenizers drop blanks, for example."""
    for key, prompt, tokens in (
        ("validation.sample_prompt", v.sample_prompt, v.sample_tokens),
        ("sample.prompt", s.prompt, s.max_new_tokens),
    ):
        if tokens and not len(tokenizer.encode(prompt)):
            raise ValueError(f"{key} = {prompt!r} has no tokens; give some text to continue")


def check_held_out(held_out: Streams, steps: int) -> None:
    """Raise ValueError if no validation stream has a label: the loss would be 0 / 0.

    steps: validation.steps.
    """
    number = len(held_out)
    validated = number if steps == -1 else min(steps, number)
    if not any(held_out[i].columns["weights"].any() for i in range(validated)):
        raise ValueError(
            f"validation.steps = {steps}: no token in the first {validated:,} of {number:,} held-out streams is one to "
            "learn, as answers are; raise it (-1 takes all), or validation.holdout"
        )


def check_mixture_step(step: int, folder: str, progress: Progress | None) -> None:
    """Raise ValueError if the mixture changes at a step that has no steps before it.

    Args:
        step: training.mixture_from_step.
        folder: job.dump_folder.
    """
    if step > 0 and not progress:
        raise ValueError(
            f"training.mixture_from_step = {step} goes on from step {step} of a run, and job.dump_folder = "
            f"{folder!r} has no checkpoint to resume from; give that run's folder, or remove "
            "training.mixture_from_step to begin with this mixture"
        )


def prove(argv: list[str], world_size: int) -> None:
    """Run the doctor for a run of `world_size` processes.

    It has its own process, which leaves nothing on a GPU.

    Raises:
        SystemExit: a check fails; the console names it.
    """
    environment = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    command = [sys.executable, "-m", "titan_linear.proof.doctor", *argv]
    if code := subprocess.call(command, env=environment | {"NGPU": str(world_size)}):
        print("doctor.at_start = true: the run is not started", file=sys.stderr)
        raise SystemExit(code)


def check_evaluation(data: RunData, model: ModelConfig, folder: Path | None) -> None:
    """Raise ValueError for an unknown task or an unfit length.

    A length may be unfit for a task, for the texts or for the model.

    Args:
        folder: the Hugging Face folder that defines the model, if there is one.
    """
    e = data.evaluation
    known = (*TASKS, LOSS)
    if unknown := [task for task in e.tasks if task not in known]:
        raise ValueError(
            f"evaluation.tasks: {unknown[0]!r} is unknown; use some of {', '.join(known)}"
        )
    # The model's positions: as extended by rope_scaling, else as trained.
    longest = max(e.lengths)
    trained = read_config(folder).get("max_position_embeddings") if folder else None
    scalings = [getattr(mixer, "rope_scaling", None) for mixer in model.mixers if mixer.rotary]
    limits = [scaling.reached if scaling else trained for scaling in scalings]
    if past := [limit for limit in limits if limit and limit < longest]:
        raise ValueError(
            f"evaluation.lengths: {longest} is above the {min(past):,.0f} positions of the model; give less, or extend "
            "them by rope_scaling"
        )
    # Make the shortest and the longest prompt of each task.
    prompts = open_prompts(data)
    for task in e.tasks:
        for length in (min(e.lengths), longest):
            prompts.prompt(TaskSample(task, length, 1.0, 0))
