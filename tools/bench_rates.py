"""Measures what a GPU can do, for the planner: products, attention, the delta rule's operators, bandwidths and links.

    python -m tools.bench_rates --out h200.json
    torchrun --nproc-per-node 2 -m tools.bench_rates --out h200.json     # and the links between the GPUs of a node
    titan-linear plan --gpus 64 --rates h200.json --job.config_file my.toml

Each figure is the median of a few rounds on the slowest rank, with the host ahead as in a training step; in bfloat16
on a GPU. It takes two minutes, mostly for compilation. On a CPU, sizes are small, in float32, and PyTorch's
implementation stands in for the operators: a delta rule's whole forward pass for its scan, its whole backward pass for
the backward operator.

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
from functools import partial
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
from tools.harness import GIB, Stopwatch, TimedFunction, header, is_first, say

ROUNDS = 5
EXPERTS = 64
GATES = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
RULES = {  # with the options of mixers
    "kda": {**GATES, "lower_bound": -5.0},
    "kda any": GATES,
    "gdn": GATES,
    "ssd": {"dt_softplus": True},
    "rwkv7": {"use_gate_in_kernel": True},
}
Figures = dict[str, Any]  # fields of planner/machine.py's Rates
Work = Callable[[], object]


class Bench(Stopwatch):
    """A device, the sizes to measure there, and how to time work on it."""

    def __init__(self, device: torch.device | None = None):
        super().__init__(device)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.tokens, self.heads, self.few = (16384, 64, 4) if self.gpu else (128, 2, 1)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def seconds(self, work: Work) -> float:
        return self.time(work, ROUNDS).device


# --- Bandwidths, products, launches ----------------------------------------------------------------------------------


def bandwidths(bench: Bench) -> Figures:
    """Bytes read and written per second: by a copy, by operations one by one, by a compiled norm with its gate."""
    rows = 32768 if bench.gpu else 256
    width = 4096
    x, y, z = (bench.randn(rows, width) for _ in range(3))
    weight = bench.randn(width)

    def one_by_one() -> None:
        F.silu(x).mul_(z)
        x.float().mul_(2.0)

    def gated_norm(x: Tensor, z: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (width,), weight.float(), 1e-5)
        return normed.mul(z.float().sigmoid()).to(x.dtype)

    compiled = torch.compile(gated_norm) if bench.gpu else gated_norm
    # Tensors that `one_by_one` reads and writes: 2 and 3, then 1 and a float32 one, which is
    # read and written again.
    wide = 4 / x.element_size()
    elementwise = (2 + 3 + 1 + wide + 2 * wide) * x.nbytes
    return {
        "copy": 2 * x.nbytes / bench.seconds(lambda: y.copy_(x)),
        "elementwise": elementwise / bench.seconds(one_by_one),
        "fused": 3 * x.nbytes / bench.seconds(lambda: compiled(x, z)),
    }


def products(bench: Bench) -> Figures:
    """(width, TFLOP/s) of the product of rows with square weights, together with the product for their gradient: of
    tokens with one weight, and of rows for experts, 8 for each token; and of the product alone in float8, if the device
    computes it."""
    grouped = GROUPED_LINEAR.load("grouped_mm" if bench.gpu else "loop")
    tokens = bench.tokens
    rows = 8 * tokens
    counts = torch.full((EXPERTS,), rows // EXPERTS, device=bench.device)

    def one(width: int) -> Work:
        x = bench.randn(tokens, width)
        weight = bench.randn(width, width)
        return lambda: (x @ weight, x.T @ x)

    def many(width: int) -> Work:
        x = bench.randn(rows, width)
        weight = bench.randn(EXPERTS, width, width)
        return lambda: (grouped.linear(x, weight, counts), grouped.outer(x, x, counts))

    def float8(width: int) -> Work:
        x, scale = scaled_rows(bench.randn(tokens, width))
        weight, scale_w = scaled_rows(bench.randn(width, width))
        return partial(scaled_product, x, weight, scale, scale_w, bench.dtype, False)

    # The work with square weights of each width has flops · width² operations.
    def rates(work: Callable[[int], Work], flops: int, widths: tuple[int, ...]) -> Any:
        found = []
        for width in widths if bench.gpu else (64, 128):
            seconds = bench.seconds(work(width))
            found.append((width, flops * width**2 / seconds / 1e12))
        return found

    in_float8 = bench.gpu and torch.cuda.get_device_capability() >= CAPABILITY
    return {
        "products": rates(one, 4 * tokens, (256, 512, 1024, 2048, 4096)),
        "grouped": rates(many, 4 * rows, (512, 1024, 2048)),
        "float8": rates(float8, 2 * tokens, (2048, 4096)) if in_float8 else None,
    }


def launches(bench: Bench) -> Figures:
    """Seconds from one kernel that does nothing to the next, and for the host to queue one."""
    x = bench.randn(1)
    number = 200

    def tiny() -> None:
        for _ in range(number):
            x.mul_(1.0)

    seconds = bench.time(tiny, ROUNDS)
    return {"gap": seconds.device / number * bench.gpu, "host": seconds.host / number}


# --- Attention and the delta rule ------------------------------------------------------------------------------------


def attentions(bench: Bench) -> Figures:
    """Kernel → head dim → TFLOP/s on unmasked pairs (forward, forward and backward), of the kernels that run one
    document and several."""
    rates: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    T, H = (32768, 8) if bench.gpu else (256, 2)
    # Kernels of one document and of several, which may be the same.
    for D in (64, 128, 256) if bench.gpu else (32,):
        x = {name: bench.randn(1, T, H, D) for name in "qkv"}
        for documents in (1, 4):
            kernel = attention_kernel(bench.device, bench.dtype, D, D, documents == 1)
            of_kernel = rates[kernel.implementation]
            if str(D) in of_kernel:
                continue
            context = context_of(bench, T, documents)
            passes = TimedFunction(partial(attention, cp_context=context), x)
            flops = 4 * D * H * documents * (T // documents) ** 2 / 2
            forward = flops / bench.seconds(passes.forward) / 1e12
            both = 3.5 * flops / bench.seconds(passes.both) / 1e12
            of_kernel[str(D)] = forward, both
    return {"attention": rates}


def context_of(bench: Bench, T: int, documents: int = 1) -> CPContext:
    """The context of equal documents on one rank."""
    cu = torch.arange(documents + 1, dtype=torch.int32) * (T // documents)
    return build_cp_context(cu, rank=0, world_size=1, device=bench.device)


class Operators(TorchDispatchMode):
    """Records the moments before and after each of our operators."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.marks: list[tuple[str, Moment, Moment]] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
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


