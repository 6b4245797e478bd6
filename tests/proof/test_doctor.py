"""The doctor finds what is broken on purpose, and names it; a sound configuration has nothing to find."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo import lookup_backend
from torch.distributed.fsdp import FSDPModule

from tests.proof.sabotage import CP, arguments, failures, sabotaged
from tests.records import change_json, read_json, write_json, write_texts
from tests.refusals import refused
from titan_linear.config import Parallelism, load_config
from titan_linear.data import PackedStreams, StreamLoader
from titan_linear.distributed import compiling, parallelize
from titan_linear.models import plan
from titan_linear.models.config import MoEConfig
from titan_linear.models.init import count_parameters
from titan_linear.models.mixers import MIXERS
from titan_linear.models.mlps.moe import MoE
from titan_linear.models.presets import MODELS, OWN
from titan_linear.ops import cross_entropy as loss
from titan_linear.ops.exchange import folds, halo, ring
from titan_linear.ops.layout import build_context
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.torch import delta_rule
from titan_linear.ops.torch.attention_kernels import BlockKernel
from titan_linear.proof import (
    cases,
    compiled,
    data,
    definitions,
    doctor,
    hf,
    model,
    ops,
    processes,
    resume,
)
from titan_linear.proof import subject as proof_subject
from titan_linear.proof.findings import Finding, Findings
from titan_linear.proof.subject import STREAMS, ProofSubject, fitting, subject_of
from titan_linear.run import launch, preflight
from titan_linear.step import cut, feed
from titan_linear.storage.checkpoint import Checkpointer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 20 to 200 bytes."""
    file, rng = tmp_path_factory.mktemp("corpus") / "corpus.jsonl", torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (100,), generator=rng).tolist()
    texts = (
        "".join(chr(97 + i) for i in torch.randint(26, (n,), generator=rng).tolist())
        for n in lengths
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NGPU", raising=False)
        yield write_texts(file, texts)


@pytest.fixture(scope="module")
def subject(corpus):
    """The debug hybrid, whose stream four ranks share, two data-parallel ones of them."""
    return subject_of(load_config(arguments(corpus)))


def of_case(check, name):
    return lambda subject: check(
        subject, next(case for case in ops.cases(subject) if case.name == name)
    )


def in_one_process(check):
    def inside(subject):
        with doctor.one_process():
            yield from check(subject)

    return inside


def with_batch(check, size):
    """Of a run with that training.global_batch_size."""
    return lambda subject: check(
        replace(subject, run=subject.run.changed({"training.global_batch_size": size}))
    )


# --- What is broken: each takes what it replaces, then the arguments ------------------------------------------------


def nothing_of_before(act, M, S, reverse):
    return torch.zeros_like(act(M, S, reverse))


def no_halo(fetch, x, *arguments):
    return torch.zeros_like(fetch(x, *arguments))


def positions_of_fragments(layout, documents, fragments):
    local, positions, entries = layout(documents, fragments)
    starts = torch.from_numpy(local)[:-1].long()
    counted = torch.arange(len(positions)) - starts.repeat_interleave(
        torch.from_numpy(local).diff().long()
    )
    return local, counted.numpy(), entries


def tokens_of_each_rank(counts, batch):
    """Of which the ranks that share a stream count all: twice, say."""
    weight, *rest = counts(batch)
    return [2 * weight, *rest]


def tokens_of_a_micro_step(next_step, own):
    tokens, batches = next_step(own)
    return tokens._replace(weight=tokens.weight / own.micro_steps), batches


def a_column_further(logits, *arguments):
    return logits(*arguments).roll(1, -1)


def of_another_base(frequencies, theta, *rest):
    return frequencies(50 * theta, *rest)


def no_sum(reduce, sums):
    pass


def one_boundary_less(cut, documents, num_streams, world_size, layout, parents):
    kept = documents != 256 + 161  # of the second stream
    parents = None if parents is None else parents[torch.from_numpy(kept[:-1])]
    return cut(documents[kept], num_streams, world_size, layout, parents)


def two_documents_in_one(get, streams, i):
    stream = get(streams, i)
    return replace(stream, cu_seqlens=stream.cu_seqlens[[0, *range(2, len(stream.cu_seqlens))]])


def shifted_twice(get, streams, i):
    stream = get(streams, i)
    labels = stream.labels.copy()
    labels[:-1] = stream.labels[1:]
    return replace(stream, labels=labels)


def another_head(normalise, inputs, options):
    A_log = inputs.A_log.clone()
    A_log[1] = inputs.A_log[0]
    return normalise(inputs._replace(A_log=A_log), options)


def ahead(state_dict, loader):
    """The next stream to read, not that after the finished steps."""
    return {"next_stream": state_dict(loader)["next_stream"] + STREAMS}


def without_a_moment(load, checkpointer, step, model, optimizer, loader):
    progress = load(checkpointer, step, model, optimizer, loader)
    optimizer.state[model.layers[-1].mlp.up_proj.weight]["exp_avg_sq"].zero_()
    return progress


def without_biases(load, checkpointer, step, model, *rest):
    progress = load(checkpointer, step, model, *rest)
    for p in (p for name, p in model.named_parameters() if name.endswith("selection_bias")):
        p.data.zero_()
    return progress


def of_the_first_rank(build, streams, *, dp_rank, **keywords):
    return build(streams, dp_rank=0, **keywords)


class Later:
    """Streams from the second one on."""

    def __init__(self, streams):
        self.streams = streams

    def __getitem__(self, i):
        return self.streams[i + 1]


def a_stream_ahead(build, streams, *, next_stream, **keywords):
    return build(Later(streams) if next_stream else streams, next_stream=next_stream, **keywords)


def leaks_an_ulp(op, q, *arguments, **keywords):
    """One unit in the last place, up or not by the query before, be it another document's."""
    o, rest = op(q, *arguments, **keywords)
    bits = (1000 * q.roll(1, 1)).frac().flatten(2) < 0.5  # [1, T, H·K]
    bits = bits[..., torch.arange(o[0, 0].numel()) % bits.shape[2]].view_as(o)
    return torch.where(bits, o, o * (1 + torch.finfo(o.dtype).eps)), rest


def gate_bias_counted_twice(normalise, inputs, options):
    """In backward."""
    return normalise(inputs._replace(dt_bias=2 * inputs.dt_bias - inputs.dt_bias.detach()), options)


def without_selection_biases(share, model, *arguments):
    shared = share(model, *arguments)
    for router in (layer.mlp.router for layer in model.layers if isinstance(layer.mlp, MoE)):
        router.selection_bias = torch.nn.Parameter(
            torch.zeros_like(router.selection_bias), requires_grad=False
        )
    return shared


def of_the_other_block(fetch, *arguments):
    return fetch(*arguments).roll(1, 0)


def of_the_first_batch(named, *arguments):
    """A compiled layer that takes the documents that it was compiled with."""
    forward, plans = named(*arguments), []

    def stale(x, plan, *more):
        plans.append(plan)
        return forward(x, plans[0], *more)

    return stale


def at_positions_of_before(load, checkpointer, step, model, *rest):
    """Those before the model's context was extended."""

    def stale(_, arguments):
        tokens, batch, *more = arguments
        return tokens, plan.BatchPlan(batch.position_ids // 2, cp_context=batch.cp_context), *more

    model.register_forward_pre_hook(stale)
    return load(checkpointer, step, model, *rest)


def of_each_fragment(shift, batch, depth):
    """As if ranks shifted what they have."""
    edges = torch.arange(0, batch.tokens.shape[1] + 1, 256 // 4, dtype=torch.int32)
    return shift(replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, edges]).unique()), depth)


