"""Public function of RWKV-7's recurrence, whose transition is diagonal plus rank one."""

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
)
from titan_linear.ops.runtime.support import Choice
from titan_linear.ops.torch.dplr import TorchDPLR, step
from titan_linear.ops.triton.configs import delta_rule_needs

# Lower bounds of log decays.
BOUND = -2.0  # chunks need no sub-blocks above it
MODEL_BOUND = -math.exp(-0.5)  # of the RWKV-7 model's decays

RWKV7 = Recurrence(
    "chunk_rwkv7",
    rules(TorchDPLR, *delta_rule_needs("rwkv7", 64)),
    (),
    step,
    {"q": "r", "gk": "w"},
)


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
    """Run RWKV-7's recurrence (Goose, arXiv 2503.14456, eq. 17).

        S_t = Diag(exp w_t) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ
        o_t = scale·S_tᵀ r_t

    The arguments match FLA's function of the same name. The header of delta_rule.py
    describes the arguments not listed here.

    Args:
        r, k, a, b: [B, T, H, K].
        v: [B, T, H, V].
        w: [B, T, H, K], natural logs of the decay, in [−2, 0].
        lower_bound: promises that w ≥ lower_bound.
        safe_gate: promises that w ≥ −5, which the range of w implies.
        use_gate_in_kernel: w holds logits, and the log decays are the model's,
            −e^{−1/2} σ(w), whatever `lower_bound` is.

    Returns:
        o [B, T, H, V] in v's dtype; final states [N, H, K, V] float32 (float64 for float64
        inputs) or None.

    Raises:
        ValueError: an argument does not fit the others or is not supported; the message
            names the argument. Values of w are checked only if they are on the CPU.
    """
    check_chunk_size(chunk_size)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"lower_bound = {lower_bound}: must be below 0, as log decays are; leave it out for none"
        )
    # Logits need no check of their range.
    inputs = DPLRInputs(r, k, v, a, b, w)
    _check_shapes(inputs)
    if not use_gate_in_kernel:
        _check_decays(w, BOUND if lower_bound is None else max(BOUND, lower_bound))
    # Group the arguments, and run the recurrence.
    rate = MODEL_BOUND if use_gate_in_kernel else None
    options = DPLROptions(float(scale), rate, disable_recompute)
    sequences = Sequences(
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        cp_method=cp_method,
        parents=parents,
    )
    return run(RWKV7, inputs, options, sequences, impl)


def _check_shapes(inputs: DPLRInputs) -> None:
    """Raise ValueError unless all heads are heads of the queries and all shapes fit."""
    q = inputs.q
    v = inputs.v
    check_queries(q, inputs.k, v)
    if v.shape[2] != q.shape[2]:
        raise ValueError(
            f"v {tuple(v.shape)} must be [B, T, H, V] with the H = {q.shape[2]} of the queries"
        )
    for name, x in (("a", inputs.a), ("b", inputs.b), ("w", inputs.gk)):
        if x.shape != q.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be [B, T, H, K] = {list(q.shape)}")


def _check_decays(w: Tensor, least: float) -> None:
    """Raise ValueError for log decays outside [least, 0] on the CPU.

    Reading them from a device would wait for it, and compiled code has no values.
    """
    if w.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if ((w > 0) | (w < least)).any():
        low = w.amin().item()
        high = w.amax().item()
        raise ValueError(
            f"w is in [{low:.4g}, {high:.4g}]; give natural logs of decays, in [{least}, 0]"
        )
