"""Objects that a configuration asks to train: tokenizer, model, mesh and passes.

The trainer, preflight and tools share these functions.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.distributed.mesh import ParallelDims, build_mesh
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, set_dtype
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import Choice
from titan_linear.step.optimizer import learning_rate

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
T = TypeVar("T")


def under_key(key: str, check: Callable[..., T], *arguments: object) -> T:
    """Return a check's result; prefix its ValueError with the key that asked for it."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def unallocated(
    model: ModelConfig, dtype: torch.dtype = torch.float32, frozen: torch.dtype | None = None
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
