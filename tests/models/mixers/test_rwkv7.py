"""RWKV-7 against its equations (arXiv 2503.14456, section 4), computed token by token from the tensors of a folder of
flash-linear-attention."""

import math
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests.models.hf_states import state_from_hf, state_to_hf
from tests.models.ours import initialised, labels_of, loss_of, packed, relative
from tests.ops.inputs import tokens_of
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import config_from_hf, config_to_hf
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.ops import build_cp_context

FAMILY = "RWKV7ForCausalLM"
CONFIG = preset("rwkv7", "debug")
HEADS, HEAD_DIM = CONFIG.pattern[0].heads, CONFIG.pattern[0].head_dim
POWERS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)
T, BOUNDS = 144, [0, 1, 38, 39, 104, 144]


# --- The equations ---------------------------------------------------------------------------------------------------


def below(tensors, prefix):
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def layer_norm(x, tensors, name):
    return F.layer_norm(
        x, x.shape, tensors[f"{name}.weight"], tensors[f"{name}.bias"], CONFIG.norm_eps
    )


def time_mixing(p, x, before, S, first):
    """x and that of the token before [dim], the state [heads, V, K], the first layer's v -> y, v, the next state."""

    def mixed(name):
        return x + p[f"x_{name}"].flatten() * (before - x)

    def low_rank(name, act):
        hidden = act(p[f"{name}_lora.lora.0.weight"] @ mixed(name))
        return p[f"{name}_lora.lora.2.weight"] @ hidden + p.get(f"{name}_lora.lora.2.bias", 0)

    def same(hidden):
        return hidden

    r, k, v = (p[f"{name}_proj.weight"] @ mixed(name) for name in "rkv")
    w = torch.exp(-math.exp(-0.5) * low_rank("w", torch.tanh).sigmoid())
    a, g = low_rank("a", same).sigmoid(), low_rank("g", torch.sigmoid)
    if first is not None:
        v = v + (first - v) * low_rank("v", same).sigmoid()
    removed = (k * p["k_k"]).view(HEADS, -1)
    removed = removed / removed.norm(dim=1, keepdim=True)
    k = k * (1 + (a - 1) * p["k_a"])
    r, w, k, by_head, a = (y.view(HEADS, -1) for y in (r, w, k, v, a))
    read = (S * removed.unsqueeze(1)).sum(2, keepdim=True)  # [heads, V, 1]
    S = (
        S * w.unsqueeze(1)
        - read * (a * removed).unsqueeze(1)
        + by_head.unsqueeze(2) * k.unsqueeze(1)
    )
    o = (S * r.unsqueeze(1)).sum(2)
    deviation = (o.var(1, keepdim=True, correction=0) + HEAD_DIM * CONFIG.norm_eps).sqrt()
    o = ((o - o.mean(1, keepdim=True)) / deviation).flatten() * p["g_norm.weight"] + p[
        "g_norm.bias"
    ]
    bonus = (r * k * p["r_k"]).sum(1, keepdim=True) * by_head
    return p["o_proj.weight"] @ ((o + bonus.flatten()) * g), v, S


def channel_mixing(p, x, before):
    return p["value.weight"] @ (p["key.weight"] @ (x + p["x_k"] * (before - x))).relu().square()


def oracle(tensors, tokens, bounds):
    """Logits [T, vocab]."""
    logits, nothing = [], torch.zeros(CONFIG.dim, dtype=torch.float64)
    layers = [below(tensors, f"model.layers.{i}.") for i in range(CONFIG.num_layers)]
    parts = [(p, below(p, "attn."), below(p, "ffn.")) for p in layers]
    for start, end in pairwise(bounds):
        shifts = [[nothing, nothing] for _ in layers]
        states = [torch.zeros(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64) for _ in layers]
        for token in tokens[start:end]:
            x, first = (
                layer_norm(tensors["model.embeddings.weight"][token], layers[0], "pre_norm"),
                None,
            )
            for i, (p, attn, ffn) in enumerate(parts):
                given = layer_norm(x, p, "attn_norm")
                y, v, states[i] = time_mixing(attn, given, shifts[i][0], states[i], first)
                first, x = v if first is None else first, x + y
                more = layer_norm(x, p, "ffn_norm")
                x = x + channel_mixing(ffn, more, shifts[i][1])
                shifts[i] = [given, more]
            logits.append(tensors["lm_head.weight"] @ layer_norm(x, tensors, "model.norm"))
    return torch.stack(logits)


