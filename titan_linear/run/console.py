"""Console lines: what a run consists of (also written into its folder), and what it leaves."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.config import Config, Parallelism, Sample, Training, toml_value
from titan_linear.data import Streams, Tokenizer, TreeStreams
from titan_linear.data.streams.loader import micro_batch
from titan_linear.models.config import ModelConfig
from titan_linear.models.float8 import float8_line
from titan_linear.models.lora import described
from titan_linear.models.mixers.recurrent import RecurrentOptions
from titan_linear.ops.layout.fragments import cut_streams
from titan_linear.ops.layout.tree_tables import exchanged, tree_of
from titan_linear.ops.registry import start_lines
from titan_linear.run.best import LowestLoss
from titan_linear.run.build import unallocated
from titan_linear.run.export import is_exported
from titan_linear.run.folder import RunFolder
from titan_linear.run.origin import VOCAB_MULTIPLE, Origin
from titan_linear.run.session import Session
from titan_linear.step.flops import no_peak, peak_tflops
from titan_linear.storage.run_manifest import write_manifest
from titan_linear.storage.rundir import BOARD
from titan_linear.storage.tensors import named_parameters

# The folder that contains the package.
ROOT = Path(__file__).parents[2]


def write_down(origin: Origin, session: Session, step: int) -> None:
    """Write and print what the run consists of, on rank 0.

    Args:
        step: number of the run's steps before this start.
    """
    config = origin.config
    model = session.model
    device = session.device
    folder = RunFolder(config)
    if folder.starts_anew:
        folder.set_run_aside()
    folder.write_config()
    parameters = sum(p.numel() for p in named_parameters(model).values())
    write_manifest(
        folder.path,
        parameters=parameters,
        world_size=dist.get_world_size(),
        degrees=session.dims.degrees,
        implementations={op: choice.implementation for op, choice in model.implementations.items()},
    )
    compute = config.training.mixed_precision_param
    peak = peak_tflops(config.metrics.peak_tflops, compute, device)
    # Lines that do not apply are empty.
    lines = [
        f"model {model_name(origin)}: {parameters:,} parameters, {model.config.composition}",
        *start_lines(model.implementations),
        described(unallocated(model.config)),
        float8_line(model),
        uncompiled(config.compile.enable, device),
        unbalanced(model.config),
        unwarmed(config.training.steps, config.lr_scheduler.warmup_steps),
        f"mesh {session.dims.description}",
        session.sharding.uneven(config.training.local_batch_size * config.training.seq_len),
        f"resuming from step {step}" if step else origin.title,
        no_peak(compute, device) if peak is None else "",
    ]
    print("\n".join(filter(None, lines)))


def model_name(origin: Origin) -> str:
    """Return a readable name of the model.

    It is the name and flavor, or architecture and folder, with the keys that change the
    model's sizes.
    """
    m = origin.config.model
    name = f"{m.name}/{m.flavor}"
    if m.flavor == "hf":
        name = f"{origin.family()} of '{origin.assets}'"
    sizes = {"dim", "num_layers", "hidden_dim", "pattern", "moe"}
    keys = m.model_dump(include=sizes, exclude_defaults=True) | m.mixers
    changes = [f"{key} = {toml_value(value)}" for key, value in keys.items()]
    return name + (f" with {', '.join(changes)}" if changes else "")


def vocabulary(origin: Origin, model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return a console line about an unusual vocabulary, else "".

    The size differs from the preset's, or is far larger than the tokenizer's.
    """
    rows = model.vocab_size
    used = tokenizer.vocab_size
    own = origin.definition.vocab_size
    flavor = origin.config.model.flavor
    if not origin.follows_tokenizer:
        return ""
    if rows != own:
        return f"model.vocab_size = {rows}: the tokenizer's {used}, rounded up; {flavor!r} alone has {own}"
    if rows > 2 * max(used, VOCAB_MULTIPLE) and rows - used > 1024:
        return f"model.vocab_size = {rows} is the preset's; the tokenizer uses {used}: a new run can set fewer"
    return ""


