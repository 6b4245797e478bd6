"""Every key of a run's configuration: its type, default and meaning.

Values that follow from keys, such as degrees, lengths and folders, are properties and
methods of the section that has the keys, or of `Config`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from titan_linear.config.registry import TABLES


class KeyRule(Enum):
    """Further properties of a key, next to its type, or of all keys of a section (`rules`)."""

    # May change on resume. Such keys control how a run is computed, saved and shown, and how
    # long it is.
    MAY_CHANGE = auto()
    # Another path to the same content may be given on resume: the checkpoint identifies the
    # content.
    MAY_MOVE = auto()
    # Nodes of a run may have different values.
    OF_A_NODE = auto()
    # Relative to the folder in which a run is started; stored as absolute.
    PATH = auto()
    # A leading ~ is the home folder.
    HOME = auto()


# By these names, the keys below state them.
MAY_CHANGE, MAY_MOVE, OF_A_NODE, PATH, HOME = KeyRule


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
    rules: ClassVar[tuple[KeyRule, ...]] = ()


def or_registered(key: str) -> WrapValidator:
    """Allow a key the names that users' modules have registered, too."""

    def check(value: Any, choose: Any) -> Any:
        return value if isinstance(value, str) and value in TABLES[key] else choose(value)

    return WrapValidator(check)


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
Corpus = Annotated[str, PATH, OF_A_NODE, MAY_MOVE]
# A folder of weights.
Weights = Annotated[str, MAY_CHANGE, OF_A_NODE, PATH, HOME]


class Job(Section):
    """The run and its folder."""

    rules = (MAY_CHANGE, OF_A_NODE)

    config_file: str = ""
    """TOML file to read; command-line keys override it. Not a key of the file itself."""
    dump_folder: Annotated[Text, PATH, HOME] = "outputs"
    """Folder of the run. Repeating the command resumes from its newest complete
    checkpoint."""
    description: str = ""
    """Free text, kept with the run."""
    custom_import: str = ""
    """Python module that is imported first, also from the working directory, and registers
    losses, mixers, hooks, sources of texts or families (docs/extending.md):
    "my_package.my_module"."""
    start_anew: bool = False
    """Start over, with any configuration, in a folder whose run left no checkpoint to
    resume from. The files of that run are moved to abandoned-DATE/."""


# Contains a file of presets for each name.
CONFIGS = Path(__file__).parents[1] / "models/families/configs"
NAMES = tuple(sorted(file.stem for file in CONFIGS.glob("*.json")))


class Model(Section):
    """The network and its tokenizer."""

    name: Literal[NAMES] = "hybrid"  # type: ignore[valid-type]
    """Model family: linear layers only (kda, gdn), a pattern with softmax attention
    (hybrid), or a published architecture."""
    flavor: Text = "debug"
    """Preset of the family: debug, 340M, 1.3B, 27B, 80B-A3B, ... (--help flavors lists
    them); hf: the model in model.hf_assets_path, regardless of model.name. The size keys
    below override it."""
    dim: Count = 0
    """Model width; 0: the flavor's."""
    num_layers: Count = 0
    """Number of layers; 0: the flavor's."""
    mtp_layers: Count = 0
    """Number of additional tokens that layers after the last one predict (multi-token
    prediction, trained by loss.mtp_weight). A published folder's prediction layers are
    loaded if this is their number; with 0 they are copied unchanged to exports."""
    hidden_dim: Count = 0
    """Hidden channels of each layer's MLP; 0: the flavor's."""
    pattern: list[str] = []
    """Mixers of the first layers, repeated a whole number of times: ["kda", "kda", "kda",
    "attention"]; []: the flavor's. "mamba2+attention" is a layer with both in parallel,
    whose outputs are added. An MLP or experts follow each, unless "mlp" or "moe" is in the
    list."""
    mixers: dict[str, dict[str, Any]] = {}
    """Mixer options that differ from the flavor's, in one table per mixer: kda = {heads =
    8, …}, or --model.kda.heads 8 (--help flavors lists all options). An empty string means
    None."""
    moe: dict[str, Any] = {}
    """Options of the experts, in the same form. They add experts to a flavor without
    them."""
    hf_assets_path: Weights = ""
    """Hugging Face folder whose config.json defines flavor hf and whose tokenizer is the
    default; empty: the folder that checkpoint.initial_load_in_hf loads."""
    vocab_size: Count = 0
    """Rows of the embedding and the head. 0: the preset's number or, if that is too small
    and the weights are randomly initialized, the tokenizer's vocabulary rounded up to a
    multiple of 64."""
    tokenizer_path: Corpus = ""
    """A Hugging Face tokenizer.json or its folder; bytes: each byte is a token; empty: the
    tokenizer in the run's Hugging Face folder, or bytes without such a folder."""
    impl: Annotated[Literal["auto", "torch", "triton"], MAY_CHANGE] = "auto"
    """Implementation of the ops; auto selects the fastest that supports the device, and
    prints it."""

    @property
    def preset(self) -> str:
        """The keys that name the preset, in messages."""
        return f"model.name = {self.name!r}, model.flavor = {self.flavor!r}"


