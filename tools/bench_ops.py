"""Times and memory of the linear-attention ops on one GPU, beside the floor set by their bytes and, if asked, peers.

    python -m tools.bench_ops                     # KDA, GDN and the convolution, the shapes of docs/results.md
    python -m tools.bench_ops --peers             # beside what is installed of FLA (it autotunes for minutes),
                                                  # FlashQLA (GDN) and nvidia-cudnn-frontend >= 1.29 (KDA, equal heads)
    python -m tools.bench_ops --ops kda gdn --heads 16/32 16/64 --gates log raw --peers
    python -m tools.bench_ops --ops kda --tokens 8192 --heads 64
    python -m tools.bench_ops --ops gdn --tokens 32768 --heads 30 --dims 96x192 128x256
    python -m tools.bench_ops --ops rwkv7 --tokens 32768 --heads 64 --dims 64x64 --peers
    python -m tools.bench_ops --ops ssd --tokens 32768 --heads 1/128 8/64 --dims 128x64 --peers
    python -m tools.bench_ops --ops gdn --tokens 32768 --candidates "gdn scan" BV=32,64 STAGES=2,3 num_warps=4,8

Milliseconds on the GPU, forward and forward + backward, with a cold L2 cache and the host ahead, as in a training step
(`timed`); q and k are normalised beforehand; all in bfloat16. --gates log: float32 log decays, computed beforehand;
raw: bfloat16 projections, as our mixers and FLA's give them, of which the op computes the decays; "ssd" always takes
raw time steps, beside mamba_ssm; FLA's RWKV-7 comes behind what makes decays of these. Heads are K × V as
`--dims` says; 16/64: 16 query and 64 value heads. "packed" has ten documents. The floor is the bytes of inputs, outputs
and gradients divided by the copy bandwidth measured in the same run; GB/s are those bytes divided by the time, TFLOP/s
count the chunked algorithm's products (`Op.flops`). "kept": bytes per token and value head held between forward and
backward, apart from inputs and output. "peak": GiB above the inputs. "host": the milliseconds that the host takes to
queue forward + backward; if they exceed the GPU's time, the GPU waits. FLA's GDN runs without its guard against wrong
numbers on Hopper: times only.

--candidates: also rows of the op with one of its kernels launched by each combination of these values, in place of the
configuration for these dims (ops/triton/configs.py); one that does not fit gives its reason. The numbers of one that
you put there are checked by `./tests/run.sh -m cuda tests/ops/triton`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, randn
from torch.nn.functional import normalize
from triton.testing import do_bench

from titan_linear.commands import command_parser, line, table
from titan_linear.distributed.process import refusing, run_command
from titan_linear.ops import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    chunk_ssd,
)
from titan_linear.ops.triton.configs import CONFIGS, architecture, row

PACKED = (0, 2960, 5212, 9513, 13567, 17443, 20634, 23521, 26281, 31785, 32768)
C = 64  # tokens per chunk
TAPS = 4  # of the convolution
ROUNDS = 40
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What an op is timed on."""

    op: str
    T: int
    H: int  # query and key heads
    HV: int  # value heads
    K: int
    V: int
    raw: bool = False  # gates are raw

    @property
    def heads(self) -> str:
        return str(self.H) if self.H == self.HV else f"{self.H}/{self.HV}"

    @property
    def options(self) -> dict[str, Any]:
        op = OPS[self.op]
        return op.options | (op.raw or {}) if self.raw else op.options

    def inputs(self) -> Inputs:
        return OPS[self.op].inputs(self)


@dataclass(frozen=True)
class Op:
    """How an op is timed."""

    fn: Callable[..., Any]
    options: dict[str, Any]
    # its further options with raw gates; None: it has one kind of gates, or none
    raw: dict[str, Any] | None
    inputs: Callable[[Case], Inputs]
    # K, V → per token and head: forward, forward and backward
    flops: Callable[[int, int], tuple[int, int]]
    # the equivalent functions of other libraries, by names in LIBRARIES
    peers: dict[str, Callable[..., Any]]
    dims: tuple[int, int] = (128, 128)  # K and V unless told


# --- Inputs and FLOPs ------------------------------------------------------------------------------------------------


def conv_inputs(case: Case) -> Inputs:
    channels = case.HV * case.K
    return {"x": randn(1, case.T, channels).bfloat16(), "weight": randn(channels, TAPS).bfloat16()}


def ssd_inputs(case: Case) -> Inputs:
    T, H, HV, K, V = case.T, case.H, case.HV, case.K, case.V
    tokens = {
        "x": randn(1, T, HV, V),
        "dt": randn(1, T, HV),
        "B": randn(1, T, H, K),
        "C": randn(1, T, H, K),
    }
    of_heads = {"A": -torch.rand(HV), "D": randn(HV), "dt_bias": randn(HV) - 4}
    return {name: x.bfloat16() for name, x in tokens.items()} | of_heads


