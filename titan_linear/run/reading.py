"""Forward passes without gradients, under any split: for scores, evaluations and lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config, load_config
from titan_linear.data import Batch, Streams, Tokenizer, validation_batches
from titan_linear.distributed.groups import gathered, host_group
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.process import own_device
from titan_linear.models.decoder import Decoder
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.run.build import (
    build_dims,
    build_model,
    build_sharding,
    mixed_precision,
    model_config,
    open_tokenizer,
    tokenizer_path,
)
from titan_linear.run.start import set_first_weights
from titan_linear.step.cut import BatchSharding
from titan_linear.step.optimizer import Moment
from titan_linear.storage.hf_io import CONFIG
from titan_linear.storage.rundir import config_of, config_path
from titan_linear.storage.step_folders import weights_path

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
    tokenizer, device = open_tokenizer(config), own_device()
    dims = build_dims(config, device)
    model = build_model(config, model_config(config, tokenizer), dims, device)
    host = host_group()
    set_first_weights(config, model, host)
    sharding = build_sharding(config, model.config, dims, device)
    return Reader(
        config, tokenizer, model, dims, sharding, mixed_precision(config, model, dims), host
    )


def config_for(path: Path, keys: list[str]) -> Config:
    """Return the configuration of the run that made these weights, with these keys changed.

    A run with this configuration begins from these weights.
    """
    # Options for a Hugging Face folder, or for a checkpoint of a run.
    if (path / CONFIG).is_file():
        first = ["--model.flavor", "hf", "--checkpoint.initial_load_in_hf", "true"]
    else:
        path = weights_path(path, key="PATH")
        run = config_of(path)
        first = [
            "--job.config_file",
            str(config_path(path)),
            "--checkpoint.initial_load_in_hf",
            "false",
        ]
        # The run may have begun from a folder that gave its model and tokenizer. Name it
        # here, because weights no longer come from it.
        first += ["--model.hf_assets_path", run.hf_assets] if run.model.flavor == "hf" else []
        first += ["--model.tokenizer_path", path_of] if (path_of := tokenizer_path(run)) else []
    first += ["--checkpoint.enable", "true", "--checkpoint.initial_load_path", str(path)]
    # The adapters that the run began from are part of its weights.
    first += ["--adapter.initial_load_path", ""]
    # A reader neither trains nor exports.
    others = {"loss.scores": "", "checkpoint.export_dtype": "float32"}
    config = load_config([*first, *keys]).changed(others)
    if adapters := config.adapter.initial_load_path:
        raise ValueError(
            f"adapter.initial_load_path = {adapters!r} is for runs that train; titan-linear convert merge "
            "adds adapters to their base, for commands that read"
        )
    return config
