"""Block sizes, warps and pipeline stages of the recurrences' kernels, by architecture and shape; where kernels run.

Those for compute capability 9.0 were chosen by measurement; `tools.bench_ops --candidates` times others. Those for
other generations fit the shared memory there and spill little, but have never been run. Nothing is tuned at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from titan_linear.ops.runtime.support import (
    HALF,
    Check,
    Implementation,
    Target,
    capability,
    dims_up_to,
    dotted,
    dtype_in,
    instead_of,
    on_gpu,
    short,
)

Config = dict[str, int]

# For 16-bit operands on generations that were not measured: they fit the 99 KB of shared memory that a program has on
# 8.6, 8.9 and 12.0.
KDA_SCAN = {(2, 128): {"BV": 32, "STAGES": 2, "num_warps": 4}, (2, 256): {"BV": 32, "STAGES": 1, "num_warps": 8}}
GDN_LOOPS = ("gdn scan", "gdn boundary", "gdn states", "gdn reverse", "gdn gradients")
GENERAL: dict[str, dict[tuple[int, int], Config]] = {
    "kda prepare safe": {(2, 256): {"BK": 128, "num_warps": 8, "num_stages": 1}},
    "kda prepare": {(2, 256): {"BK": 128, "num_warps": 8, "num_stages": 1}},
    "solve": {(2, 256): {"num_warps": 2, "num_stages": 1}},
    "kda recompute safe": {(2, 256): {"BK": 64, "num_warps": 4, "num_stages": 1}},
    "kda recompute": {(2, 256): {"BK": 64, "num_warps": 4, "num_stages": 1}},
    "kda scan": KDA_SCAN,
    "kda reverse": KDA_SCAN,
    "kda matrix": {(2, 256): {"BV": 64, "num_warps": 4, "num_stages": 1}},
    "kda gradient safe": {(2, 256): {"BK": 32, "BV": 64, "STAGES": 2, "num_warps": 8}},
    "kda gradient": {(2, 256): {"BK": 32, "BV": 64, "STAGES": 2, "num_warps": 8}},
    "gdn prepare": {(2, 256): {"num_warps": 8}},
    **{kernel: {(2, 128): {"BV": 32, "STAGES": 2, "num_warps": 8}} for kernel in GDN_LOOPS},
}


WIDE_GDN: dict[tuple[int, int], Config] = {(2, 256): {"BV": 32, "STAGES": 1, "num_warps": 8}}


# On 9.0, for the kernels that loop over chunks.
HOPPER_KDA_SCAN: dict[tuple[int, int], Config] = {
    (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
    (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
    (4, 128): {"BV": 16, "STAGES": 1, "num_warps": 8},
    (4, 256): {"BV": 16, "STAGES": 1, "num_warps": 4},
}
HOPPER_LOOP: dict[tuple[int, int], Config] = {
    (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
    (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
    (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 4},
    (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 4},
}
HOPPER_DECAY_GRADIENTS: dict[tuple[int, int], Config] = {
    (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
    (2, 256): {"BV": 64, "STAGES": 2, "num_warps": 8},
    (4, 128): {"BV": 64, "STAGES": 1, "num_warps": 8},
}

# Compute capability -> kernel -> (bytes of an operand, largest K (KDA) or largest K and V (GDN)) -> launch arguments.
# KDA's "safe" kernels: with safe_gate, 128 registers let two programs share a multiprocessor; other gates would spill.
# Copy-engine loads in a loop (GDN's kernels, KDA's gradient) need it pipelined, STAGES >= 2: otherwise they faulted
# with Triton 3.6.
# float32: twice the bytes for each tile, and dots in IEEE fp32 (KDA, solve) or three tf32 passes (GDN): not tuned.
# Up to 128, KDA's were chosen by their spills; larger tiles have five times as many.
# A capability that is not listed takes the newest older one of its generation (`shipped_for`).
CONFIGS: dict[tuple[int, int], dict[str, dict[tuple[int, int], Config]]] = {
    # No copy engine: Triton turns such loads into ordinary ones, and one stage is as good as two.
    (8, 0): GENERAL | {kernel: GENERAL[kernel] | WIDE_GDN for kernel in GDN_LOOPS},
    # KDA only: Triton 3.7 fails to compile GDN's gradients, in a pass on tensor memory, with every configuration tried.
    (10, 0): {kernel: table for kernel, table in GENERAL.items() if not kernel.startswith("gdn")},
    (12, 0): GENERAL,
    (9, 0): {
        "ssd scan": HOPPER_LOOP | {(2, 128): {"BV": 64, "STAGES": 2, "num_warps": 4}},
        "ssd pass": HOPPER_LOOP,
        "ssd groups": {(2, 256): {"num_warps": 8, "num_stages": 1}, (4, 256): {"num_warps": 8, "num_stages": 1}},
        "ssd carried": HOPPER_DECAY_GRADIENTS | {(2, 128): {"BV": 32, "STAGES": 3, "num_warps": 4}},
        "ssd pairs": HOPPER_DECAY_GRADIENTS,
        "rwkv7 prepare": {(2, 64): {"num_warps": 4, "num_stages": 1}, (4, 32): {"num_warps": 4, "num_stages": 1}},
        "rwkv7 scan": {
            (2, 64): {"BV": 32, "STAGES": 4, "num_warps": 4},
            (4, 32): {"BV": 32, "STAGES": 1, "num_warps": 4},
        },
        "rwkv7 loop": {
            (2, 64): {"BV": 32, "STAGES": 3, "num_warps": 4},
            (4, 32): {"BV": 32, "STAGES": 1, "num_warps": 4},
        },
        "rwkv7 gradient": {
            (2, 64): {"num_warps": 4, "num_stages": 1},
            (4, 32): {"num_warps": 4, "num_stages": 1},
        },
        "kda prepare safe": {
            (2, 256): {"BK": 128, "num_warps": 8, "num_stages": 1, "maxnreg": 128},
            (4, 128): {"BK": 16, "num_warps": 8, "num_stages": 1},
            (4, 256): {"BK": 32, "num_warps": 4, "num_stages": 1},
        },
        "kda prepare": {
            (2, 256): {"BK": 128, "num_warps": 8, "num_stages": 1},
            (4, 256): {"BK": 32, "num_warps": 4, "num_stages": 1},
        },
        "solve": {
            (2, 256): {"num_warps": 2, "num_stages": 1, "maxnreg": 128},
            (4, 256): {"num_warps": 2, "num_stages": 1},
        },
        "kda recompute safe": {
            (2, 256): {"BK": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 128},
            (4, 256): {"BK": 32, "num_warps": 4, "num_stages": 1},
        },
        "kda recompute": {
            (2, 256): {"BK": 64, "num_warps": 4, "num_stages": 1},
            (4, 256): {"BK": 32, "num_warps": 4, "num_stages": 1},
        },
        "kda scan": HOPPER_KDA_SCAN,
        "kda reverse": HOPPER_KDA_SCAN,
        "kda matrix": {
            (2, 256): {"BV": 128, "num_warps": 4, "num_stages": 1},
            (4, 256): {"BV": 32, "num_warps": 4, "num_stages": 1},
        },
        "kda gradient safe": {
            (2, 256): {"BK": 64, "BV": 128, "STAGES": 2, "num_warps": 4},
            (4, 128): {"BK": 16, "BV": 16, "STAGES": 2, "num_warps": 8},
            (4, 256): {"BK": 32, "BV": 32, "STAGES": 2, "num_warps": 4},
        },
        "kda gradient": {
            (2, 256): {"BK": 32, "BV": 128, "STAGES": 2, "num_warps": 4},
            (4, 128): {"BK": 16, "BV": 16, "STAGES": 2, "num_warps": 8},
            (4, 256): {"BK": 32, "BV": 32, "STAGES": 2, "num_warps": 4},
        },
        "gdn prepare": {
            (2, 128): {"num_warps": 4, "maxnreg": 96},
            (2, 256): {"num_warps": 4},
            (4, 256): {"num_warps": 8},
        },
        "gdn scan": HOPPER_LOOP,
        "gdn boundary": HOPPER_LOOP,
        "gdn states": HOPPER_LOOP | {(2, 128): {"BV": 64, "STAGES": 4, "num_warps": 4}},
        "gdn reverse": HOPPER_LOOP,
        "gdn gradients": {
            (2, 128): {"BV": 64, "STAGES": 2, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 8},
            (4, 128): {"BV": 32, "STAGES": 2, "num_warps": 8},  # with 16 columns ptxas loses a descriptor
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 8},
        },
    },
}


MEASURED = ((9, 0),)  # compute capabilities on which these were run
MAX_HEAD_DIM = 256  # K and V of the delta rules' kernels, K of those of states that only decay
MAX_DECAY_V = 128  # V of these


@cache
def shipped_for(own: tuple[int, int]) -> tuple[int, int] | None:
    """The compute capability whose configurations `own` takes: the newest of its generation up to `own`, or None."""
    return max((known for known in CONFIGS if known[0] == own[0] and known <= own), default=None)


@cache
def largest_dim(own: tuple[int, int], family: str, size: int) -> int:
    """The largest head dim for which all kernels of "kda" or "gdn" have configurations; operands have `size` bytes."""
    tables = [table for kernel, table in CONFIGS[own].items() if kernel.startswith(family)]
    return min((max((dim for width, dim in table if width == size), default=0) for table in tables), default=0)


@cache
def architecture(device: torch.device) -> tuple[int, int]:
    """The key of CONFIGS for a device on which the kernels are supported (`KERNELS`). On the meta device they are only
    compiled, for the GPU. The interpreter, and compilation without a GPU, take that of the measured GPU."""
    own = capability(torch.device("cuda") if device.type == "meta" else device)
    return (9, 0) if own is None else shipped_for(own)


def kernel_dims(K: int, V: int, least: int = 32) -> tuple[int, int]:
    """The head dims that the kernels compute for heads of K and V; `padded.py` pads to them. K is one tile, a power of
    two and at least `least`; V a multiple of 32, which comes in slices."""
    K = max(1 << (K - 1).bit_length(), least)
    return K, max(-(-V // 32) * 32, K // 4)  # with one slice of 32 to K = 256, ptxas gets GDN's gradients wrong


def widest_slice(V: int) -> int:
    """The largest number of columns of V in a block: the largest power of two that divides V."""
    return V & -V


@cache
def row(own: tuple[int, int], kernel: str, size: int, dim: int) -> tuple[int, int]:
    """The key of CONFIGS[own][kernel] for operands of `size` bytes and head dims up to `dim`."""
    return min(key for key in CONFIGS[own][kernel] if key[0] == size and key[1] >= dim)


def config(kernel: str, x: torch.Tensor, dim: int, **limits: int) -> Config:
    """Launch arguments of `kernel` for operands with x's device and dtype, and head dims up to `dim`.

    limits: upper bounds on block sizes, such as BK=K.
    """
    own = architecture(x.device)
    chosen = CONFIGS[own][kernel][row(own, kernel, x.element_size(), dim)]
    return {name: min(value, limits.get(name, value)) for name, value in chosen.items()}


# --- Where kernels run -----------------------------------------------------------------------------------------------


def triton_installed(_: Target) -> str | None:
    return None if find_spec("triton") else "Triton is not installed"


def known_generation(t: Target) -> str | None:
    if t.capability is None or shipped_for(t.capability):
        return None
    known = ", ".join(map(dotted, sorted(CONFIGS)))
    return f"its kernels have no configurations for compute capability {dotted(t.capability)}, only for {known}"


def has_configurations(family: str) -> Check:
    """family: "kda", "gdn", "ssd" or "rwkv7". For use after the checks of the GPU's generation and of the dtype."""

    def check(t: Target) -> str | None:
        if t.capability is None:
            return None
        where = f"its kernels have no configurations for compute capability {dotted(t.capability)}"
        limits = {size: largest_dim(shipped_for(t.capability), family, size) for size in (2, 4)}
        if not any(limits.values()):
            return where
        if not (limit := limits[t.dtype.itemsize]):
            return f"{where} and {short(t.dtype)}"
        K, V = kernel_dims(t.dims["K"], t.dims["V"])
        if max(K, widest_slice(V)) <= limit:
            return None
        dims = f"K = {t.dims['K']}, V = {t.dims['V']}"
        return f"{where} and {dims}: K and the largest power of two that divides V may be {limit} at most"

    return check


