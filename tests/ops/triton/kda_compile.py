"""Operators compiled ahead of time, on meta tensors, in a process of their own."""

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

    chunks = [
        meta(*shape, kind="int32") for shape in ((N + 1,), (max_chunks(T, N, 64), 2), (N + 1,))
    ]
    states = [None, None] if plain else [meta(N, HV, K, V, kind="float32"), meta(N, kind="int32")]
    two = meta(2, kind="int32")
    return chunks, states, two, None if plain else two