def rwkv7_inputs(case: Case) -> Inputs:
    shape = 1, case.T, case.HV, case.K
    of_keys = {name: randn(*shape) for name in ("r", "w", "k", "a")}
    removed = normalize(of_keys["a"], dim=-1)
    of_keys["a"] = -removed
    if not case.raw:
        of_keys["w"] = -0.6065 * of_keys["w"].sigmoid()
    x = of_keys | {"b": removed * randn(*shape).sigmoid(), "v": randn(1, case.T, case.HV, case.V)}
    return {name: t if name == "w" and not case.raw else t.bfloat16() for name, t in x.items()}


def delta_inputs(case: Case, gates: tuple[int, ...], least: float) -> Inputs:
    """gates: the dims of a token's gates; least: the lowest log gate."""
    T, HV = case.T, case.HV
    q, k = (normalize(randn(1, T, case.H, case.K), dim=-1).bfloat16() for _ in range(2))
    beta = torch.rand(1, T, HV).bfloat16()
    x = {"q": q, "k": k, "v": randn(1, T, HV, case.V).bfloat16(), "beta": beta}
    if case.raw:
        return {
            **x,
            "g": randn(1, T, *gates).bfloat16(),
            "A_log": randn(HV),
            "dt_bias": randn(math.prod(gates)),
        }
    return {**x, "g": least * torch.rand(1, T, *gates)}


def conv_flops(K: int, V: int) -> tuple[int, int]:
    return 2 * TAPS * K, 6 * TAPS * K


def ssd_flops(K: int, V: int) -> tuple[int, int]:
    """q·S, kᵀv; q·k and its use. Backward: the states again, their gradients, and what chunks make of them."""
    forward = 4 * K * V + 2 * C * K + 2 * C * V
    return forward, forward + 12 * K * V + 4 * C * V


def rwkv7_flops(K: int, V: int) -> tuple[int, int]:
    """P, U, Q and O of a chunk, and their use. Backward: P, U and Q again, two scans, gradients."""
    forward = 6 * K * V + 2 * K * K + 2 * K * K * V // C + 2 * C * (6 * K + 4 * V)
    return forward, forward + 24 * K * V + 2 * K * K + 4 * K * K * V // C + 2 * C * (
        17 * K + 16 * V
    )


def delta_flops(K: int, V: int) -> tuple[int, int]:
    """q·S, k·S, kᵀN; the chunk matrices and their use. Backward: the states again, their reverse scan, gradients."""
    forward = 6 * K * V + 4 * C * K + 4 * C * V
    return forward, forward + 16 * K * V + 8 * C * K + 10 * C * V


# --- Peers -----------------------------------------------------------------------------------------------------------


LIBRARIES = {"FLA": "fla", "mamba_ssm": "mamba_ssm", "FlashQLA": "flash_qla", "cuDNN": "cudnn"}


def late(module: str, name: str) -> Callable[..., Any]:
    """A function of a library that may not be installed: it is imported when it is called."""
    return lambda **x: getattr(import_module(module), name)(**x)


def fla_gdn(**x: Any) -> tuple[Tensor, Tensor | None]:
    """FLA's, without its refusal of Triton kernels that give wrong numbers on Hopper: times only."""
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule(**x)


def mamba_ssd(*, cu_seqlens: Tensor, **x: Any) -> tuple[Tensor, None]:
    """mamba_ssm's, for which documents are numbers of tokens; without them for one document."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    index = None
    if len(cu_seqlens) > 2:
        documents = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
        index = documents.repeat_interleave(cu_seqlens.diff(), output_size=x["x"].shape[1])[None]
    return mamba_chunk_scan_combined(**x, chunk_size=256, seq_idx=index), None


def cudnn_kda(*, cu_seqlens: Tensor, safe_gate: bool, **x: Tensor) -> tuple[Tensor, None]:
    """cuDNN's KDA under the arguments of ours; it wants beta in float32, and no batch."""
    from cudnn.linear_attention import kimi_delta_attention

    q, k, v, g, beta = (x[name][0] for name in ("q", "k", "v", "g", "beta"))
    o, _ = kimi_delta_attention(q, k, v, g, beta.float(), cu_seqlens)
    return o[None], None


def fla_rwkv7(*, w: Tensor, use_gate_in_kernel: bool = False, **x: Any) -> tuple[Tensor, None]:
    """FLA's RWKV-7, behind what makes decays of raw gates."""
    from fla.ops.rwkv7 import chunk_rwkv7

    return chunk_rwkv7(w=-0.6065 * w.sigmoid() if use_gate_in_kernel else w, **x)


