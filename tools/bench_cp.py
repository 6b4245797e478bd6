"""Times of the ops under context parallelism, on the GPUs of one machine or more.

    torchrun --nproc-per-node 4 -m tools.bench_cp                           # KDA, GDN, the convolution, attention
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops kda gdn --heads 64 16 --layouts contiguous zigzag
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops ring allgather ulysses --tokens 32768 131072
    torchrun --nproc-per-node 4 -m tools.bench_cp --compiled                # as a run with compile.enable has them

Milliseconds of the slowest rank, forward and forward + backward, in bfloat16. "GPU": the median from the first kernel
to the last, the host ahead, as it is in a training step. "host": what the host takes to queue it, the least of all
rounds, for others work there too; where that is more, the GPU waits. "alone": the op on T / W tokens of one document on
one GPU, no context parallelism. For attention TFLOP/s per GPU on the pairs that the mask leaves. "packed" is ten
documents. Heads are of 128 × 128; attention has as many query as key heads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from titan_linear.ops import attention, build_cp_context, causal_conv1d, chunk_gated_delta_rule, chunk_kda

TEN = (0, 2960, 5212, 9513, 13567, 17443, 20634, 23521, 26281, 31785, 32768)  # of 32768 tokens
D = 128
ROUNDS = 60
Inputs = dict[str, torch.Tensor]
METHODS = ("ring", "allgather", "ulysses")


def boundaries(documents: str, T: int) -> torch.Tensor:
    """[N+1] int32 on the CPU: "one" document, or the ten scaled to T tokens."""
    edges = TEN if documents == "packed" else (0, TEN[-1])
    return torch.tensor([e * T // TEN[-1] for e in edges], dtype=torch.int32)


def make_inputs(op: str, T: int, H: int) -> Inputs:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, device="cuda")

    if op == "conv":
        return {"x": randn(3 * H * D).bfloat16(), "weight": torch.randn(3 * H * D, 4, device="cuda").bfloat16()}
    if op in METHODS:
        return {name: randn(H, D).bfloat16() for name in "qkv"}
    q, k = (torch.nn.functional.normalize(randn(H, D), dim=-1).bfloat16() for _ in "qk")
    g = -5 * torch.rand(1, T, H, D, device="cuda") if op == "kda" else -torch.rand(1, T, H, device="cuda")
    return {"q": q, "k": k, "v": randn(H, D).bfloat16(), "g": g, "beta": torch.rand(1, T, H, device="cuda").bfloat16()}


def function(op: str) -> Callable[..., torch.Tensor]:
    if op in METHODS:
        return partial(attention, method=op)
    fn, options = {
        "kda": (chunk_kda, {"safe_gate": True}),
        "gdn": (chunk_gated_delta_rule, {}),
        "conv": (causal_conv1d, {"activation": "silu"}),
    }[op]
    return lambda **x: fn(**x, **options)[0]


def timed(fn: Callable[[], Any], flush: torch.Tensor) -> tuple[float, float]:
    """Milliseconds, the median on this GPU, the least on its host. Ranks start together, the host ahead by `flush`."""
    for _ in range(3):
        fn()
    spans, host = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        flush.zero_()
        span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin = time.perf_counter()
        span[0].record()
        fn()
        span[1].record()
        host.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        spans.append(span[0].elapsed_time(span[1]))
    return median(spans), min(host)


def measure(fn: Callable[..., torch.Tensor], x: Inputs, options: dict[str, Any], flush: torch.Tensor) -> list[float]:
    """Of the slowest rank: GPU forward, host forward, GPU forward + backward, host forward + backward."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    dy = torch.randn_like(fn(**x, **options))
    with torch.no_grad():
        forward = timed(lambda: fn(**x, **options), flush)
    with torch.autograd.set_multithreading_enabled(False):  # as the trainer has it
        both = timed(lambda: torch.autograd.grad(fn(**x, **options), list(x.values()), dy), flush)
    times = torch.tensor([*forward, *both], device="cuda", dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def pairs(bounds: torch.Tensor) -> int:
    lengths = bounds.diff().long()
    return int((lengths * (lengths + 1) // 2).sum())


def print_rows(args: argparse.Namespace, flush: torch.Tensor) -> None:
    W, first = dist.get_world_size(), dist.get_rank() == 0
    if first:
        print("| op | T | heads | documents | layout | GPU fwd | host | GPU fwd + bwd | host | |\n" + "|---" * 10 + "|")
    for op in args.ops:
        for T, H in ((T, H) for T in args.tokens for H in args.heads):
            x, fn = make_inputs(op, T // W, H), function(op)
            if args.compiled:
                torch.compiler.reset()
                fn = torch.compile(fn, fullgraph=True)
            cases = [(d, layout) for d in args.documents for layout in args.layouts]
            for documents, layout in [("one", "alone"), *cases]:
                cu = boundaries(documents, T)
                options: dict[str, Any] = {}
                if layout != "alone":
                    context = build_cp_context(cu.cuda(), dist.group.WORLD, layout=layout, cu_seqlens_cpu=cu)
                    if args.compiled:
                        context.mark_dynamic()
                    options = {"cp_context": context}
                times = measure(fn, x, options, flush)
                rates = ""
                if op in METHODS:
                    work = 4 * D * H * (pairs(cu) / W if options else pairs(torch.tensor([0, T // W]))) / 1e9
                    rates = f"{work / times[0]:.0f} / {3.5 * work / times[2]:.0f} TFLOP/s"
                if first:
                    cells = [op, T, H, documents, layout, *(f"{t:.2f}" for t in times), rates]
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = ["kda", "gdn", "conv", *METHODS]
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument("--heads", type=int, nargs="+", default=[64])
    parser.add_argument("--documents", nargs="+", default=["one", "packed"], choices=["one", "packed"])
    parser.add_argument("--layouts", nargs="+", default=["contiguous", "zigzag"], choices=["contiguous", "zigzag"])
    parser.add_argument("--compiled", action="store_true", help="the ops in graphs of torch.compile")
    args = parser.parse_args()
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        why = "there is no GPU here" if not torch.cuda.is_available() else "torchrun starts it, a process on each GPU"
        print(f"error: tools.bench_cp times the ops on several GPUs: {why}", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        print_rows(args, torch.empty(24 << 30, dtype=torch.uint8, device="cuda"))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
