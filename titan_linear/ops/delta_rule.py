"""The two delta rules, Kimi Delta Attention and Gated DeltaNet: the public functions.

The arguments match FLA's functions of the same names; docs/ops.md lists the differences.
Both functions, and the other recurrences as far as these arguments apply to them, take:

    scale                        factor on o, K^−½ by default
    initial_state to cp_method   see `Sequences` (runtime/options.py)
    use_qk_l2norm_in_kernel      q, k ← x / sqrt(Σx² + 1e-6), before the kernels and rounded once;
                                 `causal_conv1d` with norm_dim does it in its own kernel
    use_gate_in_kernel           g is raw; the log decay is −exp(A_log)·softplus(g + dt_bias),
                                 A_log [HV]
    use_beta_sigmoid_in_kernel   β = sigmoid(beta), with allow_neg_eigval 2·sigmoid(beta)
    disable_recompute            keep intermediates for backward: faster, more memory
    impl                         "auto", "torch" or "triton"; one token per sequence without
                                 gradients (decoding) is one PyTorch step of the recurrence
    return_intermediate_states   must be False
    chunk_indices                must be None
    chunk_size                   must be 64

All raise ValueError if an argument does not fit the others or is not supported; the message
names the argument.
"""

import torch
from torch import Tensor

from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.recurrence import Recurrence, check_queries, rules, run
from titan_linear.ops.runtime.options import (
    DeltaRuleOptions,
    Inputs,
    Result,
    Sequences,
    beta_range,
    check_chunk_size,
    refuse,
    scale_of,
)
from titan_linear.ops.runtime.support import Choice
from titan_linear.ops.torch.delta_rule import TorchDeltaRule, l2norm, step
from titan_linear.ops.triton.configs import delta_rule_needs


def delta_rule(name: str, family: str) -> Recurrence:
    """Return a delta rule; `family` names the configurations of its kernels
    (ops/triton/configs.py).
    """
    implementations = rules(TorchDeltaRule, *delta_rule_needs(family))
    return Recurrence(name, implementations, ("A_log", "dt_bias"), step)


def normed(inputs: Inputs) -> Inputs:
    """Return the inputs with q and k divided by their norms."""
    return inputs._replace(q=l2norm(inputs.q), k=l2norm(inputs.k))


def _run(
    recurrence: Recurrence,
    inputs: Inputs,
    normalise: bool,
    options: DeltaRuleOptions,
    sequences: Sequences,
    impl: str | Choice,
) -> Result:
    """Check the inputs and run the recurrence.

    `normalise` divides q and k by their norms before any kernel.
    """
    _check_inputs(inputs, options)
    inputs = normed(inputs) if normalise else inputs
    return run(recurrence, inputs, options, sequences, impl)


def _check_inputs(inputs: Inputs, options: DeltaRuleOptions) -> None:
    """Raise ValueError for shapes and switches that do not fit; the message has the remedy."""
    # Shapes of tensors per token; g has a channel dimension for KDA only.
    g = inputs.g
    beta = inputs.beta
    A_log = inputs.A_log
    B, T, HV, K, _ = check_queries(inputs.q, inputs.k, inputs.v)
    for name, x, shape in (
        ("g", g, (B, T, HV) if g.dim() == 3 else (B, T, HV, K)),
        ("beta", beta, (B, T, HV)),
    ):
        if x.shape != shape:
            raise ValueError(
                f"{name} {tuple(x.shape)} must be {shape} for B, T, HV, K = {B}, {T}, {HV}, {K}"
            )
    # Raw gates need A_log and may have dt_bias; log decays have neither.
    if options.gate_in_kernel != (A_log is not None):
        raise ValueError(
            "use_gate_in_kernel = True and A_log [HV] go together; give both or neither"
        )
    if A_log is not None and A_log.numel() != HV:
        raise ValueError(f"A_log {tuple(A_log.shape)} must be [HV] = [{HV}]")
    if inputs.dt_bias is not None and not options.gate_in_kernel:
        raise ValueError("dt_bias comes with use_gate_in_kernel = True; give both or neither")


# --- Kimi Delta Attention -----------------------------------------------------------------


KDA = delta_rule("chunk_kda", family="kda")


