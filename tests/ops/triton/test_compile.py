"""Every kernel in every shipped configuration, compiled for sm_90 without a GPU.

The ops themselves run on meta tensors with the launch replaced by an ahead-of-time compilation, so that what is checked
is what ships: signatures, alignment, configurations. It runs in a process of its own, because kernels decorated for the
interpreter do not compile. A few shapes of `shapes.py` are compiled here;

    python -m tests.ops.triton.test_compile [words]

compiles all whose names have these words, and prints the table.
"""

import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.triton.kda_compile import results_of
from tests.ops.triton.machine_code import run_on, wrong_instructions
from tests.ops.triton.shapes import SHAPES, results

OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHARED_LIMIT = 232448  # bytes a program may use on sm_90
MANY_TILES = (
    "six to ten fp32 tiles are alive at once; splitting the kernel further reads its inputs again"
)
OCCUPANCY = "fewer registers let more programs run on a multiprocessor: KDA's prepare takes 1.4 ms instead of 1.9"
DECAYS = "60 loads among 1,200 instructions; 8 warps have every sum pass through shared memory"
OUTSIDE = "addresses of states before and after the loop"
# Bytes that a thread may spill in 16 bits with Triton 3.6 or 3.7, and why. float32 and dims of 256 may: not fast.
ACCEPTED_SPILLS = {
    ("kda", "prepare_kernel"): (112, OCCUPANCY),
    ("kda", "solve_kernel"): (96, OCCUPANCY),
    ("kda", "gradient_kernel"): (512, MANY_TILES),
    ("kda", "fold_segments_kernel"): (8, "two tiles of M a link take half as long again"),
    ("gdn", "solve_kernel"): (96, OCCUPANCY),
    ("gdn", "gradients_kernel"): (376, MANY_TILES),
    ("gdn", "reverse_kernel"): (16, MANY_TILES),
    ("rwkv7", "prepare_kernel"): (48, OCCUPANCY),
    ("rwkv7", "gradient_kernel"): (336, MANY_TILES),
    ("ssd", "scan_kernel"): (144, OUTSIDE),
    ("gla", "scan_kernel"): (168, OUTSIDE),
    ("ssd", "pairs_kernel"): (64, DECAYS),
    ("ssd", "gates_kernel"): (8, DECAYS),
    ("conv1d", "conv1d_bwd_kernel"): (
        264,
        "norms and states at once, which context parallelism has not",
    ),
}


def spills_accepted(name, kernel):
    if "float32" in name or "=256" in name:
        return float("inf")
    op, *_ = name.split()
    return ACCEPTED_SPILLS.get((op, kernel), (0, ""))[0]


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


def compile_shape(name):
    with compiled_launches() as launches, OnTheChip():
        results(SHAPES[name], "meta", "triton")
    return launches


def compile_shapes(names):
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 4), mp_context=get_context("fork")) as pool:
        return with_wrong_instructions(
            dict(zip(names, pool.map(compile_shape, names), strict=True))
        )


def with_wrong_instructions(made, target=90):
    """Launches, by shape, with "wrong", the instructions that ptxas got wrong, in place of "cubin"."""
    launches = [launch for of_shape in made.values() for launch in of_shape]
    wrong = wrong_instructions([launch.pop("cubin") for launch in launches], target)
    for launch, found in zip(launches, wrong, strict=True):
        launch["wrong"] = found
    return made


@pytest.fixture(scope="module")
def compiled():
    return results_of(__name__)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.compiled])
def test_compiles_within_the_chip(compiled, name):
    assert compiled[name]
    for result in compiled[name]:
        assert result["shared"] <= SHARED_LIMIT and not result["wrong"], result
        assert result["spills"] <= spills_accepted(name, result["kernel"]), result


def main():
    words = [word for word in sys.argv[1:] if word != "--json"]
    in_tests = "--json" in sys.argv
    shapes = [
        name
        for name, shape in SHAPES.items()
        if shape.op != "attention" and (shape.compiled or not in_tests)
    ]
    made = compile_shapes([name for name in shapes if all(word in name for word in words)])
    if in_tests:
        print(json.dumps(made))
        return
    for name, launches in made.items():
        for r in launches:
            numbers = (
                f"shared {r['shared']:7d}  registers {r['registers']:4d}  spills {r['spills']:6d}"
            )
            print(f"{name:50s} {r['kernel']:26s} {numbers}  {r['config']}  {' '.join(r['wrong'])}")


if __name__ == "__main__":
    main()
