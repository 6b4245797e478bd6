"""Objects that a configuration asks to train: tokenizer, model, mesh and passes.

The trainer, preflight and tools share these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_linear.config import BYTES, Config
from titan_linear.data import Tokenizer, build_tokenizer
from titan_linear.distributed.mesh import ParallelDims, build_mesh
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, set_dtype
from titan_linear.models.config import LoraConfig, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import joined
from titan_linear.models.lora import check_adapters
from titan_linear.models.presets import preset, resized
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import Choice
from titan_linear.step.optimizer import learning_rate
from titan_linear.storage.hf_io import CONFIG, download, read_model
from titan_linear.storage.hf_writing import Files, find_family

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# A vocabulary that follows the tokenizer is rounded up to whole tiles of a product and even
# shards.
VOCAB_MULTIPLE = 64
# Family by model.name, for models that several architectures can hold.
FAMILY_OF = {"qwen3-next": "Qwen3NextForCausalLM"}
T = TypeVar("T")


def under_key(key: str, check: Callable[..., T], *arguments: object) -> T:
    """Return a check's result; prefix its ValueError with the key that asked for it."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def tokenizer_path(config: Config) -> str | None:
    """Return model.tokenizer_path, else the Hugging Face folder's tokenizer.json.

    None stands for bytes.
    """
    if config.model.tokenizer_path == BYTES:
        return None
    own = str(Path(config.hf_assets) / "tokenizer.json") if config.hf_assets else None
    return config.model.tokenizer_path or own


def open_tokenizer(config: Config) -> Tokenizer:
    """Open the run's tokenizer.

    Raises:
        ValueError: it, or the Hugging Face folder that brings it, is missing or cannot be
            used.
    """
    folder, m = config.hf_assets, config.model
    if folder and not m.tokenizer_path and not Path(folder).is_dir():
        key = "model.hf_assets_path" if m.hf_assets_path else "checkpoint.initial_load_path"
        raise ValueError(
            f"{key} = {folder!r} is not a folder; give one with a Hugging Face model: {download(Path(folder))}"
        )
    # An unknown model is reported before its missing tokenizer.
    model_without_tokenizer(config)
    return build_tokenizer(tokenizer_path(config))


