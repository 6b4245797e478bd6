"""What a configuration names: tokenizer, streams, mesh, model, folders. Trainer, preflight and tools share this."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import (
    BYTES,
    OTHER,
    Config,
    Model,
    Rule,
    Source,
    Training,
    data_parallel_degrees,
    difference,
    flat_keys,
    hf_assets,
    hf_weights,
    key_of,
    keys_with,
    replicas_wait,
    sources,
    toml_value,
)
from titan_linear.data import (
    Batch,
    Corpus,
    FileGroups,
    Length,
    MixedStreams,
    PackedStreams,
    Phase,
    Side,
    Streams,
    Texts,
    Tokenizer,
    build_tokenizer,
    cached_corpus,
    open_corpus,
    split_corpus,
)
from titan_linear.distributed.groups import of_all_ranks
from titan_linear.distributed.mesh import ParallelDims, build_mesh
from titan_linear.distributed.parallelize import materialise, parallelize, set_dtype
from titan_linear.models.adapters import config_to_hf
from titan_linear.models.config import ModelConfig, fingerprint
from titan_linear.models.decoder import Decoder
from titan_linear.models.presets import preset, resized
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import Choice
from titan_linear.step.feed import BatchSharding, Feed, MicroBatch
from titan_linear.step.passes import ComputeCopies, Passes
from titan_linear.storage.hf_io import check_tokenizer, find_family, read_config, read_model, write_folder
from titan_linear.storage.rundir import BOARD, checkpoint_folder
from titan_linear.storage.step_folders import Content, Progress

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
EXPORT_DTYPES = {**DTYPES, "float16": torch.float16, "source": None}
FAMILY_OF = {"qwen3-next": "Qwen3NextForCausalLM"}  # by model.name, if several architectures can hold the model
VOCAB_MULTIPLE = 64  # rounds up a vocabulary that follows the tokenizer: whole tiles of a product, and even shards
T = TypeVar("T")


# --- The data --------------------------------------------------------------------------------------------------------


def tokenizer_path(config: Config) -> str | None:
    """Return model.tokenizer_path, else the tokenizer.json of the Hugging Face folder, else None: bytes."""
    if config.model.tokenizer_path == BYTES:
        return None
    own = str(Path(hf_assets(config)) / "tokenizer.json") if hf_assets(config) else None
    return config.model.tokenizer_path or own


def open_tokenizer(config: Config) -> Tokenizer:
    """The run's tokenizer. ValueError: it, or the Hugging Face folder that brings it, is missing or cannot be used."""
    folder, m = hf_assets(config), config.model
    if folder and not m.tokenizer_path and not Path(folder).is_dir():
        key = "model.hf_assets_path" if m.hf_assets_path else "checkpoint.initial_load_path"
        raise ValueError(f"{key} = {folder!r} is no folder; give one with a Hugging Face model (nothing is downloaded)")
    model_without_tokenizer(config)  # a model that we do not have is said before its tokenizer is missed
    return build_tokenizer(tokenizer_path(config))


def open_corpora(config: Config, tokenizer: Tokenizer, show_progress: bool = False) -> list[Corpus]:
    """Open the training corpus, or each of the mixture's sources, and validation's own corpus if it has one."""
    v, groups = config.validation, bool(config.metrics.loss_by_source)
    wanted = [(texts_of(source, config, tokenizer), groups) for source in sources(config)]
    if v.enable and v.dataset_path:
        own = texts_of(config.training, config, tokenizer)
        wanted.append((replace(own, path=v.dataset_path, path_key="validation.dataset_path"), False))
    return [
        open_corpus(replace(texts, show_progress=show_progress), with_paths=with_paths) for texts, with_paths in wanted
    ]


def texts_of(source: Training | Source, config: Config, tokenizer: Tokenizer) -> Texts:
    return Texts(
        source.dataset,
        source.dataset_path or None,
        tokenizer,
        text_field=source.dataset_text_field,
        dataset_format=source.dataset_format,
        on_bad_document=config.training.on_bad_document,
        path_key=key_of(source, "dataset_path"),
    )


