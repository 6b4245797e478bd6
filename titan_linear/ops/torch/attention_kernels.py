"""Kernels that compute a block of softmax attention, and the table of where each one runs.

Each kernel returns o and its log-sum-exp and, in backward, dq, dk and dv from the merged o
and lse. Shapes are as in attention.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.spans import CUDNN_MULTIPLE, Varlen
from titan_linear.ops.runtime.support import (
    HALF,
    Choice,
    Implementation,
    Op,
    Target,
    capability_in,
    choose,
    dims_up_to,
    dtype_in,
    instead_of,
    on_ampere,
    on_cpu,
    on_gpu,
    without_autocast,
)
from titan_linear.ops.torch import flash4

aten = torch.ops.aten

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
Operator = Callable[..., tuple[Tensor, ...]]

LSE_ROWS = 32  # the number of rows of the efficient kernel's LSE is a multiple of this
# Kernels whose causal mask is aligned to the end, and that take all spans in one call.
TO_THE_END = "flash4", "flash"


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks merge and gradients add up: fp32 (fp64 for fp64)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- flash4: FlashAttention-4 -------------------------------------------------------------


def _flash4_forward(
    q,
    k,
    v,
    scale: float,
    causal: bool,
    varlen: Varlen | None = None,
) -> Pair:
    q, k, v = _two_widths(q, k, v)
    return flash4.forward(q, k, v, scale, causal, varlen)


def _flash4_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
    varlen: Varlen | None = None,
) -> Triple:
    q, k, v, do, o = _two_widths(q, k, v, do, o)
    return flash4.backward(do, q, k, v, o, lse.contiguous(), scale, causal, varlen)


def _two_widths(q: Tensor, k: Tensor, *as_v: Tensor) -> list[Tensor]:
    """Pad heads to one width, or to MLA's two, which FlashAttention-4 and cuDNN support."""
    D, Dv = flash4.widths(q.shape[-1], as_v[0].shape[-1], grouped=q.shape[2] != k.shape[2])
    return [
        *_equal_width(q, k, at_least=D, multiple=8),
        *_equal_width(*as_v, at_least=Dv, multiple=8),
    ]


# --- cpu: aten's flash attention ----------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    q, k, v = _heads_first(*_equal_width(q, k, v))
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return o.transpose(1, 2), lse


def _cpu_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
) -> Triple:
    do, q, k, v, o = _heads_first(*_equal_width(do, q, k, v, o))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, scale=scale
    )
    return tuple(g.transpose(1, 2) for g in grads)


# --- cudnn: the same interface; grouped heads natively ------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    q, k, v = _heads_first(*_two_widths(q, k, v))
    o, lse = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return o.transpose(1, 2), lse.reshape(q.shape[:3])


def _cudnn_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
) -> Triple:
    Tq = q.shape[1]
    Tk = k.shape[1]
    q, k, v, do, o = _heads_first(*_two_widths(q, k, v, do, o))
    lse = lse.contiguous().unsqueeze(-1)  # [B, Hq, Tq, 1]
    # no dropout: neither seed nor offset is read
    unused = torch.empty(2, dtype=torch.int64, device=q.device)[0]
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, unused, unused, None, None, None, Tq, Tk, 0.0, causal, scale=scale
    )
    return tuple(g.transpose(1, 2) for g in grads)


# --- flash: always by its packed function; a batch is B documents of one length -----------


def _flash_forward(
    q,
    k,
    v,
    scale: float,
    causal: bool,
    varlen: Varlen | None = None,
) -> Pair:
    B, Tq, Hq = q.shape[:3]
    varlen = varlen or _batch_varlen(q, k)
    q, k, v = (x.flatten(0, 1) for x in _equal_width(q, k, v, multiple=8))  # [B·T, H, D]
    o, lse = aten._flash_attention_forward(q, k, v, *varlen, 0.0, causal, False, scale=scale)[:2]
    return o.view(B, Tq, Hq, -1), lse.view(Hq, B, Tq).transpose(0, 1)