Dataset = Literal["stdlib", "text", "jsonl", "parquet", "arrow", "tokens"]
AnyDataset = Annotated[Dataset, or_registered("training.dataset")]
RECORDS = ("jsonl", "parquet", "arrow")
DatasetFormat = Literal["text", "tokens", "messages", "completion", "preference", "tree"]


def has_records(dataset: str) -> bool:
    """Whether a source's documents are records, as in all that users' modules register."""
    return dataset not in ("stdlib", "text", "tokens")


class Source(Section):
    """A source of training.mixture. Omitted keys have the defaults of [training]."""

    name: Text
    weight: Above0
    dataset: AnyDataset
    dataset_path: str = ""
    dataset_text_field: Text = "text"
    dataset_format: DatasetFormat = "text"
    dataset_columns: list[str] = []

    def key(self, key: str) -> str:
        """Return the name of a key of this source in messages."""
        return f"training.mixture, source {self.name!r}: {key}"


class Shorter(Section):
    """An entry of training.seq_len_schedule."""

    until_step: Number
    seq_len: Number


class Training(Section):
    """Data, batch and numerical precision."""

    dataset: AnyDataset = "stdlib"
    """Source of the documents (docs/data.md): the Python standard library, text files, JSON
    Lines, Parquet, a folder saved by Hugging Face datasets, or token files."""
    dataset_path: Corpus = ""
    """File, folder or globs (comma-separated) of the corpus; required for every dataset
    except stdlib."""
    dataset_text_field: Text = "text"
    """Field (jsonl) or column (parquet, arrow) that contains a document's text."""
    dataset_format: DatasetFormat = "text"
    """Contents of a jsonl, parquet or arrow record: a text; a list of tokens; a
    conversation, formatted by the tokenizer's chat template; a prompt and its completion; a
    prompt with a chosen and a rejected completion (of these three only the answers are
    trained on); or a prefix tree."""
    dataset_columns: list[str] = []
    """Record fields (columns of token corpora) that contain numbers for losses: one for all
    tokens of a document, or a list with one per token. Example: ["weights"]."""
    share_prefixes: bool = False
    """Merge consecutive records that share their beginnings into prefix trees, in which
    each shared token is computed once (docs/prefix_trees.md)."""
    group_field: str = ""
    """Record field for share_prefixes: consecutive records with the same value are compared
    as one group."""
    mixture: Annotated[list[Source], OF_A_NODE, MAY_MOVE] = []
    """Several sources instead of the one above, [{name = "web", weight = 0.7, dataset =
    "jsonl", dataset_path = "…"}, …], each with the keys above that it needs. Weights are
    shares of streams."""
    mixture_from_step: Annotated[CountOrAll, MAY_CHANGE] = -1
    """Step at which training.mixture changes, equal to the step that the run resumes from;
    -1: no change."""
    on_bad_document: Annotated[Literal["stop", "skip"], MAY_CHANGE] = "stop"
    """Malformed record (not JSON, missing field, conversation without an answer, pair of
    equal answers, or longer than seq_len where it must not be split): stop before training,
    or skip and count."""
    max_length: Count = 0
    """Maximum number of tokens of a document, such as a conversation, a rollout or either
    side of a pair; training.truncation applies to longer ones. 0: no maximum."""
    truncation: Literal["right", "left", "skip"] = "right"
    """Keep the beginning of a document longer than training.max_length (right) or its end
    (left), or leave its record out (skip). These records are counted."""
    verify: Annotated[Literal["always", "changed"], MAY_CHANGE] = "changed"
    """Compare the whole corpus with its checksums at every start (always), or only if a
    file's size, time or inode has changed since the last successful check (changed)."""
    seq_len: Number = 2048
    """Tokens per packed stream, over all context-parallel ranks."""
    seq_len_schedule: list[Shorter] = []
    """Shorter streams at the start, [{until_step = 1000, seq_len = 8192}, …]: an entry's
    seq_len applies up to and including its until_step, and training.seq_len after the last
    entry."""
    local_batch_size: Annotated[Number, MAY_CHANGE] = 1
    """Streams per micro-step on each data-parallel rank."""
    global_batch_size: Number = 8
    """Streams per optimizer step, reached by gradient accumulation."""
    steps: Annotated[Number, MAY_CHANGE] = 1000
    """Number of optimizer steps in the run."""
    epochs: Annotated[Count, MAY_CHANGE] = 0
    """Passes over the corpus, instead of training.steps: the run ends with the step that
    completes the last pass. Epochs of packed streams follow each other without a gap, so this
    step may read the beginning of another pass. 0: training.steps."""
    max_norm: Above0 = 1.0
    """Clip the gradients to this global 2-norm."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Data type of parameters and optimizer states. float64 is for proofs on the CPU."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Data type of computation. auto: float64 if training.dtype is float64, else bfloat16
    on CUDA and float32 on the CPU."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Data type of gradient reductions. auto: float64 if training.dtype is float64, else
    float32."""
    enable_cpu_offload: Annotated[bool, MAY_CHANGE] = False
    """Keep parameters, gradients and optimizer states in host memory, and run AdamW there.
    A GPU holds only the layers that it is computing. Works on one GPU too. Steps take
    longer."""
    loss_chunk_size: Annotated[Count, MAY_CHANGE] = 0
    """Tokens whose logits exist at once, in the head and the loss; 0: 2,048, or more up to
    1 GiB of logits."""
    expert_balance_coefficient: Coefficient = -1.0
    """Coefficient of the experts' load-balancing loss; 0: none; -1: the model's value."""
    expert_bias_update_rate: Coefficient = -1.0
    """Step size of the expert-selection biases toward equal loads; 0: none; -1: the model's
    value."""
    on_nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = "stop"
    """After a non-finite loss or gradient, stop the run, or skip and count the step. Such a
    step never changes the weights."""
    num_workers: Annotated[Count, MAY_CHANGE, OF_A_NODE] = 0
    """Threads per rank that prefetch two batches each; 0: read each batch when a step needs
    it."""

    def key(self, key: str) -> str:
        """Return the name of a key of this section in messages, as `Source.key`."""
        return f"training.{key}"

    @property
    def sources(self) -> list[Training] | list[Source]:
        """The sources to train on: the mixture's, or the one that this section names."""
        return self.mixture or [self]

    @property
    def replicas_wait(self) -> bool:
        """Whether replicas sum gradients only in a step's last micro-step.

        Replicas are the copies of FSDP's shards. Until then, FSDP2 holds a rank's sum on
        the device, in the type of reductions. With CPU offload, or if gradients are kept in
        another type, they are summed over replicas in every micro-step. This way,
        micro-steps are not added up in a narrower type, and a wider type takes no memory.
        """
        return not self.enable_cpu_offload and self.mixed_precision_reduce == self.dtype

    def seq_len_at(self, step: int) -> int:
        """Return the number of tokens in each stream of this step; steps count from 1."""
        lengths = (part.seq_len for part in self.seq_len_schedule if step <= part.until_step)
        return next(lengths, self.seq_len)

    def tokens_at(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps."""
        done = streams_of_one = 0
        for part in self.seq_len_schedule:
            steps = max(0, min(part.until_step, step) - done)
            done += steps
            streams_of_one += steps * part.seq_len
        return (streams_of_one + (step - done) * self.seq_len) * self.global_batch_size


LossName = Literal["cross_entropy", "dpo", "distillation", "policy"]
LOSS_NAMES = get_args(LossName)
# Columns that losses read, with their dtypes.
COLUMNS = {
    "weights": "<f4",
    "reference": "<f4",
    "advantages": "<f4",
    "behaviour": "<f4",
    "teacher_logprobs": "<f4",
    "teacher_ids": "<i4",
}


class Loss(Section):
    """Training objective and token weights (docs/losses.md). Each loss has its own
    section."""

    name: Annotated[LossName, or_registered("loss.name")] = "cross_entropy"
    """Loss function."""
    options: dict[str, Any] = {}
    """Options of a loss that job.custom_import registers: a table, or --loss.options.NAME
    value. Other losses have sections."""
    normalise: Literal["auto", "token", "document", "stream"] = "auto"
    """Divide the loss by the number of labeled tokens in the step (token), or first take
    means within each document or stream, which count equally. With weights, sums of weights
    replace numbers of tokens or documents. auto: document for dpo and policy, token for the
    others."""
    scores: Annotated[str, PATH, OF_A_NODE] = ""
    """Folders (comma-separated) of columns that titan-linear score wrote for the corpus.
    Their files are compared with their checksums once, and again after a change. A run must
    resume with the same scores."""
    reference: Literal["column", "base"] = "column"
    """Source of the reference log-probabilities, if the loss reads them: the corpus's
    column, or the model without its adapters (adapter.enable), computed in each step. With
    base, the run must not start from adapters."""
    mtp_weight: AtLeast0 = 0.1
    """Weight of the mean cross-entropy of additional tokens (model.mtp_layers), which is in
    the gradient but not in the printed loss."""


class CrossEntropy(Section):
    """Cross-entropy loss."""

    label_smoothing: Share = 0.0
    """Share of the loss averaged over the vocabulary; the rest is the label's loss."""
    z_loss: AtLeast0 = 0.0
    """Coefficient of the squared log-sum-exp of the logits, which is added to the loss."""


class DPO(Section):
    """Preference optimization on pairs of documents; reads the column reference."""

    beta: Above0 = 0.1
    """Factor of the rewards: document log-probabilities relative to the reference."""
    length_normalised: bool = False
    """Average log p per token instead of summing."""
    reference_free: bool = False
    """Compute rewards without a reference."""
    margin: AtLeast0 = 0.0
    """Required gap between chosen and rejected rewards, after scaling by beta. SimPO: set
    margin, length_normalised and reference_free."""
    initial_weights: Annotated[Literal["loaded", "drawn"], MAY_CHANGE] = "loaded"
    """Weights to tune. loaded: a run that would tune weights drawn at random, with a
    reference, is refused; drawn: it is not, for trials."""


class Distillation(Section):
    """KL divergence from a teacher; reads the columns teacher_ids and teacher_logprobs."""

    temperature: Above0 = 1.0
    """Softmax temperature; must equal the one used to score the columns."""


class Policy(Section):
    """Clipped probability ratios to a behavior policy; reads the columns advantages,
    behaviour and, with kl, reference."""

    level: Literal["token", "sequence"] = "token"
    """Unit that has a ratio: each token (GRPO), or each document (GSPO)."""
    clip_low: Share = 0.2
    """Lower clip: ratio ≥ 1 − clip_low (binds for negative advantages)."""
    clip_high: AtLeast0 = 0.2
    """Upper clip: ratio ≤ 1 + clip_high (binds for positive advantages)."""
    kl: AtLeast0 = 0.0
    """Coefficient of the KL divergence from the reference."""


class Optimizer(Section):
    """The optimizer."""

    name: Literal["AdamW", "muon"] = "AdamW"
    """muon: Muon for the matrices between embedding and head, whose updates are
    orthogonalized per whole matrix and scaled to the size of AdamW's; AdamW for the
    rest."""
    lr: Above0 = 3e-4
    """Peak learning rate."""
    beta1: Share = 0.9
    """Decay rate of the first moment."""
    beta2: Share = 0.95
    """Decay rate of the second moment."""
    eps: Above0 = 1e-8
    """Added to the square root of the second moment."""
    momentum: Share = 0.95
    """Momentum of Muon."""
    weight_decay: AtLeast0 = 0.1
    """Decay of weight matrices; none for norms, biases, A_log and dt_bias."""


class LRScheduler(Section):
    """Learning-rate schedule: warmup, then constant, then decay."""

    warmup_steps: Count = 100
    """Steps over which the rate rises linearly from 0 to optimizer.lr; a shorter run ends
    during the warmup."""
    total_steps: Annotated[Count, MAY_CHANGE] = 0
    """Step at which the decay ends; 0: training.steps, which then cannot change once the
    decay has begun."""
    decay_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the total steps, at the end, over which the rate decays; it never overlaps
    the warmup. 1: all steps after it."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """Shape of the decay."""
    min_lr_factor: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of optimizer.lr."""


class Parallelism(Section):
    """Distribution of work over the ranks. The product of the degrees is the number of
    processes."""

    rules = (MAY_CHANGE,)

    data_parallel_replicate_degree: Number = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: CountOrAll = -1
    """Ranks that share parameters and take different streams (FSDP); -1: all remaining
    ranks."""
    fsdp_shard_degree: CountOrAll = -1
    """Ranks, out of data_parallel_shard_degree × context_parallel_degree, over which each
    parameter is sharded, for example the GPUs of a node. The other ranks hold copies, whose
    gradients are summed once per step. -1: all of them."""
    fsdp_reshard_after_forward: Literal["always", "never"] = "always"
    """Free a layer's gathered parameters after its forward and gather them again in
    backward (always), or keep them until then (never): faster, but takes 2 bytes per
    parameter of all layers in bfloat16."""
    context_parallel_degree: Number = 1
    """Ranks that share each stream."""
    context_parallel_layout: Literal["contiguous", "zigzag"] = "contiguous"
    """One fragment of each stream per rank (contiguous), or two mirrored fragments
    (zigzag), which balance ring and all-gather attention. All-to-all is balanced in both;
    linear layers are faster with contiguous."""
    context_parallel_method: Literal["auto", "ring", "allgather", "ulysses", "ulysses+ring"] = (
        "auto"
    )
    """Exchange in the softmax attention layers. auto: ulysses (all-to-all over heads) where
    possible. ulysses+ring: ulysses inside a node, and a ring between nodes."""
    context_parallel_linear_method: Literal["kcp", "ulysses"] = "kcp"
    """Exchange in the linear layers: states of the recurrence (kcp), or all-to-all over
    heads (ulysses)."""
    tensor_parallel_degree: Number = 1
    """Ranks that split every layer (by heads and hidden channels), the vocabulary, and the
    tokens between layers."""
    expert_parallel_degree: Number = 1
    """Ranks, out of those sharing parameters (data_parallel_shard_degree ×
    context_parallel_degree), that divide the experts among themselves instead: tokens are
    sent to the experts."""

    @property
    def copies(self) -> int:
        """Number of ranks that receive the same batches."""
        return self.context_parallel_degree * self.tensor_parallel_degree

    @property
    def fragments(self) -> int:
        """Number of equal parts that a stream is cut into."""
        return self.context_parallel_degree * (2 if self.context_parallel_layout == "zigzag" else 1)

    def even_length(self, seq_len: int) -> int:
        """Return the least length of a stream that ranks can cut, at least `seq_len`."""
        even = 2 * self.copies
        return -(-seq_len // even) * even

    def data_parallel_degrees(self, world_size: int) -> tuple[int, int]:
        """Return (replicate, shard), with -1 replaced by the number of remaining ranks.

        Raises:
            ValueError: the degrees do not multiply to `world_size`.
        """
        replicate = self.data_parallel_replicate_degree
        shard = self.data_parallel_shard_degree
        if shard == 0:
            raise ValueError(
                "parallelism.data_parallel_shard_degree = 0 must be 1 or more, or -1 for what the other degrees leave"
            )
        if shard == -1:
            shard = world_size // (replicate * self.copies)
        # All degrees together must use every process.
        if shard < 1 or replicate * shard * self.copies != world_size:
            fixed = replicate * self.copies * max(self.data_parallel_shard_degree, 1)
            right = (
                f"a multiple of {fixed}" if self.data_parallel_shard_degree == -1 else str(fixed)
            )
            raise ValueError(
                f"parallelism: data_parallel_replicate_degree = {replicate}, data_parallel_shard_degree = "
                f"{self.data_parallel_shard_degree}, tensor_parallel_degree = {self.tensor_parallel_degree}, "
                f"context_parallel_degree = {self.context_parallel_degree} need {right} processes, and there are "
                f"{world_size}; change a degree, or the number of processes (NGPU; titan-linear plan: --gpus)"
            )
        return replicate, shard

    def fsdp_degrees(self, world_size: int) -> tuple[int, int]:
        """Return (replicas, shards) of FSDP.

        Each shard of the parameters has `replicas` copies; parameters are sharded over
        `shards` ranks.

        Raises:
            ValueError: the degrees do not fit each other.
        """
        replicate, shard = self.data_parallel_degrees(world_size)
        sharers = shard * self.context_parallel_degree
        shards = sharers if self.fsdp_shard_degree == -1 else self.fsdp_shard_degree
        if shards < 1 or sharers % shards:
            raise ValueError(
                f"parallelism.fsdp_shard_degree = {shards} does not divide the {sharers} ranks that share parameters "
                f"(data_parallel_shard_degree × context_parallel_degree); use a divisor of {sharers}, or -1 for all of "
                "them"
            )
        return replicate * sharers // shards, shards


class Adapter(Section):
    """Train low-rank adapters (LoRA) of a frozen model instead of all weights."""

    enable: bool = False
    """Freeze the initial weights of the run, and train adapters of them."""
    rank: Number = 16
    """Rank of each adapter."""
    alpha: Above0 = 32
    """Adapter outputs are multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / √rank instead (arXiv 2312.03732)."""
    targets: list[str] = []
    """Weights that get adapters, by patterns of parts of their names: ["mixer", "layers.3",
    "o_proj", "experts.*"]; []: every projection of mixers, MLPs and experts."""
    train_extra: list[str] = []
    """Other parameters to train in full, likewise: ["*norm", "embedding", "router",
    "A_log"]."""
    initial_load_path: Weights = ""
    """PEFT folder with the initial adapters of the run; empty: A is random, and B is 0."""


class Checkpoint(Section):
    """Saving and resuming."""

    rules = (MAY_CHANGE,)

    enable: bool = True
    """Save checkpoints, and resume from them."""
    folder: Annotated[Text, HOME] = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Number = 500
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """Write during training (async), or pause training meanwhile (disabled)."""
    keep_latest_k: Count = 10
    """Number of latest checkpoints to keep; older ones are removed. 0: keep all."""
    verify: bool = True
    """Read each save back from disk before older checkpoints are removed. Data that differs
    is written once more; if it differs again, the save fails."""
    grace_seconds: Count = 0
    """Seconds that the machine stays up after SIGTERM (spot instances: 30 to 120). If the
    rest of the step and a save would take longer, the step is abandoned and the state
    before it is saved; 0: no limit."""
    load_step: CountOrAll = -1
    """Step to go back to, once: later checkpoints are set aside, and repeating the command
    resumes from the newest checkpoint; -1: the newest complete checkpoint."""
    initial_load_path: Weights = ""
    """Checkpoint with the initial weights of a run that has no checkpoint yet."""
    initial_load_in_hf: bool = False
    """Start from the weights of a Hugging Face folder: checkpoint.initial_load_path or, if
    empty, model.hf_assets_path. The folder must stay available."""
    last_save_model_only: bool = False
    """Save only the weights at the end: smaller, but the run cannot resume from them."""
    last_save_in_hf: bool = False
    """When the run ends, also write its weights as a Hugging Face folder, step-N-hf, next
    to the checkpoints."""
    export_interval: Count = 0
    """Steps between exports of checkpoints to Hugging Face folders, step-N-hf, by a
    separate process while training continues: a multiple of checkpoint.interval; 0: none.
    The folders are never removed."""
    export_dtype: Literal["float16", "bfloat16", "float32", "source"] = "float32"
    """Data type of exported tensors; source: each tensor's type in the folder that the run
    started from."""


class ActivationCheckpoint(Section):
    """Recompute activations in backward to save memory."""

    rules = (MAY_CHANGE,)

    mode: Literal["none", "selective", "attention", "full"] = "none"
    """full: keep only each layer's input and recompute the layer in backward. attention:
    also keep the outputs of softmax attention. selective: use selective_ac_option."""
    selective_ac_option: str = "op"
    """For mode selective. op: also keep the outputs of attention, the delta rule, the
    convolution and exchanges between ranks. A number n: recompute every n-th layer, as full
    does, and none of the others."""

    @property
    def name(self) -> str:
        """The mode and its option, in messages."""
        option = f" ({self.selective_ac_option})" if self.mode == "selective" else ""
        return f"{self.mode}{option}"

    def mode_of(self, layer: int) -> str:
        """Return the mode of a layer, counted from 0: none, selective, attention or full."""
        if self.mode != "selective" or self.selective_ac_option == "op":
            return self.mode
        return "none" if (layer + 1) % int(self.selective_ac_option) else "full"


class Compile(Section):
    """Compilation by torch.compile."""

    rules = (MAY_CHANGE,)

    enable: bool = False
    """Compile each layer: operations between matrix products, delta rule and attention are
    fused into a few kernels."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """aot_eager: graphs without generated code, to find out which of the two causes an
    error."""


class Float8(Section):
    """Float8 (e4m3, one scale per row) in products of hidden states with weights of 2048 ×
    2048 or more, and in products that give the hidden states' gradients. Weight gradients,
    gates, routers, experts, convolutions, recurrences, attention and the head use
    training.mixed_precision_param."""

    rules = (MAY_CHANGE,)

    enable: bool = False
    """Compute these products in float8, on a GPU of compute capability 8.9 or more. The
    stored weights do not change."""
    filter_fqns: list[str] = []
    """Parts of names of projections to exclude from float8. Example: ["layers.0.",
    "o_proj"]."""
    emulate: bool = False
    """Round to float8, but multiply in float32: slow, for tests on any device."""


class FileGroup(Section):
    """An entry of metrics.loss_by_source."""

    name: Text
    files: Text


class Metrics(Section):
    """Metrics and telemetry of a run."""

    rules = (MAY_CHANGE,)

    log_freq: Number = 10
    """Steps between reports; the first step is always reported."""
    enable_tensorboard: bool = True
    """Write TensorBoard events to tb/ in job.dump_folder."""
    enable_wandb: bool = False
    """Also report to Weights & Biases (pip install wandb), as one run regardless of
    resumes. Its environment variables set the rest: WANDB_PROJECT, WANDB_MODE=offline."""
    telemetry_freq: Count = 100
    """Steps between telemetry records: norms by layer, decay half-lives, loss by position
    and source, … (docs/telemetry.md); 0: none."""
    loss_by_source: Annotated[list[FileGroup], OF_A_NODE] = []
    """Groups of files whose losses telemetry shows separately, [{name = "code", files =
    "**/*.py"}, …]: globs (comma-separated) of paths or their ends. A document belongs to
    the first group that matches its file, else to "other"."""
    spike_sigmas: AtLeast0 = 6.0
    """Record a loss, with its step's streams, in spikes.jsonl if it is more than this many
    standard deviations above the mean of the last 128. Non-finite losses are always
    recorded; 0: only these."""
    peak_tflops: AtLeast0 = 0.0
    """Peak TFLOP/s of a GPU in the data type of computation, for MFU; 0: the known peak of
    this GPU model, if any."""


class Profiling(Section):
    """PyTorch profiler traces, each with a table of the largest costs, and snapshots of GPU
    memory."""

    rules = (MAY_CHANGE,)

    enable_profiling: bool = False
    """Record traces."""
    save_traces_folder: Annotated[Text, OF_A_NODE, HOME] = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Number = 10
    """Steps between traces."""
    profiler_active: Number = 1
    """Number of steps per trace."""
    profiler_warmup: Count = 3
    """Steps before each trace in which the profiler runs but keeps nothing; at most
    profile_freq − profiler_active."""
    profile_count: Count = 0
    """Maximum number of traces per start of the run; 0: no limit."""
    enable_memory_snapshot: Annotated[bool, OF_A_NODE] = False
    """Record where the code allocates GPU memory, and write a snapshot when memory runs
    out. Without this key, snapshots requested by SIGUSR1 (docs/telemetry.md) show what is
    allocated, but not where."""
    save_memory_snapshot_folder: Annotated[Text, OF_A_NODE, HOME] = "memory_snapshots"
    """Folder of the snapshots, inside job.dump_folder."""


class Validation(Section):
    """Loss on documents that are not trained on."""

    enable: bool = False
    """Validate during training."""
    dataset_path: Corpus = ""
    """Corpus to validate on, of the type in training.dataset; empty: documents held out of
    the training corpus."""
    holdout: Share = 0.01
    """Share of the training corpus's documents to hold out when validating without
    validation.dataset_path."""
    freq: Annotated[Number, MAY_CHANGE] = 100
    """Training steps between validations; the last step is always validated."""
    steps: Annotated[CountOrAll, MAY_CHANGE] = -1
    """Number of streams per validation, over all ranks; -1: all held-out documents."""
    local_batch_size: Annotated[Number, MAY_CHANGE] = 1
    """Streams per validation batch on each data-parallel rank."""
    keep_best: Annotated[bool, MAY_CHANGE] = False
    """Keep the checkpoint with the lowest validation loss, regardless of
    checkpoint.keep_latest_k. validation.freq must be a multiple of checkpoint.interval."""
    patience: Annotated[Count, MAY_CHANGE] = 0
    """End the run after this many validations in a row without a lower loss; 0: never."""
    sample_tokens: Annotated[Count, MAY_CHANGE] = 0
    """Length, in tokens, of a sample generated at each validation, with sample.temperature
    and sample.top_p; 0: none."""
    sample_prompt: Annotated[Text, MAY_CHANGE] = "def "
    """Prompt of that sample."""


class Evaluation(Section):
    """Recall over long texts, in tasks made from a seed and the validation texts."""

    rules = (MAY_CHANGE,)

    freq: Count = 0
    """Training steps between evaluations; the last step is always evaluated. 0: none."""
    tasks: list[str] = ["niah_single_2", "niah_multikey_1", "mqar", "induction", "loss"]
    """RULER's niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery,
    vt, cwe, fwe, qa_1 and qa_2; mqar, copy, induction; loss: loss on the texts by
    position."""
    lengths: list[Number] = Field([2048], min_length=1)
    """Prompt lengths in tokens, including the answers."""
    samples: Number = 11
    """Prompts per task and length, at evenly spaced depths."""
    chat: bool = False
    """Ask as a user message, in the tokenizer's chat template."""


class Sample(Section):
    """Text generated by the trained weights when the run ends."""

    rules = (MAY_CHANGE,)

    prompt: Text = "def "
    """Prompt of the sample."""
    max_new_tokens: Count = 0
    """Length of the sample in tokens; 0: none."""
    temperature: AtLeast0 = 0.8
    """Sampling temperature; 0: always the most likely token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the most likely tokens whose probabilities together reach this
    sum."""


class Comm(Section):
    """Collective communication, and restarts after a rank fails."""

    rules = (MAY_CHANGE,)

    init_timeout_seconds: int = Field(300, ge=1, le=10**6)
    """Timeout until the first step ends, and in the first step of each stream length
    (training.seq_len_schedule)."""
    train_timeout_seconds: int = Field(100, ge=1, le=10**6)
    """Timeout after the first step. Validation, saves and exports have none: they wait for
    the slowest disk."""
    max_restarts: Count = 0
    """Number of times that torchrun restarts all workers from the newest checkpoint after a
    rank fails for any reason."""


class Debug(Section):
    """Random seed and determinism."""

    seed: Count = 0
    """Seed of weights, data order and sampling."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """Use deterministic algorithms only."""


class Doctor(Section):
    """Proofs of the configuration, before a long run starts (docs/proof.md)."""

    rules = (MAY_CHANGE,)

    at_start: bool = False
    """Prove the run as `titan-linear doctor` does, and start it only if every proof passes.
    This takes a minute or two."""


class Config(Section):
    """Configuration of a run."""

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

    def changed(self, changes: Mapping[str, object]) -> Config:
        """Return a copy with other values of some keys, by "section.key"."""
        config = self
        for name, value in changes.items():
            section, key = name.split(".")
            changed = getattr(config, section).model_copy(update={key: value})
            config = config.model_copy(update={section: changed})
        return config

    def flat_keys(self) -> dict[str, Any]:
        """Return {"section.key": value}."""
        return {
            f"{section}.{key}": value
            for section, keys in self.model_dump().items()
            for key, value in keys.items()
        }

    def stored(self) -> Config:
        """Return the configuration that a run's config.toml has, which starts it anywhere.

        Paths are absolute. Once begun anew, a run is like any other, so its config.toml
        does not set it aside again.
        """
        values = self.flat_keys()
        mixture = [
            source.model_copy(update={"dataset_path": absolute(source.dataset_path)})
            for source in self.training.mixture
        ]
        paths = {key: absolute(values[key]) for key in keys_with(PATH)}
        if self.model.tokenizer_path == BYTES:
            del paths["model.tokenizer_path"]
        return self.changed(paths | {"training.mixture": mixture, "job.start_anew": False})

    @property
    def objective(self) -> Section:
        """The section of the loss; of a registered loss, its options.

        Raises:
            ValueError: the options do not fit.
        """
        loss = self.loss
        if loss.name in LOSS_NAMES:
            return getattr(self, loss.name)
        section = TABLES["loss.name"][loss.name].section
        try:
            return section(**loss.options)
        except ValidationError as invalid:
            error = invalid.errors()[0]
            raise ValueError(
                f"loss.options.{'.'.join(map(str, error['loc']))} = {error['input']!r}: {error['msg']}; loss.name = "
                f"{loss.name!r} has the options {', '.join(section.model_fields)}"
            ) from None

    def micro_steps(self, world_size: int) -> int:
        """Return the number of micro-batches per rank in a step."""
        replicas, shards = self.parallelism.data_parallel_degrees(world_size)
        return self.training.global_batch_size // (
            replicas * shards * self.training.local_batch_size
        )

    @property
    def schedule_steps(self) -> int:
        """The step at which the learning rate's decay ends."""
        return self.lr_scheduler.total_steps or self.training.steps

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.job.dump_folder) / self.checkpoint.folder


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items()
}
KEYS = {
    f"{section}.{key}": field
    for section, cls in SECTIONS.items()
    for key, field in cls.model_fields.items()
}


def keys_with(rule: KeyRule) -> list[str]:
    """Return the keys that have this property."""
    return [
        key
        for key, field in KEYS.items()
        if rule in (*SECTIONS[key.partition(".")[0]].rules, *field.metadata)
    ]


def absolute(path: str) -> str:
    """Make a path, or several separated by commas, absolute; "" stays."""
    parts = [path] if os.path.exists(path) else path.split(",")
    return ",".join(
        os.path.abspath(os.path.expanduser(part.strip())) for part in parts if part.strip()
    )


PRINT = "--print-config"
# The group in metrics.loss_by_source of files that match no other group.
OTHER = "other"
# A source of a mixture must provide at least one in this many streams.
SMALLEST_SHARE = 1 << 16
# float32 and bfloat16 hold smaller numbers only with fewer digits, and devices round them
# to 0.
SMALLEST_EPS = 1.2e-38
