"""The chunked delta rule in plain PyTorch, in stages: prepare → boundary → scan → output, and their adjoints.

Chunks of C tokens, each inside one entry (document, or part of one). With G the cumulative log gate inside a chunk,
A = (I + tril(β (K⊙e^G)(K⊙e^−G)ᵀ, −1))⁻¹ and Γ = e^{G_last} (Kimi Linear, section 3; reading notes on KDA, steps 1–5):

    prepare   w = A β (K⊙e^G)   u = A β V   kg = K⊙e^{G_last−G}   qg = scale·Q⊙e^G   aqk = scale·tril((Q⊙e^G)(K⊙e^−G)ᵀ)
    scan      v_new = u − w S    S ← Γ S + kgᵀ v_new
    output    o = qg S + aqk v_new
    boundary  the scan of one entry from S = 0 (S_ext) and, with u = 0, from S = I (M)

No stage ever forms e^{−G} over a whole chunk, which overflows: see `_pair_products`. GDN is the case of a gate with one
channel. All is computed in float32 (float64 for float64 inputs); prepare is differentiable by autograd, the other
stages have their adjoints written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries
from titan_linear.ops.layout.chains import STATE, STATE_AND_M, Chains
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs, States
from titan_linear.ops.runtime.support import without_autocast

SUB = 16  # rows that share a reference point of the gate


@dataclass(frozen=True)
class Chunks:
    """Where the tokens of packed entries lie in chunks of `CHUNK`."""

    num_chunks: int
    first: tuple[int, ...]  # [N] first chunk of each entry
    count: tuple[int, ...]  # [N] chunks of each entry
    rows: torch.Tensor | None  # [T] int64, row of each token among num_chunks·CHUNK; None: row t is token t
    order: torch.Tensor  # [N] int64, entries, the longest first
    rank: torch.Tensor  # [N] int64, each entry's place in `order`
    steps: tuple[torch.Tensor, ...]  # chunk ids [n_s] of scan step s: the first n_s of `order` have an s-th chunk

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [num_chunks, H, C, D], zeros where a chunk has no token."""
        if self.rows is not None:
            x = x.new_zeros(self.num_chunks * CHUNK, *x.shape[1:]).index_copy(0, self.rows, x)
        return x.unflatten(0, (self.num_chunks, CHUNK)).transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[num_chunks, H, C, D] -> [T, H, D]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.rows is None else x.index_select(0, self.rows)


def make_chunks(boundaries: Boundaries) -> Chunks:
    """Chunks of the entries; an entry without tokens has no chunk."""
    device, bounds = boundaries.cu_seqlens.device, torch.tensor(boundaries.on_host())
    lengths = bounds.diff()
    counts = (lengths + CHUNK - 1) // CHUNK
    first = counts.cumsum(0) - counts
    shift = torch.repeat_interleave(first * CHUNK - bounds[:-1], lengths)  # [T]
    rows = torch.arange(int(bounds[-1])) + shift if (lengths % CHUNK).any() else None
    order = counts.argsort(descending=True, stable=True)
    longest = [first[order][counts[order] > s] + s for s in range(int(counts.max()))]
    return Chunks(
        int(counts.sum()),
        tuple(first.tolist()),
        tuple(counts.tolist()),
        None if rows is None else rows.to(device),
        order.to(device),
        order.argsort().to(device),
        tuple(ids.to(device) for ids in longest),
    )


