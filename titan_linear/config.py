"""A run's configuration: a TOML file, overridden by `--section.key value`, and checked strictly.

    config = load_config(["--job.config_file", "train_configs/debug.toml", "--training.steps", "100"])
    check_config(config, world_size=2)

Sections and keys are those of TorchTitan v0.2 wherever the same thing exists. TOML has no null: where a key may be
unset, the empty string or the number named in its description stands for that. `--help` prints the descriptions below.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Job(_Strict):
    """The run and its folder."""

    config_file: str = ""
    """TOML file to read; command-line keys override it. Not a key of the file itself."""
    dump_folder: str = Field("outputs", min_length=1)
    """Folder of the run. The same command in the same folder resumes from its newest whole checkpoint."""
    description: str = ""
    """Free text, kept with the run."""
    start_anew: bool = False
    """Begin again, with any configuration, in a folder whose run left no checkpoint; what that run left is set aside.
    If there is a checkpoint, the run resumes from it."""


class Model(_Strict):
    """The network and its tokenizer."""

    name: Literal["hybrid", "kda", "gdn", "qwen3.5", "qwen3-next", "olmo-hybrid", "kimi-linear"] = "hybrid"
    """Family: linear layers only (kda, gdn), a pattern with softmax attention (hybrid), or a published hybrid."""
    flavor: str = Field("debug", min_length=1)
    """Preset of the family: debug, 340M, 1.3B, 27B, 80B-A3B, ... (--help flavors lists them); hf: the model in
    model.hf_assets_path, whatever model.name is. The keys of sizes below change it."""
    dim: int = Field(0, ge=0)
    """Width of the model; 0: the flavor's."""
    num_layers: int = Field(0, ge=0)
    """Number of layers; 0: the flavor's."""
    hidden_dim: int = Field(0, ge=0)
    """Hidden channels of each layer's SwiGLU; 0: the flavor's."""
    pattern: list[str] = []
    """Mixers of the first layers, which further layers repeat: ["kda", "kda", "kda", "attention"]; []: the flavor's."""
    kda: dict[str, Any] = {}
    """Options of KDA layers that differ from the flavor's, {heads = 8, …}, or --model.kda.heads 8 (--help flavors lists
    them, here and below). The empty string stands for none."""
    gdn: dict[str, Any] = {}
    """Options of Gated DeltaNet layers."""
    attention: dict[str, Any] = {}
    """Options of softmax attention."""
    mla: dict[str, Any] = {}
    """Options of latent attention."""
    moe: dict[str, Any] = {}
    """Options of the experts; with them, a flavor without experts gets some."""
    hf_assets_path: str = ""
    """Hugging Face folder whose config.json defines flavor hf and whose tokenizer is the default; empty: the folder
    that checkpoint.initial_load_in_hf loads."""
    vocab_size: int = Field(0, ge=0)
    """Rows of the embedding and the head, at least the tokenizer's vocabulary; 0: the preset's number, or, if that is
    too small and the weights are drawn, not loaded, the tokenizer's vocabulary rounded up to a multiple of 64."""
    tokenizer_path: str = ""
    """A Hugging Face tokenizer.json, or the folder that holds it; empty: that of the run's Hugging Face folder if it
    has one, else bytes are tokens."""
    impl: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of the ops; auto takes the fastest that supports the device, and says which."""


Dataset = Literal["stdlib", "text", "jsonl", "parquet", "arrow", "tokens"]
DatasetFormat = Literal["text", "messages", "completion"]


class Source(_Strict):
    """A source of training.mixture. Keys that it leaves out have the defaults of [training]."""

    name: str = Field(min_length=1)
    weight: float = Field(gt=0)
    dataset: Dataset
    dataset_path: str = ""
    dataset_text_field: str = Field("text", min_length=1)
    dataset_format: DatasetFormat = "text"


class Shorter(_Strict):
    """A part of training.seq_len_schedule."""

    until_step: int = Field(ge=1)
    seq_len: int = Field(ge=1)


class Training(_Strict):
    """Data, batch and numerical precision."""

    dataset: Dataset = "stdlib"
    """Source of the documents: Python's own standard library, text files, JSON lines, parquet, a folder that Hugging
    Face's datasets saved (arrow), or token files."""
    dataset_path: str = ""
    """File, folder or globs (separated by commas) of the corpus; every dataset but stdlib needs it."""
    dataset_text_field: str = Field("text", min_length=1)
    """Field (jsonl) or column (parquet, arrow) that holds a document's text."""
    dataset_format: DatasetFormat = "text"
    """What a record of jsonl, parquet or arrow is: a text; a conversation, its messages written by the tokenizer's chat
    template; or a prompt and its completion. Of the last two only the answers are trained on."""
    mixture: list[Source] = []
    """Several sources instead of the one above, [{name = "web", weight = 0.7, dataset = "jsonl", dataset_path = "…"},
    …], each with those of the keys above that it needs. Streams come from them in proportion to their weights."""
    mixture_from_step: int = Field(-1, ge=-1)
    """Step at which training.mixture changes: the step that the run resumes from; -1: it does not change."""
    on_bad_document: Literal["stop", "skip"] = "stop"
    """What to do about a record that is no document (not JSON, no such field, not UTF-8 for a tokenizer that needs it,
    a conversation without an answer): stop before the run starts, or skip and count them and name the first few."""
    verify: Literal["always", "changed"] = "changed"
    """Check every byte of the corpus against its checksums at every start (always), or only when a file's size, time or
    inode differs from when the corpus was last found whole on this machine (changed): what a disk alters by itself then
    goes unnoticed."""
    seq_len: int = Field(2048, ge=1)
    """Tokens of one packed stream, over all context-parallel ranks."""
    seq_len_schedule: list[Shorter] = []
    """Shorter streams first, [{until_step = 1000, seq_len = 8192}, …]: streams have seq_len tokens up to and including
    until_step, and training.seq_len after the last of these. Every step has training.global_batch_size streams."""
    local_batch_size: int = Field(1, ge=1)
    """Streams of one micro-step on one data-parallel rank."""
    global_batch_size: int = Field(8, ge=1)
    """Streams of one optimizer step; gradients are accumulated up to it."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps of the run."""
    max_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global 2-norm."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of parameters and optimizer states. float64 is for proofs on the CPU."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Type of compute. auto: float64 with training.dtype float64, else bfloat16 on CUDA and float32 on the CPU."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Type of gradient reductions. auto: float64 with training.dtype float64, else float32."""
    enable_cpu_offload: bool = False
    """Keep the parameters that FSDP manages, their gradients and the optimizer's states in the host's memory, and run
    AdamW there: a GPU holds these only for the layers that it is computing. Works on one GPU too. Steps take longer."""
    loss_chunk_size: int = Field(2048, ge=1)
    """Number of tokens whose logits exist at once, in the head and the loss."""
    expert_balance_coefficient: float = Field(-1.0, ge=-1)
    """Coefficient of the experts' load-balance loss; 0: none; -1: the model's."""
    expert_bias_update_rate: float = Field(-1.0, ge=-1)
    """How far a step moves the expert-selection biases towards equal loads; 0: not at all; -1: the model's."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """After a non-finite loss or gradient, stop the run, or skip and count the step. It never reaches the weights."""
    num_workers: int = Field(0, ge=0)
    """Threads that read batches ahead on each rank, two batches each; 0: batches are read when a step asks for them."""


class Optimizer(_Strict):
    """The optimizer."""

    name: Literal["AdamW"] = "AdamW"
    """Optimizer."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of weight matrices; norms, biases, A_log and dt_bias have none."""