def _flash_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
    varlen: Varlen | None = None,
) -> Triple:
    B = q.shape[0]
    varlen = varlen or _batch_varlen(q, k)
    do, q, k, v, o = (x.flatten(0, 1) for x in _equal_width(do, q, k, v, o, multiple=8))
    lse = lse.transpose(0, 1).flatten(1).contiguous()  # [Hq, B·Tq]
    # no dropout: the random state is not read
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    # aten chooses its repeatable algorithm only in mode "error"; use it in mode "warn", too.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if mode else "default")
    try:
        grads = aten._flash_attention_backward(
            do, q, k, v, o, lse, *varlen, 0.0, causal, unused, unused, scale=scale
        )
    finally:
        torch.set_deterministic_debug_mode(mode)
    return tuple(g.unflatten(0, (B, -1)) for g in grads)


def _batch_varlen(q: Tensor, k: Tensor) -> Varlen:
    """Describe a batch as B documents of Tq queries and Tk keys.

    The boundaries are made on the device, without a copy.
    """
    B, Tq = q.shape[:2]
    Tk = k.shape[1]
    cu_q, cu_k = (
        torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device) for T in (Tq, Tk)
    )
    return cu_q, cu_k, Tq, Tk


# --- efficient: the interface of cudnn; a key head for each query head --------------------


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    Tq = q.shape[1]
    groups = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(groups, dim=2)
    v = v.repeat_interleave(groups, dim=2)
    q, k, v = _heads_first(*_equal_width(q, k, v, multiple=4))
    o, lse = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )[:2]
    return o.transpose(1, 2), lse[..., :Tq]


def _efficient_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
) -> Triple:
    Tq, Hq = q.shape[1:3]
    Hkv = k.shape[2]
    k, v = (x.repeat_interleave(Hq // Hkv, dim=2) for x in (k, v))
    do, q, k, v, o = _heads_first(*_equal_width(do, q, k, v, o, multiple=4))
    lse = F.pad(lse, (0, -Tq % LSE_ROWS), value=torch.inf).contiguous()
    # no dropout: neither seed nor offset is read
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]
    grads = aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, lse, unused, unused, 0.0, wanted, causal, scale=scale
    )
    dq, dk, dv = (g.transpose(1, 2) for g in grads[:3])
    return dq, *(x.unflatten(2, (Hkv, -1)).sum(3) for x in (dk, dv))


# --- tiled: any dtype, any width, any device; memory is TILE rows of scores ---------------

TILE = 128  # rows of queries that are computed at a time


@without_autocast
def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    acc = accumulator_dtype(q.dtype)
    k, v = (x.transpose(1, 2).to(acc) for x in (k, v))  # [B, Hkv, Tk, D]
    outputs = []
    lses = []
    for i in range(0, q.shape[1], TILE):
        rows = q[:, i : i + TILE]
        scores = _tile_scores(rows, k, scale, i if causal else None)  # [B, Hkv, G·t, keys]
        lse = scores.logsumexp(-1, keepdim=True)
        o = (scores - lse).exp_() @ v[:, :, : scores.shape[-1]]
        outputs.append(_unfold_groups(o, rows).to(q.dtype))
        lses.append(_unfold_groups(lse, rows).squeeze(-1).transpose(1, 2))
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=2)


@without_autocast
def _tiled_backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    scale: float,
    causal: bool,
) -> Triple:
    acc = accumulator_dtype(q.dtype)
    Hkv = k.shape[2]
    k, v = (x.transpose(1, 2).to(acc) for x in (k, v))
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    dqs = []
    # Each tile of queries recomputes its probabilities from the scores and lse.
    for i in range(0, q.shape[1], TILE):
        rows, do_t, o_t = (x[:, i : i + TILE] for x in (q, do, o))
        lse_t = _fold_groups(lse[:, :, i : i + TILE].transpose(1, 2).unsqueeze(-1), Hkv)
        # [B, Hkv, G·t, keys]
        p = (_tile_scores(rows, k, scale, i if causal else None) - lse_t).exp_()
        keys = p.shape[-1]
        do_t = _fold_groups(do_t.to(acc), Hkv)
        o_t = _fold_groups(o_t.to(acc), Hkv)
        # Gradients of the scores, then of v, k and q.
        delta = (do_t * o_t).sum(-1, keepdim=True)
        ds = p * (do_t @ v[:, :, :keys].mT - delta) * scale
        dv[:, :, :keys] += p.mT @ do_t
        dk[:, :, :keys] += ds.mT @ _fold_groups(rows.to(acc), Hkv)
        dqs.append(_unfold_groups(ds @ k[:, :, :keys], rows))
    return torch.cat(dqs, dim=1), dk.transpose(1, 2), dv.transpose(1, 2)


