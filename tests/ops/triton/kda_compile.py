"""Kernels compiled ahead of time, on meta tensors: how, and every stage of KDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def results_of(module: str) -> dict[str, list[dict]]:
    """What a module's `main` compiles, in a process of its own, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def launch(op: Any, *arguments: Any) -> Any:
    """What op runs on a GPU, on meta tensors (where it would run its fake implementation)."""
    from torch._C import DispatchKey, DispatchKeySet

    return op.overload.redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments)


def kda_case(dtype: str, K: int, V: int, gate: str = "none", safe: bool = True, R: int = 1, whole: bool = True) -> None:
    """All stages, or those alone whose configuration depends on the gate; without a gate in the kernel: normalised
    inputs, no states (what is timed)."""
    import torch

    from titan_linear.ops.triton import kda
    from titan_linear.ops.triton.chunks import max_chunks

    def meta(*shape, kind=dtype):
        return torch.empty(*shape, dtype=getattr(torch, kind), device="meta")

    T, HV, N, plain = 32768, 64, 10, gate == "none"
    H = HV // R
    q, k, v = meta(T, 2 * H * K + HV * V).split([H * K, H * K, HV * V], -1)  # as the mixer gives them
    q, k, v, do = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), meta(T, HV, V)
    g, beta = meta(T, HV, K, kind="float32"), meta(T, HV)
    A_log, dt_bias = (None, None) if plain else (meta(HV, kind="float32"), meta(HV * K, kind="float32"))
    state, rows = (None, None) if plain else (meta(N, HV, K, V, kind="float32"), meta(N, kind="int32"))
    entries, NT = meta(2, kind="int32"), max_chunks(T, N, 64)
    chunks = [meta(N + 1, kind="int32"), meta(NT, 2, kind="int32"), meta(N + 1, kind="int32")]
    numbers = (0.5, -5.0, kda.GATES[gate], safe, None if plain else 2.0)
    inputs = [q, k, v, g, beta, A_log, dt_bias]
    tiles = list(launch(kda.kda_prepare, inputs, chunks, *numbers))
    launch(kda.kda_recompute, inputs, chunks, *numbers)
    if not whole:
        return
    states = [state, rows]
    launch(kda.kda_scan, v, tiles, chunks, states, 0 if plain else N)
    launch(kda.kda_boundary, v, tiles, chunks, entries, None if plain else entries)
    launch(kda.kda_boundary_bwd, do, tiles, chunks, entries, None if plain else entries)
    launch(kda.kda_backward, do, inputs, tiles, chunks, states, states, not plain, *numbers)
