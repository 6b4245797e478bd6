"""Recurrences whose transition is diagonal plus low rank, including RWKV-7: public
functions.
"""

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

# Lower bounds of log decays.
SAFE = -5.0  # promised by `safe_gate`
RWKV7_BOUND = -2.0  # required by chunk_rwkv7, whose chunks need no sub-blocks above it
RWKV7_DECAY = -math.exp(-0.5)  # of the RWKV-7 model's decays

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
    """Run a recurrence whose transition is diagonal plus low rank.

        S_t = Diag(exp gk_t) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ
        o_t = scale·S_tᵀ q_t

    The arguments match FLA's function of the same name. The header of delta_rule.py
    describes the arguments not listed here.

    Args:
        q, k, a, b: [B, T, H, K].
        v: [B, T, H, V].
        gk: [B, T, H, K], natural logs of the decay, ≤ 0, including −∞.
        safe_gate: promises that gk ≥ −5.
        lower_bound: promises that gk ≥ lower_bound. A bound of −5 or more saves work.

    Returns:
        o [B, T, H, V] in v's dtype; final states [N, H, K, V] float32 (float64 for float64
        inputs) or None.

    Raises:
        ValueError: an argument does not fit the others or is not supported; the message
            names the argument. Values of gk are checked only if they are on the CPU.
    """
    check_chunk_size(chunk_size)
    # The promise about log decays selects the method.
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
    """Run RWKV-7's recurrence, `chunk_dplr_delta_rule` with q = r and gk = w.

    The log decays w are in [−2, 0]. With `use_gate_in_kernel`, w holds logits and the log
    decays are the model's, −e^{−1/2} σ(w), whatever `lower_bound` is: it remains a promise
    about the log decays. The other arguments match FLA's function of the same name.
    """
    check_chunk_size(chunk_size)
    # RWKV-7's log decays have a bound of their own, and logits need no check.
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
    """Return the lowest log decay that the caller allows."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"lower_bound = {lower_bound}: must be below 0, as log decays are; leave it out for none"
        )
    return max(SAFE if safe_gate else -math.inf, -math.inf if lower_bound is None else lower_bound)


def _check(recurrence: Recurrence, given: DPLRInputs, least: float | None) -> None:
    """Raise ValueError for shapes that do not fit, and for log decays outside [least, 0].

    Log decays are checked on the CPU only.

    Args:
        least: lowest log decay allowed; None if gk holds logits.
    """
    # Shapes: all heads are heads of the queries.
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
    # Values: reading them from a device would wait for it, and compiled code has none.
    if least is None or gk.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if ((gk > 0) | (gk < least)).any():
        low, high = gk.amin().item(), gk.amax().item()
        name = recurrence.named("gk")
        raise ValueError(
            f"{name} is in [{low:.4g}, {high:.4g}]; give natural logs of decays, in [{least}, 0]"
        )
