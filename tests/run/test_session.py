"""A session gives under every split what plain PyTorch gives in one process."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import titan_linear
from tests.keys import argv_of
from tests.models.ours import initialised, labels_of
from tests.refusals import refused
from titan_linear.config import Optimizer, Parallelism
from titan_linear.data import IGNORE
from titan_linear.distributed.options import SessionOptions
from titan_linear.losses import build_loss
from titan_linear.losses.function import FunctionLoss
from titan_linear.models.config import LoraConfig
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.run.session import Session, mesh
from titan_linear.storage.hf_writing import Destination, find_family, gather, write_folder
from titan_linear.storage.peft import write_peft

MODEL = replace(preset("hybrid", "debug"), num_layers=4, vocab_size=64)
# Documents of two micro-batches: one token long, and on both sides of every rank edge.
BOUNDS = [0, 1, 20, 50, 64], [0, 40, 64]
# With a large eps, the first update is a smooth function of the gradient.
OPTIMIZER = Optimizer(eps=1.0, lr=1.0, weight_decay=0.0)
FLOAT64 = dict.fromkeys(("dtype", "compute_dtype", "reduce_dtype"), torch.float64)
SPLITS = {
    "dp 2": {},
    "cp 2, contiguous": {"cp": 2},
    "cp 2, zigzag": {"cp": 2, "layout": "zigzag"},
    "tp 2": {"tp": 2},
}


def tokens_of(i):
    return torch.randint(64, (64,), generator=torch.Generator().manual_seed(i))


def function_of(bounds):
    """A loss that couples the tokens of a document, and documents with each other."""
    documents = torch.arange(len(bounds) - 1).repeat_interleave(torch.tensor(bounds).diff())

    def function(logp):
        sums = logp.new_zeros(len(bounds) - 1).index_add(0, documents, logp)
        return (sums / 10).tanh().square().sum() + sums.logsumexp(0) - (logp.exp() * logp).sum()

    return function


def session_of(cp=1, tp=1, layout="contiguous", **more):
    parallelism = Parallelism(context_parallel_layout=layout)
    options = SessionOptions(**FLOAT64, parallelism=parallelism)
    dims = mesh(context_parallel_degree=cp, tensor_parallel_degree=tp)
    session = Session(MODEL, dims, options, optimizer=OPTIMIZER, **more)
    session.initialise(seed=0)
    return session


def mine(session):
    """The numbers of this rank's micro-batches, and its parts of them."""
    dims = session.dims
    numbers = range(dims.dp_rank, 2, dims.dp)
    return numbers, [session.cut(tokens_of(i), torch.tensor(BOUNDS[i])) for i in numbers]


def by_function(rank, world_size, split):
    """Loss, norm, and the weights after a step of a function of log p."""
    session = session_of(**split)
    for i, batch in zip(*mine(session), strict=True):
        session.forward_backward(batch, function_of(BOUNDS[i]))
    numbers = session.step(lr=0.1)
    get = gather(session.model)
    weights = {name: get(name) for name, _ in session.model.named_parameters()}
    return numbers.loss, numbers.grad_norm, weights


def plain(function):
    """The same by PyTorch alone, where `function` gets a micro-batch's number and log p."""
    model = initialised(MODEL, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.0)
    loss = sum(function(i, logprobs(model, i)) for i in range(2))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item(), model


def logprobs(model, i, temperature=1.0):
    labels = labels_of(tokens_of(i), BOUNDS[i])
    bounds = torch.tensor(BOUNDS[i], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in bounds.diff()])
    logits = model(tokens_of(i)[None], BatchPlan(positions, cu_seqlens=bounds))[0]
    logp = (logits / temperature).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return logp.masked_fill(labels == IGNORE, 0)