def cached_corpora(config: Config, tokenizer: Tokenizer) -> list[Corpus | None]:
    """The corpora to train on; None in place of one that is not here or has not been tokenised yet."""
    return [cached_corpus(texts_of(source, config, tokenizer)) for source in sources(config)]


def check_size(tokens: int, config: Config) -> None:
    """Raise ValueError if a corpus of this many tokens is smaller than a step."""
    t = config.training
    step = t.global_batch_size * t.seq_len
    if tokens < step:
        raise ValueError(
            f"training.{'mixture' if t.mixture else 'dataset_path'}: the corpus has {tokens:,} tokens, and a step takes"
            f" training.global_batch_size × training.seq_len = {t.global_batch_size} × {t.seq_len} = {step:,}, so that "
            "a batch would hold documents twice; take more texts, or smaller batches"
        )


def tokens_of(streams: Streams) -> int:
    """Number of tokens in an epoch of all sources."""
    return sum(s.num_tokens for s in (streams.sources.values() if isinstance(streams, MixedStreams) else [streams]))


def build_streams(config: Config, tokenizer: Tokenizer, progress: Progress | None) -> tuple[Streams, Streams | None]:
    """Endless streams to train on, and one pass over those to validate on.

    progress: what is saved in the checkpoint that the run resumes from; None: a new run.
    """
    t, v, seed = config.training, config.validation, config.debug.seed
    given = sources(config)
    corpora = open_corpora(config, tokenizer)
    trained, own = corpora[: len(given)], corpora[len(given) :]
    holdout = v.holdout if v.enable and not own else 0.0

    def sides(split: str) -> list[Side]:
        return [_side(source, corpus, holdout, split) for source, corpus in zip(given, trained, strict=True)]

    packed = [PackedStreams(side, seq_len=t.seq_len, seed=seed) for side in sides("train")]
    streams = _mixed(config, packed, progress) if t.mixture else packed[0].of_lengths(lengths(config))
    if not v.enable:
        return streams, None
    held_out = [split_corpus(corpus, 0.0, "train") for corpus in own] or sides("validation")
    passes = [PackedStreams(side, seq_len=t.seq_len, seed=seed, repeat=False) for side in held_out]
    if not t.mixture:
        return streams, passes[0]
    return streams, MixedStreams(dict(zip(streams.sources, passes, strict=True)), seed=seed, repeat=False)


def _side(source: Training | Source, corpus: Corpus, holdout: float, split: str) -> Side:
    if isinstance(source, Source):
        return under_key(f"training.mixture, source {source.name!r}", split_corpus, corpus, holdout, split)
    return split_corpus(corpus, holdout, split)


def file_groups(config: Config, streams: Streams) -> FileGroups | None:
    """The groups of metrics.loss_by_source, if any; streams: those to train on. ValueError: a group fits no file."""
    patterns = {group.name: group.files for group in config.metrics.loss_by_source}
    return FileGroups(streams, patterns, OTHER) if patterns else None


def _mixed(config: Config, packed: list[PackedStreams], progress: Progress | None) -> MixedStreams:
    """The mixture of these sources, in the order of training.mixture."""
    named = {source.name: streams for source, streams in zip(config.training.mixture, packed, strict=True)}
    known = progress.content.corpora if progress else None
    phases = mixture_phases(config, progress)
    return MixedStreams(named, phases, seed=config.debug.seed, known=known, lengths=lengths(config))


def lengths(config: Config) -> list[Length]:
    """The streams' lengths by training.seq_len_schedule; they change where a step begins."""
    t = config.training
    starts = [0, *(part.until_step * t.global_batch_size for part in t.seq_len_schedule)]
    return list(map(Length, starts, [*(part.seq_len for part in t.seq_len_schedule), t.seq_len]))


