"""Compiled layers, where FSDP2 manages them: each kind has graphs of its own, made in the first pass of its sort."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from functorch.compile import default_partition, min_cut_rematerialization_partition, nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.models.ours import initialised, loss_of
from tests.ops.inputs import boundaries
from tests.refusals import refused
from titan_linear.distributed.compiling import apply_compile, compile_kernels, compute_again
from titan_linear.distributed.tensor_parallel import apply_tp
from titan_linear.models.config import LoraConfig, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import GDN, KDA, RWKV7, Attention, Lightning
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import build_cp_context
from titan_linear.ops.exchange.collectives import Ranks
from titan_linear.ops.layout import segments
from titan_linear.ops.triton.tiles import Kernel

UNEQUAL = (
    KDA(heads=1, v_heads=1, head_dim=32, v_head_dim=32),
    Attention(heads=2, kv_heads=1, head_dim=16, rope_theta=None),
)  # of head dims that differ


def compiled_and_sharded(pattern, tp, adapter):
    config = ModelConfig(
        vocab_size=64, dim=32, num_layers=3, hidden_dim=32, pattern=pattern, adapter=adapter
    )
    model = Decoder(config)
    initialise(model.use("triton", torch.device("cpu"), torch.float32), seed=0)
    torch.compiler.reset()
    counters.clear()
    if tp.size > 1:
        apply_tp(model, tp)
    apply_compile(model, "aot_eager")
    mesh = init_device_mesh("cpu", (tp.size,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model


def graphs_of(rank, world_size, batches, shortest, pattern=UNEQUAL, adapter=None):
    """The number of graphs after each batch of (lengths of documents, with gradients), and breaks in them.

    shortest: tokens of the shortest segment into which documents are cut.
    """
    tp = Ranks(dist.group.WORLD.group_name, world_size, rank)
    model, graphs = compiled_and_sharded(pattern, tp, adapter), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SHORTEST", shortest)
        for lengths, grad in batches:
            cp = build_cp_context(
                boundaries(lengths), rank=0, world_size=1, conv1d_kernel_size=4, programs=(1, 2)
            )
            cp.mark_dynamic()
            tokens = torch.arange(sum(lengths))[None] % 64
            with torch.set_grad_enabled(grad):
                loss = model(
                    tokens, BatchPlan(cp.position_ids, cp_context=cp), loss=loss_of(tokens)
                )
            if grad:
                loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs, dict(counters["graph_break"])


def test_kinds_of_layers_with_other_head_dims(worlds):
    batches = [([100, 28], True), ([30, 40, 58], True), ([64, 64], False)]
    assert worlds(1).run(graphs_of, batches, 512) == [([2, 2, 4], {})]


def test_layers_split_over_ranks(worlds):
    batches = [([100, 28], True), ([64, 64], False)]
    pattern = (Attention(heads=2, kv_heads=2, head_dim=16, rope_theta=None, qk_norm="width"),)
    assert worlds(2).run(graphs_of, batches, 512, pattern) == [([1, 2], {})] * 2


def test_layers_with_constants_of_their_own(worlds):
    batches = [([100, 28], True), ([64, 64], False)]
    assert worlds(1).run(graphs_of, batches, 512, (Lightning(heads=2, head_dim=16),)) == [
        ([1, 2], {})
    ]


def test_batches_of_any_number_of_documents(worlds):
    """One document is cut into segments, others are not, and the graphs are those of the first batch."""
    batches = [([192], True), ([96, 96], True), ([9] * 20 + [12], True), ([64] * 3, True)]
    assert worlds(1).run(graphs_of, batches, 64) == [([2, 2, 2, 2], {})]


def test_a_layer_that_cannot_be_compiled_is_named():
    def backend(graph, inputs):
        raise RuntimeError("no room\nand more")

    model = initialised(
        ModelConfig(vocab_size=8, dim=32, num_layers=2, hidden_dim=32, pattern=UNEQUAL)
    )
    apply_compile(model, backend)
    with refused(r"layers\.0 \(kda\) cannot .* no room and more\); set compile\.enable"):
        model(torch.zeros(1, 8, dtype=torch.int64), BatchPlan(torch.arange(8)))


def test_layers_whose_inputs_and_weights_have_no_gradients(worlds):
    """As in the first layer of a frozen model, whose adapters alone are trained."""
    assert worlds(1).run(graphs_of, [([100, 28], True)], 512, UNEQUAL[:1], LoraConfig(4, 1.0)) == [
        ([2], {})
    ]


def gradient_of_other_code(rank, world_size):
    """Twice through one graph of a function of somebody else's, after layers of ours were compiled."""
    graphs_of(rank, world_size, [([20, 12], True)], shortest=64)
    x = torch.ones(4, 4, requires_grad=True)
    # products are kept for backward
    y = torch.compile(lambda x: (x @ x).sin() @ x, backend="aot_eager")(x).sum()
    return [torch.autograd.grad(y, x, retain_graph=True)[0].sum().item() for _ in range(2)]


def test_other_code_is_compiled_as_its_owner_wants(worlds):
    """The options of our layers are not those of the process: with them a backward pass could not run twice."""
    ((first, second),) = worlds(1).run(gradient_of_other_code)
    assert first == second != 0.0


def ahead(graph, inputs):
    """A backend that compiles the kernels of a layer's joint graph, and nothing else."""

    def partition(joint, *args, **kwargs):
        compile_kernels(joint.graph)
        return default_partition(joint, *args, **kwargs)

    return aot_autograd(fw_compiler=nop, partition_fn=partition)(graph, inputs)


