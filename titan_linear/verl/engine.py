"""An engine for verl 0.9: its workers and trainers drive a `Session`.

A micro-batch of verl is one packed stream, which cp ranks share. The session computes log p
of each token; verl's loss function is differentiated by it, on every rank, and its
derivatives are the slopes of a second pass over the head (`FunctionLoss`). So every loss of
log p is exact under every split.

verl's losses are means over data-parallel ranks, times their number; a session adds up.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftType, TaskType
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LRScheduler
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config import EngineConfig, FSDPOptimizerConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from titan_linear.distributed.process import own_device
from titan_linear.losses.function import FunctionLoss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.lora import without_adapters
from titan_linear.run.build import build_dims
from titan_linear.run.export import export
from titan_linear.run.origin import Origin
from titan_linear.run.reading import ALL_RANKS_SHARD
from titan_linear.run.session import session_of
from titan_linear.step.feed import StepTokens
from titan_linear.storage.hf_writing import gather
from titan_linear.storage.peft import peft_config

# In a checkpoint's folder: the state of the learning rate's schedule.
SCHEDULE = "schedule.json"
# Keys of verl's batches that ask for what the engine does not compute, and the remedy.
REFUSED = {
    "calculate_sum_pi_squared": "set actor.calculate_sum_pi_squared to false",
    "distillation_use_topk": "distill with a loss that reads the teacher's log p of the sampled tokens",
    "enable_routing_replay": "set router_replay.mode to 'disabled'",
}
# Fields of verl's model configuration that do nothing here, their defaults, and the remedy.
UNUSED = {
    "use_liger": (False, "use the kernels of --model.impl in engine.keys"),
    "lora_adapter_path": (
        None,
        "merge these adapters into model.path (titan-linear convert merge)",
    ),
    "target_modules": ("all-linear", "set --adapter.targets in engine.keys"),
    "exclude_modules": (None, "set --adapter.targets in engine.keys"),
    "target_parameters": (None, "set --adapter.targets in engine.keys"),
}


@dataclass
class TitanEngineConfig(EngineConfig):
    """verl's `engine` section for this engine.

    Args:
        keys: keys of the configuration (docs/keys.md) as on the command line, such as
            "--parallelism.context_parallel_degree=2". They come last.
    """

    strategy: str = "titan_linear"
    keys: list[str] = field(default_factory=list)


class Mode(BaseEngineCtx):
    """The context of training or evaluation. Nothing in a model depends on it."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@EngineRegistry.register("language_model", "titan_linear", device=["cpu", "cuda"])
