"""Choice of the implementation that runs an op.

This is the fastest implementation that is supported, or the requested one, or an error with
the reason against it. Each op declares its own implementations (`Op`); ops/registry.py is
the table of all ops.

`parallelize` decides for a run: modules hold the choices and pass them to their ops as
`impl`, and the run prints and saves them. An op that is called directly, with a name,
decides at every call. Softmax attention always chooses its kernel at each call, by lengths
(`block_kernel`).

"auto" takes the fastest implementation that is supported, and never fails. Naming an
implementation that is not supported is a ValueError with the reason.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, wraps
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

IMPLS = "auto", "torch", "triton"
HALF = torch.bfloat16, torch.float16


class Choice(NamedTuple):
    """A decision that an op takes as `impl`."""

    implementation: str
    why: str = ""  # remark for the user about the choice, if any

    def remark(self, op: str) -> str:
        return f"{op}: {self.implementation}, {self.why}"


class Target(NamedTuple):
    """Device of an op's call, and the dtype and dims of its tensors."""

    device: str  # device type: "cpu", "cuda", ...
    capability: tuple[int, int] | None  # compute capability of a GPU
    dtype: torch.dtype | None  # None: the tensors differ
    dims: Mapping[str, int]
    interpreted: bool = False  # whether Triton's interpreter runs kernels on the CPU


Check = Callable[[Target], str | None]  # returns the reason against a target, or None
# Describes what a choice costs, given the reasons against the other implementations.
Remark = Callable[[Target, Mapping[str, str | None]], str]


# --- What an implementation may require ---------------------------------------------------


def on_gpu(t: Target) -> str | None:
    """Require a GPU.

    The meta device stands for a GPU: calls on it are only planned (planner/counting.py).
    """
    return (
        None
        if t.device in ("cuda", "meta") or t.interpreted
        else f"it needs tensors on a GPU, not on {t.device}"
    )


def on_cpu(t: Target) -> str | None:
    return None if t.device == "cpu" else f"it needs tensors on the CPU, not on {t.device}"


def on_ampere(t: Target) -> str | None:
    """Require compute capability 8.0 or newer."""
    old = t.capability is not None and t.capability < (8, 0)
    return f"compute capability {dotted(t.capability)} is below 8.0" if old else None


def capability_in(known: tuple[tuple[int, int], ...]) -> Check:
    names = ", ".join(map(dotted, known))

    def check(t: Target) -> str | None:
        return None if t.capability in known else f"the compute capability is not one of {names}"

    return check


def dtype_in(*dtypes: torch.dtype) -> Check:
    names = ", ".join(map(short, dtypes))

    def check(t: Target) -> str | None:
        if t.dtype is None:
            return f"q, k and v differ in dtype; it takes one of {names} for all three"
        return None if t.dtype in dtypes else f"the dtype {short(t.dtype)} is not one of {names}"

    return check


def dims_up_to(limit: int, *names: str) -> Check:
    def check(t: Target) -> str | None:
        large = (
            f"{name} = {t.dims[name]} is too large: {name} <= {limit}"
            for name in names
            if t.dims[name] > limit
        )
        return next(large, None)

    return check


def instead_of(name: str, cost: str, on: tuple[tuple[int, int], ...] | None = None) -> Remark:
    """Return a remark on what it costs that implementation `name` cannot run.

    Args:
        on: the GPUs on which it otherwise would run; None: all.
    """

    def remark(t: Target, against: Mapping[str, str | None]) -> str:
        relevant = against.get(name) and (on is None or t.capability in on)
        return f"because {against[name]}; {cost}" if relevant else ""

    return remark


def short(dtype: torch.dtype) -> str:
    """Return the dtype's name: torch.bfloat16 → bfloat16."""
    return str(dtype).removeprefix("torch.")


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or None for other devices.

    On a host without a GPU, return 9.0, the capability of the GPU where rates were
    measured.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


# --- An op, and its choice ----------------------------------------------------------------


class Implementation(NamedTuple):
    # Returns the function or class that runs. Triton exists on Linux only and is imported
    # here.
    load: Callable[[], Any]
    needs: tuple[Check, ...] = ()
    remark: Remark | None = None  # applies on a GPU only


@dataclass(frozen=True, eq=False)
class Op:
    """An op with its implementations, the fastest first. The last one supports everything."""

    name: str
    implementations: Mapping[str, Implementation]

    def load(self, name: str) -> Any:
        """Return the function or class that runs as implementation `name`."""
        return self.implementations[name].load()

    def reason_against(self, name: str, target: Target) -> str | None:
        """Return why implementation `name` does not support `target`; None if it does."""
        checks = self.implementations[name].needs
        return next((reason for check in checks if (reason := check(target))), None)

    def implementation(
        self, impl: str | Choice, device: torch.device, dtype: torch.dtype | None, **dims: int
    ) -> str:
        """Return the name of the implementation that a call uses, a constant in compiled
        code.
        """
        if isinstance(impl, Choice):
            return impl.implementation
        return self._at_call(
            impl, device, dtype, **{name: index(size) for name, size in dims.items()}
        )

    @torch.compiler.assume_constant_result
    def _at_call(
        self, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int
    ) -> str:
        """Choose at a call. Warn, once, if "auto" does not get the GPU's kernels."""
        choice = choose(self, impl, device, dtype, **dims)
        if choice.why and impl == "auto":
            _warn(choice.remark(self.name))
        return choice.implementation


@cache
def choose(
    op: Op, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int
) -> Choice:
    """Return the implementation that `impl` selects for this device, dtype and dims.

    Raises:
        ValueError: `impl` is unknown, or is named but not supported here.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl = {impl!r} is unknown; use 'auto', 'torch' or 'triton'")
    # The interpreter is slower than any other implementation: it runs only if "triton" is
    # named.
    interpreted = (
        impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    target = Target(device.type, capability(device), dtype, dims, interpreted)
    # "auto" takes the first implementation without a reason against it. A name takes that one,
    # or is an error.
    if impl == "auto":
        against = {name: op.reason_against(name, target) for name in op.implementations}
        name = next(name for name, reason in against.items() if reason is None)
    else:
        name = impl
        against = {impl: op.reason_against(impl, target)}
        if against[impl]:
            raise ValueError(
                f"impl = {impl!r} cannot run {op.name}: {against[impl]}; use 'auto' or 'torch'"
            )
    remark = op.implementations[name].remark
    return Choice(name, remark(target, against) if remark and target.device == "cuda" else "")


@cache
def _warn(message: str) -> None:
    """Issue a warning that points to the line outside the package that called the op."""
    frame = sys._getframe()
    level = 1
    while frame.f_back and frame.f_globals["__name__"].startswith("titan_linear."):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, stacklevel=level)


# --- For implementations ------------------------------------------------------------------


def one_dtype(*tensors: Tensor) -> torch.dtype | None:
    """Return the dtype of all tensors, or None if they differ."""
    dtypes = {x.dtype for x in tensors}
    return dtypes.pop() if len(dtypes) == 1 else None


def without_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` to run without autocast, which would round the operands of its products."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return fn(*args, **kwargs)

    return call
