"""Every kernel in every shipped configuration, compiled for sm_90 without a GPU.

The ops' own launch code runs on meta tensors with the launch replaced by an ahead-of-time compilation, so that what is
checked is what ships: signatures, alignment, configurations. It runs in a process of its own (`python -m
tests.ops.triton.test_compile [words]` prints the table), because kernels decorated for the interpreter do not compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.ops.triton.kda_compile import N, T, kda_case, launch, meta, results_of, stream

SHARED_LIMIT = 232448  # bytes a program may use on sm_90
# Case (as printed) -> why its spills are accepted. float32 and head dims of 256 may spill: right, not fast.
MANY_TILES = "six to ten fp32 tiles are alive at once; splitting the kernel further reads its inputs again"
FEW = "32 bytes at most, with Triton 3.7"
OCCUPANCY = (
    "128 registers (96 in GDN's) let one more program run on a multiprocessor: prepare takes 1.4 ms instead of 1.9"
)
BY_INDEX = "88 bytes where states come by an index"
DECAYS = "280 bytes at most, with 60 loads among 1,200 instructions; 8 warps have every sum pass through shared memory"
ACCEPTED_SPILLS: dict[str, str] = {
    **{f"rwkv7 bfloat16{case} gradient_kernel": MANY_TILES for case in (" plain", "", " K=64 V=32")},
    "gdn bfloat16 K=128 V=128 R=1 plain gradients_kernel": MANY_TILES,
    **{
        f"gdn {case} R=1 {kernel}_kernel": reason
        for case in ("bfloat16 K=128 V=128", "bfloat16 K=64 V=64")
        for kernel, reason in (("prepare", OCCUPANCY), ("gradients", MANY_TILES))
    },
    "gdn bfloat16 K=128 V=192 30 heads prepare_kernel": OCCUPANCY,
    "gdn bfloat16 K=128 V=192 30 heads gradients_kernel": MANY_TILES,
    "gdn bfloat16 K=128 V=192 30 heads reverse_kernel": FEW,
    "gdn bfloat16 K=128 V=128 R=1 reverse_kernel": FEW,
    **{
        f"fold K=128 V={V} fold_segments_kernel": "40 bytes at most; two tiles of M a link take half as long again"
        for V in (128, 192)
    },
    **{
        f"kda bfloat16 {case} {kernel}_kernel": reason
        for case in ("K=128 V=128 plain", "K=128 V=128 bounded", "K=64 V=64 plain", "K=128 V=192 plain")
        for kernel, reason in (("prepare", OCCUPANCY), ("gradient", MANY_TILES))
    },
    "kda bfloat16 K=32 V=32 softplus gradient_kernel": MANY_TILES,
    "kda bfloat16 K=128 V=128 bounded backward_scans_kernel": BY_INDEX,
    **{
        f"ssd {case} {kernel}_kernel": DECAYS
        for case, kernels in {
            "bfloat16 128 heads P=64 N=128 G=1 plain": ("carried", "pairs"),
            "bfloat16 128 heads P=64 N=128 G=1": ("carried", "pairs", "gates"),
            "bfloat16 64 heads P=64 N=128 G=8": ("carried", "pairs"),
            "gla bfloat16": ("carried", "pairs"),
        }.items()
        for kernel in kernels
    },
}


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack: all of it spills."""
    report = _run_on(cubin, "cuobjdump", "-res-usage")
    return dict(zip(("registers", "spills"), map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())))