@pytest.mark.parametrize("split", SPLITS)
def test_any_function_of_log_p_is_exact_under_every_split(split, worlds):
    loss, norm, model = plain(lambda i, logp: function_of(BOUNDS[i])(logp))
    want = {name: p.detach() for name, p in model.named_parameters()}
    ranks = worlds(2).run(by_function, SPLITS[split])
    for got_loss, got_norm, got in ranks:
        assert got_loss == pytest.approx(loss, rel=1e-10)
        assert got_norm == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def named(rank, world_size, split, name):
    """A step of a loss by name, and of the same loss as a function of log p."""
    found = []
    for by_name in (True, False):
        session = session_of(**split, loss=name)
        numbers, batches = mine(session)
        tokens = session.count(batches)
        for i, batch in zip(numbers, batches, strict=True):
            labelled = labels_of(tokens_of(i), BOUNDS[i]) != IGNORE
            share = labelled.double() / tokens.weight

            def mean(logp, share=share):
                return -share * logp

            session.forward_backward(batch, *([None, tokens] if by_name else [mean]))
        found.append((*session.step(lr=0.1)[:2], dict(session.weights())))
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_a_named_loss_is_a_function_of_log_p(split, worlds):
    for (loss, norm, want), (other, other_norm, got) in worlds(2).run(
        named, SPLITS[split], "cross_entropy"
    ):
        assert other == pytest.approx(loss, rel=1e-12)
        assert other_norm == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def scored(rank, world_size, split, temperature):
    session = session_of(**split)
    numbers, batches = mine(session)
    found = [session.logprobs(x, temperature=temperature, whole=True) for x in batches]
    parts = [session.logprobs(x, temperature=temperature) for x in batches]
    assert [x.shape for x in parts] == [x.labels[0].shape for x in batches]
    return dict(zip(numbers, found, strict=True))


@pytest.mark.parametrize("split", SPLITS)
def test_log_probabilities_of_whole_documents_are_on_every_rank(split, worlds):
    model = initialised(MODEL, dtype=torch.float64)
    for found in worlds(2).run(scored, SPLITS[split], 0.7):
        assert len(found) == (1 if split == "dp 2" else 2)
        for i, logp in found.items():
            torch.testing.assert_close(logp, logprobs(model, i, 0.7).detach())


def by_tempered_function(rank, world_size, split):
    """Loss, norm and the entropies that the function got, at temperature 0.7."""
    session = session_of(**split)
    got = {}
    for i, batch in zip(*mine(session), strict=True):

        def function(logp, entropy, i=i):
            got[i] = logp.detach(), entropy.detach()
            return function_of(BOUNDS[i])(logp) + 0 * entropy.sum()

        session.forward_backward(batch, FunctionLoss(function, 0.7, entropy=True))
        alone = session.logprobs_and_entropy(batch, temperature=0.7)
        torch.testing.assert_close(alone, got[i], rtol=0, atol=0)
        torch.testing.assert_close(
            session.logprobs(batch, temperature=0.7, whole=True), got[i][0], rtol=0, atol=0
        )
    return *session.step(lr=0.1)[:2], got


def entropy_of(model, i, temperature):
    bounds = torch.tensor(BOUNDS[i], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in bounds.diff()])
    logits = model(tokens_of(i)[None], BatchPlan(positions, cu_seqlens=bounds))[0]
    p = (logits / temperature).softmax(-1)
    return -(p * p.log()).sum(-1).masked_fill(labels_of(tokens_of(i), BOUNDS[i]) == IGNORE, 0)


@pytest.mark.parametrize("split", SPLITS)
def test_a_function_at_a_temperature_is_exact_and_gets_entropies(split, worlds):
    model = initialised(MODEL, dtype=torch.float64)
    loss = sum(function_of(BOUNDS[i])(logprobs(model, i, 0.7)) for i in range(2))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for got_loss, got_norm, got in worlds(2).run(by_tempered_function, SPLITS[split]):
        assert got_loss == pytest.approx(loss.item(), rel=1e-10)
        assert got_norm == pytest.approx(norm.item(), rel=1e-10)
        for i, (_, entropy) in got.items():
            torch.testing.assert_close(entropy, entropy_of(model, i, 0.7).detach())


def discarding(rank, world_size):
    """Norms of a step, where before it another was discarded, and everything moved away and back."""
    norms = []
    for discard in (False, True):
        session = session_of()
        _, batches = mine(session)
        if discard:
            session.forward_backward(batches[1], function_of(BOUNDS[1]))
            session.zero_grad()
            session.to(torch.device("cpu"))
            session.to(session.device)
            with refused("forward_backward first"):
                session.step(lr=0.1)
        for _ in range(2):
            session.forward_backward(batches[0], function_of(BOUNDS[0]))
            norms.append(session.step(lr=0.1).grad_norm)
    return norms


