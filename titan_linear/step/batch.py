"""From a data-parallel rank's batch to the tokens of it that this rank computes, and their plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_linear.data import Batch
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import widened
from titan_linear.models.plan import BatchPlan, Rotary
from titan_linear.ops import build_cp_context
from titan_linear.ops.attention import choose_method, pairs_computed
from titan_linear.ops.layout.context import ranks_per_node
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
    programs: tuple[int, ...]  # of each kind of delta rule's scan over a rank's tokens, where scans are kernels
    stream_programs: tuple[int, ...] | None  # likewise over the whole stream, where ranks share heads; None: no scan
    softmax: tuple[tuple[int, int, int], ...]  # Hq, Hkv and D + Dv on a rank of tp, for each kind of softmax layer

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
        needs = [mixer.ops for mixer in model.mixers]
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
            softmax=_softmax(model, dims.tp),
        )

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, BatchPlan]:
        """This rank's tokens [1, T_local], labels [1, T_local] and their plan. Labels were shifted before the cut."""
        methods = self.methods(batch.tokens.shape[1])
        context = build_cp_context(
            batch.cu_seqlens,
            self.dims.cp_group,
            num_streams=batch.num_streams,
            layout=self.layout if self.dims.cp > 1 else "contiguous",
            conv1d_kernel_size=self.conv1d_kernel_size,
            device=self.device,
            programs=self.programs,
            stream_programs=self.stream_programs,
            attention=methods,
        )
        if self.compiled:
            context.mark_dynamic()
        mine = [slice(start, end) for start, end in context.fragments]
        local = {"tokens": batch.tokens, "labels": batch.labels}
        if self.dims.cp > 1:
            local = {name: torch.cat([x[:, f] for f in mine], 1) for name, x in local.items()}
        moved = to_device(local, self.device)
        plan = BatchPlan(
            context.position_ids,
            cp_context=context,
            num_streams=batch.num_streams,
            pairs=pairs_computed(context, next(iter(methods), "ring")) if self.softmax else 0.0,
        )
        plan.prepare(self.rotaries, widened(self.compute_dtype))
        return moved["tokens"], moved["labels"], plan

    def methods(self, tokens: int) -> tuple[str, ...]:
        """How softmax layers communicate in batches of this many tokens over all ranks: one method, or several if
        layers are of several kinds; none without such layers, or if cp is 1."""
        if self.dims.cp == 1:
            return ()
        if self.softmax_method != "auto":
            return (self.softmax_method,) if self.softmax else ()
        ranks = self.dims.cp, self.node_size
        chosen = (choose_method(*ranks, tokens, *sizes, self.compute_dtype) for sizes in self.softmax)
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


def _programs(model: ModelConfig, ranks: int, device: torch.device) -> tuple[int, ...]:
    """Programs of one entry's scan, for each kind of delta rule; none without a GPU. ranks: those that share the value
    heads."""
    if device.type != "cuda":
        return ()
    of = (mixer.scan_programs(ranks) for mixer in model.mixers)
    return tuple(dict.fromkeys(n for n in of if n is not None))


def _softmax(model: ModelConfig, tp: int) -> tuple[tuple[int, int, int], ...]:
    sizes = []
    for mixer in model.mixers:
        if "attention" in mixer.ops:
            heads = [count // tp for count in mixer.head_counts.values()]  # of queries, then of keys if these are fewer
            sizes.append((heads[0], heads[-1], sum(mixer.ops["attention"].values())))
    return tuple(dict.fromkeys(sizes))
