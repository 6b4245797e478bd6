"""Cross-entropy of a long stream without its logits: the head and the loss go together, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORE = -100  # the label that cross-entropy leaves out


def chunked_cross_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Σ_t cross_entropy(x_t Wᵀ, label_t) over labels that are not −100, in float32 or wider.

    x [T, D], weight [vocab, D], labels [T] int64. At most [chunk, vocab] logits exist at a time: where gradients are
    wanted each chunk's are taken in forward, while its logits are there, so that backward only scales them.
    """
    return _ChunkedCrossEntropy.apply(x, weight, labels, chunk, torch.is_grad_enabled())


def _logits(x: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """x Wᵀ accumulated and kept in `wide`: rounding logits of 10 to bfloat16 would cost 0.04 nats each."""
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, weight.T, out_dtype=wide)
    return x.to(wide) @ weight.T.to(wide)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int, grad_enabled: bool
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=wide)
        wants_grad = grad_enabled and any(ctx.needs_input_grad[:2])  # what inputs need, they need under no_grad too
        dx = torch.empty_like(x) if wants_grad else None
        dweight = torch.zeros_like(weight, dtype=wide) if wants_grad else None
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits, target = _logits(x[rows], weight, wide), labels[rows]  # [chunk, vocab]
            log_p = F.log_softmax(logits, -1)
            total += F.nll_loss(log_p, target, ignore_index=IGNORE, reduction="sum")
            if wants_grad:
                counts = target != IGNORE
                d = log_p.exp_()
                d[torch.arange(len(d), device=d.device), target.clamp(min=0)] -= 1
                d = (d * counts.unsqueeze(-1)).to(x.dtype)
                dx[rows] = d @ weight
                dweight += d.T @ x[rows]
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return (dx * scale).to(dx.dtype), (dweight * scale).to(ctx.weight_dtype), None, None, None
