"""The kernels on generations of GPUs that were not measured, compiled without one: they fit the chip.

A few kernels of each are compiled here; `python -m tests.ops.triton.test_generations [words]` compiles all of them, in
bfloat16 with K = V = 64, 128 and 256, and prints their resources. As in test_compile.py, in a process of its own.
"""

import json
import sys

import pytest

from tests.ops.triton.ahead_of_time import OnTheChip, compiled_launches, with_wrong_instructions
from tests.ops.triton.kda_compile import results_of
from tests.ops.triton.shapes import BF16, MIXERS, SHAPES, Shape, results

# GDN: none at sm_100, K and V up to 128 at sm_120 (ops/triton/configs.py says why).
# bytes a program may use on sm_<target>
SHARED = {80: 166912, 86: 101376, 89: 101376, 100: 232448, 120: 101376}
FEW = 64  # bytes a thread that may be spilled: it costs nothing that one would see
MORE = {(86, "kda"): 88, (86, "gdn"): 648}  # with Triton 3.6, as counted; none with 3.7
KERNELS = {
    "kda": ("gradient_kernel",),
    "gdn": ("reverse_kernel",),
    "conv1d": ("conv1d_bwd_kernel",),
    "swiglu": ("activation_bwd_kernel",),
    "cross_entropy": ("statistics_kernel",),
}
COMPILED = [  # here; K = V = 128
    (86, "kda"),
    (86, "gdn"),
    (86, "swiglu"),
    (100, "kda"),
    (100, "conv1d"),
    (100, "cross_entropy"),
    (120, "kda"),
    (120, "gdn"),
    (120, "swiglu"),
    (120, "cross_entropy"),
]


def launches(target, op, K, only=()):
    """Resources of every kernel of `op`, or of those in `only`, at sm_<target> in bfloat16."""
    from titan_linear.ops.triton import configs

    configs.architecture = lambda device: configs.shipped_for(divmod(target, 10))
    with compiled_launches(target, only) as made, OnTheChip():
        results(shape_of(op, K), "meta", "triton")
    return with_wrong_instructions({op: made}, target)[op]


def shape_of(op, K):
    """In bfloat16."""
    heads = {"K": K, "V": K, "H": 2, "HV": 2}
    shapes = {
        "kda": Shape(op, BF16, heads, MIXERS | {"lower_bound": -5.0}),
        "gdn": Shape(op, BF16, heads),
        "conv1d": Shape(op, BF16, {"W": 4, "D": 1000}),
        "swiglu": Shape(op, BF16, {"H": 2816}, {"gate_factor": 0.5}),
        "cross_entropy": Shape(op, BF16, {"vocab": 248320}),
    }
    return SHAPES[str(shapes[op])]


@pytest.fixture(scope="module")
def compiled():
    return results_of(__name__)


@pytest.mark.parametrize("target, op", COMPILED)
def test_fits_the_chip(compiled, target, op):
    results = compiled[f"{target} {op}"]
    assert {r["kernel"] for r in results} == set(KERNELS[op])
    for r in results:
        assert (
            r["shared"] <= SHARED[target]
            and r["spills"] <= MORE.get((target, op), FEW)
            and not r["wrong"]
        ), r


def supported(target, op, K):
    from titan_linear.ops.triton.configs import largest_dim, shipped_for

    if op not in ("kda", "gdn"):
        return K == 128  # of the others, which have no head dims, once
    return largest_dim(shipped_for(divmod(target, 10)), op, 2) >= K


def main():
    if "--json" in sys.argv:
        print(
            json.dumps(
                {
                    f"{target} {op}": launches(target, op, 128, KERNELS[op])
                    for target, op in COMPILED
                }
            )
        )
        return
    cases = [
        (t, op, K) for t in SHARED for op in KERNELS for K in (64, 128, 256) if supported(t, op, K)
    ]
    for target, op, K in cases:
        name = f"sm_{target} {op} K={K}"
        for r in (
            launches(target, op, K) if all(word in name.split() for word in sys.argv[1:]) else ()
        ):
            fits = "" if r["shared"] <= SHARED[target] and not r["wrong"] else "  DOES NOT FIT"
            numbers = (
                f"shared {r['shared']:7d}  registers {r['registers']:4d}  spills {r['spills']:6d}"
            )
            print(f"{name:18s} {r['kernel']:26s} {numbers}  {r['config']}{fits}", flush=True)


if __name__ == "__main__":
    main()
