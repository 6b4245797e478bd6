"""Every edge of what the ops accept: one list, made from the rules and the tables of configurations themselves.

Three things are made of it: the sweep on a GPU (`test_shapes.py`), the compilation for sm_90 without one
(`test_compile.py`), and what the rules refuse. A head dim that the kernels do not have is padded to one that they have,
so the list holds, for each tile of keys, every width of a slice of values, one and several, and pairs that are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ops.inputs import (
    STATES,
    boundaries,
    call,
    chunked_cross_entropy,
    decaying_inputs,
    dplr_inputs,
    gradients,
    leaves,
    make_inputs,
    raw_gate_inputs,
    tokens_of,
)
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import attention, build_cp_context, causal_conv1d
from titan_linear.ops.convolution import MAX_WIDTH
from titan_linear.ops.cross_entropy import IGNORE
from titan_linear.ops.experts import COPIES, activate, by_expert, collect, spread
from titan_linear.ops.reference.attention import attention as exact_attention
from titan_linear.ops.registry import OPS
from titan_linear.ops.runtime.support import short
from titan_linear.ops.swiglu import swiglu
from titan_linear.ops.torch import attention as blocks
from titan_linear.ops.triton.configs import kernel_dims, largest_dim

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
UNIT = 2**-8  # of bfloat16
RANKS = 4
# of documents: around a chunk, and one that goes through several ranks
LENGTHS = (1, 63, 0, 64, 65, 135)
HOPPER = (9, 0)  # the capability whose tables are read
Results = dict[str, Tensor]


class Shape(NamedTuple):
    op: str  # of OPS in tests/ops/inputs.py, or of PROGRAMS
    dtype: torch.dtype
    dims: Mapping[str, int]
    # of the op, and those that programs here read: gate, tokens, …
    options: Mapping[str, Any] = MappingProxyType({})
    compiled: bool = False  # without a GPU, in every run of the tests; the others by `python -m`

    def __str__(self) -> str:
        named = {**self.dims, **self.options}
        return " ".join(
            [self.op, short(self.dtype), *(f"{name}={value}" for name, value in named.items())]
        )


# --- The recurrences -------------------------------------------------------------------------------------------------

FAMILIES = {
    "kda": "chunk_kda",
    "gdn": "chunk_gated_delta_rule",
    "rwkv7": "chunk_rwkv7",
    "ssd": "chunk_ssd",
}
MIXERS = {"gate": "raw", "use_beta_sigmoid_in_kernel": True}  # what ours give
KDA_GATES = (
    {},
    {"gate": "safe", "safe_gate": True},
    MIXERS,
    MIXERS | {"lower_bound": -5.0},
    {"gate": "fast"},
)
GDN_GATES = ({}, MIXERS)
HEADS = ({"H": 2, "HV": 2}, {"H": 2, "HV": 4}, {"H": 1, "HV": 4})
LONG = {"tokens": 16384}  # one document, which is cut into segments


def tiles(limit: int) -> list[int]:
    """The widths of keys' tiles up to `limit`: those of `kernel_dims`."""
    return sorted({kernel_dims(K, 1)[0] for K in range(1, limit + 1)})


