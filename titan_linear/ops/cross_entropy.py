"""Losses of a long stream without all its logits: head and loss are computed together, a chunk of tokens at a time."""

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

IGNORE = -100  # the label that losses leave out
ELSEWHERE = -1  # an id in another rank's part of the vocabulary


def tokens_at_once(chunk: int, rows: int) -> int:
    """`chunk`; if 0, of this many rows of the vocabulary, 2,048, or more up to 2²⁸ logits: small chunks take the host
    longer than the device."""
    return chunk or max(2048, 1 << (2**28 // rows).bit_length() - 1)


class Rows(NamedTuple):
    """What a loss may know of the logits z of some tokens, [n, vocab]."""

    picked: Tensor  # [n, k] z of each token's ids, its label first
    lse: Tensor  # [n] log Σ exp z
    mean: Tensor | None  # [n] of z, if asked for
    entropy: Tensor | None  # [n] of softmax z, likewise; it has no gradient
    # [n, vocab], this rank's part; they have none either, and are there for the call
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """[n, k]"""
        return self.picked - self.lse.unsqueeze(1)


# The terms of tokens [n] of a sum; or [n, m], of which only the first is a loss.
Terms = Callable[[Rows, slice], Tensor]


class Sum(NamedTuple):
    """A sum over tokens."""

    x: Tensor  # [T, D]
    ids: Tensor  # [T, k]
    terms: Terms
    statistics: bool = False  # rows have mean and entropy
    token_losses: Tensor | None = None
    rows: Rows | None = None  # of all tokens, where they are known


@dataclass(frozen=True, eq=False)
class ChunkedLogits:
    """x Wᵀ, of which at most [chunk, vocab] exist at a time (0: `tokens_at_once`). x [T, D], weight [vocab, D].

    ranks: those that share the vocabulary. Each has vocab / size rows of W, in rank order, and all have the same x and
    ids. Logits are not exchanged. The first rank's sums are those of all; a rank's dx is what its rows contribute: both
    are terms of sums over the ranks.
    token_losses: [≤ T], receives each label's −log p, with zeros where there is none (and on ranks but the first).
    impl: "torch", "triton", or "auto" (ops/runtime/support.py).
    more: of other hidden states. `sum` has their gradients, in the same memory, and not their values. (A loss takes one
    sum with gradients.)
    """

    x: Tensor
    weight: Tensor
    chunk: int
    ranks: Ranks | None = None
    token_losses: Tensor | None = None
    impl: str | Choice = "auto"
    more: tuple[Sum, ...] = ()

    def sum(
        self, ids: Tensor, terms: Terms, statistics: bool = False, rows: Rows | None = None
    ) -> Tensor:
        """Σ_t of the terms of tokens with a label, in float32 or wider; they are differentiated as functions of `Rows`.

        ids [T] or [T, k]: the label (−100: none), then others, whose logits the terms read. If gradients are
        wanted, each chunk's are computed in forward, while its logits exist, so that backward only scales them.
        statistics: rows have mean and entropy. rows: what `rows` gave of these ids, so that logits need not be read for
        it again.
        """
        name = CROSS_ENTROPY.implementation(self.impl, self.x.device, self.x.dtype)
        own = Sum(self.x, ids.view(len(ids), -1), terms, statistics, self.token_losses, rows)
        sums = (own, *self.more) if torch.is_grad_enabled() else (own,)
        states = (of.x for of in sums)
        return _ChunkedSum.apply(self.weight, self, sums, name, torch.is_grad_enabled(), *states)

    @torch.no_grad()
    def rows(self, ids: Tensor, statistics: bool = False) -> Rows:
        """Of all tokens, as the terms of `sum` have them of some, without logits and gradients."""
        parts = []

        def keep(rows: Rows, tokens: slice) -> Tensor:
            parts.append(rows[:4])
            return rows.lse

        replace(self, token_losses=None).sum(ids, keep, statistics)
        return Rows(
            *(None if part[0] is None else torch.cat(part) for part in zip(*parts)),
            logits=ids.new_empty(0),
        )

    @torch.no_grad()
    def top(self, ids: Tensor, k: int, vocab_size: int) -> tuple[Tensor, ...]:
        """log p of ids, as of `sum`, where these are none anything; and the k likeliest ids below `vocab_size` of each
        token and their log-probabilities, [T, k] each, the likeliest first."""
        parts = []
        before = self.ranks.rank * len(self.weight) if self.ranks else 0

        def keep(rows: Rows, tokens: slice) -> Tensor:
            rows.logits[:, max(vocab_size - before, 0) :] = float("-inf")
            picked, its_ids = largest(rows.logits, min(k, len(self.weight)))
            if self.ranks:
                of_ranks = (picked, its_ids + before)
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
    """`x.topk(k)` of x [n, m]: they lie in the k blocks whose maxima are the largest, or behind the whole blocks. topk
    itself reads all of x several times."""
    n, m = x.shape
    whole = m // block * block
    if whole <= 4 * k * block:
        return x.topk(k)
    blocks = x[:, :whole].unflatten(1, (-1, block)).amax(2).topk(k).indices
    ids = (blocks.unsqueeze(2) * block + torch.arange(block, device=x.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, m, device=x.device).expand(n, -1)], 1)
    values, places = x.gather(1, ids).topk(k)
    return values, ids.gather(1, places)


def cross_entropy(rows: Rows, tokens: slice) -> Tensor:
    return rows.lse - rows.picked[:, 0]


def weighted(factor: float, weights: Tensor, rows: Rows, tokens: slice) -> Tensor:
    return factor * weights[tokens].to(rows.lse.dtype) * cross_entropy(rows, tokens)


def _triton() -> Any:
    from titan_linear.ops.triton import cross_entropy  # there is Triton only on Linux

    return cross_entropy.row_statistics, cross_entropy.logits_gradient


def _row_statistics(logits: Tensor, more: bool) -> Tensor:
    """Log-sum-exp of each row; with `more` also its mean, and its mean under softmax: [1 or 3, n]."""
    lse = logits.logsumexp(-1)
    if not more:
        return lse.unsqueeze(0)
    return torch.stack([lse, logits.mean(-1), (logits.softmax(-1) * logits).sum(-1)])


def _logits_gradient(
    d: Tensor, logits: Tensor, lse: Tensor, target: Tensor, a: Tensor, b: Tensor | None, c: Tensor
) -> None:
    """d: a softmax + b, and c more in the target's column; overwrites the logits, which d may be. a, b, c [n]."""
    logits.sub_(lse.unsqueeze(-1)).exp_().mul_(a.unsqueeze(-1))
    logits[torch.arange(len(d), device=d.device), target.clamp(min=0)] += c.where(target >= 0, 0)
    d.copy_(logits if b is None else logits.add_(b.unsqueeze(-1)))


# The dtype of the choice is that of the hidden states; logits are wider.
CROSS_ENTROPY = Op(
    "cross_entropy",
    with_kernels(_triton, lambda: (_row_statistics, _logits_gradient), slower="slower"),
)


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


def _of_all(statistics: Tensor, picked: Tensor, logits: Tensor, ranks: Ranks | None) -> Rows:
    """Rows over the whole vocabulary. statistics [1 or 3, n], picked [n, k]: of the part that this rank has."""
    if ranks is None:
        lse, *means = statistics
    else:
        parts = gather_along(
            torch.cat([statistics, picked.T]).unsqueeze(0), 0, ranks.group, ranks.size
        )
        lse = parts[:, 0].logsumexp(0)
        picked = parts[:, len(statistics) :].sum(0).T
        shares = torch.exp(parts[:, 0] - lse)  # of the probability, [size, n]
        means = [parts[:, 1].mean(0), (parts[:, 2] * shares).sum(0)] if len(statistics) > 1 else []
    mean, entropy = (means[0], lse - means[1]) if means else (None, None)
    return Rows(picked, lse, mean, entropy, logits)


def _own_ids(ids: Tensor, rows: int, ranks: Ranks | None) -> Tensor:
    """Ids as rows of this rank's part of the vocabulary; −1 for those in other ranks' parts."""
    if ranks is None:
        return ids
    own = ids - ranks.rank * rows
    return own.masked_fill((own < 0) | (own >= rows), ELSEWHERE).where(ids != IGNORE, IGNORE)


def _differentiated(
    terms: Terms, rows: Rows, tokens: slice, none: Tensor, wanted: bool
) -> tuple[Tensor, Rows | None]:
    """The terms of a chunk, zero where `none` [n], and the derivatives of their sum."""
    leaves = [x if x is None else x.detach().requires_grad_(wanted) for x in rows[:3]]
    # On a thread of its own, autograd would keep the host busy twice as long.
    with torch.set_grad_enabled(wanted), torch.autograd.set_multithreading_enabled(False):
        values = terms(Rows(*[*leaves, *rows[3:]]), tokens)
        values = values.masked_fill(none.view(-1, *[1] * (values.dim() - 1)), 0)
        loss = values.view(len(none), -1)[:, 0].sum()
        if not wanted:
            return values, None
        of = [x for x in leaves if x is not None]
        picked, lse, mean, *_ = *torch.autograd.grad(loss, of, materialize_grads=True), None
    return values.detach(), rows._replace(picked=picked, lse=lse, mean=mean)


def _summed(
    of: Sum,
    dx: Tensor | None,
    dweight: Tensor | None,
    weight: Tensor,
    head: ChunkedLogits,
    name: str,
) -> Tensor:
    """A sum, and its gradients: of x in `dx`, of the weight added to `dweight`, where they are wanted."""
    x, ids = of.x, of.ids
    wide = torch.promote_types(x.dtype, torch.float32)
    row_statistics, logits_gradient = CROSS_ENTROPY.load(name)
    total = x.new_zeros((), dtype=wide)
    counts = head.ranks is None or head.ranks.rank == 0
    chunk = tokens_at_once(head.chunk, len(weight))
    for start in range(0, len(x), chunk):
        tokens = slice(start, start + chunk)
        logits = _logits(x[tokens], weight, wide)
        target = _own_ids(ids[tokens].long(), len(weight), head.ranks)
        if of.rows is None:
            picked = logits.gather(1, target.clamp(min=0)).masked_fill_(target < 0, 0)
            rows = _of_all(row_statistics(logits, of.statistics), picked, logits, head.ranks)
        else:
            rows = Rows(*(x if x is None else x[tokens] for x in of.rows[:4]), logits=logits)
        none = ids[tokens, 0] == IGNORE
        values, by = _differentiated(of.terms, rows, tokens, none, dx is not None)
        total = total + values.sum(0) * counts
        if of.token_losses is not None and counts:
            into = of.token_losses[tokens]  # of tokens, which further rows may follow
            into.copy_(cross_entropy(rows, tokens).masked_fill(none, 0)[: len(into)])
        if dx is not None:
            b = (
                None
                if by.mean is None
                else by.mean / (len(weight) * (head.ranks.size if head.ranks else 1))
            )
            # Of several ids the gradients are added up before they are rounded, where the logits were.
            d = torch.empty_like(logits, dtype=x.dtype) if target.shape[1] == 1 else logits
            logits_gradient(d, logits, rows.lse, target[:, 0], by.lse, b, by.picked[:, 0])
            if target.shape[1] > 1:
                d.scatter_add_(
                    1, target[:, 1:].clamp(min=0), by.picked[:, 1:].where(target[:, 1:] >= 0, 0)
                )
            d = d.to(x.dtype)  # [chunk, vocab]
            torch.mm(d, weight, out=dx[tokens])
            if dweight is not None:
                _add_product(dweight, d.T, x[tokens])
            del d
        del logits, rows  # before the next chunk's are made
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
        wants_grad = grad_enabled and any(ctx.needs_input_grad)  # needs_input_grad ignores no_grad
        of_weight = wants_grad and ctx.needs_input_grad[0]
        wide = torch.promote_types(states[0].dtype, torch.float32)
        dweight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        dx = [torch.empty_like(x) if wants_grad else None for x in states]
        totals = [_summed(of, d, dweight, weight, head, name) for of, d in zip(sums, dx)]
        ctx.save_for_backward(dweight, *dx)
        ctx.weight_dtype = weight.dtype
        # Not total itself: torch 2.11's compiler drops its gradient (ops/recurrence.py). No view: FSDP2 warns of one.
        return totals[0].clone()

    @staticmethod
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        dweight, *dx = ctx.saved_tensors
        scale = scales.flatten()[0]
        if dweight is not None:
            # Rounded while it is written: the product on its own would be another [vocab, D] in float32.
            dweight = torch.mul(
                dweight, scale, out=torch.empty_like(dweight, dtype=ctx.weight_dtype)
            )
        return dweight, None, None, None, None, *((d * scale).to(d.dtype) for d in dx)
