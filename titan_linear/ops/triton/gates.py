"""Gates and β, as the kernels of both delta rules compute them."""

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.tiles import load_wide

LOG2E = constexpr(1.4426950408889634)


@triton.jit
def log2_gate(g):
    """g in base 2, at least -126, a decay that leaves nothing that fp32 can tell from zero: sums then keep the digits
    of the gates after it, and -inf is a gate like any other. NaN stays NaN."""
    g *= LOG2E
    return tl.where(g < -126.0, -126.0, g)


@triton.jit
def softplus(x):
    """log(1 + e^x) to a few units in the last place, by log(1 + z) = 2 artanh(z / (2 + z)) with z = e^-|x| <= 1.

    The GPU's fast logarithm is accurate to 2^-22 in absolute terms only: for a slow gate, log(1 + z) ≈ z, that would
    leave four digits.
    """
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    t = s * s  # <= 1 / 9: the first term left out is 2e-8 of the leading one
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    """Computed as rsqrt squared: two instructions where a division takes eight. Within 4 units in the last place."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def load_beta(beta, o_c, start, length, i_h, BETA_RANGE):
    """β fp32 of the tokens o_c of one chunk and head, from beta [T, HV]. With BETA_RANGE, beta holds logits, and β is
    BETA_RANGE times their sigmoid. Past the end of the entry, 0."""
    p_beta, stride = beta
    b_beta = load_wide(p_beta + start * stride + i_h + o_c * stride, o_c < length)
    if BETA_RANGE is not None:
        b_beta = tl.where(o_c < length, BETA_RANGE * sigmoid(b_beta), 0.0)
    return b_beta


@triton.jit
def beta_gradient(b_db, b_beta, BETA_RANGE):
    """The gradient of `load_beta`'s input from that of β."""
    if BETA_RANGE is not None:
        b_db *= b_beta * (1.0 - b_beta / BETA_RANGE)
    return b_db