def delta_rules() -> Iterator[Shape]:
    for op, gates in (("kda", KDA_GATES), ("gdn", GDN_GATES)):
        heads, gate = cycle(HEADS), cycle(gates)
        limits = {dtype: largest_dim(HOPPER, op, dtype.itemsize) for dtype in DTYPES}
        for K in tiles(limits[BF16]):
            for V in (32, 64, 96, 128, 192, 256):
                yield Shape(op, BF16, {"K": K, "V": V} | next(heads), next(gate))
        for K in tiles(limits[FP32]):
            # slices of 32 are those of V = 32 but there
            for V in (32, 64, *([96] if K == 256 else []), 128, 256):
                yield Shape(
                    op, FP32, {"K": K, "V": V} | next(heads), next(gate), compiled=K == V == 64
                )
        for K in (32, limits[FP16]):  # float16 has bfloat16's tables
            yield Shape(op, FP16, {"K": K, "V": K} | next(heads), next(gate))
        # padded
        for K, V in ((8, 1), (8, 40), (33, 72), (65, 104), (96, 192), (129, 200), (255, 225)):
            yield Shape(op, BF16, {"K": K, "V": V} | next(heads), next(gate))
        for options in gates:
            here = not options or "lower_bound" in options
            yield Shape(op, BF16, {"K": 128, "V": 128, "H": 2, "HV": 2}, options, compiled=here)
        yield Shape(op, BF16, {"K": 256, "V": 256, "H": 2, "HV": 2}, compiled=True)
        yield Shape(op, BF16, {"K": 128, "V": 128, "H": 16, "HV": 64}, gates[-1])
        yield Shape(op, BF16, {"K": 128, "V": 192, "H": 30, "HV": 30}, compiled=op == "gdn")
        yield Shape(op, BF16, {"K": 128, "V": 128, "H": 1, "HV": 1}, LONG, compiled=op == "kda")
        yield Shape(op, FP32, {"K": 64, "V": 32, "H": 1, "HV": 1}, LONG)


def rwkv7() -> Iterator[Shape]:
    options = cycle(({}, {"use_gate_in_kernel": True}))
    for dtype in DTYPES:
        # keys of all widths are computed at this one
        limit = largest_dim(HOPPER, "rwkv7", dtype.itemsize)
        values = [V for V in (1, 16, 32, 48, 64) if limit >= V and (dtype != FP16 or V in (1, 64))]
        for K, V in [*((limit, V) for V in values), (8, limit), (33 if limit > 33 else 16, limit)]:
            here = dtype == FP32 and K == V
            yield Shape("rwkv7", dtype, {"K": K, "V": V, "H": 3}, next(options), compiled=here)
    for gate in ({}, {"use_gate_in_kernel": True}):
        yield Shape("rwkv7", BF16, {"K": 64, "V": 64, "H": 64}, gate, compiled=True)
    yield Shape("rwkv7", BF16, {"K": 64, "V": 64, "H": 1}, LONG)


def decays() -> Iterator[Shape]:
    groups = cycle(({"heads": 4, "G": 4}, {"heads": 4, "G": 1}, {"heads": 8, "G": 2}))
    for N in (16, 32, 64, 128, 256):
        for P in (16, 32, 48, 64, 96, 128) if N <= 64 else (48, 64, 80, 96, 112, 128):
            yield Shape("ssd", BF16, {"N": N, "P": P} | next(groups))
        for P in (16, 32, 64, 128):
            if max(N, P & -P) <= largest_dim(HOPPER, "ssd", FP32.itemsize):
                yield Shape(
                    "ssd", FP32, {"N": N, "P": P} | next(groups), compiled=(N, P) == (128, 64)
                )
        yield Shape("gla", BF16, {"N": N, "P": 64} | next(groups), compiled=N == 128)
    for op, dtype in (("ssd", FP16), ("gla", FP16), ("gla", FP32)):
        yield Shape(op, dtype, {"N": 64, "P": 80} | next(groups))
    for heads, G in ((128, 1), (64, 8)):
        yield Shape("ssd", BF16, {"N": 128, "P": 64, "heads": heads, "G": G}, compiled=True)
    for dims in ({"N": 64, "P": 80, "heads": 64}, {"N": 256, "P": 128, "heads": 32}):
        yield Shape("ssd", BF16, dims | {"G": 1})
    yield Shape("ssd", BF16, {"N": 128, "P": 64, "heads": 2, "G": 1}, LONG)
    yield Shape("gla", BF16, {"N": 128, "P": 128, "heads": 1, "G": 1}, LONG)


def recurrence_inputs(shape: Shape, tokens: int) -> dict[str, Tensor]:
    """Rounded to what the kernels get: decays and parameters are float32, as are time steps and RWKV-7's gates."""
    op, gate = shape.op, shape.options.get("gate", "usual")
    if op in ("kda", "gdn"):
        make = raw_gate_inputs if gate == "raw" else make_inputs
        x = make(op, tokens, **shape.dims, **({} if gate == "raw" else {"gate": gate}))
    elif op == "rwkv7":
        x = {
            {"q": "r", "gk": "w"}.get(n, n): t for n, t in dplr_inputs(tokens, **shape.dims).items()
        }
        x["w"] = x["w"] * (9.0 if shape.options.get("use_gate_in_kernel") else 0.6065)
    else:
        x = decaying_inputs(op, tokens, **shape.dims)
    wide = ("dt", "w") if gate == "raw" else ("g", "dt", "w")
    return {n: t.to(FP32 if t.dim() < 3 or n in wide else shape.dtype) for n, t in x.items()}


