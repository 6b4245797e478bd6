"""What a batch decides is derived once: layers only read it, forward and backward, compiled or not."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.dispatch import Inside
from tests.models.ours import loss_of, use_methods
from tests.ops.inputs import boundaries
from titan_linear.config import Parallelism
from titan_linear.data import Batch
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.one_process import run_ranks
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.tensor_parallel import apply_tp
from titan_linear.models.config import MixerOptions, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import GDN, KDA, MLA, RWKV7, Attention, Lightning, Mamba2, ShortConv
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.ops import build_cp_context
from titan_linear.ops.attention import pairs_computed
from titan_linear.ops.convolution import lay_out
from titan_linear.ops.layout import build_context
from titan_linear.ops.layout.boundaries import CHUNK, Boundaries
from titan_linear.ops.layout.context import SOFTMAX_METHODS
from titan_linear.ops.layout.tables import to_device
from titan_linear.step.cut import BatchSharding

DOCUMENTS = [[64], [5, 20, 20, 19], [32, 32]]  # one that crosses the cut of two ranks, some, none
VALIDATION = [[20, 44]]  # without gradients
MIXERS: dict[str, MixerOptions] = {
    "kda": KDA(heads=1, v_heads=1, head_dim=32, v_head_dim=32),
    "gdn": GDN(heads=1, v_heads=1, head_dim=32, v_head_dim=32),
    "mamba2": Mamba2(heads=2, head_dim=32, state_dim=16, groups=2),
    "rwkv7": RWKV7(heads=2, head_dim=32, w_rank=8, a_rank=8, v_rank=8, g_rank=8),
    "lightning": Lightning(heads=2, head_dim=32),
    "short_conv": ShortConv(channels=32, conv_size=4),
    "attention": Attention(heads=4, kv_heads=2, head_dim=32, qk_norm="head"),
    "mla": MLA(heads=2, kv_rank=16, nope_dim=16, shared_k_dim=16, v_dim=32),
}
OTHERS = {
    "wide norms": replace(MIXERS["attention"], qk_norm="width"),
    "two heads": replace(MIXERS["kda"], heads=2, v_heads=2),
}
aten = torch.ops.aten


def blocks_of(mixer, device, layers, tp=1, impl="auto"):
    pattern = ((MIXERS | OTHERS)[mixer],)
    model = Decoder(
        ModelConfig(vocab_size=8, dim=32, pattern=pattern, num_layers=layers, hidden_dim=32)
    ).to(device)
    initialise(model.use(impl, device, torch.float32), seed=0)
    if tp > 1:
        apply_tp(model, build_mesh(device.type, 1, 1, 1, tp).tp_ranks)
    return list(model.layers)


def plan_of(
    lengths,
    device,
    group,
    *,
    layout="contiguous",
    linear_method="kcp",
    W=4,
    **_,
):
    """For this rank; dimensions that count documents are marked, as a compiled run marks them."""
    ranks = {"group": group} if group is not None else {"rank": 0, "world_size": 1}
    over_heads = linear_method == "ulysses"
    cp_context = build_cp_context(
        boundaries(lengths),
        conv1d_kernel_size=W,
        layout=layout,
        device=device,
        stream_programs=() if over_heads else None,
        **ranks,
    )
    pairs = pairs_computed(cp_context, "ring")
    plan = BatchPlan(cp_context.position_ids, cp_context=cp_context, pairs=pairs)
    plan.prepare([m.rotary for m in MIXERS.values() if m.rotary is not None], torch.float32)
    cp_context.mark_dynamic()
    return plan


class HostWork(Inside):
    """Counts what makes the host build or wait: tensors made of Python's numbers, numbers read from tensors, and, where
    there is another device, tensors on the CPU and copies from one to the other."""

    def __init__(self, device):
        super().__init__()
        self.device, self.seen = device, Counter()

    def ran(self, op, args, kwargs, out):
        # one without dimensions is a number
        inputs = [x for x in args if isinstance(x, Tensor) and x.dim()]
        devices = {x.device.type for x in (*inputs, out) if isinstance(x, Tensor)}
        if op in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            self.seen["built"] += 1
        reads = op in (aten._local_scalar_dense.default, aten.item.default)
        if reads and self.device.type != "cpu" and args[0].device.type != "cpu":
            self.seen["read"] += 1
        if self.device.type != "cpu" and "cpu" in devices and op not in ON_HOST:
            self.seen[str(op)] += 1


@contextmanager
def work_on_host(device):
    """Of `HostWork`, and what no dispatch mode sees: tensors that are arrays. But for what PyTorch's implementations,
    which loop over entries on the host, derive there for all layers."""
    work, make, derived = HostWork(device), torch.from_numpy, Boundaries.derived

    def from_numpy(array):
        work.seen["built"] += 1
        return make(array)

    def derive(boundaries, make, *args):
        before, made = work.seen.copy(), derived(boundaries, make, *args)
        if device.type == "cpu" and (
            make is lay_out or make.__module__.startswith("titan_linear.ops.torch.")
        ):
            work.seen.clear()
            work.seen.update(before)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", from_numpy)
        patch.setattr(Boundaries, "derived", derive)
        with work:
            yield work.seen


# Views of tables that are on the CPU, and numbers read from there.
ON_HOST = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.detach.default,
    aten.view.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}


def host_work(mixer, device, group, **methods):
    """Of the first layer of each kind that reads a plan, forward and backward, in a process in which another plan was
    read."""
    options = (MIXERS | OTHERS)[mixer]
    blocks, W = (
        blocks_of(mixer, device, 1 if options.first == options else 2),
        options.ops.get("causal_conv1d", {}),
    )
    use_methods([block.mixer for block in blocks], **methods)
    for mode in (nullcontext(), work_on_host(device)):
        plan = plan_of([5, 20, 20, 19], device, group, **methods, **W)
        x = torch.randn(1, plan.cp_context.cut.tokens, 32, device=device, requires_grad=True)
        with mode as seen, torch.autograd.set_multithreading_enabled(False):
            y, values = x, None
            for block in blocks:
                y, _, values = block(y, plan, None, values)
            torch.autograd.grad(
                y.square().sum(), [x, *(p for block in blocks for p in block.parameters())]
            )
    return seen


def on_rank(rank, world_size, device, cases):
    where = (
        torch.device(device, torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device)
    )
    return [host_work(mixer, where, dist.group.WORLD, **methods) for mixer, methods in cases]


SPLIT = [
    (mixer, {**methods, "layout": layout})
    for layout in ("contiguous", "zigzag")
    for mixer, methods in (
        ("kda", {}),
        ("gdn", {}),
        ("mamba2", {}),
        ("mamba2", {"linear_method": "ulysses"}),
        ("rwkv7", {}),
        ("rwkv7", {"linear_method": "ulysses"}),
        ("lightning", {}),
        ("lightning", {"linear_method": "ulysses"}),
        ("short_conv", {}),
        ("two heads", {"linear_method": "ulysses"}),
        *(("attention", {"softmax_method": method}) for method in SOFTMAX_METHODS),
        ("mla", {}),
    )
]


@pytest.mark.parametrize("mixer", MIXERS)
def test_layers_build_nothing_on_the_host(mixer):
    assert not host_work(mixer, torch.device("cpu"), None)


def test_layers_build_nothing_on_the_host_under_context_parallelism(worlds):
    for found in worlds(2).run(on_rank, "cpu", SPLIT):
        assert found == [Counter()] * len(SPLIT)


def test_fsdp_does_not_look_into_a_plan():
    """In each layer it would walk through what is there for each fragment and document."""
    plan = plan_of([5, 20, 20, 19], torch.device("cpu"), None)
    assert tree_leaves(plan) == [plan] and not is_dataclass(plan)


@pytest.mark.cuda
@pytest.mark.parametrize("mixer", MIXERS)
def test_layers_do_not_touch_the_host_of_a_gpu(mixer):
    assert not host_work(mixer, torch.device("cuda"), None)


@pytest.mark.cuda(2)
def test_layers_do_not_touch_the_host_of_two_gpus(worlds):
    for found in worlds(2, "nccl").run(on_rank, "cuda", SPLIT):
        assert found == [Counter()] * len(SPLIT)


@pytest.mark.parametrize("build", ["tensor", "as_tensor", "from_numpy"])
def test_what_the_host_does_is_seen(build):
    """The counting can fail."""
    array = np.arange(2)
    with work_on_host(torch.device("cpu")) as seen:
        getattr(torch, build)(array)
    assert seen["built"]


def compiled(rank, world_size, mixer, methods, impl="auto", tp=1):
    """Graphs compiled for each kind of block and all document lists, with gradients and then without, and the largest
    differences of outputs and gradients from eager."""
    device = torch.device("cpu")
    takes = (MIXERS | OTHERS)[mixer].takes  # from another layer
    blocks = blocks_of(mixer, device, 1 if impl == "triton" and not takes else 2, tp, impl)
    use_methods([block.mixer for block in blocks], **methods)
    parameters = [p for block in blocks for p in block.parameters()]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast, errors = (
        [torch.compile(block.forward, backend="aot_eager", fullgraph=True) for block in blocks],
        [],
    )
    graphs = []
    lists = DOCUMENTS[: 2 if impl == "triton" else 3]  # kernels take long here
    for documents, grad in ((lists, True), (VALIDATION, False)):
        for lengths in documents:
            W = (MIXERS | OTHERS)[mixer].ops.get("causal_conv1d", {})
            plan = plan_of(
                lengths, device, dist.group.WORLD if world_size > tp else None, **methods, **W
            )
            tokens = plan.cp_context.cut.tokens // (tp if grad else 1)
            x = torch.randn(
                1, tokens, 32, generator=torch.Generator().manual_seed(rank)
            ).requires_grad_(grad)
            results = []
            for forwards in (blocks, fast):
                with torch.set_grad_enabled(grad):
                    y, values = x, None
                    for forward in forwards:
                        y, _, values = forward(y, plan, None, values)
                results.append(
                    [y, *(torch.autograd.grad(y.square().sum(), [x, *parameters]) if grad else ())]
                )
            errors.append(
                max((a - b).detach().abs().max().item() for a, b in zip(*results, strict=True))
            )
        kinds = {block.options for block in blocks}
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] / len(kinds))
    return graphs, errors


@pytest.mark.parametrize(
    ("mixer", "methods", "impl"),
    [
        ("kda", {}, "triton"),
        ("rwkv7", {}, "triton"),
        ("attention", {"softmax_method": "ring"}, "auto"),
        ("attention", {"softmax_method": "allgather"}, "auto"),
        ("attention", {"softmax_method": "ulysses+ring"}, "auto"),
        ("mla", {}, "auto"),
    ],
)
def test_a_block_compiles_once_under_context_parallelism(worlds, mixer, methods, impl):
    """Without a break in the graph, and once for all documents, with gradients or without: in the operators the tables
    are tensors."""
    for graphs, errors in worlds(2).run(compiled, mixer, methods, impl):
        assert graphs == [1, 2] and max(errors) < 1e-5


def test_a_block_compiles_once_under_tensor_parallelism(worlds):
    for graphs, errors in worlds(2).run(compiled, "wide norms", {}, "auto", 2):
        assert graphs == [1, 2] and max(errors) < 1e-5


def options_of(layout, softmax_method, linear_method="kcp", **options):
    parallelism = Parallelism(
        context_parallel_layout=layout,
        context_parallel_method=softmax_method,
        context_parallel_linear_method=linear_method,
    )
    return SessionOptions(parallelism=parallelism, **options)


def test_scans_of_gpus_are_planned_for():
    """Programs of a scan over one document: a rank's value heads, of columns that the kernels have, in blocks of 64;
    with an all-to-all over heads they are of the whole stream."""
    methods = {"layout": "contiguous", "softmax_method": "auto"}
    for model, tp, cp, linear, programs in (
        (preset("kda", "340M"), 1, 1, "kcp", (16,)),
        (preset("kda", "340M"), 1, 1, "ulysses", (16,)),
        (preset("hybrid", "1.3B"), 2, 2, "kcp", (16,)),
        (preset("hybrid", "1.3B"), 2, 2, "ulysses", (8,)),
        (preset("olmo-hybrid", "7B"), 1, 1, "kcp", (90,)),
        (preset("rwkv7", "0.4B"), 1, 1, "kcp", (16,)),
    ):
        over_heads = cp > 1 and linear == "ulysses"
        for device, expected in (("cuda", programs), ("cpu", ())):
            dims = SimpleNamespace(tp=tp, cp=cp, cp_group=None)
            options = options_of(linear_method=linear, **methods)
            sharding = BatchSharding.of(model, dims, options, torch.device(device))
            assert sharding.programs == (() if over_heads else expected)
            assert sharding.stream_programs == (expected if over_heads else None)


@pytest.mark.parametrize(
    ("methods", "tokens", "said"),
    [
        ({"softmax_method": "auto", "layout": "contiguous"}, 2**20, True),
        ({"softmax_method": "auto", "layout": "contiguous"}, 2**21, True),
        ({"softmax_method": "auto", "layout": "zigzag"}, 2**20, False),
        ({"softmax_method": "auto", "layout": "zigzag"}, 2**21, False),
        ({"softmax_method": "ring", "layout": "contiguous"}, 2**15, True),
        ({"softmax_method": "allgather", "layout": "contiguous"}, 2**15, True),
        ({"softmax_method": "allgather", "layout": "zigzag"}, 2**15, False),
    ],
)
def test_a_run_says_where_ranks_wait(methods, tokens, said):
    """Four ranks do not divide 30 heads: "auto" gathers keys while one head's fit, then takes the ring."""
    model, dims = preset("olmo-hybrid", "7B"), SimpleNamespace(tp=1, cp=4, cp_group=None)
    options = options_of(**methods, compute_dtype=torch.bfloat16)
    sharding = BatchSharding.of(model, dims, options, torch.device("cpu"))
    line = sharding.uneven(tokens) or ""
    assert (
        ("1.75 times" in line and 'context_parallel_layout = "zigzag"' in line)
        == said
        == bool(line)
    )


