"""AdamW's update of a tensor in one pass over memory. The gradient is read as backward
produced it, and clipped on the way."""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.triton.tiles import Kernel, arange, blocks_of, load_wide, program, wide

BLOCK = 2048


@Kernel
def adamw_kernel(
    p, copy, g, m, v, step, clip, skipped, n, lr, DECAY: constexpr, B1: constexpr, B2: constexpr, EPS: constexpr,
    LOG1: constexpr, LOG2: constexpr, COPIED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    o = program() * BLOCK + arange(BLOCK)
    # A skipped step masks out every element.
    mask = o < n * (1 - tl.load(skipped)).to(tl.int64)
    t = tl.load(step).to(tl.float64)
    # Bias corrections 1 − β^t, in fp64 because they start close to 0.
    rate = lr / wide(1 - tl.exp(LOG1 * t))
    root = wide(tl.sqrt(1 - tl.exp(LOG2 * t)))
    # Moments of the clipped gradient.
    b_g = load_wide(g + o, mask) * tl.load(clip)
    b_m = tl.load(m + o, mask=mask)
    b_m += (1 - B1) * (b_g - b_m)
    b_v = B2 * tl.load(v + o, mask=mask) + (1 - B2) * b_g * b_g
    # Decoupled weight decay, then the step.
    b_p = tl.load(p + o, mask=mask)
    b_p -= lr * DECAY * b_p
    b_p -= rate * b_m / (tl.sqrt(b_v) / root + EPS)
    tl.store(p + o, b_p, mask=mask)
    if COPIED:
        tl.store(copy + o, b_p, mask=mask)
    tl.store(m + o, b_m, mask=mask)
    tl.store(v + o, b_v, mask=mask)


def adamw(
    p: Tensor,
    copy: Tensor | None,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    clip: Tensor,
    skipped: Tensor,
    group: dict[str, Any],
) -> None:
    """Update p and its moments m and v from clip · g with the group's options, unless
    `skipped`, and round p to its copy.

    p, m and v are float32 and contiguous. step (counted from 1), clip and skipped are
    float32 scalars on the device.
    """
    # The kernel computes β^t as exp(t log β).
    logs = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
    constants = group["weight_decay"], *group["betas"], group["eps"], *logs
    to = p if copy is None else copy
    n = p.numel()
    adamw_kernel[blocks_of(n, BLOCK),](
        p,
        to,
        g,
        m,
        v,
        step,
        clip,
        skipped,
        n,
        group["lr"],
        *constants,
        copy is not None,
        BLOCK,
        num_warps=8,
    )