class LRScheduler(_Strict):
    """The learning rate over the steps: warmup, then constant, then decay."""

    warmup_steps: int = Field(100, ge=0)
    """Steps over which the rate rises linearly from 0 to optimizer.lr; a shorter run ends before the rise does."""
    total_steps: int = Field(0, ge=0)
    """Step at which the decay ends; 0: training.steps, which then may not change once the decay has begun."""
    decay_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the total steps over which the rate decays, at the end; at most what warmup leaves. 1: all after it."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """Shape of the decay."""
    min_lr_factor: float = Field(0.1, ge=0, le=1)
    """The rate at the end of the decay, as a share of optimizer.lr."""


class Parallelism(_Strict):
    """How the ranks share the work. The degrees multiply to the number of processes."""

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: int = Field(-1, ge=-1)
    """Ranks that share parameters and take different streams (FSDP); -1: the ranks that are left."""
    fsdp_reshard_after_forward: Literal["always", "never"] = "always"
    """Free a layer's gathered parameters after its forward and gather them again in backward (always), or keep them
    until then (never): faster, at the cost of 2 bytes per parameter of all layers in bfloat16."""
    context_parallel_degree: int = Field(1, ge=1)
    """Ranks that share one stream."""
    context_parallel_layout: Literal["contiguous", "zigzag"] = "contiguous"
    """One fragment of each stream per rank (contiguous), or two mirrored ones (zigzag), which balance causal ring
    attention; all-to-all over heads and all-gather are balanced in both, and linear layers are faster in the first."""
    context_parallel_method: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """Exchange in the softmax layers; "auto" is all-to-all over heads ("ulysses") where possible."""
    context_parallel_linear_method: Literal["kcp", "ulysses"] = "kcp"
    """Exchange in the linear layers: states of the recurrence (KCP), or all-to-all over heads."""
    tensor_parallel_degree: int = Field(1, ge=1)
    """Ranks that split every layer by heads and hidden channels, the vocabulary, and the tokens between layers."""
    expert_parallel_degree: int = Field(1, ge=1)
    """Ranks, out of those that share parameters (data_parallel_shard_degree × context_parallel_degree), that divide the
    experts among themselves instead: tokens travel to the experts."""


class Checkpoint(_Strict):
    """Saving and resuming."""

    enable: bool = True
    """Save, and resume from what is saved."""
    folder: str = Field("checkpoint", min_length=1)
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: int = Field(500, ge=1)
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """Write while training goes on (async), or before it goes on (disabled)."""
    keep_latest_k: int = Field(10, ge=0)
    """Checkpoints older than the latest k are removed; 0 keeps all."""
    verify: bool = True
    """Read each save back from the disk before older checkpoints are removed. What differs is written once more; if it
    differs again, the save has failed. Asynchronous saves do this while training goes on."""
    grace_seconds: int = Field(0, ge=0)
    """Time that the machine stays up after SIGTERM (a spot instance: 30 to 120). If the rest of the step and a save
    would take longer, the step is given up and the state before it is saved; 0: no limit."""
    load_step: int = Field(-1, ge=-1)
    """Step to go back to, once: later checkpoints are set aside, and the same command, started again, resumes from the
    newest; -1: the newest whole checkpoint."""
    initial_load_path: str = ""
    """Checkpoint whose weights start a run that has no checkpoint of its own."""
    initial_load_in_hf: bool = False
    """Start the run from the weights of a Hugging Face folder: checkpoint.initial_load_path or, if that is empty,
    model.hf_assets_path. Each rank reads what it owns from the safetensors files; the folder is needed later, too."""
    last_save_model_only: bool = False
    """The last save holds the weights only: smaller, but the run cannot be continued from it."""
    last_save_in_hf: bool = False
    """When the run ends, write its weights as a Hugging Face folder too: step-N-hf, beside the checkpoints."""
    export_interval: int = Field(0, ge=0)
    """Steps between exports of checkpoints to Hugging Face folders, step-N-hf, which a separate process writes while
    training goes on: a multiple of checkpoint.interval; 0: none. The folders are never removed."""
    export_dtype: Literal["float16", "bfloat16", "float32", "source"] = "float32"
    """Type of the tensors in these folders; source: each tensor's type in the folder that the run began from."""


