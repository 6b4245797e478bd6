"""Block sizes, warps and pipeline stages of the delta rule's kernels, by architecture and shape.

Chosen by measurement; `python -m tools.tune_ops` times candidates and checks the numbers of each. Nothing is tried at
run time.
"""

from __future__ import annotations

from functools import cache

import torch

Config = dict[str, int]

# Compute capability -> kernel -> (bytes of an operand, K (KDA) or K and V (GDN) up to) -> arguments of the launch.
# KDA's "safe" kernels: with safe_gate 128 registers let two programs share a multiprocessor; other gates would spill.
# Copy-engine loads in a loop (GDN's, KDA's gradient) want it pipelined, STAGES >= 2: else they faulted with Triton 3.6.
# float32: twice the bytes for each tile, and dots in IEEE fp32 (KDA, solve) or three tf32 passes (GDN): not tuned.
CONFIGS: dict[tuple[int, int], dict[str, dict[tuple[int, int], Config]]] = {
    (9, 0): {
        "kda prepare safe": {
            (2, 256): {"BK": 128, "num_warps": 8, "num_stages": 1, "maxnreg": 128},
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
        "kda scan": {
            (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 1, "num_warps": 4},
        },
        "kda reverse": {
            (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 1, "num_warps": 4},
        },
        "kda matrix": {
            (2, 256): {"BV": 128, "num_warps": 4, "num_stages": 1},
            (4, 256): {"BV": 32, "num_warps": 4, "num_stages": 1},
        },
        "kda gradient": {
            (2, 256): {"BK": 64, "BV": 128, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BK": 32, "BV": 32, "STAGES": 2, "num_warps": 4},
        },
        "gdn prepare": {
            (2, 128): {"num_warps": 4, "maxnreg": 96},
            (2, 256): {"num_warps": 4},
            (4, 256): {"num_warps": 8},
        },
        "gdn recompute": {(2, 256): {"num_warps": 8}, (4, 256): {"num_warps": 8}},
        "gdn scan": {
            (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 4},
        },
        "gdn boundary": {
            (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 4},
        },
        "gdn states": {
            (2, 128): {"BV": 64, "STAGES": 4, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 4},
        },
        "gdn reverse": {
            (2, 128): {"BV": 64, "STAGES": 3, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 4},
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 4},
        },
        "gdn gradients": {
            (2, 128): {"BV": 64, "STAGES": 2, "num_warps": 4},
            (2, 256): {"BV": 32, "STAGES": 2, "num_warps": 8},
            (4, 64): {"BV": 32, "STAGES": 2, "num_warps": 8},
            (4, 256): {"BV": 16, "STAGES": 2, "num_warps": 8},
        },
    },
}


@cache
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


def config(kernel: str, x: torch.Tensor, dim: int, **limits: int) -> Config:
    """Launch arguments of `kernel` for operands of x's device and dtype and head dims up to `dim`.

    limits: what a block may be at most: BK=K, say.
    """
    table = CONFIGS[architecture(x.device)][kernel]
    chosen = table[min(key for key in table if key[0] == x.element_size() and key[1] >= dim)]
    return {name: min(value, limits.get(name, value)) for name, value in chosen.items()}
