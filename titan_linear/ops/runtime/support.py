"""Which implementation of an op runs where: the fastest that is supported, or the reason why not.

Each op states its own implementations (`Op`); ops/registry.py is the table of all. `parallelize` decides for a run:
modules hold the answers and hand them to their ops as `impl`, and the run prints and saves them. Softmax attention
alone takes its kernel at each call, by lengths (`block_kernel`). An op that is called by itself, with a name, decides
at every call. "auto" takes the fastest implementation that is supported, and never fails; an
implementation that is named but not supported is a ValueError that says why.
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

IMPLS = ("auto", "torch", "triton")
HALF = (torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    """What an op takes as `impl` if its implementation is decided already."""

    implementation: str
    why: str = ""  # what a user should know about the choice, if anything

    def remark(self, op: str) -> str:
        return f"{op}: {self.implementation}, {self.why}"


class Target(NamedTuple):
    """What an op would run on, and the dtype and dims of its tensors."""

    device: str  # its type: "cpu", "cuda", ...
    capability: tuple[int, int] | None  # of a GPU
    dtype: torch.dtype | None  # None: the tensors differ
    dims: Mapping[str, int]
    interpreted: bool = False  # Triton's interpreter runs kernels on the CPU


Check = Callable[[Target], str | None]  # the reason why not, or None
# what a choice costs, given the reasons against the others
Remark = Callable[[Target, Mapping[str, str | None]], str]


# --- What an implementation may require --------------------------------------------------------------------------


def on_gpu(t: Target) -> str | None:
    """The meta device stands for a GPU: what runs there is only planned (planner/counting.py)."""
    return (
        None
        if t.device in ("cuda", "meta") or t.interpreted
        else f"it needs tensors on a GPU, not on {t.device}"
    )


def on_cpu(t: Target) -> str | None:
    return None if t.device == "cpu" else f"it needs tensors on the CPU, not on {t.device}"


def on_ampere(t: Target) -> str | None:
    """Or newer."""
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
    """What it costs that implementation `name` cannot run. on: the GPUs on which it otherwise would; None: all."""

    def remark(t: Target, against: Mapping[str, str | None]) -> str:
        relevant = against.get(name) and (on is None or t.capability in on)
        return f"because {against[name]}; {cost}" if relevant else ""

    return remark


def short(dtype: torch.dtype) -> str:
    """torch.bfloat16 → bfloat16."""
    return str(dtype).removeprefix("torch.")


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, None for other devices. On a host without a GPU, that of the measured one."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


# --- An op, and its choice -------------------------------------------------------------------------------------------


class Implementation(NamedTuple):
    # returns what runs; where that is Triton's, which exists on Linux only, it imports it
    load: Callable[[], Any]
    needs: tuple[Check, ...] = ()
    remark: Remark | None = None  # on a GPU


@dataclass(frozen=True, eq=False)
class Op:
    """An op with its implementations, the fastest first and one that takes everything last."""

    name: str
    implementations: Mapping[str, Implementation]

    def load(self, name: str) -> Any:
        """What runs as implementation `name`."""
        return self.implementations[name].load()

    def reason_against(self, name: str, target: Target) -> str | None:
        """Why implementation `name` cannot take `target`, or None if it can."""
        checks = self.implementations[name].needs
        return next((reason for check in checks if (reason := check(target))), None)

    def choose(
        self, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int
    ) -> Choice:
        """The implementation that `impl` names for tensors of this device, dtype and dims.

        Raises:
            ValueError: `impl` is unknown, or named and not supported here.
        """
        return _choose(self, impl, device, dtype, **dims)

    def implementation(
        self, impl: str | Choice, device: torch.device, dtype: torch.dtype | None, **dims: int
    ) -> str:
        """The name of the implementation that a call takes. Compiled code has it as a constant."""
        if isinstance(impl, Choice):
            return impl.implementation
        return self._at_call(
            impl, device, dtype, **{name: index(size) for name, size in dims.items()}
        )

    @torch.compiler.assume_constant_result
    def _at_call(
        self, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int
    ) -> str:
        """`choose` at a call. Warns, once, where "auto" does not get the GPU's kernels."""
        choice = self.choose(impl, device, dtype, **dims)
        if choice.why and impl == "auto":
            _warn(choice.remark(self.name))
        return choice.implementation


@cache
def _choose(
    op: Op, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int
) -> Choice:
    if impl not in IMPLS:
        raise ValueError(f"impl = {impl!r} is unknown; use 'auto', 'torch' or 'triton'")
    # The interpreter is slower than anything: it runs if the kernels are named, and "auto" never chooses it.
    interpreted = (
        impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    target = Target(device.type, capability(device), dtype, dims, interpreted)
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
    """Warn of the line outside the package that called the op."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals["__name__"].startswith("titan_linear."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# --- For implementations ---------------------------------------------------------------------------------------------


def one_dtype(*tensors: Tensor) -> torch.dtype | None:
    """The dtype of all tensors, or None if they differ."""
    dtypes = {x.dtype for x in tensors}
    return dtypes.pop() if len(dtypes) == 1 else None


def without_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with autocast off, which would round the operands of its products."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return fn(*args, **kwargs)

    return call
