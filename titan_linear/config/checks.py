"""Checks of a configuration by itself, before anything is read or started."""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from titan_linear.config.reading import on_cuda, toml_value
from titan_linear.config.schema import (
    COLUMNS,
    KEYS,
    LOSS_NAMES,
    OTHER,
    RECORDS,
    SMALLEST_EPS,
    SMALLEST_SHARE,
    ActivationCheckpoint,
    Adapter,
    Checkpoint,
    Config,
    Float8,
    Loss,
    LRScheduler,
    Metrics,
    Model,
    Parallelism,
    Profiling,
    Source,
    Training,
    Validation,
    has_records,
)

# Keys that have an effect only with this value of another.
EFFECTIVE_WITH = {
    ("activation_checkpoint.mode", "selective"): ("activation_checkpoint.selective_ac_option",),
    # Muon takes matrices of the base.
    ("adapter.enable", False): ("optimizer.name",),
    ("adapter.enable", True): (
        "loss.reference",
        *(key for key in KEYS if key.startswith("adapter.")),
    ),
    ("checkpoint.enable", True): (
        "checkpoint.load_step",
        "checkpoint.last_save_model_only",
        "checkpoint.last_save_in_hf",
        "checkpoint.export_interval",
        "checkpoint.grace_seconds",
        "validation.keep_best",
    ),
    ("compile.enable", True): ("compile.backend",),
    ("float8.enable", True): ("float8.filter_fqns", "float8.emulate"),
    **{
        ("loss.name", name): tuple(key for key in KEYS if key.startswith(f"{name}."))
        for name in LOSS_NAMES
    },
    ("optimizer.name", "muon"): ("optimizer.momentum",),
    ("validation.enable", True): (
        "validation.sample_tokens",
        "validation.keep_best",
        "validation.patience",
    ),
}


def check_config(config: Config, world_size: int) -> None:
    """Refuse a configuration that contradicts itself or cannot run on these processes.

    Args:
        world_size: number of processes.

    Raises:
        ValueError: naming the keys, their values, and valid ones.
    """
    # Batches, splits and types.
    parallelism = config.parallelism
    training = config.training
    dp = math.prod(parallelism.data_parallel_degrees(world_size))
    _check_batch(training, parallelism, dp)
    _, shards = parallelism.fsdp_degrees(world_size)
    _check_expert_parallel(parallelism, shards)
    if training.epochs:
        _check_epochs(training, config.lr_scheduler)
    else:
        _check_schedule(config.lr_scheduler, training.steps)
    _check_training(training)
    # The optimizer.
    if (taken := config.optimizer.lr * config.optimizer.weight_decay) >= 1:
        raise ValueError(
            f"optimizer.lr = {config.optimizer.lr} times optimizer.weight_decay = {config.optimizer.weight_decay} is "
            f"{taken:g}, what a step takes of each weight, and must be below 1; lower one of them"
        )
    if training.dtype != "float64" and config.optimizer.eps < SMALLEST_EPS:
        raise ValueError(
            f"optimizer.eps = {config.optimizer.eps} is 0 in training.dtype = {training.dtype!r}, and weights "
            f"whose gradients have all been 0 would become 0 / 0; use at least {SMALLEST_EPS}"
        )
    if config.loss.options and config.loss.name in LOSS_NAMES:
        raise ValueError(
            f"loss.options = {toml_value(config.loss.options)} has no effect with loss.name = {config.loss.name!r}; "
            f"use the section [{config.loss.name}], or remove it"
        )
    # Other sections, and keys that have no effect.
    _check_activation_checkpoint(config.activation_checkpoint)
    _check_effects(config.flat_keys())
    _check_float8(config.float8, parallelism.tensor_parallel_degree)
    _check_data(training, config.validation)
    _check_checkpoint(config.checkpoint)
    if config.validation.keep_best and config.validation.freq % config.checkpoint.interval:
        raise ValueError(
            f"validation.keep_best = true: validation.freq = {config.validation.freq} must be a multiple of "
            f"checkpoint.interval = {config.checkpoint.interval}, so that what is validated is saved; change one"
        )
    _check_file_groups(config.metrics, training.mixture)
    _check_profiling(config.profiling)
    if config.comm.max_restarts and not config.checkpoint.enable:
        raise ValueError(
            f"comm.max_restarts = {config.comm.max_restarts} starts again from checkpoints, and there are none; set "
            "checkpoint.enable = true, or comm.max_restarts = 0"
        )
    _check_hugging_face(config.model, config.checkpoint)
    _check_reference(config.loss, config.adapter)


def _check_activation_checkpoint(ac: ActivationCheckpoint) -> None:
    if ac.selective_ac_option != "op" and not re.fullmatch(
        "[1-9][0-9]{0,3}", ac.selective_ac_option
    ):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {ac.selective_ac_option!r} must be 'op', or a number n above "
            "0, to compute every n-th layer again"
        )


