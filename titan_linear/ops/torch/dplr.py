"""The chunked recurrence whose transition is diagonal plus low rank (RWKV-7).

    S ← e^g ⊙ S + b (aᵀS) + k vᵀ

With G the cumulative log decay inside a chunk, a token reads y = aᵀS of the state before
it. All reads of a chunk solve

    Y = (A⊙e^{G'}) S + A_ak V + A_ab Y

by forward substitution, where G' are the sums up to the token before, and A_ab and A_ak are
strictly lower triangular. (A Neumann series would add powers of A_ab, which may be large.)
A chunk then has two rows for each token: what it writes (k, v), and where it writes what it
read (b, y).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.runtime.options import DPLRInputs, DPLROptions
from titan_linear.ops.torch.chunked import ChunkLayout, Prepared, TorchRule, sums_after
from titan_linear.ops.torch.delta_rule import pair_products, solved


class TorchDPLR(TorchRule):
    @staticmethod
    def prepare(inputs: DPLRInputs, options: DPLROptions, chunks: ChunkLayout) -> Prepared:
        q, k, v, a, b, g = (chunks.split(x) for x in widened(inputs, options))
        q = q * options.scale
        gamma = g.cumsum(-2).exp()  # [NC, H, C, K]
        before = F.pad(g[:, :, :-1], (0, 0, 1, 0)).cumsum(-2).exp()
        # A token reads the state after the previous token, so its products are the previous
        # token's, one row further down.
        rows = torch.cat([q, F.pad(a[:, :, 1:], (0, 0, 0, 1))], 1)
        (qk, ak), (qb, ab) = (
            pair_products(rows, x, g, safe_gate=True).tril().chunk(2, dim=1) for x in (k, b)
        )
        ak, ab = (F.pad(x[:, :, :-1], (0, 0, 1, 0)) for x in (ak, ab))  # [NC, H, C, C]
        # Solve for the reads, and stack two rows for each token.
        w, u = solved(-ab, -a * before, ak @ v)
        return Prepared(
            w=torch.cat([torch.zeros_like(w), w], -2),
            u=torch.cat([v, u], -2),
            kg=torch.cat([k, b], -2) * sums_after(g).exp().repeat(1, 1, 2, 1),
            qg=q * gamma,
            aqk=torch.cat([qk, qb], -1),
            decay=gamma[:, :, -1],
        )


def step(inputs: DPLRInputs, options: DPLROptions, S: Tensor) -> tuple[Tensor, Tensor]:
    """Process one token of each of N sequences.

    S [N, H, K, V] -> (o [N, H, V], the next states).
    """
    q, k, v, a, b, g = (x.unsqueeze(-2) for x in widened(inputs, options))  # [N, H, 1, .]
    S = S * g.exp().mT + b.mT @ (a @ S) + k.mT @ v
    return ((q * options.scale) @ S).squeeze(-2), S


def widened(inputs: DPLRInputs, options: DPLROptions) -> list[Tensor]:
    """Return the inputs in the dtype of the computation, with log decays."""
    *tokens, gk = (x.to(torch.promote_types(inputs.q.dtype, torch.float32)) for x in inputs)
    return [*tokens, gk if options.rate is None else options.rate * gk.sigmoid()]