class Prepared(NamedTuple):
    """What the later stages need of each chunk, NC chunks in all."""

    w: torch.Tensor  # [NC, HV, C, K]
    u: torch.Tensor  # [NC, HV, C, V]
    kg: torch.Tensor  # [NC, HV, C, K]
    qg: torch.Tensor  # [NC, HV, C, K]
    aqk: torch.Tensor  # [NC, HV, C, C]
    decay: torch.Tensor  # [NC, HV, K or 1], e^{G_last}


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    safe_gate: bool,
) -> Prepared:
    """Compute all that is local to a chunk from q, k [T,H,K]; v [T,HV,V]; g [T,HV,K or 1], log gates; beta [T,HV]."""
    groups = v.shape[1] // q.shape[1]
    q, k = (chunks.split(x).repeat_interleave(groups, dim=1) for x in (q, k))  # [NC, HV, C, K]
    v, g, beta = chunks.split(v), chunks.split(g), chunks.split(beta.unsqueeze(-1))
    G = g.cumsum(-2)  # [NC, HV, C, K or 1]
    aqk, akk = _pair_products(q * scale, k, G, safe_gate)
    gamma = G.exp()
    L = (akk * beta).tril(-1)  # the solver does not read the diagonal and takes it as one
    w, u = torch.linalg.solve_triangular(
        L, torch.cat([k * gamma * beta, v * beta], -1), upper=False, unitriangular=True
    ).split([k.shape[-1], v.shape[-1]], -1)
    last = G[:, :, -1:]
    return Prepared(w, u, k * (last - G).exp(), q * gamma * scale, aqk.tril(), last.squeeze(-2).exp())


