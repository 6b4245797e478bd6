"""Generation: prefill and decoding give what one forward gives; sampling is a function of the seed."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.keys import argv_of
from tests.models.ours import initialised
from tests.refusals import refused
from titan_linear.config import ActivationCheckpoint, load_config
from titan_linear.data import ByteTokenizer
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, parallelize, set_dtype
from titan_linear.models.config import MoEConfig
from titan_linear.models.decoder import Between, Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import MLA
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.ops import attention, chunk_gated_delta_rule, chunk_kda
from titan_linear.run.generate import (
    Drafts,
    Sampling,
    Validator,
    _Reader,
    choose,
    continuations,
    decode,
    draft_tokens,
    generate,
    generate_tokens,
    prefill,
)
from titan_linear.storage.tensors import named_parameters

CPU = torch.device("cpu")
# one token; longer than a chunk of the delta rule
PROMPTS = [list(range(1, 1 + n)) for n in (5, 1, 70)]
KDA, GDN, ATTENTION = preset("hybrid", "debug").pattern
LATENT = MLA(
    heads=4, kv_rank=16, nope_dim=16, shared_k_dim=8, v_dim=16, rope_theta=1e4, head_gate=True
)
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    hidden_dim=32,
    shared_hidden_dim=32,
    score="sigmoid",
    selection_bias=True,
)
MODELS = {
    "bounded gates": preset("hybrid", "debug"),
    "softplus gates, no positions": replace(
        preset("hybrid", "debug"),
        pattern=(replace(KDA, lower_bound=None), GDN, replace(ATTENTION, rope_theta=None)),
    ),
    "side by side": replace(
        preset("hybrid", "debug"), pattern=((KDA, GDN, ATTENTION),), num_layers=2
    ),
    "latent attention, experts": replace(
        preset("hybrid", "debug"), pattern=(KDA, LATENT), num_layers=2, moe=MOE
    ),
}


def build(config, dtype=torch.float64):
    model = initialised(config, 1, dtype)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [7, 64, 100])
def test_prefill_and_decode_equal_one_forward(name, chunk):
    """Every row's logits, at the end of its prompt and after each token that follows."""
    model, steps = build(MODELS[name]), 4
    new = torch.randint(256, (steps, len(PROMPTS)), generator=torch.Generator().manual_seed(0))
    rows = prefill(model, PROMPTS, chunk=chunk, device=CPU)
    logits = [rows.logits]
    for tokens in new:
        rows = decode(model, rows, tokens)
        logits.append(rows.logits)
    for i, prompt in enumerate(PROMPTS):
        whole = torch.tensor([prompt + new[:, i].tolist()])
        with torch.no_grad():
            reference = model(whole, BatchPlan(torch.arange(whole.shape[1])))[0, len(prompt) - 1 :]
        got = torch.stack([step[i] for step in logits])
        assert ((got - reference).norm() / reference.norm()).item() < 1e-9


