"""Measures what a GPU can do, for the planner: products, attention, the delta rule's operators, bandwidths and links;
and what its host can do.

    python -m tools.bench_rates --out h200.json
    torchrun --nproc-per-node 2 -m tools.bench_rates --out h200.json     # and the links between the GPUs of a node
    titan-linear plan --gpus 64 --rates h200.json --job.config_file my.toml

Each figure is the median of a few rounds, with the host ahead as in a training step; in bfloat16 on a GPU. It takes
two minutes, mostly for compilation. On a CPU, sizes are small, in float32, and PyTorch's implementation stands in
for the operators: a delta rule's whole forward pass for its scan, its whole backward pass for the backward operator.

Heads are 128 × 128, RWKV-7's 64 × 64 (its times are written as of 128); gates are computed in the kernels, as mixers
call them, KDA's with a lower bound and, as "… any", without one. An operator has two numbers: the time per token and
head, where heads fill the GPU, and the time per token of an entry, where heads are too few for that.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_linear.commands import command_parser
from titan_linear.distributed.groups import process_group
from titan_linear.distributed.process import (
    ignore_warnings_of_torch,
    own_device,
    refusing,
    run_command,
)
from titan_linear.ops import CPContext, attention, build_cp_context, causal_conv1d
from titan_linear.ops.experts import GROUPED_LINEAR
from titan_linear.ops.float8 import CAPABILITY, scaled_product, scaled_rows
from titan_linear.ops.layout.segments import PROGRAMS
from titan_linear.ops.torch.attention_kernels import attention_kernel
from titan_linear.planner.timing import DIM, share_of
from titan_linear.step.flops import known_peak
from titan_linear.step.optimizer import Moment
from tools.bench_ops import OPS, Case

GIB = 2**30
ROUNDS = 5
EXPERTS = 64
GATES = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
RULES = (  # with the options of mixers
    ("kda", {**GATES, "lower_bound": -5.0}),
    ("kda", GATES),
    ("gdn", GATES),
    ("ssd", {"dt_softplus": True}),
    ("rwkv7", {"use_gate_in_kernel": True}),
)


class Bench:
    """A device, the sizes to measure there, and how to time work on it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.tokens, self.heads, self.few = (16384, 64, 4) if self.gpu else (128, 2, 1)
        self.flush = torch.empty(8 * GIB if self.gpu else 1, dtype=torch.uint8, device=device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        return median(self._once(work) for _ in range(ROUNDS))

    def _once(self, work: Callable[[], object]) -> float:
        self.head_start()
        begin = Moment(self.device)
        work()
        return Moment(self.device).since(begin)

    def head_start(self) -> None:
        """Keep the device busy for 8 ms, more than the host takes to queue a pass."""
        if self.gpu:
            torch.cuda.synchronize()
            for _ in range(4):
                self.flush.zero_()


# --- Bandwidths, products, launches ----------------------------------------------------------------------------------


def bandwidths(bench: Bench) -> dict[str, float]:
    """Bytes read and written per second: by a copy, by operations one by one, by a compiled norm with its gate."""
    rows = 32768 if bench.gpu else 256
    x = bench.randn(rows, 4096)
    z = bench.randn(rows, 4096)
    weight = bench.randn(4096)
    y = torch.empty_like(x)

    def one_by_one() -> None:
        F.silu(x).mul_(z)
        x.float().mul_(2.0)

    def gated_norm(x: Tensor, z: Tensor) -> Tensor:
        return (
            F.rms_norm(x.float(), (4096,), weight.float(), 1e-5)
            .mul(z.float().sigmoid())
            .to(x.dtype)
        )

    compiled = torch.compile(gated_norm) if bench.gpu else gated_norm
    wide = 4 / x.element_size()
    elementwise = (2 + 3 + 1 + wide + 2 * wide) * x.nbytes
    return {
        "copy": 2 * x.nbytes / bench.seconds(lambda: y.copy_(x)),
        "elementwise": elementwise / bench.seconds(one_by_one),
        "fused": 3 * x.nbytes / bench.seconds(lambda: compiled(x, z)),
    }


def products(bench: Bench) -> list[tuple[int, float]]:
    """(width, TFLOP/s) of the product of tokens with a square weight, together with that of the weight's gradient."""

    def work(x: Tensor, weight: Tensor) -> object:
        return x @ weight[0], x.T @ x

    widths = (256, 512, 1024, 2048, 4096) if bench.gpu else (64, 128)
    return [(width, _rate(bench, width, bench.tokens, work)) for width in widths]


def grouped_products(bench: Bench) -> list[tuple[int, float]]:
    """The same of rows for experts, 8 for each token."""
    grouped = GROUPED_LINEAR.load("grouped_mm" if bench.gpu else "loop")
    rows = 8 * bench.tokens
    counts = torch.full((EXPERTS,), rows // EXPERTS, device=bench.device)

    def work(x: Tensor, weight: Tensor) -> object:
        return grouped.linear(x, weight, counts), grouped.outer(x, x, counts)

    widths = (512, 1024, 2048) if bench.gpu else (64, 128)
    return [(width, _rate(bench, width, rows, work, EXPERTS)) for width in widths]


def _rate(
    bench: Bench, width: int, rows: int, work: Callable[[Tensor, Tensor], object], weights: int = 1
) -> float:
    """TFLOP/s of two products of rows with square weights."""
    x, weight = bench.randn(rows, width), bench.randn(weights, width, width)
    return 4 * rows * width**2 / bench.seconds(lambda: work(x, weight)) / 1e12


def float8_products(bench: Bench) -> list[tuple[int, float]] | None:
    """The same of products in float8 alone, for widths that take part; None: the device computes none."""
    if not bench.gpu or torch.cuda.get_device_capability() < CAPABILITY:
        return None
    rates = []
    for width in (2048, 4096):
        (x, scale), (weight, scale_w) = (
            scaled_rows(bench.randn(n, width)) for n in (bench.tokens, width)
        )
        operands = x, weight, scale, scale_w, bench.dtype, False
        rates.append(
            (
                width,
                2
                * bench.tokens
                * width**2
                / bench.seconds(lambda g=operands: scaled_product(*g))
                / 1e12,
            )
        )
    return rates


def launches(bench: Bench) -> dict[str, float]:
    """Seconds from one kernel that does nothing to the next, and for the host to queue one."""
    x = bench.randn(1)
    number = 200

    def tiny() -> None:
        for _ in range(number):
            x.mul_(1.0)

    gap = bench.seconds(tiny) / number
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        tiny()
        times.append(time.perf_counter() - begin)
    return {"gap": gap if bench.gpu else 0.0, "host": median(times) / number}


# --- Attention and the delta rule ------------------------------------------------------------------------------------


def attentions(bench: Bench) -> dict[str, dict[str, tuple[float, float]]]:
    """Kernel → head dim → TFLOP/s on unmasked pairs (forward, forward and backward), of the kernels that run one
    document and several."""
    rates: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    T, H = (32768, 8) if bench.gpu else (256, 2)
    for D in (64, 128, 256) if bench.gpu else (32,):
        q, k, v = (bench.randn(1, T, H, D).requires_grad_() for _ in range(3))
        for documents in (1, 4):
            kernel = attention_kernel(
                bench.device, bench.dtype, D, D, documents == 1
            ).implementation
            if str(D) in rates[kernel]:
                continue
            cu = torch.arange(documents + 1, dtype=torch.int32) * (T // documents)
            context = build_cp_context(cu, rank=0, world_size=1, device=bench.device)
            flops = 4 * D * H * documents * (T // documents) ** 2 / 2
            rates[kernel][str(D)] = tuple(
                flops * n / s / 1e12 for n, s in zip((1, 3.5), _both(bench, q, k, v, context))
            )
    return rates


def _both(bench: Bench, q: Tensor, k: Tensor, v: Tensor, context: Any) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward."""

    def forward() -> Tensor:
        return attention(q, k, v, cp_context=context)

    do = torch.randn_like(q)
    with torch.no_grad():
        ahead = bench.seconds(forward)
    return ahead, bench.seconds(lambda: torch.autograd.grad(forward(), (q, k, v), do))


class Operators(TorchDispatchMode):
    """Records the moments before and after each of our operators."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.marks: list[tuple[str, Moment, Moment]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if function.namespace != "titan_linear":
            return function(*args, **(kwargs or {}))
        begin = Moment(self.device)
        out = function(*args, **(kwargs or {}))
        self.marks.append((function._opname, begin, Moment(self.device)))
        return out

    def seconds(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for name, begin, end in self.marks:
            sums[name] += end.since(begin)
        return sums


def by_operator(
    bench: Bench, whole: tuple[str, str], forward: Callable[[], Tensor], inputs: list[Tensor]
) -> dict[str, float]:
    """Seconds of each operator in a forward and backward pass; without operators, of the passes, named by `whole`."""
    rounds = []
    dy = torch.randn_like(forward())
    for _ in range(ROUNDS + 1):
        seen = Operators(bench.device)
        bench.head_start()
        with torch.autograd.set_multithreading_enabled(False), seen:
            begin = Moment(bench.device)
            y = forward()
            turn = Moment(bench.device)
            torch.autograd.grad(y, inputs, dy)
            end = Moment(bench.device)
        passes = turn.since(begin), end.since(turn)
        rounds.append(seen.seconds() or dict(zip(whole, passes, strict=True)))
    return {name: median(seconds[name] for seconds in rounds[1:]) for name in rounds[0]}


def operators(bench: Bench) -> dict[str, tuple[float, float]]:
    """(ns per token and head, ns per token of an entry if few heads scan); the convolution's per token and channel."""
    rates: dict[str, tuple[float, float]] = {}
    for rule, options in RULES:
        any_gate = " any" if rule == "kda" and options == GATES else ""
        dim = OPS[rule].dims[0]
        share = share_of(dim, dim)
        many, few = (
            recurrence(bench, rule, options, heads, may_split=False)
            for heads in (bench.heads, bench.few)
        )
        for name in (name for name in many if name.startswith(rule)):
            each = many[name] / bench.tokens / bench.heads / share
            # What a token takes beyond its heads' share, where a scan waits for its own steps on an idle GPU.
            beyond = max(few[name] / bench.tokens - each * bench.few * share, 0.0)
            beyond *= DIM / dim / (1 - bench.few * dim / 64 / PROGRAMS)
            rates[name + any_gate] = (each * 1e9, beyond * 1e9)
        if any_gate:
            continue
        segments = recurrence(bench, rule, options, bench.few, may_split=True)
        # only with segments or context parallelism
        for name in (f"{rule}_boundary", f"{rule}_boundary_bwd"):
            if name in segments:
                rates[name] = (
                    segments[name] / bench.tokens / bench.few / share * 1e9,
                    rates[f"{rule}_scan"][1],
                )
    x = bench.randn(1, bench.tokens, 3 * bench.heads * DIM).requires_grad_()
    weight = bench.randn(x.shape[2], 4).requires_grad_()
    names = ("conv1d", "conv1d_backward")

    def convolved() -> Tensor:
        options = {"activation": "silu", "widths": [bench.heads * DIM] * 3, "norm_dim": DIM}
        return torch.cat(causal_conv1d(x, weight, **options)[0], -1)

    seconds = by_operator(bench, names, convolved, [x, weight])
    return rates | {name: (seconds[name] / x.numel() * 1e9, 0.0) for name in names}


def recurrence(
    bench: Bench, rule: str, options: Mapping[str, Any], heads: int, *, may_split: bool
) -> dict[str, float]:
    """Seconds by operator for one document, with the rule called as mixers call it."""
    context = one_document(bench, may_split)
    dim = OPS[rule].dims[0]
    H = 1 if rule == "ssd" else heads
    with bench.device:
        x = Case(rule, bench.tokens, H, heads, dim, dim, raw=True).inputs()
    x = {
        name: t.to(bench.dtype if t.dtype == torch.bfloat16 else t.dtype).requires_grad_()
        for name, t in x.items()
    }

    def forward() -> Tensor:
        return OPS[rule].fn(**x, cp_context=context, **options)[0]

    return by_operator(bench, (f"{rule}_scan", f"{rule}_backward"), forward, list(x.values()))


def one_document(bench: Bench, may_split: bool) -> CPContext:
    """The context of one document with all tokens. may_split: whether it may be scanned in segments."""
    cu = torch.tensor([0, bench.tokens], dtype=torch.int32)
    context = build_cp_context(cu, rank=0, world_size=1, device=bench.device)
    context.stream.may_split = may_split  # what ops of one rank read
    return context


# --- Links -----------------------------------------------------------------------------------------------------------


def links(bench: Bench) -> dict[str, float] | None:
    """Between torchrun's processes: seconds of a small message, and bytes per second that a rank sends. A message by
    itself would also wait for the later rank, so those after it are timed."""
    if not dist.is_initialized():
        return None
    W = dist.get_world_size()
    # 64 MB, or a little less
    sent_rows = bench.randn(W * ((64 << 20) // 2 // W if bench.gpu else 4096 // W))
    every = sent_rows.new_empty(W * len(sent_rows))
    part = sent_rows.new_empty(len(sent_rows) // W)
    small = bench.randn(W << 14)
    others = torch.empty_like(small)

    def messages(number: int) -> None:
        for _ in range(number):
            dist.all_to_all_single(others, small)
            others.add_(1)  # as what is received is used before the next is sent

    latency = max(bench.seconds(lambda: messages(9)) - bench.seconds(lambda: messages(1)), 0.0) / 8
    moved = part.nbytes * (W - 1)
    exchanges: dict[str, tuple[int, Callable[[], object]]] = {
        "all_gather": (W * moved, lambda: dist.all_gather_into_tensor(every, sent_rows)),
        "reduce_scatter": (moved, lambda: dist.reduce_scatter_tensor(part, sent_rows)),
        "all_to_all": (moved, lambda: dist.all_to_all_single(every[: len(sent_rows)], sent_rows)),
    }
    rates = {}
    for name, (sent, exchange) in exchanges.items():
        seconds = bench.seconds(exchange)
        rates[name] = sent / max(seconds - latency, seconds / 2)
    return {"latency": latency, **rates}


# --- The host --------------------------------------------------------------------------------------------------------


def offload(bench: Bench) -> dict[str, float]:
    """Bytes per second of copies from pinned memory to the device and back, and of AdamW on the host, in as many
    threads as PyTorch has here, by all processes at once: parameter and moments are read and written, the gradient is
    read."""
    number = 1 << (26 if bench.gpu else 16)
    there = torch.zeros(number, device=bench.device)
    here = torch.zeros(number, pin_memory=bench.gpu)
    p = torch.nn.Parameter(torch.zeros(number))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return {
        "to_device": here.nbytes / bench.seconds(lambda: there.copy_(here, non_blocking=True)),
        "to_host": here.nbytes / bench.seconds(lambda: here.copy_(there, non_blocking=True)),
        "adamw": 7 * p.nbytes / median(times[1:]),
    }


# --- The command -----------------------------------------------------------------------------------------------------


def measured(device: torch.device, rank: int) -> dict[str, Any]:
    """What a file of rates holds (planner/machine.py, `Rates`). The first rank reports each part on stderr."""
    bench = Bench(device)
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine()
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else of_host
    rates: dict[str, Any] = {"gpu": name, "memory_gib": memory / GIB}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "bandwidths": lambda: bandwidths(bench),
        "products": lambda: {"products": products(bench), "float8": float8_products(bench)},
        "experts' products": lambda: {"grouped": grouped_products(bench)},
        "launches": lambda: launches(bench),
        "links": lambda: {"node": links(bench)},
        "the host": lambda: {"offload": offload(bench)},
        "attention": lambda: {"attention": attentions(bench)},
        "the delta rule and the convolution": lambda: {"operators": operators(bench)},
    }
    for part, measure in parts.items():
        begin = time.perf_counter()
        figures = measure()
        rates |= figures
        if rank == 0:
            print(
                f"{part}, {time.perf_counter() - begin:.0f} s: {json.dumps(figures)}",
                file=sys.stderr,
            )
    fastest = max(rate for _, rate in rates["products"])
    source = (
        f"tools/bench_rates.py, torch {torch.__version__}, {dist.get_world_size() if rates['node'] else 1} processes, "
        f"{torch.get_num_threads()} threads"
    )
    return rates | {
        "peak_tflops": (known_peak(name) if gpu else None) or fastest,
        "sources": {"all": source},
    }


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.bench_rates", __doc__)
    parser.add_argument("--out", default="", help="the file to write; by default it is printed")
    args = parser.parse_args(argv)
    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no such folder")
    ignore_warnings_of_torch()
    rank = int(os.environ.get("RANK", "0"))
    device = own_device()
    with process_group(timedelta(minutes=10)) if "RANK" in os.environ else nullcontext():
        rates = measured(device, rank)
    rounded = json.loads(
        json.dumps(rates), parse_float=lambda number: float(f"{float(number):.4g}")
    )
    text = json.dumps(rounded, indent=1) + "\n"
    if rank == 0 and args.out:
        Path(args.out).write_text(text, encoding="utf-8")
    elif rank == 0:
        print(text, end="")
    return 0


if __name__ == "__main__":
    run_command(main)
