"""Kernel launches at the driver's cost: compiled kernels are looked up by a short key.

Triton's own search for the compiled form of a launch takes 25 to 80 µs, and a forward and backward pass of a delta rule
makes ten launches: the kernels of a short shard would wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Launcher:
    """Decorates a jitted kernel; launches stay `kernel[grid](*positional, **constants_and_options)`, but must give all
    arguments.

    Compiled forms are kept by what Triton specialises them for. The interpreter, and code that replaces Triton's
    launch, return no compiled form to keep: every launch then takes Triton's own path.
    """

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, {}
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        device = torch._C._cuda_getDevice() if torch.cuda.is_initialized() else None
        kinds, given = reader(*map(type, args))(*args)
        key = (device, kinds, *kwargs, *kwargs.values())
        form = self.compiled.get(key)
        if form is None:
            form = self.kernel[grid](*args, **kwargs)
            if form is not None:
                names = [p.name for p in self.kernel.params[len(args) :]]
                self.compiled[key] = form, [kwargs[name] for name in names]
            return
        kernel, constants = form
        stream = torch._C._cuda_getCurrentRawStream(device)
        launched = kernel.function, kernel.packed_metadata, None, None, None  # no launch metadata, and no hooks
        kernel.run(*(*grid, 1, 1)[:3], stream, *launched, *given, *constants)


@cache
def reader(*types: type) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return a function that takes arguments of these types and returns

    - what Triton specialises them for: a tensor's dtype and alignment; whether an integer is 1, a multiple of 16 or
      within 32 bits. A tensor that is not on the GPU is a kind of its own, so that its first launch takes Triton's own
      path and is refused;
    - the arguments in the form that Triton's launcher takes fastest: tensors as addresses, since for a tensor it asks
      the driver where it lies.

    The function is generated for these types: a loop over the arguments takes half as long again, in every launch.
    """
    kinds, given, addresses, lines = [], [], [], []
    for i, kind in enumerate(types):
        x = f"x{i}"
        given.append(x)
        if issubclass(kind, torch.Tensor):
            given[-1] = f"a{i}"
            addresses.append(f"a{i}")
            lines.append(f"a{i} = {x}.data_ptr()")
            kinds += [f"{x}.dtype", f"{x}.is_cuda"]
        elif kind is int:
            kinds.append(f"{x} == 1 or ({x} % 16 == 0, {-(2**31)} <= {x} < {2**31})")
        elif kind is TensorDescriptor:
            kinds += [f"{x}.base.dtype", f"*{x}.block_shape"]
    if addresses:  # usually all are aligned
        each = " ".join(f"{address} % 16 == 0," for address in addresses)
        kinds.append(f"({' | '.join(addresses)}) % 16 == 0 or ({each})")
    names = ", ".join(f"x{i}" for i in range(len(types)))
    lines.append(f"return (types, {' '.join(f'{kind},' for kind in kinds)}), ({' '.join(f'{x},' for x in given)})")
    space: dict[str, Any] = {"types": types}
    exec(f"def read({names}):\n    " + "\n    ".join(lines), space)
    return space["read"]


def blocks_of(n: int, size: int) -> int:
    """⌈n / size⌉. `triton.cdiv` first checks whether either is a kernel's constant, which takes 2 µs."""
    return -(-n // size)


def descriptor(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """TensorDescriptor(x, shape, strides, block) without its checks, which take as long as a launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, shape, strides, block
    return made
