"""Find the configurations of the recurrences' kernels on this GPU; check the numbers of every candidate.

    python -m tools.tune_ops                                    # every kernel of all ops, K = V = 128, bfloat16
    python -m tools.tune_ops --kernels "gdn scan" --dims 64x64 --dtype float16
    python -m tools.tune_ops --kernels "gdn boundary" --heads 16      # runs where documents are cut into segments only
    python -m tools.tune_ops --kernels "ssd scan" "ssd pass" "ssd carried" "ssd pairs" --heads 1/128 --dims 128x64 \\
        --candidates BV=32,64 STAGES=2,3 num_warps=4,8             # a minute for each kernel

For each kernel, all candidates run in turn in place of the shipped configuration (ops/triton/configs.py). A candidate
counts if the op's outputs and gradients stay within the promised errors of the float64 implementation, on documents of
1 to 300 tokens and one of 1000; forward + backward is then timed at --tokens and --heads. Prints a line per candidate
and the fastest last, for configs.py. Candidates run in a separate process: one that faults ends only that process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from multiprocessing import get_context

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from titan_linear.commands import command_parser
from titan_linear.distributed.process import refusing, run_command
from titan_linear.ops.layout.segments import scan_programs, segment_length
from titan_linear.ops.registry import OPS
from titan_linear.ops.runtime.support import Target, capability
from titan_linear.ops.triton.configs import CONFIGS, Config, architecture, row
from tools.bench_ops import OPS as TIMED
from tools.bench_ops import Case, Inputs, head_counts, head_dims, values

CANDIDATES = {
    "BK": (32, 64, 128),
    "BV": (16, 32, 64, 128),
    "STAGES": (1, 2, 3, 4),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3),
}
LENGTHS = (1, 15, 63, 64, 65, 300, 1000)
# On relative errors of gradients in half precision; BOUND is for all others.
BOUNDS = dict.fromkeys(("g", "beta", "dt", "A", "D", "dt_bias", "B", "C"), 1e-2)
BOUND = 5e-3
FLOAT32_BOUND = 1e-4


def op_of(kernel: str) -> str:
    """What `bench_ops` calls the op that runs `kernel`."""
    return "gdn" if kernel == "solve" else kernel.partition(" ")[0]


def make_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Gates and what a head has for all tokens are in float32."""
    return {name: t.to(dtype) if t.dtype == torch.bfloat16 else t for name, t in case.inputs().items()}


