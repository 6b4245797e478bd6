"""What the gates of both delta rules are made of."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x) to a few units of the last place, by log(1 + z) = 2 artanh(z / (2 + z)) with z = e^-|x| <= 1.

    The GPU's fast logarithm is accurate to 2^-22 in absolute terms only: of a slow gate, log(1 + z) = z, that would
    leave four digits.
    """
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    t = s * s  # <= 1 / 9: the first term left out is 2e-8 of the first
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series
