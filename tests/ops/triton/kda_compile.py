"""KDA's part of the ahead-of-time compilation test: every stage, on meta tensors."""

from __future__ import annotations

from typing import Any


def launch(op: Any, *arguments: Any) -> Any:
    """What op runs on a GPU, on meta tensors (where it would run its fake implementation)."""
    from torch._C import DispatchKey, DispatchKeySet

    return op.redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments)


def kda_case(dtype: str, K: int, V: int, gate: str = "none", safe: bool = True, R: int = 1, whole: bool = True) -> None:
    """All stages, or those alone whose configuration depends on the gate; without a gate in the kernel: normalised
    inputs, no states (what is timed)."""
    import torch

    from titan_linear.ops.triton import kda

    def meta(*shape, kind=dtype):
        return torch.empty(*shape, dtype=getattr(torch, kind), device="meta")

    T, HV, N, plain = 32768, 64, 10, gate == "none"
    H = HV // R
    q, k, v, do = meta(1, T, H, K), meta(1, T, H, K), meta(1, T, HV, V), meta(1, T, HV, V)
    g, beta = meta(1, T, HV, K, kind="float32"), meta(1, T, HV)
    A_log, dt_bias = (None, None) if plain else (meta(HV, kind="float32"), meta(HV * K, kind="float32"))
    state = None if plain else meta(N, HV, K, V, kind="float32")
    cu, entries = meta(N + 1, kind="int32"), meta(2, kind="int32")
    gates = (0.5, -5.0, kda.GATES[gate], safe, not plain)
    inputs = (q, k, g, beta, A_log, dt_bias, cu, *gates)
    first, chunks, *tiles = launch(kda.kda_prepare, *inputs)
    launch(kda.kda_recompute, *inputs)
    if not whole:
        return
    launch(kda.kda_scan, v, cu, first, *tiles, state)
    launch(kda.kda_boundary, v, cu, first, *tiles, entries, True)
    launch(kda.kda_boundary_bwd, do, cu, first, *tiles, entries)
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu, first, chunks, *tiles)
    launch(kda.kda_backward, *inputs, do, state, state, *gates)
