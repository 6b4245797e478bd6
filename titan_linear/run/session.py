"""`Session`: a model on its mesh, with precision, optimizer, loss and update.

A session has no corpus, tokenizer, schedule or run folder. The trainer adds these to one;
the doctor, the commands that read weights, and other people's trainers (docs/python.md)
drive the same object. Every rank calls every method, in the same order.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_linear.config import Config, Optimizer, Parallelism
from titan_linear.data import IGNORE, Batch
from titan_linear.distributed.groups import host_group, on_rank_0
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.one_process import LocalDims
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, parallelize
from titan_linear.distributed.process import own_device
from titan_linear.losses import LossFunction, build_loss
from titan_linear.losses.function import FunctionLoss, tempered, whole_numbers
from titan_linear.losses.loss import LocalBatch, logprobs
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.ops.exchange.stream import gather_stream
from titan_linear.run.build import build_dims, options_of, unallocated
from titan_linear.run.weights import Weights
from titan_linear.step.branches import zero_without_label
from titan_linear.step.cut import BatchSharding
from titan_linear.step.feed import Feed, StepTokens
from titan_linear.step.optimizer import ComputeCopies, Reading, build_optimizer
from titan_linear.step.passes import Forward, Passes, with_reference
from titan_linear.step.update import Update
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.step_folders import Progress, weights_path
from titan_linear.storage.tensors import named_parameters

# Maps the log-probabilities [T] of a micro-batch's labels to a scalar loss, or to terms
# that are added up.
LogProbFunction = Callable[[Tensor], Tensor]
Watching = Callable[[LocalBatch], AbstractContextManager[object]]


class Session:
    """A model on its mesh, ready for passes and updates.

    Args:
        model: the model's configuration, whose weights are not set yet (`initialise`,
            `load`); or a plain decoder, which keeps its parameters.
        dims: the mesh, for example from `mesh`; by default, all ranks shard the
            parameters and take different batches.
        optimizer: the optimizer's section of the configuration; None: no updates.
        loss: the loss of `forward_backward`, or its name.
        host: a `host_group`; by default, a new one.
    """

    def __init__(
        self,
        model: ModelConfig | Decoder,
        dims: ParallelDims | LocalDims | None = None,
        options: SessionOptions | None = None,
        *,
        optimizer: Optimizer | None = None,
        loss: LossFunction | str = "cross_entropy",
        device: torch.device | None = None,
        host: dist.ProcessGroup | None = None,
    ):
        self.device = device or own_device()
        self.dims = dims or mesh()
        self.options = options or SessionOptions()
        self._host = host
        self.loss = build_loss(loss) if isinstance(loss, str) else loss
        self.model = self._built(model)
        self.optimizer = build_optimizer(self.model, optimizer) if optimizer else None
        self.sharding = BatchSharding.of(self.model.config, self.dims, self.options, self.device)
        # Number of updates.
        self.steps = 0
        # This rank's parts of the loss since the last update.
        self._losses: list[Tensor] = []

    def _built(self, model: ModelConfig | Decoder) -> Decoder:
        """Build the decoder as ranks train it: unallocated → parallelize → allocate."""
        options = self.options
        if isinstance(model, ModelConfig):
            decoder = unallocated(model, options.dtype, options.compute_dtype)
        else:
            decoder = model
        decoder.head.chunk = options.loss_chunk_size
        parallelize(decoder, self.dims, options, self.device)
        if decoder is not model:
            materialise(decoder, self.device, self.dims.cpu_offload)
        return decoder

    @cached_property
    def host(self) -> dist.ProcessGroup:
        """A group of all ranks on the hosts, which waits as long as needed."""
        return self._host or host_group()

    # Precision and update are made when they are first needed, after the weights are set.

    @cached_property
    def precision(self) -> AbstractContextManager[object]:
        """A reusable context that computes in the compute dtype.

        It is empty with FSDP2, which casts by itself.
        """
        if self.dims.sharded:
            return nullcontext()
        return ComputeCopies(self.model, self.options.compute_dtype)

    @cached_property
    def update(self) -> Update:
        """The end of every step."""
        return Update(self.model, self.dims, self.optimizer, self.precision, self.options.max_norm)

    # --- Batches --------------------------------------------------------------------------

    def cut(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        columns: Mapping[str, Tensor] | None = None,
        num_streams: int = 1,
    ) -> LocalBatch:
        """Cut a micro-batch on the host into this rank's part, on its device.

        The ranks that share a stream (cp and tp) pass the same micro-batch.

        Args:
            tokens: [T] int64, packed documents; cp (with "zigzag": 2 cp) and tp divide T.
            cu_seqlens: [documents + 1] boundaries, from 0 to T; by default, one document.
            labels: [T] int64, IGNORE where there is nothing to predict; by default, the
                next token of each document.
            columns: numbers that losses read, [T] or [T, n], each in the place of its
                label. "weights" is 1 by default.
            num_streams: number of streams of equal length that T consists of; every
                stream's edge is a boundary.

        Raises:
            ValueError: the boundaries do not fit the tokens, or ranks cannot share T.
        """
        T = len(tokens)
        bounds = torch.tensor([0, T]) if cu_seqlens is None else cu_seqlens.long()
        lengths = bounds.diff()
        if bounds[0] != 0 or bounds[-1] != T or (lengths <= 0).any():
            raise ValueError(
                f"cu_seqlens = {bounds.tolist()} must rise from 0 to the number of tokens, {T}"
            )
        # The next token is the label, except at the end of a document.
        if labels is None:
            labels = tokens.roll(-1).index_fill(0, bounds[1:] - 1, IGNORE)
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)
        # Columns are 0 where there is no label.
        tokens = tokens.unsqueeze(0)
        labels = labels.unsqueeze(0)
        numbers = {"weights": torch.ones(T)} | dict(columns or {})
        for name, column in numbers.items():
            numbers[name] = zero_without_label(column.unsqueeze(0), labels)
        batch = Batch(
            tokens=tokens,
            labels=labels,
            cu_seqlens=bounds.int(),
            position_ids=(torch.arange(T) - bounds[documents]).unsqueeze(0),
            num_streams=num_streams,
            streams=tuple(range(num_streams)),
            columns=numbers | {"document": documents.unsqueeze(0)},
            # Pairs of documents stay pairs.
            num_documents=len(lengths) + len(lengths) % 2,
        )
        return replace(self.sharding(batch), num_tokens=T, weight=batch.weight)

    def count(self, batches: Sequence[LocalBatch]) -> StepTokens:
        """Count the tokens of a step over all ranks, given this rank's micro-batches."""
        tokens = sum(batch.num_tokens for batch in batches)
        weight = sum(batch.weight for batch in batches)
        counts = torch.tensor([tokens, weight], dtype=torch.float64)
        dist.all_reduce(counts, group=self.host)
        total, weight = (counts / self.dims.copies).tolist()
        return StepTokens(int(total), weight)

    def passes(
        self,
        batches: Iterator[Batch],
        *,
        micro_steps: int,
        host: dist.ProcessGroup | None = None,
        watching: Watching = lambda batch: nullcontext(),
    ) -> Passes:
        """Return the passes of the steps that take these batches, which are read ahead.

        Args:
            batches: the batches of this data-parallel rank, without end.
            micro_steps: number of batches per step.
            host: a gloo group of all ranks, in which hosts count the step's tokens; by
                default the default group.
            watching: a context around both passes of a micro-batch.
        """
        dims = self.dims
        options = self.options
        feed = Feed(
            batches,
            self.sharding,
            micro_steps=micro_steps,
            copies=dims.copies,
            host=host or dist.group.WORLD,
            device=self.device,
        )
        # Micro-steps are not added up in a narrower type than gradients have.
        replicas_once = (
            dims.replicas > 1 and not dims.cpu_offload and options.reduce_dtype == options.dtype
        )
        return Passes(self.model, feed, self.precision, self.loss, watching, replicas_once)

    # --- Steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, batch: LocalBatch, *, temperature: float = 1.0, whole: bool = False
    ) -> Tensor:
        """Return log p of each label, without gradients; 0 where there is no label.

        Args:
            temperature: of the softmax.
            whole: return the labels of the whole micro-batch on every cp rank, [T] in its
                order; by default, of this rank's part, [T_local].
        """

        def of_labels(logits: ChunkedLogits) -> Tensor:
            return logprobs(tempered(logits, temperature), batch.labels.flatten())

        with self.precision:
            logp = self.model(batch.tokens, batch.plan, loss=of_labels)
        return gather_stream(logp, batch.context) if whole else logp

    @torch.no_grad()
    def logprobs_and_entropy(
        self, batch: LocalBatch, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log p of each label of the whole micro-batch, and the entropy there.

        Returns:
            Both [T] in the micro-batch's order, on every cp and tp rank; 0 where there is
            no label.
        """

        def of_labels(logits: ChunkedLogits) -> tuple[Tensor, ...]:
            rows = tempered(logits, temperature).rows(batch.labels.flatten(), statistics=True)
            return tuple(whole_numbers(rows, batch))

        with self.precision:
            return self.model(batch.tokens, batch.plan, loss=of_labels)

    def forward_backward(
        self,
        batch: LocalBatch,
        loss: LossFunction | LogProbFunction | str | None = None,
        tokens: StepTokens | None = None,
    ) -> Tensor:
        """Accumulate the gradients of a micro-batch and return this rank's part of its loss.

        A named loss is a mean over the step's label weights. A function gets the
        log-probabilities [T] of the labels of the whole micro-batch, on every cp and tp
        rank, and its results are added up over micro-batches and data-parallel ranks. Its
        gradient is exact under every split. It takes two passes over the head.
        `FunctionLoss(function, temperature)` divides the logits.

        Args:
            loss: by default, the session's.
            tokens: `count` of all micro-batches of the step; by default, this one is all.

        Raises:
            ValueError: the step has several micro-batches, and `tokens` is missing.
        """
        named = self.loss if loss is None else build_loss(loss) if isinstance(loss, str) else loss
        if not isinstance(named, LossFunction):
            named = FunctionLoss(named)
        if tokens is None:
            if self._losses and not isinstance(named, FunctionLoss):
                raise ValueError(
                    "a step of several micro-batches needs tokens = session.count([…]) of all of them"
                )
            tokens = self.count([batch])
        if isinstance(named, FunctionLoss):
            tokens = tokens._replace(weight=1.0)
        batch = with_reference(self.model, batch, self.precision)
        part = Forward(self.model, batch, tokens, self.precision, named).backward()
        self._losses.append(part.flatten())
        return part

    def step(self, lr: float) -> Reading:
        """Sum gradients over ranks, clip them, update the weights, and return the numbers.

        If loss or norm is not finite, neither weights nor moments change.

        Raises:
            ValueError: the session has no optimizer, or there are no gradients.
        """
        if self.optimizer is None or not self._losses:
            raise ValueError("step needs a session with an optimizer, and forward_backward first")
        self._reshard()
        # Reports are kept if all micro-batches have them.
        width = min(map(len, self._losses))
        losses = torch.stack([part[:width] for part in self._losses]).double()
        self._losses.clear()
        self.steps += 1
        return self.update.run(losses, lr).wait()

    def _reshard(self) -> None:
        """Free parameters that FSDP2 keeps gathered after a forward without a backward.

        They are without the gradients that the shards have.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def zero_grad(self) -> None:
        """Discard what `forward_backward` has accumulated since the last step."""
        self._reshard()
        self._losses.clear()
        self.model.zero_grad()

    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True) -> None:
        """Move weights, optimizer states or both to another device between two steps.

        Passes and steps need everything on the session's device. FSDP2's own offload
        (`training.enable_cpu_offload`) keeps all of it on the host, and nothing moves.
        """
        if self.dims.cpu_offload:
            return
        self._reshard()
        if model:
            self.model.to(device)
            if isinstance(self.precision, ComputeCopies):
                self.precision.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state.update({name: x.to(device) for name, x in state.items()})

    # --- Weights --------------------------------------------------------------------------

    def initialise(self, seed: int) -> None:
        """Draw all weights. They depend on the seed and their names, not on the split."""
        initialise(self.model, seed, named_parameters(self.model))

    def weights(self, family: str = "", dtype: torch.dtype | None = None) -> Weights:
        """Return the weights under Hugging Face names, to be iterated on every rank.

        With adapters, return what is trained, under PEFT's names. See `Weights`.
        """
        return Weights(self.model, family, dtype)

    def save(self, folder: str | Path) -> None:
        """Save weights and optimizer as a checkpoint, step-N, in this folder.

        N is the number of updates.
        """
        progress = Progress(step=self.steps)
        self._checkpoints(folder).save(self.steps, self.model, self.optimizer, progress)

    def load(self, folder: str | Path) -> None:
        """Load the folder's newest checkpoint, saved under any split, or a step-N folder.

        Raises:
            ValueError: there is none, or it is of another model.
        """
        path = on_rank_0(lambda: weights_path(Path(folder), key="folder"), self.host)
        step = int(path.name.removeprefix("step-"))
        progress = self._checkpoints(path.parent).load(step, self.model, self.optimizer)
        self.steps = progress.step

    def _checkpoints(self, folder: str | Path) -> Checkpointer:
        return Checkpointer(Path(folder), keep_latest_k=0, group=self.host)


def mesh(**degrees: int) -> ParallelDims:
    """Build the mesh over all ranks, in the default process group (`join_group`).

    Args:
        degrees: the degrees of the section [parallelism], such as
            context_parallel_degree=2; by default, all ranks shard the parameters and take
            different batches.

    Raises:
        ValueError: the degrees do not multiply to the number of ranks.
    """
    join_group()
    return build_dims(Config(parallelism=Parallelism(**degrees)), own_device())


def join_group() -> None:
    """Create the default process group, if there is none.

    It consists of the processes that torchrun has started, or of this one alone.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if own_device().type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def session_of(
    config: Config,
    model: ModelConfig,
    *,
    dims: ParallelDims | None = None,
    optimizer: Optimizer | None = None,
    host: dist.ProcessGroup | None = None,
) -> Session:
    """Build the session of a configuration, by default on its own mesh over all ranks."""
    return Session(
        model,
        dims or build_dims(config, own_device()),
        options_of(config),
        optimizer=optimizer,
        loss=build_loss(config.loss.name, config.objective),
        host=host,
    )
