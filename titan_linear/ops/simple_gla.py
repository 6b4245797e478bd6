"""Linear attention with one log decay per head (RetNet, Lightning Attention, Simple GLA)."""

from torch import Tensor

from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.recurrence import Recurrence, check_queries, rules, run
from titan_linear.ops.runtime.options import DecayInputs, DecayOptions, Result, Sequences, scale_of
from titan_linear.ops.runtime.support import Choice
from titan_linear.ops.torch.linear_attention import TorchLinearAttention, step
from titan_linear.ops.triton.configs import decay_needs


def decaying(op: str, **names: str) -> Recurrence:
    """Return a recurrence whose state only decays."""
    implementations = rules(TorchLinearAttention, *decay_needs())
    return Recurrence(op, implementations, ("A", "D", "dt_bias"), step, names)


SIMPLE_GLA = decaying("chunk_simple_gla")


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: CPContext | None = None,
    disable_recompute: bool = False,
    parents: Tensor | None = None,
    cp_method: str = "kcp",
    impl: str | Choice = "auto",
) -> Result:
    """Run linear attention with one log decay per head.

        S_t = exp(g_t) S_{t−1} + k_t v_tᵀ
        o_t = scale·S_tᵀ q_t

    The arguments match FLA's function of the same name. The header of delta_rule.py
    describes the arguments not listed here.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], natural logs of the decay, ≤ 0, including −∞.
        g_gamma: [HV], the same log decay for all tokens; differentiable, unlike FLA's. Give
            either g or g_gamma.

    Returns:
        o [B, T, HV, V] in v's dtype; final states [N, HV, K, V] float32 (float64 for
        float64 inputs) or None.

    Raises:
        ValueError: an argument does not fit the others or is not supported; the message
            names the argument.
    """
    # Check the shapes, and expand one decay per head to all tokens.
    B, T, HV, _, _ = check_queries(q, k, v)
    if (g is None) == (g_gamma is None):
        raise ValueError("give one of g [B, T, HV] and g_gamma [HV]")
    if g is None:
        if g_gamma.shape != (HV,):
            raise ValueError(f"g_gamma {tuple(g_gamma.shape)} must be [HV] = [{HV}]")
        g = g_gamma.expand(B, T, HV)
    if g.shape != (B, T, HV):
        raise ValueError(f"g {tuple(g.shape)} must be [B, T, HV] = {[B, T, HV]}")
    options = DecayOptions(scale_of(scale, q), disable_recompute=disable_recompute)
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
    return run(SIMPLE_GLA, DecayInputs(q, k, v, g), options, sequences, impl)
