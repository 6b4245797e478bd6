"""Chunked recurrences in plain PyTorch, in stages, with the stages' adjoints.

The stages are prepare → boundary → scan → output. A matrix state S [K, V] passes through
chunks of C tokens, each inside one entry (a document, or part of one). For every
recurrence, `prepare` computes R rows per chunk (its tokens, or two rows for each of them)
with which

    scan      v_new = u − w S    S ← decay ⊙ S + kgᵀ v_new
    output    o = qg S + aqk v_new + skip
    boundary  the scan of one entry from S = 0 (S_ext) and, with u = 0, from S = I (M)

Without w a state only decays. M is then diagonal, and its diagonal [K] or one number
represents it. Everything is computed in float32 (float64 for float64 inputs). Autograd
differentiates `prepare`; the other stages have explicit adjoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries
from titan_linear.ops.layout.chains import STATE, STATE_AND_M, Chains
from titan_linear.ops.runtime.options import States
from titan_linear.ops.runtime.support import without_autocast


@dataclass(frozen=True)
class ChunkLayout:
    """Positions of the tokens of packed entries in chunks of `CHUNK`."""

    num_chunks: int
    first: tuple[int, ...]  # [N]: first chunk of each entry
    count: tuple[int, ...]  # [N]: number of chunks of each entry
    entry: Tensor  # [NC] int64: entry of each chunk
    before: Tensor  # [NC] int64: number of chunks before each chunk in its entry
    after: Tensor  # [NC] int64: number of chunks after it
    # [3, .] int64: entries that have chunks, the first chunk of each, and the last.
    ends: Tensor
    # [T] int64: row of each token among num_chunks·CHUNK; None: row t is token t.
    rows: Tensor | None
    order: Tensor  # [N] int64: entries, the longest first
    rank: Tensor  # [N] int64: each entry's place in `order`
    # Chunk ids [n_s] of scan step s: the first n_s entries of `order` have an s-th chunk.
    steps: tuple[Tensor, ...]

    def split(self, x: Tensor) -> Tensor:
        """Split [T, H, D] into [num_chunks, H, C, D]; zeros where a chunk has no token."""
        if self.rows is not None:
            x = x.new_zeros(self.num_chunks * CHUNK, *x.shape[1:]).index_copy(0, self.rows, x)
        return x.unflatten(0, (self.num_chunks, CHUNK)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Join [num_chunks, H, C, D] into [T, H, D]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.rows is None else x.index_select(0, self.rows)

    def of_entry(self, entry: int) -> slice:
        return slice(self.first[entry], self.first[entry] + self.count[entry])


def make_chunks(boundaries: Boundaries) -> ChunkLayout:
    """Cut the entries into chunks; an entry without tokens has no chunk."""
    device = boundaries.cu_seqlens.device
    # Number of chunks of each entry, and its first chunk.
    bounds = torch.tensor(boundaries.on_host())
    lengths = bounds.diff()
    counts = (lengths + CHUNK - 1) // CHUNK
    first = counts.cumsum(0) - counts
    # Tokens need other rows only if some entry's length is not a multiple of CHUNK.
    shift = torch.repeat_interleave(first * CHUNK - bounds[:-1], lengths)  # [T]
    rows = torch.arange(int(bounds[-1])) + shift if (lengths % CHUNK).any() else None
    # The order of the scan: entries by length, so that the entries with an s-th chunk come
    # first.
    order = counts.argsort(descending=True, stable=True)
    rank = order.argsort()
    entry = torch.arange(len(counts)).repeat_interleave(counts)
    filled = counts.nonzero().flatten()
    before = torch.arange(len(entry)) - first[entry]
    return ChunkLayout(
        int(counts.sum()),
        tuple(first.tolist()),
        tuple(counts.tolist()),
        entry.to(device),
        before.to(device),
        (counts[entry] - 1 - before).to(device),
        torch.stack([filled, first[filled], (first + counts - 1)[filled]]).to(device),
        None if rows is None else rows.to(device),
        order.to(device),
        rank.to(device),
        (before * len(counts) + rank[entry]).argsort().to(device).split(before.bincount().tolist()),
    )


# --- Sums of log gates --------------------------------------------------------------------
# Each sum adds exactly the gates in its range. A difference of two sums from the chunk's
# first token would lose, in float32, the digits of a slow gate that follows a fast one.


def sums_between(g: Tensor) -> Tensor:
    """Sum log gates g [.., C, D] over tokens after j up to i -> [.., C i, C j, D]; −∞ for j
    > i.
    """
    C = g.shape[-2]
    device = g.device
    i = torch.arange(C, device=device).unsqueeze(1)
    j = torch.arange(C, device=device)
    after = (j < i).unsqueeze(-1)  # [C, C, 1]
    sums = torch.where(after, g.unsqueeze(-2), 0.0).cumsum(-3)
    return sums.masked_fill((j > i).unsqueeze(-1), float("-inf"))


def sums_after(g: Tensor) -> Tensor:
    """Sum log gates g [.., C, D] over all tokens after each token -> [.., C, D]."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