def exchanged_of_trees(p: Parallelism, model: ModelConfig, streams: Streams) -> str:
    """Return a console line about exchanged states of prefix trees, else "".

    It counts what linear layers exchange for the first stream, if ranks share the stream.
    """
    trees = any(isinstance(source, TreeStreams) for source in streams.sources.values())
    recurrent = [mixer for mixer in model.mixers if isinstance(mixer, RecurrentOptions)]
    if not (
        trees
        and recurrent
        and p.context_parallel_degree > 1
        and p.context_parallel_linear_method == "kcp"
    ):
        return ""
    nodes = micro_batch(streams, 0, 1, 0, 1).trees
    if not nodes.joined:
        return ""
    parents = torch.from_numpy(nodes.parents)
    cut = cut_streams(nodes.edges, 1, p.context_parallel_degree, p.context_parallel_layout, parents)
    points, folds = exchanged(tree_of(nodes, cut.owners, cut.fragment_length, 0))
    # The number of entries of a state and an M.
    entries = max(m.heads * m.ops[m.op]["K"] * sum(m.ops[m.op].values()) for m in recurrent)
    size = points * entries * 4 / p.tensor_parallel_degree / 2**20
    return f"prefix trees of stream 0: in a linear layer a rank sends {points} states ({size:.2g} MiB), folds: {folds}"


def unbalanced(model: ModelConfig) -> str:
    """Return a console line if nothing balances the loads of the model's experts, else ""."""
    moe = model.moe
    if moe is None or moe.balance_coefficient or moe.bias_update_rate:
        return ""
    moves = moe.selection_bias and not model.adapter
    by_bias = " or training.expert_bias_update_rate = 0.001" if moves else ""
    return f"nothing balances the experts' loads; training.expert_balance_coefficient = 0.01{by_bias} does"


def uncompiled(compiled: bool, device: torch.device) -> str:
    """Return a console line if layers run on a GPU without being compiled, else ""."""
    if compiled or device.type != "cuda":
        return ""
    return (
        "layers are not compiled: norms, gates, activations and casts are kernels of their own, which take longer and "
        "keep more for backward; compile.enable = true fuses them (the first step then takes up to a minute)"
    )


def unwarmed(steps: int, warmup: int) -> str:
    """Return a console line if the run ends before its learning rate has risen, else ""."""
    if steps >= warmup:
        return ""
    return (
        f"warning: training.steps = {steps} ends within lr_scheduler.warmup_steps = {warmup}: the learning rate never "
        "rises to optimizer.lr; set fewer to warm up"
    )


def program(name: str, module: str) -> str:
    """Return the shell command for a program of this environment, which need not be active."""
    script = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(script):
        return name
    if script.exists():
        return shlex.quote(os.path.relpath(script))
    # The package is not installed.
    return f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m {module}"


def finished(config: Config, step: int) -> str:
    """Return lines that tell where a finished run lies and what to do with it."""
    folder = shlex.quote(config.job.dump_folder)
    ours = program("titan-linear", "titan_linear")
    lowest = LowestLoss.so_far(config, step)
    early = (
        f", as the loss did not fall in validation.patience = {lowest.patience} validations"
        if step < config.training.steps
        else ""
    )
    lines = [
        f"the run in {config.job.dump_folder!r} is finished: {step} of training.steps = {config.training.steps}{early}"
    ]
    if config.metrics.enable_tensorboard:
        lines.append(
            f"see its curves:  {program('tensorboard', 'tensorboard.main')} --logdir {folder}/{BOARD}"
        )
    # The remaining commands read a checkpoint.
    if not config.checkpoint.enable:
        return "\n".join(lines)
    first = first_words(config.training, config.sample)
    lines.append(f"let it write:    {ours} generate {folder} {first}")
    if not Origin.of(config).exports_whole:
        lines.append(f"merge it:        {ours} convert merge {folder} FOLDER")
    if not is_exported(config, step):
        lines.append(f"export it:       {ours} convert to-hf {folder} FOLDER")
    if lowest.step:
        best = config.checkpoint_folder / f"step-{lowest.step}"
        kept = f", saved in '{best}'" if best.exists() else ""
        lines.append(f"lowest validation loss: {lowest.loss:.4f} at step {lowest.step}{kept}")
    return "\n".join(lines)


def first_words(training: Training, sample: Sample) -> str:
    """Return the option of titan-linear generate that fits the run's texts."""
    if any(source.dataset_format == "messages" for source in training.sources):
        return "--chat"
    # The default prompt is code, so it fits only a run on code.
    of_code = training.dataset == "stdlib" and not training.mixture
    if of_code or sample != Sample():
        return f"--prompt {shlex.quote(sample.prompt)}"
    return "--prompt TEXT"


def stopped(step: int, folder: Path | None) -> str:
    """Return a line that tells what a run leaves that a signal has stopped.

    folder: the checkpoints; None: they are turned off.
    """
    if not (folder and step):
        return "nothing was saved"
    return f"saved step {step} in '{folder}'; the same command resumes"
