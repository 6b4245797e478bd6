"""Losses of a long stream without all its logits.

The head and the loss are computed together, one chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.exchange.collectives import Ranks, gather_along
from titan_linear.ops.runtime.operators import check_first_derivative
from titan_linear.ops.runtime.support import Choice, Op
from titan_linear.ops.triton.configs import with_kernels

IGNORE = -100  # label of tokens that losses leave out
ELSEWHERE = -1  # stands for an id in another rank's part of the vocabulary


def tokens_at_once(chunk: int, rows: int) -> int:
    """Return the number of tokens per chunk: `chunk`, or a default if it is 0.

    The default for a vocabulary of `rows` rows is 2,048 tokens, or more as long as a chunk
    has at most 2²⁸ logits: small chunks take the host longer than the device.
    """
    return chunk or max(2048, 1 << (2**28 // rows).bit_length() - 1)


class LogitStatistics(NamedTuple):
    """Per-token statistics of the logits z [n, vocab], which the terms of a loss read."""

    picked: Tensor  # [n, k]: z of each token's ids, the label first
    lse: Tensor  # [n]: log Σ exp z
    mean: Tensor | None  # [n]: mean of z, if requested
    entropy: Tensor | None  # [n]: entropy of softmax z, if requested; without a gradient
    # [n, vocab]: this rank's part of z, without a gradient, valid only during the call
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the ids [n, k]."""
        return self.picked - self.lse.unsqueeze(1)


# Returns the terms of a slice of tokens: [n], or [n, m], of which only the first column is
# a loss.
Terms = Callable[[LogitStatistics, slice], Tensor]


class Sum(NamedTuple):
    """One sum over tokens: hidden states, ids, and the terms to add up."""

    x: Tensor  # [T, D]
    ids: Tensor  # [T, k]
    terms: Terms
    statistics: bool = False  # whether rows have mean and entropy
    token_losses: Tensor | None = None
    rows: LogitStatistics | None = None  # rows of all tokens, if they have been computed already