# --- The stages ---------------------------------------------------------------------------


class Prepared(NamedTuple):
    """Everything that is local to a chunk, or its gradients."""

    w: Tensor | None  # [NC, HV, R, K]; None: zeros
    u: Tensor  # [NC, HV, R, V]
    kg: Tensor  # [NC, HV, R, K]
    qg: Tensor  # [NC, HV, C, K]
    aqk: Tensor  # [NC, HV, C, R]
    decay: Tensor  # [NC, HV, K or 1]
    # [NC, HV, C, V]: the part of o that does not pass through the state; None: zeros
    skip: Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(HV, K, V)."""
        return self.kg.shape[1], self.kg.shape[-1], self.u.shape[-1]


class Scanned(NamedTuple):
    states: Tensor  # [NC, HV, K, V]: the state that enters each chunk
    final: Tensor  # [N, HV, K, V]
    v_new: Tensor  # [NC, HV, R, V]


def scan(p: Prepared, chunks: ChunkLayout, initial_state: Tensor) -> Scanned:
    """Carry the state [N, HV, K, V] through the chunks of every entry, all entries
    together.
    """
    if p.w is None:
        return Scanned(*carry(p.kg.mT @ p.u, p.decay, initial_state, chunks), p.u)
    # Step s advances the n entries that have an s-th chunk.
    S = initial_state[chunks.order]
    states = p.u.new_empty(len(p.u), *p.state_shape)
    v_new = p.u.clone()
    for ids in chunks.steps:
        n = len(ids)
        states[ids] = S[:n]
        v_new[ids] -= p.w[ids] @ S[:n]
        S[:n] = p.decay[ids].unsqueeze(-1) * S[:n] + p.kg[ids].mT @ v_new[ids]
    return Scanned(states, S[chunks.rank], v_new)


def carry(
    added: Tensor, decay: Tensor, initial: Tensor, chunks: ChunkLayout, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply S ← decay ⊙ S + added chunk by chunk, from the initial states [N, HV, K, V].

    Nothing else acts on S, so each step doubles the number of earlier chunks that a chunk
    includes.

    Returns:
        the states before each chunk [NC, HV, K, V], and the states after the last chunks
        [N, HV, K, V].
    """
    # Number of chunks of the same entry that come earlier in the direction of the walk.
    earlier = chunks.before
    entry = chunks.entry
    decay = decay.unsqueeze(-1)
    filled, _, ends = chunks.ends
    if reverse:
        ends = len(entry) - 1 - chunks.ends[1]
        earlier, entry, added, decay = (x.flip(0) for x in (chunks.after, entry, added, decay))
    earlier = earlier.view(-1, 1, 1, 1)
    # The initial state enters each entry's first chunk.
    entering = initial[entry]
    S = added + torch.where(earlier == 0, decay * entering, 0.0)
    # Here S includes the n latest chunks of the entry, and decay is their product.
    n = 1
    while n < len(chunks.steps):
        S = torch.cat([S[:n], S[n:] + torch.where(earlier[n:] >= n, decay[n:] * S[:-n], 0.0)])
        decay = torch.cat([decay[:n], decay[n:] * decay[:-n]])
        n *= 2
    # The state that leaves a chunk enters the next one of its entry.
    entering[1:] = torch.where(earlier[1:] > 0, S[:-1], entering[1:])
    final = initial.index_copy(0, filled, S[ends])
    return entering.flip(0) if reverse else entering, final


