"""Times and memory of the linear-attention ops on one GPU, beside the floor set by their bytes and, if asked, FLA.

    python -m tools.bench_ops                     # KDA, GDN and the convolution, the shapes of docs/results.md
    python -m tools.bench_ops --peers             # beside FLA, which autotunes for minutes
    python -m tools.bench_ops --ops kda gdn --heads 16/32 16/64 --peers
    python -m tools.bench_ops --ops kda --tokens 8192 --heads 64
    python -m tools.bench_ops --ops gdn --tokens 32768 --heads 30 --dims 96x192 128x256
    python -m tools.bench_ops --ops rwkv7 --tokens 32768 --heads 64 --dims 64x64 --peers
    python -m tools.bench_ops --ops ssd --tokens 32768 --heads 1/128 8/64 --dims 128x64

Milliseconds on the GPU, forward and forward + backward, with a cold L2 cache and the host ahead, as in a training step;
q and k are normalised beforehand; all in bfloat16, log decays float32, computed beforehand; "ssd" takes raw time steps.
Heads are K × V as `--dims` says; 16/64: 16 query and 64 value heads. "packed" has ten documents.
"host": the milliseconds that the host takes to queue forward + backward; if they exceed the GPU's time, the GPU waits.
The floor is the bytes of inputs, outputs and gradients divided by the copy bandwidth measured in the same run;
"of floor": its share of the time. "peak": GiB above the inputs. "apart": the relative difference of the output from
ours. FLA's GDN runs without its guard against wrong numbers on Hopper: times only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, randn
from torch.nn.functional import normalize

from titan_linear.commands import command_parser
from titan_linear.distributed.process import refusing, run_command
from titan_linear.ops import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    chunk_ssd,
)
from tools.harness import BOTH, FORWARD, TIMES, Inputs, Stopwatch, Table, TimedFunction

# boundaries of ten documents
PACKED = (0, 2960, 5212, 9513, 13567, 17443, 20634, 23521, 26281, 31785, 32768)
TAPS = 4  # of the convolution
COLUMNS = {
    **dict.fromkeys(("op", "by", "T", "heads", "dims", "documents"), ""),
    **TIMES,
    "forward of floor": ".0%",
    "both of floor": ".0%",
    "peak": ".2f",
    "apart": ".1e",
}


@dataclass(frozen=True)
class Case:
    """Shapes that an op is timed on."""

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

    def inputs(self) -> Inputs:
        return OPS[self.op].inputs(self)

    def function(self, fn: Callable[..., Any] | None = None, **more: Any) -> Callable[..., Tensor]:
        """The op with its options, without its final state. fn: another library's, in place of ours."""
        op = OPS[self.op]
        call = partial(fn or op.fn, **op.options, **more)
        return lambda **x: call(**x)[0]


@dataclass(frozen=True)
class Op:
    """How an op is timed."""

    fn: Callable[..., Any]
    options: dict[str, Any]
    inputs: Callable[[Case], Inputs]
    fla: Callable[..., Any] | None = None  # its equivalent function
    dims: tuple[int, int] = (128, 128)  # K and V unless told


# --- Inputs ----------------------------------------------------------------------------------------------------------


def tokens(case: Case, **shapes: tuple[int, ...]) -> Inputs:
    """[1, T, ...] bfloat16 of each."""
    return {name: randn(1, case.T, *shape).bfloat16() for name, shape in shapes.items()}


def conv_inputs(case: Case) -> Inputs:
    channels = case.HV * case.K
    return tokens(case, x=(channels,)) | {"weight": randn(channels, TAPS).bfloat16()}


def ssd_inputs(case: Case) -> Inputs:
    HV = case.HV
    keys = case.H, case.K
    of_heads = {"A": -torch.rand(HV), "D": randn(HV), "dt_bias": randn(HV) - 4}
    return tokens(case, x=(HV, case.V), dt=(HV,), B=keys, C=keys) | of_heads


def rwkv7_inputs(case: Case) -> Inputs:
    keys = case.HV, case.K
    x = tokens(case, r=keys, w=keys, k=keys, a=keys, b=keys, v=(case.HV, case.V))
    removed = normalize(x["a"], dim=-1)
    x |= {"a": -removed, "b": removed * x["b"].sigmoid()}
    return x if case.raw else x | {"w": -0.6065 * x["w"].float().sigmoid()}


def delta_inputs(case: Case, gates: tuple[int, ...], least: float) -> Inputs:
    """gates: the dims of a token's gates; least: the lowest log gate."""
    keys = case.H, case.K
    x = tokens(case, q=keys, k=keys, v=(case.HV, case.V), g=gates)
    x |= {name: normalize(x[name], dim=-1) for name in "qk"}
    x["beta"] = torch.rand(1, case.T, case.HV).bfloat16()
    if case.raw:
        return x | {"A_log": randn(case.HV), "dt_bias": randn(math.prod(gates))}
    return x | {"g": least * torch.rand(1, case.T, *gates)}


# --- Peers -----------------------------------------------------------------------------------------------------------


def late(name: str) -> Callable[..., Any]:
    """A function of a library that may not be installed: it is imported when it is called."""
    return lambda **x: resolve_name(name)(**x)


def fla_gdn(**x: Any) -> tuple[Tensor, Tensor | None]:
    """FLA's, without its refusal of Triton kernels that give wrong numbers on Hopper: times only."""
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule(**x)