def partitioned():
    """A backend that divides a layer's joint graph as for a GPU, and generates no code."""

    def partition(joint, *args, **kwargs):
        compute_again(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    return aot_autograd(fw_compiler=nop, partition_fn=partition)


def small(kind, num_layers, backend):
    """A model of these layers, compiled."""
    mixer = kind(heads=1, v_heads=2, head_dim=32, v_head_dim=32)
    model = Decoder(
        ModelConfig(vocab_size=64, dim=32, num_layers=num_layers, hidden_dim=32, pattern=(mixer,))
    )
    initialise(model.use("triton", torch.device("cpu"), torch.float32), seed=0)
    torch.compiler.reset()
    counters.clear()
    apply_compile(model, backend)
    return model


def planned(lengths, W=4):
    cp = build_cp_context(
        boundaries(lengths), dist.group.WORLD, conv1d_kernel_size=W, programs=(2,)
    )
    cp.mark_dynamic()
    return BatchPlan(cp.position_ids, cp_context=cp)


def launches_and_gradients(rank, world_size, kind):
    """Of three compiled layers of one kind: kernels launched in forward and backward, and graphs; gradients."""
    seen = Counter()
    run = Kernel._launch

    def note(self, grid, *args, **kwargs):
        seen[self.__name__] += 1
        run(self, grid, *args, **kwargs)

    model = small(kind, 3, partitioned())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SHORTEST", 64)
        patch.setattr(Kernel, "_launch", note)
        tokens = torch.arange(192)[None] % 64
        model(tokens, planned([192]), loss=loss_of(tokens)).backward()
    seen["graphs"] = counters["stats"]["unique_graphs"]
    return seen, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind, passes", [(KDA, 2), (GDN, 1)])
def test_chunks_are_prepared_once_in_each_pass(kind, passes, worlds):
    """GDN's in forward alone, which keeps them."""
    seen, _ = worlds(1).run(launches_and_gradients, kind)[0]
    assert (
        seen["prepare_kernel"] == passes * 3 and seen["solve_kernel"] == 3 and seen["graphs"] == 1
    )


def kept_by_rwkv7(rank, world_size):
    """Names of the results as large as x that a compiled layer keeps for backward, parameters and inputs left out."""
    kept = []

    def partition(joint, *args, **kwargs):
        compute_again(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
        saved = forward.graph.output_node().args[0][kwargs["num_fwd_outputs"] :]
        kept.extend(
            x.name for x in saved if x.op != "placeholder" and x.meta["val"].numel() >= 192 * 64
        )
        return forward, backward

    mixer = RWKV7(heads=2, head_dim=32, w_rank=8, a_rank=8, v_rank=8, g_rank=8)
    config = ModelConfig(64, 64, (mixer,), 1, 64, layer_norm=True, activation="shifted_relu2")
    model = Decoder(config)
    initialise(model.use("triton", torch.device("cpu"), torch.float32), seed=0)
    torch.compiler.reset()
    decompositions = select_decomp_table()
    apply_compile(
        model, aot_autograd(fw_compiler=nop, partition_fn=partition, decompositions=decompositions)
    )
    tokens = torch.arange(192)[None] % 64
    model(tokens, planned([100, 92], W=2), loss=loss_of(tokens))
    return kept


def test_mixes_are_computed_again(worlds):
    """Of RWKV-7's six mixes of x and its shift none is kept, nor its MLP's: products, operators and the two shifts."""
    (kept,) = worlds(1).run(kept_by_rwkv7)
    assert len(kept) <= 12, kept


def specialisation(x):
    """What of an argument a kernel is compiled for, but its alignment, which tables on the CPU need not have."""
    if isinstance(x, tuple):
        return tuple(map(specialisation, x))
    if isinstance(x, Tensor):
        return x.dtype
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    return (x == 1, x % 16 == 0) if type(x) is int else type(x)


def compiled_and_launched(rank, world_size, kind, segment):
    """Kernels with what they are specialised for: those compiled ahead, and those that the layer then launches."""
    seen = [set(), set()]
    run = Kernel._launch

    def note(self, grid, *args, **kwargs):
        on_meta = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs)))
        constants = {
            n: specialisation(x) if isinstance(x, Tensor | TensorDescriptor) else x
            for n, x in kwargs.items()
        }
        seen[0 if on_meta else 1].add(
            (self.__name__, *map(specialisation, args), *constants.items())
        )
        run(self, grid, *args, **kwargs)

    model = small(kind, 1, ahead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SHORTEST", segment)
        patch.setattr(Kernel, "_launch", note)
        x = torch.randn(1, 128 // world_size, 32, requires_grad=True)
        y, *_ = model.layers[0](x, planned([70, 20, 38]))
        y.sum().backward()
    return seen


@pytest.mark.parametrize(
    "kind, segment, ranks", [(KDA, 64, 1), (GDN, 512, 1), (KDA, 512, 2), (GDN, 64, 2)]
)
def test_kernels_are_compiled_before_their_first_launch(kind, segment, ranks, worlds):
    """All that a layer launches, forward and backward, but the fold of what came from other ranks."""
    for compiled, launched in worlds(ranks).run(compiled_and_launched, kind, segment):
        assert len(launched) >= 10 and compiled <= launched
        assert {name for name, *_ in launched - compiled} <= {"fold_kernel"}