@dataclass(frozen=True, eq=False)
class ChunkedLogits:
    """The logits x Wᵀ, of which at most [chunk, vocab] exist at a time.

    Args:
        x: [T, D] hidden states.
        weight: [vocab, D], or this rank's vocab / size rows of it.
        chunk: tokens per chunk; 0: `tokens_at_once` chooses.
        ranks: the ranks that share the vocabulary, with the rows of W in rank order; all
            have the same x and ids. Logits are not exchanged. Only the first rank's sums
            are non-zero and count for all ranks. Each rank's dx is the contribution of its
            rows. Both must be summed over the ranks.
        token_losses: [≤ T], receives −log p of each label, and zero where a token has no
            label (and on all ranks but the first).
        impl: "torch", "triton", or "auto" (ops/runtime/support.py).
        more: sums over other hidden states. `sum` computes their gradients, in the same
            memory, but does not return their values. (A loss calls `sum` with gradients
            once.)
    """

    x: Tensor
    weight: Tensor
    chunk: int
    ranks: Ranks | None = None
    token_losses: Tensor | None = None
    impl: str | Choice = "auto"
    more: tuple[Sum, ...] = ()

    def sum(
        self,
        ids: Tensor,
        terms: Terms,
        statistics: bool = False,
        rows: LogitStatistics | None = None,
    ) -> Tensor:
        """Sum the terms of all tokens that have a label, in float32 or wider.

        The terms are differentiated as functions of `LogitStatistics`. If gradients are wanted,
        forward computes each chunk's gradients while its logits exist, so that backward
        only scales them.

        Args:
            ids: [T] or [T, k]: the label (−100: none), then other ids whose logits the
                terms read.
            statistics: whether rows have mean and entropy.
            rows: result of the method `rows` for these ids, so that the statistics are not
                computed from the logits again.
        """
        name = CROSS_ENTROPY.implementation(self.impl, self.x.device, self.x.dtype)
        own = Sum(self.x, ids.view(len(ids), -1), terms, statistics, self.token_losses, rows)
        sums = (own, *self.more) if torch.is_grad_enabled() else (own,)
        states = (of.x for of in sums)
        return _ChunkedSum.apply(self.weight, self, sums, name, torch.is_grad_enabled(), *states)

    @torch.no_grad()
    def rows(self, ids: Tensor, statistics: bool = False) -> LogitStatistics:
        """Return the `LogitStatistics` of all tokens, without logits and gradients.

        They are the same numbers that `sum` passes to the terms.
        """
        parts = []

        def keep(rows: LogitStatistics, tokens: slice) -> Tensor:
            parts.append(rows[:4])
            return rows.lse

        replace(self, token_losses=None).sum(ids, keep, statistics)
        return LogitStatistics(
            *(None if part[0] is None else torch.cat(part) for part in zip(*parts)),
            logits=ids.new_empty(0),
        )

    @torch.no_grad()
    def top(self, ids: Tensor, k: int, vocab_size: int) -> tuple[Tensor, ...]:
        """Return log-probabilities of ids, and the k most likely ids of each token.

        Returns:
            log p of `ids` (undefined where an id is negative), in the shape of `ids`; then
            [T, k] int32 ids below `vocab_size`, the most likely first; and their
            log-probabilities [T, k].
        """
        parts = []
        before = self.ranks.rank * len(self.weight) if self.ranks else 0

        def keep(rows: LogitStatistics, tokens: slice) -> Tensor:
            # Padding of the vocabulary must not be among the most likely ids.
            rows.logits[:, max(vocab_size - before, 0) :] = float("-inf")
            picked, its_ids = largest(rows.logits, min(k, len(self.weight)))
            # Each rank finds its k best; the best of all ranks' candidates follow from
            # these.
            if self.ranks:
                of_ranks = picked, its_ids + before
                of_ranks = (
                    gather_along(x.unsqueeze(0), 0, self.ranks.group, self.ranks.size)
                    for x in of_ranks
                )
                # [chunk, size · k]
                of_all, its_ids = (x.transpose(0, 1).flatten(1) for x in of_ranks)
                picked, places = of_all.topk(k)
                its_ids = its_ids.gather(1, places)
            parts.append(
                (rows.logprobs.view_as(ids[tokens]), its_ids.int(), picked - rows.lse.unsqueeze(1))
            )
            return rows.lse

        self.sum(ids, keep)
        return tuple(map(torch.cat, zip(*parts)))


def largest(x: Tensor, k: int, block: int = 128) -> tuple[Tensor, Tensor]:
    """Return `x.topk(k)` of x [n, m], faster than torch.topk, which reads x several times.

    The k largest numbers lie in the k blocks with the largest maxima, or in the remainder
    after the last full block.
    """
    n, m = x.shape
    whole = m // block * block
    if whole <= 4 * k * block:
        return x.topk(k)
    blocks = x[:, :whole].unflatten(1, (-1, block)).amax(2).topk(k).indices
    ids = (blocks.unsqueeze(2) * block + torch.arange(block, device=x.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, m, device=x.device).expand(n, -1)], 1)
    values, places = x.gather(1, ids).topk(k)
    return values, ids.gather(1, places)


def cross_entropy(rows: LogitStatistics, tokens: slice) -> Tensor:
    return rows.lse - rows.picked[:, 0]


def weighted(factor: float, weights: Tensor, rows: LogitStatistics, tokens: slice) -> Tensor:
    return factor * weights[tokens].to(rows.lse.dtype) * cross_entropy(rows, tokens)


def _triton() -> Any:
    from titan_linear.ops.triton import cross_entropy  # Triton is available on Linux only

    return cross_entropy.row_statistics, cross_entropy.logits_gradient


