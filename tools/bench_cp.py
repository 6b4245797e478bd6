"""Times of the ops under context parallelism, on the GPUs of one machine or more.

    torchrun --nproc-per-node 4 -m tools.bench_cp                           # KDA, GDN, the convolution, attention
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops kda gdn --heads 64 16 --layouts contiguous zigzag
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops ring allgather ulysses --tokens 32768 131072
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops kda --heads 16 --tokens 131072 --layouts contiguous whole
    torchrun --nproc-per-node 2 -m tools.bench_cp --ops ssd --heads 8/64 --dims 128x64 --layouts contiguous heads
    torchrun --nproc-per-node 4 -m tools.bench_cp --ops ulysses --heads 8/32 --documents web mixed
    torchrun --nproc-per-node 4 -m tools.bench_cp --peers                   # beside FLA; takes minutes
    torchrun --nproc-per-node 2 -m tools.bench_cp --ops kda --heads 16 --node-size 1       # as two nodes

Milliseconds of the slowest rank, forward and forward + backward, in bfloat16: the median from the first kernel to the
last, with the host ahead, as in a training step. "host": the time that the host takes to queue forward + backward; if
it exceeds the GPU's time, the GPU waits. "alone": the op on T / W tokens of
one document on one GPU, without context parallelism; layout "whole": likewise, on all T tokens of the documents;
"heads": recurrences, contiguous, with all-to-all over heads instead of KCP. For attention, TFLOP/s per GPU on the pairs
that the mask leaves. Documents: "one", "packed" (ten), "web" (log-normal lengths with a median of 1,000 tokens),
"mixed" (a median of 4,000, with long ones among them). --heads and --dims: as in tools.bench_ops; attention's are
128 × 128, and 8/32 are 8 key and 32 query heads.

--peers: below our rows, FLA's KCP and its convolution on the same inputs; at the first call of
an op with a new number of heads it autotunes for minutes, and keeps what it found in Triton's cache. Its GDN runs
without its guard against wrong numbers on Hopper: times only.

--node-size: the ranks that count as a node, instead of all that are on one.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.groups import process_group
from titan_linear.distributed.process import own_device, refusing, run_command
from titan_linear.ops import attention, build_cp_context
from titan_linear.ops.layout.context import SOFTMAX_METHODS
from tools.bench_ops import OPS, PACKED, TAPS, Case, cases, op_parser
from tools.harness import BOTH, FORWARD, TIMES, Inputs, Row, Stopwatch, Table, TimedFunction

D = 128
Setting = tuple[str, str, str]  # whose op ("": ours), documents, layout
METHODS = SOFTMAX_METHODS
RECURRENCES = [op for op in OPS if op != "conv"]
LAYOUTS = ("contiguous", "zigzag")
# documents' lengths: median, and standard deviation of the log
LENGTHS = {"web": (1000, 1.0), "mixed": (4000, 1.5)}
COLUMNS = (
    dict.fromkeys(("op", "by", "T", "heads", "documents", "layout"), "") | TIMES | {"rates": ""}
)


# --- Documents and inputs --------------------------------------------------------------------------------------------


def boundaries(documents: str, T: int) -> Tensor:
    """[N+1] int32 on the CPU: "one" document, PACKED scaled to T tokens, or random documents, the same on all ranks."""
    if documents in LENGTHS:
        return torch.from_numpy(random_documents(documents, T, seed=0)).int()
    edges = PACKED if documents == "packed" else (0, PACKED[-1])
    return torch.tensor([edge * T // PACKED[-1] for edge in edges], dtype=torch.int32)


def random_documents(kind: str, T: int, seed: int) -> np.ndarray:
    """[N+1] int64 boundaries; the last document is cut where the stream ends."""
    rng = np.random.default_rng(seed)
    middle, deviation = LENGTHS[kind]
    lengths = rng.lognormal(np.log(middle), deviation, 100 + 4 * T // middle)
    ends = np.maximum(lengths, 1).astype(np.int64).cumsum()
    return np.concatenate([[0], ends[ends < T], [T]])


def make_inputs(case: Case) -> Inputs:
    """The convolution has the channels of q, k and v."""
    if case.op in METHODS:
        heads = {"q": case.HV, "k": case.H, "v": case.H}
        return {name: torch.randn(1, case.T, H, D).bfloat16() for name, H in heads.items()}
    return (replace(case, HV=3 * case.HV) if case.op == "conv" else case).inputs()


# --- What a row times ------------------------------------------------------------------------------------------------


def rows(op: str, documents: Sequence[str], layouts: Sequence[str], fla: bool) -> Iterator[Setting]:
    """The rows of an op; FLA's comes below ours for the same work."""
    yield "", "one", "alone"
    for of, layout in product(documents, layouts):
        if layout == "heads" and op not in RECURRENCES:
            continue
        yield "", of, layout
        if fla and op in OPS and OPS[op].fla and layout in LAYOUTS:
            yield "FLA", of, layout