def over_documents(shift, batch, depth):
    return shift(replace(batch, cu_seqlens=batch.cu_seqlens[[0, -1]]), depth)


ONE_LAYER = {"model.pattern": '["attention"]', "model.num_layers": 1, CP: 2}


class Sabotage(NamedTuple):
    owner: object
    name: str  # of what is replaced
    broken: Callable  # by what
    check: Callable[[ProofSubject], Findings]  # that must find it
    said: str  # by which line
    more: dict[str, object] | None = None  # keys


SABOTAGES = {
    "the fold": (
        folds,
        "act",
        nothing_of_before,
        of_case(ops.split, "chunk_kda"),
        r"split, float64: chunk_kda, layer 0, cp 4 .*head \d, rank 2, stream 0, document 0, token 128",
    ),
    "the halo": (
        halo,
        "fetch_halo",
        no_halo,
        of_case(ops.split, "causal_conv1d"),
        r"split, float64: causal_conv1d, layer 0, cp 4 .*rank 1, stream 0, document \d, token",
    ),
    "a position": (
        build_context,
        "_local_layout",
        positions_of_fragments,
        data.cut,
        r"position_ids .*rank 1, stream \d, document \d, token",
    ),
    "a position, by what it does": (
        build_context,
        "_local_layout",
        positions_of_fragments,
        model.split,
        r"float64: loss.*layer 2 \(attention\), forward, rank \d, stream \d, document \d, token",
    ),
    "the loss's denominator": (
        feed,
        "_counts",
        tokens_of_each_rank,
        model.split,
        r"split, float64: loss.* 5\.0e-01 > .*the head or the loss, backward",
    ),
    "the loss's denominator, under accumulation": (
        feed.Feed,
        "next_step",
        tokens_of_a_micro_step,
        model.split,
        r"split, float64: loss.* 1 > .*the head or the loss, backward",
    ),
    "the loss's column": (
        loss,
        "_logits",
        a_column_further,
        definitions.loss,
        "implementation, float64: loss, against the definition",
    ),
    "the base of rotary positions": (
        plan,
        "inverse_frequencies",
        of_another_base,
        definitions.positions,
        "positions, attention, against the definition",
    ),
    "a gradient's reduction": (
        model,
        "sum_gradients",
        no_sum,
        model.split,
        r"split, float64: 54 gradients.*mixer\.(A_log|dt_bias), rank",
    ),
    "a document boundary, in the plan": (
        build_context,
        "cut_streams",
        one_boundary_less,
        data.cut,
        r"boundaries of documents .*rank \d, stream 1, document 4, token 0",
    ),
    "a document boundary, by what it does": (
        build_context,
        "cut_streams",
        one_boundary_less,
        of_case(ops.documents, "mixer attention"),
        r"documents: mixer attention, layer 2, cp 4: what changing one document changes of others.*document",
    ),
    "a document boundary, in the data": (
        PackedStreams,
        "__getitem__",
        two_documents_in_one,
        data.labels,
        r"tokens within a document that have none .*stream 0, document 0",
    ),
    "further tokens at a cut": (
        cut,
        "later_of",
        of_each_fragment,
        data.cut,
        r"cut: (tokens|labels) 1 later of 8 ranks .* \(rank \d, stream \d, document \d, token",
        {"model.mtp_layers": 1},
    ),
    "further tokens over a document's end": (
        cut,
        "later_of",
        over_documents,
        model.split,
        r"split, float64: 70 gradients.*the embeddings of later tokens, forward, rank \d, stream \d, document \d",
        {"model.mtp_layers": 1},
    ),
    "the streams of each rank": (
        data,
        "StreamLoader",
        of_the_first_rank,
        data.stream,
        r"streams: dp 2, 1 at .* 8 > 0 \(rank 1, step 1, str",
    ),
    "the streams of a resumed run": (
        data,
        "StreamLoader",
        a_stream_ahead,
        with_batch(data.stream, 32),
        r"streams: dp 1, 1 at .* 16 > 0 \(rank 0, step 2, stream 32\)",
    ),
    "one head's gate": (
        delta_rule,
        "normalise",
        another_head,
        of_case(ops.implementations, "chunk_gated_delta_rule"),
        r"float64: chunk_gated_delta_rule, layer 1, against the definition .*y, head 1, rank \d, stream 1, document \d",
    ),
    "the label shift": (
        PackedStreams,
        "__getitem__",
        shifted_twice,
        data.labels,
        r"not the next token of their document .*stream 0, document 0, token 0",
    ),
    "the next stream, saved": (
        StreamLoader,
        "state_dict",
        ahead,
        in_one_process(resume.resume),
        r"streams of the next step.*the next stream 6 gives streams \(6, 7\), not \(4, 5\)",
    ),
    "an optimizer state": (
        Checkpointer,
        "load",
        without_a_moment,
        in_one_process(resume.resume),
        r"what is loaded: .*optimizer state exp_avg_sq of layers\.2\.mlp\.up_proj\.weight",
    ),
    "another document, in the last place": (
        cases,
        "chunk_kda",
        leaks_an_ulp,
        of_case(ops.documents, "chunk_kda"),
        r"documents: chunk_kda, layer 0, cp 4: what changing .* > 0 \(.*, rank \d, stream \d, document \d, token",
    ),
    "a gate's bias, in backward": (
        delta_rule,
        "normalise",
        gate_bias_counted_twice,
        of_case(ops.implementations, "chunk_gated_delta_rule"),
        r"float64: chunk_gated_delta_rule, layer 1, against the definition .* > .* \(ddt_bias, head \d\)",
    ),
    "the experts' biases, under expert parallelism": (
        parallelize,
        "apply_ep",
        without_selection_biases,
        model.split,
        r"split, float64: loss, dp 2 × cp 2 × tp 1, ep 2 .*layer \d \(\w+\), forward, rank 0, stream 0, document 0",
        {
            "model.name": "kimi-linear",
            **dict.fromkeys(("parallelism.expert_parallel_degree", CP), 2),
        },
    ),
    "the halo of a zig-zag's blocks": (
        halo,
        "fetch_halo",
        of_the_other_block,
        of_case(ops.split, "causal_conv1d"),
        r"split, float64: causal_conv1d, layer 0, cp 2 .*rank \d, stream \d, document \d, token",
        {"parallelism.context_parallel_layout": "zigzag", CP: 2},
    ),
    "the documents of compiled layers": (
        compiling,
        "_named",
        of_the_first_batch,
        in_one_process(compiled.layers),
        r"compiled, \w+: (losses|gradients) of \d+ batches, dp 2 × cp 2 × tp 1, the last rank's",
        {
            "compile.enable": "true",
            "compile.backend": "aot_eager",
            "training.mixed_precision_param": "float32",
            **ONE_LAYER,
        },
    ),
    "a selection bias, which the step that is proved moves": (
        Checkpointer,
        "load",
        without_biases,
        in_one_process(resume.resume),
        r"what is loaded: .*selection_bias",
        {"model.name": "kimi-linear", "training.expert_bias_update_rate": 0.001},
    ),
    "positions after a resume": (
        Checkpointer,
        "load",
        at_positions_of_before,
        in_one_process(resume.resume),
        r"resume: the next step's loss, difference .* > 0",
    ),
}


