"""Splits of a step over GPUs that can run and fit, and the longest stream that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from titan_linear.config import Config, changed, check_config, data_parallel_degrees, fsdp_degrees
from titan_linear.models.config import ModelConfig
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import GIB, Mean, checkpointings, memory
from titan_linear.planner.timing import PlannedStep, step
from titan_linear.run.preflight import check_checkpointing, check_float8, check_splits

# The largest local batch to try.
LOCAL = 4
# Tokens; longer streams are not tried.
LONGEST = 1 << 24


class Setting(NamedTuple):
    """The circumstances for which configurations are planned."""

    model: ModelConfig
    gpus: int
    machine: Machine
    mean: Mean
    # Bytes of a GPU that may be used.
    room: float

    def needs(self, config: Config) -> float:
        """Return the bytes of the GPU that holds most."""
        return sum(memory(config, self.model, self.gpus, self.mean).values())

    def step(self, config: Config) -> PlannedStep:
        return step(config, self.model, self.gpus, self.machine, self.mean)


class PlannedSplit(NamedTuple):
    """A configuration, the memory it needs, and its planned step."""

    config: Config
    bytes: float
    step: PlannedStep

    def rank(self) -> tuple[float, float]:
        """Return a sort key: the fastest first.

        Among splits equal to three digits, the one that takes the least memory is first.
        """
        return float(f"{self.step.seconds:.3g}"), self.bytes


def check(config: Config, model: ModelConfig, gpus: int) -> None:
    """Check that the run can run on this number of GPUs.

    Raises:
        ValueError: it cannot.
    """
    check_config(config, gpus)
    check_splits(model, config)
    check_checkpointing(model, config)
    check_float8(model, config)


def can_run(config: Config, setting: Setting) -> bool:
    try:
        check(config, setting.model, setting.gpus)
    except ValueError:
        return False
    return True


def fitting(config: Config, setting: Setting) -> Iterator[PlannedSplit]:
    """Yield the splits that fit, each with the cheapest activation checkpointing.

    Tensor parallelism keeps the run's own degree, and takes a higher one only if nothing
    fits, because every layer waits for it.
    """
    own = config.parallelism.tensor_parallel_degree
    found = False
    for tp in (n for n in _divisors(setting.gpus, setting.machine.node_size) if n >= own):
        for degrees in candidates(config, setting, tp):
            split = with_checkpointing(degrees, setting)
            if split is not None:
                found = True
                yield split
        if found:
            return


def with_checkpointing(degrees: Config, setting: Setting) -> PlannedSplit | None:
    """Return the split with the cheapest activation checkpointing with which it fits.

    None: it does not fit.
    """
    fitting = []
    for group in checkpointings(setting.model):
        # Within a group, the first that fits recomputes least.
        for ac in group:
            config = degrees.model_copy(update={"activation_checkpoint": ac})
            needed = setting.needs(config)
            if needed <= setting.room:
                fitting.append(PlannedSplit(config, needed, setting.step(config)))
                break
        # Nothing is faster than no recomputation.
        if fitting and fitting[0].config.activation_checkpoint.mode == "none":
            break
    return min(fitting, key=PlannedSplit.rank, default=None)


def candidates(config: Config, setting: Setting, tp: int) -> Iterator[Config]:
    """Yield every split of the same step that can run.

    Experts are split within a node, and parameters are sharded over all ranks or a node's.
    If there is softmax attention, both layouts are tried: zig-zag distributes its pairs
    evenly, and costs the other layers exchanges.
    """
    model = setting.model
    gpus = setting.gpus
    node = setting.machine.node_size
    ep = _divisors(gpus, node) if model.moe else [1]
    local = _divisors(config.training.global_batch_size, LOCAL)
    for cp, experts, size in product(_divisors(gpus, gpus), ep, local):
        layouts = ("contiguous", "zigzag") if cp > 1 and model.softmax else ("contiguous",)
        for shards, layout in product(shardings(gpus, node, tp), layouts):
            split = changed(
                config,
                {
                    "parallelism.tensor_parallel_degree": tp,
                    "parallelism.context_parallel_degree": cp,
                    "parallelism.expert_parallel_degree": experts,
                    "parallelism.data_parallel_shard_degree": -1,
                    "parallelism.data_parallel_replicate_degree": 1,
                    "parallelism.fsdp_shard_degree": shards,
                    "parallelism.context_parallel_layout": layout,
                    "training.local_batch_size": size,
                },
            )
            if can_run(split, setting):
                yield split


def shardings(gpus: int, node: int, tp: int) -> tuple[int, ...]:
    """Return values of fsdp_shard_degree: all ranks, and, with several nodes, a node's
    ranks.
    """
    return (-1, node // tp) if gpus > node and gpus % node == node % tp == 0 else (-1,)


def _divisors(n: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(n, most) + 1) if n % divisor == 0]


def refuse(config: Config, setting: Setting) -> None:
    """Raise the ValueError that nothing fits, with the memory that the smallest split
    needs.
    """
    model, gpus = setting.model, setting.gpus
    # The least memory is needed with full checkpointing.
    full = [
        changed(split, {"activation_checkpoint.mode": "full"})
        for tp in _divisors(gpus, setting.machine.node_size)
        for split in candidates(config, setting, tp)
    ]
    split = min(full, key=setting.needs)
    parts = memory(split, model, gpus, setting.mean)
    part = max(parts, key=parts.get)
    raise ValueError(
        f"nothing fits: {model.num_layers} layers on {gpus} GPUs, each with {setting.room / GIB:.1f} GiB for them, "
        f"take {sum(parts.values()) / GIB:.1f} at least ({degrees_of(split, gpus)}, full checkpointing), "
        f"{parts[part] / GIB:.1f} of it {part}; take more GPUs, a shorter training.seq_len or a smaller model"
    )


def longest(splits: list[PlannedSplit], setting: Setting) -> str:
    """Describe the longest stream, found by doubling its length until no split fits.

    It is at least as long as the streams of `splits`, which fit.
    """
    best, length = splits[0].config, 2 * splits[0].config.training.seq_len
    while length <= LONGEST and (longer := next(_of_length(splits, setting, length), None)):
        best, length = longer, 2 * length
    tokens, way = best.training.seq_len, checkpointing_of(best)
    return f"longest stream that fits: {tokens:,} tokens, with {degrees_of(best, setting.gpus)}, checkpointing {way}"


def _of_length(splits: list[PlannedSplit], setting: Setting, length: int) -> Iterator[Config]:
    """Yield configurations with which a stream of this length fits, the largest cp first."""
    for split in sorted(
        splits, key=lambda split: -split.config.parallelism.context_parallel_degree
    ):
        config = changed(
            split.config,
            {
                "training.seq_len": length,
                "activation_checkpoint.mode": "full",
                "training.local_batch_size": 1,
            },
        )
        if setting.needs(config) <= setting.room:
            yield config


def checkpointing_of(config: Config) -> str:
    ac = config.activation_checkpoint
    return f"{ac.mode} ({ac.selective_ac_option})" if ac.mode == "selective" else ac.mode


def degrees_of(config: Config, gpus: int) -> str:
    p = config.parallelism
    replicas, shards = data_parallel_degrees(config, gpus)
    copies, fsdp = fsdp_degrees(config, gpus)
    degrees = {
        "dp_replicate": replicas,
        "dp_shard": shards,
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "ep": p.expert_parallel_degree,
        "fsdp": fsdp if copies > replicas else 1,
    }
    layout = f" ({p.context_parallel_layout})" if p.context_parallel_degree > 1 else ""
    shown = [
        f"{name} {degree}{layout if name == 'cp' else ''}"
        for name, degree in degrees.items()
        if degree > 1
    ]
    return ", ".join(shown) or "one GPU"
