"""Memory per GPU of a run, planned: the model is built on the meta device, where nothing is allocated.

The parts are of the GPU that holds most, in bytes:

    parameters, gradients, optimizer   exact: this GPU's shards, and what FSDP leaves whole
    gathered                           FSDP: the two largest units whole (layers, embedding), one with its gradients
    activations                        what autograd keeps of one micro-step, as counted while a layer of each kind
                                       runs on the meta device with the PyTorch ops; with full activation checkpointing
                                       each layer's input, and all of the layer that is being computed again; with
                                       selective what is kept of the ops too, as their kernels keep it
    head                               its weight and gradient whole, and the logits of training.loss_chunk_size tokens

It leaves out: workspaces of kernels and of NCCL, and fragmentation; keep a tenth of the GPU free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from titan_linear.build import DTYPES, unallocated
from titan_linear.config import Config, check_config, data_parallel_degrees
from titan_linear.distributed.experts import spread_experts
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.distributed.tensor_parallel import leave_part
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Block, Decoder
from titan_linear.models.mixers import GDN, KDA
from titan_linear.models.mixers.delta import DeltaOptions
from titan_linear.models.moe import AtHome, Experts, MoE
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.boundaries import CHUNK
from titan_linear.ops.collectives import Ranks
from titan_linear.ops.kept import contexts

GIB = 2**30
MATRICES = {KDA: 2, GDN: 1}  # of a chunk, that the kernels keep for backward
SAMPLE = 512  # tokens of which activations are counted; they grow linearly
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head")
SPARE = 0.1  # of a GPU, for workspaces of kernels and of NCCL, and fragmentation


@dataclass(frozen=True)
class Types:
    """Bytes of an element."""

    stored: int  # parameters, their gradients, each of AdamW's two moments
    compute: int
    reduce: int


def memory(config: Config, model_config: ModelConfig, gpus: int) -> dict[str, float]:
    """Bytes on the GPU that holds most, by PARTS."""
    t = config.training
    _, shards = data_parallel_degrees(config, gpus)
    shards *= config.parallelism.context_parallel_degree
    ep = config.parallelism.expert_parallel_degree
    types = Types(*(DTYPES[d].itemsize for d in (t.dtype, t.mixed_precision_param, t.mixed_precision_reduce)))
    model = unallocated(model_config, DTYPES[t.dtype])
    _leave_part(model, config)
    experts = {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    trained = [(p, _owned(p, shards // ep if p in experts else shards)) for p in _sharded(model)]
    whole = replicated_parameters(model)
    stored = sum(n for _, n in trained) * types.stored + sum(p.numel() * p.element_size() for p in whole)
    return {
        "parameters": stored,
        "gradients": stored,
        "optimizer": 2 * stored,
        "gathered": _gathered(model, types),
        "activations": _activations(config, model_config, t.local_batch_size * t.seq_len),
        "head": _head(config, model, types),
    }


def _leave_part(model: Decoder, config: Config) -> None:
    """Of each tensor what one rank of tensor and expert parallelism has; on the meta device its groups are not asked
    for. Rows for experts stay here: as many come as go, if loads are equal."""
    p = config.parallelism
    if p.expert_parallel_degree > 1:
        spread_experts(model, Ranks("", p.expert_parallel_degree, 0))
        for moe in (m for m in model.modules() if isinstance(m, MoE)):
            moe.dispatch = AtHome
    if p.tensor_parallel_degree > 1:
        leave_part(model, Ranks("", p.tensor_parallel_degree, 0))


def _sharded(model: nn.Module) -> list[nn.Parameter]:
    whole = set(replicated_parameters(model))
    return [p for p in model.parameters() if p not in whole]


def _owned(parameter: torch.Tensor, shards: int) -> int:
    """Elements of the largest shard; FSDP pads the others to it."""
    return -(-parameter.shape[0] // shards) * parameter[0].numel()


def _gathered(model: Decoder, types: Types) -> float:
    """Two units whole (the next is gathered while one computes), and one's gradients, before and in reduction."""
    sizes = sorted(sum(p.numel() for p in _sharded(unit)) for unit in (*model.layers, model.embedding))
    return sum(sizes[-2:]) * types.compute + sizes[-1] * (types.compute + types.reduce)


def _head(config: Config, model: Decoder, types: Types) -> float:
    """The loss accumulates the weight's gradient in float32, scales it, and has logits, their log and its gradient."""
    weight = model.head.weight
    logits = len(weight) * config.training.loss_chunk_size
    return weight.numel() * (types.compute + 2 * 4) + logits * (2 * 4 + types.compute)