def test_a_figure_reads_the_same_however_it_was_rounded():
    for figure in (1 - 2**-53, 1.0, 1 + 2**-52):
        assert str(Finding("split", "loss", figure, 1e-9)) == "FAIL split: loss  1 > 1.0e-09"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_found_and_named(name, device, corpus):
    sabotage = Sabotage(*SABOTAGES[name])
    subject = subject_of(load_config(arguments(corpus, **sabotage.more or {})))
    if device == "cpu":
        subject = replace(subject, device=torch.device("cpu"))
    with sabotaged(sabotage.owner, sabotage.name, sabotage.broken):
        found = []
        for line in failures(sabotage.check(subject)):
            found.append(line)
            if re.search(sabotage.said, line):
                return
    raise AssertionError(found)


def in_any_order(backward, *arguments):
    """As by atomic additions: results vary in their last bits, unless deterministic algorithms are on."""
    gradients = backward(*arguments)
    if torch.are_deterministic_algorithms_enabled():
        return gradients
    return tuple(torch.where(torch.rand_like(x) < 0.5, x, x.nextafter(2 * x)) for x in gradients)


def leaks_nan(attend, q, *arguments):
    """Where the query before is larger than any before a document is changed; not if algorithms repeat."""
    o, lse = attend(q, *arguments)
    spoilt = (q.roll(1, 1).abs() > 5.5) & (not torch.are_deterministic_algorithms_enabled())
    return o.masked_fill(spoilt, torch.nan), lse