def documents_of(shape: Shape) -> Tensor:
    tokens = shape.options.get("tokens")
    return boundaries(list(LENGTHS) if tokens is None else [tokens])


def recurrence(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    """On packed documents with states in and out, and on four ranks: outputs and the gradients of all inputs. The exact
    result of ranks is that of the whole stream."""
    cu = documents_of(shape)
    options = {n: v for n, v in shape.options.items() if n not in ("gate", "tokens")}
    if exact:
        options.pop("safe_gate", None)
    initial, need_final = STATES[shape.op]
    device = next(iter(x.values())).device
    plain = {n: t for n, t in x.items() if n != initial}
    outputs = call(
        shape.op, x, cu_seqlens=cu.to(device), impl=impl, **{need_final: True}, **options
    )
    named = dict(zip(["o", "final", *(f"d{n}" for n in x)], gradients(list(outputs), x)))
    if exact:
        whole = gradients(
            [call(shape.op, plain, cu_seqlens=cu.to(device), impl=impl, **options)[0]], plain
        )
    else:
        whole = over_ranks(shape, plain, cu, impl, options)
    return named | dict(zip(["ranks o", *(f"ranks d{n}" for n in plain)], whole))


def over_ranks(
    shape: Shape, x: dict[str, Tensor], cu: Tensor, impl: str, options: dict
) -> list[Tensor]:
    """o and the gradients of x, in the order of the stream; those of parameters are sums over ranks."""
    layout = "zigzag" if sum(shape.dims.values()) // 16 % 2 else "contiguous"
    device = next(iter(x.values())).device
    do = gradients_of_outputs(x, shape)

    def on_rank(group):
        ctx = build_cp_context(cu, group, device=device, layout=layout)
        mine = tokens_of(ctx)
        own = leaves({n: t[:, mine] if t.dim() > 2 else t for n, t in x.items()})
        o, _ = call(shape.op, own, cp_context=ctx, impl=impl, **options)
        return [mine, o.detach(), *torch.autograd.grad(o, list(own.values()), do[:, mine].to(o))]

    if device.type == "meta":
        return on_rank(NoGroup())[1:]
    places, *parts = zip(*run_ranks(on_rank, RANKS), strict=True)
    order = torch.cat(places).argsort().to(device)
    return [torch.cat(t, 1)[:, order] if t[0].dim() > 2 else sum(t[1:], t[0]) for t in parts]


def gradients_of_outputs(x: dict[str, Tensor], shape: Shape) -> Tensor:
    """The do that `gradients` gives the first output."""
    values = x["x"] if shape.op == "ssd" else x["v"]
    return torch.randn(
        values.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


class NoGroup:
    """The second of four ranks, on the meta device: nothing is sent."""

    group_name, node_size = "none", RANKS

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return RANKS


def with_states(shape: Shape, x: dict[str, Tensor]) -> dict[str, Tensor]:
    initial, _ = STATES[shape.op]
    values, keys = (x["x"], x["B"]) if shape.op == "ssd" else (x["v"], x["k"])
    (heads, V), K = values.shape[2:], keys.shape[3]
    state = (heads, V, K) if shape.op == "ssd" else (heads, K, V)
    rng = torch.Generator().manual_seed(3)
    return x | {initial: torch.randn(len(documents_of(shape)) - 1, *state, generator=rng)}


# --- The others ------------------------------------------------------------------------------------------------------


def drawn(shape: Shape, **sizes: tuple[int, ...]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(size, generator=rng, dtype=torch.float64).to(shape.dtype)
        for n, size in sizes.items()
    }


def convolutions() -> Iterator[Shape]:
    for dtype in DTYPES:
        for W in range(1, MAX_WIDTH + 1):
            yield Shape(
                "conv1d", dtype, {"W": W, "D": 1000}, compiled=(W, dtype) in ((4, BF16), (2, FP32))
            )
        for K in (1, 6, 64, 96, 128, 256):
            here = K in (64, 128) and dtype == BF16
            yield Shape("conv1d", dtype, {"W": 4, "D": 3 * K + 72}, {"norm_dim": K}, compiled=here)


def conv1d_inputs(shape: Shape) -> dict[str, Tensor]:
    D, W = shape.dims["D"], shape.dims["W"]
    return drawn(
        shape,
        x=(1, sum(LENGTHS), D),
        weight=(D, W),
        bias=(D,),
        initial_state=(len(LENGTHS), D, W - 1),
    )


def conv1d(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    K, D = shape.options.get("norm_dim"), shape.dims["D"]
    y, final = causal_conv1d(
        **x,
        activation="silu",
        output_final_state=True,
        cu_seqlens=boundaries(list(LENGTHS)).to(x["x"].device),
        widths=[D] if K is None else [K, 2 * K, D - 3 * K],
        norm_dim=K,
        impl=impl,
    )
    return dict(zip(["y", "final", *(f"d{n}" for n in x)], gradients([torch.cat(y, -1), final], x)))


def activations() -> Iterator[Shape]:
    for dtype in DTYPES:
        for H in (8, 300, 2816):
            yield Shape(
                "swiglu",
                dtype,
                {"H": H},
                {"gate_factor": 0.5},
                compiled=dtype == BF16 and H == 2816,
            )


def swiglu_inputs(shape: Shape) -> dict[str, Tensor]:
    return drawn(shape, gate_up=(1, 77, 2 * shape.dims["H"]), weight=(16, shape.dims["H"]))


def swiglu_pass(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    return dict(
        zip(["y", *(f"d{n}" for n in x)], gradients([swiglu(**x, impl=impl, **shape.options)], x))
    )


def losses() -> Iterator[Shape]:
    for dtype in DTYPES:
        for vocab in (1, 1000, 8192, 8193, 248320):
            here = dtype == BF16 and vocab == 248320
            yield Shape("cross_entropy", dtype, {"vocab": vocab}, compiled=here)


def loss_inputs(shape: Shape) -> dict[str, Tensor]:
    return drawn(shape, x=(40, 64), weight=(shape.dims["vocab"], 64))


def loss(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    labels = torch.arange(40) * 977 % shape.dims["vocab"]
    labels[3::7] = IGNORE
    total = chunked_cross_entropy(**x, labels=labels.to(x["x"].device), chunk=32, impl=impl)
    return dict(zip(["loss", *(f"d{n}" for n in x)], gradients([total], x)))


def copies() -> Iterator[Shape]:
    for dtype in DTYPES:
        for k, D in ((1, 8), (8, 2304), (22, 1000)):
            here = (k, dtype) in ((8, BF16), (1, FP32), (22, FP16))
            yield Shape("copies", dtype, {"k": k, "D": D}, compiled=here)


def copies_inputs(shape: Shape) -> dict[str, Tensor]:
    k, D = shape.dims["k"], shape.dims["D"]
    return drawn(shape, x=(50, D)) | {
        "weights": torch.rand(50, k, generator=torch.Generator().manual_seed(1))
    }


def copies_pass(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    experts = torch.arange(50 * shape.dims["k"]).view(50, -1) * 7 % 32 - 2  # −2 and −1: elsewhere
    there = by_expert(experts.clamp(min=-1), 30, int((experts >= 0).sum()))
    there = type(there)(*(t.to(x["x"].device) for t in there))
    rows = spread(x["x"], there, impl)
    y = rows * torch.linspace(1, 2, len(rows), device=rows.device, dtype=rows.dtype)[:, None]
    COPIES.load(COPIES.implementation(impl, rows.device, rows.dtype)).top_k(
        x["weights"].detach().float(), 1
    )  # compiles
    hidden = [activate(rows, x["weights"], there, gated, impl) for gated in (False, True)]
    names = ["y", "h", "h gated", "dx", "dweights"]
    return dict(zip(names, gradients([collect(y, there, impl=impl), *hidden], x), strict=True))


def attentions() -> Iterator[Shape]:
    widths = [
        (8, 8),
        (40, 40),
        (64, 64),
        (80, 48),
        (96, 96),
        (128, 128),
        (192, 128),
        (192, 192),
        (256, 256),
    ]
    for kernel in ("flash4", "cudnn", "flash", "efficient", "tiled"):
        for D, Dv in [*widths, (512, 64)]:
            for packed in (False, True):
                dtype = FP32 if kernel == "efficient" else FP16 if D == 80 else BF16
                Hkv = 4 if D == 192 else 2
                how = {"kernel": kernel, "packed": packed}
                yield Shape("attention", dtype, {"D": D, "Dv": Dv, "Hkv": Hkv}, how)


def attention_inputs(shape: Shape) -> dict[str, Tensor]:
    D, Dv, Hkv = (shape.dims[n] for n in ("D", "Dv", "Hkv"))
    T = sum(LENGTHS) if shape.options["packed"] else 256
    return drawn(shape, q=(1, T, 4, D), k=(1, T, Hkv, D), v=(1, T, Hkv, Dv))


def attention_pass(shape: Shape, x: dict[str, Tensor], impl: str, exact: bool) -> Results:
    cu = boundaries(list(LENGTHS)).to(x["q"].device) if shape.options["packed"] else None
    original = blocks.block_kernel
    blocks.block_kernel = lambda *_: shape.options["kernel"]
    try:
        o = exact_attention(**x, cu_seqlens=cu) if exact else attention(**x, cu_seqlens=cu)
        return dict(zip(["o", *(f"d{n}" for n in x)], gradients([o], x)))
    finally:
        blocks.block_kernel = original


def attention_facts(shape: Shape) -> dict[str, int]:
    """The dims by which the rule of attention decides."""
    whole = not shape.options["packed"]
    dims = {n: shape.dims[n] for n in ("D", "Dv")}
    return dims | {"recurring": whole, "square": True}


# --- All of them -----------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[Callable, Callable]] = {
    **{
        op: (lambda s: with_states(s, recurrence_inputs(s, int(documents_of(s)[-1]))), recurrence)
        for op in ("kda", "gdn", "rwkv7", "ssd", "gla")
    },
    "conv1d": (conv1d_inputs, conv1d),
    "swiglu": (swiglu_inputs, swiglu_pass),
    "cross_entropy": (loss_inputs, loss),
    "copies": (copies_inputs, copies_pass),
    "attention": (attention_inputs, attention_pass),
}
KERNELS = (delta_rules, rwkv7, decays, convolutions, activations, losses, copies)
SHAPES = {str(shape): shape for make in (*KERNELS, attentions) for shape in make()}


def short_list() -> set[str]:
    """Names of one shape for each kernel and dtype: of these the first that is compiled in every run, or the middle."""
    groups: dict[tuple, list[Shape]] = {}
    for shape in SHAPES.values():
        groups.setdefault((shape.op, shape.dtype, shape.options.get("kernel")), []).append(shape)
    middles = [
        [*filter(lambda s: s.compiled, group)] or group[len(group) // 2 :]
        for group in groups.values()
    ]
    return {str(first) for first, *_ in middles}


SHORT = short_list()
OP_NAMES = FAMILIES | {
    "gla": "chunk_simple_gla",
    "conv1d": "causal_conv1d",
    "copies": "expert_copies",
    **{op: op for op in ("swiglu", "cross_entropy", "attention")},
}


def op_of(shape: Shape) -> Any:
    return OPS[OP_NAMES[shape.op]]


def results(shape: Shape, device: str, impl: str, dtype: torch.dtype | None = None) -> Results:
    """Outputs and gradients of the shape's program by `impl`, in its own precision; dtype: that of exact ones."""
    make, program = PROGRAMS[shape.op]
    x = make(shape)
    return program(
        shape, leaves({n: t.to(device, dtype) for n, t in x.items()}), impl, dtype is not None
    )
