"""Context parallelism for `transformers.Trainer`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    accelerator: Any
    model: Any

    def __init__(
        self,
        *args: Any,
        context_parallel_degree: int = 1,
        context_parallel_layout: str = "zigzag",
        **kwargs: Any,
    ) -> None:
        self.cp_degree = context_parallel_degree
        self.cp_layout = context_parallel_layout
        self.cp_group = None
        super().__init__(*args, **kwargs)
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
        # TRL divides its count of tokens by this.
        self._tp_size = context_parallel_degree

    def get_tp_size(self) -> int:
        """Return the number of ranks that have the same batch, by transformers' name."""
        return self.cp_degree

    def get_train_dataloader(self) -> Any:
        return self._by_group(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._by_group(super().get_eval_dataloader(*args, **kwargs))

    def _by_group(self, loader: Any) -> Any:
        # accelerate's loaders have a shard per rank; here each group has one.
        groups = self.args.world_size // self.cp_degree
        for shard in (loader.batch_sampler, loader.dataset):
            if hasattr(shard, "process_index"):
                shard.num_processes = groups
                shard.process_index = self.args.process_index // self.cp_degree
                # A lone group need not be given samples twice to have as many batches as others.
                shard.even_batches = groups > 1
        return loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        # Labels, or their weights, on all ranks; each group's are counted once.
        if not all("labels" in batch for batch in batch_samples):
            return None
        items = sum(pack(batch).count() for batch in batch_samples).to(device)
        if self.args.world_size > 1:
            dist.all_reduce(items)
        return items / self.cp_degree

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._whole_rows():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_rows():
            return super().prediction_step(*args, **kwargs)

    def predict(self, *_: Any, **__: Any) -> None:
        raise ValueError("predict: a rank has logits of a part of each row; use evaluate")

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self._gather
        return super().evaluation_loop(*args, **kwargs)

    def _gather(self, losses: Tensor) -> Tensor:
        # Ranks of a group have the same losses. Samples that fill up the last batch do not count.
        ranks = self.accelerator.gather(losses).unflatten(0, (-1, self.cp_degree, len(losses)))
        state = self.accelerator.gradient_state
        filled = state.end_of_dataloader and state.remainder > 0
        return ranks[:, 0].flatten()[: state.remainder if filled else None]

    @contextmanager
    def _whole_rows(self) -> Iterator[None]:
        # DPO may have a model of its own for references.
        models = self.model, getattr(self, "ref_model", None)
        with ExitStack() as stack:
            for model in filter(None, models):
                cp = context_parallel(model, self.cp_group, self.cp_layout, whole_rows=True)
                stack.enter_context(cp)
            yield