class TitanEngine(BaseEngine):
    """The model of a Hugging Face folder, trained by verl.

    Args:
        model_config: verl's `HFModelConfig`.
        optimizer_config: verl's `FSDPOptimizerConfig`, or None for inference.

    Raises:
        ValueError: an option is not supported, or a key is wrong.
    """

    def __init__(
        self,
        model_config: Any,
        engine_config: TitanEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ):
        self.mode = None
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = None if engine_config.forward_only else optimizer_config
        self.folders = BaseCheckpointManager(None, None, checkpoint_config=checkpoint_config)
        keys = [
            *ALL_RANKS_SHARD,
            *model_keys(model_config, engine_config),
            *optimizer_keys(self.optimizer_config),
            *engine_config.keys,
        ]
        self.origin = Origin.reading(Path(model_config.local_path), keys)
        self.config = self.origin.config
        if self.config.model.mtp_layers:
            raise ValueError(
                "model.mtp_layers: verl's losses are about the next token alone; leave it out of engine.keys"
            )
        self.dims = build_dims(self.config, own_device())
        # Ranks with the same part of different batches, in the order of these batches.
        ranks = torch.arange(dist.get_world_size()).view(self.dims.dp, self.dims.copies)
        self.group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())

    def initialize(self) -> None:
        """Build the session with the folder's weights, and the learning rate's schedule."""
        optimizer = self.config.optimizer if self.optimizer_config else None
        self.session = session_of(
            self.config, self.origin.model, dims=self.dims, optimizer=optimizer
        )
        self.origin.load(self.session.model, self.session.host)
        self.family = self.origin.family()
        self.schedule = build_schedule(self.optimizer_config) if optimizer else None
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, False)

    # --- Ranks and places -----------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def get_data_parallel_rank(self) -> int:
        return self.dims.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.dims.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this is the first of the ranks that share a batch."""
        return dist.get_rank() % self.dims.copies == 0

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move weights and optimizer states. Between steps there are no gradients."""
        place = torch.device("cpu") if device == "cpu" else self.session.device
        self.session.to(place, model=model, optimizer=optimizer)

    def train_mode(self, **options: Any) -> Mode:
        return Mode(self, "train", **options)

    def eval_mode(self, **options: Any) -> Mode:
        return Mode(self, "eval", **options)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the model computes what its base does."""
        return without_adapters(self.session.model)

    # --- Batches --------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Compute a mini-batch: log p, or the loss and its gradients.

        Args:
            data: sequences as nested tensors (verl's NO_PADDING), with "temperature".
            loss_function: None with `forward_only`: no loss.

        Returns:
            verl's `model_output`, `loss` and `metrics`.

        Raises:
            ValueError: the batch has images or several temperatures, or asks for what the
                engine does not compute.
        """
        temperature = temperature_of(data)
        # verl's losses divide by the number of labels on all ranks.
        count = data["loss_mask"].sum().to(self.session.device)
        dist.all_reduce(count, group=self.group)
        tu.assign_non_tensor(
            data, sp_size=self.dims.cp, batch_num_tokens=count.item(), dp_size=self.dims.dp
        )
        parts, order = prepare_micro_batches(data, dp_group=self.group, same_micro_num_in_dp=True)
        batches = [self.cut(part["input_ids"]) for part in parts]
        tokens = self.session.count(batches)
        outputs = []
        for part, batch in zip(parts, batches, strict=True):
            micro = Micro(self, part.to(self.session.device), batch, loss_function, temperature)
            outputs.append(micro.infer() if forward_only else micro.train(tokens))
        return postprocess_batch_func(outputs, order, data)

    def cut(self, ids: Any) -> LocalBatch:
        """Cut sequences, nested [n, length], into this rank's part of one stream.

        The stream is padded, by a last document, to a length that ranks can share.
        """
        tokens = ids.values().cpu()
        bounds = ids.offsets().cpu()
        zigzag = self.config.parallelism.context_parallel_layout == "zigzag"
        share = self.dims.copies * (2 if zigzag else 1)
        padding = -len(tokens) % share
        if padding:
            tokens = pad(tokens, (0, padding))
            bounds = torch.cat([bounds, torch.tensor([len(tokens)])])
        return self.session.cut(tokens, bounds)

    # --- Steps ----------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        self.session.zero_grad()

    def optimizer_step(self) -> float:
        """Update the weights, and return the norm of the gradients before clipping."""
        return self.session.step(self.schedule.get_last_lr()[0]).grad_norm

    def lr_scheduler_step(self) -> float:
        self.schedule.step()
        return float(self.schedule.get_last_lr()[0])

    # --- Weights --------------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = True, **_: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return whole tensors by Hugging Face name, one at a time, on every rank.

        With adapters, return these alone, by PEFT's names, with their configuration.

        Raises:
            ValueError: adapters are to be sent with their base.
        """
        # verl moves them to the host again.
        if self.is_param_offload_enabled:
            self.to(self.session.device.type, model=True, optimizer=False)
        weights = iter(self.session.weights(self.family))
        if self.origin.exports_whole:
            return weights, None
        if not base_sync_done:
            raise ValueError(
                "rollout.load_format = 'dummy' waits for the base's weights, and adapters are sent alone; set it to "
                "'safetensors'"
            )
        model = self.session.model.config
        settings = peft_config(model, self.family, self.config.adapter, self.model_config.path)
        kinds = {"peft_type": PeftType.LORA, "task_type": TaskType.CAUSAL_LM}
        return weights, settings | kinds

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save weights, optimizer and schedule.

        Any number of ranks under any split can load them. With "hf_model" in
        checkpoint.save_contents, also write a Hugging Face folder.
        """
        folder = Path(local_path)
        self.session.save(folder)
        if self.folders.should_save_hf_model:
            get = gather(self.session.model)
            base = self.origin.base_fingerprint
            export(folder / "huggingface", self.origin, get, dtype="source", base=base)
        if dist.get_rank() == 0:
            (folder / SCHEDULE).write_text(json.dumps(self.schedule.state_dict()))
            self.folders.register_checkpoint(local_path, max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, **_: Any) -> None:
        """Load what `save_checkpoint` has saved.

        Raises:
            ValueError: the folder has no checkpoint of this model.
        """
        self.session.load(local_path)
        self.schedule.load_state_dict(json.loads((Path(local_path) / SCHEDULE).read_text()))


