"""Times of the ops under context parallelism, on the GPUs of one machine or more.

    torchrun --nproc-per-node 4 -m tools.bench_cp                           # KDA, GDN, the convolution, attention
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops kda gdn --heads 64 16 --layouts contiguous zigzag
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops ring allgather ulysses --tokens 32768 131072
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops kda --heads 16 --tokens 131072 --layouts contiguous whole
    torchrun --nproc-per-node 2 -m tools.bench_cp --ops ssd --heads 8/64 --dims 128x64 --layouts contiguous heads
    torchrun --nproc-per-node 4 -m tools.bench_cp --compiled                # as a run with compile.enable has them
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops ulysses --heads 32 --key-heads 8 --documents web mixed
    torchrun --nproc-per-node 4 -m tools.bench_cp --peers                   # beside FLA; takes minutes
    torchrun --nproc-per-node 2 -m tools.bench_cp --ops kda --heads 16 --node-size 1       # as two nodes

Milliseconds of the slowest rank, forward and forward + backward, in bfloat16. "GPU": the median from the first kernel
to the last, with the host ahead, as in a training step. "host": the time that the host takes to queue the work, the
least of all rounds, since others use the host too; if it exceeds the GPU's time, the GPU waits. "exposed": the part of
forward + backward in which a collective runs and nothing else does, by the profiler. "alone": the op on T / W tokens of
one document on one GPU, without context parallelism; layout "whole": likewise, on all T tokens of the documents;
"heads": recurrences, contiguous, with all-to-all over heads instead of KCP. For attention, TFLOP/s per GPU on the pairs
that the mask leaves. Documents: "one", "packed" (ten), "web" (log-normal lengths with a median of 1,000 tokens),
"mixed" (a median of 4,000, with long ones among them). --heads and --dims: as in tools.bench_ops; attention's are
128 × 128.

--peers: below our rows, those of FLA's KCP and its convolution on the same inputs, never compiled; at the first call of
an op with a new number of heads it autotunes for minutes, and keeps what it found in Triton's cache. Its GDN runs
without its guard against wrong numbers on Hopper: times only.

--node-size: the ranks that count as a node, instead of all that are on one.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.commands import command_parser, line, table
from titan_linear.distributed.groups import process_group
from titan_linear.distributed.process import own_device, refusing, run_command
from titan_linear.hooks.report import clock_and_power
from titan_linear.ops import attention, build_cp_context
from titan_linear.ops.layout.context import SOFTMAX_METHODS
from tools import traces
from tools.bench_ops import OPS, PACKED, TAPS, Case, Inputs, head_counts, head_dims, shapes, timed
from tools.bench_train import header

D = 128
PROFILED = 5  # rounds
Row = tuple[str, str, str]  # whose op ("": ours), documents, layout
METHODS = SOFTMAX_METHODS
RECURRENCES = [op for op in OPS if op != "conv"]
OF_FLA = [op for op in OPS if op != "ssd"]  # what it has context parallelism for
LAYOUTS = ("contiguous", "zigzag")
# documents' lengths: median, and standard deviation of the log
LENGTHS = {"web": (1000, 1.0), "mixed": (4000, 1.5)}


def boundaries(documents: str, T: int) -> Tensor:
    """[N+1] int32 on the CPU: "one" document, PACKED scaled to T tokens, or random documents, the same on all ranks."""
    if documents in LENGTHS:
        return torch.from_numpy(random_documents(documents, T, seed=0)).int()
    edges = PACKED if documents == "packed" else (0, PACKED[-1])
    return torch.tensor([e * T // PACKED[-1] for e in edges], dtype=torch.int32)


def random_documents(kind: str, T: int, seed: int) -> np.ndarray:
    """[N+1] int64 boundaries; the last document is cut where the stream ends."""
    rng = np.random.default_rng(seed)
    middle, deviation = LENGTHS[kind]
    lengths = np.maximum(rng.lognormal(np.log(middle), deviation, 100 + 4 * T // middle), 1).astype(
        np.int64
    )
    ends = np.cumsum(lengths)
    return np.concatenate([[0], ends[ends < T], [T]])


def make_inputs(case: Case, Hkv: int) -> Inputs:
    """Hkv: key heads of attention. The convolution has the channels of q, k and v."""
    if case.op in METHODS:
        return {
            name: torch.randn(1, case.T, heads, D).bfloat16()
            for name, heads in zip("qkv", (case.HV, Hkv, Hkv))
        }
    return (replace(case, HV=3 * case.HV) if case.op == "conv" else case).inputs()


def function(op: str, fn: Callable[..., Any] | None = None) -> Callable[..., Tensor]:
    """An op with the options that it is timed with, without its final state. fn: a peer's, in place of ours."""
    if op in METHODS:
        return partial(attention, method=op)
    fn = fn or OPS[op].fn
    options = Case(op, 0, 1, 1, D, D).options
    return lambda **x: fn(**x, **options)[0]


