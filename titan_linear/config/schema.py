"""Every key of a run's configuration: its type, default and meaning."""

from __future__ import annotations

import json
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field


class Rule(Enum):
    """Further properties of a key, stated with its type or for a whole section in `rules`."""

    # May change when a run resumes: how it is computed, saved and shown, or how long it is.
    MAY_CHANGE = auto()
    # May change from one path to another on resume: the checkpoint identifies the content.
    MAY_MOVE = auto()
    # Nodes of a run may have different values.
    OF_A_NODE = auto()
    # Relative to the folder in which a run is started; stored as absolute.
    PATH = auto()
    # A leading ~ is the home folder.
    HOME = auto()


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Any length is allowed. Only with this option does pydantic check that text is
        # UTF-8, as TOML is.
        str_min_length=0,
    )
    # Rules of all keys of the section.
    rules: ClassVar[tuple[Rule, ...]] = ()


# A value of model.tokenizer_path that is not a path.
BYTES = "bytes"
Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]
# −1 stands for all of them, the rest, or the newest.
CountOrAll = Annotated[int, Field(ge=-1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
# −1 stands for the model's value.
Coefficient = Annotated[float, Field(ge=-1)]
Text = Annotated[str, Field(min_length=1)]
# A path of texts or of a tokenizer.
Corpus = Annotated[str, Rule.PATH, Rule.OF_A_NODE, Rule.MAY_MOVE]


class Job(Section):
    """The run and its folder."""

    rules = (Rule.MAY_CHANGE, Rule.OF_A_NODE)

    config_file: str = ""
    """TOML file to read; command-line keys override it. Not a key of the file itself."""
    dump_folder: Annotated[Text, Rule.PATH, Rule.HOME] = "outputs"
    """Folder of the run. The same command in the same folder resumes from its newest whole checkpoint."""
    description: str = ""
    """Free text, kept with the run."""
    start_anew: bool = False
    """Begin again, with any configuration, in a folder whose run left no checkpoint to resume from; what that run left
    is set aside."""


# Contains a file of presets for each name.
CONFIGS = Path(__file__).parents[1] / "models/families/configs"
NAMES = tuple(sorted(file.stem for file in CONFIGS.glob("*.json")))


class Model(Section):
    """The network and its tokenizer."""

    name: Literal[NAMES] = "hybrid"  # type: ignore[valid-type]
    """Family: linear layers only (kda, gdn), a pattern with softmax attention (hybrid), or a published hybrid."""
    flavor: Text = "debug"
    """Preset of the family: debug, 340M, 1.3B, 27B, 80B-A3B, ... (--help flavors lists them); hf: the model in
    model.hf_assets_path, whatever model.name is. The keys of sizes below change it."""
    dim: Count = 0
    """Width of the model; 0: the flavor's."""
    num_layers: Count = 0
    """Number of layers; 0: the flavor's."""
    mtp_layers: Count = 0
    """Number of further tokens that layers after the last predict (multi-token prediction, trained by loss.mtp_weight).
    A published folder's layers are read if this is their number; with 0 they are copied to exports as they are."""
    hidden_dim: Count = 0
    """Hidden channels of each layer's MLP; 0: the flavor's."""
    pattern: list[str] = []
    """Mixers of the first layers, which further layers repeat as a whole: ["kda", "kda", "kda", "attention"]; []: the
    flavor's.
    "mamba2+attention" is a layer of two side by side, whose outputs add. An MLP or experts follow each, unless "mlp" or
    "moe" is in the list."""
    mixers: dict[str, dict[str, Any]] = {}
    """Options of mixers that differ from the flavor's. Each mixer has a table of its own: kda = {heads = 8, …}, or
    --model.kda.heads 8 (--help flavors lists all options). The empty string stands for none."""
    moe: dict[str, Any] = {}
    """Options of the experts, likewise; with them, a flavor without experts gets some."""
    hf_assets_path: Annotated[str, Rule.MAY_CHANGE, Rule.OF_A_NODE, Rule.PATH, Rule.HOME] = ""
    """Hugging Face folder whose config.json defines flavor hf and whose tokenizer is the default; empty: the folder
    that checkpoint.initial_load_in_hf loads."""
    vocab_size: Count = 0
    """Rows of the embedding and the head; 0: the preset's number, or, if that is too small and the weights are drawn,
    the tokenizer's vocabulary rounded up to a multiple of 64."""
    tokenizer_path: Corpus = ""
    """A Hugging Face tokenizer.json, or its folder; bytes: bytes are tokens; empty: that of the run's Hugging Face
    folder, or bytes for a run without one."""
    impl: Annotated[Literal["auto", "torch", "triton"], Rule.MAY_CHANGE] = "auto"
    """Implementation of the ops; auto takes the fastest that supports the device, and says which."""


Dataset = Literal["stdlib", "text", "jsonl", "parquet", "arrow", "tokens"]
RECORDS = ("jsonl", "parquet", "arrow")
DatasetFormat = Literal["text", "tokens", "messages", "completion", "preference", "tree"]


class Source(Section):
    """A source of training.mixture. Keys that it leaves out have the defaults of [training]."""

    name: Text
    weight: Above0
    dataset: Dataset
    dataset_path: str = ""
    dataset_text_field: Text = "text"
    dataset_format: DatasetFormat = "text"
    dataset_columns: list[str] = []


class Shorter(Section):
    """A part of training.seq_len_schedule."""

    until_step: Number
    seq_len: Number


class Training(Section):
    """Data, batch and numerical precision."""

    dataset: Dataset = "stdlib"
    """Source of the documents (docs/data.md): Python's own standard library, text files, JSON lines, parquet, a folder
    that Hugging Face's datasets saved, or token files."""
    dataset_path: Corpus = ""
    """File, folder or globs (separated by commas) of the corpus; every dataset but stdlib needs it."""
    dataset_text_field: Text = "text"
    """Field (jsonl) or column (parquet, arrow) that holds a document's text."""
    dataset_format: DatasetFormat = "text"
    """What a record of jsonl, parquet or arrow is: a text; a list of tokens; a conversation, written by the tokenizer's
    chat template; a prompt and its completion; or a prompt and two completions, the chosen and the rejected one: of
    these three only the answers are trained on; or a prefix tree."""
    dataset_columns: list[str] = []
    """Fields of records (columns of corpora of tokens) that hold numbers of the document's tokens, as losses read them:
    one for all of its tokens, or a list with one for each. ["weights"], for example."""
    share_prefixes: bool = False
    """Records that follow each other and share their beginnings become prefix trees, each shared token computed once
    (docs/data.md)."""
    group_field: str = ""
    """Field of records: with share_prefixes, those that follow each other with one value are looked at together."""
    mixture: Annotated[list[Source], Rule.OF_A_NODE, Rule.MAY_MOVE] = []
    """Several sources instead of the one above, [{name = "web", weight = 0.7, dataset = "jsonl", dataset_path = "…"},
    …], each with those of the keys above that it needs. Weights are shares of streams."""
    mixture_from_step: Annotated[CountOrAll, Rule.MAY_CHANGE] = -1
    """Step at which training.mixture changes: the step that the run resumes from; -1: it does not change."""
    on_bad_document: Annotated[Literal["stop", "skip"], Rule.MAY_CHANGE] = "stop"
    """What a record that is no document (not JSON, no such field, a conversation without an answer, a pair of equal
    answers, one that must be whole and is longer than seq_len) does: stop the start, or be skipped and counted."""
    verify: Annotated[Literal["always", "changed"], Rule.MAY_CHANGE] = "changed"
    """Check every byte of the corpus against its checksums at every start (always), or only when a file's size, time or
    inode has changed since it was found whole (changed)."""
    seq_len: Number = 2048
    """Tokens of one packed stream, over all context-parallel ranks."""
    seq_len_schedule: list[Shorter] = []
    """Shorter streams first, [{until_step = 1000, seq_len = 8192}, …]: streams have seq_len tokens up to and including
    until_step, and training.seq_len after the last of these."""
    local_batch_size: Annotated[Number, Rule.MAY_CHANGE] = 1
    """Streams of one micro-step on one data-parallel rank."""
    global_batch_size: Number = 8
    """Streams of one optimizer step; gradients are accumulated up to it."""
    steps: Annotated[Number, Rule.MAY_CHANGE] = 1000
    """Optimizer steps of the run."""
    max_norm: Above0 = 1.0
    """Gradients are clipped to this global 2-norm."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of parameters and optimizer states. float64 is for proofs on the CPU."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Type of compute. auto: float64 with training.dtype float64, else bfloat16 on CUDA and float32 on the CPU."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Type of gradient reductions. auto: float64 with training.dtype float64, else float32."""
    enable_cpu_offload: Annotated[bool, Rule.MAY_CHANGE] = False
    """Keep parameters, gradients and the optimizer's states in the host's memory, and run AdamW there: a GPU holds
    those of the layers that it is computing. Works on one GPU too. Steps take longer."""
    loss_chunk_size: Annotated[Count, Rule.MAY_CHANGE] = 0
    """Number of tokens whose logits exist at once, in the head and the loss; 0: 2,048, or more up to a GiB."""
    expert_balance_coefficient: Coefficient = -1.0
    """Coefficient of the experts' load-balance loss; 0: none; -1: the model's."""
    expert_bias_update_rate: Coefficient = -1.0
    """How far a step moves the expert-selection biases towards equal loads; 0: not at all; -1: the model's."""
    on_nonfinite: Annotated[Literal["stop", "skip"], Rule.MAY_CHANGE] = "stop"
    """After a non-finite loss or gradient, stop the run, or skip and count the step. It never reaches the weights."""
    num_workers: Annotated[Count, Rule.MAY_CHANGE, Rule.OF_A_NODE] = 0
    """Threads that read batches ahead on each rank, two batches each; 0: batches are read when a step asks for them."""


LossName = Literal["cross_entropy", "dpo", "distillation", "policy"]
LOSSES = get_args(LossName)
# Columns that losses read, with their dtypes.
COLUMNS = dict.fromkeys(
    ("weights", "reference", "advantages", "behaviour", "teacher_logprobs"), "<f4"
)
COLUMNS |= {"teacher_ids": "<i4"}


class Loss(Section):
    """Training objective and token weights (docs/losses.md). Each loss has its own section."""

    name: LossName = "cross_entropy"
    """The loss."""
    normalise: Literal["auto", "token", "document", "stream"] = "auto"
    """Terms are divided by the number of tokens with a label: of the step; or first within each document (or stream),
    whose means count alike. With weights, by the sum of these in place of the number of tokens or documents.
    auto: document for dpo and policy, token for the others."""
    scores: Annotated[str, Rule.PATH, Rule.OF_A_NODE] = ""
    """Folders (separated by commas) of columns that titan-linear score wrote for the corpus. Their files are compared
    with their checksums once, and again after a change; a run resumes with the same scores."""
    reference: Literal["column", "base"] = "column"
    """Where the log-probabilities of the reference come from, if the loss reads them: the corpus's column, or the
    model without its adapters (adapter.enable), in each step. base: the run must not begin from adapters."""
    mtp_weight: AtLeast0 = 0.1
    """Weight of the mean cross-entropy of further tokens (model.mtp_layers), which is in the gradient, not in the
    printed loss."""


class CrossEntropy(Section):
    """Cross-entropy."""

    label_smoothing: Share = 0.0
    """Share of the loss that is the mean over the vocabulary instead of the label's."""
    z_loss: AtLeast0 = 0.0
    """Coefficient of the square of the logits' log-sum-exp, which is added to the loss."""


class DPO(Section):
    """Preferences, of pairs of documents; reads the column reference."""

    beta: Above0 = 0.1
    """Factor of a document's log-probability, relative to the reference's."""
    length_normalised: bool = False
    """Of means over a document's tokens instead of sums."""
    reference_free: bool = False
    """Without a reference."""
    margin: AtLeast0 = 0.0
    """By which the chosen text's is to be above the rejected one's. SimPO: a margin, length_normalised and
    reference_free."""


class Distillation(Section):
    """Divergence from a teacher; reads the columns teacher_ids and teacher_logprobs."""

    temperature: Above0 = 1.0
    """Of the softmax; that at which the columns were scored."""


class Policy(Section):
    """Clipped ratio to a behaviour; reads the columns advantages, behaviour and, with kl, reference."""

    level: Literal["token", "sequence"] = "token"
    """What has a ratio: each token (GRPO), or each document (GSPO)."""
    clip_low: Share = 0.2
    """The ratio counts down to 1 less this where the advantage is negative."""
    clip_high: AtLeast0 = 0.2
    """The ratio counts up to 1 plus this where the advantage is positive."""
    kl: AtLeast0 = 0.0
    """Coefficient of the divergence from the reference."""


class Optimizer(Section):
    """The optimizer."""

    name: Literal["AdamW", "muon"] = "AdamW"
    """muon: Muon for the matrices between embedding and head, each made orthogonal as a whole and scaled to the size of
    AdamW's updates; AdamW for the rest."""
    lr: Above0 = 3e-4
    """Peak learning rate."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    eps: Above0 = 1e-8
    """Added to the root of the second moment."""
    momentum: Share = 0.95
    """Of Muon."""
    weight_decay: AtLeast0 = 0.1
    """Decay of weight matrices; norms, biases, A_log and dt_bias have none."""


class LRScheduler(Section):
    """The learning rate over the steps: warmup, then constant, then decay."""

    warmup_steps: Count = 100
    """Steps over which the rate rises linearly from 0 to optimizer.lr; a shorter run ends before the rise does."""
    total_steps: Annotated[Count, Rule.MAY_CHANGE] = 0
    """Step at which the decay ends; 0: training.steps, which then may not change once the decay has begun."""
    decay_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the total steps over which the rate decays, at the end; at most what warmup leaves. 1: all after it."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """Shape of the decay."""
    min_lr_factor: float = Field(0.1, ge=0, le=1)
    """The rate at the end of the decay, as a share of optimizer.lr."""


class Parallelism(Section):
    """How the ranks share the work. The degrees multiply to the number of processes."""

    rules = (Rule.MAY_CHANGE,)

    data_parallel_replicate_degree: Number = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: CountOrAll = -1
    """Ranks that share parameters and take different streams (FSDP); -1: the ranks that are left."""
    fsdp_shard_degree: CountOrAll = -1
    """Ranks, out of data_parallel_shard_degree × context_parallel_degree, that each parameter is sharded over, the GPUs
    of a node for example; the others hold copies, whose gradients are summed once a step. -1: all of them."""
    fsdp_reshard_after_forward: Literal["always", "never"] = "always"
    """Free a layer's gathered parameters after its forward and gather them again in backward (always), or keep them
    until then (never): faster, at the cost of 2 bytes per parameter of all layers in bfloat16."""
    context_parallel_degree: Number = 1
    """Ranks that share one stream."""
    context_parallel_layout: Literal["contiguous", "zigzag"] = "contiguous"
    """One fragment of each stream per rank (contiguous), or two mirrored ones (zigzag), which balance attention by ring
    or all-gather; all-to-all is balanced in both, and linear layers are faster in the first."""
    context_parallel_method: Literal["auto", "ring", "allgather", "ulysses", "ulysses+ring"] = (
        "auto"
    )
    """Exchange in the softmax layers; "auto" is all-to-all over heads ("ulysses") where possible; "ulysses+ring" is
    that inside a node, and a ring between nodes."""
    context_parallel_linear_method: Literal["kcp", "ulysses"] = "kcp"
    """Exchange in the linear layers: states of the recurrence (KCP), or all-to-all over heads."""
    tensor_parallel_degree: Number = 1
    """Ranks that split every layer by heads and hidden channels, the vocabulary, and the tokens between layers."""
    expert_parallel_degree: Number = 1
    """Ranks, out of those that share parameters (data_parallel_shard_degree × context_parallel_degree), that divide the
    experts among themselves instead: tokens travel to the experts."""


class Adapter(Section):
    """Low-rank adapters (LoRA) of a frozen model, instead of training all weights."""

    enable: bool = False
    """Freeze the weights that the run begins from, and train adapters of them."""
    rank: Number = 16
    """Rank of each."""
    alpha: Above0 = 32
    """What an adapter adds is multiplied with alpha / rank."""
    rslora: bool = False
    """With alpha / √rank (arXiv 2312.03732)."""
    targets: list[str] = []
    """Weights that get one, by patterns of parts of their names: ["mixer", "layers.3", "o_proj", "experts.*"]; []:
    every projection of mixers, MLPs and experts."""
    train_extra: list[str] = []
    """Other parameters to train, as a whole, likewise: ["*norm", "embedding", "router", "A_log"]."""
    initial_load_path: Annotated[str, Rule.MAY_CHANGE, Rule.OF_A_NODE, Rule.PATH, Rule.HOME] = ""
    """PEFT folder whose adapters the run begins from; empty: A is drawn, and B is 0."""


class Checkpoint(Section):
    """Saving and resuming."""

    rules = (Rule.MAY_CHANGE,)

    enable: bool = True
    """Save, and resume from what is saved."""
    folder: Annotated[Text, Rule.HOME] = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Number = 500
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """Write while training goes on (async), or before it goes on (disabled)."""
    keep_latest_k: Count = 10
    """Checkpoints older than the latest k are removed; 0 keeps all."""
    verify: bool = True
    """Read each save back from the disk before older checkpoints are removed. What differs is written once more; if it
    differs again, the save has failed."""
    grace_seconds: Count = 0
    """Time that the machine stays up after SIGTERM (a spot instance: 30 to 120). If the rest of the step and a save
    would take longer, the step is given up and the state before it is saved; 0: no limit."""
    load_step: CountOrAll = -1
    """Step to go back to, once: later checkpoints are set aside, and the same command, started again, resumes from the
    newest; -1: the newest whole checkpoint."""
    initial_load_path: Annotated[str, Rule.OF_A_NODE, Rule.PATH, Rule.HOME] = ""
    """Checkpoint whose weights start a run that has no checkpoint of its own."""
    initial_load_in_hf: bool = False
    """Start the run from the weights of a Hugging Face folder: checkpoint.initial_load_path or, if that is empty,
    model.hf_assets_path. The folder is needed later, too."""
    last_save_model_only: bool = False
    """The last save holds the weights only: smaller, but the run cannot be continued from it."""
    last_save_in_hf: bool = False
    """When the run ends, write its weights as a Hugging Face folder too: step-N-hf, beside the checkpoints."""
    export_interval: Count = 0
    """Steps between exports of checkpoints to Hugging Face folders, step-N-hf, which a separate process writes while
    training goes on: a multiple of checkpoint.interval; 0: none. The folders are never removed."""
    export_dtype: Literal["float16", "bfloat16", "float32", "source"] = "float32"
    """Type of the tensors in these folders; source: each tensor's type in the folder that the run began from."""


class ActivationCheckpoint(Section):
    """Trade computing time for memory."""

    rules = (Rule.MAY_CHANGE,)

    mode: Literal["none", "selective", "attention", "full"] = "none"
    """full: keep only the input of each layer and compute the layer again in backward. attention: also keep the results
    of softmax attention. selective: as the next key says."""
    selective_ac_option: str = "op"
    """Of mode selective. op: keep also the results of attention, the delta rule, the convolution and exchanges between
    ranks. A number n: compute every n-th layer again, as full does, and keep all of the others."""


class Compile(Section):
    """Compilation by torch.compile."""

    rules = (Rule.MAY_CHANGE,)

    enable: bool = False
    """Compile each layer: what lies between matrix products, delta rule and attention becomes a few kernels."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """aot_eager: graphs without generated code, to find out which of the two an error comes from."""


class Float8(Section):
    """Float8 (e4m3, a scale for each row) in products of hidden states with weights of 2048 × 2048
    or more, and in products that give the hidden states' gradients. Gradients of weights, gates,
    routers, experts, convolutions, recurrences, attention and the head stay in
    training.mixed_precision_param.
    """

    rules = (Rule.MAY_CHANGE,)

    enable: bool = False
    """Compute these products in float8, on a GPU of compute capability 8.9 or more. Weights are stored as ever."""
    filter_fqns: list[str] = []
    """Parts of projections' names: products with these stay as they are. ["layers.0.", "o_proj"], for example."""
    emulate: bool = False
    """Round to float8, but multiply in float32: for tests, on any device, slowly."""


class FileGroup(Section):
    """A group of metrics.loss_by_source."""

    name: Text
    files: Text


class Metrics(Section):
    """Metrics and telemetry of a run."""

    rules = (Rule.MAY_CHANGE,)

    log_freq: Number = 10
    """Steps between reports; the first step is always reported."""
    enable_tensorboard: bool = True
    """Write TensorBoard events to tb/ in job.dump_folder."""
    enable_wandb: bool = False
    """Report to Weights & Biases too (pip install wandb), as one run however often it resumes. Its environment
    variables decide the rest: WANDB_PROJECT, WANDB_MODE=offline."""
    telemetry_freq: Count = 100
    """Steps between looks inside a step: norms by layer, decay half-lives, loss by position and source, …
    (docs/telemetry.md); 0: none."""
    loss_by_source: Annotated[list[FileGroup], Rule.OF_A_NODE] = []
    """Groups of files whose losses telemetry shows separately, [{name = "code", files = "**/*.py"}, …]: globs
    (separated by commas) of paths or their ends. A document belongs to the first group that fits its file, else to
    "other"."""
    spike_sigmas: AtLeast0 = 6.0
    """A loss more than this many standard deviations above the mean of the last 128 is noted, with its step's streams,
    in spikes.jsonl, as is every non-finite one; 0: only these."""
    peak_tflops: AtLeast0 = 0.0
    """Peak TFLOP/s of a GPU in the type of compute, of which MFU is a share; 0: the peak known for a GPU of this
    name, if there is one."""


class Profiling(Section):
    """Traces of the PyTorch profiler, each with a table of its largest costs, and snapshots of a GPU's memory."""

    rules = (Rule.MAY_CHANGE,)

    enable_profiling: bool = False
    """Record traces."""
    save_traces_folder: Annotated[Text, Rule.OF_A_NODE, Rule.HOME] = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Number = 10
    """Steps between traces."""
    profiler_active: Number = 1
    """Number of steps in a trace."""
    profiler_warmup: Count = 3
    """Steps before each trace in which the profiler runs but keeps nothing; at most what profile_freq leaves."""
    profile_count: Count = 0
    """Number of traces per start of the run; 0: no limit."""
    enable_memory_snapshot: Annotated[bool, Rule.OF_A_NODE] = False
    """Record where in the code the GPU's memory is allocated, for snapshots: one when memory runs out, and those that
    SIGUSR1 asks for (docs/telemetry.md), which without this key tell what is allocated, not where."""
    save_memory_snapshot_folder: Annotated[Text, Rule.OF_A_NODE, Rule.HOME] = "memory_snapshots"
    """Folder of the snapshots, inside job.dump_folder."""


class Validation(Section):
    """Loss on documents that are not trained on."""

    enable: bool = False
    """Validate during training."""
    dataset_path: Corpus = ""
    """Corpus to validate on, of the kind that training.dataset names; empty: documents held out of the training
    corpus."""
    holdout: Share = 0.01
    """Share of the training corpus's documents to hold out when validating without validation.dataset_path."""
    freq: Annotated[Number, Rule.MAY_CHANGE] = 100
    """Training steps between validations; the last step is always validated."""
    steps: Annotated[CountOrAll, Rule.MAY_CHANGE] = -1
    """Number of streams in a validation, over all ranks; -1: all held-out documents."""
    local_batch_size: Annotated[Number, Rule.MAY_CHANGE] = 1
    """Streams of one validation batch on one data-parallel rank."""
    sample_tokens: Annotated[Count, Rule.MAY_CHANGE] = 0
    """Length, in tokens, of a text generated at each validation, with sample.temperature and sample.top_p; 0: none."""
    sample_prompt: Annotated[Text, Rule.MAY_CHANGE] = "def "
    """What that text begins with."""


class Evaluation(Section):
    """Recall over long texts: tasks made from a seed and the texts to validate on."""

    rules = (Rule.MAY_CHANGE,)

    freq: Count = 0
    """Training steps between evaluations; the last step is always evaluated. 0: none."""
    tasks: list[str] = ["niah_single_2", "niah_multikey_1", "mqar", "induction", "loss"]
    """RULER's niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1 and qa_2;
    mqar, copy, induction; loss: of the texts, by position."""
    lengths: list[Number] = Field([2048], min_length=1)
    """Lengths of prompts, with their answers, in tokens."""
    samples: Number = 11
    """Prompts of each task and length, at even depths."""
    chat: bool = False
    """Ask as a user, by the tokenizer's chat template."""


class Sample(Section):
    """Text generated by the trained weights when the run ends."""

    rules = (Rule.MAY_CHANGE,)

    prompt: Text = "def "
    """What the sample begins with."""
    max_new_tokens: Count = 0
    """Length of the sample in tokens; 0: none."""
    temperature: AtLeast0 = 0.8
    """Temperature of sampling; 0: always the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw only from the likeliest tokens whose probabilities together reach this sum."""


class Comm(Section):
    """Collective communication, and what happens when a rank is gone."""

    rules = (Rule.MAY_CHANGE,)

    init_timeout_seconds: int = Field(300, ge=1, le=10**6)
    """Timeout until the first step is done, and the first of each length (training.seq_len_schedule)."""
    train_timeout_seconds: int = Field(100, ge=1, le=10**6)
    """Timeout after the first step. Validation, saves and exports have none: they wait for the slowest disk."""
    max_restarts: Count = 0
    """How many times torchrun starts all workers again, from the newest checkpoint, after a rank has failed, whatever
    the reason."""


class Debug(Section):
    """Randomness."""

    seed: Count = 0
    """Seed of weights, data order and sampling."""
    deterministic: Annotated[bool, Rule.MAY_CHANGE] = False
    """Use deterministic algorithms only."""


class Doctor(Section):
    """Proofs of the configuration, before it costs a week (docs/proof.md)."""

    rules = (Rule.MAY_CHANGE,)

    at_start: bool = False
    """Prove the run before it starts, as `titan-linear doctor` does, and do not start it if something does not
    hold. It takes a minute or two."""


class Config(Section):
    """A whole run."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    loss: Loss = Loss()
    cross_entropy: CrossEntropy = CrossEntropy()
    dpo: DPO = DPO()
    distillation: Distillation = Distillation()
    policy: Policy = Policy()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    adapter: Adapter = Adapter()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    validation: Validation = Validation()
    evaluation: Evaluation = Evaluation()
    sample: Sample = Sample()
    comm: Comm = Comm()
    doctor: Doctor = Doctor()
    debug: Debug = Debug()


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items()
}
KEYS = {
    f"{section}.{key}": field
    for section, cls in SECTIONS.items()
    for key, field in cls.model_fields.items()
}


def keys_with(rule: Rule) -> list[str]:
    """Return the keys that have this property."""
    sections = {name: cls.rules for name, cls in SECTIONS.items()}
    return [
        key
        for key, field in KEYS.items()
        if rule in (*sections[key.partition(".")[0]], *field.metadata)
    ]


PRINT = "--print-config"
# The group in metrics.loss_by_source of files that match no other group.
OTHER = "other"
# A source of a mixture must provide at least one in this many streams.
SMALLEST_SHARE = 1 << 16
# float32 and bfloat16 hold smaller numbers only with fewer digits, and devices round them
# to 0.
SMALLEST_EPS = 1.2e-38

# Other names of keys, and replacements for TorchTitan's keys and sections that do not exist
# here.
MEANT, ABSENT = json.loads(Path(__file__).with_name("other_names.json").read_text()).values()
