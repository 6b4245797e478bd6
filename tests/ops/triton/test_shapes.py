"""Every shape of `shapes.py` on a GPU: forward, states and all gradients, alone and on four ranks, against float64. And
what the rules accept is on that list, and what they refuse is said.

    ./tests/run.sh tests/ops/triton/test_shapes.py -m cuda            # on all GPUs that there are
    ./tests/run.sh tests/ops/triton/test_shapes.py -m cuda -k rwkv7
    ./tests/run.sh tests/ops/triton/test_shapes.py -m "cuda and not long"  # a shape for each kernel and dtype
"""

import os
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.inputs import relative_error
from tests.ops.triton.machine_code import wrong_instructions
from tests.ops.triton.shapes import (
    BF16,
    FAMILIES,
    FP16,
    FP32,
    HOPPER,
    SHAPES,
    SHORT,
    UNIT,
    attention_facts,
    op_of,
    results,
)
from titan_linear.ops.convolution import MAX_WIDTH
from titan_linear.ops.registry import OPS
from titan_linear.ops.runtime.support import Target
from titan_linear.ops.triton.configs import kernel_dims, widest_slice

# Largest relative errors, of o and of what is not named; float32's products are exact to about 2^-21.
EXACT = 2e-5
# In 16 bits a chain of three roundings of half a unit each: what a product reads, its result, and what is stored.
# Gates' gradients subtract two such.
CHAIN = 1.5 * UNIT
DELTA_RULE = dict.fromkeys(("o", "final", "dq", "dk", "dv", "dinitial_state"), CHAIN) | {
    "": 2 * CHAIN
}
DECAY = {"": CHAIN} | dict.fromkeys(("dB", "dC", "dq", "dk"), 2 * CHAIN)
DECAY |= dict.fromkeys(("dA", "ddt_bias", "dD", "ddt", "dg"), 4 * CHAIN)
HALF = {
    "kda": DELTA_RULE,
    "gdn": DELTA_RULE,
    "ssd": DECAY,
    "gla": DECAY,
    "rwkv7": {"": CHAIN, "dw": 3 * UNIT, "da": 2 * UNIT, "db": 2 * UNIT},
    "conv1d": {"": UNIT},
    "swiglu": {"": UNIT},
    "cross_entropy": {"": UNIT},
    "copies": {"": 2 * UNIT},
    "attention": {"": 2 * UNIT, "o": UNIT},
}


# over tokens, whose errors in a chunk have one sign: twice the bound
SUMS = ("dA_log", "ddt_bias", "dA")


def bound(shape, name):
    table = {"": EXACT} if shape.dtype == FP32 else HALF[shape.op]
    plain = name.removeprefix("ranks ")
    return table.get(plain, table[""]) * (2 if plain in SUMS else 1)


class Swept(NamedTuple):
    errors: dict[str, Future[dict[str, float] | str]]  # by shape, as they come
    cache: Path  # of what Triton compiled
    pool: ProcessPoolExecutor


def head_dims(shape):
    """K and V."""
    return (
        (shape.dims["N"], shape.dims["P"])
        if shape.op in ("ssd", "gla")
        else (shape.dims["K"], shape.dims["V"])
    )


def target(shape):
    dims = attention_facts(shape) if shape.op == "attention" else dict(zip("KV", head_dims(shape)))
    return Target(
        "cuda",
        torch.cuda.get_device_capability() if shape.op == "attention" else HOPPER,
        shape.dtype,
        dims,
    )


# --- The rules -------------------------------------------------------------------------------------------------------


def computed(family, dtype, K, V):
    """What kernels compute for heads of K and V: K, the columns of a slice of V, and whether in 16 bits there are
    several."""
    if family != "ssd":
        K, V = kernel_dims(K, V, least=64 if family == "rwkv7" and dtype != FP32 else 32)
    return K, widest_slice(V), dtype != FP32 and widest_slice(V) < V


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_rules_accept_is_on_the_list(family, dtype):
    """The tiles of all that they accept, and they accept all of the list. float16 has bfloat16's tables."""
    op = OPS[FAMILIES[family]]
    shapes = [shape for shape in SHAPES.values() if (shape.op, shape.dtype) == (family, dtype)]
    listed = {computed(family, dtype, *head_dims(shape)) for shape in shapes}
    for K, V in product(range(1, 300), repeat=2):
        reason = op.reason_against("triton", Target("cuda", HOPPER, dtype, {"K": K, "V": V}))
        assert reason is not None or computed(family, dtype, K, V) in listed, (K, V)
    refused = [op.reason_against("triton", target(shape)) for shape in shapes]
    assert not any(refused)


