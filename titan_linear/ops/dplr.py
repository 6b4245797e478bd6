"""Recurrences whose transition is diagonal plus low rank, among them RWKV-7's: the public functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.recurrence import Recurrence, check_queries, rules, run
from titan_linear.ops.runtime.options import (
    DPLRInputs,
    DPLROptions,
    Result,
    Sequences,
    check_chunk_size,
    scale_of,
)
from titan_linear.ops.runtime.support import Choice
from titan_linear.ops.torch.dplr import TorchDPLR, step
from titan_linear.ops.triton.configs import delta_rule_needs, without_kernels

SAFE = -5.0  # the bound of the log decays that `safe_gate` promises
RWKV7_BOUND = -2.0  # of those of RWKV-7, for which a chunk needs no sub-blocks
RWKV7_DECAY = -math.exp(-0.5)  # the bound of the model's own

DPLR = Recurrence("chunk_dplr_delta_rule", without_kernels(lambda: TorchDPLR), (), step)
RWKV7 = Recurrence(
    "chunk_rwkv7",
    rules(TorchDPLR, *delta_rule_needs("rwkv7", 64)),
    (),
    step,
    {"q": "r", "gk": "w"},
)


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    cp_context: CPContext | None = None,
    lower_bound: float | None = None,
    *,
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """S_t = Diag(exp gk_t) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ;  o_t = scale·S_tᵀ q_t.

    Arguments are those of FLA's function of this name; the ones not listed are those of delta_rule.py.

    Args:
        q, k, a, b: [B, T, H, K]; v: [B, T, H, V].
        gk: [B, T, H, K], natural logs of the decay, ≤ 0, −∞ too.
        safe_gate, lower_bound: promises that gk ≥ −5, and that gk ≥ lower_bound; a bound of −5 or more saves work.

    Returns: o [B, T, H, V] in v's dtype; final states [N, H, K, V] float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: an argument does not fit the others or is not supported; the message names it. Values of gk are
            checked only where they are on the CPU.
    """
    check_chunk_size(chunk_size)
    least = _promised(safe_gate, lower_bound)
    options = DPLROptions(scale_of(scale, q), None, least >= SAFE, disable_recompute)
    sequences = Sequences(
        initial_state,
        output_final_state,
        False,
        cu_seqlens,
        cu_seqlens_cpu,
        cp_context,
        cp_method,
        parents,
    )
    inputs = DPLRInputs(q, k, v, a, b, gk)
    _check(DPLR, inputs, least)
    return run(DPLR, inputs, options, sequences, impl)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    cp_context: CPContext | None = None,
    lower_bound: float | None = None,
    *,
    use_gate_in_kernel: bool = False,
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """RWKV-7's recurrence: `chunk_dplr_delta_rule` with q = r and log decays gk = w, which lie in [−2, 0], or with
    `use_gate_in_kernel` the model's, −e^{−1/2} σ(w), whatever `lower_bound` is, which stays a promise. Other arguments
    are those of FLA's function of this name."""
    check_chunk_size(chunk_size)
    least = max(RWKV7_BOUND, _promised(safe_gate, lower_bound))
    rate = RWKV7_DECAY if use_gate_in_kernel else None
    options = DPLROptions(float(scale), rate, least >= SAFE, disable_recompute)
    sequences = Sequences(
        initial_state,
        output_final_state,
        False,
        cu_seqlens,
        cu_seqlens_cpu,
        cp_context,
        cp_method,
        parents,
    )
    inputs = DPLRInputs(r, k, v, a, b, w)
    _check(RWKV7, inputs, least if rate is None else None)
    return run(RWKV7, inputs, options, sequences, impl)


def _promised(safe_gate: bool, lower_bound: float | None) -> float:
    """The least log decay that there may be."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"lower_bound = {lower_bound}: must be below 0, as log decays are; leave it out for none"
        )
    return max(SAFE if safe_gate else -math.inf, -math.inf if lower_bound is None else lower_bound)


def _check(recurrence: Recurrence, given: DPLRInputs, least: float | None) -> None:
    """Raise ValueError for shapes that do not fit, and for log decays on the CPU that do not lie in [least, 0]; least:
    None for logits."""
    q, k, v, *_, gk = given
    check_queries(q, k, v)
    if v.shape[2] != q.shape[2]:
        raise ValueError(
            f"v {tuple(v.shape)} must be [B, T, H, V] with the H = {q.shape[2]} of the queries"
        )
    for name in ("a", "b", "gk"):
        if getattr(given, name).shape != q.shape:
            shape = tuple(getattr(given, name).shape)
            raise ValueError(
                f"{recurrence.named(name)} {shape} must be [B, T, H, K] = {list(q.shape)}"
            )
    if least is None or gk.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if ((gk > 0) | (gk < least)).any():
        low, high = gk.amin().item(), gk.amax().item()
        name = recurrence.named("gk")
        raise ValueError(
            f"{name} is in [{low:.4g}, {high:.4g}]; give natural logs of decays, in [{least}, 0]"
        )
