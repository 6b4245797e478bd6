"""Memory per GPU of a run, without a GPU: the model is built on the meta device, where nothing is allocated.

python -m tools.dry_run --gpus 8 64 -- --model.name kda --model.flavor 1.3B --training.seq_len 32768
python -m tools.dry_run --gpus 8 64 -- --model.flavor hf --model.hf_assets_path Qwen3-Next-80B-A3B \
    --training.seq_len 131072 --parallelism.context_parallel_degree 8 --activation_checkpoint.mode full

python -m tools.dry_run --gpus 8 -- --job.config_file train_configs/hybrid_1_3b_128k.toml

What follows `--` is the run, as for run_train.sh. Its types are those that it has on GPUs; neither its corpus nor its
tokenizer has to be there (without the latter a preset has its own vocabulary). The report is of the GPU that holds
most, in GiB:

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

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from titan_linear.build import DTYPES, model_config, model_without_tokenizer, tokenizer_path, unallocated
from titan_linear.config import Config, data_parallel_degrees, load_config
from titan_linear.data import build_tokenizer
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
from titan_linear.preflight import check_expert_parallel, check_tensor_parallel

GIB = 2**30
MATRICES = {KDA: 2, GDN: 1}  # of a chunk, that the kernels keep for backward
SAMPLE = 512  # tokens of which activations are counted; they grow linearly
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head")


@dataclass(frozen=True)
class Types:
    """Bytes of an element."""

    stored: int  # parameters, their gradients, each of AdamW's two moments
    compute: int
    reduce: int


def main(argv: list[str]) -> int:
    own, run = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="python -m tools.dry_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[8], help="numbers of GPUs (default: 8)")
    args = parser.parse_args(own)
    try:
        config = load_config(run, cuda=True)
        model = planned_model(config)
        if min(args.gpus) < 1:
            raise ValueError(f"--gpus {min(args.gpus)} must be 1 or more")
        check_tensor_parallel(model, config)
        check_expert_parallel(model, config)
        reports = {gpus: memory(config, model, gpus) for gpus in args.gpus}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(config, model), "", table(reports), sep="\n")
    return 0


def planned_model(config: Config) -> ModelConfig:
    """The run's model; without its tokenizer's file, as if every vocabulary were large enough."""
    path = tokenizer_path(config)
    if path and not Path(path).expanduser().exists():
        model = model_without_tokenizer(config)
        print(f"model.tokenizer_path = {path!r} is not here: a vocabulary of {model.vocab_size} is assumed")
        return model
    return model_config(config, build_tokenizer(path))


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
    with torch.device("meta"):
        decoder = Decoder(model).to(dtype)
        x = torch.empty(1, SAMPLE // tp, model.dim, dtype=dtype, requires_grad=True)
        plan = BatchPlan(torch.arange(SAMPLE // tp * tp))
    _leave_part(decoder, config)
    block = decoder.layers[layer]
    if isinstance(block.mlp, MoE):
        block.mlp.experts.forward = partial(_one_expert, block.mlp.experts)
    return block, x, plan


def _one_expert(experts: Experts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`Experts.forward` with all rows for one, whatever the counts are: the meta device cannot know them."""
    gate, up = nn.functional.linear(x, experts.gate_up_proj[0].flatten(0, 1)).chunk(2, -1)
    return nn.functional.linear(nn.functional.silu(gate) * up, experts.down_proj[0])


def describe(config: Config, model: ModelConfig) -> str:
    built = unallocated(model, torch.float32)
    total = sum(p.numel() for p in built.parameters())
    t, p = config.training, config.parallelism
    sharers = p.context_parallel_degree * p.tensor_parallel_degree
    return (
        f"{config.model.name}/{config.model.flavor}: {total:,} parameters, {model.num_layers} layers\n"
        f"{t.local_batch_size} x {t.seq_len} tokens in a micro-step on {sharers} GPU{'s' if sharers > 1 else ''}; "
        f"parameters {t.dtype}, compute {t.mixed_precision_param}, reductions {t.mixed_precision_reduce}; activation "
        f"checkpointing {config.activation_checkpoint.mode}"
    )


def table(reports: dict[int, dict[str, float]]) -> str:
    """A row for each number of GPUs, GiB."""
    lines = ["| GPUs | " + " | ".join((*PARTS, "sum")) + " |", "|---" * (len(PARTS) + 2) + "|"]
    for gpus, parts in reports.items():
        cells = [f"{value / GIB:.2f}" for value in (*(parts[name] for name in PARTS), sum(parts.values()))]
        lines.append(f"| {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
