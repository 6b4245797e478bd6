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


def launch_stages(stages: Any, inputs: list, do: Any, numbers: list[float], plain: bool, whole: bool = True) -> None:
    """All stages, or those alone that prepare tiles; plain: without states, else with states by index."""
    (_, _, K), (_, HV, V) = inputs[0].shape, inputs[2].shape
    chunks, states, entries, wanted = stream(HV, K, V, plain)
    given = [dict(zip(stages.inputs._fields, inputs, strict=True))[name] for name in stages.prepared._fields]
    made = stages.tiles(*launch(stages.prepare, given, chunks, numbers))
    if stages.again:
        launch(stages.recompute, given, chunks, [getattr(made, name) for name in stages.kept], numbers)
    if not whole:
        return
    tables = inputs, list(made), chunks
    launch(stages.scan, *tables, states, 0 if plain else N, numbers)
    launch(stages.boundary, *tables, [entries, wanted], numbers)
    launch(stages.boundary_bwd, do, *tables, [entries, wanted], numbers)
    launch(stages.backward, do, *tables, states, states, not plain, numbers)


def kda_case(dtype: str, K: int, V: int, gate: str = "none", safe: bool = True, R: int = 1, whole: bool = True) -> None:
    """All stages, or those alone whose configuration depends on the gate; without a gate in the kernel: normalised
    inputs, no states (what is timed)."""
    from titan_linear.ops.triton.kda import GATES, KDA

    HV, plain, of = 64, gate == "none", {"kind": dtype}
    H = HV // R
    q, k, v = meta(T, 2 * H * K + HV * V, **of).split([H * K, H * K, HV * V], -1)  # as the mixer gives them
    q, k, v, do = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), meta(T, HV, V, **of)
    g, beta = meta(T, HV, K, kind="float32"), meta(T, HV, **of)
    gate_inputs = [None, None] if plain else [meta(HV, kind="float32"), meta(HV * K, kind="float32")]
    numbers = [0.5, -5.0, float(GATES[gate]), float(safe), 0.0 if plain else 2.0]
    launch_stages(KDA, [q, k, v, g, beta, *gate_inputs], do, numbers, plain, whole)
