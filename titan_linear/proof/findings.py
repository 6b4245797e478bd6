"""A finding: a figure, its bound, and the place of the worst error."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# The relative error that a result may have. Storing in half precision rounds by up to half
# of the last bit. In float32 sums matter more: products are exact to 2^-21 in the kernels,
# and a chunk sums a few hundred of them.
UNIT = {torch.float32: 2.0**-17, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Number of times that a token's activations are rounded, per layer.
ROUNDINGS = 20


class Note(NamedTuple):
    """A comparison that was not made, and the reason."""

    text: str

    def __str__(self) -> str:
        return f"--   {self.text}"


class Finding(NamedTuple):
    # For example "split, float64".
    check: str
    # The things that were compared.
    what: str
    figure: float
    bound: float
    # Op, layer, rank and document of the worst error.
    where: str = ""

    @property
    def holds(self) -> bool:
        # NaN does not hold.
        return self.figure <= self.bound

    def __str__(self) -> str:
        sign, state = ("≤", "ok  ") if self.holds else (">", "FAIL")
        where = f" ({self.where})" if self.where else ""
        return f"{state} {self.check}: {self.what}  {_short(self.figure)} {sign} {_short(self.bound)}{where}"


Findings = Iterator[Finding | Note]
Name = TypeVar("Name")


def _short(x: float) -> str:
    return f"{x:g}" if x == int(x if abs(x) < 1e15 else 0) else f"{x:.1e}".removesuffix(".0e+00")


def bound_of_model(dtype: torch.dtype, num_layers: int) -> float:
    """Return how far rounding takes the results of a whole model.

    Errors of layers and the head add up at random.
    """
    return 2 * UNIT[dtype] * math.sqrt(ROUNDINGS * (num_layers + 1))


def off(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Return ‖a − b‖ / max(‖b‖, `least`); infinite if a is not finite."""
    a = a.detach().double()
    b = b.detach().double()
    if not torch.isfinite(a).all():
        return math.inf
    return _part((a - b).norm().item(), max(b.norm().item(), least))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a − b| in float64; NaN is infinite."""
    return (a.double() - b.double()).abs().nan_to_num(torch.inf, torch.inf)


def by_token(errors: Tensor) -> Tensor:
    """Return the largest error of each token, [T], of errors [1, T, ...]."""
    return errors[0].flatten(1).amax(1)


def worst(errors: Mapping[Name, float], bounds: Mapping[Name, float]) -> Name:
    """Return the name whose error is the largest share of its bound."""
    return max(errors, key=lambda name: _part(errors[name], bounds[name]))


def of_count(check: str, what: str, places: Sequence[str], shown: int = 1) -> Finding:
    """Return the finding of something that must not occur.

    places: where it occurs, or the names of what is wrong; the first of them are reported.
    """
    where = ", ".join(places[:shown])
    if len(places) > shown > 1:
        where += f" and {len(places) - shown} more"
    return Finding(check, what, len(places), 0, where)


def of_worst(check: str, what: str, errors: Mapping[str, float], bound: float = 0.0) -> Finding:
    """Return the finding of the largest error. errors: by place."""
    place = max(errors, key=errors.get, default="")
    error = errors.get(place, 0.0)
    return Finding(check, what, error, bound, place if error else "")


def _part(error: float, bound: float) -> float:
    """Return error / bound: 0 if both are 0, and infinite for NaN."""
    if error == 0 == bound:
        return 0.0
    return error / bound if bound and not math.isnan(error) else math.inf