def unmeasured(t: Target, _: Mapping[str, str | None]) -> str:
    if shipped_for(t.capability) in MEASURED:
        return ""
    where = f"compute capability {dotted(t.capability)}"
    return f"not measured on this GPU ({where}): its kernels were compiled for it, and never run"


KERNELS = (on_gpu, triton_installed, known_generation, dtype_in(*HALF, torch.float32))


def with_kernels(
    kernels: Callable[[], Any], torch_code: Callable[[], Any], *needs: Check, slower: str = "many times slower"
) -> dict[str, Implementation]:
    """The implementations of an op in Triton and in PyTorch. needs: beside `KERNELS`; slower: PyTorch, on a GPU."""
    in_torch = Implementation(torch_code, remark=instead_of("triton", f"expect it to be {slower}"))
    return {"triton": Implementation(kernels, (*KERNELS, *needs), unmeasured), "torch": in_torch}


def without_kernels(torch_code: Callable[[], Any]) -> dict[str, Implementation]:
    """The implementations of an op that only PyTorch computes so far."""
    return with_kernels(torch_code, torch_code) | {"triton": Implementation(torch_code, (no_kernels,))}


def no_kernels(_: Target) -> str:
    return "it has no kernels"


def delta_rule_needs(family: str, largest: int = MAX_HEAD_DIM) -> tuple[Check, ...]:
    return dims_up_to(largest, "K", "V"), has_configurations(family)


def decay_needs() -> tuple[Check, ...]:
    return dims_up_to(MAX_HEAD_DIM, "K"), dims_up_to(MAX_DECAY_V, "V"), whole_states, has_configurations("ssd")


def whole_states(t: Target) -> str | None:
    K, V = t.dims["K"], t.dims["V"]
    if K > 64 and V <= 32 and t.dtype in HALF:  # ptxas 12.8 gets the gradients' descriptors wrong
        return f"K = {K}, V = {V}: in 16 bits V is above 32 where K is above 64"
    if K >= 16 and K & (K - 1) == 0 and V % 16 == 0:
        return None
    return f"its kernels take K = 16, 32, 64, 128 or 256 and V in steps of 16, not K = {K}, V = {V}"