def output(p: Prepared, s: Scanned) -> Tensor:
    """Return o [NC, HV, C, V]."""
    o = p.qg @ s.states + p.aqk @ s.v_new
    return o if p.skip is None else o + p.skip


def boundary(p: Prepared, chunks: ChunkLayout, entry: int) -> Tensor:
    """Return S_ext [HV, K, V] of an entry: the end state is M S + S_ext for any S that
    enters.
    """
    of_entry = chunks.of_entry(entry)
    if p.w is None:
        return _decayed_sum(p.kg[of_entry].mT @ p.u[of_entry], p.decay[of_entry])
    S = p.u.new_zeros(p.state_shape)
    for c in range(of_entry.start, of_entry.stop):
        S = p.decay[c].unsqueeze(-1) * S + p.kg[c].mT @ (p.u[c] - p.w[c] @ S)
    return S


def transition(p: Prepared, chunks: ChunkLayout, entry: int) -> Tensor:
    """Return M of an entry, [HV, K, K], or if it is diagonal, its diagonal [HV, K or 1]."""
    of_entry = chunks.of_entry(entry)
    if p.w is None:
        return p.decay[of_entry].prod(0)
    HV, K, _ = p.state_shape
    M = torch.eye(K, dtype=p.u.dtype, device=p.u.device).expand(HV, K, K)
    for c in range(of_entry.start, of_entry.stop):
        M = p.decay[c].unsqueeze(-1) * M - p.kg[c].mT @ (p.w[c] @ M)
    return M


def boundary_backward(p: Prepared, do: Tensor, chunks: ChunkLayout, entry: int) -> Tensor:
    """Return dS_ext [HV, K, V] of an entry.

    This is the gradient of its incoming state if its outgoing state had no gradient.
    """
    of_entry = chunks.of_entry(entry)
    if p.w is None:
        return _decayed_sum((p.qg[of_entry].mT @ do[of_entry]).flip(0), p.decay[of_entry].flip(0))
    dS = p.u.new_zeros(p.state_shape)
    for c in reversed(range(of_entry.start, of_entry.stop)):
        dv = p.aqk[c].mT @ do[c] + p.kg[c] @ dS
        dS = p.decay[c].unsqueeze(-1) * dS + p.qg[c].mT @ do[c] - p.w[c].mT @ dv
    return dS


def _decayed_sum(added: Tensor, decay: Tensor) -> Tensor:
    """Apply S ← decay ⊙ S + added over n chunks from S = 0.

    added [n, HV, K, V], decay [n, HV, K or 1] -> [HV, K, V].
    """
    # The product of all later decays, which act on what a chunk adds.
    later = torch.cat([decay[1:], torch.ones_like(decay[:1])]).flip(0).cumprod(0).flip(0)
    return (later.unsqueeze(-1) * added).sum(0)


def backward(
    p: Prepared, s: Scanned, do: Tensor, d_final: Tensor, chunks: ChunkLayout
) -> tuple[Prepared, Tensor]:
    """Run the adjoint of scan and output.

    Args:
        do: [NC, HV, C, V].
        d_final: [N, HV, K, V], the gradient of the final states.

    Returns:
        gradients of everything that `prepare` returned, and of the initial state
        [N, HV, K, V].
    """
    # Gradients of v_new and of each chunk's state through the outputs.
    dv = p.aqk.mT @ do
    dS_direct = p.qg.mT @ do
    # Walk back through the chunks; d_out is the gradient of the state that leaves each
    # chunk.
    if p.w is None:
        d_out, d_initial = carry(dS_direct, p.decay, d_final, chunks, reverse=True)
        dv = dv + p.kg @ d_out
    else:
        dS = d_final[chunks.order]
        d_out = torch.empty_like(s.states)
        for ids in reversed(chunks.steps):
            n = len(ids)
            d_out[ids] = dS[:n]
            dv[ids] = d = dv[ids] + p.kg[ids] @ dS[:n]
            dS[:n] = p.decay[ids].unsqueeze(-1) * dS[:n] + dS_direct[ids] - p.w[ids].mT @ d
        d_initial = dS[chunks.rank]
    # Gradients of the chunk's prepared tensors follow from the states and d_out.
    ddecay = (s.states * d_out).sum(-1)  # [NC, HV, K]
    if p.decay.shape[-1] == 1:
        ddecay = ddecay.sum(-1, keepdim=True)
    grads = Prepared(
        w=None if p.w is None else -dv @ s.states.mT,
        u=dv,
        kg=s.v_new @ d_out.mT,
        qg=do @ s.states.mT,
        aqk=do @ s.v_new.mT,
        decay=ddecay,
        skip=None if p.skip is None else do,
    )
    return grads, d_initial


