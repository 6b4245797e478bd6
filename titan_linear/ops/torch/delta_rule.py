"""The chunked delta rule in plain PyTorch.

This file has its `prepare`, for the stages of torch/chunked.py, and its step. With G the
cumulative log gate inside a chunk and A = (I + tril(β (K⊙e^G)(K⊙e^−G)ᵀ, −1))⁻¹ (Kimi
Linear, section 3):

    w = A β (K⊙e^G)   u = A β V   kg = K⊙e^{G_last−G}
    qg = scale·Q⊙e^G   aqk = scale·tril((Q⊙e^G)(K⊙e^−G)ᵀ)

No stage ever computes e^{−G} over a whole chunk, which would overflow: see `pair_products`.
GDN is the case of a gate with one channel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs
from titan_linear.ops.torch.chunked import (
    ChunkLayout,
    Prepared,
    TorchRule,
    sums_after,
    sums_between,
)

SUB = 16  # rows that share a reference point of the gate


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: ChunkLayout,
    *,
    scale: float,
    safe_gate: bool,
) -> Prepared:
    """Compute everything that is local to a chunk from q, k [T,H,K]; v [T,HV,V]; g
    [T,HV,K or 1], log gates; beta [T,HV].
    """
    groups = v.shape[1] // q.shape[1]
    # Split the tokens into chunks [NC, HV, C, K], and repeat q and k for the heads of v.
    q, k = (chunks.split(x).repeat_interleave(groups, dim=1) for x in (q * scale, k))
    v = chunks.split(v)
    g = chunks.split(g)
    beta = chunks.split(beta.unsqueeze(-1))
    # Products of queries and keys with keys, then the triangular system.
    aqk, akk = pair_products(torch.cat([q, k], 1), k, g, safe_gate).chunk(2, dim=1)
    G = g.cumsum(-2)  # [NC, HV, C, K or 1]
    gamma = G.exp()
    L = (akk * beta).tril(-1)
    w, u = solved(L, k * gamma * beta, v * beta)
    return Prepared(w, u, k * sums_after(g).exp(), q * gamma, aqk.tril(), gamma[:, :, -1])


def solved(L: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
    """Solve (I + L) X = B for each B [.., C, D] of `right`. L [.., C, C] is read below its
    diagonal only.
    """
    x = torch.linalg.solve_triangular(L, torch.cat(right, -1), upper=False, unitriangular=True)
    return x.split([b.shape[-1] for b in right], -1)


def pair_products(rows: Tensor, k: Tensor, g: Tensor, safe_gate: bool) -> Tensor:
    """Compute Σ_c rows_ic k_jc e^{G_ic − G_jc}, valid for j ≤ i: -> [NC, n·HV, C, C].

    The rows [NC, n·HV, C, K] are of n kinds. With one channel, the scores are multiplied by
    e^{G_i − G_j}. Otherwise rows are taken in blocks of SUB, and the gate of the block's
    first row is the reference R: e^{G_i − R} and, for earlier columns, e^{R − G_j} are both
    at most 1. Columns of the block itself have e^{R − G_j} up to e^{5·15} under the promise
    g ≥ −5, which float32 can represent. Without this promise they are summed channel by
    channel, with exponents that never exceed 0.
    """
    n = rows.shape[1] // k.shape[1]
    if g.shape[-1] == 1:
        return (rows @ k.mT.repeat(1, n, 1, 1)) * sums_between(g).squeeze(-1).exp().repeat(
            1, n, 1, 1
        )
    # One block of rows at a time: earlier columns, then the block's own, then zeros.
    blocks = []
    for i in range(0, CHUNK, SUB):
        own = slice(i, i + SUB)
        # [NC, HV, SUB, K]: G_own − R
        G = F.pad(g[:, :, i + 1 : i + SUB], (0, 0, 1, 0)).cumsum(-2)
        left = G.exp().repeat(1, n, 1, 1) * rows[:, :, own]  # [NC, n·HV, SUB, K]
        right = k[:, :, :i] * sums_after(g[:, :, : i + 1])[:, :, :i].exp()  # [NC, HV, i, K]
        if safe_gate:
            right = torch.cat([right, k[:, :, own] * (-G).exp()], -2)
        block = left @ right.mT.repeat(1, n, 1, 1)
        if not safe_gate:
            block = torch.cat([block, _own_block(rows[:, :, own], k[:, :, own], g[:, :, own])], -1)
        blocks.append(F.pad(block, (0, CHUNK - i - SUB)))
    return torch.cat(blocks, -2)


def _own_block(rows: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return a diagonal block's products [NC, n·HV, SUB, SUB], channel by channel.

    They are zero above the diagonal.
    """
    weighted = sums_between(g).exp() * k.unsqueeze(-3)  # [.., SUB i, SUB j, K]
    kinds = rows.unflatten(1, (-1, k.shape[1])).movedim(1, -1)  # [NC, HV, SUB, K, n]
    return (weighted @ kinds).movedim(-1, 1).flatten(1, 2)


def step(inputs: Inputs, options: DeltaRuleOptions, S: Tensor) -> tuple[Tensor, Tensor]:
    """Process one token of each of N sequences: return o [N, HV, V] and the next states.

    S [N, HV, K, V] is read in one pass and written in another. With S' = e^g S:

        u = β (v − S'ᵀk),   S ← S' + k uᵀ,   o = Sᵀq = S'ᵀq + (k·q) u
    """
    q, k, v, g, beta = normalise(inputs, options)
    # [N, HV, K]
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q * options.scale, k))
    decay = g.exp()
    seen = torch.stack([k * decay, q * decay], -2) @ S  # [N, HV, 2, V]
    u = beta.unsqueeze(-1) * (v - seen[:, :, 0])
    o = seen[:, :, 1] + (k * q).sum(-1, keepdim=True) * u
    return o, torch.addcmul(S * decay.unsqueeze(-1), k.unsqueeze(-1), u.unsqueeze(-2))


class TorchDeltaRule(TorchRule):
    @staticmethod
    def prepare(inputs: Inputs, options: DeltaRuleOptions, chunks: ChunkLayout) -> Prepared:
        tokens = normalise(inputs, options)
        return prepare(*tokens, chunks, scale=options.scale, safe_gate=options.safe_gate)


def l2norm(x: Tensor) -> Tensor:
    """Compute x / sqrt(Σ x² + 1e-6) over the last dimension, in x's dtype, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def normalise(inputs: Inputs, options: DeltaRuleOptions) -> list[Tensor]:
    """Return the inputs in the dtype of the computation.

    β and the log gate g [T, HV, K or 1] are computed as `options` define them.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in inputs[:5])
    beta = beta if options.beta_range is None else options.beta_range * beta.sigmoid()
    g = g.unsqueeze(-1) if g.dim() == 2 else g
    if options.gate_in_kernel:
        g = g if inputs.dt_bias is None else g + inputs.dt_bias.to(wide).view(g.shape[1:])
        A = inputs.A_log.to(wide).exp()[:, None]
        g = (
            -A * F.softplus(g)
            if options.lower_bound is None
            else options.lower_bound * torch.sigmoid(A * g)
        )
    return [q, k, v, g, beta]
