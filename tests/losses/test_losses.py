"""Losses: equal to their definitions, and to one process however the work is split."""

import json
import math
import random
import re
from copy import copy
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.keys import argv_of
from tests.losses import definitions as loss_definitions
from tests.losses.cases import CASES, KEYS, logprobs, taught
from tests.losses.definitions import Document
from tests.proof.sabotage import failures, sabotaged
from tests.training import SPLITS, check_equal, train_on_rank, trainer_of
from titan_linear.config import load_config
from titan_linear.data import IGNORE, PackedStreams, WholeStreams
from titan_linear.distributed.one_process import run_ranks
from titan_linear.losses import LOSSES, build_loss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.decoder import Decoder
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import cross_entropy
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics
from titan_linear.ops.exchange.collectives import Ranks
from titan_linear.proof import data, model
from titan_linear.proof.subject import subject_of
from titan_linear.step import feed

METHODS = (
    *(name for name in SPLITS if name.startswith(("cp 2 ring", "cp 2 allgather"))),
    "cp 2 all heads",
)
NAMES = ("dp 2", "cp 2 zig-zag", "cp 4", "tp 2 x cp 2 zig-zag", "HSDP", "accumulation")


def weighted(n, rng):
    """A document of n tokens whose weights differ by 10⁶; every fifth one counts nothing."""
    weights = 0 if n % 5 == 0 else [rng.choice([0, 1e-3, 0.5, 1, 1e3]) for _ in range(n)]
    return {"tokens": rng.choices(range(256), k=n), "weights": weights}


def preferred(n, rng):
    """Pairs, some of whose texts reach over three ranks; every fifth one counts nothing, others by other weights."""
    sizes = n, rng.randint(1, 15)
    texts = {
        name: "".join(rng.choices("abcdef", k=size))
        for name, size in zip(("chosen", "rejected"), sizes)
    }
    reference = [logprobs(2 + size + 1, rng) for size in sizes]  # the prompt, the text and its end
    weights = [0, 0] if n % 5 == 0 else [rng.choice([1e-3, 1]), rng.choice([1, 1e3])]
    return {"prompt": "x:", **texts, "reference": reference, "weights": weights}


