"""The splits of a step over GPUs: those that can run and fit, the fastest first, and the longest stream that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from titan_linear.config import Config, changed, check_config, data_parallel_degrees, fsdp_degrees
from titan_linear.models.config import ModelConfig
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import GIB, Mean, checkpointings, memory
from titan_linear.planner.timing import Step, step
from titan_linear.run.preflight import check_checkpointing, check_float8, check_splits

LOCAL = 4  # the largest local batch to try
LONGEST = 1 << 24  # tokens; longer streams are not tried


class Setting(NamedTuple):
    """What a configuration is planned for."""

    model: ModelConfig
    gpus: int
    machine: Machine
    mean: Mean
    room: float  # bytes of a GPU

    def needs(self, config: Config) -> float:
        """Bytes of the GPU that holds most."""
        return sum(memory(config, self.model, self.gpus, self.mean).values())

    def step(self, config: Config) -> Step:
        return step(config, self.model, self.gpus, self.machine, self.mean)


class Split(NamedTuple):
    """A configuration, what it takes and how fast it is."""

    config: Config
    bytes: float
    step: Step

    def rank(self) -> tuple[float, float]:
        """Sort key: the fastest first; among those equal to three digits, the one that takes least memory."""
        return float(f"{self.step.seconds:.3g}"), self.bytes


def check(config: Config, model: ModelConfig, gpus: int) -> None:
    """ValueError: the run cannot run on this number of GPUs."""
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


def fitting(config: Config, setting: Setting) -> Iterator[Split]:
    """The splits that fit, each with the cheapest activation checkpointing. Tensor parallelism keeps the run's own
    degree, and takes a higher one only if nothing fits, because every layer waits for it."""
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


def with_checkpointing(degrees: Config, setting: Setting) -> Split | None:
    """The split with the cheapest activation checkpointing with which it fits; None: it does not."""
    fitting = []
    for group in checkpointings(setting.model):
        for ac in group:
            config = degrees.model_copy(update={"activation_checkpoint": ac})
            needed = setting.needs(config)
            if needed <= setting.room:
                fitting.append(Split(config, needed, setting.step(config)))
                break
        if fitting and fitting[0].config.activation_checkpoint.mode == "none":
            break
    return min(fitting, key=Split.rank, default=None)


def candidates(config: Config, setting: Setting, tp: int) -> Iterator[Config]:
    """Every split of the same step that can run: ep within a node, parameters sharded over all ranks or a node's, and,
    if there is softmax attention, both layouts: zig-zag shares out its pairs evenly, and costs the other layers
    exchanges."""
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
    """Values of fsdp_shard_degree: over all ranks, and over those of a node, if there are several nodes."""
    return (-1, node // tp) if gpus > node and gpus % node == node % tp == 0 else (-1,)


def _divisors(n: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(n, most) + 1) if n % divisor == 0]


def refuse(config: Config, setting: Setting) -> None:
    """Raise the ValueError that nothing fits, which says how much the split that takes least would take."""
    model, gpus = setting.model, setting.gpus
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


def longest(splits: list[Split], setting: Setting) -> str:
    """The longest stream, found by doubling it until no split fits; at least the length of `splits`, which fit."""
    best, length = splits[0].config, 2 * splits[0].config.training.seq_len
    while length <= LONGEST and (longer := next(_of_length(splits, setting, length), None)):
        best, length = longer, 2 * length
    tokens, way = best.training.seq_len, checkpointing_of(best)
    return f"longest stream that fits: {tokens:,} tokens, with {degrees_of(best, setting.gpus)}, checkpointing {way}"


def _of_length(splits: list[Split], setting: Setting, length: int) -> Iterator[Config]:
    """Configurations with which a stream of this length fits, the largest cp first."""
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