class ActivationCheckpoint(_Strict):
    """Trade computing time for memory."""

    mode: Literal["none", "selective", "attention", "full"] = "none"
    """full: keep only the input of each layer and compute the layer again in backward. attention: also keep the results
    of softmax attention, which for long documents are little memory and much of the time. selective: also keep the
    results of the delta rule, the convolution and exchanges between ranks."""


class Compile(_Strict):
    """What torch.compile does."""

    enable: bool = False
    """Compile each layer: what lies between matrix products, delta rule and attention becomes a few kernels."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """aot_eager: graphs without generated code, to find out which of the two an error comes from."""


class FileGroup(_Strict):
    """A group of metrics.loss_by_source."""

    name: str = Field(min_length=1)
    files: str = Field(min_length=1)


class Metrics(_Strict):
    """What a run reports."""

    log_freq: int = Field(10, ge=1)
    """Steps between reports; the first step is always reported."""
    enable_tensorboard: bool = True
    """Write TensorBoard events to tb/ in job.dump_folder."""
    enable_wandb: bool = False
    """Report to Weights & Biases too, as one run however often it resumes. The package is not a dependency: pip install
    wandb. Its environment variables decide the rest: WANDB_PROJECT, WANDB_MODE=offline."""
    telemetry_freq: int = Field(100, ge=0)
    """Steps between looks inside a step: norms by layer, decay half-lives, attention's entropy, loss by position and
    source, experts' loads (telemetry.jsonl; docs/telemetry.md says what each means); 0: none."""
    loss_by_source: list[FileGroup] = []
    """Groups of files whose losses telemetry shows separately, [{name = "code", files = "**/*.py"}, …]: globs
    (separated by commas) of paths or their ends. A document belongs to the first group that fits its file, else to
    "other"."""
    spike_sigmas: float = Field(6.0, ge=0)
    """A loss more than this many standard deviations above the mean of the last 128 since the start is noted, with its
    step's streams, in spikes.jsonl, once there are 16 to compare with; a non-finite loss always is; 0: only non-finite
    ones."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak TFLOP/s of a GPU in the type of compute, of which MFU is a share; 0: the peak known for a GPU of this name.
    For a GPU that is not known there is no MFU."""


class Profiling(_Strict):
    """Traces of the PyTorch profiler, each with a table of its largest costs, and snapshots of a GPU's memory."""

    enable_profiling: bool = False
    """Record traces."""
    save_traces_folder: str = Field("profile_traces", min_length=1)
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: int = Field(10, ge=1)
    """Steps between traces."""
    profiler_active: int = Field(1, ge=1)
    """Number of steps in a trace."""
    profiler_warmup: int = Field(3, ge=0)
    """Steps before each trace in which the profiler runs but keeps nothing; at most what profile_freq leaves."""
    profile_count: int = Field(0, ge=0)
    """Number of traces per start of the run; 0: no limit."""
    enable_memory_snapshot: bool = False
    """Record where in the code the GPU's memory is allocated, for snapshots: one when memory runs out, and one after
    the step in which SIGUSR1 reaches a worker, or the launcher, for all workers of its node. Without this key, a
    snapshot after SIGUSR1 tells what is allocated, not where."""
    save_memory_snapshot_folder: str = Field("memory_snapshots", min_length=1)
    """Folder of the snapshots, inside job.dump_folder."""


class Validation(_Strict):
    """Loss on documents that are not trained on."""

    enable: bool = False
    """Validate during training."""
    dataset_path: str = ""
    """Corpus to validate on, of the kind that training.dataset names; empty: documents held out of the training
    corpus."""
    holdout: float = Field(0.01, ge=0, lt=1)
    """Share of the training corpus's documents to hold out when validating without validation.dataset_path."""
    freq: int = Field(100, ge=1)
    """Training steps between validations; the last step is always validated."""
    steps: int = Field(-1, ge=-1)
    """Number of streams in a validation, over all ranks; -1: all held-out documents."""
    local_batch_size: int = Field(1, ge=1)
    """Streams of one validation batch on one data-parallel rank."""
    sample_tokens: int = Field(0, ge=0)
    """Length, in tokens, of a text generated at each validation, with sample.temperature and sample.top_p; 0: none."""
    sample_prompt: str = Field("def ", min_length=1)
    """What that text begins with."""


class Sample(_Strict):
    """Text generated by the trained weights when the run ends."""

    prompt: str = Field("def ", min_length=1)
    """What the sample begins with."""
    max_new_tokens: int = Field(0, ge=0)
    """Length of the sample in tokens; 0: none."""
    temperature: float = Field(0.8, ge=0)
    """Temperature of sampling; 0: always the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw only from the likeliest tokens whose probabilities together reach this sum."""


