"""FlashAttention-4 (`flash-attn-4` on PyPI).

All calls to it are in this module, because its entry points are private and its API is
young. Nothing is taken on trust. `installed` requires a version that this module was
written for. `problem` compares a small packed case, forward and backward, with exact
attention on the GPU at hand. If either finds a fault, PyTorch's kernels run.

Shapes: q [B, Tq, Hq, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv], o like q with Dv, lse
[B, Hq, Tq] fp32. For packed sequences B = 1, and `varlen` has the boundaries of q and of k,
[N+1] int32 on the device, and the length of the longest of each. The causal mask is aligned
to the end. D and Dv must be widths that `widths` returns: the backward pass supports no
others.

A row that is not finite also spoils neighboring documents: masked keys have weight 0, and
0 · NaN is NaN.
"""

import importlib.metadata
import os
import warnings
from functools import cache
from types import ModuleType

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

PACKAGE = "flash-attn-4"
VERSIONS = SpecifierSet(">=4.0.0b36,<4.1", prereleases=True)
# Largest relative RMS error of the small case. bf16's is below 2^-7, a wrong mask's above 2^-2.
CHECKED = 2**-5

Varlen = tuple[Tensor, Tensor, int, int]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    varlen: Varlen | None,
) -> tuple[Tensor, Tensor]:
    """Compute o and lse."""
    if varlen is None:
        return _interface()._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=causal, return_lse=True
        )[:2]
    o, lse = _interface()._flash_attn_fwd(
        q[0], k[0], v[0], **_named(varlen), softmax_scale=scale, causal=causal, return_lse=True
    )[:2]
    return o[None], lse[None]


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    varlen: Varlen | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from the merged o and lse."""
    how = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if varlen is None:
        return _interface()._flash_attn_bwd(q, k, v, o, do, lse, scale, causal, **how)[:3]
    packed = (x[0] for x in (q, k, v, o, do, lse))
    dq, dk, dv = _interface()._flash_attn_bwd(*packed, scale, causal, **_named(varlen), **how)[:3]
    return dq[None], dk[None], dv[None]


def widths(D: int, Dv: int, grouped: bool = False) -> tuple[int, int]:
    """Return the padded head dims: multiples of 8, and equal except for MLA's (192, 128)
    where heads are not grouped.
    """
    D = -(-D // 8) * 8
    Dv = -(-Dv // 8) * 8
    return (D, Dv) if (D, Dv) == (192, 128) and not grouped else 2 * (max(D, Dv),)


def _named(varlen: Varlen) -> dict:
    return dict(
        zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), varlen, strict=True)
    )


@cache
def _interface() -> ModuleType:
    # Kernels are compiled at first use, which takes seconds. Keep them for the next
    # process, as Triton does.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # This warning is for the authors of FlashAttention-4.
    warnings.filterwarnings(
        "ignore", "Argument .* cannot be converted to a JitArgument", UserWarning
    )
    from flash_attn.cute import interface

    return interface


def installed() -> str | None:
    """Return why FlashAttention-4 cannot be used on any GPU, or None."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    return None if version in VERSIONS else f"{PACKAGE} is {version}, and {VERSIONS} is known"


@cache
def problem(dtype: torch.dtype, D: int, Dv: int, device: str = "cuda") -> str | None:
    """Return why FlashAttention-4 is not used for these head dims on the current GPU, or
    None if its results are right.
    """
    try:
        errors = _errors(device, dtype, *widths(D, Dv))
    # A compiler, a driver or another version may raise any exception.
    except Exception as error:
        return f"{PACKAGE} fails on a small case: {type(error).__name__}: {str(error)[:200]}"
    wrong = {name: f"{e:.1g}" for name, e in errors.items() if not e <= CHECKED}
    return f"{PACKAGE} gives wrong numbers on a small case: {wrong}" if wrong else None


def _errors(device: str, dtype: torch.dtype, D: int, Dv: int) -> dict[str, float]:
    """Return relative RMS errors on two spans, the first with more keys than queries; heads
    are grouped if D = Dv.
    """
    # Two spans of random numbers, on every GPU the same.
    generator = torch.Generator().manual_seed(0)
    rows = [0, 40, 100]
    keys = [0, 72, 132]
    heads = (4, 2 if Dv == D else 4)
    shapes = (
        (rows[-1], heads[0], D),
        (keys[-1], heads[1], D),
        (keys[-1], heads[1], Dv),
        (rows[-1], heads[0], Dv),
    )
    q, k, v, do = (torch.randn(1, *s, generator=generator).to(device, dtype) for s in shapes)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, keys))
    varlen = cu_q, cu_k, 60, 72
    scale = D**-0.5
    # Compare with exact attention in float64.
    o, lse = forward(q, k, v, scale, True, varlen)
    ours = {
        "o": o,
        **dict(
            zip(("dq", "dk", "dv"), backward(do, q, k, v, o, lse, scale, True, varlen), strict=True)
        ),
    }
    exact = _exact(rows, keys, scale, *(x.double() for x in (q, k, v, do)))
    return {name: ((ours[name] - x).norm() / x.norm()).item() for name, x in exact.items()}


def _exact(
    rows: list[int],
    keys: list[int],
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
) -> dict[str, Tensor]:
    """Compute the same results from an explicit mask, in the dtype of the inputs.

    Gradients are written out, because the caller may run below autograd.
    """
    # A query sees the keys of its span that are no nearer to the end than it is.
    span_q, span_k = (
        torch.bucketize(torch.arange(x[-1]), torch.tensor(x[1:]), right=True) for x in (rows, keys)
    )
    to_end_q = torch.tensor(rows[1:])[span_q] - torch.arange(rows[-1])
    to_end_k = torch.tensor(keys[1:])[span_k] - torch.arange(keys[-1])
    sees = ((span_q[:, None] == span_k) & (to_end_q[:, None] <= to_end_k)).to(q.device)
    # Forward, then the gradients of softmax attention.
    groups = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(groups, 2)
    v = v.repeat_interleave(groups, 2)
    q, do, k, v = (x.transpose(1, 2) for x in (q, do, k, v))
    p = (q @ k.mT * scale).masked_fill(~sees, -torch.inf).softmax(-1)  # [B, Hq, Tq, Tk]
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q, p.mT @ do))
    results = {"o": p @ v, "dq": ds @ k, "dk": dk, "dv": dv}
    return {name: x.transpose(1, 2) for name, x in results.items()}
