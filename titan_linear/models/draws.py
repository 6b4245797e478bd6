"""Random numbers by name: element i of a parameter depends on (seed, name, i) alone.

Any part of a parameter can therefore be drawn by itself, in any order, on any rank. The
generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014): number i is a hash of start + i · step, modulo 2^64, where (seed, name)
determines the start and the odd step. Its bits are the same everywhere. Values computed
from them in float64 differ in the last place between mathematical libraries, which seldom
survives rounding to float32.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(seed: int, *name: object) -> torch.Generator:
    """Return a CPU generator whose draws depend on (seed, name) alone."""
    return torch.Generator().manual_seed(int.from_bytes(_digest(seed, *name)[:8], "little") >> 1)


def _digest(seed: int, *name: object) -> bytes:
    return hashlib.sha256(repr((seed, *name)).encode()).digest()


def stream(seed: int, name: str) -> tuple[int, int]:
    """Return (start, step) of a parameter's numbers."""
    start, step = (int.from_bytes(_digest(seed, name)[i : i + 8], "little") for i in (0, 8))
    step |= 1
    # Replace a step that is too regular (section 5 of the paper).
    if (step ^ (step >> 1)).bit_count() < 24:
        step ^= 0xAAAAAAAAAAAAAAAA
    return start, step


@dataclass(frozen=True)
class Elements:
    """Some elements of one parameter."""

    stream: tuple[int, int]
    # [n] int64, indices into the whole flattened parameter; numbers are drawn on this
    # tensor's device
    index: Tensor

    def bits(self) -> Tensor:
        """Return the bits of unsigned numbers, [n] int64."""
        start, step = map(_signed, self.stream)
        x = self.index * step
        x += start
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= _right(x, shift)
            x *= _signed(factor)
        x ^= _right(x, 31)
        return x

    def places(self) -> Tensor:
        """Return the indices themselves, [n] float64."""
        return self.index.double()

    def uniform(self) -> Tensor:
        """Return uniform numbers in (0, 1), [n] float64."""
        return _right(self.bits(), 12).double().add_(0.5).mul_(2.0**-52)

    def normal(self) -> Tensor:
        """Return normal numbers, [n] float64, at most 6.77 in magnitude.

        The method is Box and Muller's, with the two halves of each number.
        """
        bits = self.bits()
        radius = _right(bits, 32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFFFF).double().mul_(2 * math.pi * 2.0**-32)
        return radius.mul_(angle.cos_())


def _signed(number: int) -> int:
    """Return the int64 with the same 64 bits.

    Its sums and products have the bits of unsigned arithmetic.
    """
    return number - (number >> 63 << 64)


def _right(x: Tensor, shift: int) -> Tensor:
    """Return x >> shift with zeros shifted in from the left."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)


# --- How a parameter is drawn -----------------------------------------------------------

Draw = Callable[[Elements], Tensor]  # -> [n] floating


def zeros(elements: Elements) -> Tensor:
    return torch.zeros_like(elements.index, dtype=torch.float32)


def ones(elements: Elements) -> Tensor:
    return torch.ones_like(elements.index, dtype=torch.float32)


def constant(value: float) -> Draw:
    return lambda elements: torch.full_like(elements.index, value, dtype=torch.float32)


def token_mix(dim: int, power: float) -> Draw:
    """Draw 1 − (n / dim)^power, the share of the previous token in channel n of `dim`."""
    return lambda elements: 1 - (elements.places() / dim).pow(power)


def normal(std: float) -> Draw:
    return lambda elements: elements.normal().mul_(std)


def uniform(bound: float) -> Draw:
    return lambda elements: bound * (2 * elements.uniform() - 1)


def uniform_decay(low: float) -> Draw:
    """Draw A_log such that exp(A_log) is uniform on (low, 16)."""
    return lambda elements: torch.log(16 - (16 - low) * elements.uniform())


def time_step_bias(elements: Elements) -> Tensor:
    """Draw dt_bias such that softplus(dt_bias) is log-uniform on (1e-3, 0.1)."""
    dt = torch.exp(elements.uniform() * math.log(100) + math.log(1e-3))
    return dt + torch.log(-torch.expm1(-dt))
