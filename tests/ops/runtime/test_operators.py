"""Selective checkpointing: gradients to the last bit, and no kernel of an op or exchange that runs again."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.models.ours import initialised, use_methods
from tests.ops.inputs import boundaries, same
from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.mixers import GDN, KDA, MLA, Attention
from titan_linear.models.mixers.attention import AttentionMixer
from titan_linear.models.mixers.mla import MLAMixer
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import build_cp_context
from titan_linear.ops.runtime.operators import contexts, kept
from titan_linear.ops.torch import attention, chunked
from titan_linear.ops.triton import rules
from titan_linear.ops.triton.tiles import Kernel

LENGTHS = [5, 70, 37]  # of 112 tokens: one document crosses the cut of two ranks
FEW = [3, 66]  # for the interpreter, which is slow
# which selective checkpointing computes again, as all that is elementwise
AGAIN = ("activation_kernel",)
MIXERS = {
    "kda": KDA(heads=2, v_heads=2, head_dim=32, v_head_dim=32),
    "gdn": GDN(heads=2, v_heads=2, head_dim=32, v_head_dim=32),
    "attention": Attention(heads=4, kv_heads=2, head_dim=8, qk_norm="head", output_gate=True),
    "mla": MLA(heads=2, kv_rank=16, nope_dim=16, shared_k_dim=16, v_dim=32),
    "kda, one head": KDA(heads=1, v_heads=1, head_dim=32, v_head_dim=32),
    "gdn, one head": GDN(heads=1, v_heads=1, head_dim=32, v_head_dim=32),
}
MOE = MoEConfig(num_experts=4, top_k=2, hidden_dim=16, balance_coefficient=0.1)
EXCHANGES = (
    "all_to_all_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "batch_isend_irecv",
    "all_reduce",
)


def checkpointed(mode, block, *x):
    if mode == "none":
        return block(*x)
    copied = hasattr(block.forward, "_torchdynamo_orig_callable")
    keeping = partial(contexts, copied=copied, mode=mode)
    return checkpoint(block, *x, use_reentrant=False, preserve_rng_state=False, context_fn=keeping)


def block_of(mixer, dtype, moe=None, impl="auto"):
    config = ModelConfig(
        vocab_size=8, dim=32, pattern=(MIXERS[mixer],), num_layers=1, hidden_dim=32, moe=moe
    )
    model = initialised(config, dtype=dtype).use(impl, torch.device("cpu"), dtype)
    return model.layers[0]


def counting(patch):
    """Of kernels and exchanges, from here on."""
    counts = Counter()

    def count(owner, name, label):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[label(*args)] += 1
            return original(*args, **kwargs)

        patch.setattr(owner, name, counted)

    count(Kernel, "__getitem__", lambda kernel, _: kernel.__name__)
    count(chunked.TorchRule, "__init__", lambda *_: "prepare")
    count(chunked, "scan", lambda *_: "scan")
    count(attention, "attend_spans", lambda *_: "attention")
    for name in EXCHANGES:
        count(dist, name, lambda *_, name=name: name)
    return counts


def plan_of(*, lengths=LENGTHS, group=None, layout="contiguous", **_):
    ranks = {"group": group} if group is not None else {"rank": 0, "world_size": 1}
    context = build_cp_context(boundaries(lengths), conv1d_kernel_size=4, layout=layout, **ranks)
    context.mark_dynamic()  # as a compiled run does
    plan = BatchPlan(context.position_ids, cp_context=context)
    plan.prepare([m.rotary for m in MIXERS.values() if m.rotary is not None], torch.float64)
    return plan


def results(mode, block, dtype, **cut):
    """Output, gradients, and the work of forward and backward."""
    use_methods([block.mixer], **cut)
    plan = plan_of(**cut)  # a plan of its own: the first layer that asks derives tables
    x = torch.randn(
        1, len(plan.position_ids), 32, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    patch = pytest.MonkeyPatch()
    counts = counting(patch)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            y, balance, _ = checkpointed(mode, block, x.requires_grad_(), plan)
            loss = y.square().sum() + (0 if balance is None else balance)
            return [y, *torch.autograd.grad(loss, [x, *block.parameters()])], counts
    finally:
        patch.undo()


def compare(block, dtype, again=(), **cut):
    """again: kernels that cost too little to keep what they gave; cut: of `plan_of`. In mode "attention" all runs
    again, as in "full", but softmax attention."""
    modes = ("none", "selective", "attention", "full")
    (want, plain), *others = (results(mode, block, dtype, **cut) for mode in modes)
    selective, attention, full = (counts for _, counts in others)
    assert all(torch.equal(a, b) for got, _ in others for a, b in zip(got, want, strict=True))
    assert plain and selective == plain + Counter(again)
    assert plain < full and attention["attention"] == plain["attention"]
    assert (
        attention < full
        if isinstance(block.mixer, AttentionMixer | MLAMixer)
        else attention == full
    )


@pytest.mark.parametrize("mixer", ["kda", "gdn", "attention", "mla"])
def test_in_pytorch(mixer):
    block = block_of(mixer, torch.float64)
    compare(block, torch.float64)


@pytest.mark.parametrize("mixer, segments", [("kda", False), ("gdn", False), ("kda", True)])
def test_kernels(mixer, segments, monkeypatch):
    if segments:
        monkeypatch.setattr(rules, "segment_length", lambda *_: 64)
    block = block_of(f"{mixer}, one head", torch.float32, impl="triton")
    compare(block, torch.float32, AGAIN, lengths=FEW)


@pytest.mark.parametrize("mixer", ["kda", "attention"])
def test_compiled(mixer):
    """The rule's chunks alone are prepared again: compiled code does not see a call of it as a whole."""
    name, dtype = ("kda, one head", torch.float32) if mixer == "kda" else (mixer, torch.float64)
    block = block_of(name, dtype, impl="triton" if mixer == "kda" else "auto")
    block.forward = torch.compile(block.forward, backend="aot_eager")
    cut = {"lengths": FEW} if mixer == "kda" else {}
    # which keeps all that costs much
    kept_most = {"kda": "selective", "attention": "attention"}[mixer]
    (want, plain), (got, other) = (
        results(mode, block, dtype, **cut) for mode in ("none", kept_most)
    )
    assert same(got, want)
    again = Counter(("prepare_kernel", "solve_kernel", *AGAIN)) if mixer == "kda" else Counter()
    assert plain and other == plain + again


