"""Cross-entropy of a long stream without its logits: the head and the loss go together, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from titan_linear.ops.collectives import Ranks, gather_along

IGNORE = -100  # the label that cross-entropy leaves out


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int, ranks: Ranks | None = None
) -> torch.Tensor:
    """Σ_t cross_entropy(x_t Wᵀ, label_t) over labels that are not −100, in float32 or wider.

    x [T, D], weight [vocab, D], labels [T] int64. At most [chunk, vocab] logits exist at a time: where gradients are
    wanted each chunk's are taken in forward, while its logits are there, so that backward only scales them.

    ranks: of those that share the vocabulary, each has vocab / size rows of W, in their order, and all have the same x
    and labels. Logits stay where they are. A rank's loss is that of the labels in its rows, and dx what its rows say:
    parts of sums over the ranks.
    """
    return _ChunkedCrossEntropy.apply(x, weight, labels, chunk, ranks, torch.is_grad_enabled())


def _logits(x: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """x Wᵀ accumulated and kept in `wide`: rounding logits of 10 to bfloat16 would cost 0.04 nats each."""
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, weight.T, out_dtype=wide)
    return x.to(wide) @ weight.T.to(wide)


def _log_softmax(logits: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """Of logits [chunk, vocab], or of the part [chunk, vocab / size] that this rank has, in their place."""
    if ranks is None:
        return F.log_softmax(logits, -1)
    own = logits.logsumexp(-1, keepdim=True)  # [chunk, 1]
    of_all = gather_along(own.unsqueeze(0), 0, ranks.group, ranks.size)  # [size, chunk, 1]
    return logits.sub_(of_all.logsumexp(0))


def _own_labels(labels: torch.Tensor, rows: int, ranks: Ranks | None) -> torch.Tensor:
    """Labels as rows of this rank's part of the vocabulary; −100 for those in other ranks' parts."""
    if ranks is None:
        return labels
    own = labels - ranks.rank * rows
    return own.masked_fill((own < 0) | (own >= rows), IGNORE)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int, ranks: Ranks | None,
        grad_enabled: bool,
    ) -> torch.Tensor:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=wide)
        wants_grad = grad_enabled and any(ctx.needs_input_grad[:2])  # what inputs need, they need under no_grad too
        dx = torch.empty_like(x) if wants_grad else None
        dweight = torch.zeros_like(weight, dtype=wide) if wants_grad else None
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            target = _own_labels(labels[rows], len(weight), ranks)
            log_p = _log_softmax(_logits(x[rows], weight, wide), ranks)  # [chunk, vocab]
            total += F.nll_loss(log_p, target, ignore_index=IGNORE, reduction="sum")
            if wants_grad:
                d = log_p.exp_()
                d[torch.arange(len(d), device=d.device), target.clamp(min=0)] -= (target != IGNORE).to(wide)
                d = (d * (labels[rows] != IGNORE).unsqueeze(-1)).to(x.dtype)
                dx[rows] = d @ weight
                dweight += d.T @ x[rows]
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return (dx * scale).to(dx.dtype), (dweight * scale).to(ctx.weight_dtype), None, None, None, None