def _row_statistics(logits: Tensor, more: bool) -> Tensor:
    """Return the log-sum-exp of each row: [1, n].

    With `more`, add the row's mean and its mean under softmax: [3, n].
    """
    lse = logits.logsumexp(-1)
    if not more:
        return lse.unsqueeze(0)
    return torch.stack([lse, logits.mean(-1), (logits.softmax(-1) * logits).sum(-1)])


def _logits_gradient(
    d: Tensor,
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    a: Tensor,
    b: Tensor | None,
    c: Tensor,
) -> None:
    """Write d = a · softmax + b, plus c in the target's column; a, b and c are [n].

    Overwrites the logits. `d` may be the same tensor as `logits`.
    """
    logits.sub_(lse.unsqueeze(-1)).exp_().mul_(a.unsqueeze(-1))
    logits[torch.arange(len(d), device=d.device), target.clamp(min=0)] += c.where(target >= 0, 0)
    d.copy_(logits if b is None else logits.add_(b.unsqueeze(-1)))


# Implementations are chosen by the dtype of the hidden states; logits are wider.
CROSS_ENTROPY = Op(
    "cross_entropy",
    with_kernels(_triton, lambda: (_row_statistics, _logits_gradient), slower="slower"),
)


def _logits(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """Compute x Wᵀ, accumulated and kept in `wide`.

    Rounding logits of 10 to bfloat16 would cost 0.04 nats each.
    """
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, weight.T, out_dtype=wide)
    return x.to(wide) @ weight.T.to(wide)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b in total's dtype."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _of_all(
    statistics: Tensor, picked: Tensor, logits: Tensor, ranks: Ranks | None
) -> LogitStatistics:
    """Return rows over the whole vocabulary from the statistics [1 or 3, n] and picked
    [n, k] of this rank's part of it.
    """
    if ranks is None:
        lse, *means = statistics
    else:
        parts = gather_along(
            torch.cat([statistics, picked.T]).unsqueeze(0), 0, ranks.group, ranks.size
        )
        lse = parts[:, 0].logsumexp(0)
        picked = parts[:, len(statistics) :].sum(0).T
        # [size, n]: each rank's share of the probability.
        shares = torch.exp(parts[:, 0] - lse)
        means = [parts[:, 1].mean(0), (parts[:, 2] * shares).sum(0)] if len(statistics) > 1 else []
    mean, entropy = (means[0], lse - means[1]) if means else (None, None)
    return LogitStatistics(picked, lse, mean, entropy, logits)


def _own_ids(ids: Tensor, rows: int, ranks: Ranks | None) -> Tensor:
    """Turn ids into row numbers of this rank's part of the vocabulary.

    Ids of other ranks' parts become −1.
    """
    if ranks is None:
        return ids
    own = ids - ranks.rank * rows
    return own.masked_fill((own < 0) | (own >= rows), ELSEWHERE).where(ids != IGNORE, IGNORE)


def _differentiated(
    terms: Terms, rows: LogitStatistics, tokens: slice, none: Tensor, wanted: bool
) -> tuple[Tensor, LogitStatistics | None]:
    """Return the terms of a chunk, zero where `none` [n] is set, and the derivatives of
    their sum.
    """
    leaves = {
        name: x.detach().requires_grad_(wanted)
        for name, x in (("picked", rows.picked), ("lse", rows.lse), ("mean", rows.mean))
        if x is not None
    }
    # With a separate autograd thread the host would be busy twice as long.
    with torch.set_grad_enabled(wanted), torch.autograd.set_multithreading_enabled(False):
        values = terms(rows._replace(**leaves), tokens)
        values = values.masked_fill(none.view(-1, *[1] * (values.dim() - 1)), 0)
        loss = values.view(len(none), -1)[:, 0].sum()
        if not wanted:
            return values, None
        grads = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return values.detach(), rows._replace(**dict(zip(leaves, grads, strict=True)))