class Comm(_Strict):
    """Collective communication, and what happens when a rank is gone."""

    init_timeout_seconds: int = Field(300, ge=1, le=10**6)
    """Timeout until the first step is done."""
    train_timeout_seconds: int = Field(100, ge=1, le=10**6)
    """Timeout after the first step. Validation, saves and exports have none: they wait for the slowest disk."""
    max_restarts: int = Field(0, ge=0)
    """How many times torchrun starts all workers again, from the newest checkpoint, after a rank has failed; it does so
    whatever the reason, also after an error that recurs each time."""


class Debug(_Strict):
    """Randomness."""

    seed: int = Field(0, ge=0)
    """Seed of weights, data order and sampling."""
    deterministic: bool = False
    """Use deterministic algorithms only."""


class Doctor(_Strict):
    """Proofs of the configuration, before it costs a week (docs/proof.md)."""

    at_start: bool = False
    """Prove the run before it starts, as `python -m tools.doctor` does, and do not start it if something does not
    hold. It takes a minute or two, on the first GPU."""


class Config(_Strict):
    """A whole run."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    validation: Validation = Validation()
    sample: Sample = Sample()
    comm: Comm = Comm()
    doctor: Doctor = Doctor()
    debug: Debug = Debug()


SECTIONS: dict[str, type[_Strict]] = {name: field.annotation for name, field in Config.model_fields.items()}
KEYS = {f"{section}.{key}": field for section, cls in SECTIONS.items() for key, field in cls.model_fields.items()}

# For messages: the keys of the tables that a key with a list takes.
TABLES = {
    "training.mixture": "name = …, weight = …, dataset = …",
    "training.seq_len_schedule": "until_step = …, seq_len = …",
    "metrics.loss_by_source": "name = …, files = …",
}
# Likewise: what a list looks like.
FORMS = {
    "model.pattern": '["kda", "attention"]',
    **{key: f"[{{{table}}}]" for key, table in TABLES.items()},
}

PRINT = "--print-config"
OTHER = "other"  # in metrics.loss_by_source: the files that fit no group
SMALLEST_SHARE = 1 << 16  # a source of a mixture gives at least one in this many streams
SMALLEST_EPS = 1.2e-38  # float32 and bfloat16 hold smaller numbers with fewer digits only, and devices take them for 0

# Keys and sections of TorchTitan for what does not exist here, and what there is instead.
ABSENT = {
    "pipeline_parallel_degree": "there is no pipeline parallelism; parallelism.data_parallel_shard_degree splits the "
    "parameters",
    "float8": "there is no float8; training.mixed_precision_param is the type of compute",
    **dict.fromkeys(
        ("heads", "n_heads", "num_heads", "kv_heads", "head_dim"),
        "each mixer has its own, model.kda.heads, model.attention.kv_heads, ... (--help flavors lists them)",
    ),
}


# --- Reading ---------------------------------------------------------------------------------------------------------


def load_config(argv: list[str], *, cuda: bool | None = None) -> Config:
    """The configuration that `argv` (without the program's name) asks for, with every "auto" among its types resolved.

    Args:
        cuda: whether the run is for GPUs; by default, whether this machine has any.

    Raises:
        ValueError: an unreadable file, an unknown key, a value of another type or out of range.
        SystemExit: after `--help` and `--print-config`.
    """
    prints = PRINT in argv
    overrides = _read_command_line([argument for argument in argv if argument != PRINT])
    _validate(overrides, "command line")
    tables: dict[str, Any] = {}
    path = overrides.get("job", {}).get("config_file", "")
    if path:
        tables = _read_toml(path)
        _validate(tables, path)
        if "config_file" in tables.get("job", {}):
            raise ValueError(f"{path}: job.config_file belongs on the command line; remove it from the file")
    given = _at_home(_validate(_merged(tables, overrides), "configuration"))
    config = _resolve(given, cuda)
    if prints:
        sources = {"command line": overrides, path: tables}
        print(config_to_toml(config, _origins(config, given, sources)), end="")
        raise SystemExit(0)
    return config


def _merged(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Tables, and the tables inside them, with the values of `overrides` where it has some."""
    merged = {**tables, **overrides}
    for name in tables.keys() & overrides.keys():
        if isinstance(tables[name], dict) and isinstance(overrides[name], dict):
            merged[name] = _merged(tables[name], overrides[name])
    return merged


def config_to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """TOML that starts the same run; `job.config_file` is left out, as it only names the file that this was read from.

    Args:
        origins: "section.key" → where its value is from, for a comment beside it.
    """
    tables = []
    for section, values in config.model_dump(exclude={"job": {"config_file"}}).items():
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
        if origins:
            lines = [f"{line:<48}  # {origins[f'{section}.{key}']}" for line, key in zip(lines, values, strict=True)]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables) + "\n"


