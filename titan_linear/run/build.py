"""Objects that a configuration asks to train: model, mesh and passes.

The trainer, preflight and tools share these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.data import Batch
from titan_linear.distributed.mesh import ParallelDims, build_mesh
from titan_linear.distributed.parallelize import materialise, parallelize, set_dtype
from titan_linear.losses import build_loss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import Choice
from titan_linear.step.cut import BatchSharding
from titan_linear.step.feed import Feed
from titan_linear.step.optimizer import ComputeCopies
from titan_linear.step.passes import Passes

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
T = TypeVar("T")


def under_key(key: str, check: Callable[..., T], *arguments: object) -> T:
    """Return a check's result; prefix its ValueError with the key that asked for it."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


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


def build_sharding(
    config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device
) -> BatchSharding:
    """Build the object that cuts batches for this rank and plans them for this model."""
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
    """Map each op to the implementation that this run uses.

    Raises:
        ValueError: the implementation that model.impl names cannot run the model here.
    """
    ops = model.ops(config.parallelism.tensor_parallel_degree)
    dtype = DTYPES[config.training.mixed_precision_param]
    return choose_implementations(ops, config.model.impl, device, dtype)


def build_model(
    config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device
) -> Decoder:
    """Build the decoder as ranks train it: unallocated → parallelize → allocate.

    Its weights are not set yet.
    """
    t = config.training
    decoder = unallocated(model, DTYPES[t.dtype], DTYPES[t.mixed_precision_param])
    decoder.head.chunk = t.loss_chunk_size
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
    watching: Callable[[LocalBatch], AbstractContextManager[object]] = lambda batch: nullcontext(),
) -> Passes:
    """Build the forward and backward passes of the steps that take these batches.

    Args:
        batches: the batches of this data-parallel rank, without end.
        micro_steps: number of batches per step.
        host: a gloo group of all ranks, in which hosts count the step's tokens; by default
            the default group.
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
    replicas_once = dims.replicas > 1 and config.training.replicas_wait
    return Passes(
        model,
        feed,
        precision,
        build_loss(config.loss.name, config.objective),
        watching,
        replicas_once,
    )


def mixed_precision(
    config: Config, model: Decoder, dims: ParallelDims
) -> AbstractContextManager[object]:
    """Return a reusable context that computes in training.mixed_precision_param.

    It is empty with FSDP2, which casts by itself.
    """
    return (
        nullcontext()
        if dims.sharded
        else ComputeCopies(model, DTYPES[config.training.mixed_precision_param])
    )
