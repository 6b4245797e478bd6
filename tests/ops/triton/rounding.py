"""The chunked delta rule in float64 with the operands of every product rounded to bfloat16, where the kernels round.

What it is off from the exact result is what the operands' precision costs, on these inputs; a kernel may not be worse
by more than a quarter. Forward and backward are written out, chunk by chunk, in the letters of `kda_kernels.py` and
`gdn_kernels.py`. q, k are normalised and g is a log gate (≥ −5): norms and gates are float32 there.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

C = 64
LOG2E = 1.4426950408889634


def rounded(x: Tensor) -> Tensor:
    """x to the 8 bits of a bfloat16, of any exponent (kernels scale by powers of two, which round nothing)."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 256) / 256, exponent)


def stored(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def rounded_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, cu_seqlens: list[int]
) -> dict[str, Tensor]:
    """q, k [T, H, K], v, do [T, H, V], g [T, H, K] (KDA) or [T, H] (GDN), beta [T, H] -> o, dq, dk, dv, dg, dbeta.

    From zero states, scale K^-1/2, the loss Σ o·do.
    """
    rule = _KDAChunk if g.dim() == 3 else _GDNChunk
    x = [t.double().transpose(0, 1) for t in (q, k, v, g, beta, do)]  # [H, T, ...]
    documents = []
    for bos, eos in pairwise(cu_seqlens):
        chunks = [rule(*(t[:, i : min(i + C, eos)] for t in x)) for i in range(bos, eos, C)]
        S = dS = x[0].new_zeros(*q.shape[1:], v.shape[2])
        for chunk in chunks:
            S = chunk.forward(S)
        for chunk in reversed(chunks):
            dS = chunk.reverse(dS)
        documents += [chunk.gradients() for chunk in chunks]
    return {
        name: torch.cat([d[name] for d in documents], 1).transpose(0, 1) for name in documents[0]
    }


def _solve(N: Tensor, b: Tensor) -> Tensor:
    """N (I + diag(b) N)⁻¹ for N strictly lower [H, C, C], b [H, C]."""
    eye = torch.eye(N.shape[1], dtype=N.dtype, device=N.device)
    return torch.linalg.solve_triangular(eye + b[..., None] * N, N, upper=False, left=False)


