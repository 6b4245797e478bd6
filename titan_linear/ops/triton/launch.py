"""Launches at the cost of the driver: compiled kernels found again by a short key.

Triton's own search for the compiled form of a launch takes 25 to 80 µs, and a forward and backward pass of a delta rule
makes ten launches: a short shard's kernels would wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Launcher:
    """Decorates a jitted kernel: `kernel[grid](*positional, **constants_and_options)` as before, all arguments given.

    Forms that Triton compiled are kept by what it specialises them for. The interpreter, and whoever replaces Triton's
    launch, compile nothing that could be kept: every launch then goes the long way.
    """

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, {}
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self._launch(grid, args, kwargs)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = torch._C._cuda_getDevice() if torch.cuda.is_initialized() else None
        kinds, given = _kinds(args)
        key = (device, *kinds, *kwargs.items())
        form = self.compiled.get(key)
        if form is None:
            form = self.kernel[grid](*args, **kwargs)
            if form is not None:
                names = [p.name for p in self.kernel.params[len(args) :]]
                self.compiled[key] = form, [kwargs[name] for name in names]
            return
        kernel, constants = form
        stream = torch._C._cuda_getCurrentRawStream(device)
        launched = kernel.function, kernel.packed_metadata, None, None, None  # no metadata for hooks, and none of them
        kernel.run(*(*grid, 1, 1)[:3], stream, *launched, *given, *constants)


def _kinds(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What Triton specialises each argument for: a tensor's type and alignment, whether a number is 1. And the
    arguments as its launcher takes them fastest: of a tensor it asks the driver where it is, of an address it does not.
    (A tensor that is not on the GPU is a kind of its own, so that its first launch goes the long way and is refused.)
    """
    kinds, given = [], []
    for x in args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            kinds.append((x.dtype, x.is_cuda, address % 16 == 0))
            x = address
        elif type(x) is int:
            kinds.append(x == 1 or (x % 16 == 0, -(2**31) <= x < 2**31))
        elif isinstance(x, TensorDescriptor):
            kinds.append((x.base.dtype, *x.block_shape))
        else:
            kinds.append(type(x))
        given.append(x)
    return kinds, given


def descriptor(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """TensorDescriptor(x, shape, strides, block) without its checks, which take as long as a launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, shape, strides, block
    return made
