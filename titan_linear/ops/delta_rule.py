"""What the two delta rules, KDA and Gated DeltaNet, have in common."""

from __future__ import annotations

from typing import Any

from titan_linear.ops.recurrence import Recurrence, check_queries
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs
from titan_linear.ops.torch.delta_rule import TorchDeltaRule, step
from titan_linear.ops.triton.configs import delta_rule_needs, with_kernels


def _triton() -> Any:
    from titan_linear.ops.triton.delta_rule import triton_delta_rule  # Triton is available on Linux only

    return triton_delta_rule


def delta_rule(name: str, family: str) -> Recurrence:
    """family: of the kernels' configurations (ops/triton/configs.py)."""
    implementations = with_kernels(_triton, lambda: TorchDeltaRule, *delta_rule_needs(family))
    return Recurrence(name, implementations, ("A_log", "dt_bias"), step)


def check_inputs(given: Inputs, options: DeltaRuleOptions) -> None:
    """Raise ValueError for shapes and switches that do not fit; the message says what would."""
    q, k, v, g, beta, A_log, dt_bias = given
    B, T, HV, K, _ = check_queries(q, k, v)
    for name, x, shape in (("g", g, (B, T, HV) if g.dim() == 3 else (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if x.shape != shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape} for B, T, HV, K = {B}, {T}, {HV}, {K}")
    if options.gate_in_kernel != (A_log is not None):
        raise ValueError("use_gate_in_kernel = True and A_log [HV] go together; give both or neither")
    if A_log is not None and A_log.numel() != HV:
        raise ValueError(f"A_log {tuple(A_log.shape)} must be [HV] = [{HV}]")
    if dt_bias is not None and not options.gate_in_kernel:
        raise ValueError("dt_bias comes with use_gate_in_kernel = True; give both or neither")
