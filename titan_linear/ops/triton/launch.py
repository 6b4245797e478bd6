"""Kernels that can be compiled before they are launched, many at once.

By itself Triton compiles a kernel at its first launch, which a step then waits for: for one kernel after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import triton


class Kernel:
    """Decorates a kernel, instead of `jit`. Arguments may be tuples, but not of descriptors, which Triton does not
    find in them; a named one costs a launch half a microsecond, a plain one nothing. A launch whose first argument is
    on the meta device, or begins with a tensor that is, only compiles the kernel."""

    def __init__(self, fn: Callable[..., None], jit: Callable[..., Any] = triton.jit):
        self.jitted = jit(fn)
        self.__name__, self.__doc__ = fn.__name__, fn.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        x, *_ = args
        while isinstance(x, tuple):
            x = x[0]
        on_meta = getattr(x, "base", x).is_meta  # base: of a descriptor
        self.jitted.run(*args, grid=grid, warmup=on_meta, **kwargs)


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Compile kernels that are launched inside, on the meta device, side by side in threads; the end waits for them.
    device: the GPU that they are compiled for, and loaded to."""
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        with triton.AsyncCompileMode(pool) as ahead:
            yield
        kernels = [kernel.result() for kernel in ahead.future_kernels.values()]
        list(pool.map(attrgetter("run"), kernels))  # loads a kernel; Triton 3.6 also compiles its launcher, in C