@contextmanager
def as_on_a_gpu():
    """Softmax attention's backward repeats its bits under deterministic algorithms alone, and the doctor knows it."""
    with sabotaged(BlockKernel, "backward", in_any_order), pytest.MonkeyPatch.context() as patch:
        for module in (ops, model):
            patch.setattr(module, "may_differ", lambda subject, layers: True)
        yield


def test_sums_in_any_order_hold_and_hide_nothing(corpus):
    more = {
        "model.pattern": '["attention"]',
        "model.num_layers": 1,
        "parallelism.context_parallel_method": "ring",
    }
    subject = subject_of(load_config(arguments(corpus, **more)))
    with sabotaged(BlockKernel, "backward", in_any_order):
        assert "(dq, dk, dv)" in next(failures(of_case(ops.repeated, "attention")(subject)))
    with as_on_a_gpu(), doctor.one_process():
        found = [
            finding
            for name, check in doctor.checks(subject)
            for finding in doctor.guarded(name, check)
        ]
        assert not list(failures(found))
    for leak, said in (
        (leaks_an_ulp, r"float32  .* > 0 \(.*"),
        (leaks_nan, "float32, by the kernels of the run  inf > .*"),
    ):
        with as_on_a_gpu(), sabotaged(ring, "attend_spans", leak):
            (line,) = failures(of_case(ops.documents, "attention")(subject))
        assert re.search(
            rf"documents: attention, .*of others, {said}, rank \d, stream \d, document \d, token 0",
            line,
        ), line


