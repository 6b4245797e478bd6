"""Kimi Delta Attention in Triton: the stages of a chunked forward and backward pass, as operators.

    forward    prepare → [boundary → exchange] → scan
    backward   recompute → [boundary_bwd → exchange] → backward

`boundary` and `boundary_bwd` give what context parallelism exchanges; on one device they are left out. A pass keeps its
inputs, Aqk and Gn (2 × 64 numbers of the compute dtype per token and head) between forward and backward.

Tensors are contiguous [B, T, heads, dim] (B folds into T: every row of the batch is an entry of cu_seqlens), cu_seqlens
[N+1] int32 on their device. Tiles of a chunk are [NT, HV, ·, 64]; NT is a bound known on the host, so nothing here
waits for the device. States are fp32 [N, HV, K, V].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.triton.chunks import CHUNK, chunk_table, max_chunks
from titan_linear.ops.triton.configs import config
from titan_linear.ops.triton.kda_bwd import gradient_kernel, matrix_kernel, norm_gradient_kernel, reverse_scan_kernel
from titan_linear.ops.triton.kda_fwd import prepare_kernel, scan_kernel
from titan_linear.ops.triton.library import operator, register_fake
from titan_linear.ops.triton.solve import solve_kernel

GATES = {"none": 0, "softplus": 1, "bounded": 2}
TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix operands: fp16's exponent cannot hold the factors of fast gates, so fp16 inputs use bf16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


class Prepared(NamedTuple):
    """What the scans read of each chunk; C = 64, NT chunks (see kda_fwd for the letters)."""

    first: Tensor  # [N+1] int32, each entry's first chunk
    chunks: Tensor  # [NT, 2] int32 (entry or -1, chunk in it)
    qg: Tensor  # [NT, HV, K, C] scale·q·2^Γ
    kn: Tensor  # [NT, HV, K, C] −k·2^Γ
    kg: Tensor  # [NT, HV, K, C] k·2^(γ−Γ)
    decay: Tensor  # [NT, HV, K] fp32, 2^γ
    b: Tensor  # [NT, HV, C] fp32, β
    Aqk: Tensor  # [NT, HV, C, C]
    Gn: Tensor  # [NT, HV, C, C]


def _tiles(g: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Empty qg, kn, kg, decay, b, Aqk, Gn for gates g [B, T, HV, K]."""
    B, T, HV, K = g.shape
    NT = max_chunks(B * T, cu_seqlens.shape[0] - 1, CHUNK)
    keys = [g.new_empty(NT, HV, K, CHUNK, dtype=dtype) for _ in range(3)]
    small = [g.new_empty(NT, HV, dim, dtype=torch.float32) for dim in (K, CHUNK)]
    return keys + small + [g.new_empty(NT, HV, CHUNK, CHUNK, dtype=dtype) for _ in range(2)]


def _launch_prepare(x, cu_seqlens, chunks, tiles, scale, lower_bound, gate, safe_gate, l2norm) -> None:
    """x = (q, k, g, beta, A_log, dt_bias); tiles: all of `_tiles`, or without Aqk and Gn."""
    H, (HV, K), CT = x[0].shape[2], x[2].shape[2:], compute_dtype(x[0].dtype)
    NT, MATRICES = chunks.shape[0], len(tiles) == 7
    chosen = config(f"kda {'prepare' if MATRICES else 'recompute'}{' safe' if safe_gate else ''}", x[0], K, BK=K)
    if NT > 0:
        prepare_kernel[1 if MATRICES else K // chosen["BK"], HV, NT](
            *x, cu_seqlens, chunks, scale, lower_bound, *tiles, *(() if MATRICES else (None, None)), H=H, HV=HV, K=K,
            CT=TRITON_DTYPE[CT], GATE=gate, SAFE=safe_gate, L2NORM=l2norm, MATRICES=MATRICES, **chosen,
        )  # fmt: skip
        if MATRICES:
            solve_kernel[NT * HV,](tiles[4], tiles[6], STRIDE_B=CHUNK, SCALED=False, **config("solve", x[0], K))


@operator
def kda_prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor,
    scale: float, lower_bound: float, gate: int, safe_gate: bool, l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tiles = _tiles(g, cu_seqlens, compute_dtype(q.dtype))
    chunks, first = chunk_table(cu_seqlens, CHUNK, tiles[0].shape[0])
    x = (q, k, g, beta, A_log, dt_bias)
    _launch_prepare(x, cu_seqlens, chunks, tiles, scale, lower_bound, gate, safe_gate, l2norm)
    return first, chunks, *tiles