def ours(case: Case, cu: Tensor, layout: str, node: int | None = None) -> Callable[..., Tensor]:
    """Our op, on all ranks in this layout, `node` of them to a node, or on each rank alone."""
    fn = partial(attention, method=case.op) if case.op in METHODS else case.function()
    if layout == "heads":
        fn = partial(fn, cp_method="ulysses")
        layout = "contiguous"
    if layout in LAYOUTS and dist.get_world_size() > 1:
        where = {"group": dist.group.WORLD, "layout": layout, "node_size": node}
    else:
        where = {"rank": 0, "world_size": 1}
    context = build_cp_context(cu.cuda(), cu_seqlens_cpu=cu, **where)
    return partial(fn, cp_context=context)


def fla(case: Case, cu: Tensor, layout: str) -> Callable[..., Tensor]:
    """flash-linear-attention's equivalent function, which takes the same tensors."""
    from fla.ops.cp import build_cp_context as context_of

    width = TAPS if case.op == "conv" else None
    context = context_of(
        cu.cuda(),
        dist.group.WORLD,
        conv1d_kernel_size=width,
        cu_seqlens_cpu=cu,
        layout=layout,
    )
    return case.function(OPS[case.op].fla, cp_context=context)


# --- Measuring -------------------------------------------------------------------------------------------------------


def tflops(H: int, bounds: Tensor, ranks: int, times: Row) -> str:
    """TFLOP/s per GPU of attention, on the pairs that the mask leaves."""
    lengths = bounds.diff().long()
    pairs = int((lengths * (lengths + 1) // 2).sum())
    work = 4 * D * H * pairs / ranks / 1e9
    return f"{work / times[FORWARD]:.0f} / {3.5 * work / times[BOTH]:.0f} TFLOP/s"


def add_rows(args: argparse.Namespace, case: Case, watch: Stopwatch, found: Table) -> None:
    """Add the rows of an op. The case has all tokens, of which each rank takes its part."""
    # Layout "alone" has the documents of one rank's tokens.
    ranks = dist.get_world_size()
    for whose, documents, layout in rows(case.op, args.documents, args.layouts, args.peers):
        cu = boundaries(documents, case.T // ranks if layout == "alone" else case.T)
        own = case if layout == "whole" else replace(case, T=case.T // ranks)
        with watch.device:
            x = make_inputs(own)
        fn = fla(case, cu, layout) if whose else ours(case, cu, layout, args.node_size)
        times = TimedFunction(fn, x).times(watch)
        # Attention's work is shared by the ranks that share the stream.
        sharing = ranks if layout in LAYOUTS else 1
        setting = {
            "op": case.op,
            "by": whose or "ours",
            "T": case.T,
            "heads": case.heads,
            "documents": documents,
            "layout": layout,
            "rates": tflops(case.HV, cu, sharing, times) if case.op in METHODS else "",
        }
        found.add(setting | times)


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    ops = [*OPS, *METHODS]
    parser = op_parser("python -m tools.bench_cp", __doc__, ops, [32768], [(64, 64)])
    kinds = ["one", "packed", *LENGTHS]
    layouts = [*LAYOUTS, "heads", "whole"]
    option = parser.add_argument
    option("--documents", nargs="+", default=kinds[:2], choices=kinds)
    option("--layouts", nargs="+", default=LAYOUTS, choices=layouts)
    option("--node-size", type=int, help="ranks per node (default: as torchrun has them)")
    return parser.parse_args(argv)


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.peers and not find_spec("fla"):
        raise ValueError("--peers needs flash-linear-attention, which is not installed here")
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "tools.bench_cp times the ops on several GPUs; torchrun starts it where there are some, not here"
        )
    own_device()
    with process_group(timedelta(minutes=10)):
        watch = Stopwatch()
        found = Table(COLUMNS)
        for case in cases(args):
            add_rows(args, case, watch, found)
    return 0


if __name__ == "__main__":
    run_command(main)
