"""Block sizes, warps and pipeline stages of the delta rule's kernels, by architecture and shape.

Chosen by measurement, with the numbers of each candidate checked: `python -m tools.tune_ops`. Nothing is tried at run
time.
"""

from __future__ import annotations

import torch

# Compute capability -> kernel -> (bytes of an operand, widest of K and V up to) -> arguments of the launch.
CONFIGS: dict[tuple[int, int], dict[str, dict[tuple[int, int], dict[str, int]]]] = {
    (9, 0): {},
}


def architecture(device: torch.device) -> tuple[int, int]:
    """The compute capability whose configurations `device` takes: its own, or that of its generation.

    Raises:
        ValueError: its generation has none.
    """
    if device.type != "cuda":  # the interpreter, or a compilation without a GPU
        return 9, 0
    own = torch.cuda.get_device_capability(device)
    for shipped in (own, *sorted(CONFIGS)):
        if shipped in CONFIGS and shipped[0] == own[0]:
            return shipped
    known = ", ".join(f"{major}.{minor}" for major, minor in sorted(CONFIGS))
    raise ValueError(
        f"compute capability {own[0]}.{own[1]} ({torch.cuda.get_device_name(device)}): impl = 'triton' has "
        f"configurations for {known}; use impl = 'torch', or add some (tools/tune_ops.py)"
    )


def config(kernel: str, x: torch.Tensor, K: int, V: int) -> dict[str, int]:
    """Launch arguments of `kernel` for operands of x's device and dtype; blocks are no wider than K and V."""
    table = CONFIGS[architecture(x.device)][kernel]
    chosen = table[min(key for key in table if key[0] == x.element_size() and key[1] >= max(K, V))]
    limits = {"BK": K, "BV": min(K, V)}  # boundary kernels cut K too into blocks of BV
    return {name: min(value, limits.get(name, value)) for name, value in chosen.items()}
