"""Forward passes without gradients, under any split: for scores, evaluations and lm-eval."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_linear.config import Config, Optimizer
from titan_linear.data import Batch, Streams, Tokenizer, validation_batches
from titan_linear.distributed.groups import gathered
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.run.origin import Origin
from titan_linear.run.session import Session, join_group, session_of
from titan_linear.step.optimizer import Moment

# Keys that replace the degrees of the run that saved a checkpoint.
ALL_RANKS_SHARD = (
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=-1",
    "--parallelism.fsdp_shard_degree=-1",
    "--parallelism.context_parallel_degree=1",
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.expert_parallel_degree=1",
)
# Maps some tokens' logits, labels [n] and columns [n, …] to numbers, [n, …] each.
Columns = Callable[[ChunkedLogits, Tensor, dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Reader:
    """A session that reads streams, with the configuration and tokenizer of its run.

    Every rank calls every method, however the model is split.
    """

    config: Config
    tokenizer: Tokenizer
    session: Session

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
        dims = self.session.dims
        return validation_batches(
            streams,
            local_batch_size=local_batch_size,
            dp_rank=dims.dp_rank,
            dp_degree=dims.dp,
            **part,
        )

    @torch.no_grad()
    def _queue(self, batch: Batch, columns: Columns) -> tuple[Moment, list[Tensor]]:
        micro = self.session.sharding(batch)
        labelled = micro.labels[0] != IGNORE
        # Kernels cannot run on zero rows.
        labelled[0] = True
        # Before the forward pass, because the host waits for the device here.
        rows = labelled.nonzero()[:, 0]
        labels = micro.labels[0, rows]
        own = {name: x[0, rows] for name, x in micro.columns.items()}

        def numbers_of(logits: ChunkedLogits) -> tuple[Tensor, ...]:
            return labels, *columns(replace(logits, x=logits.x[rows]), labels, own)

        with self.session.precision:
            numbers = self.session.model(micro.tokens, micro.plan, loss=numbers_of)
        # Copy to the host without waiting.
        numbers = [x.to("cpu", non_blocking=True) for x in numbers]
        return Moment(rows.device), numbers

    def _arrived(self, copied: Moment, numbers: list[Tensor]) -> list[list[np.ndarray]]:
        copied.wait()
        labels, *columns = (x.numpy() for x in numbers)
        own = [x[labels != IGNORE] for x in columns]
        # Tensor-parallel ranks have the same numbers: only the first sends them.
        sent = [] if self.session.dims.tp_ranks.rank else own
        return list(filter(None, gathered(sent, self.session.host)))


def load(folder: str | Path, *keys: str) -> Session:
    """Open a session with the weights of a Hugging Face folder, a run or a checkpoint.

    Args:
        keys: keys of the configuration as on the command line, such as
            "--training.dtype=bfloat16". Degrees of parallelism are 1 by default: then all
            ranks shard the parameters and take different batches.

    Raises:
        ValueError: the folder has no weights, or a key is wrong.
    """
    join_group()
    config = Origin.reading(Path(folder), [*ALL_RANKS_SHARD, *keys]).config
    return open_reader(config, config.optimizer).session


def open_reader(config: Config, optimizer: Optimizer | None = None) -> Reader:
    """Open a reader with the weights that the configuration begins from."""
    origin = Origin.of(config)
    session = session_of(config, origin.model, optimizer=optimizer)
    origin.load(session.model, session.host)
    return Reader(config, origin.tokenizer, session)
