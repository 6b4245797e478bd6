"""Operators of the dispatcher, at its cost alone.

`torch.library.custom_op` wraps each call in layers of Python: 30 µs with torch 2.11 where the dispatcher takes 4, and a
forward and backward pass calls a dozen operators while a small shape's kernels wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from titan_linear.ops.kept import OPERATORS as KEPT
from titan_linear.ops.kept import kept

LIBRARY = torch.library.Library("titan_linear", "FRAGMENT")


def operator(fn: Callable[..., Any], mutates: Sequence[str] = ()) -> torch._ops.OpOverload:
    """`fn` as torch.ops.titan_linear.<its name>; its annotations are the schema, and it mutates none of its arguments
    but those named.

    It runs on any device and has no gradient of its own: `register_fake` says what it returns, `register_autograd`
    gives it a gradient, and `autograd.Function`s may call it.
    """
    schema = torch.library.infer_schema(fn, mutates_args=mutates)
    LIBRARY.define(fn.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementation = kept(fn) if fn.__name__ in KEPT else fn
    LIBRARY.impl(fn.__name__, implementation, "CompositeExplicitAutograd")
    op = getattr(torch.ops.titan_linear, fn.__name__).default
    op.python = fn  # for who looks inside: dispatch modes see an operator as one call
    return op


def register_fake(op: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the function of the same arguments that makes op's outputs without computing them."""
    return torch.library.register_fake(op, lib=LIBRARY)