def _origins(config: Config, given: Config, sources: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Where each value is from: the first of `sources` that has it, or its default; and whether "auto" chose it."""
    origins = {}
    for dotted in KEYS:
        section, key = dotted.split(".")
        origins[dotted] = next((name for name, source in sources.items() if key in source.get(section, {})), "default")
        if getattr(getattr(config, section), key) != getattr(getattr(given, section), key):
            origins[dotted] += ": auto"
    return origins


def flat_keys(config: Config) -> dict[str, Any]:
    """{"section.key": value}."""
    return {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}


def difference(old: Any, new: Any) -> str:
    """A change of a key's value, in words. For lists of named tables: those added, those left out, what changed."""
    if not (isinstance(new, list) and all("name" in table for table in [*old, *new])):
        return f"{old!r} → {new!r}"
    before, now = ({table["name"]: table for table in tables} for tables in (old, new))
    lines = [f"{name!r} added" for name in now if name not in before]
    lines += [f"{name!r} left out" for name in before if name not in now]
    lines += [
        f"{name!r}: {key} {before[name][key]!r} → {value!r}"
        for name in now
        if name in before
        for key, value in now[name].items()
        if value != before[name][key]
    ]
    return ", ".join(lines) or f"in the order {', '.join(now)}"


def toml_value(value: Any) -> str:
    """A key's value in TOML. JSON writes bool, int, float and str in the same way, except that TOML escapes DEL."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(x)}" for key, x in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"job.config_file = {path!r} cannot be read: {error.strerror}; give a TOML file") from None
    except ValueError as error:  # malformed TOML or UTF-8
        raise ValueError(f"{path} is not TOML: {error}; correct it there") from None


def _read_command_line(argv: list[str]) -> dict[str, dict[str, Any]]:
    """{section: {key: value}} of the keys given."""
    parser = _parser()
    for name in _keys_in_tables(argv):
        parser.add_argument(f"--{name}")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        if (field := KEYS.get((error.argument_name or "").removeprefix("--"))) is not None:
            kind = type_name(field.annotation)
            raise ValueError(
                f"command line: {error.argument_name} needs a value, {kind}; write it behind the key"
            ) from None
        raise ValueError(f"command line: {error.argument_name}: {error.message}") from None
    if unknown and not unknown[0].startswith("-"):
        raise ValueError(f"command line: {unknown[0]!r} belongs to no key; keys are given as --section.key value")
    if unknown:
        key = unknown[0].partition("=")[0].removeprefix("--")
        raise ValueError(f"command line: {unknown[0]} is not a key{_nearest(key)}")
    tables: dict[str, dict[str, Any]] = {}
    for dotted, text in vars(given).items():
        section, key, *inner = dotted.split(".")
        table = tables.setdefault(section, {})
        if inner:
            table.setdefault(key, {})[inner[0]] = _toml(text)
        else:
            table[key] = _typed(text, KEYS[dotted].annotation)
    return tables


def _keys_in_tables(argv: list[str]) -> list[str]:
    """The options that are a key of a table, model.kda.heads, each once."""
    names = dict.fromkeys(option.partition("=")[0].removeprefix("--") for option in argv if option.startswith("--"))
    fields = {name: KEYS.get(name.rpartition(".")[0]) for name in names if name.count(".") == 2}
    return [name for name, field in fields.items() if field and get_origin(field.annotation) is dict]


def _typed(text: str, annotation: type) -> Any:
    """The value that `text` spells, as strictly as in TOML; other text is returned, for validation to refuse it."""
    if annotation is bool:
        return {"true": True, "false": False}.get(text, text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return _toml(text) if get_origin(annotation) in (list, dict) else text


def _toml(text: str) -> Any:
    """The value that TOML reads, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _parser(only: str = "") -> argparse.ArgumentParser:
    """The parser of all keys, or of one section's."""
    parser = argparse.ArgumentParser(
        prog="run_train.sh",
        usage="%(prog)s [--section.key value ...]",
        argument_default=argparse.SUPPRESS,
        description="Train a linear-attention or hybrid language model.",
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    if not only:
        about = parser.add_argument_group("about")
        about.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="SECTION",
            help="the keys, of all sections "
            "or of one; --help flavors: the presets of every model.name; --help markdown: the keys as a "
            "page",
        )
        about.add_argument(
            PRINT,
            action="store_true",
            help="print the resolved configuration, and where each value is from; nothing is started",
        )
    for section, cls in SECTIONS.items():
        if only not in ("", section):
            continue
        group = parser.add_argument_group(f"[{section}]", cls.__doc__)
        for key, field in cls.model_fields.items():
            text = f"{field.description} (default: {toml_value(field.default)})".replace("%", "%%")
            group.add_argument(f"--{section}.{key}", metavar=type_name(field.annotation), help=text)
    return parser


class _Help(argparse.Action):
    """Print all keys, or those of a section, or the page docs/keys.md."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, section: str | None, option: str = "") -> None:
        if section == "markdown":
            print(keys_page())
            raise SystemExit(0)
        if section is not None and section not in SECTIONS:
            raise ValueError(f"{option} {section}: sections are {', '.join(SECTIONS)}; --help flavors lists presets")
        (_parser(section) if section else parser).print_help()
        raise SystemExit(0)


def keys_page() -> str:
    """docs/keys.md: every key with its type, default and description."""
    lines = [
        "# Every key",
        "The keys of a run's TOML file. On the command line they are `--section.key value`, which takes precedence\n"
        "over the file. `./run_train.sh --help SECTION` prints a section's, `--help markdown` this page;\n"
        "`--print-config` prints what a run resolves to, and where each value comes from.",
    ]
    for section, keys in SECTIONS.items():
        lines += [f"## [{section}]", keys.__doc__ or ""]
        rows = ["| key | type | default | |", "|---|---|---|---|"]
        for key, field in keys.model_fields.items():
            kind = type_name(field.annotation).strip("{}").replace(",", ", ")
            cells = f"`{key}`", kind, f"`{toml_value(field.default)}`", " ".join(field.description.split())
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


def type_name(annotation: type) -> str:
    if annotation is bool:
        return "{true,false}"
    if get_origin(annotation) in (list, dict):
        return "LIST" if get_origin(annotation) is list else "TABLE"
    choices = get_args(annotation)
    return f"{{{','.join(choices)}}}" if choices else annotation.__name__.upper()


def _validate(tables: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(tables)
    except ValidationError as invalid:
        raise ValueError("\n".join(f"{source}: {_explain(error)}" for error in invalid.errors())) from None


def _explain(error: Any) -> str:
    """One pydantic error in our words: the key, the value, what would be right."""
    key, value = ".".join(map(str, error["loc"])), error["input"]
    list_key = ".".join(map(str, error["loc"][:2]))
    if error["type"] == "extra_forbidden" and list_key in TABLES:
        (table,) = get_args(KEYS[list_key].annotation)
        return f"{key} is not a key; a table of {list_key} has {', '.join(table.model_fields)}"
    if error["type"] == "extra_forbidden":
        return f"{key} is not a {'key' if '.' in key else 'section'}{_nearest(key)}"
    if error["type"] == "missing":
        return f"{key} is missing; give it"
    if error["type"] == "list_type":
        return f"{key} = {value!r} must be a list, {FORMS[list_key]}"
    if error["type"] == "dict_type":
        return f"{key} = {value!r} must be a table, [{key}]"
    if error["type"] == "model_type" and "." in key:
        return f"{key} = {value!r} must be a table, {{{TABLES[list_key]}}}"
    if error["type"] == "model_type":
        return f"{key} = {value!r} must be a section, [{key}]"
    if error["type"] == "bool_type":
        return f"{key} = {value!r} must be true or false"
    return f"{key} = {value!r} must {error['msg'].partition(' should ')[2] or error['msg']}"


def _nearest(key: str) -> str:
    """What to suggest for an unknown key or section: what there is instead, the same name elsewhere, or the closest."""
    for name in key.split("."):
        if name in ABSENT:
            return f": {ABSENT[name]}"
    namesakes = [dotted for dotted in KEYS if dotted.endswith("." + key.rpartition(".")[2])]
    sure = len(namesakes) == 1 or (namesakes and "." not in key)
    near = difflib.get_close_matches(key, namesakes or [*KEYS, *SECTIONS], n=1, cutoff=0.0 if sure else 0.6)
    return f"; did you mean {near[0]}?" if near else "; --help lists all keys"


# --- Meaning ---------------------------------------------------------------------------------------------------------


def changed(config: Config, changes: Mapping[str, object]) -> Config:
    """A copy with other values of some keys, by "section.key"."""
    for name, value in changes.items():
        section, key = name.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


def _at_home(config: Config) -> Config:
    """A copy with ~ replaced by the home folder in the paths of folders."""
    keys = (
        "job.dump_folder",
        "checkpoint.folder",
        "checkpoint.initial_load_path",
        "model.hf_assets_path",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
    )
    given = flat_keys(config)
    return changed(config, {key: os.path.expanduser(given[key]) for key in keys})


def _resolve(config: Config, cuda: bool | None) -> Config:
    """Fill in the types that depend on the device, so that the saved configuration says what was computed."""
    training, auto = config.training, {}
    wide = training.dtype == "float64"
    if training.mixed_precision_param == "auto":
        cuda = _on_cuda() if cuda is None and not wide else cuda
        auto["training.mixed_precision_param"] = "float64" if wide else "bfloat16" if cuda else "float32"
    if training.mixed_precision_reduce == "auto":
        auto["training.mixed_precision_reduce"] = "float64" if wide else "float32"
    return changed(config, auto)


def _on_cuda() -> bool:
    import torch  # slow to import; --help and errors in keys do without

    return torch.cuda.is_available()


def data_parallel_degrees(config: Config, world_size: int) -> tuple[int, int]:
    """(replicate, shard) with -1 replaced by the ranks that are left.

    Raises:
        ValueError: degrees that do not multiply to `world_size`.
    """
    p = config.parallelism
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    copies = p.context_parallel_degree * p.tensor_parallel_degree
    if shard == 0:
        raise ValueError(
            "parallelism.data_parallel_shard_degree = 0 must be 1 or more, or -1 for what the other degrees leave"
        )
    if shard == -1:
        shard = world_size // (replicate * copies)
    if shard < 1 or replicate * shard * copies != world_size:
        fixed = replicate * copies * max(p.data_parallel_shard_degree, 1)
        right = f"a multiple of {fixed}" if p.data_parallel_shard_degree == -1 else str(fixed)
        raise ValueError(
            f"parallelism: data_parallel_replicate_degree = {replicate}, data_parallel_shard_degree = "
            f"{p.data_parallel_shard_degree}, tensor_parallel_degree = {p.tensor_parallel_degree}, "
            f"context_parallel_degree = {p.context_parallel_degree} need {right} processes, and there are "
            f"{world_size}; change a degree, or the number of processes (NGPU; tools.plan: --gpus)"
        )
    return replicate, shard


def micro_steps(config: Config, world_size: int) -> int:
    """Number of micro-batches per rank in a step."""
    replicas, shards = data_parallel_degrees(config, world_size)
    return config.training.global_batch_size // (replicas * shards * config.training.local_batch_size)


def check_config(config: Config, world_size: int) -> None:
    """Refuse what cannot run on `world_size` processes, or what contradicts itself.

    Raises:
        ValueError: naming the keys, their values, and what would be right.
    """
    replicate, shard = data_parallel_degrees(config, world_size)
    _check_batch(config, replicate * shard)
    _check_expert_parallel(config.parallelism, shard * config.parallelism.context_parallel_degree)
    _check_schedule(config)
    _check_types(config.training)
    _check_experts(config.training)
    if (taken := config.optimizer.lr * config.optimizer.weight_decay) >= 1:
        raise ValueError(
            f"optimizer.lr = {config.optimizer.lr} times optimizer.weight_decay = {config.optimizer.weight_decay} is "
            f"{taken:g}, what a step takes of each weight, and must be below 1; lower one of them"
        )
    if config.training.dtype != "float64" and config.optimizer.eps < SMALLEST_EPS:
        raise ValueError(
            f"optimizer.eps = {config.optimizer.eps} is 0 in training.dtype = {config.training.dtype!r}, and weights "
            f"whose gradients have all been 0 would become 0 / 0; use at least {SMALLEST_EPS}"
        )
    _check_data(config)
    _check_checkpoint(config.checkpoint)
    _check_file_groups(config)
    _check_profiling(config.profiling)
    if config.comm.max_restarts and not config.checkpoint.enable:
        raise ValueError(
            f"comm.max_restarts = {config.comm.max_restarts} starts again from checkpoints, and there are none; set "
            "checkpoint.enable = true, or comm.max_restarts = 0"
        )
    _check_hugging_face(config)


def seq_len_at(t: Training, step: int) -> int:
    """Number of tokens in each stream of this step; steps count from 1."""
    return next((part.seq_len for part in t.seq_len_schedule if step <= part.until_step), t.seq_len)


def replicas_wait(t: Training) -> bool:
    """Whether gradients are summed over HSDP's replicas only in a step's last micro-step.

    Until then FSDP2 holds a rank's sum on the device, in the type of reductions. With CPU offload, or if gradients are
    kept in another type, they are summed over replicas in every micro-step: a narrower type is then not the one in
    which micro-steps are added up, and a wider one takes no memory.
    """
    return not t.enable_cpu_offload and t.mixed_precision_reduce == t.dtype


def schedule_steps(config: Config) -> int:
    """The step at which the learning rate's decay ends."""
    return config.lr_scheduler.total_steps or config.training.steps


def tokens_at(t: Training, step: int) -> int:
    """Number of tokens in the first `step` steps."""
    done = streams_of_one = 0
    for part in t.seq_len_schedule:
        steps = max(0, min(part.until_step, step) - done)
        done, streams_of_one = done + steps, streams_of_one + steps * part.seq_len
    return (streams_of_one + (step - done) * t.seq_len) * t.global_batch_size


def _check_batch(config: Config, dp: int) -> None:
    t = config.training
    _check_length(config, "seq_len", t.seq_len)
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
        _check_length(config, "seq_len_schedule: seq_len", part.seq_len)
    if t.global_batch_size % (dp * t.local_batch_size):
        raise ValueError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of training.local_batch_size × "
            f"data-parallel ranks = {t.local_batch_size} × {dp} = {t.local_batch_size * dp}; change one of them"
        )


