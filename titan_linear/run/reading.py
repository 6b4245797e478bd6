"""Forward passes without gradients, under any split: for scores, evaluations and lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config
from titan_linear.data import Batch, Streams, Tokenizer, validation_batches
from titan_linear.distributed.groups import gathered, host_group
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.process import own_device
from titan_linear.models.decoder import Decoder
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.run.build import build_dims, build_model, build_sharding, mixed_precision
from titan_linear.run.origin import Origin
from titan_linear.step.cut import BatchSharding
from titan_linear.step.optimizer import Moment

# Maps some tokens' logits, labels [n] and columns [n, …] to numbers, [n, …] each.
Columns = Callable[[ChunkedLogits, Tensor, dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Reader:
    """A model, with its tokenizer and mesh, that reads streams.

    Every rank calls every method, however the model is split.
    """

    config: Config
    tokenizer: Tokenizer
    model: Decoder
    dims: ParallelDims
    sharding: BatchSharding
    precision: AbstractContextManager[object]
    host: dist.ProcessGroup

    def read(
        self, streams: Streams, columns: Columns, first: int = 0, local_batch_size: int = 1
    ) -> Iterator[list[list[np.ndarray]]]:
        """Yield the numbers of each micro-batch from `first` on.

        On rank 0, an item is a list over ranks of their columns' numbers; ranks without
        labels are left out. Elsewhere, it is empty. Meanwhile, the device computes the next
        micro-batch.
        """
        queued = []
        for batch in self.batches(streams, local_batch_size, first=first):
            queued.append(self._queue(batch, columns))
            if len(queued) > 1:
                yield self._arrived(*queued.pop(0))
        for last in queued:
            yield self._arrived(*last)

    def batches(self, streams: Streams, local_batch_size: int, **part: int) -> Iterator[Batch]:
        """Yield this rank's part of one pass."""
        dims = self.dims
        return validation_batches(
            streams,
            local_batch_size=local_batch_size,
            dp_rank=dims.dp_rank,
            dp_degree=dims.dp,
            **part,
        )

    @torch.no_grad()
    def _queue(self, batch: Batch, columns: Columns) -> tuple[Moment, list[Tensor]]:
        micro = self.sharding(batch)
        labelled = micro.labels[0] != IGNORE
        # Kernels cannot run on zero rows.
        labelled[0] = True
        # Before the forward pass, because the host waits for the device here.
        rows = labelled.nonzero()[:, 0]
        labels = micro.labels[0, rows]
        own = {name: x[0, rows] for name, x in micro.columns.items()}
        with self.precision:
            numbers = self.model(
                micro.tokens,
                micro.plan,
                loss=lambda logits: (
                    labels,
                    *columns(replace(logits, x=logits.x[rows]), labels, own),
                ),
            )
        # Copy to the host without waiting.
        numbers = [x.to("cpu", non_blocking=True) for x in numbers]
        return Moment(rows.device), numbers

    def _arrived(self, copied: Moment, numbers: list[Tensor]) -> list[list[np.ndarray]]:
        copied.wait()
        labels, *columns = (x.numpy() for x in numbers)
        own = [x[labels != IGNORE] for x in columns]
        # Tensor-parallel ranks have the same numbers: only the first sends them.
        return list(filter(None, gathered([] if self.dims.tp_ranks.rank else own, self.host)))


def open_reader(config: Config) -> Reader:
    """Open a reader with the weights that the configuration begins from."""
    origin, device, host = Origin.of(config), own_device(), host_group()
    dims = build_dims(config, device)
    model = build_model(config, origin.model, dims, device)
    origin.load(model, host)
    sharding = build_sharding(config, model.config, dims, device)
    precision = mixed_precision(config, model, dims)
    return Reader(config, origin.tokenizer, model, dims, sharding, precision, host)
