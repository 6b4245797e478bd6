"""Public function of Mamba-2's state-space recurrence (SSD)."""

import math

from torch import Tensor

from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.recurrence import run
from titan_linear.ops.runtime.options import DecayInputs, DecayOptions, Result, Sequences
from titan_linear.ops.runtime.support import Choice
from titan_linear.ops.simple_gla import decaying

SSD = decaying("chunk_ssd", q="C", k="B", v="x", g="dt", initial_state="initial_states")


def chunk_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: CPContext | None = None,
    disable_recompute: bool = False,
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """Run Mamba-2's state-space recurrence (Transformers are SSMs, section 7).

        h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ
        y_t = h_t C_t + D x_t

    The arguments match mamba_ssm's `mamba_chunk_scan_combined`, without chunk_size (64), z
    (gate y) and seq_idx (give cu_seqlens). The batch size is b here. The header of
    delta_rule.py describes the arguments not listed here.

    Args:
        x: [b, T, heads, P].
        dt: [b, T, heads].
        A: [heads], negative.
        B, C: [b, T, G, N], where G divides heads.
        D: [heads] or [heads, P].
        dt_bias: [heads].
        dt_softplus: Δ = clamp(softplus(dt + dt_bias), dt_limit); without it
            Δ = clamp(dt + dt_bias, dt_limit).
        dt_limit: lower and upper limit of Δ.
        initial_states: [n, heads, P, N], one per sequence or packed document; zeros by
            default.
        return_final_states: whether to return the final states.
        cp_method: with cp_context, "kcp", or "ulysses" if the number of ranks divides G.

    Returns:
        y [b, T, heads, P] in x's dtype; final states [n, heads, P, N] float32 (float64 for
        float64 inputs) or None.

    Raises:
        ValueError: an argument does not fit the others or is not supported; the message
            names the argument.
    """
    _check(x, dt, A, B, C, D, dt_bias, dt_limit)
    options = DecayOptions(1.0, dt_softplus, tuple(dt_limit), disable_recompute)
    sequences = Sequences(
        initial_state=initial_states,
        output_final_state=return_final_states,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        cp_method=cp_method,
        parents=parents,
    )
    return run(SSD, DecayInputs(C, B, x, dt, A, D, dt_bias), options, sequences, impl)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    """Raise ValueError for shapes that do not fit; the message gives the remedy."""
    # x defines b, T and the heads; B and C share their shape.
    if x.dim() != 4 or 0 in x.shape:
        raise ValueError(f"x {tuple(x.shape)} must be [b, T, heads, P], none of them 0")
    b, T, heads, P = x.shape
    if (
        B.dim() != 4
        or C.shape != B.shape
        or 0 in B.shape
        or B.shape[:2] != (b, T)
        or heads % B.shape[2]
    ):
        raise ValueError(
            f"B {tuple(B.shape)} and C {tuple(C.shape)} must both be [b, T, G, N] = [{b}, {T}, a divisor of heads = "
            f"{heads}, N]"
        )
    # Time steps per token and head, then parameters per head.
    if dt.shape != (b, T, heads):
        raise ValueError(f"dt {tuple(dt.shape)} must be [b, T, heads] = {[b, T, heads]}")
    for name, given in (("A", A), ("dt_bias", dt_bias)):
        if given is not None and given.shape != (heads,):
            raise ValueError(f"{name} {tuple(given.shape)} must be [heads] = [{heads}]")
    if D is not None and D.shape not in ((heads,), (heads, P)):
        raise ValueError(
            f"D {tuple(D.shape)} must be [heads] = [{heads}] or [heads, P] = {[heads, P]}"
        )
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit = {tuple(dt_limit)} must be (the lower, the upper) limit of dt")