def _summed(
    of: Sum,
    dx: Tensor | None,
    dweight: Tensor | None,
    weight: Tensor,
    head: ChunkedLogits,
    name: str,
) -> Tensor:
    """Return a sum over tokens.

    If gradients are wanted, write the gradient of x to `dx`, and add the gradient of the
    weight to `dweight`.
    """
    x = of.x
    ids = of.ids
    wide = torch.promote_types(x.dtype, torch.float32)
    row_statistics, logits_gradient = CROSS_ENTROPY.load(name)
    total = x.new_zeros((), dtype=wide)
    counts = head.ranks is None or head.ranks.rank == 0
    chunk = tokens_at_once(head.chunk, len(weight))
    for start in range(0, len(x), chunk):
        tokens = slice(start, start + chunk)
        # Compute the chunk's logits, and their statistics unless these are given.
        logits = _logits(x[tokens], weight, wide)
        target = _own_ids(ids[tokens].long(), len(weight), head.ranks)
        if of.rows is None:
            picked = logits.gather(1, target.clamp(min=0)).masked_fill_(target < 0, 0)
            rows = _of_all(row_statistics(logits, of.statistics), picked, logits, head.ranks)
        else:
            rows = LogitStatistics(
                *(x if x is None else x[tokens] for x in of.rows[:4]), logits=logits
            )
        # Evaluate the terms, and differentiate them with respect to the statistics.
        none = ids[tokens, 0] == IGNORE
        values, by = _differentiated(of.terms, rows, tokens, none, dx is not None)
        total = total + values.sum(0) * counts
        if of.token_losses is not None and counts:
            # x may have more rows than `token_losses`.
            into = of.token_losses[tokens]
            into.copy_(cross_entropy(rows, tokens).masked_fill(none, 0)[: len(into)])
        # Turn the derivatives into the logits' gradient, then into gradients of x and of
        # the weight.
        if dx is not None:
            vocab_size = len(weight) * (head.ranks.size if head.ranks else 1)
            b = None if by.mean is None else by.mean / vocab_size
            # With several ids, gradients are added up before they are rounded, in the
            # logits' memory.
            d = torch.empty_like(logits, dtype=x.dtype) if target.shape[1] == 1 else logits
            logits_gradient(d, logits, rows.lse, target[:, 0], by.lse, b, by.picked[:, 0])
            if target.shape[1] > 1:
                others = target[:, 1:]
                d.scatter_add_(1, others.clamp(min=0), by.picked[:, 1:].where(others >= 0, 0))
            d = d.to(x.dtype)  # [chunk, vocab]
            torch.mm(d, weight, out=dx[tokens])
            if dweight is not None:
                _add_product(dweight, d.T, x[tokens])
            del d
        del logits, rows  # free them before the next chunk allocates its logits
    return total


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        head: ChunkedLogits,
        sums: tuple[Sum, ...],
        name: str,
        grad_enabled: bool,
        *states: Tensor,
    ) -> Tensor:
        # needs_input_grad ignores no_grad.
        wants_grad = grad_enabled and any(ctx.needs_input_grad)
        of_weight = wants_grad and ctx.needs_input_grad[0]
        wide = torch.promote_types(states[0].dtype, torch.float32)
        # All sums add to one gradient of the weight.
        dweight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        dx = [torch.empty_like(x) if wants_grad else None for x in states]
        totals = [_summed(of, d, dweight, weight, head, name) for of, d in zip(sums, dx)]
        ctx.save_for_backward(dweight, *dx)
        ctx.weight_dtype = weight.dtype
        # A clone, because torch 2.11's compiler drops the gradient of the total itself
        # (ops/recurrence.py), and FSDP2 warns about a view.
        return totals[0].clone()

    @staticmethod
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        dweight, *dx = ctx.saved_tensors
        scale = scales.flatten()[0]
        if dweight is not None:
            # Round while writing: a separate product would be another [vocab, D] in
            # float32.
            dweight = torch.mul(
                dweight, scale, out=torch.empty_like(dweight, dtype=ctx.weight_dtype)
            )
        return dweight, None, None, None, None, *((d * scale).to(d.dtype) for d in dx)
