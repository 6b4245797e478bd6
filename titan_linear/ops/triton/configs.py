"""Block sizes, warps and pipeline stages of the recurrences' kernels by architecture and
shape, and checks of where kernels run.

Configurations for compute capability 9.0 were chosen by measurement;
`tools.bench_ops` times them. Configurations for other generations fit their
shared memory and spill little, but have never been run. Nothing is tuned at run time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
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

Config = dict[str, Any]  # a kernel's launch arguments


def _read(file: Path) -> dict[tuple[int, int], dict[str, dict[tuple[int, int], Config]]]:
    """Read configs.json: compute capability -> kernel -> (bytes of an operand, largest K
    for KDA or largest K and V for GDN) -> launch arguments."""
    tables = {}
    for version, kernels in json.loads(file.read_text()).items():
        major, minor = map(int, version.split("."))
        tables[major, minor] = {kernel: _by_size(rows) for kernel, rows in kernels.items()}
    return tables


def _by_size(rows: list[Config]) -> dict[tuple[int, int], Config]:
    return {(row.pop("bytes"), row.pop("dim")): row for row in rows}


# A capability that is not listed uses the newest older one of its generation (`shipped_for`).
# On 9.0:
#   KDA's "safe" kernels: with safe_gate, 128 registers let two programs share a
#   multiprocessor; other gates spill.
#   Copy-engine loads in a loop (GDN's kernels, KDA's gradient) must be pipelined with
#   STAGES >= 2: otherwise they faulted with Triton 3.6.
#   float32 is not tuned: tiles have twice the bytes, and dots take IEEE fp32 (KDA, solve) or
#   three tf32 passes (GDN).
#   KDA's configurations up to 128 were chosen by their spills; larger tiles spill five times
#   as much. In "gdn gradients" ptxas loses a descriptor with 16 columns up to 128.
# Elsewhere, for 16-bit operands, tiles fit the 99 KB of shared memory that a program has on
# 8.6, 8.9 and 12.0:
#   8.0 has no copy engine. Triton turns such loads into ordinary ones, and one stage is as
#   good as two.
#   10.0 has KDA only. Triton 3.7 fails to compile GDN's gradients, in a pass on tensor
#   memory, with every configuration tried.
CONFIGS = _read(Path(__file__).with_name("configs.json"))
MEASURED = ((9, 0),)  # compute capabilities on which the configurations were run
MAX_HEAD_DIM = 256  # K and V in the delta rules' kernels, K in the decay-only kernels
MAX_DECAY_V = 128  # V in the decay-only kernels


@cache
def shipped_for(own: tuple[int, int]) -> tuple[int, int] | None:
    """Return the compute capability whose configurations `own` uses: the newest of its
    generation that is not newer than `own`, or None."""
    return max((known for known in CONFIGS if known[0] == own[0] and known <= own), default=None)


@cache
def largest_dim(own: tuple[int, int], family: str, size: int) -> int:
    """Return the largest head dim for which all kernels of `family` ("kda", "gdn", …) have
    configurations, for operands of `size` bytes."""
    largest = []
    for kernel, table in CONFIGS[own].items():
        if kernel.startswith(family):
            largest.append(max((dim for width, dim in table if width == size), default=0))
    return min(largest, default=0)


@cache
def architecture(device: torch.device) -> tuple[int, int]:
    """Return the key of CONFIGS for a device that supports the kernels (`KERNELS`).

    On the meta device kernels are only compiled, for the GPU. The interpreter, and
    compilation without a GPU, use the configurations of the measured GPU.
    """
    device = torch.device("cuda") if device.type == "meta" else device
    own = shipped_for(capability(device) or (9, 0))
    assert own
    return own


def kernel_dims(K: int, V: int, least: int = 32) -> tuple[int, int]:
    """Return the head dims that the kernels compute for heads of K and V; `padded.py` pads
    to them.

    K is one tile, so it is a power of two and at least `least`. V is processed in slices,
    so it is a multiple of 32.
    """
    K = max(1 << (K - 1).bit_length(), least)
    # With one slice of 32 columns at K = 256, ptxas miscompiles GDN's gradients.
    return K, max(-(-V // 32) * 32, K // 4)


def widest_slice(V: int) -> int:
    """Return the largest number of columns of V in a block: the largest power of two that
    divides V."""
    return V & -V


@cache
def row(own: tuple[int, int], kernel: str, size: int, dim: int) -> tuple[int, int]:
    """Return the key of CONFIGS[own][kernel] for operands of `size` bytes and head dims up
    to `dim`."""
    return min(key for key in CONFIGS[own][kernel] if key[0] == size and key[1] >= dim)


def config(kernel: str, x: torch.Tensor, dim: int, **limits: int) -> Config:
    """Return launch arguments of `kernel` for operands with x's device and dtype and head
    dims up to `dim`.

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
    """Make a check that `family` ("kda", "gdn", "ssd" or "rwkv7") has configurations for
    the head dims. It must run after the checks of GPU generation and dtype."""

    def check(t: Target) -> str | None:
        if t.capability is None:
            return None
        where = f"its kernels have no configurations for compute capability {dotted(t.capability)}"
        # The largest head dim for 16-bit and for fp32 operands.
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
    return f"not measured on this GPU ({where}): its kernels, less those for 9.0, were compiled for it, never run"


KERNELS = on_gpu, triton_installed, known_generation, dtype_in(*HALF, torch.float32)


def with_kernels(
    kernels: Callable[[], Any],
    torch_code: Callable[[], Any],
    *needs: Check,
    slower: str = "many times slower",
) -> dict[str, Implementation]:
    """Return the implementations of an op in Triton and in PyTorch.

    needs: checks in addition to `KERNELS`. slower: how much slower PyTorch is on a GPU, for
    the message.
    """
    in_torch = Implementation(torch_code, remark=instead_of("triton", f"expect it to be {slower}"))
    return {"triton": Implementation(kernels, (*KERNELS, *needs), unmeasured), "torch": in_torch}


def delta_rule_needs(family: str, largest: int = MAX_HEAD_DIM) -> tuple[Check, ...]:
    return dims_up_to(largest, "K", "V"), has_configurations(family)


def decay_needs() -> tuple[Check, ...]:
    return (
        dims_up_to(MAX_HEAD_DIM, "K"),
        dims_up_to(MAX_DECAY_V, "V"),
        whole_states,
        has_configurations("ssd"),
    )


def whole_states(t: Target) -> str | None:
    K = t.dims["K"]
    V = t.dims["V"]
    if K > 64 and V <= 32 and t.dtype in HALF:  # ptxas 12.8 miscompiles the gradients' descriptors
        return f"K = {K}, V = {V}: in 16 bits V is above 32 where K is above 64"
    if K >= 16 and K & (K - 1) == 0 and V % 16 == 0:
        return None
    return f"its kernels take K = 16, 32, 64, 128 or 256 and V in steps of 16, not K = {K}, V = {V}"
