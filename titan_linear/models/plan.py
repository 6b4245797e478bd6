"""Everything that mixers know about tokens besides their values.

There is one plan per batch, the same for every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_linear.models.rope import Rotary, inverse_frequencies
from titan_linear.ops import CPContext
from titan_linear.ops.layout.tables import to_device


class BatchPlan:
    """The documents of a packed stream, or of this rank's part of it; never modified.

    With neither `cu_seqlens` nor `cp_context`, each row of the batch is a separate sequence
    (generation). Training always has a `cp_context`: even on a single rank it holds the
    tables that every layer would otherwise derive again. This is not a dataclass, because
    FSDP searches dataclasses among a layer's inputs for tensors, and would walk through all
    documents.
    """

    def __init__(
        self,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        cp_context: CPContext | None = None,
        first_key: Tensor | None = None,
        num_streams: int = 1,
        pairs: float = 0.0,
        later: Later | None = None,
        branches: Tensor | None = None,
    ):
        """Hold the layout of a batch.

        Args:
            position_ids: [T] int64, positions within documents; or [B, T], different in
                each row.
            cu_seqlens: [N+1] int32.
            first_key: [B] int64, in token-by-token decoding: length of the padding before a
                row's keys in the cache.
            num_streams: number of streams of equal length, laid end to end.
            pairs: number of (query, key) pairs that this rank computes in a softmax layer,
                for metrics.
            later: targets of layers that predict further tokens.
            branches: [.] int64, for prefix trees: rows of logits that a loss reads again,
                behind the rows of all tokens.
        """
        self.position_ids = position_ids
        self.cu_seqlens = cu_seqlens
        self.cp_context = cp_context
        self.first_key = first_key
        self.num_streams = num_streams
        self.pairs = pairs
        self.later = later
        self.branches = branches
        self._angles: dict[tuple[Rotary, torch.dtype], tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, context: CPContext, num_streams: int, **more: Any) -> BatchPlan:
        """Build the plan of the tokens that a rank has under `context`."""
        return cls(context.position_ids, cp_context=context, num_streams=num_streams, **more)

    @property
    def documents(self) -> dict[str, object]:
        """Keyword arguments that tell an op where documents lie."""
        return (
            {"cp_context": self.cp_context}
            if self.cp_context is not None
            else {"cu_seqlens": self.cu_seqlens}
        )

    def angles(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [.., T, half] in `dtype`, computed on first request.

        Angles are computed in float64: in float32 the angle at position one million is off by
        0.03 rad.
        """
        if (rotary, dtype) not in self._angles:
            frequencies, factor = inverse_frequencies(*rotary, self.position_ids.device)
            angle = self.position_ids.double().unsqueeze(-1) * frequencies
            cos = (angle.cos() * factor).to(dtype)
            sin = (angle.sin() * factor).to(dtype)
            self._angles[rotary, dtype] = cos, sin
        return self._angles[rotary, dtype]

    def prepare(self, rotaries: Iterable[Rotary], dtype: torch.dtype) -> None:
        """Compute these angles in advance, so that compiled code only reads them."""
        for rotary in rotaries:
            self.angles(rotary, dtype)


class Later(NamedTuple):
    """The token k positions later in the same document, k = 1, 2, …

    Beyond the document's end, it is token 0 without a label.

    In prefix trees, several tokens may follow a token. Tokens, labels and weights are then
    not shifted. Instead, the hidden states are shifted to the next token on each path, k
    times. The documents lose their first k tokens; `of_trees` holds the plans of what
    remains.
    """

    tokens: Tensor  # [further tokens, T] int64
    # The same shape; for trees [further tokens, T + branches].
    labels: Tensor
    # As labels, float32.
    weights: Tensor
    of_trees: Sequence[BatchPlan] = ()


@dataclass(frozen=True, eq=False)
class Window:
    """The first W of a rank's tokens of a batch, in which telemetry looks at the mixers.

    Tokens outside are left out: documents begin and end at the window's edges.
    """

    plan: BatchPlan
    # The same with one more boundary, in the middle of the longest document.
    halves: BatchPlan
    # The longest document's tokens after this boundary.
    carried: slice
    # Under context parallelism, two plans of all the rank's tokens: the batch's plan, and a
    # plan in which nothing enters from other ranks.
    fragments: tuple[BatchPlan, BatchPlan] | None

    @classmethod
    def of(cls, plan: BatchPlan, tokens: int) -> Window:
        """Build the window of a training batch's plan."""
        # The longest document in the window, and a boundary in its middle.
        edges = np.unique(np.clip(plan.cp_context.cu_seqlens_cpu.numpy(), 0, tokens))  # int32
        longest = int(np.diff(edges).argmax())
        start, end = edges[longest : longest + 2].tolist()
        arrays = edges, np.insert(edges, longest + 1, (start + end + 1) // 2)
        moved = to_device([torch.from_numpy(x) for x in arrays], plan.position_ids.device)
        whole, halves = (BatchPlan(plan.position_ids[:tokens], cu_seqlens) for cu_seqlens in moved)
        # Without a context, nothing enters from other ranks.
        apart = BatchPlan(plan.position_ids, plan.cp_context.cu_seqlens)
        fragments = (plan, apart) if plan.cp_context.ranks.world_size > 1 else None
        return cls(whole, halves, slice((start + end + 1) // 2, end), fragments)

    @property
    def tokens(self) -> int:
        """Number of tokens, W."""
        return len(self.plan.position_ids)