def results(kernel: str, x: Inputs, do: Tensor, cu_seqlens: Tensor, impl: str) -> dict[str, Tensor]:
    """o and the gradient of every input, computed by the path that `kernel` is on."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    op, _, stage = kernel.partition(" ")
    options = {"safe_gate": stage not in ("prepare", "recompute", "gradient")} if op == "kda" else {}
    options |= {"dt_softplus": True} if op == "ssd" else {}
    o, _ = TIMED[op_of(kernel)].fn(**x, cu_seqlens=cu_seqlens, impl=impl, **options)
    return {"o": o.detach()} | dict(zip(x, torch.autograd.grad(o, list(x.values()), do.to(o.dtype))))


@cache
def reference(kernel: str, case: Case, dtype: torch.dtype) -> tuple[Inputs, Tensor, Tensor, Inputs]:
    """Inputs of four heads, the output's gradient, cu_seqlens, and the results in float64."""
    lengths = (4096,) if "boundary" in kernel else LENGTHS
    x = make_inputs(replace(case, T=sum(lengths), H=max(4 * case.H // case.HV, 1), HV=4), dtype)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    do = torch.randn_like(values(x))
    return x, do, cu_seqlens, results(kernel, {name: t.double() for name, t in x.items()}, do, cu_seqlens, "torch")


def worst_error(kernel: str, case: Case, dtype: torch.dtype) -> float:
    """The largest error of the op's results, relative to its bound."""
    x, do, cu_seqlens, exact = reference(kernel, case, dtype)
    found = results(kernel, x, do, cu_seqlens, "triton")
    worst = 0.0
    for name, right in exact.items():
        bound = FLOAT32_BOUND if dtype == torch.float32 else BOUNDS.get(name, BOUND)
        error = (found[name].double() - right).norm() / right.norm() / bound
        worst = max(worst, error.nan_to_num(torch.inf).item())
    return worst


def candidates(shipped: Config, args: argparse.Namespace) -> Iterator[Config]:
    """The shipped configuration, then every other combination of values for the arguments that it has."""
    yield shipped
    K, V = args.dims
    known = CANDIDATES | dict(args.candidates)
    names = [name for name in shipped if name in known]
    for chosen in product(*(known[name] for name in names)):
        candidate = shipped | dict(zip(names, chosen))
        if candidate != shipped and candidate.get("BK", 0) <= K and candidate.get("BV", 0) <= V:
            yield candidate


def tables() -> dict[str, dict[tuple[int, int], Config]]:
    """The kernels' configurations on this GPU."""
    return CONFIGS[architecture(torch.device("cuda"))]


def key_of(kernel: str, args: argparse.Namespace) -> tuple[int, int]:
    """The table key of the configuration that these inputs use."""
    return row(architecture(torch.device("cuda")), kernel, getattr(torch, args.dtype).itemsize, max(args.dims))


def measure(kernel: str, candidate: dict[str, int], args: argparse.Namespace) -> tuple[float, float] | str:
    """(error relative to its bound, ms), or why the candidate has none. A fault ends this process: its GPU context is
    lost."""
    dtype = getattr(torch, args.dtype)
    tables()[kernel] = tables()[kernel] | {key_of(kernel, args): candidate}  # kernels may share a table
    case = Case(op_of(kernel), args.tokens, *args.heads, *args.dims)
    x = make_inputs(case, dtype)
    do = torch.randn_like(values(x))
    cu_seqlens = torch.tensor([0, args.tokens], dtype=torch.int32, device="cuda")
    try:
        error = worst_error(kernel, case, dtype)
        return error, do_bench(lambda: results(kernel, x, do, cu_seqlens, "triton"), return_mode="median")
    except (OutOfResources, CompilationError) as failure:
        return f"{type(failure).__name__}: {failure}"
    except RuntimeError as failure:
        print(f"{type(failure).__name__}: {str(failure).splitlines()[0]}")
        os._exit(1)


def tune(kernel: str, args: argparse.Namespace) -> None:
    shipped = tables()[kernel][key_of(kernel, args)]
    timed = []
    pool = None
    for candidate in candidates(shipped, args):
        pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            found = pool.submit(measure, kernel, candidate, args).result()
        except BrokenProcessPool:
            found, pool = "faults", None
        if isinstance(found, str):
            print(f"{kernel} {candidate}: {found[:100]}")
            continue
        error, ms = found
        print(f"{kernel} {candidate}: error {error:.2f} of its bound, {ms:.3f} ms")
        timed += [(ms, candidate)] if error <= 1 else []
    if pool:
        pool.shutdown()
    fastest = min(timed, key=lambda t: t[0], default="none: no candidate is within its bound")
    print(f"{kernel}: shipped {shipped}; fastest {fastest}\n")


def reason(kernel: str, args: argparse.Namespace) -> str | None:
    """Why the kernel does not run with these inputs on this GPU; None: it does."""
    device = torch.device("cuda")
    dtype = getattr(torch, args.dtype)
    (K, V), (_, HV) = args.dims, args.heads
    op = OPS[TIMED[op_of(kernel)].fn.__name__]
    if why := op.reason_against("triton", Target("cuda", capability(device), dtype, {"K": K, "V": V})):
        return why
    whole = segment_length(args.tokens, 1, scan_programs(HV, V)) is None
    return f"entries are not cut at --heads {HV}; use --heads 16" if "boundary" in kernel and whole else None


def some_values(text: str) -> tuple[str, list[int]]:
    """The name and values of a launch argument from text such as BV=32,64."""
    name, _, numbers = text.partition("=")
    if name not in CANDIDATES or not all(number.isdigit() for number in numbers.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} must be values of {', '.join(CANDIDATES)}, such as BV=32,64")
    return name, [int(number) for number in numbers.split(",")]


@refusing
def main(argv: list[str]) -> int:
    known = sorted(CONFIGS[architecture(torch.device("cuda" if torch.cuda.is_available() else "cpu"))])
    parser = command_parser("python -m tools.tune_ops", __doc__)
    parser.add_argument("--kernels", nargs="+", default=known, choices=known)
    parser.add_argument("--dims", type=head_dims, default=(128, 128), help="K and V (default: 128x128)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=head_counts, default=(64, 64), help="such as 16/64")
    parser.add_argument("--candidates", type=some_values, nargs="+", default=[], help="such as BV=32,64 num_warps=4")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("tools.tune_ops times the kernels of a GPU, and there is none here")
    for kernel in args.kernels:
        if why := reason(kernel, args):
            print(f"{kernel} does not run: {why}")
        else:
            tune(kernel, args)
    return 0


if __name__ == "__main__":
    run_command(main)
