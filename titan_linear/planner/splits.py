"""Splits of a step over GPUs that can run and fit, and the longest stream that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from titan_linear.config import Config, check_config
from titan_linear.models.config import ModelConfig
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import GIB, Mean, PlannedRank, checkpointings
from titan_linear.planner.timing import Step, step
from titan_linear.run.model_checks import check_checkpointing, check_float8, check_splits

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

    def rank(self, config: Config) -> PlannedRank:
        return PlannedRank(config, self.model, self.gpus, self.mean)


class Split(NamedTuple):
    """A configuration on its GPUs, the memory that one needs, and the planned step."""

    rank: PlannedRank
    bytes: float
    step: Step

    @property
    def order(self) -> tuple[float, float]:
        """A sort key: the fastest first.

        Among splits equal to three digits, the one that takes the least memory is first.
        """
        return float(f"{self.step.seconds:.3g}"), self.bytes


def check(rank: PlannedRank) -> None:
    """Check that the run can run on this number of GPUs.

    Raises:
        ValueError: it cannot.
    """
    keys = rank.config
    check_config(keys, rank.gpus)
    check_splits(rank.model, keys.model, rank.parallelism)
    check_checkpointing(rank.model, keys.activation_checkpoint)
    check_float8(rank.model, keys.model, keys.float8)


def fitting(rank: PlannedRank, setting: Setting) -> Iterator[Split]:
    """Yield the splits that fit, each with the cheapest activation checkpointing.

    Tensor parallelism keeps the run's own degree, and takes a higher one only if nothing
    fits, because every layer waits for it.
    """
    found = False
    for tp in _divisors(setting.gpus, setting.machine.node_size):
        if tp < rank.parallelism.tensor_parallel_degree:
            continue
        for candidate in candidates(rank, setting, tp):
            split = with_checkpointing(candidate, setting)
            if split is not None:
                found = True
                yield split
        if found:
            return


def with_checkpointing(rank: PlannedRank, setting: Setting) -> Split | None:
    """Return the split with the cheapest activation checkpointing with which it fits.

    None: it does not fit.
    """
    fitting = []
    for group in checkpointings(setting.model):
        # Within a group, the first that fits recomputes least.
        for ac in group:
            tried = setting.rank(rank.config.model_copy(update={"activation_checkpoint": ac}))
            if tried.needs <= setting.room:
                fitting.append(Split(tried, tried.needs, step(tried, setting.machine)))
                break
        # Nothing is faster than no recomputation.
        if fitting and fitting[0].rank.config.activation_checkpoint.mode == "none":
            break
    return min(fitting, key=lambda split: split.order, default=None)


def candidates(rank: PlannedRank, setting: Setting, tp: int) -> Iterator[PlannedRank]:
    """Yield every split of the same step that can run.

    Experts are split within a node, and parameters are sharded over all ranks or a node's.
    If there is softmax attention, both layouts are tried: zig-zag distributes its pairs
    evenly, and costs the other layers exchanges.
    """
    model = setting.model
    gpus = setting.gpus
    node = setting.machine.node_size
    ep = _divisors(gpus, node) if model.moe else [1]
    local = _divisors(rank.training.global_batch_size, LOCAL)
    for cp, experts, size in product(_divisors(gpus, gpus), ep, local):
        layouts = ("contiguous", "zigzag") if cp > 1 and model.softmax else ("contiguous",)
        for shards, layout in product(shardings(gpus, node, tp), layouts):
            config = rank.config.changed(
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
            split = setting.rank(config)
            try:
                check(split)
            except ValueError:
                # These degrees cannot run.
                continue
            yield split


def shardings(gpus: int, node: int, tp: int) -> tuple[int, ...]:
    """Return values of fsdp_shard_degree: all ranks, and, with several nodes, a node's
    ranks.
    """
    return (-1, node // tp) if gpus > node and gpus % node == node % tp == 0 else (-1,)


def _divisors(n: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(n, most) + 1) if n % divisor == 0]


def refuse(rank: PlannedRank, setting: Setting) -> None:
    """Raise the ValueError that nothing fits, with the memory that the smallest split
    needs.
    """
    # The least memory is needed with full checkpointing.
    full = [
        setting.rank(split.config.changed({"activation_checkpoint.mode": "full"}))
        for tp in _divisors(setting.gpus, setting.machine.node_size)
        for split in candidates(rank, setting, tp)
    ]
    split = min(full, key=lambda split: split.needs)
    parts = split.memory()
    part = max(parts, key=parts.get)
    raise ValueError(
        f"nothing fits: {setting.model.num_layers} layers on {setting.gpus} GPUs, each with {setting.room / GIB:.1f} "
        f"GiB for them, take {split.needs / GIB:.1f} at least ({split.degrees}, full checkpointing), "
        f"{parts[part] / GIB:.1f} of it {part}; take more GPUs, a shorter training.seq_len or a smaller model"
    )


def longest(splits: list[Split], setting: Setting) -> str:
    """Describe the longest stream, found by doubling its length until no split fits.

    It is at least as long as the streams of `splits`, which fit.
    """
    best = splits[0].rank
    length = 2 * best.training.seq_len
    while length <= LONGEST and (longer := next(_of_length(splits, setting, length), None)):
        best, length = longer, 2 * length
    return (
        f"longest stream that fits: {best.training.seq_len:,} tokens, with {best.degrees}, checkpointing "
        f"{best.config.activation_checkpoint.name}"
    )


def _of_length(splits: list[Split], setting: Setting, length: int) -> Iterator[PlannedRank]:
    """Yield splits with which a stream of this length fits, the largest cp first."""
    for split in sorted(splits, key=lambda split: -split.rank.batch.cp):
        config = split.rank.config.changed(
            {
                "training.seq_len": length,
                "activation_checkpoint.mode": "full",
                "training.local_batch_size": 1,
            },
        )
        longer = setting.rank(config)
        if longer.needs <= setting.room:
            yield longer