def _check_length(config: Config, key: str, seq_len: int) -> None:
    """Check that the ranks can cut streams of this length."""
    p = config.parallelism
    blocks = p.context_parallel_degree * (2 if p.context_parallel_layout == "zigzag" else 1)
    if seq_len % blocks:
        raise ValueError(
            f"training.{key} = {seq_len} cannot be cut into {blocks} equal blocks (context_parallel_degree = "
            f"{p.context_parallel_degree}, context_parallel_layout = {p.context_parallel_layout!r}); use a multiple of "
            f"{blocks}, for example {math.ceil(seq_len / blocks) * blocks}"
        )
    copies = p.context_parallel_degree * p.tensor_parallel_degree
    if seq_len % copies:
        multiple = math.lcm(blocks, copies)
        raise ValueError(
            f"training.{key} = {seq_len} cannot be shared between layers by {copies} ranks "
            f"(context_parallel_degree = {p.context_parallel_degree} × tensor_parallel_degree = "
            f"{p.tensor_parallel_degree}); use a multiple of {multiple}, for example "
            f"{math.ceil(seq_len / multiple) * multiple}"
        )


def _check_expert_parallel(p: Parallelism, sharers: int) -> None:
    if sharers % p.expert_parallel_degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {p.expert_parallel_degree} does not divide the {sharers} ranks that "
            "share parameters (data_parallel_shard_degree × context_parallel_degree), from which it is borrowed; use a "
            f"divisor of {sharers}"
        )


