"""From a data-parallel rank's batches to the micro-batches of each step: cut for this rank, planned, and on its device
before they are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.data import IGNORE, Batch
from titan_linear.data.corpus.trees import BACK, SHARE
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.losses.loss import MicroBatch, Paths
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.layers import widened
from titan_linear.models.plan import BatchPlan, Later, Rotary
from titan_linear.ops import CPContext, build_cp_context
from titan_linear.ops.attention import choose_method, pairs_computed
from titan_linear.ops.layout.build_context import ranks_per_node
from titan_linear.ops.layout.nodes import Nodes
from titan_linear.ops.layout.tables import to_device


@dataclass(frozen=True)
class BatchSharding:
    """How batches are cut, and what is planned for the mixers that read them."""

    dims: ParallelDims
    device: torch.device
    layout: str
    softmax_method: str
    conv1d_kernel_size: int | None  # of the model's convolutions, if all have the same
    rotaries: tuple[Rotary, ...]  # of the model's mixers
    compute_dtype: torch.dtype
    compiled: bool  # layers, which read the plan, are compiled
    programs: tuple[int, ...]  # of each kind of scan over a rank's tokens, where scans are kernels
    # likewise over the whole stream, where ranks share heads; None: no scan
    stream_programs: tuple[int, ...] | None
    mtp_layers: int
    # Hq, Hkv and D + Dv on a rank of tp, for each kind of softmax layer
    softmax: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dims: ParallelDims,
        device: torch.device,
        compute_dtype: torch.dtype,
        *,
        layout: str,
        softmax_method: str,
        linear_method: str,
        compiled: bool = False,
    ) -> BatchSharding:
        """The sharding that plans for what this model's mixers need of a batch."""
        needs = [
            *(mixer.ops for mixer in model.mixers),
            *(mlp.ops(model.dim, dims.tp) for mlp in model.mlps),
        ]
        over_heads = dims.cp > 1 and linear_method == "ulysses"
        programs = _programs(model, dims.tp * dims.cp if over_heads else dims.tp, device)
        sizes = {ops["causal_conv1d"]["W"] for ops in needs if "causal_conv1d" in ops}
        rotaries = dict.fromkeys(mixer.rotary for mixer in model.mixers if mixer.rotary is not None)
        return cls(
            dims,
            device,
            layout,
            softmax_method,
            conv1d_kernel_size=sizes.pop() if len(sizes) == 1 else None,
            rotaries=tuple(rotaries),
            compute_dtype=compute_dtype,
            compiled=compiled,
            programs=() if over_heads else programs,
            stream_programs=programs if over_heads else None,
            mtp_layers=model.mtp_layers,
            softmax=_softmax(model, dims.tp),
        )

    def __call__(self, batch: Batch) -> MicroBatch:
        """This rank's part of a batch. Labels, columns, and what comes later in a document, were shifted before the
        cut."""
        trees = BACK in batch.columns
        methods = self.methods(batch.tokens.shape[1], batch.nodes.joined)
        context = self._context(batch, batch.nodes, methods)
        names = [name for name in batch.columns if name not in (BACK, SHARE)]
        local = [batch.tokens, batch.labels, *(batch.columns[name] for name in names)]
        local += later_of(batch, self.mtp_layers)[:3] if self.mtp_layers and not trees else ()
        if self.dims.cp > 1:
            local = [
                torch.cat([x[:, start:end] for start, end in context.fragments], 1) for x in local
            ]
        branches = paths = None
        contexts = []
        if trees:
            branches, targets = branches_of(batch, context)
            further = [
                batch.tokens[:, targets],
                *(batch.columns[name][:, targets - 1] for name in names),
            ]
            local[1:] = [torch.cat(of_each, 1) for of_each in zip(local[1:], further)]
            local[2:] = [_of_labels(x, local[1]) for x in local[2:]]
            paths = paths_of(batch) if "document" in names else None
        if trees and self.mtp_layers:
            contexts = [
                self._context(batch, batch.nodes.after(k), methods)
                for k in range(1, self.mtp_layers + 1)
            ]
            tokens, labels, *columns = local
            weights = columns[names.index("weights")]
            local += later_of_trees(
                tokens, labels, weights, context.position_ids, branches, self.mtp_layers
            )
        moved = to_device([contexts, context, branches, paths, *local], self.device)
        contexts, context, branches, paths, tokens, labels, *local = moved
        columns, later = dict(zip(names, local)), local[len(names) :]
        plan = self._plan(
            context,
            batch,
            pairs=pairs_computed(context, next(iter(methods), "ring")) if self.softmax else 0.0,
            later=Later._make([*later, [self._plan(each, batch) for each in contexts]])
            if later
            else None,
            branches=branches,
        )
        return MicroBatch(tokens, labels, plan, batch.streams, columns, batch.num_documents, paths)

    def _context(self, batch: Batch, nodes: Nodes, methods: Sequence[str]) -> CPContext:
        """On the host."""
        return build_cp_context(
            torch.from_numpy(nodes.edges),
            self.dims.cp_group,
            num_streams=batch.num_streams,
            layout=self.layout if self.dims.cp > 1 else "contiguous",
            conv1d_kernel_size=self.conv1d_kernel_size,
            programs=self.programs,
            stream_programs=self.stream_programs,
            attention=methods,
            parents=torch.from_numpy(nodes.parents),
        )

    def _plan(self, context: CPContext, batch: Batch, **more: Any) -> BatchPlan:
        if self.compiled:
            context.mark_dynamic()
        plan = BatchPlan(
            context.position_ids, cp_context=context, num_streams=batch.num_streams, **more
        )
        plan.prepare(self.rotaries, widened(self.compute_dtype))
        return plan

    def methods(self, tokens: int, branches: bool = False) -> tuple[str, ...]:
        """How softmax layers communicate in batches of this many tokens over all ranks: one method, or several if
        layers are of several kinds; none without such layers, or if cp is 1. branches: of prefix trees."""
        if self.dims.cp == 1:
            return ()
        if self.softmax_method != "auto":
            return (self.softmax_method,) if self.softmax else ()
        ranks = self.dims.cp, self.node_size
        chosen = (
            choose_method(*ranks, tokens, *sizes, self.compute_dtype, branches)
            for sizes in self.softmax
        )
        return tuple(dict.fromkeys(chosen))

    @property
    def node_size(self) -> int:
        """Ranks of cp per node."""
        return ranks_per_node(self.dims.cp_group, self.dims.cp)

    def uneven(self, tokens: int) -> str | None:
        """The message at a run's start if some ranks will wait for others; else None."""
        rings = {"ring": self.dims.cp, "ulysses+ring": self.dims.cp // self.node_size}
        W = max((rings[method] for method in self.methods(tokens) if method in rings), default=1)
        if self.layout != "contiguous" or W == 1:
            return None
        return (
            f"attention by ring over contiguous fragments: of one document a rank computes {(2 * W - 1) / W:.2f} times "
            'the mean, and the others wait; parallelism.context_parallel_layout = "zigzag" shares it equally'
        )


def branches_of(batch: Batch, context: CPContext) -> tuple[Tensor, Tensor]:
    """Of prefix trees, targets that do not lie behind the token that they continue: the rows of those of these tokens
    that a rank has; and the targets."""
    back = batch.columns[BACK][0]
    targets = ((back > 1) & (batch.columns["weights"][0].roll(1) > 0)).nonzero().flatten()
    tokens, cut = (targets - back[targets]).numpy(), context.cut
    mine = cut.owners[tokens // cut.fragments[0].end] == context.ranks.rank
    return torch.from_numpy(cut.rows(tokens)[mine]), targets[mine]


def _of_labels(column: Tensor, labels: Tensor) -> Tensor:
    """[1, T] or [1, T, n], 0 where there is none."""
    return column.masked_fill((labels == IGNORE).view(*labels.shape, *[1] * (column.dim() - 2)), 0)


def paths_of(batch: Batch) -> Paths:
    nodes, seq_len = batch.nodes, batch.tokens.numel() // batch.num_streams
    leaves, begins = nodes.leaves, nodes.edges[:-1]
    names, _ = _numbered(begins // seq_len)
    documents, count = _numbered(begins[leaves] // seq_len)
    number, node = nodes.on_paths(leaves)
    share = batch.columns[SHARE][0].numpy()[begins]
    arrays = names[node], documents[number], share[leaves][number] / share[node]
    return Paths(*map(torch.from_numpy, arrays), num_documents=count)


def _numbered(streams: np.ndarray) -> tuple[np.ndarray, int]:
    """Numbers of documents of these streams, each stream's from an even one on, as `Batch` has them; and of all."""
    odd = np.bincount(streams) % 2
    return np.arange(len(streams)) + (np.cumsum(odd) - odd)[streams], len(streams) + int(odd.sum())


def later_of(batch: Batch, depth: int) -> Later:
    """Of the whole stream, so that a token's later ones may lie on any rank."""
    bounds = batch.cu_seqlens.long()
    ends = bounds[1:].repeat_interleave(bounds.diff())  # [T], of each token's document
    at = torch.arange(len(ends)) + torch.arange(1, depth + 1).unsqueeze(1)
    inside = at < ends
    of_tokens = batch.tokens, batch.labels, batch.columns["weights"]
    tokens, labels, weights = (x[0, at.where(inside, 0)] for x in of_tokens)
    return Later(tokens.where(inside, 0), labels.where(inside, IGNORE), weights.where(inside, 0))


def later_of_trees(
    tokens: Tensor, labels: Tensor, weights: Tensor, positions: Tensor, branches: Tensor, depth: int
) -> list[Tensor]:
    """The fields of `Later` of this rank's tokens [1, T], labels and weights [1, T + branches]."""
    positions = torch.cat([positions, positions[branches]])
    inside = positions >= torch.arange(1, depth + 1).unsqueeze(1)
    return [tokens.expand(depth, -1), labels.where(inside, IGNORE), weights.where(inside, 0)]


def _programs(model: ModelConfig, ranks: int, device: torch.device) -> tuple[int, ...]:
    """Programs of one entry's scan, for each kind of mixer; none without a GPU. ranks: those that share the value
    heads."""
    if device.type != "cuda":
        return ()
    of = (mixer.scan_programs(ranks) for mixer in model.mixers)
    return tuple(dict.fromkeys(n for n in of if n is not None))


def _softmax(model: ModelConfig, tp: int) -> tuple[tuple[int, int, int], ...]:
    sizes = []
    for mixer in model.mixers:
        if "attention" in mixer.ops:
            # of queries, then of keys if these are fewer
            heads = [count // tp for count in mixer.head_counts.values()]
            sizes.append((heads[0], heads[-1], sum(mixer.ops["attention"].values())))
    return tuple(dict.fromkeys(sizes))


# --- Read ahead ------------------------------------------------------------------------------------------------------


class StepTokens(NamedTuple):
    """Of a step, over all ranks."""

    total: int  # number of tokens
    weight: float  # of those with a label


NO_DOCUMENTS = Documents(0, 0, 0)


@dataclass(frozen=True)
class FeedStats:
    """What some steps had, over all ranks, and the time that it took this rank's host to feed them."""

    steps: int = 0
    valid: int = 0  # tokens with a label
    apart: int = 0  # tokens, with the documents of prefix trees packed apart
    documents: Documents = NO_DOCUMENTS
    seconds: float = 0.0  # to read and cut batches
    # to read and cut them, or for other ranks to do so, while the device had nothing left to do
    waited: float = 0.0
    # of query and key in a softmax layer, on the rank that computed most in each step
    most_pairs: float = 0.0

    def work_balance(self, ranks: int) -> float:
        """Pairs of the rank that computed most, divided by the mean over the `ranks` that share them: 1 is even."""
        return self.most_pairs * ranks / self.documents.pairs

    def __add__(self, more: FeedStats) -> FeedStats:
        return FeedStats(
            steps=self.steps + more.steps,
            valid=self.valid + more.valid,
            apart=self.apart + more.apart,
            documents=Documents(
                *(a + b for a, b in zip(self.documents, more.documents, strict=True))
            ),
            seconds=self.seconds + more.seconds,
            waited=self.waited + more.waited,
            most_pairs=self.most_pairs + more.most_pairs,
        )


class _Ahead(NamedTuple):
    """A step that was fetched ahead."""

    first: MicroBatch
    rest: list[Batch]
    counts: Tensor  # `_counts` of this rank's batches; of all ranks' once `counting` is done
    counting: dist.Work


@dataclass(eq=False)
class Feed:
    """Steps of micro-batches.

    `prefetch` does all that the host does for a step before its first forward: call it while the device still computes
    the step before. Later micro-batches are cut and moved when they are asked for, which is while the device computes
    the one before. They are copied from pinned memory, on the current CUDA stream, and the host does not wait for it.

    Args:
        batches: those of this data-parallel rank, without end. They may be read a step ahead of training: the trainer
            keeps track of how far the run has come.
        cut: a batch → this rank's part of it, on its device (`BatchSharding`).
        micro_steps: number of batches per step.
        copies: number of ranks that get the same batches.
        host: a gloo group of all ranks in which tokens are counted, on the hosts; no device takes part.
        device: the one that computes the micro-batches.
    """

    batches: Iterator[Batch]
    cut: Callable[[Batch], MicroBatch]
    _: KW_ONLY
    micro_steps: int
    copies: int
    host: dist.ProcessGroup
    device: torch.device
    _ahead: _Ahead | None = None
    _stats: FeedStats = FeedStats()  # since the last `take`
    _pairs: float = 0.0

    def prefetch(self) -> None:
        """Fetch the next step's batches, begin to count its tokens, and move its first micro-batch."""
        if self._ahead is None:
            with self._timed():
                batches = [next(self.batches) for _ in range(self.micro_steps)]
                counts = torch.tensor(
                    [_counts(batch) for batch in batches], dtype=torch.float64
                ).sum(0)
            counting = dist.all_reduce(counts, group=self.host, async_op=True)
            self._ahead = _Ahead(self._move(batches[0]), batches[1:], counts, counting)

    def next_step(self) -> tuple[StepTokens, Iterator[MicroBatch]]:
        """The numbers of tokens of the next step, and this rank's micro-batches of it."""
        self.prefetch()
        self.settle()
        step, self._ahead = self._ahead, None
        weight, *sums = (count / self.copies for count in step.counts.tolist())
        valid, apart, *sums = map(int, sums)  # exact below 2⁵³
        documents = Documents(*sums)
        self._stats += FeedStats(1, valid, apart, documents)
        return StepTokens(documents.tokens, weight), self._micro_batches(step)

    def _micro_batches(self, step: _Ahead) -> Iterator[MicroBatch]:
        for batch in chain([step.first], map(self._move, step.rest)):
            self._pairs += batch.plan.pairs
            yield batch

    def _move(self, batch: Batch) -> MicroBatch:
        with self._timed():
            return self.cut(batch)

    @contextmanager
    def _timed(self, reads: bool = True) -> Iterator[None]:
        """Count the seconds spent inside. If by their end the device has done all that was queued before them, it has
        waited, for these seconds at most."""
        queued = (
            torch.cuda.current_stream(self.device).record_event()
            if self.device.type == "cuda"
            else None
        )
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        waited = seconds if queued is None or queued.query() else 0.0
        self._stats += FeedStats(seconds=seconds if reads else 0.0, waited=waited)

    def settle(self) -> None:
        """Wait until the tokens of the prefetched step are counted."""
        if self._ahead:
            with self._timed(reads=False):
                self._ahead.counting.wait()

    def take(self, prefetch: bool = False) -> FeedStats:
        """What was in the step whose micro-batches were asked for since the last call. Every rank calls this, and may
        `prefetch` first. They wait for each other, but no longer than they would have to for the next step's count of
        tokens."""
        if prefetch:
            self.prefetch()
        most = np.array([self._pairs])
        with self._timed(reads=False):
            dist.all_reduce(torch.from_numpy(most), dist.ReduceOp.MAX, group=self.host)
        stats = self._stats + FeedStats(most_pairs=float(most[0]))
        self._stats, self._pairs = FeedStats(), 0.0
        return stats


def _counts(batch: Batch) -> list[float]:
    """The weight and the number of labels, the number of tokens with trees packed apart, and those of `Documents`."""
    labels = batch.columns["weights"] > 0
    nodes = batch.nodes
    apart = int((nodes.edges[1:] - nodes.begins)[nodes.leaves].sum())
    return [batch.weight, int(labels.sum()), apart, *Documents.of(nodes.edges, nodes.depth)]
