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


T, N = 32768, 10  # tokens, and entries


def meta(*shape: int, kind: str) -> Any:
    import torch

    return torch.empty(*shape, dtype=getattr(torch, kind), device="meta")


def stream(HV: int, K: int, V: int, plain: bool) -> tuple[list, list, Any, Any]:
    """The tables of a packed stream's chunks; its states, by index unless plain, where there are none; two entries, and
    what is wanted of these."""
    from titan_linear.ops.triton.chunks import max_chunks

    chunks = [meta(*shape, kind="int32") for shape in ((N + 1,), (max_chunks(T, N, 64), 2), (N + 1,))]
    states = [None, None] if plain else [meta(N, HV, K, V, kind="float32"), meta(N, kind="int32")]
    two = meta(2, kind="int32")
    return chunks, states, two, None if plain else two


def kda_case(dtype: str, K: int, V: int, gate: str = "none", safe: bool = True, R: int = 1, whole: bool = True) -> None:
    """All stages, or those alone whose configuration depends on the gate; without a gate in the kernel: normalised
    inputs, no states (what is timed)."""
    from titan_linear.ops.triton import kda

    HV, plain, of = 64, gate == "none", {"kind": dtype}
    H = HV // R
    q, k, v = meta(T, 2 * H * K + HV * V, **of).split([H * K, H * K, HV * V], -1)  # as the mixer gives them
    q, k, v, do = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), meta(T, HV, V, **of)
    g, beta = meta(T, HV, K, kind="float32"), meta(T, HV, **of)
    A_log, dt_bias = (None, None) if plain else (meta(HV, kind="float32"), meta(HV * K, kind="float32"))
    chunks, states, entries, wanted = stream(HV, K, V, plain)
    numbers = (0.5, -5.0, kda.GATES[gate], safe, None if plain else 2.0)
    inputs = [q, k, v, g, beta, A_log, dt_bias]
    tiles = list(launch(kda.kda_prepare, inputs, chunks, *numbers))
    launch(kda.kda_recompute, inputs, chunks, *numbers)
    if not whole:
        return
    launch(kda.kda_scan, v, tiles, chunks, states, 0 if plain else N)
    launch(kda.kda_boundary, v, tiles, chunks, entries, wanted)
    launch(kda.kda_boundary_bwd, do, tiles, chunks, entries, wanted)
    launch(kda.kda_backward, do, inputs, tiles, chunks, states, states, not plain, *numbers)
