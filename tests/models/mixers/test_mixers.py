"""What each mixer states of itself is so."""

from dataclasses import replace

import pytest
import torch

from tests.models.ours import initialised
from titan_linear.distributed.parallelize import replicated_parameters, set_dtype
from titan_linear.models import layers
from titan_linear.models.config import differences, fingerprint
from titan_linear.models.decoder import LayerCache
from titan_linear.models.mixers import (
    GDN,
    KDA,
    MIXERS,
    MLA,
    RWKV7,
    Attention,
    Lightning,
    Mamba2,
    ShortConv,
    attention,
    delta,
    lightning,
    mamba2,
    mla,
    rwkv7,
)
from titan_linear.models.mixers.recurrent import RecurrentOptions
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset

OPTIONS = {
    "kda": KDA(heads=2, v_heads=4, head_dim=8, v_head_dim=12),
    "gdn": GDN(heads=2, v_heads=4, head_dim=8, v_head_dim=12, conv_size=3),
    "mamba2": Mamba2(heads=4, head_dim=12, state_dim=8, groups=2),
    "rwkv7": RWKV7(heads=2, head_dim=8, w_rank=4, a_rank=4, v_rank=4, g_rank=4),
    "lightning": Lightning(heads=4, head_dim=12),
    "short_conv": ShortConv(channels=12),
    "attention": Attention(heads=4, kv_heads=2, head_dim=8, rotary_fraction=0.5),
    "mla": MLA(heads=4, kv_rank=16, nope_dim=8, shared_k_dim=4, v_dim=10),
}


def build(mixer):
    model = initialised(replace(preset("hybrid", "debug"), pattern=(mixer,), num_layers=1))
    return model


def test_there_is_a_case_of_each():
    assert OPTIONS.keys() == MIXERS.keys()
    assert all(type(OPTIONS[name]) is kind and kind.name == name for name, kind in MIXERS.items())


@pytest.mark.parametrize("name", MIXERS)
def test_recurrent_mixers_have_their_scans_planned(name):
    """A scan without a plan has another graph for each number of documents."""
    recurrent = isinstance(OPTIONS[name], RecurrentOptions)
    assert (OPTIONS[name].scan_programs(1) is not None) == recurrent


@pytest.mark.parametrize("name", MIXERS)
def test_ops_are_those_that_it_calls(name, monkeypatch):
    called = {}

    def record(module, op, sizes):
        original = getattr(module, op)

        def recorded(*inputs, **options):
            called[op] = sizes(*inputs)
            return original(*inputs, **options)

        monkeypatch.setattr(module, op, recorded)

    for op in ("chunk_kda", "chunk_gated_delta_rule"):
        record(delta, op, lambda q, k, v, *gates: {"K": q.shape[-1], "V": v.shape[-1]})
    record(mamba2, "chunk_ssd", lambda x, dt, A, B, C: {"K": B.shape[-1], "V": x.shape[-1]})
    record(lightning, "chunk_simple_gla", lambda q, k, v: {"K": q.shape[-1], "V": v.shape[-1]})
    for module in (attention, mla):
        record(module, "attention", lambda q, k, v: {"D": q.shape[-1], "Dv": v.shape[-1]})
    record(rwkv7, "chunk_rwkv7", lambda r, w, k, v, a, b: {"K": r.shape[-1], "V": v.shape[-1]})
    record(layers, "causal_conv1d", lambda x, weight: {"W": weight.shape[-1]})
    build(OPTIONS[name])(torch.arange(9).unsqueeze(0), BatchPlan(torch.arange(9)))
    assert called == OPTIONS[name].ops


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_what_grows_in_its_cache(name):
    model, caches = build(OPTIONS[name]), []
    for length in (5, 9):
        cache = LayerCache()
        model(torch.arange(length).unsqueeze(0), BatchPlan(torch.arange(length)), caches=[cache])
        caches.append(cache["mixer"])
    short, long = caches
    assert {entry for entry in short if short[entry].shape != long[entry].shape} == set(
        OPTIONS[name].growing
    )
    assert all((short[e].shape[1], long[e].shape[1]) == (5, 9) for e in OPTIONS[name].growing)