def _check_schedule(config: Config) -> None:
    s, steps = config.lr_scheduler, config.training.steps
    if s.total_steps and s.total_steps < steps:
        raise ValueError(
            f"lr_scheduler.total_steps = {s.total_steps} is less than training.steps = {steps}; use at least {steps}, "
            "or 0 to follow training.steps"
        )


def _check_experts(t: Training) -> None:
    for key in ("expert_balance_coefficient", "expert_bias_update_rate"):
        if -1 < getattr(t, key) < 0:
            raise ValueError(f"training.{key} = {getattr(t, key)} must be 0 or more, or -1 for the model's")


def _check_types(t: Training) -> None:
    types = (t.dtype, t.mixed_precision_param, t.mixed_precision_reduce)
    if "float64" in types and set(types) - {"float64", "auto"}:
        raise ValueError(
            f"training.dtype = {types[0]!r}, mixed_precision_param = {types[1]!r}, mixed_precision_reduce = "
            f"{types[2]!r}: float64 is for all three or for none; set them alike"
        )
    if t.dtype == "float64" and _on_cuda():
        raise ValueError(
            "training.dtype = 'float64' runs on the CPU only; hide the GPUs with CUDA_VISIBLE_DEVICES= or use float32"
        )


def sources(config: Config) -> list[Training] | list[Source]:
    """What is trained on: the sources of a mixture, or the one that [training] names."""
    return config.training.mixture or [config.training]


