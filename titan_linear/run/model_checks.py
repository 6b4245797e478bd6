"""What is refused of a model under a configuration: degrees that do not split it, options without a use."""

from __future__ import annotations

import math
from itertools import product

import torch

from titan_linear.config import Config, layer_checkpointing
from titan_linear.models.config import ModelConfig
from titan_linear.models.float8 import SMALLEST, use_float8
from titan_linear.ops.float8 import CAPABILITY
from titan_linear.ops.layout.build_context import shared_by_nodes
from titan_linear.ops.runtime.support import capability, dotted
from titan_linear.run.build import unallocated


def check_model(model: ModelConfig, config: Config, world_size: int, node_size: int) -> str:
    """Raise ValueError if the model does not fit its configuration, or this machine; return a warning, or ""."""
    check_splits(model, config)
    check_checkpointing(model, config)
    check_float8(model, config)
    check_float8_device(config)
    check_node_heads(model, config, world_size, node_size)
    return spans_nodes(config, node_size)


def check_splits(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if ranks cannot split the model by these degrees."""
    check_tensor_parallel(model, config)
    check_expert_parallel(model, config)
    check_heads(model, config)


def check_tensor_parallel(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if the degree does not divide the heads, the hidden channels or the vocabulary."""
    degree = config.parallelism.tensor_parallel_degree
    counts = model.split_counts
    if left := [f"{count} {what}" for what, count in counts if count % degree]:
        common = math.gcd(*(count for _, count in counts))
        fitting = " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {degree} cannot split the {', '.join(left)} in model.name = "
            f"{config.model.name!r}, model.flavor = {config.model.flavor!r}; use {fitting}"
        )


def check_expert_parallel(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if the degree does not divide the experts."""
    degree = config.parallelism.expert_parallel_degree
    flavor = config.model.flavor
    if degree == 1:
        return
    if model.moe is None:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {degree}: model.name = {config.model.name!r}, model.flavor = "
            f"{flavor!r} has no experts; leave it at 1"
        )
    if model.moe.num_experts % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {degree} cannot share out the {model.moe.num_experts} experts of "
            f"model.name = {config.model.name!r}, model.flavor = {flavor!r}; use a divisor of {model.moe.num_experts}"
        )


def check_heads(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if an all-to-all over heads cannot split them."""
    p = config.parallelism
    for mixer in model.mixers:
        key, others = ("context_parallel_method", "'ring' or 'allgather'")
        if mixer.linear:
            key, others = ("context_parallel_linear_method", "'kcp'")
        heads = mixer.indivisible_heads(p.context_parallel_degree * p.tensor_parallel_degree)
        if heads and (mixer.over_heads or getattr(p, key) == "ulysses"):
            what = f"{mixer.name} layers" if mixer.over_heads else f"parallelism.{key} = 'ulysses'"
            remedy = "use" if mixer.over_heads else f"use {others}, or"
            ranks = f"context_parallel_degree = {p.context_parallel_degree}"
            ranks += f" × tensor_parallel_degree = {p.tensor_parallel_degree}" if p.tensor_parallel_degree > 1 else ""
            raise ValueError(
                f"{what} cannot split the {heads} of model.flavor = {config.model.flavor!r} among {ranks} "
                f"ranks; {remedy} a degree that divides them"
            )


def check_node_heads(model: ModelConfig, config: Config, world_size: int, node_size: int) -> None:
    """Raise ValueError if a node's ranks cannot share the heads of softmax layers, where they are to do so."""
    p = config.parallelism
    copies = p.context_parallel_degree * p.tensor_parallel_degree
    groups = [range(first, first + copies, p.tensor_parallel_degree) for first in range(0, world_size, copies)]
    for mixer, ranks in product(model.mixers, sorted({shared_by_nodes(group, node_size) for group in groups})):
        heads = None if mixer.linear else mixer.indivisible_heads(ranks * p.tensor_parallel_degree)
        if heads and p.context_parallel_method == "ulysses+ring":
            raise ValueError(
                f"parallelism.context_parallel_method = 'ulysses+ring' cannot split the {heads} of model.flavor = "
                f"{config.model.flavor!r} among the {ranks} ranks of context_parallel_degree = "
                f"{p.context_parallel_degree} that share a node of {node_size} processes; use 'ring' or 'allgather'"
            )


def check_checkpointing(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if every n-th layer is to be computed again, and there is no n-th."""
    ac = config.activation_checkpoint
    modes = {layer_checkpointing(ac, i) for i in range(model.num_layers)}
    if ac.mode != "none" and modes == {"none"}:
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {ac.selective_ac_option!r} computes none of the model's "
            f"{model.num_layers} layers again; use at most {model.num_layers}, or mode = 'none'"
        )


def check_float8(model: ModelConfig, config: Config) -> None:
    """Raise ValueError if float8 is asked for where no product takes it, or a filter is for none."""
    float8 = config.float8
    if not float8.enable:
        return
    products = use_float8(unallocated(model, torch.float32), [])
    for part in float8.filter_fqns:
        if not any(part in name for names in products for name in names):
            raise ValueError(f"float8.filter_fqns: {part!r} is in the name of no projection in float8; remove it")
    if not use_float8(unallocated(model, torch.float32), float8.filter_fqns):
        which = "outside float8.filter_fqns" if products else f"of model.flavor = {config.model.flavor!r}"
        raise ValueError(
            f"float8.enable = true: no product {which} (dim {model.dim}) has a weight of {SMALLEST} × {SMALLEST} or "
            "more, and with smaller ones float8 does not pay; set it to false"
        )


def check_float8_device(config: Config) -> None:
    """Raise ValueError if float8 is asked for, and this machine does not compute it."""
    if not config.float8.enable or config.float8.emulate:
        return
    here = capability(torch.device("cuda")) if torch.cuda.is_available() else None
    if here is None or here < CAPABILITY:
        raise ValueError(
            f"float8.enable = true needs a GPU of compute capability {dotted(CAPABILITY)} or more, not "
            f"{'a CPU' if here is None else dotted(here)}; set it to false, or float8.emulate = true for a slow trial"
        )
    if (dtype := config.training.mixed_precision_param) != "bfloat16":
        raise ValueError(
            f"float8.enable = true is for training.mixed_precision_param = 'bfloat16', and it is {dtype!r}; change one"
        )


def spans_nodes(config: Config, node_size: int) -> str:
    """A warning if ranks that share every layer are on several nodes (of `node_size` processes); else ""."""
    degree = config.parallelism.tensor_parallel_degree
    if node_size % degree == 0:
        return ""
    return (
        f"warning: parallelism.tensor_parallel_degree = {degree} reaches across nodes of {node_size} processes: every "
        f"layer waits for the network; a degree that divides {node_size} stays inside a node"
    )