class TorchRule(ABC):
    """Stages of one call, with the methods of `Rule` (ops/recurrence.py).

    `Inputs` is the recurrence's named tuple of inputs.
    """

    kept = ()

    @staticmethod
    @abstractmethod
    def prepare(inputs: Any, options: Any, chunks: ChunkLayout) -> Prepared:
        """Compute everything that is local to a chunk, differentiably."""

    @without_autocast
    def __init__(
        self,
        inputs: Any,
        options: Any,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[Tensor] = (),
    ):
        assert not kept
        self.chunks = boundaries.derived(make_chunks)
        self.inputs = inputs._make(
            None if x is None else x.detach().requires_grad_(differentiable) for x in inputs
        )
        # Hide these saved tensors from a checkpoint around the call: its second run takes
        # the kept result and saves nothing here.
        own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.set_grad_enabled(differentiable), own_tensors:
            self.graph = self.prepare(self.inputs, options, self.chunks)
        self.prepared = Prepared(*(None if x is None else x.detach() for x in self.graph))
        self.scanned: Scanned | None = None

    @without_autocast
    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        p = self.prepared
        slots = chains.slots.tolist()
        HV, K, V = p.state_shape
        S_ext = p.u.new_zeros(len(slots), HV, K, V)
        M = p.u.new_zeros(len(slots), HV, *([p.decay.shape[-1]] if p.w is None else [K, K]))
        for slot, (entry, wanted) in enumerate(slots):
            if wanted >= STATE:
                S_ext[slot] = boundary(p, self.chunks, entry)
            if wanted == STATE_AND_M:
                M[slot] = transition(p, self.chunks, entry)
        return S_ext, M

    @without_autocast
    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        self.scanned = scan(self.prepared, self.chunks, self._of_entries(initial))
        o = self.chunks.join(output(self.prepared, self.scanned))
        final = self.scanned.final
        # Contiguous, however many entries were joined: compiled code requires the same
        # strides in every batch.
        return o.contiguous(), final if need_final else final.new_empty(0)

    @without_autocast
    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        p = self.prepared
        slots = chains.slots.tolist()
        do = self.chunks.split(do.to(p.u))
        dS_ext = p.u.new_zeros(len(slots), *p.state_shape)
        for slot, (entry, wanted) in enumerate(slots):
            if wanted >= STATE:
                dS_ext[slot] = boundary_backward(p, do, self.chunks, entry)
        return dS_ext

    @without_autocast
    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[Any, Tensor]:
        # An object made in backward has not run the scan yet.
        if self.scanned is None:
            self.scanned = scan(self.prepared, self.chunks, self._of_entries(initial))
        do = self.chunks.split(do.to(self.prepared.u))
        d_final = self._of_entries(d_final)
        d_prepared, d_initial = backward(self.prepared, self.scanned, do, d_final, self.chunks)
        # Autograd carries the gradients through `prepare`.
        pairs = [(x, dx) for x, dx in zip(self.graph, d_prepared, strict=True) if x is not None]
        given = [x for x in self.inputs if x is not None]
        grads = iter(torch.autograd.grad([x for x, _ in pairs], given, [dx for _, dx in pairs]))
        return self.inputs._make(None if x is None else next(grads) for x in self.inputs), d_initial

    def _of_entries(self, states: States | None) -> Tensor:
        """Return the state of each entry, [N, HV, K, V]; None: zeros."""
        N = len(self.chunks.count)
        if states is None:
            return self.prepared.u.new_zeros(N, *self.prepared.state_shape)
        return states.of_entries(N)