def key_of(source: Training | Source, key: str) -> str:
    """What messages call a key of a source."""
    if isinstance(source, Source):
        return f"training.mixture, source {source.name!r}: {key}"
    return f"training.{key}"


def _check_data(config: Config) -> None:
    t, v = config.training, config.validation
    if t.mixture:
        _check_mixture(t, v)
    elif t.mixture_from_step != -1:
        raise ValueError(
            f"training.mixture_from_step = {t.mixture_from_step} is the step from which training.mixture holds, and "
            "training.mixture is not set; remove it"
        )
    for source in sources(config):
        _check_source(source)
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
    if v.sample_tokens and not v.enable:
        raise ValueError(
            f"validation.sample_tokens = {v.sample_tokens} has no effect with validation.enable = false; set "
            "validation.enable = true, or remove it (sample.max_new_tokens gives a text when the run ends)"
        )
    if v.steps == 0:
        raise ValueError("validation.steps = 0 validates nothing; use -1 for all, or validation.enable = false")


def _check_source(s: Training | Source) -> None:
    dataset = key_of(s, "dataset")
    if s.dataset == "stdlib" and s.dataset_path:
        raise ValueError(
            f"{dataset}_path = {s.dataset_path!r} is not used by {dataset} = 'stdlib'; remove it, or set {dataset} to "
            "its kind: text, jsonl, parquet, arrow or tokens"
        )
    if s.dataset != "stdlib" and not s.dataset_path:
        raise ValueError(f"{dataset} = {s.dataset!r} needs {dataset}_path: a file, folder or glob")
    records = ("jsonl", "parquet", "arrow")
    if s.dataset_format != "text" and s.dataset not in records:
        raise ValueError(
            f"{dataset}_format = {s.dataset_format!r} is for {dataset} = {', '.join(records)}, and it is "
            f"{s.dataset!r}; remove the format (a corpus of tokens knows its answers), or change {dataset}"
        )
    if s.dataset_format != "text" and s.dataset_text_field != "text":
        raise ValueError(
            f"{dataset}_text_field = {s.dataset_text_field!r} is not used by {dataset}_format = {s.dataset_format!r}; "
            "remove one of them"
        )


def _check_mixture(t: Training, v: Validation) -> None:
    default = Training()
    for key in ("dataset", "dataset_path", "dataset_text_field", "dataset_format"):
        if getattr(t, key) != getattr(default, key):
            raise ValueError(
                f"training.{key} = {getattr(t, key)!r} is not used beside training.mixture, whose sources have each "
                "their own; remove one of them"
            )
    names = [s.name for s in t.mixture]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"training.mixture has two sources with name = {twice!r}; give each a name of its own")
    least, total = min(t.mixture, key=lambda s: s.weight), sum(s.weight for s in t.mixture)
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


def _check_file_groups(config: Config) -> None:
    groups = config.metrics.loss_by_source
    if groups and not config.metrics.telemetry_freq:
        raise ValueError(
            "metrics.loss_by_source is shown by telemetry, which metrics.telemetry_freq = 0 turns off; set that to "
            "100, or remove metrics.loss_by_source"
        )
    names = [*(s.name for s in config.training.mixture), *(group.name for group in groups), OTHER]
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
    if c.enable:
        return
    for key, asked in (
        ("load_step", c.load_step != -1),
        ("initial_load_path", c.initial_load_path != ""),
        ("initial_load_in_hf", c.initial_load_in_hf),
        ("last_save_model_only", c.last_save_model_only),
        ("last_save_in_hf", c.last_save_in_hf),
        ("export_interval", c.export_interval != 0),
        ("grace_seconds", c.grace_seconds != 0),
    ):
        if asked:
            raise ValueError(
                f"checkpoint.{key} = {getattr(c, key)!r} has no effect with checkpoint.enable = false; set "
                f"checkpoint.enable = true, or remove checkpoint.{key}"
            )


def hf_assets(config: Config) -> str:
    """The Hugging Face folder that defines the model and brings its tokenizer; "" if the run has none."""
    return config.model.hf_assets_path or (config.checkpoint.initial_load_path if starts_in_hf(config) else "")


def hf_weights(config: Config) -> str:
    """The Hugging Face folder whose weights start the run; "" if none do."""
    return (config.checkpoint.initial_load_path or config.model.hf_assets_path) if starts_in_hf(config) else ""


def starts_in_hf(config: Config) -> bool:
    return config.checkpoint.enable and config.checkpoint.initial_load_in_hf


def _check_hugging_face(config: Config) -> None:
    c = config.checkpoint
    if c.initial_load_in_hf and not hf_weights(config):
        raise ValueError(
            "checkpoint.initial_load_in_hf = true has nothing to load; set checkpoint.initial_load_path (or "
            "model.hf_assets_path) to a Hugging Face folder"
        )
    if config.model.flavor == "hf" and not hf_assets(config):
        raise ValueError("model.flavor = 'hf' needs model.hf_assets_path, a folder with the config.json of a model")
    if config.model.hf_assets_path and config.model.flavor != "hf" and not c.initial_load_in_hf:
        raise ValueError(
            f"model.hf_assets_path = {config.model.hf_assets_path!r} is the model of model.flavor = 'hf', and this run "
            f"has {config.model.flavor!r}; change one of them"
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
