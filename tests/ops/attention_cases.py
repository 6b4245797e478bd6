"""Cases of softmax attention, and its definition."""

import torch

from titan_linear.ops.attention import attention
from titan_linear.ops.reference.attention import attention as reference

# name: B, Tq, Tk, Hq, Hkv, D, Dv, causal, boundaries
CASES = {
    "dense": (2, 33, 33, 2, 2, 8, 8, True, None),
    "one token": (2, 1, 1, 2, 1, 8, 8, True, None),
    "several tiles": (1, 300, 300, 2, 1, 8, 8, True, None),
    "grouped": (2, 33, 33, 6, 2, 8, 8, True, None),
    "wide values": (1, 33, 33, 4, 2, 8, 20, True, None),
    "narrow values": (1, 33, 33, 4, 2, 12, 5, True, None),
    "not causal": (2, 33, 33, 4, 2, 8, 8, False, None),
    "cross": (2, 33, 7, 4, 2, 8, 8, False, None),
    "decoding one": (2, 1, 33, 4, 2, 8, 12, True, None),
    "decoding many": (2, 9, 33, 4, 2, 8, 12, True, None),
    "packed": (1, 64, 64, 4, 2, 8, 12, True, [0, 1, 2, 17, 17, 40, 64]),
    "packed, not causal": (1, 64, 64, 4, 2, 8, 12, False, [0, 1, 30, 64]),
    "all of one token": (1, 5, 5, 2, 2, 8, 8, True, [0, 1, 2, 3, 4, 5]),
}


def make(B, Tq, Tk, Hq, Hkv, D, Dv, dtype=torch.float64, device="cpu", seed=0):
    """q, k, v (leaves) and do."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv), (B, Tq, Hq, Dv)
    q, k, v, do = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def run(fn, q, k, v, do, **kwargs):
    """(o, dq, dk, dv)"""
    o = fn(q, k, v, **kwargs)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.to(o.dtype))


def error(x, y):
    """RMS error of x relative to y, absolute where y is as good as zero (a lone token's dq and dk)."""
    return ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1)).item()


def against_reference(case, dtype=torch.float64, device="cpu", **kwargs):
    *shape, causal, boundaries = case
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    tensors = make(*shape, dtype=dtype, device=device)
    ours = run(attention, *tensors, causal=causal, cu_seqlens=cu_seqlens, **kwargs)
    oracle = run(reference, *tensors, causal=causal, cu_seqlens=cu_seqlens, **kwargs)
    assert ours[0].dtype == dtype and all(x.shape == y.shape for x, y in zip(ours, oracle))
    return [error(x, y) for x, y in zip(ours, oracle)]