def by_operator(bench: Bench, whole: tuple[str, str], passes: TimedFunction) -> dict[str, float]:
    """Seconds of each operator in a forward and backward pass; without operators, of the passes, named by `whole`."""
    rounds = []
    for _ in range(ROUNDS + 1):
        seen = Operators(bench.device)
        bench.head_start()
        with torch.autograd.set_multithreading_enabled(False), seen:
            begin = Moment(bench.device)
            y = passes.fn()
            turn = Moment(bench.device)
            torch.autograd.grad(y, passes.leaves, passes.dy)
            end = Moment(bench.device)
        both = turn.since(begin), end.since(turn)
        rounds.append(seen.seconds() or dict(zip(whole, both, strict=True)))
    # The first round compiles.
    medians = {}
    for name in rounds[0]:
        medians[name] = median(seconds[name] for seconds in rounds[1:])
    return medians


def operators(bench: Bench) -> Figures:
    """(ns per token and head, ns per token of an entry if few heads scan); the convolution's per token and channel."""
    rates: dict[str, tuple[float, float]] = {}
    tokens = bench.tokens
    for kind, options in RULES.items():
        rule, *suffix = kind.split()
        dim = OPS[rule].dims[0]
        share = share_of(dim, dim)
        many = recurrence(bench, rule, options, bench.heads)
        few = recurrence(bench, rule, options, bench.few)
        for name, seconds in many.items():
            if not name.startswith(rule):
                continue
            each = seconds / tokens / bench.heads / share
            # What a token takes beyond its heads' share, where a scan waits for its own steps on an idle GPU.
            beyond = max(few[name] / tokens - each * bench.few * share, 0.0)
            beyond *= DIM / dim / (1 - bench.few * dim / 64 / PROGRAMS)
            rates[" ".join([name, *suffix])] = each * 1e9, beyond * 1e9
        if suffix:
            continue
        # Some operators run only with segments or context parallelism.
        segments = recurrence(bench, rule, options, bench.few, may_split=True)
        for name in (f"{rule}_boundary", f"{rule}_boundary_bwd"):
            if name in segments:
                each = segments[name] / tokens / bench.few / share
                rates[name] = each * 1e9, rates[f"{rule}_scan"][1]
    return {"operators": rates | convolution(bench)}


def convolution(bench: Bench) -> dict[str, tuple[float, float]]:
    channels = bench.heads * DIM
    options = {"activation": "silu", "widths": [channels] * 3, "norm_dim": DIM}
    x = {"x": bench.randn(1, bench.tokens, 3 * channels), "weight": bench.randn(3 * channels, 4)}

    def convolved(**x: Tensor) -> Tensor:
        return torch.cat(causal_conv1d(**x, **options)[0], -1)

    names = ("conv1d", "conv1d_backward")
    seconds = by_operator(bench, names, TimedFunction(convolved, x))
    return {name: (seconds[name] / x["x"].numel() * 1e9, 0.0) for name in names}