def _activations(config: Config, model: ModelConfig, tokens: int) -> float:
    dtype, tp = DTYPES[config.training.mixed_precision_param], config.parallelism.tensor_parallel_degree
    tokens //= config.parallelism.context_parallel_degree
    layers = list(zip(model.layers, map(model.has_experts, range(model.num_layers))))
    each = {kind: _saved_per_token(config, model, layers.index(kind), dtype) for kind in set(layers)}
    mode = config.activation_checkpoint.mode
    if mode == "none":
        return tokens * sum(each[kind] for kind in layers)
    inputs = len(layers) * model.dim * dtype.itemsize / tp
    if mode == "selective":
        kept = {kind: _kept_per_token(config, model, layers.index(kind), dtype) for kind in each}
        inputs += sum(kept[kind] for kind in layers)
    return tokens * (inputs + max(each.values()))


def _saved_per_token(config: Config, model: ModelConfig, layer: int, dtype: torch.dtype) -> float:
    """Bytes that autograd keeps of a layer's forward, parameters aside."""
    block, x, plan = _layer_on_meta(config, model, layer, dtype)
    parameters = {p.untyped_storage()._cdata for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, plan)
    return sum(storage.nbytes() for storage in kept.values()) / len(plan.position_ids)


def _kept_per_token(config: Config, model: ModelConfig, layer: int, dtype: torch.dtype) -> float:
    """Bytes that selective checkpointing keeps of a layer (ops/kept.py): what the PyTorch ops keep and, of a linear
    layer, what only kernels do, at most: the convolution's output, and of each value head rows of chunk matrices."""
    block, x, plan = _layer_on_meta(config, model, layer, dtype)
    forward, _ = contexts()
    with forward:
        block(x, plan)
    kept, mixer = forward.region.nbytes / len(plan.position_ids), model.layers[layer]
    if isinstance(mixer, DeltaOptions):
        channels = 2 * mixer.heads * mixer.head_dim + mixer.v_heads * mixer.v_head_dim
        of_kernels = channels + MATRICES[type(mixer)] * CHUNK * mixer.v_heads
        kept += of_kernels * dtype.itemsize / config.parallelism.tensor_parallel_degree
    return kept


def _layer_on_meta(
    config: Config, model: ModelConfig, layer: int, dtype: torch.dtype
) -> tuple[Block, torch.Tensor, BatchPlan]:
    """A layer, about SAMPLE tokens to run it on, of which a rank has its part between layers, and their plan."""
    tp = config.parallelism.tensor_parallel_degree
    dense = () if model.has_experts(layer) else (0,)
    alone = replace(model, pattern=(model.layers[layer],), num_layers=1, dense_layers=dense)
    with torch.device("meta"):
        decoder = Decoder(alone).to(dtype)
        x = torch.empty(1, SAMPLE // tp, model.dim, dtype=dtype, requires_grad=True)
        plan = BatchPlan(torch.arange(SAMPLE // tp * tp))
    _leave_part(decoder, config)
    (block,) = decoder.layers
    if isinstance(block.mlp, MoE):
        block.mlp.experts.forward = partial(_one_expert, block.mlp.experts)
    return block, x, plan


def _one_expert(experts: Experts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`Experts.forward` with all rows for one, whatever the counts are: the meta device cannot know them."""
    gate, up = nn.functional.linear(x, experts.gate_up_proj[0].flatten(0, 1)).chunk(2, -1)
    return nn.functional.linear(nn.functional.silu(gate) * up, experts.down_proj[0])


def what_fits(config: Config, model: ModelConfig, gpus: int, room: float) -> str:
    """Settings with which a run that did not fit on GPUs of `room` bytes would, the cheapest first; or that none do."""
    room *= 1 - SPARE
    changes: dict[str, object] = {}
    for key, value in _settings(config):
        other = _with(config, changes | {key: value})
        try:
            check_config(other, gpus)
        except ValueError:
            continue  # it does not divide
        changes[key] = value
        if (needed := sum(memory(other, model, gpus).values())) <= room:
            settings = ", ".join(f"{key} = {value!r}" for key, value in changes.items())
            return f"{settings} would fit ({needed / GIB:.1f} of {room / GIB:.1f} GiB)"
    return "no activation checkpointing, batch or context parallelism would fit; take more GPUs or a smaller model"


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    """Keys and values that take less memory, each on top of those before."""
    t, p, modes = config.training, config.parallelism, ("none", "selective", "full")
    for mode in modes[modes.index(config.activation_checkpoint.mode) + 1 :]:
        yield "activation_checkpoint.mode", mode
    for size in _halves(t.local_batch_size, 1):
        yield "training.local_batch_size", size
    for size in _halves(t.loss_chunk_size, 512):
        yield "training.loss_chunk_size", size
    if p.data_parallel_replicate_degree > 1:
        yield "parallelism.data_parallel_replicate_degree", 1
    for times in (2, 4, 8, 16, 32, 64):
        yield "parallelism.context_parallel_degree", times * p.context_parallel_degree


def _halves(size: int, least: int) -> Iterator[int]:
    while (size := size // 2) >= least:
        yield size


def _with(config: Config, changes: dict[str, object]) -> Config:
    for name, value in changes.items():
        section, key = name.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config