CASES = [
    ("kda", "contiguous", {}),
    ("gdn", "zigzag", {}),
    ("kda", "contiguous", {"linear_method": "ulysses"}),
    *(("attention", "zigzag", {"softmax_method": method}) for method in ("ring", "ulysses")),
    # of these documents, zig-zag ranks need no keys of each other
    ("attention", "contiguous", {"softmax_method": "allgather"}),
]


def on_rank(rank, world_size):
    for mixer, layout, methods in CASES:
        moe = MOE if mixer == "gdn" else None
        block = block_of(mixer, torch.float64, moe)
        compare(block, torch.float64, group=dist.group.WORLD, layout=layout, **methods)


def test_exchanges_between_ranks(worlds):
    worlds(2).run(on_rank)


# --- The mechanism ---------------------------------------------------------------------------------------------------


@kept
def doubled(x, calls):
    calls.append(1)
    return tripled(2 * x, calls)


@kept
def tripled(x, calls):
    calls.append(1)
    return 3 * x, None


def run_once(calls):
    first, again = contexts()
    with first:
        out, _ = doubled(torch.ones(2), calls)
    return again, out


def test_a_kept_result_comes_again_once():
    calls = []
    again, out = run_once(calls)
    assert len(calls) == 2 and again.region.nbytes == 8  # what a kept function calls is part of it
    with again:
        second, nothing = doubled(torch.zeros(2), calls)
        assert (
            torch.equal(second, out) and second is not out and nothing is None and len(calls) == 2
        )
        with pytest.raises(RuntimeError, match="runs once"):
            doubled(torch.zeros(2), calls)
    assert doubled(torch.ones(1), calls)[0] == 6  # outside of a region


def test_what_is_not_the_same_is_noticed():
    again, out = run_once([])
    with again, pytest.raises(AssertionError, match="tripled is called where doubled was"):
        tripled(torch.zeros(2), [])
    again, out = run_once([])
    out.add_(1)
    with again, pytest.raises(AssertionError, match="doubled gave was changed in place"):
        doubled(torch.zeros(2), [])


def test_nothing_is_kept_without_gradients():
    calls = []
    regions = []

    def noted():
        regions.append(contexts())
        return regions[-1]

    with torch.no_grad():
        checkpoint(doubled, torch.ones(2), calls, use_reentrant=False, context_fn=noted)
    assert len(calls) == 2 and all(run.region.nbytes == 0 for pair in regions for run in pair)