OPS = {
    "kda": Op(
        chunk_kda,
        options={"safe_gate": True},
        inputs=lambda case: delta_inputs(case, (case.HV, case.K), least=-5),
        fla=late("fla.ops.kda:chunk_kda"),
    ),
    "gdn": Op(
        chunk_gated_delta_rule,
        options={},
        inputs=lambda case: delta_inputs(case, (case.HV,), least=-1),
        fla=fla_gdn,
    ),
    "conv": Op(
        causal_conv1d,
        options={"activation": "silu"},
        inputs=conv_inputs,
        fla=late("fla.modules.causal_conv1d:causal_conv1d"),
    ),
    "ssd": Op(
        chunk_ssd,
        options={"dt_softplus": True},
        inputs=ssd_inputs,
    ),
    "rwkv7": Op(
        chunk_rwkv7,
        options={"output_final_state": False},
        inputs=rwkv7_inputs,
        fla=late("fla.ops.rwkv7:chunk_rwkv7"),
        dims=(64, 64),  # the widest heads that its kernels take
    ),
}


# --- Rows ------------------------------------------------------------------------------------------------------------


class Comparison:
    """Times libraries on the same inputs and prints a row of each.

    Args:
        peers: whether libraries other than ours are timed.
        bandwidth: bytes that a copy reads and writes per millisecond.
    """

    def __init__(self, peers: bool) -> None:
        self.peers = peers
        self.watch = Stopwatch()
        a, b = torch.empty(2, 1 << 30, dtype=torch.bfloat16, device=self.watch.device)
        self.bandwidth = 2 * a.nbytes / self.watch.time(lambda: b.copy_(a)).device / 1e3
        print(f"copy: {self.bandwidth / 1e9:.2f} TB/s")
        self.table = Table(COLUMNS)

    def add(self, case: Case, documents: str) -> None:
        """Add a row of ours, and of FLA's function if it can run the case."""
        op = OPS[case.op]
        edges = PACKED if documents == "packed" else (0, case.T)
        cu = torch.tensor(edges, dtype=torch.int32, device=self.watch.device)
        torch.manual_seed(0)
        with self.watch.device:
            x = case.inputs()
        ours = TimedFunction(case.function(cu_seqlens=cu), x)
        self._add(case, documents, "ours", ours, ours.output)
        if self.peers and op.fla:
            try:
                theirs = TimedFunction(case.function(op.fla, cu_seqlens=cu), x)
                self._add(case, documents, "FLA", theirs, ours.output)
            except Exception as error:
                print(f"{case.op} by FLA: {str(error).partition(chr(10))[0]}")

    def _add(
        self,
        case: Case,
        documents: str,
        by: str,
        passes: TimedFunction,
        ours: Tensor,
    ) -> None:
        times = passes.times(self.watch)
        # Both passes read the inputs twice and the output's gradient, and write the output and gradients.
        inputs = sum(t.nbytes for t in passes.leaves)
        output = passes.output.nbytes
        forward = inputs + output
        both = 3 * inputs + 2 * output
        difference = passes.output.float() - ours.float()
        row = {
            "op": case.op,
            "by": by,
            "T": case.T,
            "heads": case.heads,
            "dims": f"{case.K}×{case.V}",
            "documents": documents,
            "forward of floor": forward / self.bandwidth / times[FORWARD],
            "both of floor": both / self.bandwidth / times[BOTH],
            "peak": passes.peak(),
            "apart": (difference.norm() / ours.float().norm()).item(),
        }
        self.table.add(row | times)


# --- The command -----------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All that the options ask for."""
    for op in args.ops:
        usual = OPS[op].dims if op in OPS else (128, 128)  # attention's, in tools.bench_cp
        for T, heads, dims in product(args.tokens, args.heads, args.dims or [usual]):
            yield Case(op, T, *heads, *dims)


def head_dims(text: str) -> tuple[int, int]:
    """K and V from text such as 96x192."""
    K, V = map(int, text.split("x"))
    return K, V


def head_counts(text: str) -> tuple[int, int]:
    """Query and value heads from text such as 64 or 16/64."""
    H, _, HV = text.partition("/")
    HV = HV or H
    if not (H.isdigit() and HV.isdigit() and int(H) and int(HV) % int(H) == 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of heads, or query/value heads such as 16/64"
        )
    return int(H), int(HV)


def op_parser(
    prog: str,
    about: str,
    ops: list[str],
    tokens: list[int],
    heads: list[tuple[int, int]],
) -> argparse.ArgumentParser:
    """Options of both benches of ops, with their defaults."""
    parser = command_parser(prog, about)
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument(
        "--heads", type=head_counts, nargs="+", default=heads, help="such as 64 or 16/64"
    )
    parser.add_argument(
        "--dims", type=head_dims, nargs="+", help="K and V (default: 128x128; rwkv7: 64x64)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time other libraries, where installed"
    )
    return parser


@refusing
def main(argv: list[str]) -> int:
    usual = [(64, 64), (16, 16)]
    parser = op_parser("python -m tools.bench_ops", __doc__, list(OPS), [32768, 8192], usual)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("tools.bench_ops times the kernels of a GPU, and there is none here")
    comparison = Comparison(args.peers)
    # Packed documents have one length in all.
    for case in cases(args):
        for documents in ["one"] + ["packed"] * (PACKED[-1] == case.T):
            comparison.add(case, documents)
    return 0


if __name__ == "__main__":
    run_command(main)