def test_gradients_can_be_discarded(worlds):
    ((first, second, third, fourth),) = worlds(1).run(discarding)
    assert (first, second) == (third, fourth)


@pytest.mark.cuda
def test_everything_moves_to_the_host_and_back():
    """With copies in the compute dtype: nothing is left on the device, and the next step is the same."""
    norms, left = [], []
    for moves in (False, True):
        options = SessionOptions(compute_dtype=torch.bfloat16)
        session = Session(MODEL, mesh(), options, optimizer=OPTIMIZER)
        session.initialise(seed=0)
        for _ in range(2):
            session.forward_backward(session.cut(tokens_of(0)))
            norms.append(session.step(lr=0.1).grad_norm)
            if moves:
                session.to(torch.device("cpu"))
                left += [p.device.type for p in session.model.parameters()]
                session.to(session.device)
    assert norms[:2] == norms[2:] and set(left) == {"cpu"}


def norm_after_scores(rank, world_size, split, scores):
    """The gradient norm of a step, before which log p are read or not."""
    session = session_of(**split)
    for i, batch in zip(*mine(session), strict=True):
        session.forward_backward(batch, function_of(BOUNDS[i]))
    if scores:
        session.logprobs(batch)
    return session.step(lr=0.1).grad_norm


@pytest.mark.parametrize("split", ["dp 2", "cp 2, contiguous"])
def test_reading_log_probabilities_keeps_gradients(split, worlds):
    without, after = (worlds(2).run(norm_after_scores, SPLITS[split], x) for x in (False, True))
    assert after == without


def saving(rank, world_size, folder):
    session = session_of(cp=2)
    _, batches = mine(session)
    session.forward_backward(batches[0])
    session.step(lr=0.1)
    session.save(folder)
    session.forward_backward(batches[1])
    return session.step(lr=0.1)[:2], session.steps


def loading(rank, world_size, folder):
    session = session_of()
    session.load(folder)
    _, batches = mine(session)
    assert session.steps == 1
    # The only rank, or both with the same batch.
    session.forward_backward(batches[-1])
    return session.step(lr=0.1)[:2], session.steps


def test_a_save_is_loaded_under_another_split(worlds, tmp_path):
    (want, steps), _ = worlds(2).run(saving, tmp_path)
    ((got, again),) = worlds(1).run(loading, tmp_path)
    assert got == pytest.approx(want, rel=1e-10) and steps == again == 2
    assert (tmp_path / "step-1/manifest.json").exists()


def test_weights_have_the_names_of_hugging_face(worlds, tmp_path):
    model = replace(MODEL, vocab_size=320)
    for want, on_disk, got in worlds(2).run(opened_with, model, tmp_path / "folder"):
        torch.testing.assert_close(want, on_disk, rtol=0, atol=0)
        torch.testing.assert_close(want, got, rtol=0, atol=0)


def opened_with(rank, world_size, model, folder):
    session = Session(model, mesh(), SessionOptions(**FLOAT64))
    session.initialise(seed=0)
    write_folder(folder, model, find_family(model), gather(session.model), dtype=torch.float32)
    other = titan_linear.load(folder, "--model.tokenizer_path=bytes")
    want = {name: x.float() for name, x in session.weights()}
    return want, load_file(folder / "model.safetensors"), dict(other.weights())


