"""Operators registered with PyTorch's dispatcher, at its cost alone; calls that nothing observes bypass it.

`torch.library.custom_op` wraps each call in layers of Python: 30 µs with torch 2.11 where the dispatcher takes 10. A
forward and backward pass calls a dozen operators, and with small shapes the kernels wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from titan_linear.ops.runtime.kept import kept

LIBRARY = torch.library.Library("titan_linear", "FRAGMENT")
Kind = Literal[
    "fused", "attention", "delta rule", "convolution", "gather", "scatter", "sum", "heads", "states", "halo", "segments"
]


@dataclass(frozen=True)
class Spec:
    """What activation checkpointing and the planner need to know of an operator."""

    kept_by: tuple[str, ...] = ()  # modes of checkpointing (ops/runtime/kept.py) that keep its results
    kind: Kind = "fused"  # how its time is planned; fused: one kernel that reads its inputs and writes its outputs
    # The recurrences' driver calls it. Unless compiled, checkpointing keeps what the driver's call gives as a whole.
    of_driver: bool = False
    # "forward": gives what backward computes again, by the same operator or by one of its own, "backward". The compiler
    # would find that both calls are the same, and keep all that the first one gave.
    prepares: Literal["forward", "backward"] | None = None
    temporary: Callable[..., int] | None = None  # its arguments by name → bytes that it allocates and frees again


SPECS: dict[str, Spec] = {}  # by the operator's name


def operator(fn: Callable[..., Any] | None = None, *, mutates: Sequence[str] = (), **spec: Any) -> Callable[..., Any]:
    """Register `fn` as torch.ops.titan_linear.<its name> and return a function that calls it, whose `.overload` is the
    operator. The schema comes from fn's annotations; `fn` mutates only the arguments named in `mutates`, and its first
    argument is a tensor, or a list that begins with one, given by position. spec: fields of `Spec`.

    The operator runs on any device and has no gradient of its own: `register_fake` says what it returns,
    `register_autograd` gives it a gradient, and `autograd.Function`s may call it.
    """
    if fn is None:
        return partial(operator, mutates=mutates, **spec)
    schema = torch.library.infer_schema(fn, mutates_args=mutates)
    LIBRARY.define(fn.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    SPECS[fn.__name__] = Spec(**spec)
    modes = SPECS[fn.__name__].kept_by
    implementation = kept(fn, modes=modes) if modes else fn
    LIBRARY.impl(fn.__name__, implementation, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.titan_linear, fn.__name__).default
    overload.python = fn  # for callers that look inside: dispatch modes see an operator as one call

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if type(args[0]) is list else args[0]
        return (overload if _watched(first) else implementation)(*args, **kwargs)

    call.overload = overload
    return call


def _watched(x: torch.Tensor) -> bool:
    """Whether a call must go through the dispatcher: for the compiler, autograd, a dispatch mode or the profiler, or
    because x is a tensor without numbers."""
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not torch.Tensor
        or x.is_meta
        or _get_current_dispatch_mode() is not None
        or torch.autograd._profiler_enabled()
    )


def register_fake(op: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that, given op's arguments, makes its outputs without computing them."""
    return torch.library.register_fake(op.overload, lib=LIBRARY)


def check_first_derivative() -> None:
    """Raise RuntimeError under create_graph. Backward passes that autograd does not see into call this: it would treat
    their results as constants."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("titan_linear's ops have no second derivatives; leave out create_graph = True")


def register_autograd(op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """As `torch.library.register_autograd`."""
    torch.library.register_autograd(op.overload, backward, setup_context=setup_context, lib=LIBRARY)
