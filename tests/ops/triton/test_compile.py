"""Every kernel in every shipped configuration, compiled for sm_90 without a GPU.

The ops themselves run on meta tensors with the launch replaced by an ahead-of-time compilation, so that what is checked
is what ships: signatures, alignment, configurations. It runs in a process of its own, because kernels decorated for the
interpreter do not compile. A few shapes of `shapes.py` are compiled here;

    python -m tests.ops.triton.test_compile [words]

compiles all whose names have these words, and prints the table.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.triton.kda_compile import results_of
from tests.ops.triton.machine_code import run_on, wrong_instructions
from tests.ops.triton.shapes import SHAPES, results

SHARED_LIMIT = 232448  # bytes a program may use on sm_90
MANY_TILES = "six to ten fp32 tiles are alive at once; splitting the kernel further reads its inputs again"
OCCUPANCY = "fewer registers let more programs run on a multiprocessor: KDA's prepare takes 1.4 ms instead of 1.9"
DECAYS = "60 loads among 1,200 instructions; 8 warps have every sum pass through shared memory"
# Bytes that a thread may spill in 16 bits with Triton 3.6 or 3.7, and why. float32 and dims of 256 may: not fast.
ACCEPTED_SPILLS: dict[tuple[str, str], tuple[int, str]] = {
    ("kda", "prepare_kernel"): (112, OCCUPANCY),
    ("kda", "solve_kernel"): (96, OCCUPANCY),
    ("kda", "gradient_kernel"): (512, MANY_TILES),
    ("kda", "fold_segments_kernel"): (8, "two tiles of M a link take half as long again"),
    ("gdn", "solve_kernel"): (96, OCCUPANCY),
    ("gdn", "gradients_kernel"): (120, MANY_TILES),
    ("gdn", "reverse_kernel"): (16, MANY_TILES),
    ("rwkv7", "gradient_kernel"): (328, MANY_TILES),
    ("ssd", "carried_kernel"): (360, DECAYS),
    ("ssd", "pairs_kernel"): (64, DECAYS),
    ("ssd", "gates_kernel"): (8, DECAYS),
    ("gla", "carried_kernel"): (360, DECAYS),
    ("conv1d", "conv1d_bwd_kernel"): (264, "norms and states at once, which context parallelism has not"),
}


def spills_accepted(name: str, kernel: str) -> float:
    if "float32" in name or "=256" in name:
        return float("inf")
    op, *_ = name.split()
    return ACCEPTED_SPILLS.get((op, kernel), (0, ""))[0]


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack: all of it spills."""
    report = run_on(cubin, "cuobjdump", "-res-usage")
    return dict(zip(("registers", "spills"), map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())))


def compile_launch(kernel, grid, arguments: dict, target: int = 90) -> dict:
    """What launching `kernel` with these arguments on sm_<target> would compile: its name, resources and code."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    names = {
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.int32: "*i32",
        torch.int64: "*i64",
    }
    options = {key: arguments.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in arguments}
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, (arguments[p.name] for p in kernel.params))):
        divisible = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{names[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = names[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if divisible and signature[parameter.name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    result = {"kernel": kernel.__name__, "shared": compiled.metadata.shared} | _resources(compiled.asm["cubin"])
    config = {k: arguments[k] for k in ("BT", "BD", "BV", "STAGES") if k in arguments} | options
    return result | {"config": config, "cubin": compiled.asm["cubin"]}


@contextmanager
def compiled_launches() -> Iterator[list[dict]]:
    """Launches inside compile for sm_90 instead; the list collects their results."""
    from triton import JITFunction

    results: list[dict] = []
    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        arguments = dict(zip([p.name for p in self.params], args)) | kwargs
        results.append(compile_launch(self, grid, arguments))

    JITFunction.run = run
    try:
        yield results
    finally:
        JITFunction.run = original


class OnTheChip(TorchDispatchMode):
    """Operators of kernels run on meta tensors as on a GPU, where they would run their fake implementations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "titan_linear" and func.python.__module__.startswith("titan_linear.ops.triton"):
            return func.redispatch(DispatchKeySet(DispatchKey.CUDA), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def compile_shape(name: str) -> list[dict]:
    with compiled_launches() as launches, OnTheChip():
        results(SHAPES[name], "meta", "triton")
    return launches


def compile_shapes(names: list[str]) -> dict[str, list[dict]]:
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 4), mp_context=get_context("fork")) as pool:
        return with_wrong_instructions(dict(zip(names, pool.map(compile_shape, names), strict=True)))


def with_wrong_instructions(made: dict[str, list[dict]], target: int = 90) -> dict[str, list[dict]]:
    """Launches, by shape, with "wrong", the instructions that ptxas got wrong, in place of "cubin"."""
    launches = [launch for of_shape in made.values() for launch in of_shape]
    wrong = wrong_instructions([launch.pop("cubin") for launch in launches], target)
    for launch, found in zip(launches, wrong, strict=True):
        launch["wrong"] = found
    return made


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    return results_of(__name__)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.compiled])
def test_compiles_within_the_chip(compiled: dict[str, list[dict]], name: str) -> None:
    assert compiled[name]
    for result in compiled[name]:
        assert result["shared"] <= SHARED_LIMIT and not result["wrong"], result
        assert result["spills"] <= spills_accepted(name, result["kernel"]), result


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--json"]
    in_tests = "--json" in sys.argv
    shapes = [name for name, shape in SHAPES.items() if shape.op != "attention" and (shape.compiled or not in_tests)]
    made = compile_shapes([name for name in shapes if all(word in name for word in words)])
    if in_tests:
        print(json.dumps(made))
        return
    for name, launches in made.items():
        for r in launches:
            numbers = f"shared {r['shared']:7d}  registers {r['registers']:4d}  spills {r['spills']:6d}"
            print(f"{name:50s} {r['kernel']:26s} {numbers}  {r['config']}  {' '.join(r['wrong'])}")


if __name__ == "__main__":
    main()