@register_fake(kda_prepare)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, lower_bound, gate, safe_gate, l2norm):
    tiles = _tiles(g, cu_seqlens, compute_dtype(q.dtype))
    return torch.empty_like(cu_seqlens), cu_seqlens.new_empty(tiles[0].shape[0], 2), *tiles


@operator
def kda_recompute(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor,
    scale: float, lower_bound: float, gate: int, safe_gate: bool, l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tiles = _tiles(g, cu_seqlens, compute_dtype(q.dtype))[:5]
    chunks, first = chunk_table(cu_seqlens, CHUNK, tiles[0].shape[0])
    x = (q, k, g, beta, A_log, dt_bias)
    _launch_prepare(x, cu_seqlens, chunks, tiles, scale, lower_bound, gate, safe_gate, l2norm)
    return first, chunks, *tiles


@register_fake(kda_recompute)
def _(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, lower_bound, gate, safe_gate, l2norm):
    tiles = _tiles(g, cu_seqlens, compute_dtype(q.dtype))[:5]
    return torch.empty_like(cu_seqlens), cu_seqlens.new_empty(tiles[0].shape[0], 2), *tiles


def _scan(v, cu_seqlens, entries, first, tiles, h0, o, ht, h, r, V: int) -> None:
    """Launches scan_kernel; None leaves an input out or an output unwritten."""
    HV, K = tiles[0].shape[1:3]
    CT = tiles[0].dtype
    chosen = config("kda scan", tiles[0], K, BV=V)
    entry_count = first.shape[0] - 1 if entries is None else entries.shape[0]
    if entry_count > 0:
        scan_kernel[V // chosen["BV"], entry_count * HV](
            v, cu_seqlens, entries, first, *tiles, h0, o, ht, h, r, HV=HV, K=K, V=V, CT=TRITON_DTYPE[CT],
            LISTED=entries is not None, HAS_V=v is not None, HAS_H0=h0 is not None,
            OUTPUT=o is not None, FINAL=ht is not None, KEEP=h is not None,
            **chosen,
        )  # fmt: skip


@operator
def kda_scan(
    v: Tensor, cu_seqlens: Tensor, first: Tensor, qg: Tensor, kn: Tensor, kg: Tensor, decay: Tensor, b: Tensor,
    Aqk: Tensor, Gn: Tensor, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o = torch.empty_like(v)
    ht = v.new_empty(first.shape[0] - 1, v.shape[2], qg.shape[2], v.shape[3], dtype=torch.float32)
    _scan(v, cu_seqlens, None, first, (qg, kn, kg, decay, b, Aqk, Gn), initial_state, o, ht, None, None, v.shape[3])
    return o, ht


@register_fake(kda_scan)
def _(v, cu_seqlens, first, qg, kn, kg, decay, b, Aqk, Gn, initial_state):
    ht = v.new_empty(first.shape[0] - 1, v.shape[2], qg.shape[2], v.shape[3], dtype=torch.float32)
    return torch.empty_like(v), ht


@operator
def kda_boundary(
    v: Tensor, cu_seqlens: Tensor, first: Tensor, qg: Tensor, kn: Tensor, kg: Tensor, decay: Tensor, b: Tensor,
    Aqk: Tensor, Gn: Tensor, entries: Tensor, need_m: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    HV, V, K = *v.shape[2:], qg.shape[2]
    tiles = (qg, kn, kg, decay, b, Aqk, Gn)
    S_ext = v.new_empty(entries.shape[0], HV, K, V, dtype=torch.float32)
    _scan(v, cu_seqlens, entries, first, tiles, None, None, S_ext, None, None, V)
    M = v.new_empty(entries.shape[0] if need_m else 0, HV, K, K, dtype=torch.float32)
    if need_m:
        eye = torch.eye(K, dtype=torch.float32, device=v.device).expand_as(M).contiguous()
        _scan(None, cu_seqlens, entries, first, tiles, eye, None, M, None, None, K)
    return S_ext, M


@register_fake(kda_boundary)
def _(v, cu_seqlens, first, qg, kn, kg, decay, b, Aqk, Gn, entries, need_m):
    F, HV, V, K = entries.shape[0], *v.shape[2:], qg.shape[2]
    return (
        v.new_empty(F, HV, K, V, dtype=torch.float32),
        v.new_empty(F if need_m else 0, HV, K, K, dtype=torch.float32),
    )


def _reverse_scan(do, cu_seqlens, entries, first, tiles, dht, dh0, dh, y) -> None:
    HV, K = tiles[0].shape[1:3]
    V, CT = do.shape[3], tiles[0].dtype
    chosen = config("kda reverse", tiles[0], K, BV=V)
    entry_count = first.shape[0] - 1 if entries is None else entries.shape[0]
    if entry_count > 0:
        reverse_scan_kernel[V // chosen["BV"], entry_count * HV](
            do, cu_seqlens, entries, first, *tiles, dht, dh0, dh, y, HV=HV, K=K, V=V, CT=TRITON_DTYPE[CT],
            LISTED=entries is not None, HAS_DHT=dht is not None, FINAL=dh0 is not None,
            KEEP=dh is not None, **chosen,
        )  # fmt: skip


@operator
def kda_boundary_bwd(
    do: Tensor, cu_seqlens: Tensor, first: Tensor, qg: Tensor, kn: Tensor, kg: Tensor, decay: Tensor, b: Tensor,
    Aqk: Tensor, Gn: Tensor, entries: Tensor,
) -> Tensor:  # fmt: skip
    dS_ext = do.new_empty(entries.shape[0], do.shape[2], qg.shape[2], do.shape[3], dtype=torch.float32)
    tiles = (qg, kn, kg, decay, b, Aqk, Gn)
    _reverse_scan(do, cu_seqlens, entries, first, tiles, None, dS_ext, None, None)
    return dS_ext


@register_fake(kda_boundary_bwd)
def _(do, cu_seqlens, first, qg, kn, kg, decay, b, Aqk, Gn, entries):
    return do.new_empty(entries.shape[0], do.shape[2], qg.shape[2], do.shape[3], dtype=torch.float32)


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [.., D] as a matrix that the copy engine reads in blocks of rows and columns."""
    return TensorDescriptor(x, [x.numel() // x.shape[-1], x.shape[-1]], [x.shape[-1], 1], [rows, columns])


def _norm_gradient(x: Tensor, dn: Tensor) -> Tensor:
    """x [B, T, H, K], dn [B, T, HV, K], the gradient of l2norm(x) → that of x."""
    (B, T, H, K), dx = x.shape, torch.empty_like(x)
    ROWS = 4096 // K
    if x.numel() > 0:
        norm_gradient_kernel[triton.cdiv(B * T * H, ROWS),](x, dn, dx, B * T, H=H, HV=dn.shape[2], K=K, ROWS=ROWS)
    return dx


@operator
def kda_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor, first: Tensor, chunks: Tensor,
    qg: Tensor, kn: Tensor, kg: Tensor, decay: Tensor, b: Tensor, Aqk: Tensor, Gn: Tensor,
    do: Tensor, initial_state: Tensor | None, d_final_state: Tensor | None,
    scale: float, lower_bound: float, gate: int, safe_gate: bool, l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (H, K), (HV, V), NT, CT = q.shape[2:], v.shape[2:], chunks.shape[0], qg.dtype
    tiles = (qg, kn, kg, decay, b, Aqk, Gn)
    h, dh = (v.new_empty(NT, HV, V, K, dtype=CT) for _ in range(2))
    r, y = (v.new_empty(NT, HV, V, CHUNK, dtype=CT) for _ in range(2))
    dh0 = v.new_empty(first.shape[0] - 1, HV, K, V, dtype=torch.float32)
    _scan(v, cu_seqlens, None, first, tiles, initial_state, None, None, h, r, V)
    _reverse_scan(do, cu_seqlens, None, first, tiles, d_final_state, dh0, dh, y)
    # With grouped value heads each writes its own dq and dk, in fp32, summed below.
    dq, dk = (torch.empty_like(g, dtype=q.dtype if HV == H else torch.float32) for _ in range(2))
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    matrix, gradient = config("kda matrix", q, K, BV=V), config("kda gradient", q, K, BK=K, BV=V)
    dA_part, dbias_part = (
        g.new_zeros(NT, HV, dim, dtype=torch.float32) if gate else None for dim in (K // gradient["BK"], K)
    )
    dA, dK = (v.new_empty(NT, HV, CHUNK, CHUNK, dtype=CT) for _ in range(2))
    diagonal = torch.empty_like(b)
    if q.numel() > 0:
        matrix_kernel[HV, NT](
            beta, cu_seqlens, chunks, do, r, y, scale, dA, dK, diagonal, dv, dbeta, HV=HV, V=V,
            CT=TRITON_DTYPE[CT], **matrix,
        )  # fmt: skip
        BK, BV = gradient["BK"], gradient["BV"]
        states = [_blocks(x, BV, width) for x, width in ((r, CHUNK), (y, CHUNK), (h, BK), (dh, BK))]
        gradient_kernel[K // BK, HV, NT](
            q, k, g, A_log, dt_bias, cu_seqlens, chunks, b, _blocks(do.flatten(2), CHUNK, BV), *states, dA, dK,
            diagonal, scale, lower_bound, dq, dk, dg, dA_part, dbias_part, H=H, HV=HV, K=K, V=V,
            CT=TRITON_DTYPE[CT], GATE=gate, SAFE=safe_gate, L2NORM=l2norm, **gradient,
        )  # fmt: skip
    if l2norm:
        dq, dk = (_norm_gradient(x, dn) for x, dn in ((q, dq), (k, dk)))
    elif HV != H:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    dA_log = dA_part.sum((0, 2)) if gate else g.new_empty(0)
    ddt_bias = dbias_part.sum(0).flatten() if gate else g.new_empty(0)
    return dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias


@register_fake(kda_backward)
def _(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, first, chunks, qg, kn, kg, decay, b, Aqk, Gn, do, initial_state,
      d_final_state, scale, lower_bound, gate, safe_gate, l2norm):  # fmt: skip
    HV, K, V = *g.shape[2:], v.shape[3]
    dh0 = v.new_empty(first.shape[0] - 1, HV, K, V, dtype=torch.float32)
    dA_log, ddt_bias = (g.new_empty(n, dtype=torch.float32) if gate else g.new_empty(0) for n in (HV, HV * K))
    return (*(torch.empty_like(x) for x in (q, k, v, g, beta)), dh0, dA_log, ddt_bias)


def prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, scale: float, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, gate: str = "none", safe_gate: bool = False,
    l2norm: bool = False,
) -> Prepared:  # fmt: skip
    """Everything inside the chunks. gate: "none" (g is the log decay), "softplus" or "bounded" (g is raw)."""
    bound = 0.0 if lower_bound is None else lower_bound
    args = (q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, bound, GATES[gate], safe_gate, l2norm)
    return Prepared(*kda_prepare(*args))


def recompute(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, Aqk: Tensor, Gn: Tensor, cu_seqlens: Tensor, *, scale: float,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None, gate: str = "none",
    safe_gate: bool = False, l2norm: bool = False,
) -> Prepared:  # fmt: skip
    """`prepare` from its kept Aqk and Gn."""
    bound = 0.0 if lower_bound is None else lower_bound
    args = (q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, bound, GATES[gate], safe_gate, l2norm)
    return Prepared(*kda_recompute(*args), Aqk, Gn)


def scan(
    prepared: Prepared, v: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """→ o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] fp32."""
    first, _, *tiles = prepared
    return kda_scan(v, cu_seqlens, first, *tiles, initial_state)


def boundary(
    prepared: Prepared, v: Tensor, cu_seqlens: Tensor, entries: Tensor, need_m: bool
) -> tuple[Tensor, Tensor | None]:
    """entries [F] int32 → S_ext [F, HV, K, V], each listed entry's end state from a zero state, and, if need_m,
    M [F, HV, K, K], its transition; both fp32."""
    first, _, *tiles = prepared
    S_ext, M = kda_boundary(v, cu_seqlens, first, *tiles, entries, need_m)
    return S_ext, M if need_m else None


def boundary_bwd(prepared: Prepared, do: Tensor, cu_seqlens: Tensor, entries: Tensor) -> Tensor:
    """→ dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last state has none."""
    first, _, *tiles = prepared
    return kda_boundary_bwd(do, cu_seqlens, first, *tiles, entries)


def backward(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, cu_seqlens: Tensor,
    initial_state: Tensor | None, d_final_state: Tensor | None, *, scale: float, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, gate: str = "none", safe_gate: bool = False,
    l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """→ dq, dk, dv, dg, dbeta (each in its input's dtype), d_initial_state fp32, dA_log and ddt_bias fp32 (empty
    without a gate in the kernel)."""
    bound = 0.0 if lower_bound is None else lower_bound
    return kda_backward(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, *prepared, do, initial_state, d_final_state,
        scale, bound, GATES[gate], safe_gate, l2norm,
    )  # fmt: skip