@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule])
def test_one_token_equals_a_chunk(op):
    """The step of the recurrence (no gradients) against the chunked way (gradients), with grouped value heads."""
    B, H, HV, K, V = 3, 2, 4, 8, 6
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, 1, h, d, generator=draw).double() for h, d in ((H, K), (H, K), (HV, V))
    )
    gates = (B, 1, HV, K) if op is chunk_kda else (B, 1, HV)
    g, beta = (
        torch.randn(gates, generator=draw).double(),
        torch.rand(B, 1, HV, generator=draw).double(),
    )
    options = {
        "initial_state": torch.randn(B, HV, K, V, generator=draw).double(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "scale": 0.3,
        "A_log": torch.randn(HV, generator=draw).double(),
        "dt_bias": torch.randn(gates[2:], generator=draw).double(),
    }
    chunked = op(q, k, v, g, beta, **options)
    with torch.no_grad():
        step = op(q, k, v, g, beta, **options)
    for a, b in zip(step, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_padding_of_keys_is_left_out():
    q, k, v = (torch.randn(2, n, h, 8).double() for n, h in ((1, 4), (9, 2), (9, 2)))
    first = torch.tensor([0, 5])
    o = attention(q, k, v, first_key=first)
    for b in range(2):
        alone = attention(q[b : b + 1], k[b : b + 1, first[b] :], v[b : b + 1, first[b] :])
        torch.testing.assert_close(o[b : b + 1], alone, rtol=1e-12, atol=1e-12)
    with refused("first_key"):
        attention(k.repeat(1, 1, 2, 1), k, v, first_key=first)


def test_a_row_depends_on_its_prompt_and_seed_alone():
    model = build(MODELS["bounded gates"])
    options = {"max_new_tokens": 6, "device": CPU}
    for sampling in (Sampling(), Sampling(1.0, 0.9, seed=3)):
        together = generate_tokens(model, PROMPTS, sampling=sampling, **options)
        assert together == generate_tokens(
            model, PROMPTS, sampling=sampling, prefill_chunk=2, **options
        )
        assert together[:1] == generate_tokens(model, PROMPTS[:1], sampling=sampling, **options)
    other = generate_tokens(model, PROMPTS, sampling=Sampling(1.0, 0.9, seed=4), **options)
    assert other != together and all(len(row) == 6 for row in other)


def test_rows_end_at_eos_each_by_itself():
    model = build(MODELS["bounded gates"])
    free = generate_tokens(model, PROMPTS, max_new_tokens=8, sampling=Sampling(1.0), device=CPU)
    eos = free[0][3]
    options = dict(max_new_tokens=8, sampling=Sampling(1.0), device=CPU)
    ended = generate_tokens(model, PROMPTS, ends=[eos], **options)
    assert ended == [row[: row.index(eos)] if eos in row else row for row in free]
    ended = generate_tokens(model, PROMPTS, ends=[eos, free[0][1], free[1][2]], **options)
    assert [len(row) for row in ended[:2]] == [1, 2]
    stopped = generate_tokens(model, PROMPTS, stops=lambda new: new[-1] == eos, **options)
    assert stopped == [row[: row.index(eos) + 1] if eos in row else row for row in free]
    small = generate_tokens(
        model, PROMPTS, max_new_tokens=8, sampling=Sampling(5.0), device=CPU, vocab_size=10
    )
    assert max(map(max, small)) < 10
    assert generate_tokens(model, PROMPTS, max_new_tokens=0, sampling=Sampling(), device=CPU) == [
        [],
        [],
        [],
    ]


DRAFTING = ("hybrid", "kda", "rwkv7", "nemotron-h", "ling-3")


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_change_no_text(name, monkeypatch):
    """And they are those of one forward over the text: of three words, many are accepted, and many are not."""
    words, made = 3, {}
    model = build(replace(preset(name, "debug"), mtp_layers=1, init_std=0.3))
    draft = _Reader.draft

    def noted(reader, tokens):
        made[reader.length] = draft(reader, tokens)
        return made[reader.length]

    monkeypatch.setattr(_Reader, "draft", noted)
    for prompt in PROMPTS:
        prompt = [token % words for token in prompt]
        options = dict(max_new_tokens=40, device=CPU, vocab_size=words, prefill_chunk=7)
        drafts = Drafts()
        made.clear()
        new = draft_tokens(model, prompt, drafts, **options)
        assert new == generate_tokens(model, [prompt], sampling=Sampling(), **options)[0]
        assert 0 < drafts.accepted < drafts.made and drafts.made + drafts.accepted in (39, 40)
        text = prompt + new
        plan, tokens = BatchPlan(torch.arange(len(text) - 1)), torch.tensor([text])
        with torch.no_grad():
            embedded, between = model.embedded(tokens), Between()
            h = model.head.norm(
                model.through(range(model.config.num_layers), embedded[:, :-1], plan, None, between)
            )
            h = model.through(
                model.predictor(0), torch.cat([embedded[:, 1:], h], -1), plan, None, between
            )
            whole = model.head.logits(h)[0, :, :words].argmax(-1).tolist()
        assert all(whole[n - 1] == token for n, token in made.items() if n < len(text))
        for eos in new[5:8]:
            assert (
                draft_tokens(model, prompt, Drafts(), ends=[eos], **options)
                == new[: new.index(eos)]
            )


def test_choice_among_the_likeliest():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().double()
    draws = {
        top_p: {
            choose(logits, Sampling(1.0, top_p), torch.Generator().manual_seed(i))
            for i in range(200)
        }
        for top_p in (0.4, 0.6, 0.8, 1.0)
    }
    assert draws == {0.4: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}, 1.0: {0, 1, 2, 3}}
    assert choose(logits, Sampling(0.0), torch.Generator()) == 1
    halves = torch.zeros(2)  # the first reaches it
    assert {
        choose(halves, Sampling(1.0, 0.5), torch.Generator().manual_seed(i)) for i in range(20)
    } == {0}
    for broken, temperature in (
        (logits * torch.nan, 0.0),
        (logits * torch.nan, 1.0),
        (logits, 1e-320),
    ):
        with refused("logits are not finite at --temperature"):
            choose(broken, Sampling(temperature), torch.Generator())


def test_texts_continue_their_prompts():
    model, options = (
        build(MODELS["bounded gates"]),
        {"max_new_tokens": 3, "sampling": Sampling(), "device": CPU},
    )
    texts = generate(model, ByteTokenizer(), ["def f", "x"], **options)
    assert texts[0].startswith("def f") and texts[1].startswith("x")
    (first,) = ByteTokenizer().encode(texts[1][1])
    ending = ByteTokenizer()
    ending.end_ids = frozenset({256, int(first)})
    assert generate(model, ending, ["x"], **options) == ["x"]
    assert continuations(model, ending, [[120]], drafts=Drafts(), **options) == [[]]
    with refused("prompt ''"):
        generate(model, ByteTokenizer(), [""], **options)


def sharded(rank, world_size, name, tp, ep):
    with torch.device("meta"):
        model = Decoder(MODELS[name])
    set_dtype(model, torch.float64)
    options = SessionOptions(
        compute_dtype=torch.float64,
        reduce_dtype=torch.float64,
        activation_checkpoint=ActivationCheckpoint(mode="full"),
    )
    parallelize(model, build_mesh("cpu", 1, world_size // tp, 1, tp, ep), options, CPU)
    materialise(model, CPU)
    initialise(model, seed=1, parameters=named_parameters(model))
    return generate_tokens(
        model, PROMPTS, max_new_tokens=6, sampling=Sampling(1.0, 0.9), device=CPU
    )


@pytest.mark.parametrize(
    "name, tp, ep",
    [
        ("bounded gates", 1, 1),
        ("bounded gates", 2, 1),
        ("side by side", 2, 1),
        ("latent attention, experts", 1, 2),
    ],
)
def test_a_model_that_ranks_share_says_the_same(name, tp, ep, worlds):
    model = build(MODELS[name])
    alone = generate_tokens(
        model, PROMPTS, max_new_tokens=6, sampling=Sampling(1.0, 0.9), device=CPU
    )
    assert worlds(2).run(sharded, name, tp, ep) == [alone, alone]


def test_samples_of_a_run_are_drawn_by_its_keys(monkeypatch):
    keys = {"sample.temperature": 0.5, "sample.top_p": 0.25, "debug.seed": 7}
    session = SimpleNamespace(precision=nullcontext(), model=None, device=CPU)
    reader = SimpleNamespace(config=load_config(argv_of(keys)), session=session, tokenizer=None)
    monkeypatch.setattr("titan_linear.run.generate.generate", lambda *_, sampling, **__: [sampling])
    assert Validator(reader, None, None).text("a", 1) == Sampling(0.5, 0.25, 7)