def _run_on(content: bytes, tool: str, *options: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _code(cubin: bytes) -> bytes:
    """The instructions of its kernel: what an ELF's section .text.<kernel> holds."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    texts = [s for s in sections if cubin[sections[names][4] + s[0] :].startswith(b".text.")]
    ((_, _, _, _, begin, length),) = texts
    return cubin[begin : begin + length]


def look_for_wrong(launches: list[dict], target: int = 90) -> list[dict]:
    """Each launch with "wrong", the instructions that ptxas got wrong, in place of "code". All are disassembled at
    once, since a call takes half a second whatever there is."""
    codes = [launch.pop("code") for launch in launches]
    ends = list(accumulate(map(len, codes)))
    found: list[list[str]] = [[] for _ in codes]
    for address, instruction in _stack_pointer_as_number(_on_r1(b"".join(codes), target)):
        found[bisect_right(ends, address)].append(instruction)
    return [launch | {"wrong": wrong} for launch, wrong in zip(launches, found, strict=True)]


def _on_r1(code: bytes, target: int) -> str:
    """The lines on R1 of a disassembly, which are kept where Triton keeps its kernels."""
    from triton import __version__
    from triton.runtime.cache import get_cache_manager

    architecture = f"SM{target}{'a' if target >= 90 else ''}"
    kept = get_cache_manager(hashlib.sha256(f"{__version__} {architecture}".encode() + code).hexdigest())
    if (path := kept.get_file("on_r1.txt")) is None:
        lines = _run_on(code, "nvdisasm", "--binary", architecture).splitlines()
        path = kept.put("\n".join(line for line in lines if re.search(r"\bR1\b", line)), "on_r1.txt", binary=False)
    return Path(path).read_text()


def _stack_pointer_as_number(code: str) -> list[tuple[int, str]]:
    """Addresses and instructions that compute with R1 other than addresses on the stack.

    ptxas 12.8 was seen to take R1, the stack pointer, for an operand that it had lost, even in a kernel without a
    stack: a product then read shared memory that no one wrote.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*\bR1\b[^;]*);", code)
    stack = r"LDC R1, |VIADD R1, R1, |IADD3? R1, (PT, PT, )?R1, |IMAD\.MOV\.U32 R1, RZ, RZ, c\[|MOV R1, c\["
    return [(int(at, 16), line) for at, line in lines if "[R1" not in line and not re.match(stack, line)]


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
    return result | {"config": config, "code": _code(compiled.asm["cubin"])}


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