def model_config(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """Return the model of the preset or Hugging Face folder, checked against the tokenizer.

    A preset that does not begin from a Hugging Face folder gets a larger vocabulary where
    the tokenizer needs one.
    """
    model = model_without_tokenizer(config)
    if model.vocab_size < tokenizer.vocab_size and follows_tokenizer(config):
        model = replace(
            model, vocab_size=-(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        )
    # Otherwise the size is fixed: refuse a tokenizer that needs more.
    if model.vocab_size < tokenizer.vocab_size:
        what = f"model.vocab_size = {model.vocab_size}"
        remedy = f"model.vocab_size to at least {tokenizer.vocab_size}"
        if config.model.flavor == "hf":
            what = f"the vocabulary of '{config.hf_assets}/config.json', {model.vocab_size},"
            remedy = "model.tokenizer_path (titan-linear generate: --tokenizer) to the tokenizer of this model"
        whose = repr(path) if (path := tokenizer_path(config)) else "of bytes"
        raise ValueError(
            f"{what} is smaller than that of the tokenizer {whose}, {tokenizer.vocab_size}; set {remedy}"
        )
    return model


def model_without_tokenizer(config: Config) -> ModelConfig:
    """Return `model_config` before the tokenizer is known.

    A preset has its own vocabulary.
    """
    # The sizes of a folder or a preset, with the keys that change them.
    if config.model.flavor == "hf":
        _, model = under_key(
            "model.flavor = 'hf'", read_model, Path(config.hf_assets), config.model.mtp_layers
        )
    else:
        model = preset(config.model.name, config.model.flavor)
    model = resized(model, config.model.model_dump())
    if config.loss.mtp_weight != ModelConfig.mtp_weight and not model.mtp_layers:
        raise ValueError(
            f"loss.mtp_weight = {config.loss.mtp_weight}, but model.mtp_layers = 0, the number of tokens it is for"
        )
    # Settings of training that the model holds.
    model = balance_experts(replace(model, mtp_weight=config.loss.mtp_weight), config)
    return with_adapter(model, config)


def with_adapter(model: ModelConfig, config: Config) -> ModelConfig:
    """Add the adapters that the configuration asks for.

    Raises:
        ValueError: the model cannot have such adapters, or the configuration trains weights
            that adapters leave frozen.
    """
    a = config.adapter
    if not a.enable:
        return model
    if config.training.expert_bias_update_rate > 0:
        raise ValueError(
            "training.expert_bias_update_rate moves a bias of the base, which adapter.enable = true leaves frozen; "
            "leave it at -1"
        )
    if config.loss.reference == "base" and a.train_extra:
        raise ValueError(
            "loss.reference = 'base' is the model as it was, and adapter.train_extra changes more of it than adapters; "
            "remove one of them"
        )
    try:
        family = family_of(model, config)
    except ValueError:
        # No architecture holds the model.
        shared = ()
    else:
        shared = joined(model, family)
    adapter = LoraConfig(
        rank=a.rank,
        factor=a.alpha / (math.sqrt(a.rank) if a.rslora else a.rank),
        targets=tuple(a.targets),
        extra=tuple(a.train_extra),
        shared=shared,
        base_is_reference=config.loss.reference == "base",
    )
    check_adapters(unallocated(model, torch.float32), adapter)
    moe = model.moe and replace(model.moe, bias_update_rate=0.0)
    return replace(model, adapter=adapter, moe=moe)


def family_of(
    model: ModelConfig, config: Config, like: str = "", tokenizer: Files | None = None
) -> str:
    """Return the architecture under which the model is saved.

    It is the architecture of the folder `like`, or of the model's own Hugging Face folder,
    if that exists. Otherwise it is the first that holds the model and the tokenizer.

    Raises:
        ValueError: none does.
    """
    folder = Path(like or config.hf_assets or "/")
    if (folder / CONFIG).is_file():
        family, _ = read_model(folder)
        return family
    return FAMILY_OF.get(config.model.name) or find_family(model, tokenizer)


def follows_tokenizer(config: Config) -> bool:
    """Whether nothing fixes the vocabulary's size: neither a key nor a Hugging Face folder."""
    return not (config.model.vocab_size or config.model.flavor == "hf" or config.hf_weights)


def balance_experts(model: ModelConfig, config: Config) -> ModelConfig:
    """Return the model with its experts' loads balanced as configured.

    Unset keys change nothing.
    """
    t = config.training
    asked = {
        "balance_coefficient": t.expert_balance_coefficient,
        "bias_update_rate": t.expert_bias_update_rate,
    }
    asked = {field: value for field, value in asked.items() if value >= 0}
    if not asked:
        return model
    # Refuse keys for which the model has nothing to balance.
    if model.moe is None or (t.expert_bias_update_rate > 0 and not model.moe.selection_bias):
        key, what = (
            (next(iter(asked)), "experts")
            if model.moe is None
            else ("bias_update_rate", "selection bias")
        )
        raise ValueError(
            f"training.expert_{key} is set, but model.name = {config.model.name!r}, model.flavor = "
            f"{config.model.flavor!r} has no {what}; leave it at -1"
        )
    return replace(model, moe=replace(model.moe, **asked))


def unallocated(
    model: ModelConfig, dtype: torch.dtype, frozen: torch.dtype | None = None
) -> Decoder:
    """Build the decoder on the meta device.

    Args:
        dtype: the dtype of parameters. Gate parameters are in float32 or wider.
        frozen: the dtype of the parameters that adapters leave frozen; by default the same.
    """
    with torch.device("meta"):
        decoder = Decoder(model)
    set_dtype(decoder, dtype, frozen)
    return decoder


def allocated(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the decoder on one device. Its weights are not set yet."""
    decoder = unallocated(model, dtype)
    materialise(decoder, device)
    return decoder


def build_dims(config: Config, device: torch.device) -> ParallelDims:
    """Build the mesh over all ranks."""
    replicate, shard = config.parallelism.data_parallel_degrees(dist.get_world_size())
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


def options_of(config: Config) -> SessionOptions:
    """Return the options that the configuration gives a session."""
    t = config.training
    return SessionOptions(
        impl=config.model.impl,
        dtype=DTYPES[t.dtype],
        compute_dtype=DTYPES[t.mixed_precision_param],
        reduce_dtype=DTYPES[t.mixed_precision_reduce],
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.float8,
        loss_chunk_size=t.loss_chunk_size,
        max_norm=t.max_norm,
    )


def rate_at(config: Config, step: int) -> float:
    """Return the learning rate of a run's step, counted from 1."""
    return learning_rate(step, config.optimizer.lr, config.lr_scheduler, config.training.steps)


def implementations(config: Config, model: ModelConfig, device: torch.device) -> dict[str, Choice]:
    """Map each op to the implementation that this run uses.

    Raises:
        ValueError: the implementation that model.impl names cannot run the model here.
    """
    ops = model.ops(config.parallelism.tensor_parallel_degree)
    dtype = DTYPES[config.training.mixed_precision_param]
    return choose_implementations(ops, config.model.impl, device, dtype)
