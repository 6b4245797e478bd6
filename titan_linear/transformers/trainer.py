"""Context parallelism for `transformers.Trainer`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.transformers.cut import pack
from titan_linear.transformers.model import context_parallel

# Options of a Trainer that need whole rows.
REFUSED = "compute_metrics", "compute_loss_func", "label_smoother"


class ContextParallelMixin:
    """Cuts each batch of a Trainer among a group of neighboring ranks.

        class Trainer(ContextParallelMixin, transformers.Trainer): ...

    The ranks of a group read the same batches. The loss is divided by the number of labels in all micro-batches of a
    step on all ranks.

    Args:
        context_parallel_degree: ranks per group.
        context_parallel_layout: "zigzag" or "contiguous".
    """

    args: Any  # transformers.TrainingArguments

    def __init__(
        self,
        *args: Any,
        context_parallel_degree: int = 1,
        context_parallel_layout: str = "zigzag",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.cp_degree = context_parallel_degree
        self.cp_layout = context_parallel_layout
        self.cp_group = None
        if self.args.world_size % context_parallel_degree:
            raise ValueError(
                f"context_parallel_degree = {context_parallel_degree} must divide the number of "
                f"processes, {self.args.world_size}; start them with torchrun"
            )
        if context_parallel_degree > 1:
            self.cp_group, _ = dist.new_subgroups(context_parallel_degree)
        refused = [name for name in REFUSED if getattr(self, name) is not None]
        if refused or self.args.n_gpu > 1 or not self.args.average_tokens_across_devices:
            raise ValueError(
                f"{', '.join(refused) or 'n_gpu or average_tokens_across_devices'}: the loss is a mean "
                "over all ranks' labels, and a rank has a part of each row; leave it at the default"
            )

    def get_train_dataloader(self) -> Any:
        return self._by_group(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._by_group(super().get_eval_dataloader(*args, **kwargs))

    def _by_group(self, loader: Any) -> Any:
        # accelerate's loaders have a shard per rank; here each group has one.
        for shard in (loader.batch_sampler, loader.dataset):
            if hasattr(shard, "process_index"):
                shard.num_processes = self.args.world_size // self.cp_degree
                shard.process_index = self.args.process_index // self.cp_degree
        return loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        # Labels on all ranks; each group's are counted once.
        items = sum(pack(batch).count() for batch in batch_samples).to(device)
        if self.args.world_size > 1:
            dist.all_reduce(items)
        return items / self.cp_degree

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        with context_parallel(model, self.cp_group, self.cp_layout) as self.cp:
            return super().training_step(model, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if not loss_only:
            raise ValueError("a rank has logits of a part of each row; use prediction_loss_only")
        with context_parallel(model, self.cp_group, self.cp_layout) as self.cp:
            return super().prediction_step(model, inputs, loss_only, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loss of this rank's part; the mean over ranks is one process's."""
        cut = self.cp.cut({**inputs, "num_items_in_batch": kwargs["num_items_in_batch"]})
        return super().compute_loss(model, cut, *args, **kwargs)