def exposed(fn: Callable[[], Any], flush: Tensor) -> float:
    """Mean milliseconds per round in which only collectives ran on this GPU; inf: the profiler lost events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.synchronize()
        dist.barrier()  # so that no rank waits for another's profiler to start
        flush.zero_()
        for _ in range(PROFILED):
            fn()
        torch.cuda.synchronize()
    ran = after_flush(traces.events_of(profile))
    return 1e3 * traces.exposed(ran) / PROFILED if ran else math.inf


def after_flush(ran: Sequence[traces.Event]) -> list[traces.Event]:
    """What ran after the flush (the first kernel above 1 ms that is no collective); nothing, if there is no flush."""
    ran = sorted(ran, key=traces.span_of)
    end = next(
        (traces.span_of(e)[1] for e in ran if e["dur"] > 1000 and not traces.communicates(e)),
        math.inf,
    )
    return [e for e in ran if e["ts"] >= end]


def measure(fn: Callable[..., Tensor], x: Inputs, flush: Tensor) -> list[float]:
    """The slowest rank's GPU forward, host forward, GPU forward + backward, host forward + backward, and exposed; the
    fastest clock, MHz (inf: not known)."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    dy = torch.randn_like(fn(**x))
    with torch.no_grad():
        forward = timed(lambda: fn(**x), flush)
    with torch.autograd.set_multithreading_enabled(False):  # as in the trainer
        step = lambda: torch.autograd.grad(fn(**x), list(x.values()), dy)  # noqa: E731
        both = timed(step, flush)
        alone = exposed(step, flush)
        step()
        clock = clock_and_power(flush.device).get("sm_clock_mhz", math.inf)
    times = torch.tensor([*forward, *both, alone, clock], device="cuda", dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def tflops(H: int, bounds: Tensor, ranks: int, times: Sequence[float]) -> str:
    """TFLOP/s per GPU of attention, on the pairs that the mask leaves. times: the result of `measure`."""
    lengths = bounds.diff().long()
    work = 4 * D * H * int((lengths * (lengths + 1) // 2).sum()) / ranks / 1e9
    return f"{work / times[0]:.0f} / {3.5 * work / times[2]:.0f} TFLOP/s"


# --- What a row times ------------------------------------------------------------------------------------------------


def rows(op: str, documents: Sequence[str], layouts: Sequence[str], fla: bool) -> Iterator[Row]:
    """The rows of an op; FLA's comes below ours for the same work."""
    yield "", "one", "alone"
    recurrences = [layout for layout in layouts if layout != "heads" or op in RECURRENCES]
    for of, layout in product(documents, recurrences):
        yield "", of, layout
        if fla and op in OF_FLA and layout in LAYOUTS:
            yield "FLA", of, layout


def ours(
    fn: Callable[..., Tensor], compiled: bool, cu: Tensor, layout: str, node: int | None = None
) -> Callable[..., Tensor]:
    """Our op, on all ranks in this layout, `node` of them to a node, or on each rank alone."""
    if layout == "heads":
        fn = partial(fn, cp_method="ulysses")
        layout = "contiguous"
    if layout in LAYOUTS and dist.get_world_size() > 1:
        context = build_cp_context(
            cu.cuda(), dist.group.WORLD, layout=layout, cu_seqlens_cpu=cu, node_size=node
        )
    else:
        context = build_cp_context(cu.cuda(), rank=0, world_size=1, cu_seqlens_cpu=cu)
    if compiled:
        context.mark_dynamic()
    return partial(fn, cp_context=context)


def fla(op: str, cu: Tensor, layout: str) -> Callable[..., Tensor]:
    """flash-linear-attention's equivalent function, which takes the same tensors."""
    from fla.ops.cp import build_cp_context as context_of

    width = TAPS if op == "conv" else None
    context = context_of(
        cu.cuda(), dist.group.WORLD, conv1d_kernel_size=width, cu_seqlens_cpu=cu, layout=layout
    )
    return partial(function(op, OPS[op].peers["FLA"]), cp_context=context)


# --- The table -------------------------------------------------------------------------------------------------------


def print_rows(args: argparse.Namespace, flush: Tensor) -> None:
    ranks = dist.get_world_size()
    first = dist.get_rank() == 0
    if first:
        print(header(), end="\n\n")
        times = "GPU fwd", "host", "GPU fwd + bwd", "host", "exposed", "MHz"
        print(table(("op", "T", "heads", "documents", "layout", *times, ""), []))
    for op, T, (H, HV), dims in shapes(args):
        case = Case(op, T // ranks, H, HV, *dims)
        with torch.device("cuda"):
            x = make_inputs(case, args.key_heads or HV)
        fn = function(op)
        if args.compiled:
            torch.compiler.reset()
            fn = torch.compile(fn, fullgraph=True)
        for whose, documents, layout in rows(op, args.documents, args.layouts, args.peers):
            cu = boundaries(documents, T // ranks if layout == "alone" else T)
            with torch.device("cuda"):
                inputs = (
                    make_inputs(replace(case, T=T), args.key_heads or HV)
                    if layout == "whole"
                    else x
                )
            timed_op = (
                fla(op, cu, layout)
                if whose
                else ours(fn, args.compiled, cu, layout, args.node_size)
            )
            times = measure(timed_op, inputs, flush)
            if first:
                rates = (
                    tflops(HV, cu, ranks if layout in LAYOUTS else 1, times)
                    if op in METHODS
                    else ""
                )
                name = f"{op}, {whose}" if whose else op
                forms = [".2f"] * 5 + [".0f"]
                cells = [
                    format(x, form) if math.isfinite(x) else "–"
                    for x, form in zip(times, forms, strict=True)
                ]
                print(line([name, T, case.heads, documents, layout, *cells, rates]))


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("python -m tools.bench_cp", __doc__)
    ops = [*OPS, *METHODS]
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument(
        "--heads", type=head_counts, nargs="+", default=[(64, 64)], help="such as 64 or 8/64"
    )
    parser.add_argument(
        "--dims", type=head_dims, nargs="+", help="K and V (default: 128x128; rwkv7: 64x64)"
    )
    parser.add_argument("--key-heads", type=int, help="key heads of attention (default: --heads)")
    parser.add_argument(
        "--documents", nargs="+", default=["one", "packed"], choices=["one", "packed", *LENGTHS]
    )
    parser.add_argument(
        "--layouts", nargs="+", default=LAYOUTS, choices=[*LAYOUTS, "heads", "whole"]
    )
    parser.add_argument(
        "--compiled", action="store_true", help="compile the ops with torch.compile"
    )
    parser.add_argument("--peers", action="store_true", help="also time FLA's KCP")
    parser.add_argument(
        "--node-size", type=int, help="ranks per node (default: as torchrun has them)"
    )
    return parser.parse_args(argv)


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.peers and not find_spec("fla"):
        raise ValueError("--peers needs flash-linear-attention, which is not installed here")
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        why = (
            "there is no GPU here"
            if not torch.cuda.is_available()
            else "torchrun starts it, a process on each GPU"
        )
        raise ValueError(f"tools.bench_cp times the ops on several GPUs: {why}")
    own_device()
    with process_group(timedelta(minutes=10)):
        print_rows(args, torch.empty(24 << 30, dtype=torch.uint8, device="cuda"))
    return 0


if __name__ == "__main__":
    run_command(main)
