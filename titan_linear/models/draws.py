"""Random numbers by name: element i of the parameter `name` under `seed` is a function of (seed, name, i) alone.

So any part of a parameter can be drawn by itself, in any order, on any rank. The generator is SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014): number i is a hash of start + i · step, modulo 2^64,
where (seed, name) gives the start and the odd step. Its bits are the same everywhere. Values computed from them in
float64 differ in the last place between mathematical libraries, which seldom survives the rounding to float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, *name: object) -> torch.Generator:
    """A CPU generator whose draws depend on (seed, name) alone."""
    return torch.Generator().manual_seed(int.from_bytes(_digest(seed, *name)[:8], "little") >> 1)


def _digest(seed: int, *name: object) -> bytes:
    return hashlib.sha256(repr((seed, *name)).encode()).digest()


def stream(seed: int, name: str) -> tuple[np.uint64, np.uint64]:
    """(start, step) of a parameter's numbers."""
    start, step = np.frombuffer(_digest(seed, name)[:16], "<u8")
    step |= np.uint64(1)
    if int(step ^ (step >> np.uint64(1))).bit_count() < 24:  # too regular a step (section 5 of the paper)
        step ^= np.uint64(0xAAAAAAAAAAAAAAAA)
    return start, step


@dataclass(frozen=True)
class Elements:
    """Some elements of one parameter."""

    stream: tuple[np.uint64, np.uint64]
    index: np.ndarray  # [n] uint64, their indices in the whole parameter, flattened

    def bits(self) -> np.ndarray:
        """[n] uint64."""
        start, step = self.stream
        x = self.index * step
        x += start
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        return x

    def places(self) -> Tensor:
        """[n] float64, the indices themselves."""
        return _floats(self.index)

    def uniform(self) -> Tensor:
        """[n] float64 in (0, 1)."""
        return _floats(self.bits() >> np.uint64(12)).add_(0.5).mul_(2.0**-52)

    def normal(self) -> Tensor:
        """[n] float64, by Box and Muller from the two halves of each number; at most 6.77 in magnitude."""
        bits = self.bits()
        radius = _floats(bits >> np.uint64(32)).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = _floats(bits & np.uint64(0xFFFFFFFF)).mul_(2 * math.pi * 2.0**-32)
        return radius.mul_(angle.cos_())


def _floats(numbers: np.ndarray) -> Tensor:
    """uint64 numbers below 2^63 as float64, via int64, which processors convert several at a time."""
    return torch.from_numpy(numbers.view(np.int64).astype(np.float64))


# --- How a parameter is drawn ----------------------------------------------------------------------------------------

Draw = Callable[[Elements], Tensor]  # -> [n] floating


def zeros(elements: Elements) -> Tensor:
    return torch.zeros(len(elements.index))


def ones(elements: Elements) -> Tensor:
    return torch.ones(len(elements.index))


def constant(value: float) -> Draw:
    return lambda elements: torch.full((len(elements.index),), value)


def token_mix(dim: int, power: float) -> Draw:
    """What channel n of `dim` takes from the token before, 1 − (n / dim)^power."""
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