# Experts, whose tensors are stacked here and single on disk.
EXPERTS = replace(preset("qwen3.5", "debug"), vocab_size=64)
OUT = {
    "dp 2": (2, {}),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "ep 2": (2, {"expert_parallel_degree": 2}),
    "tp 2, ep 2, dp 2": (4, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
}


def given_out(rank, world_size, model, degrees, dtype=None):
    """What a loop of a sampler gets, in two iterations with a change between them; and its metadata."""
    session = Session(model, mesh(**degrees))
    session.initialise(seed=0)
    weights = session.weights(dtype=dtype)
    metadata, first = weights.metadata(), list(weights)
    with torch.no_grad():
        for p in session.model.parameters():
            p += 1
    second = list(weights)
    for tensors in (first, second):
        assert [(name, x.dtype, tuple(x.shape)) for name, x in tensors] == metadata
    assert metadata[0].name and metadata[0].dtype and metadata[0].shape
    return metadata, dict(first), dict(second)


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=4, factor=2.0)], ids=["all", "adapters"])
def test_weights_go_out_whole_under_every_split(adapter, worlds):
    model = replace(EXPERTS, adapter=adapter)
    ((metadata, first, second),) = worlds(1).run(given_out, model, {})
    assert len(first) == len(metadata) and any("experts" in name for name in first)
    assert all("lora_" in name for name in first) == (adapter is not None)
    for name, x in first.items():
        torch.testing.assert_close(second[name], x + 1, rtol=0, atol=0)
    for processes, degrees in OUT.values():
        for found in worlds(processes).run(given_out, model, degrees):
            assert found[0] == metadata
            torch.testing.assert_close(found[1:], (first, second), rtol=0, atol=0)


def test_weights_go_out_in_another_dtype(worlds):
    """At least float32 where transformers keeps it."""
    ((metadata, first, _),) = worlds(1).run(given_out, MODEL, {}, torch.bfloat16)
    ((_, full, _),) = worlds(1).run(given_out, MODEL, {})
    kept = {name for name, dtype, _ in metadata if dtype == torch.float32}
    assert kept == {name for name in full if name.endswith(("A_log", "dt_bias"))} and kept
    for name, x in first.items():
        torch.testing.assert_close(x, full[name].to(x.dtype), rtol=0, atol=0)


def adapted(rank, world_size, folder):
    """The trained weights of a session with adapters, and those in the folder that it writes."""
    model = replace(MODEL, adapter=LoraConfig(rank=4, factor=2.0, extra=("*norm",)))
    session = Session(model, mesh(tensor_parallel_degree=world_size))
    session.initialise(seed=0)
    get, family = gather(session.model), find_family(MODEL)
    to = Destination(family, None, {}, {})
    write_peft(folder, {}, model, to, get, torch.float32, "", [])
    return dict(session.weights()), load_file(folder / "adapter_model.safetensors")


def test_adapters_have_the_names_of_peft(worlds, tmp_path):
    for got, want in worlds(2).run(adapted, tmp_path / "adapters"):
        assert any("lora_A" in name for name in got)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def refusing(rank, world_size):
    session = session_of()
    with refused("must rise from 0 to the number of tokens, 4"):
        session.cut(torch.arange(4), torch.tensor([0, 3]))
    with refused("context_parallel_degree = 2 need a multiple of 2 processes, and there are 1"):
        mesh(context_parallel_degree=2)
    with refused("forward_backward first"):
        session.step(lr=0.1)
    batch = session.cut(torch.arange(4))
    session.forward_backward(batch, build_loss("cross_entropy"))
    with refused("needs tokens = session.count"):
        session.forward_backward(batch)
    with refused("set the entropy's coefficient"):
        session.forward_backward(batch, FunctionLoss(lambda logp, h: logp - 0.1 * h, entropy=True))


def test_what_does_not_fit_is_refused(worlds):
    worlds(1).run(refusing)


def test_the_package_is_imported_without_torch():
    code = """
import sys, json, titan_linear
before = "torch" in sys.modules
titan_linear.Session, titan_linear.load, titan_linear.mesh
print(json.dumps([before, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, True]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        titan_linear.nothing  # noqa: B018


def test_a_trainer_needs_no_preparation(tmp_path):
    """Neither processes nor a folder, as in a notebook."""
    keys = {
        "job.dump_folder": tmp_path / "runs/first",
        "model.name": "kda",
        "training.seq_len": 64,
        "training.steps": 1,
        "lr_scheduler.warmup_steps": 0,
        "metrics.enable_tensorboard": "false",
    }
    code = (
        "from titan_linear.config import load_config\n"
        "from titan_linear.train import Trainer\n"
        f"Trainer(load_config({argv_of(keys)})).train()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is finished: 1 of training.steps = 1" in done.stdout
    assert (tmp_path / "runs/first/metrics.jsonl").exists()
