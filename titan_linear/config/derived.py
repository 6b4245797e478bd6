"""Values that follow from a configuration's keys: degrees, lengths, schedules, folders."""

from __future__ import annotations

from collections.abc import Mapping

from titan_linear.config.schema import ActivationCheckpoint, Config, Source, Training

# --- Meaning ---------------------------------------------------------------------------------------------------------


def changed(config: Config, changes: Mapping[str, object]) -> Config:
    """Return a copy with other values of some keys, by "section.key"."""
    for name, value in changes.items():
        section, key = name.split(".")
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={key: value})}
        )
    return config


def on_cuda() -> bool:
    # torch is slow to import; --help and errors in keys do without.
    import torch

    return torch.cuda.is_available()


def data_parallel_degrees(config: Config, world_size: int) -> tuple[int, int]:
    """Return (replicate, shard), with -1 replaced by the number of remaining ranks.

    Raises:
        ValueError: the degrees do not multiply to `world_size`.
    """
    p = config.parallelism
    replicate = p.data_parallel_replicate_degree
    shard = p.data_parallel_shard_degree
    copies = p.context_parallel_degree * p.tensor_parallel_degree
    if shard == 0:
        raise ValueError(
            "parallelism.data_parallel_shard_degree = 0 must be 1 or more, or -1 for what the other degrees leave"
        )
    if shard == -1:
        shard = world_size // (replicate * copies)
    # All degrees together must use every process.
    if shard < 1 or replicate * shard * copies != world_size:
        fixed = replicate * copies * max(p.data_parallel_shard_degree, 1)
        right = f"a multiple of {fixed}" if p.data_parallel_shard_degree == -1 else str(fixed)
        raise ValueError(
            f"parallelism: data_parallel_replicate_degree = {replicate}, data_parallel_shard_degree = "
            f"{p.data_parallel_shard_degree}, tensor_parallel_degree = {p.tensor_parallel_degree}, "
            f"context_parallel_degree = {p.context_parallel_degree} need {right} processes, and there are "
            f"{world_size}; change a degree, or the number of processes (NGPU; titan-linear plan: --gpus)"
        )
    return replicate, shard


def fsdp_degrees(config: Config, world_size: int) -> tuple[int, int]:
    """Return (replicas, shards) of FSDP.

    Each shard of the parameters has `replicas` copies; parameters are sharded over `shards`
    ranks.

    Raises:
        ValueError: the degrees do not fit each other.
    """
    p = config.parallelism
    replicate, shard = data_parallel_degrees(config, world_size)
    sharers = shard * p.context_parallel_degree
    shards = sharers if p.fsdp_shard_degree == -1 else p.fsdp_shard_degree
    if shards < 1 or sharers % shards:
        raise ValueError(
            f"parallelism.fsdp_shard_degree = {shards} does not divide the {sharers} ranks that share parameters "
            f"(data_parallel_shard_degree × context_parallel_degree); use a divisor of {sharers}, or -1 for all of them"
        )
    return replicate * sharers // shards, shards


def micro_steps(config: Config, world_size: int) -> int:
    """Return the number of micro-batches per rank in a step."""
    replicas, shards = data_parallel_degrees(config, world_size)
    return config.training.global_batch_size // (
        replicas * shards * config.training.local_batch_size
    )


def layer_checkpointing(ac: ActivationCheckpoint, layer: int) -> str:
    """Return the activation checkpointing mode of a layer, counted from 0.

    It is "none", "selective", "attention" or "full".
    """
    if ac.mode != "selective" or ac.selective_ac_option == "op":
        return ac.mode
    return "none" if (layer + 1) % int(ac.selective_ac_option) else "full"


def seq_len_at(t: Training, step: int) -> int:
    """Return the number of tokens in each stream of this step; steps count from 1."""
    return next((part.seq_len for part in t.seq_len_schedule if step <= part.until_step), t.seq_len)


def replicas_wait(t: Training) -> bool:
    """Whether replicas sum gradients only in a step's last micro-step.

    Replicas are the copies of FSDP's shards. Until then, FSDP2 holds a rank's sum on the
    device, in the type of reductions. With CPU offload, or if gradients are kept in another
    type, they are summed over replicas in every micro-step. A narrower type would not be
    the type in which micro-steps are added up; a wider one takes no memory.
    """
    return not t.enable_cpu_offload and t.mixed_precision_reduce == t.dtype


def schedule_steps(config: Config) -> int:
    """Return the step at which the learning rate's decay ends."""
    return config.lr_scheduler.total_steps or config.training.steps


def tokens_at(t: Training, step: int) -> int:
    """Return the number of tokens in the first `step` steps."""
    done = streams_of_one = 0
    for part in t.seq_len_schedule:
        steps = max(0, min(part.until_step, step) - done)
        done += steps
        streams_of_one += steps * part.seq_len
    return (streams_of_one + (step - done) * t.seq_len) * t.global_batch_size


def sources(config: Config) -> list[Training] | list[Source]:
    """Return the sources to train on: a mixture's, or the one that [training] names."""
    return config.training.mixture or [config.training]


def key_of(source: Training | Source, key: str) -> str:
    """Return the name of a source's key in messages."""
    if isinstance(source, Source):
        return f"training.mixture, source {source.name!r}: {key}"
    return f"training.{key}"


def hf_assets(config: Config) -> str:
    """Return the Hugging Face folder that defines the model and its tokenizer; "" if none."""
    return config.model.hf_assets_path or (
        config.checkpoint.initial_load_path if starts_in_hf(config) else ""
    )


def hf_weights(config: Config) -> str:
    """Return the Hugging Face folder whose weights start the run; "" if none."""
    return (
        (config.checkpoint.initial_load_path or config.model.hf_assets_path)
        if starts_in_hf(config)
        else ""
    )


def starts_in_hf(config: Config) -> bool:
    return config.checkpoint.enable and config.checkpoint.initial_load_in_hf
