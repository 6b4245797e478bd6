"""Gated DeltaNet's recurrence, the public function."""

from __future__ import annotations

from torch import Tensor

from titan_linear.ops.delta_rule import check_inputs, delta_rule
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.recurrence import run
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs, beta_range, check_chunk_size, refuse
from titan_linear.ops.runtime.support import Choice

GDN = delta_rule("chunk_gated_delta_rule", family="gdn")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: CPContext | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ;  o_t = scale·S_tᵀ q_t  (Gated Delta Networks, eq. 10).

    As `chunk_kda`, with one gate per head: g [B, T, HV], dt_bias [HV], and the gate in the kernel is
    −exp(A_log)·softplus(g + dt_bias). chunk_indices must be None: the kernels find their chunks.

    Results are right for any g ≤ 0, −∞ too. Triton raises a g below −87 to −87, after which 1e-38 of a state is left,
    and sums gates over chunks of 64: a token that follows, in its chunk, n tokens that forget everything has a relative
    error of n · 5e-6.
    """
    refuse("leave it out, chunks are found from cu_seqlens on the device", chunk_indices=chunk_indices)
    check_chunk_size(chunk_size)
    if g.dim() != 3:
        raise ValueError(f"g {tuple(g.shape)} must be [B, T, HV] for the gated delta rule")
    if dt_bias is not None and dt_bias.numel() != g.shape[2]:
        raise ValueError(f"dt_bias {tuple(dt_bias.shape)} must be [HV] = [{g.shape[2]}]")
    options = DeltaRuleOptions(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        l2norm=use_qk_l2norm_in_kernel,
        gate_in_kernel=use_gate_in_kernel,
        beta_range=beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        disable_recompute=disable_recompute,
    )
    given = Inputs(q, k, v, g, beta, A_log, dt_bias)
    check_inputs(given, options)
    return run(
        GDN,
        given,
        options=options,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        cp_method=cp_method,
        impl=impl,
    )