def mixture_phases(config: Config, progress: Progress | None) -> list[Phase]:
    """The phases of the run's mixture so far, and the one from this step on.

    ValueError: training.mixture differs from the run's, and training.mixture_from_step does not say that it changes
    here.
    """
    t = config.training
    weights = {source.name: source.weight for source in t.mixture}
    if progress is None:
        return [Phase(0, weights)]
    phases = [Phase(*phase) for phase in progress.content.mixture]
    if phases[-1].weights == weights:
        return phases
    if t.mixture_from_step != progress.step:
        of_run, given = ([{"name": n, "weight": w} for n, w in x.items()] for x in (phases[-1].weights, weights))
        raise ValueError(
            f"training.mixture is another than that of the run in {config.job.dump_folder!r} at step {progress.step} "
            f"({difference(of_run, given)}); restore it, or say that it changes here: "
            f"training.mixture_from_step = {progress.step}"
        )
    start = progress.step * t.global_batch_size
    return [*(phase for phase in phases if phase.start < start), Phase(start, weights)]


def content_of(
    config: Config, tokenizer: Tokenizer, model: ModelConfig, streams: Streams, held_out: Streams | None
) -> Content:
    """What a checkpoint records to identify data and model by their content."""
    own = config.validation.enable and config.validation.dataset_path
    return Content(
        tokenizer=tokenizer.fingerprint,
        model=fingerprint(model),
        corpora=streams.fingerprints,
        mixture=streams.phases if isinstance(streams, MixedStreams) else [],
        validation=held_out.corpus.fingerprint if own else "",
    )


def check_content(config: Config, known: Content, given: Content) -> None:
    """Raise ValueError if the run so far has had another model or other data."""
    run = config.job.dump_folder
    for name, corpus in known.corpora.items():
        other = given.corpora.get(name, corpus)
        if name and other != corpus:
            raise ValueError(
                f"training.mixture, source {name!r} is another corpus than the run in {run!r} has (fingerprints "
                f"{other} and {corpus}); restore it, or give a new source a name of its own"
            )
    for key, what, before, now in (
        ("training.dataset_path", "corpus", known.corpora.get(""), given.corpora.get("")),
        ("validation.dataset_path", "validation corpus", known.validation, given.validation),
        ("model.tokenizer_path", "tokenizer", known.tokenizer, given.tokenizer),
        ("model.name, flavor, sizes or hf_assets_path", "model", known.model, given.model),
    ):
        if before and now and before != now:
            raise ValueError(
                f"{key} gives another {what} than the run in {run!r} has (fingerprints {now} and {before}); restore "
                "it, or start a new run in another job.dump_folder"
            )