def _check_effects(values: Mapping[str, Any]) -> None:
    defaults = Config().flat_keys()
    for (other, value), keys in EFFECTIVE_WITH.items():
        for key in keys:
            if values[other] != value and values[key] != defaults[key]:
                raise ValueError(
                    f"{key} = {toml_value(values[key])} has no effect with {other} = {toml_value(values[other])}; set "
                    f"that to {toml_value(value)}, or remove {key}"
                )


def _check_float8(float8: Float8, tp: int) -> None:
    if float8.enable and tp > 1:
        raise ValueError(
            f"float8.enable = true scales whole rows, and parallelism.tensor_parallel_degree = {tp} leaves ranks parts "
            "of them; set it to false, or the degree to 1"
        )


def _check_batch(t: Training, p: Parallelism, dp: int) -> None:
    _check_length(p, "seq_len", t.seq_len)
    # Schedules only ascend, and lead to training.seq_len.
    for n, part in enumerate(t.seq_len_schedule):
        if part.seq_len > t.seq_len:
            raise ValueError(
                f"training.seq_len_schedule: seq_len = {part.seq_len} is more than training.seq_len = {t.seq_len}, at "
                "which streams arrive; raise that, or lower this"
            )
        if n and part.until_step <= (before := t.seq_len_schedule[n - 1].until_step):
            raise ValueError(
                f"training.seq_len_schedule: until_step = {part.until_step} comes after {before}; let the steps ascend"
            )
        _check_length(p, "seq_len_schedule: seq_len", part.seq_len)
    if t.global_batch_size % (dp * t.local_batch_size):
        raise ValueError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of training.local_batch_size × "
            f"data-parallel ranks = {t.local_batch_size} × {dp} = {t.local_batch_size * dp}; set a multiple, "
            "lower training.local_batch_size, or let ranks share streams (parallelism.context_parallel_degree)"
        )


def _check_length(p: Parallelism, key: str, seq_len: int) -> None:
    """Check that the ranks can cut streams of this length."""
    blocks = p.fragments
    if seq_len % blocks:
        raise ValueError(
            f"training.{key} = {seq_len} cannot be cut into {blocks} equal blocks (context_parallel_degree = "
            f"{p.context_parallel_degree}, context_parallel_layout = {p.context_parallel_layout!r}); use a multiple of "
            f"{blocks}, for example {math.ceil(seq_len / blocks) * blocks}"
        )
    # Tensor-parallel ranks share the tokens between layers, too.
    if seq_len % p.copies:
        multiple = math.lcm(blocks, p.copies)
        raise ValueError(
            f"training.{key} = {seq_len} cannot be shared between layers by {p.copies} ranks "
            f"(context_parallel_degree = {p.context_parallel_degree} × tensor_parallel_degree = "
            f"{p.tensor_parallel_degree}); use a multiple of {multiple}, for example "
            f"{math.ceil(seq_len / multiple) * multiple}"
        )


def _check_expert_parallel(p: Parallelism, sharers: int) -> None:
    if sharers % p.expert_parallel_degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {p.expert_parallel_degree} does not divide the {sharers} ranks that "
            "share parameters (data_parallel_shard_degree × context_parallel_degree, or fsdp_shard_degree), from which "
            f"it is borrowed; use a divisor of {sharers}"
        )


def _check_schedule(s: LRScheduler, steps: int) -> None:
    if s.total_steps and s.total_steps < steps:
        raise ValueError(
            f"lr_scheduler.total_steps = {s.total_steps} is less than training.steps = {steps}; use at least {steps}, "
            "or 0 to follow training.steps"
        )


def _check_epochs(t: Training, s: LRScheduler) -> None:
    # The number of steps is not known yet.
    for key, value, reason in (
        ("training.mixture", t.mixture, "whose sources have epochs of their own"),
        ("training.seq_len_schedule", t.seq_len_schedule, "which counts steps"),
        ("lr_scheduler.total_steps", s.total_steps, "which counts steps"),
    ):
        if value:
            raise ValueError(
                f"training.epochs = {t.epochs} is not for {key}, {reason}; give training.steps, or remove {key}"
            )