def _pair_products(
    q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, safe_gate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_c q_ic k_jc e^{G_ic − G_jc} and the same with k_i, both [NC, HV, C, C], valid for j ≤ i.

    One channel: multiply the scores by e^{G_i − G_j}. Otherwise take rows in blocks of SUB, the gate of the block's
    first row as reference R: e^{G_i − R} and, for earlier columns, e^{R − G_j} are both at most 1. Columns of the block
    itself have e^{R − G_j} up to e^{5·15} under the promise g ≥ −5, which float32 holds; without it they are summed
    channel by channel with exponents that never exceed 0.
    """
    if G.shape[-1] == 1:
        relative = (G - G.transpose(-1, -2)).tril().exp()  # tril before exp: above the diagonal exp would overflow
        return (q @ k.mT) * relative, (k @ k.mT) * relative
    rows = torch.cat([q, k], 1)  # [NC, 2·HV, C, K]: both products at once
    blocks = []
    for i in range(0, CHUNK, SUB):
        R, own, end = G[:, :, i : i + 1], slice(i, i + SUB), i + SUB if safe_gate else i
        left = (G[:, :, own] - R).exp().repeat(1, 2, 1, 1) * rows[:, :, own]  # [NC, 2·HV, SUB, K]
        right = k[:, :, :end] * (R - G[:, :, :end]).exp()  # [NC, HV, end, K]
        block = left @ right.mT.repeat(1, 2, 1, 1)
        if not safe_gate:
            block = torch.cat([block, _own_block(rows[:, :, own], k[:, :, own], G[:, :, own])], -1)
        blocks.append(F.pad(block, (0, CHUNK - i - SUB)))
    return torch.cat(blocks, -2).chunk(2, dim=1)


def _own_block(rows: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """A diagonal block's products [NC, 2·HV, SUB, SUB], channel by channel, zero above the diagonal."""
    later = torch.ones(SUB, SUB, dtype=torch.bool, device=k.device).triu(1)[:, :, None]
    relative = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()  # [.., SUB i, SUB j, K]
    weighted = relative * k.unsqueeze(-3)
    both = rows.unflatten(1, (2, -1)).movedim(1, -1)  # [NC, HV, SUB, K, 2]
    return (weighted @ both).movedim(-1, 1).flatten(1, 2)


class Scanned(NamedTuple):
    states: torch.Tensor  # [NC, HV, K, V], the state that enters each chunk
    v_new: torch.Tensor  # [NC, HV, C, V]
    final: torch.Tensor  # [N, HV, K, V]


def scan(p: Prepared, chunks: Chunks, initial_state: torch.Tensor) -> Scanned:
    """Carry the state [N, HV, K, V] through the chunks of every entry; entries go side by side."""
    S = initial_state[chunks.order]
    states, v_new = p.u.new_empty(*p.w.shape[:2], p.w.shape[-1], p.u.shape[-1]), torch.empty_like(p.u)
    for ids in chunks.steps:
        n = len(ids)
        states[ids] = S[:n]
        v_new[ids] = v = p.u[ids] - p.w[ids] @ S[:n]
        S[:n] = p.decay[ids].unsqueeze(-1) * S[:n] + p.kg[ids].mT @ v
    return Scanned(states, v_new, S[chunks.rank])


def output(p: Prepared, s: Scanned) -> torch.Tensor:
    """o [NC, HV, C, V]."""
    return p.qg @ s.states + p.aqk @ s.v_new


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of N sequences: (o [N, HV, V], the next states), with one pass to read S and one to write it.

    q (scaled), k [N,H,K]; v [N,HV,V]; g [N,HV,K or 1] log gates; beta [N,HV]; S [N,HV,K,V]. With S' = e^g S:
    u = β (v − S'ᵀk),  S ← S' + k uᵀ,  o = Sᵀq = S'ᵀq + (k·q) u.
    """
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q, k))  # [N, HV, K]
    decay = g.exp()
    seen = torch.stack([k * decay, q * decay], -2) @ S  # [N, HV, 2, V]
    u = beta.unsqueeze(-1) * (v - seen[:, :, 0])
    o = seen[:, :, 1] + (k * q).sum(-1, keepdim=True) * u
    return o, torch.addcmul(S * decay.unsqueeze(-1), k.unsqueeze(-1), u.unsqueeze(-2))


def boundary(p: Prepared, chunks: Chunks, entry: int, with_m: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(S_ext [HV,K,V], M [HV,K,K] or None) of an entry: its end state is M S + S_ext for any S that enters."""
    HV, K, V = p.w.shape[1], p.w.shape[-1], p.u.shape[-1]
    S = p.u.new_zeros(HV, K, V + K if with_m else V)  # [S | M]: one scan carries both, M's with u = 0
    if with_m:
        S[:, :, V:] = torch.eye(K, dtype=S.dtype, device=S.device)
    for c in range(chunks.first[entry], chunks.first[entry] + chunks.count[entry]):
        v = -p.w[c] @ S
        v[..., :V] += p.u[c]
        S = p.decay[c].unsqueeze(-1) * S + p.kg[c].mT @ v
    return S[..., :V], S[..., V:] if with_m else None


def boundary_backward(p: Prepared, do: torch.Tensor, chunks: Chunks, entry: int) -> torch.Tensor:
    """dS_ext [HV,K,V] of an entry: the gradient of its incoming state if its outgoing state had none."""
    dS = p.u.new_zeros(p.w.shape[1], p.w.shape[-1], p.u.shape[-1])
    for c in reversed(range(chunks.first[entry], chunks.first[entry] + chunks.count[entry])):
        dv = p.aqk[c].mT @ do[c] + p.kg[c] @ dS
        dS = p.decay[c].unsqueeze(-1) * dS + p.qg[c].mT @ do[c] - p.w[c].mT @ dv
    return dS


def backward(
    p: Prepared, s: Scanned, do: torch.Tensor, d_final: torch.Tensor, chunks: Chunks
) -> tuple[Prepared, torch.Tensor]:
    """The adjoint of scan and output: gradients of all that `prepare` returned, and of the initial state [N, HV, K, V].

    do [NC, HV, C, V]; d_final [N, HV, K, V] is the gradient of the final states.
    """
    dS = d_final[chunks.order]
    dv, dS_direct = p.aqk.mT @ do, p.qg.mT @ do  # gradients of v_new and of each chunk's state through the outputs
    d_out = torch.empty_like(s.states)  # gradient of the state that leaves each chunk
    for ids in reversed(chunks.steps):
        n = len(ids)
        d_out[ids] = dS[:n]
        dv[ids] = d = dv[ids] + p.kg[ids] @ dS[:n]
        dS[:n] = p.decay[ids].unsqueeze(-1) * dS[:n] + dS_direct[ids] - p.w[ids].mT @ d
    ddecay = (s.states * d_out).sum(-1)  # [NC, HV, K]
    grads = Prepared(
        w=-dv @ s.states.mT,
        u=dv,
        kg=s.v_new @ d_out.mT,
        qg=do @ s.states.mT,
        aqk=do @ s.v_new.mT,
        decay=ddecay if p.decay.shape[-1] > 1 else ddecay.sum(-1, keepdim=True),
    )
    return grads, dS[chunks.rank]


class TorchDeltaRule:
    """The stages of one call, with the methods that the driver requires (`ops/delta_rule.py`, `DeltaRule`)."""

    kept = ()

    @without_autocast
    def __init__(
        self,
        inputs: Inputs,
        options: DeltaRuleOptions,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[torch.Tensor] = (),
    ):
        assert not kept
        self.chunks = boundaries.derived(make_chunks)
        self.inputs = Inputs(*(None if x is None else x.detach().requires_grad_(differentiable) for x in inputs))
        # Hidden from a checkpoint around the call, whose second run takes the kept result and saves nothing here.
        own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.set_grad_enabled(differentiable), own_tensors:
            tokens = normalise(self.inputs, options)
            self.graph = prepare(*tokens, self.chunks, scale=options.scale, safe_gate=options.safe_gate)
        self.prepared = Prepared(*(x.detach() for x in self.graph))
        self.scanned: Scanned | None = None

    @without_autocast
    def boundary(self, chains: Chains) -> tuple[torch.Tensor, torch.Tensor]:
        (_, HV, _, K), V = self.prepared.w.shape, self.prepared.u.shape[-1]
        slots = chains.slots.tolist()
        S_ext, M = (self.prepared.u.new_zeros(len(slots), HV, K, n) for n in (V, K))
        for slot, (entry, wanted) in enumerate(slots):
            if wanted >= STATE:
                S_ext[slot], transition = boundary(self.prepared, self.chunks, entry, wanted == STATE_AND_M)
                if transition is not None:
                    M[slot] = transition
        return S_ext, M

    @without_autocast
    def forward(self, initial: States | None, need_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.scanned = scan(self.prepared, self.chunks, self._of_entries(initial))
        o, final = self.chunks.join(output(self.prepared, self.scanned)), self.scanned.final
        # Contiguous however many entries were joined: compiled code asks for the same strides in every batch.
        return o.contiguous(), final if need_final else final.new_empty(0)

    @without_autocast
    def boundary_backward(self, do: torch.Tensor, chains: Chains) -> torch.Tensor:
        do, slots = self.chunks.split(do.to(self.prepared.u)), chains.slots.tolist()
        dS_ext = self._of_entries(None)[:1].repeat(len(slots), 1, 1, 1)
        for slot, (entry, wanted) in enumerate(slots):
            if wanted >= STATE:
                dS_ext[slot] = boundary_backward(self.prepared, do, self.chunks, entry)
        return dS_ext

    @without_autocast
    def backward(
        self, do: torch.Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[Inputs, torch.Tensor]:
        if self.scanned is None:
            self.scanned = scan(self.prepared, self.chunks, self._of_entries(initial))
        do, d_final = self.chunks.split(do.to(self.prepared.u)), self._of_entries(d_final)
        d_prepared, d_initial = backward(self.prepared, self.scanned, do, d_final, self.chunks)
        given = [x for x in self.inputs if x is not None]
        grads = iter(torch.autograd.grad(self.graph, given, d_prepared))
        return Inputs(*(None if x is None else next(grads) for x in self.inputs)), d_initial

    def _of_entries(self, states: States | None) -> torch.Tensor:
        """The state of each entry, [N, HV, K, V]; None: zeros."""
        p, N = self.prepared, len(self.chunks.count)
        if states is None:
            return p.u.new_zeros(N, p.w.shape[1], p.w.shape[-1], p.u.shape[-1])
        return states.of_entries(N)


def normalise(inputs: Inputs, options: DeltaRuleOptions) -> list[torch.Tensor]:
    """Inputs in the dtype of the computation, q and k normalised and g a log gate [T, HV, K or 1], as `options` ask."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in inputs[:5])
    if options.l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    beta = beta if options.beta_range is None else options.beta_range * beta.sigmoid()
    g = g.unsqueeze(-1) if g.dim() == 2 else g
    if options.gate_in_kernel:
        g = g if inputs.dt_bias is None else g + inputs.dt_bias.to(wide).view(g.shape[1:])
        A = inputs.A_log.to(wide).exp()[:, None]
        g = -A * F.softplus(g) if options.lower_bound is None else options.lower_bound * torch.sigmoid(A * g)
    g = g.clamp(min=-128.0 if wide == torch.float32 else -1024.0)  # e^g is still 0, and sums of gates keep their digits
    return [q, k, v, g, beta]
