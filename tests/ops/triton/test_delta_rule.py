"""The Triton kernels behind the public functions, against the float64 oracles: in the interpreter, or on the device.

Small shapes and float32 here: the interpreter takes milliseconds for what a GPU does in microseconds, and its bfloat16
products are wrong. The numbers in bfloat16 are in test_numbers.py, for a GPU.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.ops.inputs import (
    DEVICE,
    boundaries,
    call,
    compare_four_ranks,
    device_of,
    errors,
    gradients,
    leaves,
    make_inputs,
    new_memory_of_nan,
    raw_gate_inputs,
    relative_error,
    same,
    tokens_of,
)
from tests.ops.triton.well_formed import check_stages
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import build_cp_context, causal_conv1d
from titan_linear.ops.layout import segments
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.segments import scan_programs, segment_length, segments_of_length
from titan_linear.ops.reference.delta_rule import l2norm
from titan_linear.ops.triton import chunks, rules
from titan_linear.ops.triton.gdn import GDN
from titan_linear.ops.triton.kda import KDA
from titan_linear.ops.triton.split_documents import segments_of

TOLERANCE = 2e-5  # float32 sums of up to 130 terms, through exponentials
# Gradients of A_log and dt_bias sum terms that cancel to a 200th, and show the error of 2^x: 2^-22 on a GPU, not 2^-24.
GATE_TOLERANCE = TOLERANCE * (4 if DEVICE == "cuda" else 1)


def check(op, x, cu=None, **options):
    with new_memory_of_nan():
        found = errors(op, {name: t.float() for name, t in x.items()}, cu, impl="triton", **options)
    assert all(
        e < (GATE_TOLERANCE if n in ("A_log", "dt_bias") else TOLERANCE) for n, e in found.items()
    ), found


@pytest.mark.parametrize(
    "op, raw, gate, options",
    [
        ("kda", False, "slow", {"safe_gate": True}),
        ("kda", False, "slow", {}),
        ("kda", False, "fast", {}),
        ("kda", False, "safe", {"safe_gate": True}),
        ("kda", True, "usual", {}),
        ("kda", True, "usual", {"lower_bound": -5.0}),
        ("kda", True, "usual", {"lower_bound": -5.0, "safe_gate": True}),
        ("gdn", False, "slow", {}),
        ("gdn", False, "fast", {}),
        ("gdn", True, "usual", {}),
        ("kda", False, "usual", {"disable_recompute": True}),
        ("gdn", False, "usual", {"disable_recompute": True}),
    ],
)
def test_packed_documents(op, raw, gate, options):
    lengths = [1, 70, 64]
    make = raw_gate_inputs if raw else make_inputs
    x = make(op, sum(lengths), H=1, HV=2, K=32, V=32, gate=gate)
    check(op, x, boundaries(lengths), **options)


def test_fast_gates_in_one_chunk(op):
    x = make_inputs(op, 130, H=1, HV=1, K=32, V=32)
    x["g"][:, 64:128] *= 20
    check(op, x)


@pytest.mark.parametrize("g", [-1e4, -torch.inf])
def test_a_token_that_forgets_all(op, g):
    """Gates of the tokens behind it keep their digits."""
    x = make_inputs(op, 66, H=1, HV=1, K=32, V=32, gate="slow")
    x["g"][:, 3] = g
    check(op, x)


def test_documents_in_segments(op, short_segments):
    """Segments of one or two chunks: documents of none, a part, exactly one and two and a bit; states in and out."""
    lengths = [0, 10, 64, 129]
    x = raw_gate_inputs(op, sum(lengths), H=1, HV=2, K=32, V=32, gate="slow")
    check(op, x, boundaries(lengths))


@pytest.mark.parametrize(
    "op, layout", [("kda", "contiguous"), ("gdn", "contiguous"), ("gdn", "zigzag")]
)
def test_fragments_in_segments(op, layout, short_segments):
    """Of four ranks: one document goes through two, each of them three segments, and a rank has two entries; in zig-zag
    each has two fragments of two segments. Little of the state decays on the way."""
    x = make_inputs(op, 520, H=1, HV=1, K=32, V=32, gate="slow")
    compare_four_ranks(op, x, boundaries([10, 450, 60]), layout, TOLERANCE)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("op, numbers", [("kda", [0.2, 0.0, 1.0, 1.0, 1.0]), ("gdn", [0.2, 1.0])])
def test_operators_are_well_formed(op, numbers, indexed):
    x = raw_gate_inputs(op, 70, H=1, HV=2, K=32, V=32)
    # within what KDA's last number promises
    x |= {n: l2norm(x[n]) for n in "qk"} | {"A_log": x["A_log"] - 3}
    tokens = [x[n][0].float().to(DEVICE) for n in ("q", "k", "v", "g", "beta")]
    of_heads = [x[n].float().to(DEVICE) for n in ("A_log", "dt_bias")]
    check_stages({"kda": KDA, "gdn": GDN}[op], [*tokens, *of_heads], numbers, indexed)


def test_operators_of_segments_are_well_formed():
    cu = torch.tensor([0, 0, 10, 200], dtype=torch.int32, device=DEVICE)
    ops = torch.ops.titan_linear
    torch.library.opcheck(ops.chunk_table.default, (cu, 64, 7))
    torch.library.opcheck(ops.segment_table.default, (cu, 200, 64))
    boundaries, offsets = ops.segment_table(cu, 200, 64)
    assert boundaries.tolist() == [
        0,
        0,
        10,
        74,
        138,
        *[200] * (len(boundaries) - 5),
    ] and offsets.tolist() == [
        0,
        1,
        2,
        5,
    ]
    x, M = (torch.randn(len(boundaries) - 1, 1, 32, 32, device=DEVICE) for _ in range(2))
    start, index, entries = (
        x[:2],
        torch.tensor([1, -1, 0], device=DEVICE),
        torch.tensor([2, 0], device=DEVICE),
    )
    wanted = torch.ones(len(x), dtype=torch.int32, device=DEVICE)
    for reverse in (False, True):
        torch.library.opcheck(ops.fold_segments.default, (x, M, None, None, offsets, None, reverse))
        torch.library.opcheck(
            ops.fold_segments.default, (x, M, start, index, offsets, wanted, reverse)
        )
        torch.library.opcheck(ops.fold_entries.default, (x, M, offsets, entries, wanted, reverse))
    torch.library.opcheck(ops.fold_entries_back.default, (x, M, offsets, entries))


def test_when_documents_are_split():
    assert scan_programs(64, 128) == 128 and scan_programs(2, 32) == 2
    assert segment_length(32768, 1, 128) is None  # as many programs as multiprocessors
    assert segment_length(32768, 10, 32) is None
    assert segment_length(32768, 1, 32) == 8192
    assert segment_length(2**20 + 1, 1, 16) == 131136
    assert segment_length(1000, 1, 1) is None
    assert (
        segment_length(32768, 2, 32) is None and segment_length(32768, 2, 32, joined=True) == 8192
    )
    assert (
        segment_length(32768, 1, 128, joined=True) is None
        and segment_length(2047, 2, 1, joined=True) is None
    )


def test_planned_segments_are_those_of_the_device():
    """But for surplus ones, which are empty."""
    for lengths, length in ([1, 300, 64, 200], 64), ([1000], 128), ([64, 64], 512):
        cu = boundaries(lengths)
        planned = segments_of_length(cu.numpy(), length, np.ones(len(lengths), dtype=bool))
        found = segments_of(Boundaries(cu.to(DEVICE, torch.int32)), sum(lengths), length)
        S = len(planned.entries)
        assert torch.equal(found.cu_seqlens[: S + 1].cpu(), planned.cu_seqlens)
        assert torch.equal(found.offsets.cpu(), planned.offsets)
        assert torch.equal(found.chunk_offsets[: S + 1].cpu(), planned.chunk_offsets)
        assert torch.equal(found.wanted[:S].cpu(), planned.wanted)
        rows = planned.chunk_index[: planned.chunk_offsets[-1]]
        assert torch.equal(found.chunk_index[: len(rows)].cpu(), rows)


def in_a_context(run, x, lengths, *programs):
    """The output and gradients, in float32."""
    ctx = build_cp_context(
        boundaries(lengths), rank=0, world_size=1, device=DEVICE, programs=programs
    )
    ctx.mark_dynamic()
    own = leaves({n: t.to(DEVICE, torch.float32) for n, t in x.items()})
    o, _ = run(own, cp_context=ctx)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), list(own.values()))]


def test_planned_segments(op, monkeypatch):
    """A context that planned for the scan, and one that did not: the same bits."""
    monkeypatch.setattr(segments, "segment_length", lambda *_: 64)
    monkeypatch.setattr(rules, "segment_length", lambda *_: 64)
    x = make_inputs(op, 140, H=1, HV=1, K=32, V=32, gate="slow")
    run = partial(call, op, impl="triton")
    results = [
        in_a_context(run, x, [10, 130], *programs) for programs in ((), (scan_programs(1, 32),))
    ]
    assert all(map(torch.equal, *results))


def test_a_plan_for_other_scans_is_noticed(op):
    x = make_inputs(op, 140, H=1, HV=1, K=32, V=32, gate="slow")
    with pytest.raises(AssertionError, match="no segments are planned for a scan of 1 programs"):
        in_a_context(partial(call, op, impl="triton"), x, [10, 130], 2)


def test_compiled_code_reads_planned_segments(op, monkeypatch):
    """One graph for all documents, in which no table is made."""
    monkeypatch.setattr(segments, "segment_length", lambda *_: 64)
    monkeypatch.setattr(chunks, "chunk_table", lambda *_: pytest.fail("a table is made"))
    counter = CompileCounterWithBackend("aot_eager")
    plain = partial(call, op, impl="triton")
    compiled = torch.compile(plain, backend=counter, fullgraph=True)
    x = make_inputs(op, 90, H=1, HV=1, K=32, V=32)
    for lengths in ([10, 80], [1, 24, 65]):
        results = [in_a_context(run, x, lengths, scan_programs(1, 32)) for run in (compiled, plain)]
        assert all(map(torch.equal, *results))
    assert counter.frame_count == 1


@pytest.mark.parametrize("K, V", [(64, 32), (32, 64)])
def test_batches_and_head_dims(op, K, V):
    check(op, make_inputs(op, 33, B=2, H=1, HV=1, K=K, V=V))


@pytest.mark.parametrize(
    "K, V, HV",
    [(96, 192, 1), (96, 96, 2), (40, 72, 2), (8, 8, 2), (136, 256, 2), (200, 200, 2), (33, 7, 1)],
)
def test_head_dims_that_are_filled_up(op, K, V, HV):
    """Gates and norms in the kernels, states in and out."""
    # the bounded gate takes a third of the time of the other
    lengths, wide = [5, 37], op == "kda" and K > 128
    x = raw_gate_inputs(op, sum(lengths), H=1, HV=HV, K=K, V=V)
    check(op, x, boundaries(lengths), **({"lower_bound": -5.0} if wide else {}))


def test_filled_up_heads_in_segments(op, short_segments):
    lengths = [10, 129]
    x = raw_gate_inputs(op, sum(lengths), H=1, HV=1, K=24, V=40)
    check(
        op,
        x,
        boundaries(lengths),
        disable_recompute=True,
        **({"lower_bound": -5.0} if op == "kda" else {}),
    )


def test_strided_inputs_and_expanded_gradients(op):
    """q, k and v as slices of one projection, and the gradient of a sum, whose strides are 0."""
    x = {n: t.float().to(DEVICE) for n, t in make_inputs(op, 40, H=1, HV=1, K=32, V=32).items()}
    qkv = torch.cat([x["q"], x["k"], x["v"]], -1).requires_grad_()
    results = []
    for impl in ("triton", "torch"):
        q, k, v = qkv.split(32, -1)
        o = call(op, x | {"q": q, "k": k, "v": v}, impl=impl)[0]
        results.append([o, *torch.autograd.grad(o.sum(), qkv)])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < TOLERANCE


@pytest.mark.parametrize("op, K, V", [("kda", 32, 32), ("gdn", 32, 32), ("kda", 24, 40)])
def test_compiles_without_a_break(op, K, V):
    torch._dynamo.reset()  # other dims of the same code would be symbols
    cu = torch.tensor([0, 20, 40], dtype=torch.int32, device=DEVICE)
    made = raw_gate_inputs(op, 40, H=1, HV=2, K=K, V=V, gate="usual") | {
        "initial_state": torch.randn(2, 2, K, V)
    }
    x = leaves({n: t.float().to(DEVICE) for n, t in made.items()})

    def forward(x, cu):
        return call(op, x, cu_seqlens=cu, impl="triton", output_final_state=True)

    want, got = forward(x, cu), torch.compile(forward, backend="aot_eager", fullgraph=True)(x, cu)
    for part in (slice(0, 1), slice(1, 2), slice(0, 2)):  # a loss of either output, or of both
        a, b = (
            torch.autograd.grad(
                sum(y.square().sum() for y in out[part]),
                list(x.values()),
                retain_graph=True,
                allow_unused=True,
            )
            for out in (got, want)
        )
        assert all(
            (p is None) == (q is None) and (p is None or torch.equal(p, q))
            for p, q in zip(a, b, strict=True)
        )


class Calls(TorchDispatchMode):
    """The names of this project's operators, in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "titan_linear":
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def test_selective_checkpointing_names_the_operators(op):
    """Forward's operators run again in backward unless they are saved by name; the gradients are the same."""
    x = leaves(
        {n: t.float().to(DEVICE) for n, t in make_inputs(op, 70, H=1, HV=1, K=32, V=32).items()}
    )
    names = [f"{op}_prepare", f"{op}_scan"]
    want = torch.autograd.grad(call(op, x, impl="triton")[0].sum(), list(x.values()))
    for saved in ([], names):
        ops = [getattr(torch.ops.titan_linear, name).default for name in saved]
        contexts = partial(create_selective_checkpoint_contexts, ops)
        with Calls() as calls:
            o = checkpoint(
                lambda: call(op, x, impl="triton")[0], use_reentrant=False, context_fn=contexts
            )
            got = torch.autograd.grad(o.sum(), list(x.values()))
        assert [calls.names.count(name) for name in names] == ([1, 1] if saved else [2, 2])
        assert same(got, want)