def _check_training(t: Training) -> None:
    # Types.
    types = (t.dtype, t.mixed_precision_param, t.mixed_precision_reduce)
    if "float64" in types and set(types) - {"float64", "auto"}:
        raise ValueError(
            f"training.dtype = {types[0]!r}, mixed_precision_param = {types[1]!r}, mixed_precision_reduce = "
            f"{types[2]!r}: float64 is for all three or for none; set them alike"
        )
    if t.dtype == "float64" and on_cuda():
        raise ValueError(
            "training.dtype = 'float64' runs on the CPU only; hide the GPUs with CUDA_VISIBLE_DEVICES= or use float32"
        )
    # Balance of experts.
    for key in ("expert_balance_coefficient", "expert_bias_update_rate"):
        if -1 < getattr(t, key) < 0:
            raise ValueError(
                f"training.{key} = {getattr(t, key)} must be 0 or more, or -1 for the model's"
            )


def _check_data(t: Training, v: Validation) -> None:
    if t.mixture:
        _check_mixture(t, v)
    elif t.mixture_from_step != -1:
        raise ValueError(
            f"training.mixture_from_step = {t.mixture_from_step} is the step from which training.mixture holds, and "
            "training.mixture is not set; remove it"
        )
    if t.group_field and not t.share_prefixes:
        raise ValueError(
            f"training.group_field = {t.group_field!r} needs training.share_prefixes = true; set it"
        )
    if t.truncation != "right" and not t.max_length:
        raise ValueError(
            f"training.truncation = {t.truncation!r} needs training.max_length; set it, or remove truncation"
        )
    # Each source, and how its records can share prefixes.
    for source in t.sources:
        _check_source(source)
        if t.max_length and (source.dataset == "tokens" or source.dataset_format == "tree"):
            raise ValueError(
                f"training.max_length = {t.max_length} is for documents that are tokenised, one per record, and "
                f"{source.key('dataset')} = {source.dataset!r}, _format = {source.dataset_format!r}; remove it"
            )
        if t.group_field and source.dataset_format == "preference":
            raise ValueError(
                f"training.group_field = {t.group_field!r}: each pair is a tree of its own; remove it"
            )
        records = has_records(source.dataset)
        if t.share_prefixes and (not records or source.dataset_format == "tree"):
            raise ValueError(
                f"training.share_prefixes is for records of documents, and {source.key('dataset')} = "
                f"{source.dataset!r}, _format = {source.dataset_format!r}; change that, or remove it"
            )
    # Validation.
    if v.enable and v.dataset_path and t.dataset == "stdlib" and not t.mixture:
        raise ValueError(
            f"validation.dataset_path = {v.dataset_path!r} is not used by training.dataset = 'stdlib'; remove it to "
            "validate on held-out documents"
        )
    if v.enable and not v.dataset_path and v.holdout == 0:
        raise ValueError(
            "validation.enable = true has nothing to validate on; set validation.holdout above 0, or "
            "validation.dataset_path"
        )
    if v.steps == 0:
        raise ValueError(
            "validation.steps = 0 validates nothing; use -1 for all, or validation.enable = false"
        )


def _check_source(s: Training | Source) -> None:
    dataset = s.key("dataset")
    if s.dataset == "stdlib" and s.dataset_path:
        raise ValueError(
            f"{dataset}_path = {s.dataset_path!r} is not used by {dataset} = 'stdlib'; remove it, or set {dataset} to "
            "its kind: text, jsonl, parquet, arrow or tokens"
        )
    if s.dataset != "stdlib" and not s.dataset_path:
        raise ValueError(f"{dataset} = {s.dataset!r} needs {dataset}_path: a file, folder or glob")
    # Columns and formats are for records.
    records = has_records(s.dataset)
    if s.dataset_columns and not records:
        raise ValueError(
            f"{dataset}_columns = {toml_value(s.dataset_columns)} is for {dataset} = {', '.join(RECORDS)}, and it is "
            f"{s.dataset!r}; remove it (a corpus of tokens knows its columns), or change {dataset}"
        )
    if unknown := [name for name in s.dataset_columns if name not in COLUMNS]:
        raise ValueError(
            f"{dataset}_columns: no loss reads {unknown[0]!r}; they read {', '.join(COLUMNS)}"
        )
    if s.dataset_format != "text" and not records:
        raise ValueError(
            f"{dataset}_format = {s.dataset_format!r} is for {dataset} = {', '.join(RECORDS)}, and it is "
            f"{s.dataset!r}; remove the format (a corpus of tokens knows its answers), or change {dataset}"
        )
    given = f"{dataset} = {s.dataset!r}"
    if records:
        given = f"{dataset}_format = {s.dataset_format!r}" if s.dataset_format != "text" else ""
    if given and s.dataset_text_field != "text":
        raise ValueError(
            f"{dataset}_text_field = {s.dataset_text_field!r} is not used by {given}; remove one of them"
        )