def _tile_scores(q: Tensor, k: Tensor, scale: float, first: int | None) -> Tensor:
    """Compute the scores of a tile q [B, t, Hq, D] against k [B, Hkv, Tk, D].

    `first` is the tile's row in a causal square; None: without a mask.
    """
    t = q.shape[1]
    Hkv = k.shape[1]
    if first is None:
        return _fold_groups(q.to(k.dtype), Hkv) @ k.mT * scale
    # Only keys up to the tile's last row; mask its own triangle.
    scores = _fold_groups(q.to(k.dtype), Hkv) @ k[:, :, : first + t].mT * scale
    later = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores.unflatten(2, (-1, t))[..., first:].masked_fill_(later, -torch.inf)
    return scores


def _fold_groups(x: Tensor, Hkv: int) -> Tensor:
    """Reshape [B, t, Hq, D] → [B, Hkv, G·t, D].

    Queries that share a key head become rows of one matrix.
    """
    return x.unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold_groups(x: Tensor, like: Tensor) -> Tensor:
    """Reshape [B, Hkv, G·t, D] → [B, t, Hq, D], with the t of `like`."""
    return x.unflatten(2, (-1, like.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _equal_width(*tensors: Tensor, at_least: int = 0, multiple: int = 1) -> list[Tensor]:
    """Pad the last dims with zeros to one width, which changes neither scores nor outputs.

    With a `multiple`, the width and every stride are multiples of it: the alignment that
    CUDA kernels require.
    """
    width = max(at_least, *(x.shape[-1] for x in tensors))
    width = -(-width // multiple) * multiple
    return [x if _is_aligned(x, width, multiple) else _padded(x, width) for x in tensors]


def _is_aligned(x: Tensor, width: int, multiple: int) -> bool:
    # aten's kernels, called directly, do not check the last stride.
    if x.shape[-1] != width or x.stride(-1) != 1:
        return False
    rows = x.stride()[:-1]  # 0 where a gradient was expanded
    return multiple == 1 or (
        x.storage_offset() % multiple == 0 and all(s and s % multiple == 0 for s in rows)
    )


def _padded(x: Tensor, width: int) -> Tensor:
    padded = x.new_zeros(*x.shape[:-1], width)
    padded[..., : x.shape[-1]] = x
    return padded


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


# --- The table ----------------------------------------------------------------------------

# Compute capabilities on which cuDNN's attention is faster than PyTorch's flash.
CUDNN = (9, 0), (10, 0), (10, 3)
FLASH4 = CUDNN  # capabilities for which FlashAttention-4 has specific kernels
WITHOUT_FLASH4 = "packed documents take half as long again without it (docs/performance.md)"


class BlockKernel(NamedTuple):
    """Functions that compute a block.

    Those called padded_… may return rows with more channels, where they padded with zeros.
    """

    padded_forward: Operator
    padded_backward: Operator

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Pair:
        """Compute o and lse. how: scale, causal and, for TO_THE_END, packed spans."""
        o, lse = self.padded_forward(q, k, v, *how)
        return o[..., : v.shape[-1]], lse

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Triple:
        """Compute dq, dk and dv. how: the merged o and lse, then as in forward."""
        dq, dk, dv = self.padded_backward(do, q, k, v, *how)
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def lengths_recur(t: Target) -> str | None:
    return None if t.dims.get("recurring") else "it compiles a plan for every new pair of lengths"


def cudnn_holds(t: Target) -> str | None:
    """Limit cuDNN's wide heads to the cases that were measured.

    These are squares on Hopper, with a cuDNN after 9.11 and 9.12, whose backward pass is
    wrong for some widths there (release notes of cudnn-frontend 1.14.1).
    """
    wide = max(t.dims["D"], t.dims["Dv"])
    measured = (
        t.capability == (9, 0)
        and t.dims.get("square")
        and (torch.backends.cudnn.version() or 0) >= 91300
    )
    return None if wide <= (256 if measured else 128) else f"heads of {wide} channels are too wide"


def may_vary(t: Target) -> str | None:
    """Refuse a kernel that is not bitwise repeatable where determinism is required."""
    return "torch.use_deterministic_algorithms is on" if t.dims.get("deterministic") else None


def flash4_installed(_: Target) -> str | None:
    return flash4.installed()


def flash4_is_right(t: Target) -> str | None:
    return flash4.problem(t.dtype, t.dims["D"], t.dims["Dv"])


IN_HALF = on_gpu, dtype_in(*HALF)
WIDE = dims_up_to(256, "D", "Dv")
ATTENTION = Op(
    "attention",
    {
        "flash4": Implementation(
            lambda: BlockKernel(_flash4_forward, _flash4_backward),
            (*IN_HALF, capability_in(FLASH4), WIDE, flash4_installed, flash4_is_right),
        ),
        "cpu": Implementation(lambda: BlockKernel(_cpu_forward, _cpu_backward), (on_cpu,)),
        "cudnn": Implementation(
            lambda: BlockKernel(_cudnn_forward, _cudnn_backward),
            (*IN_HALF, capability_in(CUDNN), cudnn_holds, lengths_recur, may_vary),
        ),
        "flash": Implementation(
            lambda: BlockKernel(_flash_forward, _flash_backward),
            (*IN_HALF, on_ampere, WIDE),
            instead_of("flash4", WITHOUT_FLASH4, on=FLASH4),
        ),
        "efficient": Implementation(
            lambda: BlockKernel(_efficient_forward, _efficient_backward),
            (on_gpu, dtype_in(torch.float32), on_ampere, WIDE, may_vary),
        ),
        "tiled": Implementation(
            lambda: BlockKernel(_tiled_forward, _tiled_backward),
            remark=instead_of("flash", "expect it to be several times slower"),
        ),
    },
)


def block_kernel(
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    Dv: int,
    Tq: int,
    Tk: int,
) -> str:
    """Return the name of the kernel that computes a block of these shapes.

    `ATTENTION` has the conditions.

    - "flash4": FlashAttention-4 where it is installed (bf16, fp16; ops/torch/flash4.py). It
      is the fastest, for any lengths.
    - "cpu": PyTorch's flash attention for the CPU.
    - "cudnn": cuDNN's attention, PyTorch's fastest on Hopper (bf16, fp16; D, Dv <= 128, or
      256 with as many keys as queries). For 32768 causal tokens of 32 heads of 128 it takes
      55 ms, forward and backward, where flash takes 94 ms (H200); with MLA's widths of 192
      and 128 it takes 76 ms, and flash 161 ms. But it compiles a plan for every new pair of
      lengths (0.15 s). So it is used for lengths that recur in every batch, multiples of 128
      (whole fragments, whole streams), and not for the lengths of documents. Its dq is not
      bitwise repeatable, so it is not used under torch.use_deterministic_algorithms.
    - "flash": FlashAttention-2, through its function for packed sequences (bf16, fp16; D,
      Dv <= 256).
    - "efficient": PyTorch's memory-efficient attention (fp32; D, Dv <= 256). Its products
      are as exact as fp32 products: each is three products of parts in tf32.
    - "tiled": matrix products in tiles of 128 queries: fp64 on CUDA, and wider heads.
    """
    recurring = Tq % CUDNN_MULTIPLE == 0 and Tk % CUDNN_MULTIPLE == 0
    return attention_kernel(device, dtype, D, Dv, recurring, square=Tq == Tk).implementation


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    Dv: int,
    recurring: bool,
    square: bool = True,
) -> Choice:
    """Choose the kernel of a block of attention.

    Args:
        recurring: whether its lengths recur in every batch.
        square: whether its numbers of queries and keys are equal.
    """
    facts = {
        "recurring": int(recurring),
        "square": int(square),
        "deterministic": int(torch.are_deterministic_algorithms_enabled()),
    }
    return choose(ATTENTION, "auto", device, dtype, D=D, Dv=Dv, **facts)


def whole_streams(
    packed: Choice, device: torch.device, dtype: torch.dtype, dims: Mapping[str, int]
) -> Choice:
    """Return the choice for documents of any length.

    It has a remark if lengths that recur use another kernel.
    """
    recurring = attention_kernel(
        device, dtype, dims["D"], dims["Dv"], recurring=True
    ).implementation
    if recurring == packed.implementation:
        return packed
    where = f"and {recurring} for whole streams and fragments of them"
    return packed._replace(why="; ".join(filter(None, (where, packed.why))))