def check_alike(config: Config, content: Content, host: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if one, on another node say, has other data or keys than rank 0. Paths may
    differ."""
    own = keys_with(Rule.OF_A_NODE)
    keys = {key: value for key, value in flat_keys(config).items() if key not in own}
    ranks = of_all_ranks(keys | {f"the content of {name}": value for name, value in content.model_dump().items()}, host)
    for rank, of_rank in enumerate(ranks):
        for name, value in of_rank.items():
            if value != ranks[0].get(name):
                raise ValueError(
                    f"{name} is {value!r} on rank {rank} and {ranks[0].get(name)!r} on rank 0; start every node with "
                    "the same keys, on the same texts"
                )


def other_tokenizer(known: str | None, tokenizer: Tokenizer, weights: str, key: str = "model.tokenizer_path") -> str:
    """A warning if the weights were trained with another tokenizer than that of `key`, which may be meant; else "".

    known: the fingerprint of the weights' tokenizer; None: they do not know it.
    """
    if known in (None, tokenizer.fingerprint):
        return ""
    return (
        f"warning: the weights of {weights} were trained with another tokenizer than {key} gives (fingerprints {known} "
        f"and {tokenizer.fingerprint})"
    )


# --- The model -------------------------------------------------------------------------------------------------------


def model_config(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """The preset, or the model of a Hugging Face folder, checked against the tokenizer.

    A preset that is trained from drawn weights gets a larger vocabulary where the tokenizer needs one.
    """
    model = model_without_tokenizer(config)
    if model.vocab_size < tokenizer.vocab_size and _follows_tokenizer(config):
        model = replace(model, vocab_size=-(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    if model.vocab_size < tokenizer.vocab_size:
        what, remedy = f"model.vocab_size = {model.vocab_size}", f"model.vocab_size to at least {tokenizer.vocab_size}"
        if config.model.flavor == "hf":
            what = f"the vocabulary of '{hf_assets(config)}/config.json', {model.vocab_size},"
            remedy = "model.tokenizer_path (titan-linear generate: --tokenizer) to the tokenizer of this model"
        whose = repr(path) if (path := tokenizer_path(config)) else "of bytes"
        raise ValueError(f"{what} is smaller than that of the tokenizer {whose}, {tokenizer.vocab_size}; set {remedy}")
    return model


def model_without_tokenizer(config: Config) -> ModelConfig:
    """`model_config` before the tokenizer is known: a preset with its own vocabulary."""
    if config.model.flavor == "hf":
        _, model = under_key("model.flavor = 'hf'", read_model, Path(hf_assets(config)))
    else:
        model = preset(config.model.name, config.model.flavor)
    return balance_experts(resized(model, config.model.model_dump()), config)


def model_name(config: Config) -> str:
    """The model's name and flavor, or architecture and folder, and the keys that change its sizes, for people to
    read."""
    m, default = config.model, Model()
    name = f"{m.name}/{m.flavor}"
    if m.flavor == "hf":
        architecture, _ = read_model(Path(hf_assets(config)))
        name = f"{architecture} of '{hf_assets(config)}'"
    sizes = ("dim", "num_layers", "hidden_dim", "pattern", "moe")
    changed_keys = {key: getattr(m, key) for key in sizes if getattr(m, key) != getattr(default, key)}
    changes = [f"{key} = {toml_value(value)}" for key, value in (changed_keys | m.mixers).items()]
    return name + (f" with {', '.join(changes)}" if changes else "")


def first_weights(config: Config) -> str:
    """A console line: where the weights of a new run are from."""
    path = hf_weights(config) or (config.checkpoint.enable and config.checkpoint.initial_load_path)
    return f"weights of '{path}'" if path else f"weights drawn from debug.seed = {config.debug.seed}"


def _follows_tokenizer(config: Config) -> bool:
    """Whether nothing fixes the size of the vocabulary: neither a key, nor a model or weights from elsewhere."""
    elsewhere = config.model.flavor == "hf" or hf_weights(config) or config.checkpoint.initial_load_path
    return not (config.model.vocab_size or elsewhere)


def vocabulary(config: Config, model: ModelConfig, tokenizer: Tokenizer) -> str:
    """A console line if the vocabulary is not the preset's, or far larger than the tokenizer's; else ""."""
    rows, used = model.vocab_size, tokenizer.vocab_size
    if not _follows_tokenizer(config):
        return ""
    if rows != (own := model_without_tokenizer(config).vocab_size):
        return f"model.vocab_size = {rows}: the tokenizer's {used}, rounded up; {config.model.flavor!r} alone has {own}"
    if rows > 2 * max(used, VOCAB_MULTIPLE) and rows - used > 1024:
        return f"model.vocab_size = {rows} is the preset's; the tokenizer uses {used}: a new run can set fewer"
    return ""


def balance_experts(model: ModelConfig, config: Config) -> ModelConfig:
    """Return the model with the experts' loads balanced as the configuration says; unset keys leave it as it is."""
    t = config.training
    asked = {"balance_coefficient": t.expert_balance_coefficient, "bias_update_rate": t.expert_bias_update_rate}
    asked = {field: value for field, value in asked.items() if value >= 0}
    if not asked:
        return model
    if model.moe is None or (t.expert_bias_update_rate > 0 and not model.moe.selection_bias):
        key, what = (next(iter(asked)), "experts") if model.moe is None else ("bias_update_rate", "selection bias")
        raise ValueError(
            f"training.expert_{key} is set, but model.name = {config.model.name!r}, model.flavor = "
            f"{config.model.flavor!r} has no {what}; leave it at -1"
        )
    return replace(model, moe=replace(model.moe, **asked))


def unbalanced(model: ModelConfig) -> str:
    """A console line if nothing balances the loads of the model's experts; else ""."""
    moe = model.moe
    if moe is None or moe.balance_coefficient or moe.bias_update_rate:
        return ""
    by_bias = " or training.expert_bias_update_rate = 0.001" if moe.selection_bias else ""
    return f"nothing balances the experts' loads; training.expert_balance_coefficient = 0.01{by_bias} does"


def unallocated(model: ModelConfig, dtype: torch.dtype) -> Decoder:
    """The decoder on the meta device, its parameters in `dtype` (gate parameters in float32 or wider)."""
    with torch.device("meta"):
        decoder = Decoder(model)
    set_dtype(decoder, dtype)
    return decoder


def allocated(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The same on one device; its weights are still to be set."""
    decoder = unallocated(model, dtype)
    materialise(decoder, device)
    return decoder


def build_dims(config: Config, device: torch.device) -> ParallelDims:
    """The mesh over all ranks."""
    replicate, shard = data_parallel_degrees(config, dist.get_world_size())
    p = config.parallelism
    return build_mesh(
        device.type,
        replicate,
        shard,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
        p.expert_parallel_degree,
        config.training.enable_cpu_offload,
        p.fsdp_shard_degree,
    )


def build_sharding(config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device) -> BatchSharding:
    """How batches are cut for this rank, and planned for this model."""
    p = config.parallelism
    return BatchSharding.of(
        model,
        dims,
        device,
        DTYPES[config.training.mixed_precision_param],
        layout=p.context_parallel_layout,
        softmax_method=p.context_parallel_method,
        linear_method=p.context_parallel_linear_method,
        compiled=config.compile.enable,
    )


def implementations(config: Config, model: ModelConfig, device: torch.device) -> dict[str, Choice]:
    """op -> the implementation that this run uses. ValueError: that of model.impl cannot run the model here."""
    ops, dtype = model.ops(config.parallelism.tensor_parallel_degree), DTYPES[config.training.mixed_precision_param]
    return choose_implementations(ops, config.model.impl, device, dtype)


def build_model(config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device) -> Decoder:
    """The decoder as the ranks train it: unallocated → parallelize → allocate. Its weights are still to be set."""
    decoder = unallocated(model, DTYPES[config.training.dtype])
    parallelize(decoder, dims, config, device)
    materialise(decoder, device, dims.cpu_offload)
    return decoder


def build_passes(
    config: Config,
    model: Decoder,
    dims: ParallelDims,
    device: torch.device,
    batches: Iterator[Batch],
    *,
    micro_steps: int,
    host: dist.ProcessGroup | None = None,
    watching: Callable[[MicroBatch], AbstractContextManager[object]] = lambda batch: nullcontext(),
) -> Passes:
    """Forward and backward of the steps whose batches these are.

    Args:
        batches: those of this data-parallel rank, without end.
        micro_steps: number of batches per step.
        host: a gloo group of all ranks, in which hosts count the step's tokens; by default the default group.
        watching: a context around both passes of a micro-batch.
    """
    feed = Feed(
        batches,
        build_sharding(config, model.config, dims, device),
        micro_steps=micro_steps,
        copies=dims.copies,
        host=host or dist.group.WORLD,
        device=device,
    )
    precision = mixed_precision(config, model, dims)
    replicas_once = dims.replicas > 1 and replicas_wait(config.training)
    return Passes(model, feed, precision, config.training.loss_chunk_size, watching, replicas_once)


def uncompiled(config: Config, device: torch.device) -> str:
    """A console line if layers run on a GPU without being compiled; else ""."""
    if config.compile.enable or device.type != "cuda":
        return ""
    return (
        "layers are not compiled: norms, gates, activations and casts are kernels of their own, which take longer and "
        "keep more for backward; compile.enable = true fuses them (the first step then takes up to a minute)"
    )


def mixed_precision(config: Config, model: Decoder, dims: ParallelDims) -> AbstractContextManager[object]:
    """A reusable context in which `model` computes in training.mixed_precision_param; an empty one with FSDP2, which
    sees to it."""
    return nullcontext() if dims.sharded else ComputeCopies(model, DTYPES[config.training.mixed_precision_param])


# --- The folders -----------------------------------------------------------------------------------------------------


def export_folder(config: Config, step: int = 0) -> Path:
    """The Hugging Face folder of a step; by default that of the run's last step."""
    return checkpoint_folder(config) / f"step-{step or config.training.steps}-hf"


def lacks_export(config: Config, step: int) -> bool:
    """Whether checkpoint.export_interval asks for an export of step-N that is not there."""
    c = config.checkpoint
    last = c.last_save_in_hf and step == config.training.steps  # the run exports that one itself
    wanted = c.export_interval and step % c.export_interval == 0 and not last
    return bool(wanted) and not export_folder(config, step).exists()


def not_exported(steps: Sequence[int]) -> str:
    """A line that tells the user which steps were not exported."""
    return f"not exported: {', '.join(f'step-{step}' for step in steps)}; titan-linear convert to-hf does it"


def finished(config: Config, step: int) -> str:
    """Lines that tell the user where a finished run lies, and what to do with it."""
    folder, prompt = shlex.quote(config.job.dump_folder), shlex.quote(config.sample.prompt)
    lines = [f"the run in {config.job.dump_folder!r} is finished: {step} of training.steps = {config.training.steps}"]
    if config.metrics.enable_tensorboard:
        lines.append(f"see its curves:  tensorboard --logdir {folder}/{BOARD}")
    if config.checkpoint.enable:
        lines.append(f"let it write:    titan-linear generate {folder} --prompt {prompt}")
    if config.checkpoint.enable and not export_folder(config, step).exists():
        lines.append(f"export it:       titan-linear convert to-hf {folder} FOLDER")
    return "\n".join(lines)


def ended(config: Config, step: int, stopped: bool) -> str:
    """Lines that tell the user what a run leaves, `stopped` by a signal or not, and what to do with it."""
    if not stopped:
        return finished(config, step)
    if not (config.checkpoint.enable and step):
        return "nothing was saved"
    return f"saved step {step} in '{checkpoint_folder(config)}'; the same command resumes"


def export_family(config: Config, model: ModelConfig, tokenizer: Tokenizer, like: str = "") -> str:
    """The architecture under which a run's model and tokenizer are saved. ValueError: none can hold them."""
    files, like = tokenizer.hugging_face_files(), like or hf_weights(config)
    if not (like or hf_assets(config)):
        return FAMILY_OF.get(config.model.name) or find_family(model, files)
    family, _ = read_model(Path(like or hf_assets(config)))
    check_tokenizer(family, read_config(Path(like)) if like else config_to_hf(family, model), files)
    return family


def export(
    path: Path,
    config: Config,
    model: ModelConfig,
    tokenizer: Tokenizer,
    get: Callable[[str], Tensor],
    *,
    dtype: str,
    like: str = "",
) -> None:
    """Write the weights of a run as a Hugging Face folder. Every rank calls it; see `write_folder`.

    Args:
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.
    """
    like = like or hf_weights(config)
    kept = like and tokenizer_path(config) == str(Path(like) / "tokenizer.json")  # its tokenizer, so also its end token
    write_folder(
        path,
        model,
        export_family(config, model, tokenizer, like),
        get,
        dtype=EXPORT_DTYPES[dtype],
        like=Path(like) if like else None,
        tokenizer=tokenizer.hugging_face_files(),
        extra={} if kept else {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": None},
    )


def under_key(key: str, check: Callable[..., T], *arguments: object) -> T:
    """Return a check's result; prefix its ValueError with the key that asked for it."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