def is_bound(lower_bound: float) -> bool:
    """Whether the kernels support this lower bound of a gate's log decay."""
    return -5 <= lower_bound < 0


def _check_gates(
    g: Tensor, dt_bias: Tensor | None, lower_bound: float | None, use_gate_in_kernel: bool
) -> None:
    if g.dim() != 4:
        raise ValueError(f"g {tuple(g.shape)} must be [B, T, HV, K] for KDA")
    if lower_bound is not None and not (use_gate_in_kernel and is_bound(lower_bound)):
        raise ValueError(
            f"lower_bound = {lower_bound}: must lie in [-5, 0) and comes with use_gate_in_kernel = True"
        )
    if dt_bias is not None and dt_bias.numel() != g.shape[2] * g.shape[3]:
        raise ValueError(
            f"dt_bias {tuple(dt_bias.shape)} must be [HV·K] = [{g.shape[2] * g.shape[3]}]"
        )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: CPContext | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """Run Kimi Delta Attention (Kimi Linear, eq. 1).

        S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ
        o_t = scale·S_tᵀ q_t

    The header of this file describes the arguments not listed here.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logs of the decay (≤ 0), or raw gates with
            use_gate_in_kernel.
        beta: [B, T, HV].
        dt_bias: [HV·K].
        safe_gate: promises that g ≥ −5, which allows a faster method. Without it results
            are right for any g ≤ 0, including −∞ (Triton raises a g below −87 to −87, which
            leaves 1e-38 of a state).
        lower_bound: in [−5, 0), implies safe_gate. With use_gate_in_kernel the log decay is
            then lower_bound·sigmoid(exp(A_log)·(g + dt_bias)). Without A_log the rate
            exp(A_log) is 1.

    Returns:
        o [B, T, HV, V] in v's dtype; final states [N, HV, K, V] float32 (float64 for
        float64 inputs) or None.
    """
    # Check the arguments, and fill in A_log.
    refuse(
        "leave it out, only o and final states are returned",
        return_intermediate_states=return_intermediate_states,
    )
    check_chunk_size(chunk_size)
    _check_gates(g, dt_bias, lower_bound, use_gate_in_kernel)
    if A_log is None and lower_bound is not None:
        A_log = g.new_zeros(g.shape[2], dtype=torch.promote_types(g.dtype, torch.float32))
    # Group the arguments, and run the recurrence.
    options = DeltaRuleOptions(
        scale=scale_of(scale, q),
        gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate or lower_bound is not None,
        beta_range=beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        disable_recompute=disable_recompute,
    )
    sequences = Sequences(
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        cp_method=cp_method,
        parents=parents,
    )
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias)
    return _run(KDA, inputs, use_qk_l2norm_in_kernel, options, sequences, impl)


# --- Gated DeltaNet -----------------------------------------------------------------------


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
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """Run Gated DeltaNet (Gated Delta Networks, eq. 10).

        S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ
        o_t = scale·S_tᵀ q_t

    The arguments match those of `chunk_kda`, with one gate per head: g [B, T, HV],
    dt_bias [HV].

    Results are right for any g ≤ 0, including −∞. Triton raises a g below −87 to −87, which
    leaves 1e-38 of a state, and sums gates over chunks of 64 tokens: a token that comes
    after n tokens of its chunk that forget everything has a relative error of n · 5e-6.
    """
    refuse(
        "leave it out, chunks are found from cu_seqlens on the device", chunk_indices=chunk_indices
    )
    # Check the arguments that KDA does not share.
    check_chunk_size(chunk_size)
    if g.dim() != 3:
        raise ValueError(f"g {tuple(g.shape)} must be [B, T, HV] for the gated delta rule")
    if dt_bias is not None and dt_bias.numel() != g.shape[2]:
        raise ValueError(f"dt_bias {tuple(dt_bias.shape)} must be [HV] = [{g.shape[2]}]")
    # Group the arguments, and run the recurrence.
    options = DeltaRuleOptions(
        scale=scale_of(scale, q),
        gate_in_kernel=use_gate_in_kernel,
        beta_range=beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        disable_recompute=disable_recompute,
    )
    sequences = Sequences(
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        cp_method=cp_method,
        parents=parents,
    )
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias)
    return _run(GDN, inputs, use_qk_l2norm_in_kernel, options, sequences, impl)