@pytest.mark.parametrize(
    ("kinds", "cp", "method", "planned"),
    [
        (("kda", "gdn"), 2, "auto", set()),
        (("kda", "gdn"), 2, "ring", set()),
        (("attention",), 1, "auto", set()),
        (("attention",), 1, "ring", set()),
        (("kda", "attention"), 2, "auto", set()),  # ulysses
        (("kda", "attention"), 2, "allgather", {"allgather"}),
        (("kda", "attention"), 2, "ring", {"ring"}),
        (("kda", "attention"), 2, "ulysses+ring", {"ulysses+ring"}),
        (("three heads",), 2, "auto", {"allgather"}),
        (("attention", "three heads"), 2, "auto", {"allgather"}),  # ulysses, too
    ],
)
def test_a_batch_is_planned_for_what_its_layers_read(kinds, cp, method, planned):
    """And forward and backward read nothing else, nor do the pairs that metrics count differ."""
    three = {"three heads": Attention(heads=3, kv_heads=3, head_dim=16)}
    pattern = tuple((MIXERS | three)[kind] for kind in kinds)
    model = ModelConfig(
        vocab_size=64, dim=32, pattern=pattern, num_layers=len(pattern), hidden_dim=32
    )
    tokens, cu = torch.arange(64)[None], boundaries([40, 24])
    batch = Batch(tokens, tokens, cu, torch.zeros_like(tokens), 1, (0,), {})

    def on_rank(group):
        options = options_of(layout="zigzag", softmax_method=method)
        dims = SimpleNamespace(tp=1, cp=cp, cp_group=group)
        sharding = BatchSharding.of(model, dims, options, torch.device("cpu"))
        micro = sharding(batch)
        mine, labels, plan = micro.tokens, micro.labels, micro.plan
        of = plan.cp_context.softmax
        tables = {"ring": of.ring, "allgather": of.allgather, "ulysses+ring": of.nodes}
        assert {name for name, x in tables.items() if x is not None} == planned
        whole, used = (
            build_cp_context(cu, group, layout="zigzag" if cp > 1 else "contiguous"),
            sharding.methods(64),
        )
        assert plan.pairs == (
            pairs_computed(whole, used[0] if used else "ring") if sharding.softmax else 0
        )
        decoder = Decoder(model)
        initialise(decoder, seed=0)
        decoder(mine, plan, loss=loss_of(labels)).backward()

    run_ranks(on_rank, cp)


def test_the_whole_stream_is_planned_for():
    """In one copy with the rest: what an all-to-all over heads reads, with chunks and segments for linear layers."""
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build_context, "to_device", lambda *tree: copies.append(tree) or to_device(*tree)
        )
        for layout in ("contiguous", "zigzag"):
            split = {"rank": 1, "world_size": 2, "layout": layout, "attention": ()}
            plans = [
                build_cp_context(boundaries([4000, 96]), stream_programs=n, **split)
                for n in (None, (), (8,))
            ]
            for stream, chunks, segments in zip(
                (p.stream for p in plans), ([], [CHUNK], [CHUNK]), ([], [], [8])
            ):
                assert (
                    stream.cu_seqlens.tolist() == stream.cu_seqlens_cpu.tolist() == [0, 4000, 4096]
                )
                assert (
                    stream.longest == 4000
                    and [*stream.chunks] == chunks
                    and [*stream.segments] == segments
                )
            assert plans[2].stream.segments[8].cu_seqlens[-1] == 4096
    assert len(copies) == 6
