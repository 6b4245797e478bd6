"""Compile kernels for a GPU that need not be here."""

import re
from contextlib import contextmanager

from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.triton.machine_code import run_on, wrong_instructions

OPTIONS = ("num_warps", "num_stages", "maxnreg")


def _resources(cubin):
    """Registers, and bytes of stack: all of it spills."""
    report = run_on(cubin, "cuobjdump", "-res-usage")
    return dict(
        zip(("registers", "spills"), map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups()))
    )


class Chip:
    """In place of Triton's driver: a GPU to compile for, which need not be here."""

    def __init__(self, target):
        self.target = target

    def get_current_device(self):
        return self.target  # one for each target: kernels are remembered by device

    def get_current_stream(self, device):
        return None

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.target, 32)


@contextmanager
def compiled_launches(target=90, only=()):
    """Launches inside (of the kernels in `only`, if any) compile for sm_<target>; the list collects their results."""
    from triton import JITFunction
    from triton.runtime import driver

    results = []
    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if only and self.__name__ not in only:
            return
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        cubin = compiled.asm["cubin"]
        named = {
            key: x for key, x in kwargs.items() if key in ("BT", "BD", "BV", "STAGES", *OPTIONS)
        }
        result = {
            "kernel": self.__name__,
            "shared": compiled.metadata.shared,
            "config": named,
            "cubin": cubin,
        }
        results.append(result | _resources(cubin))

    driver.set_active(Chip(target))
    JITFunction.run = run
    try:
        yield results
    finally:
        JITFunction.run = original


class OnTheChip(TorchDispatchMode):
    """Operators of kernels run on meta tensors as on a GPU, where they would run their fake implementations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_linear" and func.python.__module__.startswith(
            "titan_linear.ops.triton"
        ):
            return func.redispatch(DispatchKeySet(DispatchKey.CUDA), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def with_wrong_instructions(made, target=90):
    """Launches, by shape, with "wrong", the instructions that ptxas got wrong, in place of "cubin"."""
    launches = [launch for of_shape in made.values() for launch in of_shape]
    wrong = wrong_instructions([launch.pop("cubin") for launch in launches], target)
    for launch, found in zip(launches, wrong, strict=True):
        launch["wrong"] = found
    return made
