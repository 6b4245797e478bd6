"""What a configuration's splits, precision and devices require of the model.

`model` is the model; `keys` are the keys that name it, for messages.
"""

import math
from itertools import product

import torch

from titan_linear.config import ActivationCheckpoint, Config, Float8, Model, Parallelism
from titan_linear.models.config import ModelConfig
from titan_linear.models.float8 import SMALLEST, use_float8
from titan_linear.models.lora import check_adapters
from titan_linear.ops.float8 import CAPABILITY
from titan_linear.ops.layout.build_context import shared_by_nodes
from titan_linear.ops.runtime.support import capability, dotted
from titan_linear.run.build import implementations, unallocated


def check_model(model: ModelConfig, config: Config, world_size: int, node_size: int) -> str:
    """Raise ValueError if the model does not fit its configuration or this machine.

    Returns a warning, or "".
    """
    parallelism = config.parallelism
    check_splits(model, config.model, parallelism)
    check_checkpointing(model, config.activation_checkpoint)
    chosen = implementations(
        config, model, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if any(choice.implementation == "grouped_mm" for choice in chosen.values()):
        check_adapters(unallocated(model.base), model.adapter, 8)
    check_float8(model, config.model, config.float8)
    check_float8_device(config.float8, config.training.mixed_precision_param)
    check_node_heads(model, config.model, parallelism, world_size, node_size)
    return spans_nodes(parallelism.tensor_parallel_degree, node_size)


def check_splits(model: ModelConfig, keys: Model, p: Parallelism) -> None:
    """Raise ValueError if ranks cannot split the model by these degrees."""
    check_tensor_parallel(model, keys, p.tensor_parallel_degree)
    check_expert_parallel(model, keys, p.expert_parallel_degree)
    check_heads(model, keys, p)


def check_tensor_parallel(model: ModelConfig, keys: Model, degree: int) -> None:
    """Raise ValueError if the degree does not divide heads, hidden channels or vocabulary."""
    counts = model.split_counts
    if left := [f"{count} {what}" for what, count in counts if count % degree]:
        common = math.gcd(*(count for _, count in counts))
        fitting = " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {degree} cannot split the {', '.join(left)} in {keys.preset}; "
            f"use {fitting}"
        )


def check_expert_parallel(model: ModelConfig, keys: Model, degree: int) -> None:
    """Raise ValueError if the degree does not divide the experts."""
    if degree == 1:
        return
    if model.moe is None:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {degree}: {keys.preset} has no experts; leave it at 1"
        )
    if model.moe.num_experts % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {degree} cannot share out the {model.moe.num_experts} experts of "
            f"{keys.preset}; use a divisor of {model.moe.num_experts}"
        )


def check_heads(model: ModelConfig, keys: Model, p: Parallelism) -> None:
    """Raise ValueError if an all-to-all over heads cannot split the heads."""
    for mixer in model.mixers:
        key = "context_parallel_method"
        others = "'ring' or 'allgather'"
        if mixer.linear:
            key = "context_parallel_linear_method"
            others = "'kcp'"
        # Some mixers always split their heads; others only with method "ulysses".
        heads = mixer.indivisible_heads(p.copies)
        if heads and (mixer.over_heads or getattr(p, key) == "ulysses"):
            what = f"{mixer.name} layers" if mixer.over_heads else f"parallelism.{key} = 'ulysses'"
            remedy = "use" if mixer.over_heads else f"use {others}, or"
            ranks = f"context_parallel_degree = {p.context_parallel_degree}"
            if p.tensor_parallel_degree > 1:
                ranks += f" × tensor_parallel_degree = {p.tensor_parallel_degree}"
            raise ValueError(
                f"{what} cannot split the {heads} of model.flavor = {keys.flavor!r} among {ranks} "
                f"ranks; {remedy} a degree that divides them"
            )


def check_node_heads(
    model: ModelConfig, keys: Model, p: Parallelism, world_size: int, node_size: int
) -> None:
    """Raise ValueError if the ranks of a node cannot share softmax heads, but must."""
    # Ranks of each context-parallel group.
    groups = [
        range(first, first + p.copies, p.tensor_parallel_degree)
        for first in range(0, world_size, p.copies)
    ]
    for mixer, ranks in product(
        model.mixers, sorted({shared_by_nodes(group, node_size) for group in groups})
    ):
        heads = None if mixer.linear else mixer.indivisible_heads(ranks * p.tensor_parallel_degree)
        if heads and p.context_parallel_method == "ulysses+ring":
            raise ValueError(
                f"parallelism.context_parallel_method = 'ulysses+ring' cannot split the {heads} of model.flavor = "
                f"{keys.flavor!r} among the {ranks} ranks of context_parallel_degree = "
                f"{p.context_parallel_degree} that share a node of {node_size} processes; use 'ring' or 'allgather'"
            )


def check_checkpointing(model: ModelConfig, ac: ActivationCheckpoint) -> None:
    """Raise ValueError if every n-th layer is recomputed, but there are fewer than n."""
    modes = {ac.mode_of(i) for i in range(len(model.layers))}
    if ac.mode != "none" and modes == {"none"}:
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {ac.selective_ac_option!r} computes none of the model's "
            f"{len(model.layers)} layers again; use at most {len(model.layers)}, or mode = 'none'"
        )


def check_float8(model: ModelConfig, keys: Model, float8: Float8) -> None:
    """Raise ValueError if float8 applies to no product, or a filter matches none."""
    if not float8.enable:
        return
    products = use_float8(unallocated(model), [])
    # Every filter must match a product.
    for part in float8.filter_fqns:
        if not any(part in name for names in products for name in names):
            raise ValueError(
                f"float8.filter_fqns: {part!r} is in the name of no projection in float8; remove it"
            )
    # Some product must remain.
    if not use_float8(unallocated(model), float8.filter_fqns):
        which = "outside float8.filter_fqns" if products else f"of model.flavor = {keys.flavor!r}"
        raise ValueError(
            f"float8.enable = true: no product {which} (dim {model.dim}) has a weight of {SMALLEST} × {SMALLEST} or "
            "more, and with smaller ones float8 does not pay; set it to false"
        )


def check_float8_device(float8: Float8, dtype: str) -> None:
    """Raise ValueError if float8 is enabled, but this machine does not compute it.

    dtype: training.mixed_precision_param.
    """
    if not float8.enable or float8.emulate:
        return
    here = capability(torch.device("cuda")) if torch.cuda.is_available() else None
    if here is None or here < CAPABILITY:
        raise ValueError(
            f"float8.enable = true needs a GPU of compute capability {dotted(CAPABILITY)} or more, not "
            f"{'a CPU' if here is None else dotted(here)}; set it to false, or float8.emulate = true for a slow trial"
        )
    if dtype != "bfloat16":
        raise ValueError(
            f"float8.enable = true is for training.mixed_precision_param = 'bfloat16', and it is {dtype!r}; change one"
        )


def spans_nodes(degree: int, node_size: int) -> str:
    """Return a warning if tensor-parallel ranks span several nodes, else "".

    Args:
        degree: parallelism.tensor_parallel_degree.
        node_size: number of processes of a node.
    """
    if node_size % degree == 0:
        return ""
    return (
        f"warning: parallelism.tensor_parallel_degree = {degree} reaches across nodes of {node_size} processes: every "
        f"layer waits for the network; a degree that divides {node_size} stays inside a node"
    )