@pytest.mark.parametrize(
    "family, dtype, K, V, reason",
    [
        ("kda", BF16, 257, 64, "K = 257 is too large: K <= 256"),
        ("kda", FP32, 64, 257, "V = 257 is too large: V <= 256"),
        ("gdn", BF16, 64, 257, "V = 257 is too large: V <= 256"),
        ("rwkv7", BF16, 65, 64, "K = 65 is too large: K <= 64"),
        (
            "rwkv7",
            FP32,
            32,
            33,
            "K = 32, V = 33: K and the largest power of two that divides V may be 32 at most",
        ),
        ("ssd", BF16, 512, 64, "K = 512 is too large: K <= 256"),
        ("ssd", BF16, 128, 144, "V = 144 is too large: V <= 128"),
        (
            "ssd",
            BF16,
            48,
            64,
            "K = 16, 32, 64, 128 or 256 and V in steps of 16, not K = 48, V = 64",
        ),
        ("ssd", FP16, 128, 32, "K = 128, V = 32: in 16 bits V is above 32 where K is above 64"),
        (
            "ssd",
            FP32,
            64,
            24,
            "K = 16, 32, 64, 128 or 256 and V in steps of 16, not K = 64, V = 24",
        ),
        (
            "gdn",
            torch.float64,
            64,
            64,
            "the dtype float64 is not one of bfloat16, float16, float32",
        ),
    ],
)
def test_what_lies_past_an_edge_is_refused(family, dtype, K, V, reason):
    found = OPS[FAMILIES[family]].reason_against(
        "triton", Target("cuda", HOPPER, dtype, {"K": K, "V": V})
    )
    assert found is not None and found.endswith(reason)


def test_convolutions_past_the_edge_are_refused():
    widths = {shape.dims["W"] for shape in SHAPES.values() if shape.op == "conv1d"}
    assert widths == set(range(1, MAX_WIDTH + 1))
    wide = Target("cuda", HOPPER, BF16, {"W": MAX_WIDTH + 1})
    assert OPS["causal_conv1d"].reason_against("triton", wide) == "W = 9 is too large: W <= 8"


# --- The sweep -------------------------------------------------------------------------------------------------------


def accepted(shape):
    """All but attention are on the list because rules accept them; a kernel of attention may lack a width here, or a
    library."""
    return (
        shape.op != "attention"
        or op_of(shape).reason_against(shape.options["kernel"], target(shape)) is None
    )


def sweep(name):
    """Each result's relative error; or how the shape failed."""
    shape = SHAPES[name]
    if not accepted(shape):
        return {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        ours = results(shape, "cuda", "triton")
        exact = results(shape, "cuda", "torch", torch.float64)
        return {n: relative_error(ours[n], exact[n], scale_of(n, exact)) for n in exact}
    except Exception as error:  # of one shape: the others go on
        return f"{type(error).__name__}: {error}"


def scale_of(name, exact):
    """What a result's error is measured by: a gradient of gates' parameters is a sum over tokens, which may cancel; its
    terms are about as large as the gradient of the gates."""
    prefix, _, plain = name.rpartition(" ")
    gates = [f"{prefix} {gate}".strip() for gate in ("dg", "ddt")] if plain in SUMS else []
    return max([exact[n] for n in (name, *gates) if n in exact], key=Tensor.norm)


def take_gpu(numbers):
    torch.cuda.set_device(numbers.get() % torch.cuda.device_count())


@pytest.fixture(scope="module")
def swept(request, tmp_path_factory):
    """The shapes whose tests were selected, in several processes, which compile side by side."""
    tests = [item for item in request.session.items if item.originalname == "test_on_the_chip"]
    names = [item.callspec.params["name"] for item in tests]
    cache = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        context = get_context("spawn")
        numbers, workers = context.Queue(), min(os.cpu_count() or 1, 16 * torch.cuda.device_count())
        for i in range(workers):
            numbers.put(i)
        with ProcessPoolExecutor(workers, context, take_gpu, (numbers,)) as pool:
            yield Swept(
                {name: pool.submit(sweep, name) for name in sorted(names, key=cost, reverse=True)},
                cache,
                pool,
            )


def cost(name):
    """What takes longest to compile comes first."""
    shape = SHAPES[name]
    return shape.dtype == FP32, max(shape.dims.values())


@pytest.mark.cuda
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.long) for n in SHAPES]
)
def test_on_the_chip(name, swept, record_property):
    shape, errors = SHAPES[name], swept.errors[name].result()
    assert isinstance(errors, dict), errors
    record_property("errors", errors)
    assert not {n: e for n, e in errors.items() if not e <= bound(shape, n)}, errors


@pytest.mark.cuda
def test_machine_code_of_the_sweep(swept):
    """ptxas got no instruction wrong in any kernel that the sweep compiled."""
    binaries = sorted(swept.cache.rglob("*.cubin"))
    batches = [binaries[i : i + 64] for i in range(0, len(binaries), 64)]
    wrong = dict(zip(binaries, chain.from_iterable(swept.pool.map(wrong_in, batches)), strict=True))
    assert binaries and not {str(path): found for path, found in wrong.items() if found}


def wrong_in(binaries):
    return wrong_instructions([path.read_bytes() for path in binaries])