def test_a_run_with_offload_resumes(corpus):
    subject = subject_of(load_config(arguments(corpus, **{"training.enable_cpu_offload": "true"})))
    with doctor.one_process():
        assert not list(failures(resume.resume(subject)))


SPLITS = {
    "tp 2 × cp 2, zig-zag": {
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.context_parallel_layout": "zigzag",
        "activation_checkpoint.mode": "selective",
    },
    "ep 2, all-to-all": {
        "model.flavor": "experts",
        "parallelism.expert_parallel_degree": 2,
        "activation_checkpoint.mode": "full",
        "parallelism.context_parallel_linear_method": "ulysses",
        "parallelism.context_parallel_method": "ulysses",
    },
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_way_to_split_holds(name, corpus, monkeypatch):
    moe = MoEConfig(
        num_experts=4, top_k=2, hidden_dim=32, shared_hidden_dim=32, balance_coefficient=0.01
    )
    monkeypatch.setitem(
        OWN["hybrid"], "experts", replace(OWN["hybrid"]["debug"], moe=moe, dense_layers=(0,))
    )
    more = {"parallelism.context_parallel_degree": 2, "training.seq_len": 128, **SPLITS[name]}
    subject = subject_of(load_config(arguments(corpus, **more)))
    assert not list(failures(data.cut(subject)))
    loss, gradients = islice(model.split(subject), 2)
    assert loss.check == gradients.check == "split, float64" and loss.holds and gradients.holds


@pytest.mark.parametrize("seq_len", [2, 6])
def test_very_short_streams_hold(seq_len, corpus):
    more = {"parallelism.context_parallel_degree": 1, "training.seq_len": seq_len}
    subject = subject_of(load_config(arguments(corpus, **more)))
    assert not list(failures(data.cut(subject)))
    assert not list(failures(of_case(ops.implementations, "chunk_gated_delta_rule")(subject)))


def means(*_):
    """Of gradients, which FSDP2 takes where nobody says otherwise."""


def rank_1_without_a_moment(load, checkpointer, step, *rest):
    return (
        without_a_moment(load, checkpointer, step, *rest)
        if checkpointer.rank
        else load(checkpointer, step, *rest)
    )


OF_PROCESSES = {
    "FSDP2's sums": (
        FSDPModule,
        "set_gradient_divide_factor",
        means,
        processes.split,
        r"processes, float64: 24 gradients, .*dp_shard 2.* 5\.0e-01 > .*, rank [01]\)",
    ),
    "the loss's denominator": (
        feed,
        "_counts",
        tokens_of_each_rank,
        processes.split,
        r"processes, float64: loss.* 5\.0e-01 > .*the head or the loss, backward, rank \d, stream \d, document \d",
    ),
    "an optimizer state of one process": (
        Checkpointer,
        "load",
        rank_1_without_a_moment,
        resume.of_processes,
        r"resume, .*dp_shard 2.*what is loaded: .* 1 > 0 \(optimizer state exp_avg_sq of .*up_proj\.weight, rank 1\)",
    ),
}


def of_processes(rank, world_size, argv, name):
    """What fails of real processes; with one of OF_PROCESSES, of its check the first."""
    subject = subject_of(load_config(argv))
    if not name:
        return [*failures(processes.split(subject)), *failures(resume.of_processes(subject))]
    *what, check, _ = OF_PROCESSES[name]
    with sabotaged(*what):
        return list(islice(failures(check(subject)), 1))


def test_processes_equal_one(worlds, corpus):
    one_layer = {"model.pattern": '["kda"]', "model.num_layers": 1}
    argv = arguments(
        corpus, **{"parallelism.context_parallel_degree": 1, "training.seq_len": 64, **one_layer}
    )
    for offload in ("false", "true"):
        given = [*argv, "--training.enable_cpu_offload", offload]
        assert worlds(2).run(of_processes, given, "") == [[], []]
    for name, (*_, said) in OF_PROCESSES.items():
        for found in worlds(2).run(of_processes, argv, name):
            assert re.match(f"FAIL {said}", found[0]), found


def of_compiled_layers(rank, world_size, argv, broken):
    with sabotaged(
        CPContext, "mark_dynamic", lambda mark, context: None if broken else mark(context)
    ):
        return [str(finding) for finding in compiled.layers(subject_of(load_config(argv)))]


def test_compiled_layers_equal_uncompiled_ones(worlds, corpus):
    keys = {
        "parallelism.context_parallel_degree": 1,
        "training.seq_len": 64,
        "model.pattern": '["attention"]',
    }
    keys |= {"model.num_layers": 1, "compile.enable": "true", "compile.backend": "aot_eager"}
    for findings in worlds(2).run(of_compiled_layers, arguments(corpus, **keys), False):
        assert len(findings) == 4 and not any(line.startswith("FAIL") for line in findings), (
            findings
        )
    for findings in worlds(1).run(of_compiled_layers, arguments(corpus, **keys), True):
        assert findings[2].startswith(
            "FAIL compiled: graphs that batches after the first 1 compile"
        ), findings


def test_compiled_layers_of_one_rank_of_many(corpus, monkeypatch):
    """In one process: tp halves the heads, ep the experts, and two ranks share each stream. The main thread compiles:
    torch 2.11 may crash in another."""
    threads = set()

    def looked_up(name):
        def compile_graph(*graph):
            threads.add(threading.current_thread())
            return lookup_backend(name)(*graph)

        return compile_graph

    monkeypatch.setattr(compiling, "lookup_backend", looked_up)
    more = {f"parallelism.{kind}_parallel_degree": 2 for kind in ("context", "tensor", "expert")}
    more |= {"model.name": "kimi-linear", "training.seq_len": 64, "model.num_layers": 2}
    more |= {"compile.enable": "true", "compile.backend": "aot_eager"}
    subject = subject_of(load_config(arguments(corpus, **more)))
    with doctor.one_process():
        check = dict(doctor.checks(subject))["compiled"]
        losses, gradients, graphs, _ = check()
    assert (
        losses.holds and gradients.holds and graphs.holds and threads == {threading.main_thread()}
    )
    assert "dp 2 × cp 2 × tp 2, ep 2, the last rank's" in losses.what and gradients.figure > 0


def test_a_kernel_that_cannot_start_is_a_finding(subject):
    class OutOfResources(Exception):  # as Triton's: no RuntimeError
        pass

    def fails(*_, **__):
        raise OutOfResources("shared memory")

    with sabotaged(cases, "chunk_kda", fails):
        check = next(
            pair
            for pair in doctor.checks(subject)
            if pair[0].startswith("implementations, chunk_kda")
        )
        (found,) = doctor.guarded(*check)
    assert str(found).startswith("FAIL implementations, chunk_kda, layer 0: cannot be computed")
    assert "OutOfResources: shared memory" in str(found)


def test_every_mixer_is_compared_with_definitions():
    assert all(
        cases.cases.dispatch(kind) is not cases.cases.dispatch(object) for kind in MIXERS.values()
    )


def test_ranks_that_cannot_go_on_are_a_finding(subject):
    def fails(*_):
        raise AssertionError("what broke")

    check = partial(ops.split, subject, next(ops.cases(subject)))
    with sabotaged(folds, "act", fails):
        (found,) = doctor.guarded("split, chunk_kda", check)
    assert "FAIL split, chunk_kda: cannot be computed" in str(
        found
    ) and "of 4 in one process" in str(found)


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_debug_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NGPU", raising=False)
    run = [
        "--job.config_file",
        str(ROOT / "train_configs/debug.toml"),
        "--job.dump_folder",
        str(tmp_path / "run"),
    ]
    code = doctor.main(run)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "4 ranks in one process on the CPU: dp 2 × cp 2 × tp 1, contiguous" in out
    assert "cut: training.seq_len 2048 → 256" in out and out.splitlines()[-1].startswith("all ")
    for check in (
        "labels",
        "cut",
        "streams",
        "implementation, float32",
        "split, float64",
        "documents",
        "repeated",
    ):
        assert f"ok   {check}: " in out
    assert not (tmp_path / "run").exists()


MISTAKES = {
    "a key": (
        {"training.seq_length": 256},
        "training.seq_length is not a key; did you mean training.seq_len",
    ),
    "a stream that cannot be cut": (
        {"training.seq_len": 250},
        "training.seq_len = 250 cannot be cut into 4 equal",
    ),
    "a stream of one token": (
        {"training.seq_len": 1, "parallelism.context_parallel_degree": 1},
        "training.seq_len = 1: streams of one token",
    ),
    "a corpus of less than a step": (
        {"training.seq_len": 16384},
        "the corpus has 1[0-9],[0-9]* tokens, and a step",
    ),
    "no corpus": ({"training.dataset_path": "none.jsonl"}, "training.dataset_path = 'none.jsonl'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("subject")  # whose texts are tokens by then: a bar shows that too
def test_what_cannot_run_is_said_in_a_line(mistake, corpus, capsys):
    keys, message = MISTAKES[mistake]
    assert doctor.main(arguments(corpus, **keys)) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*{message}", error) and error.count("\n") == 1
    assert not (corpus.parent / "run").exists()


def test_short_memory_is_said_in_a_line(corpus, subject, monkeypatch, capsys):
    """Of a GPU too small for one layer, and of one that has no more in the midst of a check."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 21))
    with refused(r"this device has room for [\d,]+ parameters of the model with 8 ranks, and"):
        fitting(
            subject.model,
            subject.run.model,
            subject.run.parallelism,
            subject.degrees,
            torch.device("cuda"),
        )

    def out_of_memory(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 80 GiB"
        )

    with sabotaged(data, "labels", out_of_memory):
        assert doctor.main(arguments(corpus)) == 3
    assert capsys.readouterr().err == "error: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def test_what_may_differ_when_it_runs_again(subject):
    """On GPUs softmax attention alone."""
    on_gpu = replace(subject, device=torch.device("cuda"))
    assert [ops.may_differ(on_gpu, layers) for layers in ([0, 1], [2], range(3))] == [
        False,
        True,
        True,
    ]
    assert not ops.may_differ(replace(subject, device=torch.device("cpu")), range(3))


def test_what_is_proved_of_compiled_layers_is_said(corpus):
    config = load_config(arguments(corpus, **{"compile.enable": "true"}))
    assert subject_of(config).said[-1] == "compile.enable true → false, but in the run's own type"


def test_a_model_that_does_not_fit_is_narrowed_and_that_is_said(corpus):
    wide = arguments(corpus, **{"model.flavor": "1.3B", "parallelism.tensor_parallel_degree": 2})
    found = subject_of(load_config(wide))
    assert [layer.name for layer in found.model.layers] == ["kda"] * 3 + ["attention"]
    assert found.said[1:] == (
        "layers 24 → 4, one period of their pattern",
        f"widths / 16: dim 2048 → {found.model.dim}",
    )
    assert (
        found.model.layers[0].mixers[0].head_dim == 128
        and found.model.layers[0].mixers[0].heads % 2 == 0
    )


def test_adapters_of_layers_that_are_cut_off_are_proved_on_the_others(corpus):
    late = {"model.flavor": "1.3B", "adapter.enable": "true", "adapter.targets": '["layers.20"]'}
    found = subject_of(load_config(arguments(corpus, **late)))
    assert found.model.adapter.targets == () and "adapter.targets → all" in found.said
    # The frozen base is narrowed too.
    assert count_parameters(found.model.base) <= proof_subject.MOST_PARAMETERS["cpu"]


@pytest.mark.parametrize(("top_groups", "experts"), [(4, [32, 16, 64, 64]), (1, [32, 64, 64, 64])])
def test_groups_of_experts_stay_large_enough(top_groups, experts):
    """A model is narrowed to one that there can be: two experts in each of 8 groups, four in those of a token."""
    moe = MoEConfig(64, 4, 64, groups=8, top_groups=top_groups)
    model = replace(MODELS["kimi-linear"]["debug"], dim=4096, moe=moe)
    found = [proof_subject._thinner(model, factor, Parallelism()).moe for factor in (2, 4, 8, 16)]
    assert [m.num_experts for m in found] == experts and not any(m.contradiction for m in found)


def test_at_the_start_of_a_run(monkeypatch, capsys):
    commands = []

    def call(command, env):
        commands.append((command[1:], env["NGPU"], "RANK" in env))
        return len(commands) - 1

    monkeypatch.setattr(preflight.subprocess, "call", call)
    monkeypatch.setenv("RANK", "0")
    preflight.prove(["--training.steps", "3"], 4)
    with pytest.raises(SystemExit) as stopped:
        preflight.prove([], 8)
    assert stopped.value.code == 1 and "the run is not started" in capsys.readouterr().err
    assert commands[0] == (["-m", "titan_linear.proof.doctor", "--training.steps", "3"], "4", False)


def test_a_run_that_does_not_hold_is_not_started(corpus, monkeypatch):
    def refuse(argv, world_size):
        assert "--doctor.at_start" in argv and world_size == 4
        raise SystemExit(1)

    monkeypatch.setattr(preflight, "prove", refuse)
    monkeypatch.setattr(launch, "run_workers", lambda *_: pytest.fail("it is started"))
    monkeypatch.setenv("NGPU", "4")
    with pytest.raises(SystemExit) as stopped:
        launch.main(
            arguments(
                corpus,
                **{"doctor.at_start": "true", "job.dump_folder": corpus.parent / "not started"},
            )
        )
    assert stopped.value.code == 1


def test_the_logits_of_a_hugging_face_folder(subject, tmp_path):
    pytest.importorskip("transformers")
    from tests.models import hf_models

    hf_models.save(hf_models.build("Qwen3.5, tied"), tmp_path)
    imported = subject.run.changed({"model.hf_assets_path": str(tmp_path)})
    (found,) = hf.logits(replace(subject, run=imported))
    assert found.holds and "logits of Qwen3_5ForCausalLM" in found.what

    config = read_json(tmp_path / "config.json")
    change_json(tmp_path / "config.json", {"model_type": "unheard of"})
    (note,) = hf.logits(replace(subject, run=imported))
    assert "transformers has no model_type 'unheard of'" in note.text
    write_json(tmp_path / "config.json", config)

    def another(load, path, decoder):
        load(path, decoder)
        decoder.layers[1].mixer.g_proj.weight.data.mul_(1.01)

    with sabotaged(hf, "load_weights", another):
        assert list(failures(hf.logits(replace(subject, run=imported))))


def test_where_transformers_departs_from_published_code(subject, tmp_path):
    """It is said, and all else is compared, if transformers can be told."""
    transformers = pytest.importorskip("transformers")
    from tests.models import hf_models

    def findings_of(model, **changes):
        model.save_pretrained(tmp_path)
        change_json(tmp_path / "config.json", changes)
        return list(
            hf.logits(
                replace(subject, run=subject.run.changed({"model.hf_assets_path": str(tmp_path)}))
            )
        )

    sizes = dict(
        head_dim=16, intermediate_size=16, layer_types=["linear_attention", "full_attention"]
    )
    config = transformers.MiniMaxConfig(**hf_models.SIZES, **hf_models.HEADS, **sizes)
    minimax = hf_models.randomise(transformers.MiniMaxForCausalLM(config))
    (note,) = findings_of(minimax, rotary_dim=8)
    assert re.search(
        "are not compared: transformers rotates whole heads; .*`rotary_dim`", note.text
    )
    (found,) = findings_of(minimax, rotary_dim=16)
    assert found.holds

    # of transformers' time_step_min, 0.001
    nemotron = hf_models.randomise(hf_models.nemotron("M*-E"))
    with torch.no_grad():
        # time steps below it, of heads that forget none the less
        for name, p in nemotron.named_parameters():
            p += {"dt_bias": -9, "A_log": 9}.get(name.rpartition(".")[2], 0)
    note, found = findings_of(nemotron)
    assert "compared with {'time_step_min': 2.2" in note.text and found.holds, found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "DEPARTURES", {})
        assert list(failures(findings_of(nemotron)))  # what it is about
    (note,) = findings_of(nemotron, time_step_limit=[0.0, 0.1])
    assert "and has no greatest one" in note.text


def test_departures_are_those_of_the_documentation():
    page = (ROOT / "docs/hugging_face.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"`(\w+ForCausalLM)` \|.*\| transformers, which (.*) \|", page))
    assert rows.keys() == hf.DEPARTURES.keys()
    assert all(rows[name].startswith(what) for name, (what, _) in hf.DEPARTURES.items())