class _KDAChunk:
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, do: Tensor):
        self.v, self.b, self.do, self.scale = v, b[..., None], do, q.shape[-1] ** -0.5
        G = g.cumsum(1) * LOG2E  # Γ [H, C, K]
        self.gamma, self.middle = (
            G[:, -1:],
            torch.round(G[:, G.shape[1] // 2 : G.shape[1] // 2 + 1]),
        )
        self.E = torch.exp2(G - self.middle)
        self.qE, self.kE, self.kW = rounded(q * self.E), rounded(k * self.E), rounded(k / self.E)
        start = torch.exp2(self.middle)
        self.qg, self.kn = self.scale * self.qE * start, -self.kE * start
        self.kg = rounded(k * torch.exp2(self.gamma - G))
        self.A = rounded(self.scale * (self.qE @ self.kW.mT).tril())
        self.Gn = rounded(-_solve((self.kE @ self.kW.mT).tril(-1), b))

    def forward(self, S: Tensor) -> Tensor:
        self.h = rounded(S)
        x = self.v + self.kn @ self.h
        r = x + self.Gn @ rounded(self.b * x)
        y = rounded(self.b * r)
        self.r, self.o = rounded(r), self.qg @ self.h + self.A @ y
        return torch.exp2(self.gamma).mT * S + self.kg.mT @ y

    def reverse(self, dS: Tensor) -> Tensor:
        self.dh = rounded(dS)
        dN = self.kg @ self.dh + self.A.mT @ self.do
        y = dN + self.Gn.mT @ rounded(self.b * dN)
        self.y = rounded(y)
        return (
            torch.exp2(self.gamma).mT * dS + self.qg.mT @ self.do + self.kn.mT @ rounded(self.b * y)
        )

    def gradients(self) -> dict[str, Tensor]:
        b, E, start = self.b, self.E, torch.exp2(self.middle)
        dA = self.scale * b.mT * (self.do @ self.r.mT)
        diagonal, dA = dA.diagonal(dim1=1, dim2=2)[..., None], rounded(dA.tril(-1))
        dK = rounded((-b * b.mT * (self.y @ self.r.mT)).tril(-1))
        dq = self.scale * start * (self.do @ self.h.mT) + dA @ self.kW
        dkp = -b * start * (self.y @ self.h.mT) + dK @ self.kW
        dkm = b * torch.exp2(self.gamma - self.middle) * (self.r @ self.dh.mT)
        dgamma = (dkm * self.kW).sum(1, keepdim=True) + torch.exp2(self.gamma) * (
            self.h * self.dh
        ).sum(2)[:, None]
        dkm = dkm + dA.mT @ self.qE + dK.mT @ self.kE
        dG = self.qE * dq + self.kE * dkp - self.kW * dkm
        return {
            "o": stored(self.o),
            "dq": stored((dq + diagonal * self.kW) * E),
            "dk": stored(dkp * E + (dkm + diagonal * self.qE) / E),
            "dv": stored(b * self.y),
            "dg": dG.flip(1).cumsum(1).flip(1) + dgamma,
            "dbeta": stored((self.y * self.r).sum(2)),
        }


class _GDNChunk:
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, do: Tensor):
        self.q, self.k, self.v, self.b, self.do = q, k, v, b[..., None], do
        self.scale = q.shape[-1] ** -0.5
        G = g.cumsum(1)[..., None]  # [H, C, 1]
        self.e, self.last = torch.exp(G), torch.exp(G[:, -1:])
        self.rest = torch.exp(G[:, -1:] - G)
        self.D = torch.exp((G - G.mT).clamp(max=0))
        self.A = rounded(self.scale * (q @ k.mT * self.D).tril())
        self.C = rounded(_solve((k @ k.mT * self.D).tril(-1), b) * self.b.mT)

    def forward(self, S: Tensor) -> Tensor:
        self.h = rounded(S)
        x = self.v - self.e * (self.k @ self.h)
        y = x - self.C @ rounded(x)
        self.y, self.o = (
            rounded(y),
            self.scale * self.e * (self.q @ self.h) + self.A @ rounded(self.b * y),
        )
        return self.last * S + self.k.mT @ rounded(self.rest * self.b * y)

    def reverse(self, dS: Tensor) -> Tensor:
        self.dh = rounded(dS)
        z = self.b * (self.rest * (self.k @ self.dh) + self.A.mT @ self.do)
        dx = z - self.C.mT @ rounded(z)
        self.dx = rounded(dx)
        dS = self.last * dS + self.q.mT @ rounded(self.scale * self.e * self.do)
        return dS - self.k.mT @ rounded(self.e * dx)

    def gradients(self) -> dict[str, Tensor]:
        b, e, q, k = self.b, self.e, self.q, self.k
        dqs, dxs, ydh = self.do @ self.h.mT, self.dx @ self.h.mT, self.y @ self.dh.mT
        dA = self.scale * (self.do @ self.y.mT * self.D).tril()
        dN = (self.dx @ self.y.mT * self.D).tril(-1)
        later = self.rest * (ydh * k).sum(2, keepdim=True)  # [H, C, 1]
        w = dA * (q @ k.mT) - dN * (k @ k.mT)
        dbeta = later + w.sum(1)[..., None]
        later = b * later
        later[:, -1] = 0
        w = (w * b.mT).tril(-1)
        dg = self.scale * e * (dqs * q).sum(2, keepdim=True) - e * (dxs * k).sum(2, keepdim=True)
        dg = dg + w.sum(2, keepdim=True) - w.sum(1)[..., None]
        dg = dg.flip(1).cumsum(1).flip(1) + later.cumsum(1) - later
        dg = dg + self.last * (self.h * self.dh).sum((1, 2), keepdim=True)
        dA, dN = rounded(dA * b.mT), dN * b.mT
        return {
            "o": stored(self.o),
            "dq": stored(self.scale * e * dqs + dA @ k),
            "dk": stored(self.rest * b * ydh - e * dxs + dA.mT @ q - rounded(dN + dN.mT) @ k),
            "dv": stored(self.dx),
            "dg": dg[..., 0],
            "dbeta": stored(dbeta[..., 0]),
        }