def _check_mixture(t: Training, v: Validation) -> None:
    default = Training()
    for key in (
        "dataset",
        "dataset_path",
        "dataset_text_field",
        "dataset_format",
        "dataset_columns",
    ):
        if getattr(t, key) != getattr(default, key):
            raise ValueError(
                f"training.{key} = {getattr(t, key)!r} is not used beside training.mixture, whose sources have each "
                "their own; remove one of them"
            )
    # Names are unique, and no share is too small to interleave.
    names = [s.name for s in t.mixture]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"training.mixture has two sources with name = {twice!r}; give each a name of its own"
        )
    least = min(t.mixture, key=lambda s: s.weight)
    total = sum(s.weight for s in t.mixture)
    if least.weight * SMALLEST_SHARE < total:
        raise ValueError(
            f"training.mixture, source {least.name!r}: weight = {least.weight} is less than 1/{SMALLEST_SHARE} of all, "
            f"{total}; raise it, or leave the source out"
        )
    if v.enable and v.dataset_path:
        raise ValueError(
            f"validation.dataset_path = {v.dataset_path!r} is not used beside training.mixture; remove it to validate "
            "on documents held out of every source"
        )


def _check_file_groups(metrics: Metrics, mixture: list[Source]) -> None:
    groups = metrics.loss_by_source
    if groups and not metrics.telemetry_freq:
        raise ValueError(
            "metrics.loss_by_source is shown by telemetry, which metrics.telemetry_freq = 0 turns off; set that to "
            "100, or remove metrics.loss_by_source"
        )
    names = [*(s.name for s in mixture), *(group.name for group in groups), OTHER]
    if groups and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise ValueError(
            f"metrics.loss_by_source: name = {twice!r} stands for two, of groups, sources of training.mixture, and "
            f"{OTHER!r}, which is what no group has; give each a name of its own"
        )


def _check_profiling(p: Profiling) -> None:
    for key in ("save_traces_folder", "save_memory_snapshot_folder"):
        path = os.path.normpath(getattr(p, key))
        if path == "." or path.split(os.sep)[0] == "..":
            raise ValueError(
                f"profiling.{key} = {getattr(p, key)!r} must be a folder inside job.dump_folder; give its name, or a "
                "path from the root"
            )
    if p.enable_profiling and p.profiler_active > p.profile_freq:
        raise ValueError(
            f"profiling.profiler_active = {p.profiler_active} steps of a trace are more than profiling.profile_freq = "
            f"{p.profile_freq}, the steps between traces; lower one, or raise the other"
        )


def _check_checkpoint(c: Checkpoint) -> None:
    if c.export_interval % c.interval:
        fitting = math.ceil(c.export_interval / c.interval) * c.interval
        raise ValueError(
            f"checkpoint.export_interval = {c.export_interval} must be a multiple of checkpoint.interval = "
            f"{c.interval}: what is exported is a checkpoint; for example {fitting}"
        )
    if c.export_dtype != "float32" and not (c.last_save_in_hf or c.export_interval):
        raise ValueError(
            f"checkpoint.export_dtype = {c.export_dtype!r} has no effect without checkpoint.last_save_in_hf = true or "
            "checkpoint.export_interval; set one, or remove checkpoint.export_dtype"
        )
    if c.export_dtype == "source" and not c.initial_load_in_hf:
        raise ValueError(
            "checkpoint.export_dtype = 'source' is for runs with checkpoint.initial_load_in_hf; use 'float32', "
            "'bfloat16' or 'float16'"
        )


def _check_hugging_face(m: Model, c: Checkpoint) -> None:
    """Check the keys of a run that begins from a Hugging Face folder."""
    loaded = c.initial_load_path if c.initial_load_in_hf else ""
    if c.initial_load_in_hf and not (loaded or m.hf_assets_path):
        raise ValueError(
            "checkpoint.initial_load_in_hf = true has nothing to load; set checkpoint.initial_load_path (or "
            "model.hf_assets_path) to a Hugging Face folder"
        )
    if m.flavor == "hf" and not (m.hf_assets_path or loaded):
        raise ValueError(
            "model.flavor = 'hf' needs model.hf_assets_path, a folder with the config.json of a model, or "
            "checkpoint.initial_load_in_hf = true with such a folder as checkpoint.initial_load_path"
        )
    if m.hf_assets_path and m.flavor != "hf" and not c.initial_load_in_hf:
        raise ValueError(
            f"model.hf_assets_path = {m.hf_assets_path!r} is the model of model.flavor = 'hf', and this run has "
            f"{m.flavor!r}; change one of them"
        )


def _check_reference(loss: Loss, adapter: Adapter) -> None:
    if loss.reference == "base" and adapter.initial_load_path:
        raise ValueError(
            "loss.reference = 'base' is the model without adapters, and this run begins from those of "
            f"adapter.initial_load_path = {adapter.initial_load_path!r}; begin from what titan-linear convert merge "
            "writes of them, or have titan-linear score make the column (loss.reference = 'column')"
        )