def conv1d_case(dtype: str, W: int, by_index: bool = False, norm_dim: int | None = None) -> None:
    """With states in and out; by_index: as context parallelism calls it; norm_dim: with q and k normalised."""
    import torch

    from titan_linear.ops.triton import conv1d as conv

    def meta(*shape):
        return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")

    T, D = 32768, 8192
    cu, index = (torch.empty(n, dtype=torch.int32, device="meta") for n in (11, 10))
    chunk_index = launch(conv.conv1d_chunks, cu, T, conv.BT)
    d_final, index = (None, index) if by_index else (meta(10, D, W - 1), None)
    widths = [D // 4, D // 4, D // 2] if by_index else [D]
    x, inputs = meta(T, D), (meta(D, W), meta(D), meta(10, D, W - 1), index, cu, chunk_index)
    launch(conv.conv1d, x, *inputs, widths, True, norm_dim, not by_index)
    launch(conv.conv1d_backward, x, [meta(T, width) for width in widths], d_final, *inputs, True, norm_dim)


def gdn_case(dtype: str, K: int, V: int, R: int = 1, plain: bool = False, HV: int = 64) -> None:
    """All stages; plain: normalised inputs, no states (what is timed); else gate, β's sigmoid and states by
    index in the kernels."""
    from titan_linear.ops.triton import gdn

    H = HV // R
    q, k, v, do = (meta(T, *of_head, kind=dtype) for of_head in ((H, K), (H, K), (HV, V), (HV, V)))
    g, beta = meta(T, HV, kind="float32"), meta(T, HV, kind="float32")
    gate = (None, None) if plain else (meta(HV, kind="float32"), meta(HV, kind="float32"))
    chunks, states, entries, wanted = stream(HV, K, V, plain)
    numbers = (0.5, None if plain else 2.0)
    inputs = [q, k, v, g, beta, *gate]
    tiles = list(launch(gdn.gdn_prepare, inputs, chunks, *numbers))
    launch(gdn.gdn_scan, q, k, v, tiles, chunks, states, 0 if plain else N, 0.5)
    launch(gdn.gdn_backward, do, inputs, tiles, chunks, states, states, not plain, *numbers)
    launch(gdn.gdn_boundary, k, v, tiles, chunks, entries, wanted)
    launch(gdn.gdn_boundary_bwd, do, q, k, tiles, chunks, entries, wanted, 0.5)


def ssd_case(dtype: str, heads: int, P: int, K: int, G: int, plain: bool = False, gla: bool = False) -> None:
    """All stages; plain: no states (what is timed); else states by index; gla: log decays, and factors of none."""
    from titan_linear.ops.triton import ssd

    width, of = heads * P, {"kind": dtype}
    x, B, C = meta(T, width + 2 * G * K, **of).split([width, G * K, G * K], -1)  # as the mixer gives them
    v, k, q, do = x.unflatten(-1, (heads, P)), *(y.unflatten(-1, (G, K)) for y in (B, C)), meta(T, heads, P, **of)
    g, A, D, bias = meta(T, heads, **of), *(None if gla else meta(heads, kind="float32") for _ in range(3))
    chunks, states, two, wanted = stream(heads, K, P, plain)
    limits = (not gla, 0.0, float("inf"))
    gates = launch(ssd.ssd_prepare, g, A, bias, chunks, 2 if dtype == "float32" else 1, *limits)
    launch(ssd.ssd_scan, q, k, v, D, gates, chunks, states, 0 if plain else N, 1.0)
    if plain:  # one document, which is cut into pieces
        one = [meta(2, kind="int32"), meta(T // 64, 2, kind="int32"), meta(2, kind="int32")]
        launch(ssd.ssd_scan, q, k, v, D, gates[: T // 64], one, states, 0, 1.0)
    launch(ssd.ssd_boundary, k, v, gates, chunks, two, wanted)
    launch(ssd.ssd_boundary_bwd, do, q, gates, chunks, two, wanted, 1.0)
    inputs = [q, k, v, g, A, D, bias]
    launch(ssd.ssd_backward, do, inputs, [gates], chunks, states, states, not plain, 1.0, *limits)


def rwkv7_case(dtype: str, K: int, V: int, plain: bool = False) -> None:
    """All stages; plain: no states (what is timed), and raw gates; else states by index, and log decays."""
    from titan_linear.ops.triton import rwkv7

    H = 64
    *of_heads, do = (meta(T, H, dim, kind=dtype) for dim in (K, K, V, K, K, V))
    inputs = [*of_heads, meta(T, H, K, kind=dtype if plain else "float32")]
    chunks, states, two, wanted = stream(H, K, V, plain)
    numbers = (1.0, -0.6 if plain else None)
    tiles = list(launch(rwkv7.rwkv7_prepare, inputs, chunks, *numbers))
    launch(rwkv7.rwkv7_recompute, inputs, chunks, tiles[4], *numbers)
    launch(rwkv7.rwkv7_scan, inputs[2], tiles, chunks, states, 0 if plain else N)
    launch(rwkv7.rwkv7_boundary, tiles, chunks, two, wanted)
    launch(rwkv7.rwkv7_boundary_bwd, do, tiles, chunks, two, wanted)
    launch(rwkv7.rwkv7_backward, do, inputs, tiles, chunks, states, states, not plain, *numbers)


def fold_case(K: int, V: int, number: bool = False) -> None:
    """What turns a packed stream into chunks, documents into segments, and folds these and the chains of KCP."""
    import torch

    from titan_linear.ops.triton import chunks, fold, split_documents

    def meta(*shape):
        return torch.empty(*shape, device="meta")

    HV, offsets, rows = 16, *(torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 5))
    launch(chunks.chunk_table, offsets, 64, 514)
    launch(split_documents.segment_table, offsets, 32768, 8192)
    for reverse in (False, True):
        states, M = meta(6, HV, K, V), meta(6, HV, *([1] if number else [K, K]))
        for index, wanted in ((None, None), (rows, rows)):
            launch(fold.fold_segments, states, M, meta(2, HV, K, V), index, offsets, wanted, reverse)
            launch(fold.fold_entries, states, M, offsets, rows, wanted, reverse)
        launch(fold.fold_entries_back, states, M, offsets, rows)
        launch(fold.fold, states, M, offsets, rows, rows, reverse)


def cross_entropy_case() -> None:
    import torch

    from titan_linear.ops.triton import cross_entropy

    logits, target = torch.empty(2048, 32000, device="meta"), torch.empty(2048, dtype=torch.int64, device="meta")
    lse = launch(cross_entropy.row_logsumexp, logits)
    launch(cross_entropy.softmax_gradient, logits, lse, target, torch.bfloat16)


def swiglu_case(dtype: str = "bfloat16") -> None:
    import torch

    from titan_linear.ops.triton import swiglu

    gate_up = torch.empty(1, 2048, 2 * 2816, device="meta", dtype=getattr(torch, dtype))
    launch(swiglu.swiglu_backward, gate_up, launch(swiglu.swiglu_forward, gate_up, 0.5), 0.5)


def copies_case(k: int, D: int, dtype: str) -> None:
    import torch

    from titan_linear.ops.triton import copies

    x = torch.empty(2048, D, device="meta", dtype=getattr(torch, dtype))
    slots = torch.empty(2048, k, device="meta", dtype=torch.int64)
    weights = torch.empty(2048, k, device="meta", dtype=torch.float32)
    y = torch.empty(2048 * k, D, device="meta", dtype=x.dtype)
    launch(copies.collect_copies, y, slots, None)
    launch(copies.collect_copies, y, slots, weights)
    launch(copies.collect_copies_backward, x, slots, weights, y)


CASES: dict[str, tuple[Callable, tuple]] = {
    f"conv1d {dtype} W={W}": (conv1d_case, (dtype, W)) for dtype in ("bfloat16", "float32") for W in (2, 4)
}
CASES["conv1d bfloat16 W=4 by index"] = (conv1d_case, ("bfloat16", 4, True))
CASES |= {
    f"copies k={k} D={D} {dtype}": (copies_case, (k, D, dtype))
    for k, D, dtype in [(8, 2304, "bfloat16"), (1, 8, "float32"), (22, 1000, "float16")]
}
CASES |= {
    f"conv1d {dtype} W=4 by index K={K}": (conv1d_case, (dtype, 4, True, K))
    for dtype, K in [("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 256), ("float32", 128)]
}
CASES |= {
    f"gdn {dtype} K={K} V={V} R={R}{' plain' if plain else ''}": (gdn_case, (dtype, K, V, R, plain))
    for dtype, K, V, R, plain in [
        ("bfloat16", 128, 128, 1, True),
        ("bfloat16", 128, 128, 1, False),
        ("bfloat16", 64, 64, 1, False),
        ("bfloat16", 256, 256, 1, False),
        ("float32", 64, 64, 1, False),
        ("float32", 128, 128, 2, False),
        ("float32", 128, 256, 2, False),
        ("float32", 256, 256, 1, False),
    ]
}
# OLMo-Hybrid's K = 96 is filled up (padded.py); its number of heads is no multiple of 16.
CASES["gdn bfloat16 K=128 V=192 30 heads"] = (gdn_case, ("bfloat16", 128, 192, 1, False, 30))
CASES |= {
    f"ssd {dtype} {heads} heads P={P} N={N} G={G}{' plain' if plain else ''}": (
        ssd_case,
        (dtype, heads, P, N, G, plain),
    )
    for dtype, heads, P, N, G, plain in [
        ("bfloat16", 128, 64, 128, 1, True),
        ("bfloat16", 128, 64, 128, 1, False),
        ("bfloat16", 64, 64, 128, 8, False),
        ("bfloat16", 64, 80, 64, 1, False),
        ("bfloat16", 32, 128, 256, 1, False),
        ("float32", 64, 64, 128, 1, False),
    ]
}
CASES["ssd gla bfloat16"] = (ssd_case, ("bfloat16", 32, 128, 128, 32, False, True))
CASES |= {
    "rwkv7 bfloat16 plain": (rwkv7_case, ("bfloat16", 64, 64, True)),
    "rwkv7 bfloat16": (rwkv7_case, ("bfloat16", 64, 64)),
    "rwkv7 bfloat16 K=64 V=32": (rwkv7_case, ("bfloat16", 64, 32)),
    "rwkv7 float32": (rwkv7_case, ("float32", 32, 32)),
    "cross-entropy": (cross_entropy_case, ()),
    "swiglu": (swiglu_case, ()),
    "fold K=128 V=128": (fold_case, (128, 128)),
    "fold K=128 V=192": (fold_case, (128, 192)),
    "fold K=256 V=64": (fold_case, (256, 64)),
    "fold K=128 V=80 by a number": (fold_case, (128, 80, True)),
    "kda bfloat16 K=128 V=128 plain": (kda_case, ("bfloat16", 128, 128)),
    "kda bfloat16 K=128 V=128 bounded": (kda_case, ("bfloat16", 128, 128, "bounded")),
    "kda bfloat16 K=32 V=32 softplus": (kda_case, ("bfloat16", 32, 32, "softplus", False, 2)),
    "kda bfloat16 K=64 V=64 plain": (kda_case, ("bfloat16", 64, 64)),
    "kda bfloat16 K=128 V=192 plain": (kda_case, ("bfloat16", 128, 192)),
    "kda bfloat16 K=256 V=256 softplus": (kda_case, ("bfloat16", 256, 256, "softplus", False)),
    "kda float32 K=32 V=32 plain": (kda_case, ("float32", 32, 32)),
    "kda float32 K=32 V=32 softplus": (kda_case, ("float32", 32, 32, "softplus", False, 2, False)),
}

ACCEPTED_SPILLS |= {
    f"{name} solve_kernel": "128 registers let eight programs run on a multiprocessor: a quarter faster"
    for name in CASES
    if "bfloat16" in name and "256" not in name and not name.startswith("conv1d")
}


def compile_case(name: str) -> list[dict]:
    case, arguments = CASES[name]
    with compiled_launches() as results:
        case(*arguments)
    return look_for_wrong(results)


def compile_cases(words: list[str]) -> dict[str, list[dict]]:
    import titan_linear.ops  # noqa: F401 (once, for the processes that are forked)

    names = [name for name in CASES if all(word in name for word in words)]
    with ProcessPoolExecutor(min(os.cpu_count(), 4), mp_context=get_context("fork")) as pool:
        return dict(zip(names, pool.map(compile_case, names), strict=True))


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    return results_of(__name__)


@pytest.mark.parametrize("name", CASES)
def test_compiles_within_the_chip(compiled, name):
    assert compiled[name]
    for result in compiled[name]:
        assert result["shared"] <= SHARED_LIMIT and not result["wrong"], result
        may_spill = "float32" in name or "256" in name or f"{name} {result['kernel']}" in ACCEPTED_SPILLS
        assert result["spills"] == 0 or may_spill, result


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--json"]
    results = compile_cases(words)
    if "--json" in sys.argv:
        print(json.dumps(results))
        return
    for name, launches in results.items():
        for r in launches:
            numbers = f"shared {r['shared']:7d}  registers {r['registers']:4d}  spills {r['spills']:6d}"
            print(f"{name:34s} {r['kernel']:26s} {numbers}  {r['config']}")


if __name__ == "__main__":
    main()
