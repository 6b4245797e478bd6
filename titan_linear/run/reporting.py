"""What a start of a run writes and prints: what the run is made of, and then the files of its steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.decoder import Decoder
from titan_linear.models.float8 import float8_line
from titan_linear.observe.flops import no_peak, peak_tflops
from titan_linear.observe.profiling import MemorySnapshots, Profiler
from titan_linear.observe.report import Report
from titan_linear.observe.telemetry import Telemetry
from titan_linear.ops.registry import start_lines
from titan_linear.run.compilation import Compilation
from titan_linear.run.console import first_weights, model_name, unbalanced, uncompiled, unwarmed
from titan_linear.step.feed import BatchSharding, Feed
from titan_linear.step.hooks import Hook
from titan_linear.storage.run_manifest import write_manifest
from titan_linear.storage.rundir import set_run_aside, starts_anew, write_config
from titan_linear.storage.tensors import named_parameters


def reporting_hooks(
    config: Config,
    model: Decoder,
    dims: ParallelDims,
    device: torch.device,
    step: int,
    *,
    feed: Feed,
    telemetry: Telemetry,
    compilation: Compilation,
) -> list[Hook]:
    """The hooks that write lines, traces and snapshots of memory.

    step: steps of the run before this start.
    """
    first = dist.get_rank() == 0
    hooks = [MemorySnapshots(config)]
    if first:
        write_down(config, model, dims, feed.cut, device, step)
    if config.profiling.enable_profiling:
        hooks.append(Profiler(config, step, feed.settle))
    if first:
        hooks.append(Report(config, model.config, dims, device, step, telemetry, compilation.numbers))
    return hooks


def write_down(
    config: Config, model: Decoder, dims: ParallelDims, sharding: BatchSharding, device: torch.device, step: int
) -> None:
    """Write and print what the run is made of. On rank 0.

    step: steps of the run before this start.
    """
    if starts_anew(config):
        set_run_aside(config)
    write_config(config)
    write_manifest(
        config,
        world_size=dist.get_world_size(),
        degrees=dims.degrees,
        implementations={op: choice.implementation for op, choice in model.implementations.items()},
    )
    parameters = sum(p.numel() for p in named_parameters(model).values())
    lines = [
        f"model {model_name(config)}: {parameters:,} parameters, {model.config.composition}",
        *start_lines(model.implementations),
        float8_line(model),
        uncompiled(config, device),
        unbalanced(model.config),
        unwarmed(config),
        f"mesh {dims.description}",
        sharding.uneven(config.training.local_batch_size * config.training.seq_len),
        f"resuming from step {step}" if step else first_weights(config),
        no_peak(config, device) if peak_tflops(config, device) is None else "",
    ]
    print("\n".join(filter(None, lines)))