OPS = {
    "kda": Op(
        chunk_kda,
        options={"safe_gate": True},
        raw={"use_gate_in_kernel": True, "lower_bound": -5.0},
        inputs=lambda case: delta_inputs(case, (case.HV, case.K), least=-5),
        flops=delta_flops,
        peers={"FLA": late("fla.ops.kda", "chunk_kda"), "cuDNN": cudnn_kda},
    ),
    "gdn": Op(
        chunk_gated_delta_rule,
        options={},
        raw={"use_gate_in_kernel": True},
        inputs=lambda case: delta_inputs(case, (case.HV,), least=-1),
        flops=delta_flops,
        peers={"FLA": fla_gdn, "FlashQLA": late("flash_qla", "chunk_gated_delta_rule")},
    ),
    "conv": Op(
        causal_conv1d,
        options={"activation": "silu"},
        raw=None,
        inputs=conv_inputs,
        flops=conv_flops,
        peers={"FLA": late("fla.modules.causal_conv1d", "causal_conv1d")},
    ),
    "ssd": Op(
        chunk_ssd,
        options={"dt_softplus": True},
        raw=None,
        inputs=ssd_inputs,
        flops=ssd_flops,
        peers={"mamba_ssm": mamba_ssd},
    ),
    "rwkv7": Op(
        chunk_rwkv7,
        options={"output_final_state": False},
        raw={"use_gate_in_kernel": True},
        inputs=rwkv7_inputs,
        flops=rwkv7_flops,
        peers={"FLA": fla_rwkv7},
        dims=(64, 64),  # the widest heads that its kernels take
    ),
}


def peers(op: str) -> dict[str, Callable[..., Any]]:
    """Those of the op's peers that are installed."""
    return {name: fn for name, fn in OPS[op].peers.items() if find_spec(LIBRARIES[name])}


def can_run(peer: str, case: Case) -> bool:
    """Whether a peer's op takes the case: only FLA's computes decays, and cuDNN's backward wants equal heads."""
    if peer in ("FlashQLA", "cuDNN") and (case.raw or (case.K, case.V) != (128, 128)):
        return False
    return peer != "cuDNN" or case.H == case.HV