def rolled_out(n, rng):
    weights = [0.0 if i < n // 3 else 1.0 for i in range(n)]  # of a prompt, and its answer
    numbers = {name: logprobs(n, rng) for name in ("behaviour", "reference")}
    return {
        "tokens": rng.choices(range(256), k=n),
        "weights": weights,
        "advantages": rng.gauss(0, 1),
        **numbers,
    }


RECORDS = {
    "cross_entropy": weighted,
    "dpo": preferred,
    "policy": rolled_out,
    "distillation": taught,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A file for each loss."""
    folder, rng = tmp_path_factory.mktemp("records"), random.Random(0)
    for name, make in RECORDS.items():
        lines = (json.dumps(make(rng.randint(2, 40), rng)) for _ in range(60))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: folder / f"{name}.jsonl" for name in RECORDS}


def arguments(case, records, **more):
    path = records[CASES[case].get("loss.name", "cross_entropy")]
    return argv_of(
        KEYS | CASES[case],
        training__dataset_path=path,
        job__dump_folder=path.parent / "run",
        **more,
    )


def definition(config, trainer, i):
    """The loss of step i by its definition, with the weights that the trainer has, and its gradient's norm."""
    documents, base = [], Decoder(trainer.model.config.base).double()
    base.load_state_dict(
        {name: p for name, p in trainer.model.state_dict().items() if "lora_" not in name}
    )
    streams, size = trainer.loader.streams, config.training.global_batch_size
    raw = copy(streams)
    raw.targets = replace(streams.targets, normalise="token")
    for n in range(i * size, (i + 1) * size):
        stream = raw[n]
        for begin, end in pairwise(stream.cu_seqlens.tolist()):
            tokens = torch.from_numpy(stream.tokens[begin:end])
            logits, of_base = (
                m(tokens[None], BatchPlan(torch.arange(end - begin)))[0]
                for m in (trainer.model, base)
            )
            labels = torch.from_numpy(stream.labels[begin:end])
            valid = labels != IGNORE
            columns = {
                name: torch.from_numpy(x[begin:end])[valid].double()
                for name, x in stream.columns.items()
            }
            if config.loss.reference == "base":
                columns["reference"] = Document(
                    n, of_base[valid], labels[valid], {}
                ).logprobs.detach()
            documents.append(Document(n, logits[valid], labels[valid], columns))
        if config.loss.name == "dpo":
            del documents[len(documents) // 2 * 2 :]  # padding
    name = config.loss.name
    keys, normalise = getattr(config, name), streams.targets.normalise
    loss = loss_definitions.loss(name, documents, keys, normalise)
    reports = reported(name, documents, keys, normalise)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
    return loss.item(), torch.stack([x.norm() for x in gradients]).norm().item(), *reports


def reported(name, documents, keys, normalise):
    """The means that a loss reports, by the weights of its tokens, from whole logits and one ratio at a time."""
    if name not in ("dpo", "policy"):
        return ()
    rows = []
    rewards = [reward(document, keys) for document in documents] if name == "dpo" else []
    for n, document in enumerate(documents):
        if not document.columns["weights"].any():
            continue
        if name == "dpo":
            margin = rewards[n // 2 * 2] - rewards[n // 2 * 2 + 1]
            means = [(0.5 * (margin > 0) + 0.5 * (margin >= 0), margin)] * len(document.labels)
        else:
            means = policy_means(document, keys)
        length = len(document.labels) if normalise == "document" else 1
        weights = (document.columns["weights"] / length).tolist()
        rows += [[w, *(w * x for x in of_token)] for w, of_token in zip(weights, means)]
    total, *sums = np.array(rows).sum(0)
    return [x / total for x in sums]


def reward(document, keys):
    known = 0 if keys.reference_free else document.columns["reference"]
    sums = (document.logprobs - known).sum().item() * keys.beta
    return sums / max(len(document.labels), 1) if keys.length_normalised else sums


def policy_means(document, keys):
    """Of each token: entropy, whether its ratio is clipped, and the divergence's estimate."""
    p = document.logits.softmax(-1)
    entropy = [-sum(x * math.log(x) for x in row) for row in p.tolist()]
    logprobs = document.logprobs.tolist()
    behaviour, advantages = (document.columns[n].tolist() for n in ("behaviour", "advantages"))
    ratios = [math.exp(x - y) for x, y in zip(logprobs, behaviour)]
    if keys.level == "sequence":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        advantages = [sum(advantages) / len(advantages)] * len(advantages)
    clipped = [
        (ratio > 1 + keys.clip_high and a > 0) or (ratio < 1 - keys.clip_low and a < 0)
        for ratio, a in zip(ratios, advantages)
    ]
    apart = [x - y for x, y in zip(document.columns["reference"].tolist(), logprobs)]
    return list(zip(entropy, clipped, [math.exp(d) - d - 1 for d in apart]))


def first_losses(rank, world_size, argv):
    """Of each step, with the norm of the gradient, by the trainer and by the definition, with the same weights."""
    trainer, pairs = trainer_of(argv), []
    config = trainer.config
    for i in range(config.training.steps):
        want = definition(config, trainer, i)
        numbers = trainer.train_step()
        reports = (numbers[name] for name in trainer.passes.loss.reports)
        pairs.append(((numbers["loss"], numbers["grad_norm"], *reports), want))
    return pairs


@pytest.mark.parametrize("case", CASES)
def test_losses_are_as_defined(case, records, worlds):
    later = {"loss__mtp_weight": 0} if "model.mtp_layers" in CASES[case] else {}
    for got, want in worlds(1).run(first_losses, arguments(case, records, **later))[0]:
        assert got == pytest.approx(want, rel=1e-10)


@pytest.fixture(scope="module")
def alone(records, worlds):
    done = {}

    def get(case, **model):
        key = case, *model
        if key not in done:
            done[key] = worlds(1).run(train_on_rank, arguments(case, records, **model))[0]
        return done[key]

    return get


@pytest.mark.parametrize(
    ("case", "name"), [*product(CASES, NAMES), *product(("weights", "DPO"), METHODS)]
)
def test_splits_are_equal(case, name, records, worlds, alone):
    one = alone(case)
    processes, keys = SPLITS[name]
    for rank in worlds(processes).run(train_on_rank, arguments(case, records) + argv_of(keys)):
        check_equal(rank, one)


@pytest.mark.parametrize("case", ("weights", "DPO", "GSPO", "distillation"))
def test_with_experts_on_two_ranks(case, records, worlds, alone):
    model, split = {"model__flavor": "experts"}, ("expert", "context")
    keys = {f"parallelism__{part}_parallel_degree": 2 for part in split}
    for rank in worlds(2).run(train_on_rank, arguments(case, records, **model, **keys)):
        check_equal(rank, alone(case, **model))


def test_gradients_of_what_losses_may_read():
    """Of the rows of whole logits, or rows that are known: several ids, mean, entropy (which has none), in one part and
    in two."""
    rng = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, 8, generator=rng, dtype=torch.float64, requires_grad=True) for n in (20, 12)
    )
    ids = torch.randint(12, (20, 3), generator=rng)
    ids[::4, 0] = IGNORE

    def terms(rows, tokens):
        first = rows.logprobs.sin().sum(1) + rows.lse**2 + rows.mean.cos() * rows.entropy.detach()
        return torch.stack([first, rows.entropy], 1)

    z = x @ weight.T
    p = z.softmax(-1)
    whole = LogitStatistics(
        z.gather(1, ids.clamp(min=0)), z.logsumexp(-1), z.mean(-1), -(p * p.log()).sum(-1), z
    )
    want = terms(whole, slice(None))[ids[:, 0] != IGNORE].sum(0)
    exact = torch.autograd.grad(want[0], [x, weight])
    logits = ChunkedLogits(x, weight, 7)
    got = logits.sum(ids, terms, statistics=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(got[0], [x, weight]), exact, rtol=1e-10, atol=1e-13
    )
    known = logits.rows(ids, statistics=True)
    with sabotaged(
        cross_entropy, "_of_all", lambda *_: pytest.fail("logits are read for what is known")
    ):
        again = logits.sum(ids, terms, rows=known)
    assert torch.equal(again, got)
    torch.testing.assert_close(
        torch.autograd.grad(again[0], [x, weight]), exact, rtol=1e-10, atol=1e-13
    )

    def on_rank(group):
        own, mine = (
            weight.detach().chunk(2)[group.rank()].requires_grad_(),
            x.detach().requires_grad_(),
        )
        logits = ChunkedLogits(mine, own, 7, Ranks(group.group_name, 2, group.rank()))
        value = logits.sum(ids, terms, rows=logits.rows(ids, statistics=True))
        return value.detach(), *torch.autograd.grad(value[0], [mine, own])

    (one, dx, first), (other, more, second) = run_ranks(on_rank, 2)
    torch.testing.assert_close(one + other, want.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        (dx + more, torch.cat([first, second])), exact, rtol=1e-10, atol=1e-13
    )


def swapped(runs, streams, i):
    of_stream = runs(streams, i)
    starts, lengths = (x.reshape(-1, 2)[:, ::-1].ravel() for x in of_stream[:2])
    return of_stream._replace(starts=starts, lengths=lengths)


def a_token_late(get, streams, i):
    stream = get(streams, i)
    return replace(
        stream, columns=stream.columns | {"reference": np.roll(stream.columns["reference"], 1)}
    )


def divided_by_cp(next_step, own):
    tokens, batches = next_step(own)
    return tokens._replace(weight=2 * tokens.weight), batches


def of_this_rank(counts, batch):
    """As if every rank had the weights that the first one has."""
    return [100.0, *counts(batch)[1:]]


FAULTS = {
    "pairs swapped": (
        WholeStreams,
        "runs",
        swapped,
        data.targets,
        r"pairs: .* \d > 0 \(stream 0\)",
    ),
    "reference shifted": (
        PackedStreams,
        "__getitem__",
        a_token_late,
        data.targets,
        r"columns: .*reference, stream \d, ",
    ),
    "loss divided by cp": (
        feed.Feed,
        "next_step",
        divided_by_cp,
        model.split,
        r"split, float64: loss.* 5\.0e-01 > ",
    ),
    "weights of a rank": (
        feed,
        "_counts",
        of_this_rank,
        model.split,
        r"split, float64: loss.*the head or the loss",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_names_faults_of_what_losses_read(name, records, monkeypatch):
    monkeypatch.delenv("NGPU", raising=False)
    split = {
        "model.flavor": "debug",
        "parallelism.context_parallel_degree": 2,
        "training.local_batch_size": 1,
    }
    subject = subject_of(load_config(arguments("DPO", records) + argv_of(split)))
    owner, what, broken, check, said = FAULTS[name]
    assert not list(failures(check(subject)))
    with sabotaged(owner, what, broken):
        found = list(failures(check(subject)))
    assert any(re.search(said, line) for line in found), found


def test_the_doctor_misses_no_label_in_padding(records, monkeypatch):
    monkeypatch.delenv("NGPU", raising=False)
    # all tokens count
    more = {"training__dataset_columns": '["advantages", "behaviour"]', "model__flavor": "debug"}
    subject = subject_of(load_config(arguments("GSPO", records, **more, policy__kl=0)))
    assert not list(failures(data.labels(subject)))


def loss_of(keys):
    config = load_config(argv_of(keys))
    return build_loss(config.loss.name, config.objective)


def test_nats_of_tokens_have_no_temperature():
    """Those that telemetry shows."""
    x, weight = (torch.randn(n, 4, dtype=torch.float64) for n in (8, 12))
    columns = {"weights": torch.ones(1, 8), "teacher_logprobs": torch.zeros(1, 8, 1)}
    columns["teacher_ids"] = torch.zeros(1, 8, 1, dtype=torch.int32)
    labels, nats = torch.arange(8)[None], torch.zeros(8, dtype=torch.float64)
    batch = LocalBatch(labels, labels, columns, (0,), plan=BatchPlan(labels[0]))
    loss = loss_of({"loss.name": "distillation", "distillation.temperature": 2.0})
    loss(ChunkedLogits(x, weight, 3, token_losses=nats), batch)
    torch.testing.assert_close(nats, F.cross_entropy(x @ weight.T, labels[0], reduction="none"))


def policy_step(level, behaviour, advantages, dtype, reference_logp=None):
    """The sums of a policy loss over a document of 8 tokens, and the gradients of its first."""
    rng = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, 4, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (8, 12)
    )
    numbers = {"behaviour": behaviour, "advantages": advantages}
    numbers["reference"] = behaviour if reference_logp is None else reference_logp
    columns = {name: torch.tensor(column)[None] for name, column in numbers.items()}
    columns |= {"weights": torch.ones(1, 8), "document": torch.zeros(1, 8, dtype=torch.int64)}
    labels = torch.arange(8)[None]
    batch = LocalBatch(labels, labels, columns, (0,), 1, plan=BatchPlan(labels[0]))
    keys = {"loss.name": "policy", "policy.level": level}
    keys |= {} if reference_logp is None else {"policy.kl": 0.5}
    sums = loss_of(keys)(ChunkedLogits(x, weight, 3), batch)
    return sums, *torch.autograd.grad(sums[0], [x, weight])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [2.0, 0.0])
def test_a_clipped_ratio_may_be_beyond_float32(level, advantage):
    """Its loss, gradient and reports are those of one that float32 holds, however far it is."""
    rest = 0.0 if level == "sequence" else -1.5  # a document's is the mean over its tokens
    advantages = [advantage] * 8 if level == "sequence" else [1.0, -1.0, advantage, *[0.5] * 5]
    near, far, farthest = (
        policy_step(level, [-1.5, -1.5, b, -1.5, *[-1.5 + rest] * 4], advantages, torch.float32)
        for b in (-60.0, -1e4, -3e38)
    )
    exact = policy_step(
        level, [-1.5, -1.5, -60.0, -1.5, *[-1.5 + rest] * 4], advantages, torch.float64
    )
    assert all(x.isfinite().all() for x in far) and near[0][2] >= (advantage > 0)
    for x, y, z, e in zip(near, far, farthest, exact):
        assert torch.equal(x, y) and torch.equal(x, z)
        torch.testing.assert_close(x.double(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_that_counts_and_is_beyond_float32_is_not_hidden(level):
    sums, *_ = policy_step(level, [-1e4] * 8, [-1.0] * 8, torch.float32)
    assert not sums[0].isfinite()


def test_a_small_divergence_is_not_rounded_away():
    """exp(d) − d − 1 of d = 1e-4 is 5e-9, below the rounding of 1 in float32."""
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 4, generator=rng, dtype=torch.float64).float() for n in (8, 12))
    logp = (x @ weight.T).log_softmax(-1).diagonal()
    near = (logp + 1e-3).tolist()
    sums, *_ = policy_step("token", near, [0.0] * 8, torch.float32, reference_logp=near)
    d = torch.tensor(near).double() - (x.double() @ weight.double().T).log_softmax(-1).diagonal()
    assert sums[3].item() == pytest.approx((d.exp() - d - 1).sum().item(), rel=1e-2)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_without_any_weight_all_is_zero(name, level):
    """As in padding: no loss, no gradient, and nothing that is not a number."""
    x, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (8, 12))
    columns = dict.fromkeys(("weights", "reference", "advantages", "behaviour"), torch.zeros(1, 8))
    columns |= {
        "document": torch.zeros(1, 8, dtype=torch.int64),
        "teacher_logprobs": torch.zeros(1, 8, 3),
    }
    columns["teacher_ids"] = torch.zeros(1, 8, 3, dtype=torch.int32)
    labels, plan = torch.full((1, 8), IGNORE), BatchPlan(torch.arange(8))
    batch = LocalBatch(torch.zeros_like(labels), labels, columns, (0,), 2, plan=plan)
    keys = {"loss.name": name} | (
        {"policy.level": level, "policy.kl": 0.1} if name == "policy" else {}
    )
    sums = loss_of(keys)(ChunkedLogits(x, weight, 3), batch)
    sums.flatten()[0].backward()
    assert not sums.any() and not x.grad.any() and not weight.grad.any()