def recurrence(
    bench: Bench,
    rule: str,
    options: Mapping[str, Any],
    heads: int,
    *,
    may_split: bool = False,
) -> dict[str, float]:
    """Seconds by operator for one document, with the rule called as mixers call it."""
    dim = OPS[rule].dims[0]
    case = Case(rule, bench.tokens, 1 if rule == "ssd" else heads, heads, dim, dim, raw=True)
    with bench.device:
        x = case.inputs()
    for name, t in x.items():
        if t.dtype == torch.bfloat16:
            x[name] = t.to(bench.dtype)
    context = one_document(bench, may_split)

    def forward(**x: Tensor) -> Tensor:
        return OPS[rule].fn(**x, cp_context=context, **options)[0]

    return by_operator(bench, (f"{rule}_scan", f"{rule}_backward"), TimedFunction(forward, x))


def one_document(bench: Bench, may_split: bool) -> CPContext:
    """The context of one document with all tokens. may_split: whether it may be scanned in segments."""
    context = context_of(bench, bench.tokens)
    context.stream.may_split = may_split  # what ops of one rank read
    return context


# --- Links and the host ----------------------------------------------------------------------------------------------


def links(bench: Bench) -> Figures:
    """Between torchrun's processes: seconds of a small message, and bytes per second that a rank sends. A message by
    itself would also wait for the later rank, so those after it are timed."""
    if not dist.is_initialized():
        return {"node": None}
    # Each rank sends `part` numbers to every other.
    W = dist.get_world_size()
    part = (32 << 20 if bench.gpu else 4096) // W
    sent, received = bench.randn(2, W * part)
    every = sent.new_empty(W * len(sent))
    small, others = bench.randn(2, W << 14)

    def messages(number: int) -> None:
        for _ in range(number):
            dist.all_to_all_single(others, small)
            others.add_(1)  # as what is received is used before the next is sent

    # The time of each message after the first.
    latency = max(bench.seconds(lambda: messages(9)) - bench.seconds(lambda: messages(1)), 0.0) / 8

    def rate(moved: int, exchange: Work) -> float:
        seconds = bench.seconds(exchange)
        return moved / max(seconds - latency, seconds / 2)

    # Bytes per second of what a rank sends.
    own = received[:part]
    moved = own.nbytes * (W - 1)
    rates = {
        "latency": latency,
        "all_gather": rate(W * moved, lambda: dist.all_gather_into_tensor(every, sent)),
        "reduce_scatter": rate(moved, lambda: dist.reduce_scatter_tensor(own, sent)),
        "all_to_all": rate(moved, lambda: dist.all_to_all_single(received, sent)),
    }
    return {"node": rates}


# --- The command -----------------------------------------------------------------------------------------------------


PARTS = (bandwidths, products, launches, links, attentions, operators)


def measured() -> Figures:
    """Measure all `Rates` (planner/machine.py). The first rank reports each part on stderr."""
    # The device, or the host as one.
    bench = Bench()
    name = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peak = None
    if bench.gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        name = properties.name
        memory = properties.total_memory
        peak = known_peak(name)
    # Each part adds its figures.
    rates: Figures = {"gpu": name, "memory_gib": memory / GIB}
    for part in PARTS:
        begin = time.perf_counter()
        figures = part(bench)
        seconds = time.perf_counter() - begin
        rates |= figures
        say(f"{part.__name__}, {seconds:.0f} s: {json.dumps(figures)}", file=sys.stderr)
    # Where they were measured.
    processes = dist.get_world_size() if dist.is_initialized() else 1
    how = f"{processes} processes, {torch.get_num_threads()} threads"
    fastest = max(rate for _, rate in rates["products"])
    return rates | {
        "peak_tflops": peak or fastest,
        "sources": {"all": f"tools/bench_rates.py, {header()}, {how}"},
    }


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.bench_rates", __doc__)
    parser.add_argument("--out", default="", help="the file to write; by default it is printed")
    args = parser.parse_args(argv)
    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no such folder")
    # Measure, under torchrun together with the other processes.
    ignore_warnings_of_torch()
    own_device()
    with process_group(timedelta(minutes=10)) if "RANK" in os.environ else nullcontext():
        rates = measured()
    # Four digits are enough.
    digits = json.loads(json.dumps(rates), parse_float=lambda x: float(f"{float(x):.4g}"))
    text = json.dumps(digits, indent=1)
    if not args.out:
        say(text)
    elif is_first():
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