def candidates(case: Case, kernel: str, *texts: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The op by each combination of values such as BV=32,64, which the kernel has until the next one is taken."""
    gpu = architecture(torch.device("cuda"))
    shipped = CONFIGS[gpu][kernel]
    key = row(gpu, kernel, torch.bfloat16.itemsize, max(case.K, case.V))
    names, choices = zip(*(text.split("=") for text in texts))
    for values in product(*(choice.split(",") for choice in choices)):
        chosen = dict(zip(names, map(int, values)))
        # not in place: kernels may share a table
        CONFIGS[gpu][kernel] = shipped | {key: shipped[key] | chosen}
        yield str(chosen), OPS[case.op].fn
    CONFIGS[gpu][kernel] = shipped


# --- Measuring -------------------------------------------------------------------------------------------------------


def timed(fn: Callable[[], Any], flush: Tensor) -> tuple[float, float]:
    """Milliseconds of fn: the median on the GPU, and the least of the host to queue it, since others use the host too.
    Ranks start together; writing `flush` gives the host a start."""
    for _ in range(3):
        fn()
    spans = []
    host = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        then = time.perf_counter()
        begin.record()
        fn()
        end.record()
        host.append(1e3 * (time.perf_counter() - then))
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return median(spans), min(host)


def measure(
    fn: Callable[..., Any], x: Inputs, options: dict[str, Any], flush: Tensor
) -> tuple[float, float, float, int, float]:
    """(forward ms, forward + backward ms, the latter's host ms, bytes kept for backward, peak GiB above the inputs)."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    dy = torch.randn_like(fn(**x, **options)[0])

    def both() -> None:
        torch.autograd.grad(fn(**x, **options)[0], list(x.values()), dy)

    with torch.no_grad():
        forward, _ = timed(lambda: fn(**x, **options), flush)
    both()
    before = torch.cuda.memory_allocated()
    y = fn(**x, **options)[0]
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    del y
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return forward, *timed(both, flush), kept, peak


def copy_bandwidth() -> float:
    """Bytes read and written per millisecond."""
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / do_bench(lambda: b.copy_(a), return_mode="median")


# --- The table -------------------------------------------------------------------------------------------------------


def values(x: Inputs) -> Tensor:
    """The input that the output has the shape and dtype of."""
    return x["v" if "v" in x else "x"]


def needed_bytes(x: Inputs) -> tuple[int, int]:
    """Bytes to read the inputs and write the output; for both passes, also to read these again and write gradients."""
    inputs = sum(t.nbytes for t in x.values())
    output = values(x).nbytes
    return inputs + output, 3 * inputs + 2 * output


def figures(case: Case, x: Inputs, bandwidth: float, measured: tuple[float, ...]) -> list[str]:
    """The cells of figures of a row. measured: the result of `measure`."""
    *times, host, kept, peak = measured
    places = case.T * case.HV
    cells = []
    for ms, needed, flop in zip(
        times, needed_bytes(x), OPS[case.op].flops(case.K, case.V), strict=True
    ):
        rates = (
            f"{flop * places / ms / 1e9:.0f}",
            f"{needed / ms / 1e6:.0f}",
            f"{needed / bandwidth / ms:.0%}",
        )
        cells += [f"{ms:.2f}", *rates]
    return [*cells, f"{kept / places:.0f}", f"{peak:.2f}", f"{host:.2f}"]


def print_rows(
    case: Case, documents: str, args: argparse.Namespace, bandwidth: float, flush: Tensor
) -> None:
    """A row of ours and of each of the others that can run the case."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        x = case.inputs()
    cu = torch.tensor(
        PACKED if documents == "packed" else (0, case.T), dtype=torch.int32, device="cuda"
    )
    op = OPS[case.op]
    gates = "" if op.raw is None else ", raw gates" if case.raw else ", log gates"
    others = peers(case.op) if args.peers else {}
    tried = candidates(case, *args.candidates) if args.candidates else ()
    for name, fn in chain([("", op.fn)], others.items(), tried):
        if not can_run(name, case):
            continue
        try:
            measured = measure(fn, x, case.options | {"cu_seqlens": cu}, flush)
        except Exception as error:  # of another library or a candidate: its reason instead of a row
            if not name:
                raise
            print(f"{case.op} {name}{gates}: {str(error).partition(chr(10))[0]}")
            continue
        setting = (
            f"{case.op} {name}".strip() + gates,
            str(case.T),
            case.heads,
            f"{case.K}×{case.V}",
            documents,
        )
        print(line([*setting, *figures(case, x, bandwidth, measured)]))


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, int, tuple[int, int], tuple[int, int]]]:
    """(op, T, (H, HV), (K, V)) of all that the options ask for."""
    for op in args.ops:
        usual = OPS[op].dims if op in OPS else (128, 128)  # attention's, in tools.bench_cp
        yield from product([op], args.tokens, args.heads, args.dims or [usual])


def head_dims(text: str) -> tuple[int, int]:
    """K and V from text such as 96x192."""
    K, _, V = text.partition("x")
    if not (K.isdigit() and V.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be K and V of a head, such as 96x192")
    return int(K), int(V)


def head_counts(text: str) -> tuple[int, int]:
    """Query and value heads from text such as 64 or 16/64."""
    H, _, HV = text.partition("/")
    HV = HV or H
    if not (H.isdigit() and HV.isdigit() and int(H) and int(HV) % int(H) == 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of heads, or query/value heads such as 16/64"
        )
    return int(H), int(HV)


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.bench_ops", __doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192])
    parser.add_argument(
        "--heads", type=head_counts, nargs="+", default=[(64, 64), (16, 16)], help="such as 16/64"
    )
    parser.add_argument(
        "--gates", nargs="+", default=["log"], choices=["log", "raw"], help="(default: log)"
    )
    parser.add_argument(
        "--dims", type=head_dims, nargs="+", help="K and V (default: 128x128; rwkv7: 64x64)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time FLA, FlashQLA and cuDNN, where installed"
    )
    parser.add_argument("--candidates", nargs="+", metavar="KERNEL, NAME=VALUES", help="(above)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("tools.bench_ops times the kernels of a GPU, and there is none here")
    bandwidth = copy_bandwidth()
    flush = torch.empty(12 << 30, dtype=torch.uint8, device="cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.2f} TB/s"
    )
    times = [
        (f"{name} ms", "TFLOP/s", "GB/s", "of floor") for name in ("forward", "forward + backward")
    ]
    print(
        table(
            ("op", "T", "heads", "dims", "documents", *times[0], *times[1], "kept", "peak", "host"),
            [],
        )
    )
    for (op, T, heads, dims), gate in product(shapes(args), args.gates):
        if OPS[op].raw is None and gate != args.gates[0]:
            continue
        for documents in ["one"] + ["packed"] * (PACKED[-1] == T):
            print_rows(
                Case(op, T, *heads, *dims, raw=gate == "raw"), documents, args, bandwidth, flush
            )
    return 0


if __name__ == "__main__":
    run_command(main)
