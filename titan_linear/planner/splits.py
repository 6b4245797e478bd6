"""Splits of a step over GPUs that can run and fit, and the longest stream that fits."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from titan_linear.config import check_config
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import GIB, PlannedRank, checkpointings
from titan_linear.planner.timing import PlannedStep, step
from titan_linear.run.model_checks import check_checkpointing, check_float8, check_splits

# The largest local batch to try.
LOCAL = 4
# Tokens; longer streams are not tried.
LONGEST = 1 << 24


class GPUs(NamedTuple):
    """The GPUs that splits are planned for."""

    machine: Machine
    # Bytes of each that may be used.
    room: float


class PlannedSplit(NamedTuple):
    """A configuration on its GPUs, and the planned step."""

    rank: PlannedRank
    step: PlannedStep

    @property
    def order(self) -> tuple[float, float]:
        """A sort key: the fastest first.

        Among splits equal to three digits, the one that takes the least memory is first.
        """
        return float(f"{self.step.seconds:.3g}"), self.rank.needs


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


def fitting(rank: PlannedRank, on: GPUs) -> Iterator[PlannedSplit]:
    """Yield the splits that fit, each with the cheapest activation checkpointing.

    Tensor parallelism keeps the run's own degree, and takes a higher one only if nothing
    fits, because every layer waits for it.
    """
    found = False
    for tp in _divisors(rank.gpus, on.machine.node_size):
        if tp < rank.parallelism.tensor_parallel_degree:
            continue
        for candidate in candidates(rank, on.machine.node_size, tp):
            split = with_checkpointing(candidate, on)
            if split is not None:
                found = True
                yield split
        if found:
            return


def with_checkpointing(rank: PlannedRank, on: GPUs) -> PlannedSplit | None:
    """Return the split with the cheapest activation checkpointing with which it fits.

    None: it does not fit.
    """
    fitting = []
    for group in checkpointings(rank.model):
        # Within a group, the first that fits recomputes least.
        for ac in group:
            tried = rank.changed({f"activation_checkpoint.{key}": value for key, value in ac})
            if tried.needs <= on.room:
                fitting.append(PlannedSplit(tried, step(tried, on.machine)))
                break
        # Nothing is faster than no recomputation.
        if fitting and fitting[0].rank.config.activation_checkpoint.mode == "none":
            break
    return min(fitting, key=lambda split: split.order, default=None)


def candidates(rank: PlannedRank, node: int, tp: int) -> Iterator[PlannedRank]:
    """Yield every split of the same step that can run, on nodes of `node` GPUs.

    Experts are split within a node, and parameters are sharded over all ranks or a node's.
    If there is softmax attention, both layouts are tried: zig-zag distributes its pairs
    evenly, and costs the other layers exchanges.
    """
    model = rank.model
    gpus = rank.gpus
    ep = _divisors(gpus, node) if model.moe else [1]
    local = _divisors(rank.training.global_batch_size, LOCAL)
    for cp, experts, size in product(_divisors(gpus, gpus), ep, local):
        layouts = ("contiguous", "zigzag") if cp > 1 and model.softmax else ("contiguous",)
        for shards, layout in product(shardings(gpus, node, tp), layouts):
            split = rank.changed(
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


def refuse(rank: PlannedRank, on: GPUs) -> None:
    """Raise the ValueError that nothing fits, with the memory that the smallest split
    needs.
    """
    # The least memory is needed with full checkpointing.
    node = on.machine.node_size
    full = [
        split.changed({"activation_checkpoint.mode": "full"})
        for tp in _divisors(rank.gpus, node)
        for split in candidates(rank, node, tp)
    ]
    split = min(full, key=lambda split: split.needs)
    parts = split.memory()
    part = max(parts, key=parts.get)
    raise ValueError(
        f"nothing fits: {rank.model.num_layers} layers on {rank.gpus} GPUs, each with {on.room / GIB:.1f} "
        f"GiB for them, take {split.needs / GIB:.1f} at least ({split.degrees}, full checkpointing), "
        f"{parts[part] / GIB:.1f} of it {part}; take more GPUs, a shorter training.seq_len or a smaller model"
    )


def longest(splits: list[PlannedSplit], room: float) -> str:
    """Describe the longest stream, found by doubling its length until no split fits.

    It is at least as long as the streams of `splits`, which fit.
    """
    best = splits[0].rank
    length = 2 * best.training.seq_len
    while length <= LONGEST and (longer := next(_of_length(splits, room, length), None)):
        best = longer
        length = 2 * length
    return (
        f"longest stream that fits: {best.training.seq_len:,} tokens, with {best.degrees}, checkpointing "
        f"{best.config.activation_checkpoint.name}"
    )


def _of_length(splits: list[PlannedSplit], room: float, length: int) -> Iterator[PlannedRank]:
    """Yield splits with which a stream of this length fits, the largest cp first."""
    for split in sorted(splits, key=lambda split: -split.rank.batch.cp):
        longer = split.rank.changed(
            {
                "training.seq_len": length,
                "activation_checkpoint.mode": "full",
                "training.local_batch_size": 1,
            },
        )
        if longer.needs <= room:
            yield longer