# --- Our model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs():
    """The tensors of a folder, so large that every one matters."""
    rng = torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in Decoder(CONFIG).named_parameters()}
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=rng, dtype=torch.float64)
        state[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.7 + 0.3 * noise
    return state_to_hf(state, CONFIG, FAMILY)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(CONFIG.vocab_size, (T,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def wanted(theirs, tokens):
    """Logits, and the gradients of the summed loss by our names."""
    leaves = {name: x.clone().requires_grad_() for name, x in theirs.items()}
    logits = oracle(leaves, tokens, BOUNDS)
    F.cross_entropy(logits, labels_of(tokens, BOUNDS), reduction="sum").backward()
    return logits.detach(), state_from_hf(
        {name: x.grad for name, x in leaves.items()}, CONFIG, FAMILY
    )


def computed(theirs, tokens, labels, plan):
    model = Decoder(CONFIG).double()
    model.load_state_dict(state_from_hf(theirs, CONFIG, FAMILY))
    model.head.chunk = 48
    model(tokens.unsqueeze(0), plan, loss=loss_of(labels)).backward()
    with torch.no_grad():
        return model(tokens.unsqueeze(0), plan)[0], {
            name: p.grad for name, p in model.named_parameters()
        }


def check(got, wanted):
    assert relative(got[0], wanted[0]) < 1e-12
    errors = {name: relative(got[1][name], grad) for name, grad in wanted[1].items()}
    assert got[1].keys() == errors.keys() and max(errors.values()) < 1e-9, errors


def test_packed_documents_equal_the_equations(theirs, tokens, wanted):
    plan = packed(BOUNDS)
    check(computed(theirs, tokens, labels_of(tokens, BOUNDS), plan), wanted)


@pytest.mark.parametrize("ranks", [2, 8])
def test_context_parallel_ranks_equal_the_equations(ranks, layout, theirs, tokens, wanted):
    """The token before and the state come from other ranks; each rank has the first layer's values of its tokens."""
    labels, bounds = labels_of(tokens, BOUNDS), torch.tensor(BOUNDS, dtype=torch.int32)

    def on_rank(group):
        context = build_cp_context(bounds, group, layout=layout)
        mine = tokens_of(context)
        return mine, *computed(
            theirs, tokens[mine], labels[mine], BatchPlan(context.position_ids, cp_context=context)
        )

    parts = run_ranks(on_rank, ranks)
    logits = torch.empty_like(wanted[0])
    for mine, own, _ in parts:
        logits[mine] = own
    check((logits, {name: sum(grads[name] for _, _, grads in parts) for name in wanted[1]}), wanted)


@torch.no_grad()
@pytest.mark.parametrize("layer", range(CONFIG.num_layers))
def test_vectors_are_drawn_as_in_rwkv_lm(layer):
    model = initialised(CONFIG)
    mixer, mlp = model.layers[layer].mixer, model.layers[layer].mlp
    n, left = torch.arange(CONFIG.dim).double(), 1 - layer / CONFIG.num_layers
    over_all, middle = n / (CONFIG.dim - 1), (HEAD_DIM - 1) / 2
    zigzag = (n % HEAD_DIM - middle) / middle
    zigzag, linear = zigzag * zigzag.abs(), over_all - 0.5
    w = -6 + 6 * over_all ** (1 + (layer / (CONFIG.num_layers - 1)) ** 0.3)
    wanted = [
        (mixer.w_lora.bias, w + 0.5 + 2.5 * zigzag),
        (mixer.a_lora.bias, -0.19 + 0.3 * zigzag + 0.4 * linear),
        (mixer.k_k, 0.71 - 0.1 * linear),
        *(
            (getattr(mixer, f"x_{x}"), 1 - (n / CONFIG.dim) ** (p * left))
            for x, p in zip("rwkvag", POWERS)
        ),
        (mlp.x_k, 1 - (n / CONFIG.dim) ** left**4),
        (mixer.g_norm.weight, torch.full_like(n, (1 - left + 1 / CONFIG.num_layers) ** 0.7)),
        *([(mixer.v_lora.bias, 0.73 - 0.4 * linear)] if layer else []),
    ]
    for drawn, values in wanted:
        torch.testing.assert_close(drawn.double(), values, rtol=1e-6, atol=1e-6)


# --- Folders ---------------------------------------------------------------------------------------------------------


def test_folders_go_in_and_out_unchanged(theirs):
    """FLA's first version had its six mixes in one tensor."""
    assert config_from_hf(config_to_hf(FAMILY, CONFIG)) == (FAMILY, CONFIG)
    state = state_from_hf(theirs, CONFIG, FAMILY)
    first = {name: x for name, x in theirs.items() if ".attn.x_" not in name}
    for i in range(CONFIG.num_layers):
        attn = f"model.layers.{i}.attn."
        first[f"{attn}x_x"] = torch.cat([theirs[f"{attn}x_{name}"][0] for name in "rwkvag"])
    again = state_from_hf(first, CONFIG, FAMILY)
    assert all(torch.equal(again[name], x) for name, x in state.items())
    back = state_to_hf(state, CONFIG, FAMILY, {name: tuple(x.shape) for name, x in first.items()})
    assert back.keys() == first.keys() and all(
        torch.equal(back[name], x) for name, x in first.items()
    )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"head_dim": 48}, "hidden_size = 128 is not a multiple of head_dim = 48"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; only 'sqrelu'"),
        ({"norm_bias": False}, "norm_bias = False; only True"),
        ({"attn": {"layers": [1]}}, "attn = {'layers': [1]}; only None"),
        ({"value_dim": 256}, "value_dim = 256; only hidden_size = 128"),
        (
            {"architectures": ["RWKV6ForCausalLM"]},
            "architectures = ['RWKV6ForCausalLM']: unknown; give a folder of one of",
        ),
    ],
)
def test_other_folders_are_refused(change, said):
    with refused(re.escape(said)):
        config_from_hf(config_to_hf(FAMILY, CONFIG) | change)
