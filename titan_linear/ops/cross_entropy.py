"""Cross-entropy of a long stream without all its logits: head and loss are computed together, a chunk of tokens at a
time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import Ranks, gather_along
from titan_linear.ops.runtime.operators import check_first_derivative
from titan_linear.ops.runtime.support import Choice, Op
from titan_linear.ops.triton.configs import with_kernels

IGNORE = -100  # the label that cross-entropy leaves out
ELSEWHERE = -1  # a label in another rank's part of the vocabulary


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    ranks: Ranks | None = None,
    token_losses: Tensor | None = None,
    impl: str | Choice = "auto",
) -> Tensor:
    """Σ_t cross_entropy(x_t Wᵀ, label_t) over labels that are not −100, in float32 or wider.

    x [T, D], weight [vocab, D], labels [T] int64. At most [chunk, vocab] logits exist at a time: if gradients are
    wanted, each chunk's are computed in forward, while its logits exist, so that backward only scales them.

    ranks: those that share the vocabulary. Each has vocab / size rows of W, in rank order, and all have the same x and
    labels. Logits are not exchanged. A rank's loss is that of the labels in its rows, and its dx is what its rows
    contribute: both are terms of sums over the ranks.

    token_losses: [T], receives the terms of the sum, with zeros where there is no label (in these rows).

    impl: "torch", "triton", or "auto" (ops/runtime/support.py).
    """
    name = CROSS_ENTROPY.implementation(impl, x.device, x.dtype)
    return _ChunkedCrossEntropy.apply(x, weight, labels, chunk, ranks, token_losses, name, torch.is_grad_enabled())


def _triton() -> Any:
    from titan_linear.ops.triton import cross_entropy  # there is Triton only on Linux

    return cross_entropy.row_logsumexp, cross_entropy.softmax_gradient


def _row_logsumexp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def _softmax_gradient(logits: Tensor, lse: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient with respect to the logits, which it overwrites."""
    d = logits.sub_(lse.unsqueeze(-1)).exp_()
    d[torch.arange(len(d), device=d.device), target.clamp(min=0)] -= (target >= 0).to(d.dtype)
    return d.mul_((target != IGNORE).unsqueeze(-1)).to(dtype)


# The dtype of the choice is that of the hidden states; logits are wider.
CROSS_ENTROPY = Op("cross_entropy", with_kernels(_triton, lambda: (_row_logsumexp, _softmax_gradient), slower="slower"))


def _logits(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """x Wᵀ accumulated and kept in `wide`: rounding logits of 10 to bfloat16 would cost 0.04 nats each."""
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, weight.T, out_dtype=wide)
    return x.to(wide) @ weight.T.to(wide)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's dtype."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _of_all(lse: Tensor, ranks: Ranks | None) -> Tensor:
    """Log-sum-exps [chunk] over the whole vocabulary, from those of the part that this rank has."""
    if ranks is None:
        return lse
    return gather_along(lse.unsqueeze(0), 0, ranks.group, ranks.size).logsumexp(0)


def _own_labels(labels: Tensor, rows: int, ranks: Ranks | None) -> Tensor:
    """Labels as rows of this rank's part of the vocabulary; −1 for those in other ranks' parts."""
    if ranks is None:
        return labels
    own = labels - ranks.rank * rows
    return own.masked_fill((own < 0) | (own >= rows), ELSEWHERE).where(labels != IGNORE, IGNORE)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        ranks: Ranks | None,
        token_losses: Tensor | None,
        name: str,
        grad_enabled: bool,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        row_logsumexp, softmax_gradient = CROSS_ENTROPY.load(name)
        total = x.new_zeros((), dtype=wide)
        wants_grad = grad_enabled and any(ctx.needs_input_grad[:2])  # needs_input_grad ignores no_grad
        dx = torch.empty_like(x) if wants_grad else None
        of_weight = wants_grad and ctx.needs_input_grad[1]
        dweight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(x[rows], weight, wide)
            target = _own_labels(labels[rows], len(weight), ranks)
            lse = _of_all(row_logsumexp(logits), ranks)
            of_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
            losses = (lse - of_target).masked_fill_(target < 0, 0)
            total += losses.sum()
            if token_losses is not None:
                token_losses[rows] = losses
            if wants_grad:
                d = softmax_gradient(logits, lse, target, x.dtype)  # [chunk, vocab]
                torch.mm(d, weight, out=dx[rows])
            if of_weight:
                _add_product(dweight, d.T, x[rows])
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight.dtype
        # Not total itself: torch 2.11's compiler drops its gradient (ops/recurrence.py). No view: FSDP2 warns of one.
        return total.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        dx, dweight = ctx.saved_tensors
        if dweight is not None:
            # Rounded while it is written: the product on its own would be another [vocab, D] in float32.
            dweight = torch.mul(dweight, scale, out=torch.empty_like(dweight, dtype=ctx.weight_dtype))
        return (dx * scale).to(dx.dtype), dweight, None, None, None, None, None, None
