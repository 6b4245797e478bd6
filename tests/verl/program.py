"""What ranks do in an environment with verl: `torchrun -m tests.verl.program CASE FOLDER OUT KEY…`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # which loads the engine by its entry point
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from titan_linear.verl import TitanEngine, TitanEngineConfig

SEARCH = "hydra.searchpath=[pkg://titan_linear.verl.config]"
WIDE = ["--training.dtype=float64", "--training.mixed_precision_reduce=float64"]
LOSSES = {"vanilla": "token-mean", "gspo": "seq-mean-token-mean"}


def composed(name: str, *overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, [SEARCH, *overrides])


def quoted(keys: list[str]) -> str:
    return "[" + ",".join(f"'{key}'" for key in keys) + "]"


# --- verl's SFT trainer --------------------------------------------------------------------


def sft_config(folder: Path, keys: list[str], *more: str):
    return composed(
        "sft_trainer_engine",
        "engine=titan_linear",
        "engine.dtype=float32",
        f"engine.keys={quoted(keys)}",
        f"model.path={folder}",
        "optim.lr=1e-3",
        "optim.weight_decay=0",
        f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_token_len_per_gpu=60",
        "data.num_workers=0",
        "data.ignore_input_ids_mismatch=true",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.total_training_steps=10",
        "trainer.save_freq=5",
        *more,
    )


def fitted(config) -> dict[str, object]:
    """The batches, losses and norms of all steps, and the last weights."""
    trainer = SFTTrainer(config)
    train = trainer.training_client.train_batch
    steps = []

    def recorded(data: TensorDict) -> TensorDict:
        rows = {
            name: [row.tolist() for row in data[name].unbind()]
            for name in ("input_ids", "loss_mask")
        }
        output = train(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            steps.append(rows | {name: metrics[name] for name in ("loss", "grad_norm", "lr")})
        return output

    trainer.training_client.train_batch = recorded
    trainer.fit()
    weights, _ = trainer.engine.get_per_tensor_param()
    return {"steps": steps, "weights": dict(weights)}


def sft(folder: Path, out: Path, keys: list[str]) -> dict[str, object]:
    """Ten steps, and the last five of them again from the checkpoint."""
    places = f"trainer.default_local_dir={out / 'checkpoints'}"
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    first = fitted(sft_config(folder, keys, places, contents))
    saved = out / "checkpoints" / "global_step_5"
    again = [places, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    return {"first": first, "resumed": fitted(sft_config(folder, keys, *again))}


# --- An actor's update ---------------------------------------------------------------------


def worker_of(folder: Path, keys: list[str], **model: object) -> TrainingWorker:
    engine = TitanEngineConfig(
        keys=[*WIDE, "--optimizer.eps=1e-2", *keys],
        dtype="float64",
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=2,
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(folder), **model),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, weight_decay=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    assert isinstance(worker.engine, TitanEngine)
    worker.reset()
    return worker


def part_of(worker: TrainingWorker, folder: Path) -> TensorDict:
    """This data-parallel rank's sequences, as verl's trainer sends them."""
    data = torch.load(folder / "rollout.pt")
    engine = worker.engine
    rows = len(data["responses"]) // engine.get_data_parallel_size()
    first = rows * engine.get_data_parallel_rank()
    mine = {name: x[first : first + rows] for name, x in data.items()}
    batch = left_right_2_no_padding(TensorDict(mine, batch_size=[rows]))
    tu.assign_non_tensor(batch, temperature=0.7, calculate_entropy=True, global_batch_size=4)
    return batch


def scored(worker: TrainingWorker, folder: Path) -> TensorDict | None:
    batch = part_of(worker, folder)
    tu.assign_non_tensor(batch, compute_loss=False)
    return worker.infer_batch(batch)


def updated(worker: TrainingWorker, batch: TensorDict, mode: str, **actor: object):
    """The metrics of one update by verl's loss."""
    config = ActorConfig(
        strategy="titan_linear",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=LOSSES[mode],
        policy_loss=PolicyLossConfig(loss_mode=mode),
        **actor,
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    tu.assign_non_tensor(batch, mini_batch_size=4, epochs=1, seed=1, compute_loss=True)
    output = worker.train_mini_batch(batch)
    return None if output is None else tu.get(output, "metrics")


def plain(metrics: dict | None) -> dict[str, object]:
    """Metrics without classes of verl."""
    return {
        name: [x.aggregate() if hasattr(x, "aggregate") else x for x in values]
        for name, values in (metrics or {}).items()
    }


def rows_of(output: TensorDict | None, name: str) -> list[list[float]] | None:
    return None if output is None else [row.tolist() for row in output[name].unbind()]


def ppo(folder: Path, out: Path, keys: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for mode in LOSSES:
        worker = worker_of(folder, keys)
        if mode == "vanilla":
            start, peft = worker.engine.get_per_tensor_param()
            found["start"], found["peft"] = dict(start), peft
        scores = scored(worker, folder)
        metrics = updated(worker, part_of(worker, folder), mode)
        found[mode] = {
            "metrics": plain(metrics),
            "scores": rows_of(scores, "log_probs"),
            "entropy": rows_of(scores, "entropy"),
            "weights": dict(worker.engine.get_per_tensor_param()[0]),
        }
    found["own"] = on_policy(folder, keys)
    found["adapters"] = adapted(folder, keys)
    found["refused"] = refused(folder, keys)
    return found


def on_policy(folder: Path, keys: list[str]) -> dict[str, object]:
    """The metrics of updates whose old log p are of the model itself, at its own temperature."""
    found = {}
    for mode in LOSSES:
        worker = worker_of(folder, keys)
        batch = part_of(worker, folder)
        alone = part_of(worker, folder)
        # The same micro-batches as in the update.
        tu.assign_non_tensor(alone, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        with worker.engine.eval_mode():
            logp = worker.engine.infer_batch(alone)["model_output"]["log_probs"]
        mask = batch["response_mask"]
        old = torch.zeros(mask.shape, dtype=torch.float64)
        for row, (numbers, length) in enumerate(zip(logp.unbind(), mask.sum(1).tolist())):
            old[row, :length] = numbers[-length - 1 : -1]
        batch["old_log_probs"] = old
        found[mode] = plain(updated(worker, batch, mode))
    return found


def adapted(folder: Path, keys: list[str]) -> dict[str, object]:
    """With adapters: their names and configuration, and log p of the base under `disable_adapter`."""
    base = scored(worker_of(folder, keys), folder)
    worker = worker_of(folder, keys, lora_rank=4)
    updated(worker, part_of(worker, folder), "vanilla")
    moved = scored(worker, folder)
    batch = part_of(worker, folder)
    tu.assign_non_tensor(batch, compute_loss=False, no_lora_adapter=True)
    without = worker.infer_batch(batch)
    weights, settings = worker.engine.get_per_tensor_param(base_sync_done=True)
    same = change = None
    if base is not None:
        same = bool((base["log_probs"].values() == without["log_probs"].values()).all())
        change = (base["log_probs"].values() - moved["log_probs"].values()).abs().max().item()
    names = [name for name, _ in weights]
    kinds = {name: str(settings[name]) for name in ("peft_type", "task_type", "r")}
    return {"names": names, "settings": kinds, "same": same, "change": change}


def refused(folder: Path, keys: list[str]) -> dict[str, str]:
    """Messages of what the engine refuses."""
    worker = worker_of(folder, keys)
    other = part_of(worker, folder)
    tu.assign_non_tensor(other, calculate_sum_pi_squared=True)
    mixed = part_of(worker, folder)
    mixed["temperature"] = torch.linspace(0.5, 1, len(mixed))
    cases = {
        "sum_pi_squared": lambda: updated(worker, other, "vanilla"),
        "temperature": lambda: updated(worker, mixed, "vanilla"),
        "liger": lambda: worker_of(folder, keys, use_liger=True),
        "targets": lambda: worker_of(folder, keys, lora_rank=4, target_modules=["q_proj"]),
        "key": lambda: worker_of(folder, [*keys, "--training.nothing=1"]),
        # It stops inside a pass, after which the worker is not used.
        "entropy": lambda: updated(worker, part_of(worker, folder), "vanilla", entropy_coeff=0.01),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except (ValueError, SystemExit) as error:
            found[name] = str(error)
    return found


def workers(folder: Path, out: Path, keys: list[str]) -> dict[str, object]:
    """verl's workers of PPO, from its configuration with this engine as actor and reference."""
    config = composed(
        "ppo_trainer",
        "actor@actor_rollout_ref.actor=titan_linear_actor",
        "ref@actor_rollout_ref.ref=titan_linear_ref",
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.actor.engine.keys={quoted([*WIDE, '--optimizer.eps=1e-2', *keys])}",
        "actor_rollout_ref.actor.engine.dtype=float64",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
    ).actor_rollout_ref
    reference = ActorRolloutRefWorker(config, role="ref")
    reference.init_model()
    batch = part_of(reference.ref, folder)
    tu.assign_non_tensor(batch, compute_loss=False)
    scores = reference.compute_ref_log_prob(batch)
    actor = ActorRolloutRefWorker(config, role="actor")
    actor.init_model()
    batch = part_of(actor.actor, folder)
    tu.assign_non_tensor(batch, mini_batch_size=4, epochs=1, seed=1, compute_loss=True)
    output = actor.update_actor(batch)
    return {
        "scores": rows_of(scores, "log_probs"),
        "entropy": rows_of(scores, "entropy"),
        "metrics": plain(None if output is None else tu.get(output, "metrics")),
        "weights": dict(actor.actor.engine.get_per_tensor_param()[0]),
    }


def main() -> None:
    case, folder, out, *keys = sys.argv[1:]
    assert "titan_linear" in EngineRegistry._engines["language_model"], verl.__file__
    dist.init_process_group("gloo")
    found = globals()[case](Path(folder), Path(out), keys)
    torch.save(found, Path(out) / f"{case}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