@pytest.mark.parametrize(
    "op, layout, K, V, lengths",
    [
        ("kda", "contiguous", 64, 32, [30, 226]),
        ("gdn", "zigzag", 32, 32, [30, 226]),
        ("kda", "zigzag", 40, 72, [14, 50]),
        ("gdn", "zigzag", 96, 192, [14, 50]),
    ],
)
def test_context_parallel(op, layout, K, V, lengths):
    x = make_inputs(op, sum(lengths), H=1, HV=1, K=K, V=V, gate="slow")
    compare_four_ranks(op, x, boundaries(lengths), layout, TOLERANCE)


def test_convolution_on_ranks(layout):
    """As by PyTorch's operations, which equal one process."""
    cu, rng = boundaries([30, 226]), torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 256, 8, generator=rng), torch.randn(8, 4, generator=rng)

    def on_rank(group, impl):
        device = device_of(impl)
        ctx = build_cp_context(cu, group, layout=layout, device=device)
        own = leaves({"x": x[:, tokens_of(ctx)].to(device), "weight": weight.to(device)})
        return gradients(
            [causal_conv1d(**own, cp_context=ctx, impl=impl, activation="silu")[0]], own
        )

    kernels, exact = (run_ranks(partial(on_rank, impl=impl), 4) for impl in ("triton", "torch"))
    for ours, theirs in zip(kernels, exact, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert relative_error(a.cpu(), b) < TOLERANCE


def test_what_is_not_supported_is_refused():
    x = {n: t.float().to(DEVICE) for n, t in make_inputs("kda", 8, H=1, HV=1, K=264, V=32).items()}
    with refused("K = 264"):
        call("kda", x, impl="triton")
    with refused("float64"):
        call(
            "kda",
            {n: t.to(DEVICE) for n, t in make_inputs("kda", 8, H=1, HV=1, K=32, V=32).items()},
            impl="triton",
        )
