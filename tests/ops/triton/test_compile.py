"""Every kernel in every shipped configuration, compiled for sm_90 without a GPU.

The ops themselves run on meta tensors with the launch replaced by an ahead-of-time compilation, so that what is checked
is what ships: signatures, alignment, configurations. It runs in a process of its own, because kernels decorated for the
interpreter do not compile. A few shapes of `shapes.py` are compiled here;

    python -m tests.ops.triton.test_compile [words]

compiles all whose names have these words, and prints the table.
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.ops.triton.ahead_of_time import OnTheChip, compiled_launches, with_wrong_instructions
from tests.ops.triton.kda_compile import results_of
from tests.ops.triton.shapes import SHAPES, results

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


def compile_shape(name):
    with compiled_launches() as launches, OnTheChip():
        results(SHAPES[name], "meta", "triton")
    return launches


def compile_shapes(names):
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 4), mp_context=get_context("fork")) as pool:
        return with_wrong_instructions(
            dict(zip(names, pool.map(compile_shape, names), strict=True))
        )


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