@dataclass(frozen=True)
class Micro:
    """A micro-batch: verl's, on the device, and this rank's part of it."""

    engine: TitanEngine
    data: TensorDict
    batch: LocalBatch
    loss_function: Callable[..., Any] | None
    temperature: float

    @property
    def entropy(self) -> bool:
        return tu.get_non_tensor_data(self.data, "calculate_entropy", False)

    def train(self, tokens: StepTokens) -> dict[str, Any]:
        """Accumulate the gradients of verl's loss.

        Args:
            tokens: counts of the whole mini-batch.
        """
        result: dict[str, Any] = {}

        def function(*numbers: Tensor) -> Tensor:
            loss = self.evaluated(numbers, result)
            return loss / self.engine.dims.dp

        loss = FunctionLoss(function, self.temperature, self.entropy)
        self.engine.session.forward_backward(self.batch, loss, tokens)
        if not tu.get_non_tensor_data(self.data, "return_model_output", False):
            del result["model_output"]
        return result

    def infer(self) -> dict[str, Any]:
        """Compute log p, the entropy if the batch asks for it, and verl's loss if there is one."""
        session = self.engine.session
        numbers = session.logprobs_and_entropy(self.batch, temperature=self.temperature)
        result: dict[str, Any] = {}
        self.evaluated(numbers[: 1 + self.entropy], result)
        return result

    def evaluated(self, numbers: tuple[Tensor, ...], result: dict[str, Any]) -> Tensor:
        """Return verl's loss of log p [T] (and the entropy [T]), and fill its results in."""
        ids = self.data["input_ids"]
        nested = [
            torch.nested.nested_tensor_from_jagged(x[: len(ids.values())], ids.offsets())
            for x in numbers
        ]
        output = dict(zip(("log_probs", "entropy"), nested))
        loss = torch.ones(())
        metrics: dict[str, Any] = {}
        if self.loss_function is not None:
            group = self.engine.group
            loss, metrics = self.loss_function(model_output=output, data=self.data, dp_group=group)
        result.update(model_output=detach_tree(output), loss=loss.item(), metrics=metrics)
        return loss


def temperature_of(data: TensorDict) -> float:
    """Return a batch's temperature, after refusing what the engine cannot compute."""
    for key, remedy in REFUSED.items():
        if tu.get_non_tensor_data(data, key, False):
            raise ValueError(f"{key} = true is not supported by the engine titan_linear; {remedy}")
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        raise ValueError(
            "multi_modal_inputs: the engine titan_linear trains language models alone; leave images out"
        )
    temperatures = torch.as_tensor(data["temperature"], dtype=torch.float64).unique().tolist()
    if len(temperatures) > 1:
        raise ValueError(
            f"temperature = {temperatures}: a batch must have one temperature; set rollout.temperature for all"
        )
    return temperatures[0]


def model_keys(model: Any, engine: TitanEngineConfig) -> list[str]:
    """Return the keys that verl's sections model and engine stand for."""
    for name, (default, remedy) in UNUSED.items():
        value = model.get(name, default)
        if value != default:
            raise ValueError(
                f"model.{name} = {value!r} is not supported by the engine titan_linear; leave it at {default!r} "
                f"and {remedy}"
            )
    if model.lora.get("merge", False):
        raise ValueError(
            "model.lora.merge = true is not supported by the engine titan_linear; set it to false: adapters are sent "
            "to the rollout by themselves"
        )
    keys = [f"--training.mixed_precision_param={engine.dtype}"]
    if model.enable_gradient_checkpointing:
        keys.append("--activation_checkpoint.mode=selective")
    if model.lora_rank > 0:
        keys += [
            "--adapter.enable=true",
            f"--adapter.rank={model.lora_rank}",
            f"--adapter.alpha={model.lora_alpha}",
        ]
    return keys


def optimizer_keys(optimizer: Any) -> list[str]:
    """Return the keys that verl's section optim stands for."""
    if optimizer is None:
        return []
    fits = isinstance(optimizer, FSDPOptimizerConfig) and optimizer.optimizer == "AdamW"
    if not fits or optimizer.override_optimizer_config:
        raise ValueError(
            f"optim = {optimizer} is not supported by the engine titan_linear; set optim=fsdp with optimizer='AdamW' "
            "and override_optimizer_config=null, and other options as --optimizer.… in engine.keys"
        )
    beta1, beta2 = optimizer.betas
    return [
        f"--optimizer.beta1={beta1}",
        f"--optimizer.beta2={beta2}",
        f"--optimizer.weight_decay={optimizer.weight_decay}",
        f"--training.max_norm={optimizer.clip_grad}",
    ]


def build_schedule(optimizer: Any) -> LRScheduler:
    """Return verl's own schedule of the learning rate, on an optimizer without parameters to train."""
    holder = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optimizer.lr)
    total = optimizer.total_training_steps
    warmup = optimizer.lr_warmup_steps or 0
    if warmup <= 0:
        warmup = int(optimizer.lr_warmup_steps_ratio * total)
    if optimizer.lr_scheduler_type == "constant":
        schedule = get_constant_schedule_with_warmup(holder, num_warmup_steps=warmup)
    else:
        schedule = get_cosine_schedule_with_warmup(
            holder,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=optimizer.min_lr_ratio,
            num_cycles=optimizer.num_cycles,
            zero_indexed_step=optimizer.zero_indexed_step,
        )
    # torch warns of a schedule whose optimizer has made no step.
    holder.step()
    return schedule
