"""Conversion of a micro-batch on the host into this rank's part on its device.

It runs in four stages:

    cut         the rank's fragments of tokens, labels and columns (context parallelism)
    branches    further targets of tokens in prefix trees (step/branches.py)
    later       tokens k = 1, 2, … positions later, for layers that predict them
    plan        everything moved to the device at once, and the plan that mixers read

The first three are functions from a batch or a `LocalBatch` to a `LocalBatch` on the host.
Labels and columns were shifted before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from titan_linear.data import IGNORE, Batch
from titan_linear.data.corpus.tree_records import BACK, SHARE
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.options import SessionOptions
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import widened
from titan_linear.models.plan import BatchPlan, Later, Rotary
from titan_linear.ops import CPContext, build_cp_context
from titan_linear.ops.attention import choose_method, pairs_computed
from titan_linear.ops.exchange.stream import take_fragments
from titan_linear.ops.layout.build_context import ranks_per_node
from titan_linear.ops.layout.prefix_trees import PrefixTrees
from titan_linear.ops.layout.tables import to_device
from titan_linear.step.branches import has_trees, later_in_trees, with_branches


class SoftmaxShape(NamedTuple):
    """Sizes of a softmax layer on one tp rank."""

    query_heads: int
    key_heads: int
    # D + Dv of a head.
    width: int


@dataclass(frozen=True)
class BatchSharding:
    """Cuts batches over the ranks and plans what the model's mixers read of them."""

    dims: ParallelDims
    device: torch.device
    layout: str
    softmax_method: str
    # Kernel size of all of the model's convolutions, or None if they differ.
    conv1d_kernel_size: int | None
    # Distinct rotary embeddings of the model's mixers.
    rotaries: tuple[Rotary, ...]
    compute_dtype: torch.dtype
    # Whether the layers, which read the plan, are compiled.
    compiled: bool
    # Programs of each kind of scan over a rank's tokens, if scans are kernels.
    programs: tuple[int, ...]
    # Programs of each kind of scan over the whole stream, if ranks share heads; None
    # without such scans.
    stream_programs: tuple[int, ...] | None
    mtp_layers: int
    # One shape for each kind of softmax layer.
    softmax: tuple[SoftmaxShape, ...]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dims: ParallelDims,
        options: SessionOptions,
        device: torch.device,
    ) -> BatchSharding:
        """Build the sharding that plans all that this model's mixers need of a batch."""
        parallelism = options.parallelism
        # With "ulysses", each cp rank scans the whole stream for its part of the heads.
        over_heads = dims.cp > 1 and parallelism.context_parallel_linear_method == "ulysses"
        programs = _programs(model, dims.tp * dims.cp if over_heads else dims.tp, device)
        needs = model.ops_of_parts(dims.tp)
        sizes = {ops["causal_conv1d"]["W"] for ops in needs if "causal_conv1d" in ops}
        rotaries = dict.fromkeys(mixer.rotary for mixer in model.mixers if mixer.rotary is not None)
        return cls(
            dims,
            device,
            parallelism.context_parallel_layout,
            parallelism.context_parallel_method,
            conv1d_kernel_size=sizes.pop() if len(sizes) == 1 else None,
            rotaries=tuple(rotaries),
            compute_dtype=options.compute_dtype,
            compiled=options.compile.enable,
            programs=() if over_heads else programs,
            stream_programs=programs if over_heads else None,
            mtp_layers=model.mtp_layers,
            softmax=_softmax_shapes(model, dims.tp),
        )

    def __call__(self, batch: Batch) -> LocalBatch:
        """Return this rank's part of a batch, on its device."""
        # Stages on the host.
        trees = has_trees(batch)
        methods = self.methods(batch.tokens.shape[1], batch.trees.joined)
        local = cut(batch, self._context(batch, batch.trees, methods))
        if trees:
            local = with_branches(local, batch)

        later_contexts: list[CPContext] = []
        if self.mtp_layers and trees:
            local = replace(local, later=later_in_trees(local, self.mtp_layers))
            shorter = (batch.trees.after(k) for k in range(1, self.mtp_layers + 1))
            later_contexts = [self._context(batch, each, methods) for each in shorter]
        elif self.mtp_layers:
            # All fields but `of_trees`.
            rows = later_of(batch, self.mtp_layers)[:3]
            later = Later(*(take_fragments(row, local.context) for row in rows))
            local = replace(local, later=later)

        # Move everything to the device at once, then plan there.
        local, later_contexts = to_device([local, later_contexts], self.device)
        return replace(local, plan=self._plan(local, later_contexts, batch.num_streams, methods))

    def _context(self, batch: Batch, trees: PrefixTrees, methods: Sequence[str]) -> CPContext:
        """Lay out these documents or tree nodes over the ranks, on the host."""
        return build_cp_context(
            torch.from_numpy(trees.edges),
            self.dims.cp_group,
            num_streams=batch.num_streams,
            layout=self.layout if self.dims.cp > 1 else "contiguous",
            conv1d_kernel_size=self.conv1d_kernel_size,
            programs=self.programs,
            stream_programs=self.stream_programs,
            attention=methods,
            parents=torch.from_numpy(trees.parents),
        )

    def _plan(
        self,
        local: LocalBatch,
        later_contexts: Sequence[CPContext],
        num_streams: int,
        methods: Sequence[str],
    ) -> BatchPlan:
        later = local.later
        if later_contexts:
            plans = [self._prepared(BatchPlan.of(x, num_streams)) for x in later_contexts]
            later = later._replace(of_trees=plans)
        pairs = 0.0
        if self.softmax:
            pairs = pairs_computed(local.context, next(iter(methods), "ring"))
        return self._prepared(
            BatchPlan.of(
                local.context, num_streams, pairs=pairs, later=later, branches=local.branches
            )
        )

    def _prepared(self, plan: BatchPlan) -> BatchPlan:
        """Compute the plan's rotary angles, which compiled layers then only read."""
        if self.compiled:
            plan.cp_context.mark_dynamic()
        plan.prepare(self.rotaries, widened(self.compute_dtype))
        return plan

    def methods(self, tokens: int, branches: bool = False) -> tuple[str, ...]:
        """Return the methods by which softmax layers communicate over cp ranks.

        There is one method, or several if the model has several kinds of softmax layers.
        The result is empty without softmax layers or if cp is 1.

        Args:
            tokens: number of tokens of a batch over all ranks.
            branches: whether the batch consists of prefix trees.
        """
        if self.dims.cp == 1:
            return ()
        if self.softmax_method != "auto":
            return (self.softmax_method,) if self.softmax else ()
        chosen = (
            choose_method(
                self.dims.cp,
                self.node_size,
                tokens,
                shape.query_heads,
                shape.key_heads,
                shape.width,
                self.compute_dtype,
                branches,
            )
            for shape in self.softmax
        )
        return tuple(dict.fromkeys(chosen))

    @property
    def node_size(self) -> int:
        """Number of cp ranks per node."""
        return ranks_per_node(self.dims.cp_group, self.dims.cp)

    def uneven(self, tokens: int) -> str | None:
        """Return the startup message if some ranks will wait for others, else None."""
        cp = self.dims.cp
        parts = {"allgather": cp, "ring": cp, "ulysses+ring": cp // self.node_size, "ulysses": 1}
        W = max((parts[method] for method in self.methods(tokens)), default=1)
        if self.layout != "contiguous" or W == 1:
            return None
        return (
            f"attention over contiguous fragments: of one document a rank computes {(2 * W - 1) / W:.2f} times "
            'the mean, and the others wait; parallelism.context_parallel_layout = "zigzag" shares it equally'
        )


def cut(batch: Batch, context: CPContext) -> LocalBatch:
    """Take this rank's fragments of tokens, labels and columns."""
    columns = {
        name: take_fragments(column, context)
        for name, column in batch.columns.items()
        if name not in (BACK, SHARE)
    }
    return LocalBatch(
        take_fragments(batch.tokens, context),
        take_fragments(batch.labels, context),
        columns,
        batch.streams,
        batch.num_documents,
        context,
    )


def later_of(batch: Batch, depth: int) -> Later:
    """Return the tokens, labels and weights k = 1 … depth positions later, [depth, T].

    The result covers the whole stream: later tokens may lie on any rank, so this runs
    before the cut.
    """
    bounds = batch.cu_seqlens.long()
    document_ends = bounds[1:].repeat_interleave(bounds.diff())  # [T]
    # Positions past the document's end read index 0 and are masked below.
    at = torch.arange(len(document_ends)) + torch.arange(1, depth + 1).unsqueeze(1)
    inside = at < document_ends
    at = at.where(inside, 0)
    return Later(
        batch.tokens[0, at].where(inside, 0),
        batch.labels[0, at].where(inside, IGNORE),
        batch.columns["weights"][0, at].where(inside, 0),
    )


def _programs(model: ModelConfig, ranks: int, device: torch.device) -> tuple[int, ...]:
    """Return the number of programs that scan one entry, for each kind of mixer.

    The result is empty without a GPU.

    Args:
        ranks: number of ranks that share the value heads.
    """
    if device.type != "cuda":
        return ()
    of = (mixer.scan_programs(ranks) for mixer in model.mixers)
    return tuple(dict.fromkeys(n for n in of if n is not None))


def _softmax_shapes(model: ModelConfig, tp: int) -> tuple[SoftmaxShape, ...]:
    shapes = []
    for mixer in model.mixers:
        if "attention" in mixer.ops:
            # Head counts of the queries, then of the keys if there are fewer.
            heads = [count // tp for count in mixer.head_counts.values()]
            width = sum(mixer.ops["attention"].values())
            shapes.append(SoftmaxShape(heads[0], heads[-1], width))
    return tuple(dict.fromkeys(shapes))