@pytest.mark.parametrize("name", MIXERS)
def test_gates_are_kept_whole_and_wide(name):
    model = build(OPTIONS[name])
    set_dtype(model, torch.bfloat16)
    whole = set(replicated_parameters(model))
    names = {n.rpartition(".")[-1] for n, p in model.named_parameters() if p in whole}
    gates = {
        "kda": {"A_log", "dt_bias"},
        "gdn": {"A_log", "dt_bias"},
        "mamba2": {"A_log", "D", "dt_bias"},
    }
    assert names == gates.get(name, set())
    assert all(
        p.dtype == (torch.float32 if p in whole else torch.bfloat16) for p in model.parameters()
    )


@pytest.mark.parametrize(
    "name, ranks, said",
    [
        ("kda", 2, None),
        ("kda", 4, "2 heads"),
        ("gdn", 3, "2 heads"),
        ("mamba2", 2, None),
        ("mamba2", 4, "2 groups"),
        ("attention", 4, None),
        ("attention", 8, "4 query heads"),
        ("mla", 3, "4 query heads"),
        ("mla", 4, None),
    ],
)
def test_heads_that_cannot_be_split(name, ranks, said):
    assert OPTIONS[name].indivisible_heads(ranks) == said


def test_key_heads_that_cannot_be_split():
    """Fewer key heads than ranks are shared, if each rank needs one alone."""
    assert Attention(heads=12, kv_heads=4, head_dim=8).indivisible_heads(6) == "4 key heads"


def test_mixers_state_their_rotary_channels():
    assert [OPTIONS[name].rotary for name in MIXERS] == [None] * 6 + [(10000.0, 4, ()), None]
    assert replace(OPTIONS["attention"], rope_theta=None).rotary is None


def test_mixers_side_by_side():
    """A layer adds what each of them gives."""
    kda, attention = OPTIONS["kda"], OPTIONS["attention"]
    model = build((kda, attention, replace(kda, conv_size=3))).double()
    block, x = model.layers[0], torch.randn(1, 9, 128, dtype=torch.float64)
    plan = BatchPlan(torch.arange(9))
    names = {name.partition(".")[0] for name, _ in block.named_parameters()}
    assert names == {"mixer_norm", "mixer", "mixer1", "mixer2", "mlp_norm", "mlp"}
    given = block.mixer_norm(x)
    mixed = x + (block.mixer(given, plan) + block.mixer1(given, plan) + block.mixer2(given, plan))
    assert torch.equal(block(x, plan)[0], mixed + block.mlp(block.mlp_norm(mixed)))
    assert model.config.layers[0].name == "kda+attention+kda" and len(model.config.mixers) == 3


@torch.no_grad()
def test_caches_of_mixers_side_by_side():
    model = build((OPTIONS["kda"], OPTIONS["mamba2"], OPTIONS["attention"])).double()
    tokens = torch.arange(9).unsqueeze(0)
    caches = [LayerCache()]
    parts = [
        model(tokens[:, a:b], BatchPlan(torch.arange(a, b)), caches=caches)
        for a, b in ((0, 5), (5, 6), (6, 9))
    ]
    torch.testing.assert_close(
        torch.cat(parts, 1), model(tokens, BatchPlan(torch.arange(9))), rtol=1e-9, atol=1e-12
    )


def test_differences_of_models():
    """Of the function alone: a pattern and its repetition are the same, and so are models trained in other ways."""
    ours = preset("hybrid", "debug")
    assert not differences(ours, replace(ours, pattern=ours.pattern * 2, init_std=0.1))
    first, *rest = ours.pattern
    assert differences(
        ours, replace(ours, pattern=(replace(first, heads=1), *rest), norm_eps=1e-6)
    ) == {
        "norm_eps": (1e-5, 1e-6),
        "kda.heads": (2, 1),
    }
    assert differences(ours, replace(ours, pattern=(first,))) == {
        "layers": (("kda", "gdn", "attention"), ("kda", "kda", "kda"))
    }
    beside = replace(ours, pattern=(tuple(rest),))
    gdn, attention = rest
    other = replace(beside, pattern=((gdn, replace(attention, kv_heads=1)),))
    assert differences(beside, other) == {"attention.kv_heads": (2, 1)} and fingerprint(
        beside
    ) != fingerprint(other)
    grouped = [
        replace(ours, num_layers=2, pattern=pattern)
        for pattern in (((first, gdn), gdn), (first, (gdn, gdn)))
    ]
    assert fingerprint(grouped[0]) != fingerprint(grouped[1])
