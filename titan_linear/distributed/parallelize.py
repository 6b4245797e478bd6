"""Conversion of a plain decoder into one that many ranks train.

In order: float8, expert and tensor parallelism, context parallelism, torch.compile,
activation checkpointing, then FSDP2.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from titan_linear.config import ActivationCheckpoint, Parallelism
from titan_linear.distributed.experts import apply_ep
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parts import Parts
from titan_linear.distributed.tensor_parallel import apply_tp
from titan_linear.models.config import MixerOptions
from titan_linear.models.decoder import Decoder
from titan_linear.models.float8 import use_float8
from titan_linear.models.lora import frozen_names
from titan_linear.models.mlps.moe import MoE
from titan_linear.ops.runtime.operators import contexts


def parallelize(
    model: Decoder, dims: ParallelDims, options: SessionOptions, device: torch.device
) -> None:
    """Wrap a decoder (on the meta device) in place, for ranks that train it on `device`.

    Gradients become sums over all ranks, never means.
    """
    model.use(options.impl, device, options.compute_dtype, dims.tp)

    if options.float8.enable:
        use_float8(model, options.float8.filter_fqns, options.float8.emulate)

    # A rank gets its share of the experts, then its part of every layer. Then cp lets other
    # ranks continue its documents.
    experts = apply_ep(model, dims.ep_ranks) if dims.ep > 1 else frozenset()
    splits = apply_tp(model, dims.tp_ranks) if dims.tp > 1 else {}
    if experts or splits:
        model.parts = Parts(
            splits, dims.parameter_mesh, experts, dims.expert_parameter_mesh if experts else None
        )
    apply_cp(model, options.parallelism)

    # Layers are compiled one by one. What a checkpointed layer keeps is looked up at run
    # time, outside graphs.
    compiled = options.compile.enable
    if compiled:
        # Imports the compiler.
        from titan_linear.distributed.compiling import apply_compile

        apply_compile(model, options.compile.backend)
    apply_ac(model, options.activation_checkpoint, compiled=compiled)

    # If ranks do not share parameters, and these are on the device, FSDP2 is left out.
    # `ComputeCopies` (optimizer.py) then provides its mixed precision.
    if dims.sharded:
        policy = MixedPrecisionPolicy(
            param_dtype=options.compute_dtype,
            reduce_dtype=options.reduce_dtype,
            cast_forward_inputs=False,
        )
        reshard = options.parallelism.fsdp_reshard_after_forward == "always"
        apply_fsdp(model, dims, policy, reshard)


def apply_cp(model: Decoder, parallelism: Parallelism) -> None:
    """Set how each mixer exchanges what crosses cp ranks.

    Linear mixers exchange states by KCP, or heads. Softmax mixers exchange keys around a
    ring or gathered, or heads. What there is to exchange follows from a batch's documents,
    and is in its plan.
    """
    for options, layer in zip(model.config.layers, model.layers, strict=True):
        for mixer, of in zip(layer.mixers, options.mixers, strict=True):
            mixer.cp_method = cp_method(of, parallelism)


def cp_method(mixer: MixerOptions, parallelism: Parallelism) -> str:
    """Return the value of the configuration key that applies to this mixer."""
    return (
        parallelism.context_parallel_linear_method
        if mixer.linear
        else parallelism.context_parallel_method
    )


def apply_ac(model: Decoder, ac: ActivationCheckpoint, *, compiled: bool) -> None:
    """Apply activation checkpointing to layers.

    A layer keeps its input, and what ops/runtime/operators.py lists for its mode; the rest
    is recomputed in backward. The state of random numbers is not kept, because no layer
    draws any. The layer's `forward` is replaced instead of wrapping the layer, so that
    parameters keep their names.
    """
    for i, layer in enumerate(model.layers):
        mode = ac.mode_of(i)
        if mode == "none":
            continue
        keeping = partial(contexts, copied=compiled, mode=mode)
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=keeping,
        )


def apply_fsdp(
    model: Decoder, dims: ParallelDims, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Apply FSDP2 layer by layer.

    Embedding and head are separate units unless they share their weight.

    FSDP2 casts parameters but not inputs, which have the right dtype already. To cast
    inputs, it would give each layer a copy of the batch's plan, without what the plan has
    derived, and with RoPE's angles in bfloat16.

    With `dims.cpu_offload`, shards lie in host memory, pinned if the device is a GPU.
    Copies that the host has queued read them there, so the host writes to them only after
    it has waited for the device (`update`).

    Args:
        reshard: free a layer's gathered parameters after its forward, and gather them again
            for its backward.
    """
    options: dict[str, Any] = {
        "mesh": dims.fsdp_mesh,
        "mp_policy": policy,
        "ignored_params": set(replicated_parameters(model)),
    }
    if dims.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=dims.mesh.device_type == "cuda")
    # Layers, with the experts as units of their own on their mesh.
    for layer in model.layers:
        if dims.ep > 1 and isinstance(layer.mlp, MoE):
            fully_shard(
                layer.mlp.experts,
                reshard_after_forward=reshard,
                **options | {"mesh": dims.expert_fsdp_mesh},
            )
        fully_shard(layer, reshard_after_forward=reshard, **options)
    # Embedding, head, and what is left.
    if not model.config.tie_embeddings:
        fully_shard(model.embedding, reshard_after_forward=reshard, **options)
        # Backward begins with the head.
        fully_shard(model.head, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    # Sum gradients instead of averaging them.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 alone asks for a reduction that gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP neither shards nor casts, in the model's order.

    These are the parameters that modules list in `kept_whole`. They stay in float32 or
    wider: they are small, and rounding them to bfloat16 would be noticeable.
    """
    own = [
        (module, name) for module in model.modules() for name in getattr(module, "kept_whole", ())
    ]
    return [p for module, name in own if (p := getattr(module, name)) is not None]


def set_dtype(model: Decoder, dtype: torch.dtype, frozen: torch.dtype | None = None) -> None:
    """Convert parameters to `dtype`.

    Parameters that adapters leave frozen are converted to `frozen`, and parameters that are
    kept whole to float32 or wider.
    """
    whole = set(replicated_parameters(model))
    names = frozen_names(model)
    for name, p in model.named_parameters():
        own = (frozen or dtype) if name in names else dtype
        p.data = p.data.to(torch.promote_types(own, torch.float32) if p in whole else own)


def materialise(model: Decoder, device: torch.device, cpu_offload: bool = False) -> None:
    """Allocate the parameters.

    Of sharded parameters, this allocates only this rank's shards, with offload in host
    memory.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    # Parameters and buffers outside FSDP are on the device even with offload.
    for p in replicated_parameters(model):
        p.data = p.data.to(device)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.loads = torch.zeros_like(layer.mlp.loads, device=device)
    if model.config.tie_embeddings:
        # to_empty gave each its own weight.
        model.head.weight = model.embedding.weight
