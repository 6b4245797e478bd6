"""What is seen inside a step: the same on any number of processes, and nothing of the step changes by it."""

import math
import random
import string
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.data.conftest import random_documents
from tests.hooks.runs import arguments
from tests.ops.inputs import tokens_of
from tests.records import events_of, read_json, read_lines
from tests.steps import FedTotals
from tests.training import SMALL, SPLITS, train, trainer_of, whole_weights
from titan_linear.config import load_config
from titan_linear.data import IGNORE, ByteTokenizer, write_corpus
from titan_linear.models.decoder import Between
from titan_linear.models.mixers.delta import DeltaMixer, KDAMixer
from titan_linear.models.mixers.lightning import LightningMixer
from titan_linear.models.mixers.mamba2 import Mamba2Mixer
from titan_linear.models.mixers.mla import MLAMixer
from titan_linear.models.mixers.recurrent import RecurrentMixer
from titan_linear.models.mixers.rwkv7 import RWKV7Mixer
from titan_linear.models.presets import OWN
from titan_linear.ops import build_cp_context
from titan_linear.ops.reference.convolution import direct_causal_conv1d
from titan_linear.ops.reference.delta_rule import gdn_gate, kda_gate, l2norm, recurrent_delta_rule
from titan_linear.ops.reference.linear_attention import (
    recurrent_dplr,
    recurrent_simple_gla,
    recurrent_ssd,
)
from titan_linear.run.preflight import preflight


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("telemetry")
    for n, name in enumerate(["a", "b"]):
        write_corpus(path / name, random_documents([30 + 50 * n] * 60, seed=n), ByteTokenizer())
    draw = random.Random(0)
    for name, letters in {
        "up": string.ascii_uppercase,
        "low": string.ascii_lowercase,
        "rest": string.digits,
    }.items():
        for n in range(12):
            (path / "texts" / name).mkdir(parents=True, exist_ok=True)
            text = "".join(draw.choices(letters, k=4 + 3 * n))
            (path / "texts" / name / f"{n}.{name}").write_text(text)
    return path


def two_steps(rank, world_size, argv):
    """Losses, what was seen in the second step, and norms of what it added to whole weights and of these, by layer; how
    evenly attention's work was shared."""
    OWN["hybrid"]["small"] = SMALL
    preflight(load_config(argv), world_size)
    trainer = trainer_of(argv)
    fed = FedTotals()
    trainer.hooks.append(fed)
    losses = [trainer.train_step()["loss"]]
    assert trainer.telemetry.seen == {}
    before = {name: p.clone() for name, p in whole_weights(trainer).items()}
    losses.append(trainer.train_step()["loss"])
    balance = fed.total.work_balance(trainer.dims.dp * trainer.dims.cp)
    after = whole_weights(trainer)
    return (
        losses,
        trainer.telemetry.seen,
        {name: (after[name] - before[name], after[name]) for name in after},
        balance,
    )


def close(got, want, rel=1e-9):
    flat = [{k: v if isinstance(v, list) else [v] for k, v in each.items()} for each in (got, want)]
    return flat[0].keys() == flat[1].keys() and all(
        flat[0][k] == pytest.approx(v, rel=rel) for k, v in flat[1].items()
    )


@pytest.fixture(scope="module")
def alone(folder, worlds):
    return worlds(1).run(two_steps, arguments(folder))[0]


def test_of_one_process(folder, alone, worlds):
    losses, seen, weights, balance = alone
    layers = [f"layers.{i}" for i in range(SMALL.num_layers)]
    for n, quantity in enumerate(("update_norm", "weight_norm")):
        squares = {}
        for name, both in weights.items():
            unit = ".".join(name.split(".")[: 2 if name.startswith("layers") else 1])
            squares[unit] = squares.get(unit, 0.0) + both[n].square().sum().item()
        assert list(squares) == ["embedding", *layers, "head"]
        assert close(seen[quantity], {unit: square**0.5 for unit, square in squares.items()}, 1e-8)
    linear = [name for name, of in zip(layers, SMALL.layers, strict=True) if of.mixers[0].linear]
    for quantity in ("half_life", "state_norm", "carried_share"):
        assert list(seen[quantity]) == linear
        assert all(
            len(seen[quantity][f"layers.{i}"]) == SMALL.layers[i].mixers[0].v_heads
            for i in range(2)
        )
    assert all(0 < share < 1 for by_head in seen["carried_share"].values() for share in by_head)
    assert all(0 < e <= 1 for by_head in seen["attention_entropy"].values() for e in by_head)
    assert set(seen["attention_entropy"]) == set(layers) - set(linear)
    assert list(seen["loss_by_position"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert list(seen["loss_by_source"]) == ["a", "b"] and balance == 1
    without = worlds(1).run(two_steps, arguments(folder, {"metrics.telemetry_freq": 0}))[0]
    assert without[0] == losses and not without[1]
    assert all(torch.equal(both[1], weights[name][1]) for name, both in without[2].items())


def convolved(mixer, name, x, edges):
    proj, conv = getattr(mixer, f"{name}_proj"), getattr(mixer, f"{name}_conv1d")
    y = proj(x) * getattr(conv, "factor", 1.0)
    return direct_causal_conv1d(y, conv.weight, conv.bias, activation="silu", cu_seqlens=edges)[0]


def rule_inputs(mixer, x, edges):
    """q, k, v, g, β of a delta rule."""
    q, k, v = (convolved(mixer, name, x, edges) for name in "qkv")
    q, k = (l2norm(y.unflatten(-1, (-1, mixer.head_dim))) for y in (q, k))
    v, (raw, beta, _) = v.unflatten(-1, (-1, mixer.v_head_dim)), mixer._gates(x)
    bound = (mixer.lower_bound,) if isinstance(mixer, KDAMixer) else ()
    g = (kda_gate if bound else gdn_gate)(raw, mixer.A_log, mixer.dt_bias, *bound)
    return q, k, v, g, beta.sigmoid() * mixer.beta_range


def delta_rule(mixer, x, edges):
    q, k, v, g, beta = rule_inputs(mixer, x, edges)
    return recurrent_delta_rule, {"v": v, "q": q, "k": k, "g": g, "beta": beta}, g


def ssd(mixer, x, edges):
    dims = {"x": mixer.head_dim, "b": mixer.state_dim, "c": mixer.state_dim}
    x_, B, C = (
        convolved(mixer, name, x, edges).unflatten(-1, (-1, dim)) for name, dim in dims.items()
    )
    # [1, T, heads]
    dt = F.softplus(mixer.dt_proj(x) * mixer.dt_factor + mixer.dt_bias).clamp(*mixer.dt_limit)
    A = -mixer.A_log.exp()
    return partial(recurrent_ssd, A=A, D=mixer.D), {"x": x_, "dt": dt, "B": B, "C": C}, dt * A


def lightning(mixer, x, layer, layers):
    q, k, v = (
        F.silu(p(x)).unflatten(-1, (mixer.heads, -1))
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    depth = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    slopes = torch.tensor(
        [2 ** (-8 * (h + 1) / mixer.heads) * depth for h in range(mixer.heads)], dtype=x.dtype
    )
    g = (-slopes).expand(q.shape[:3])
    return partial(recurrent_simple_gla, scale=1.0), {"v": v, "q": q, "k": k, "g": g}, g


def rwkv7(mixer, x, edges, first):
    """first: [1, T, heads·K], the first layer's values, in others."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    before[:, edges[:-1]] = 0
    x_r, x_w, x_k, x_v, x_a = (x + (before - x) * getattr(mixer, f"x_{name}") for name in "rwkva")
    w, rate = -math.exp(-0.5) * mixer.w_lora(x_w).sigmoid(), mixer.a_lora(x_a).sigmoid()
    r, k, v = mixer.r_proj(x_r), mixer.k_proj(x_k), mixer.v_proj(x_v)
    removed, k = k * mixer.k_k, k * (1 + (rate - 1) * mixer.k_a)
    if first is not None:
        v = v + (first - v) * mixer.v_lora(x_v).sigmoid()
    r, w, k, v, removed, rate = (
        y.unflatten(-1, (-1, mixer.head_dim)) for y in (r, w, k, v, removed, rate)
    )
    removed = removed / removed.norm(dim=-1, keepdim=True)
    tokens = {"v": v, "q": r, "k": k, "a": -removed, "b": removed * rate, "gk": w}
    return partial(recurrent_dplr, scale=1.0), tokens, w


def definition(layers, i, mixer, x, values, edges):
    """That of a mixer of layer i, which is given x and the first layer's values; of softmax attention there is none."""
    match mixer:
        case DeltaMixer():
            return delta_rule(mixer, x, edges)
        case Mamba2Mixer():
            return ssd(mixer, x, edges)
        case LightningMixer():
            return lightning(mixer, x, i, layers)
        case RWKV7Mixer():
            return rwkv7(mixer, x, edges, values)
    return None


def of_recurrence(definition, edges):
    """By head, token by token. What the longest document's second half has of its first is its output if it adds
    nothing to the state that it gets."""
    rule, inputs, g = definition
    o, states = rule(**inputs, cu_seqlens=edges)
    n = edges.diff().argmax()
    start, end = edges[n : n + 2].tolist()
    middle = (start + end + 1) // 2
    _, crossing = rule(**{name: y[:, start:middle] for name, y in inputs.items()})
    later = {name: y[:, middle:end] for name, y in inputs.items()}
    added = next(iter(inputs))  # v, or Mamba-2's x
    state = "initial_states" if added == "x" else "initial_state"
    carried, _ = rule(**later | {added: torch.zeros_like(later[added]), state: crossing})
    return {
        "half_life": math.log(2) / -g_of_heads(g),
        "state_norm": states.square().sum((2, 3)).sqrt().mean(0),
        "carried_share": carried.square().sum((0, 1, 3)) / o[:, middle:end].square().sum((0, 1, 3)),
    }


def g_of_heads(g):
    """Means [HV] of log decays [1, T, HV] or [1, T, HV, K]."""
    return g.movedim(2, 0).flatten(1).mean(1)


def of_attention(mixer, x, edges, plan):
    """By head, of 32 queries at equal distances, one after the other."""
    if isinstance(mixer, MLAMixer):
        latent, shared = mixer.kv_a_proj(x).split(mixer.latent_dims, -1)
        q = mixer.q_proj(x).unflatten(-1, (-1, mixer.q_dim))
        if mixer.rotary:
            theta, dim, _ = mixer.rotary
            turns = plan.position_ids[..., None] * theta ** -(
                torch.arange(0, dim, 2, dtype=torch.float64) / dim
            )
            own, turned = q.split([mixer.q_dim - dim, dim], -1)
            q = torch.cat([own, turned_by(turns[..., None, :], turned)], -1)
            shared = turned_by(turns, shared)
        k, _ = mixer._keys_and_values(mixer.kv_norm(latent), shared)
    else:
        q, k = mixer._queries_and_keys(x, plan)
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    shares = []
    for i in range(x.shape[1] // 32 - 1, x.shape[1], x.shape[1] // 32):
        keys = k[0, int(edges[edges <= i].max()) : i + 1]  # [keys, H, D]
        if len(keys) > 1:
            scale = getattr(mixer, "scale", None) or q.shape[-1] ** -0.5
            p = ((keys * q[0, i]).sum(-1) * scale).softmax(0)
            shares.append(-(p * p.log()).sum(0) / math.log(len(keys)))
    return {"attention_entropy": torch.stack(shares).mean(0)}


def turned_by(turns, x):
    """Neighbouring channels of x [.., D] as complex numbers, turned by turns [.., D / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(-2)


def second_step(rank, world_size, argv):
    """What should be seen of mixers and positions in the second step, what was, and the norm in its line."""
    trainer = trainer_of(argv)
    trainer.train_step()
    valid, (batch,) = trainer.feed.next_step()
    want = {}
    edges = batch.plan.cp_context.cu_seqlens_cpu.long()

    def note(i, layer, inputs):
        if not layer.mixers:
            return
        x = layer.mixer_input(layer.joined(inputs[0]))
        for where, mixer in zip((f"layers.{i}", f"layers.{i}.mixer1"), layer.mixers):
            values = inputs[3] if any(layer.takes) else None
            rule = definition(trainer.model.config.num_layers, i, mixer, x, values, edges)
            found = (
                of_attention(mixer, x, edges, batch.plan)
                if rule is None
                else of_recurrence(rule, edges)
            )
            for quantity, by_head in found.items():
                want.setdefault(quantity, {})[where] = by_head.tolist()

    hooks = [
        layer.register_forward_pre_hook(partial(note, i))
        for i, layer in enumerate(trainer.model.layers)
    ]
    model, plan = trainer.model, batch.plan
    with torch.no_grad():
        (x, later), between = (
            model.embedded(torch.cat([batch.tokens, plan.later.tokens])).split(1),
            Between(),
        )
        h = model.head.norm(model.through(range(model.config.num_layers), x, plan, None, between))
        losses = F.cross_entropy(model.head.logits(h)[0], batch.labels[0], reduction="none")
        h = model.through(model.predictor(0), torch.cat([later, h], -1), plan, None, between)
        want["loss_by_depth"] = {
            "1": F.cross_entropy(model.head.logits(h)[0], plan.later.labels[0]).item()
        }
    for hook in hooks:
        hook.remove()
    buckets = {}
    for t in (batch.labels[0] != IGNORE).nonzero().flatten().tolist():
        position = t - int(edges[edges <= t].max()) + 1
        buckets.setdefault(str(2 ** int(math.log2(position))), []).append(losses[t].item())
    want["loss_by_position"] = {name: sum(of) / len(of) for name, of in buckets.items()}
    trainer.feed.next_step = lambda: (valid, iter([batch]))
    norm = trainer.train_step()["grad_norm"]
    return want, trainer.telemetry.seen, norm


@pytest.mark.parametrize(
    "name",
    ["hybrid", "kimi-linear", "ling-3", "nemotron-h", "granite-h", "falcon-h1", "minimax", "rwkv7"],
)
def test_quantities_equal_their_definitions(name, folder, worlds):
    flavor = "small" if name == "hybrid" else "debug"
    argv = arguments(folder, {"model.name": name, "model.flavor": flavor, "model.mtp_layers": 1})
    ((want, seen, norm),) = worlds(1).run(second_step, argv)
    attention = [] if name == "rwkv7" else ["attention_entropy"]
    losses = ["loss_by_position", "loss_by_depth"]
    for quantity in ("half_life", "state_norm", "carried_share", *losses, *attention):
        assert want[quantity] and close(seen[quantity], want[quantity], 1e-7), quantity
    assert math.sqrt(sum(x**2 for x in seen["grad_norm"].values())) == pytest.approx(
        norm, rel=1e-12
    )


@pytest.mark.parametrize("name", ["dp 2", "cp 2 zig-zag", "selective activation checkpointing"])
def test_splits_show_the_same_and_change_no_step(name, folder, alone, worlds):
    processes, keys = SPLITS[name]
    ranks = worlds(processes).run(two_steps, arguments(folder, keys))
    off = worlds(processes).run(two_steps, arguments(folder, keys, {"metrics.telemetry_freq": 0}))
    for losses, seen, weights, balance in ranks:
        assert losses == off[0][0]
        assert all(torch.equal(both[1], weights[name][1]) for name, both in off[0][2].items())
        assert seen.keys() == alone[1].keys() | ({"fragment_share"} if name != "dp 2" else set())
        # by heads; by dp, or of few tokens on each rank
        assert balance == 1 if name == "cp 2 zig-zag" else balance > 1
        same = [
            "grad_norm",
            "update_norm",
            "weight_norm",
            "half_life",
            "loss_by_position",
            "loss_by_source",
        ]
        for quantity in [*same, *(["state_norm"] if name == "dp 2" else [])]:
            assert close(seen[quantity], alone[1][quantity]), quantity


def shares_of_fragments(rank, world_size, argv, layout):
    """By layer and head, of the second step cut in two: token by token, what fragments give beyond what they give if
    no state enters them."""
    trainer = trainer_of(argv)
    trainer.train_step()
    _, (batch,) = trainer.feed.next_step()
    edges, shares = batch.plan.cp_context.cu_seqlens_cpu.long(), {}

    def note(i, layer, inputs):
        x = layer.mixer_input(inputs[0])
        rule, tokens, _ = definition(len(trainer.model.layers), i, layer.mixer, x, inputs[3], edges)
        o, _ = rule(**tokens, cu_seqlens=edges)
        sums = torch.zeros(2, o.shape[2], dtype=o.dtype)
        for r in range(2):
            cp = build_cp_context(
                edges, rank=r, world_size=2, layout=layout, num_streams=batch.plan.num_streams
            )
            own, mine = (
                {name: y[:, tokens_of(cp)] for name, y in tokens.items()},
                o[:, tokens_of(cp)],
            )
            alone, _ = rule(**own, cu_seqlens=cp.cu_seqlens_cpu.long())
            sums += torch.stack(
                [(mine - alone).square().sum((0, 1, 3)), mine.square().sum((0, 1, 3))]
            )
        shares[f"layers.{i}"] = (sums[0] / sums[1]).tolist()

    layers = [
        (i, layer)
        for i, layer in enumerate(trainer.model.layers)
        if isinstance(layer.mixer, RecurrentMixer)
    ]
    hooks = [layer.register_forward_pre_hook(partial(note, i)) for i, layer in layers]
    with torch.no_grad():
        trainer.model(batch.tokens, batch.plan)
    for hook in hooks:
        hook.remove()
    return shares


@pytest.mark.parametrize(
    "name, layout",
    [("hybrid", "contiguous"), ("hybrid", "zigzag"), ("minimax", "zigzag"), ("rwkv7", "zigzag")],
)
def test_share_of_other_fragments(name, layout, folder, worlds):
    model = {"model.name": name, "model.flavor": "small" if name == "hybrid" else "debug"}
    (want,) = worlds(1).run(shares_of_fragments, arguments(folder, model), layout)
    keys = {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_layout": layout}
    for _, seen, *_ in worlds(2).run(two_steps, arguments(folder, model, keys)):
        assert close(seen["fragment_share"], want, 1e-7)
    assert all(0 < share < 1 for by_head in want.values() for share in by_head)


def layers_in_turn(rank, world_size, argv):
    """Of which layers each step shows what crosses, if it may be of two."""
    with patch("titan_linear.hooks.telemetry.ACROSS", 2):
        trainer, seen = trainer_of(argv), []
        for _ in range(4):
            trainer.train_step()
            seen.append(list(trainer.telemetry.seen["fragment_share"]))
    return seen


def test_layers_take_turns(folder, worlds):
    kinds = [layer.mixers[0].linear for layer in SMALL.layers]
    n = len(kinds)
    turns = [[i for i in range(n) if kinds[i] and (i - 2 * turn) % n < 2] for turn in range(1, 5)]
    assert {i for turn in turns for i in turn} == {i for i in range(n) if kinds[i]} != set(turns[0])
    keys = {
        "parallelism.context_parallel_degree": 2,
        "metrics.telemetry_freq": 1,
        "training.steps": 4,
    }
    for seen in worlds(2).run(layers_in_turn, arguments(folder, keys)):
        assert seen == [[f"layers.{i}" for i in turn] for turn in turns]


def test_loads_of_experts(folder, worlds):
    """Where a bias moves by them, and where none does."""
    for name, split in (
        ("kimi-linear", {"parallelism.expert_parallel_degree": 2, "training.local_batch_size": 2}),
        ("qwen3.5", {"parallelism.tensor_parallel_degree": 2}),
    ):
        keys = {"model.name": name, "model.flavor": "debug"}
        (alone,) = worlds(1).run(two_steps, arguments(folder, keys))
        for losses, seen, *_ in worlds(2).run(two_steps, arguments(folder, keys, split)):
            assert losses == pytest.approx(alone[0], rel=1e-9)
            assert seen["router_load"] and close(seen["router_load"], alone[1]["router_load"])
        assert all(
            sum(loads) == pytest.approx(len(loads)) for loads in alone[1]["router_load"].values()
        )


def by_letters(rank, world_size, argv):
    """Nats and tokens of the second step by the letters of the documents, from logits of the model before it."""
    trainer = trainer_of(argv)
    trainer.train_step()
    _, (batch,) = trainer.feed.next_step()
    with torch.no_grad():
        logits = trainer.model(batch.tokens, batch.plan)[0]
    losses, letters = (
        F.cross_entropy(logits, batch.labels[0], reduction="none"),
        bytes(batch.tokens[0].clamp(max=255)),
    )
    found = {}
    for loss, label, letter in zip(
        losses.tolist(), batch.labels[0].tolist(), letters.decode("latin-1"), strict=True
    ):
        if label != IGNORE:  # of an end token there is none
            sums = found.setdefault(
                "up" if letter.isupper() else "low" if letter.islower() else "other", [0.0, 0]
            )
            sums[0], sums[1] = sums[0] + loss, sums[1] + 1
    return found


GROUPS = '[{name = "up", files = "up/*"}, {name = "low", files = "texts/low/*.low"}]'


def test_losses_by_files(folder, worlds):
    texts = {
        "training.mixture": "[]",
        "training.dataset": "text",
        "training.dataset_path": folder / "texts",
    }
    groups = {"metrics.loss_by_source": GROUPS}
    losses, seen, *_ = worlds(1).run(two_steps, arguments(folder, texts, groups))[0]
    assert worlds(1).run(two_steps, arguments(folder, texts))[0][0] == losses
    (want,) = worlds(1).run(by_letters, arguments(folder, texts))
    assert list(seen["loss_by_source"]) == list(seen["tokens_by_source"]) == ["up", "low", "other"]
    assert seen["tokens_by_source"] == {name: count for name, (_, count) in want.items()}
    assert close(
        seen["loss_by_source"], {name: nats / count for name, (nats, count) in want.items()}
    )
    split = {
        "training.local_batch_size": 2,
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_layout": "zigzag",
    }
    # dp 2 × cp 2
    for _, of_rank, *_ in worlds(4).run(two_steps, arguments(folder, texts, groups, split)):
        assert of_rank["tokens_by_source"] == seen["tokens_by_source"]
        assert close(of_rank["loss_by_source"], seen["loss_by_source"])


def test_lines_of_a_run(folder, worlds, tmp_path):
    of_texts = f'{{name="t", weight=1, dataset="text", dataset_path="{folder}/texts"}}'
    mixture = f'[{{name="a", weight=1, dataset="tokens", dataset_path="{folder}/a"}}, {of_texts}]'
    keys = {
        "job.dump_folder": tmp_path,
        "metrics.enable_tensorboard": "true",
        "training.local_batch_size": 2,
        "training.mixture": mixture,
        "metrics.loss_by_source": GROUPS,
        "profiling.enable_profiling": "true",
        "profiling.profile_freq": 2,
        "profiling.profiler_active": 2,
        "profiling.profile_count": 1,
        "validation.enable": "true",
        "validation.freq": 1,
        "validation.steps": 2,
        "validation.holdout": 0.1,
        "validation.sample_tokens": 3,
    }
    worlds(2).run(train, arguments(folder, keys))
    (line,) = read_lines(tmp_path / "telemetry.jsonl")
    assert line["step"] == 2 and line["grad_norm"]["embedding"] > 0
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["work_balance"] >= 1 for line in lines if "loss" in line] == [True, True]
    recorded = read_json(tmp_path / "profile_traces" / "rank0_step2.json")["traceEvents"]
    assert len([e for e in recorded if e["name"].startswith("ProfilerStep#")]) == 2
    events = events_of(tmp_path)
    tags = events.Tags()
    assert {
        "per_layer_grad_norm/layers.0",
        "loss_by_position/16",
        "perf/work_balance",
        "loss_by_source/a",
        "loss_by_source/other",
        "tokens_by_source/low",
    } <= set(tags["scalars"])
    assert "per_layer_half_life/layers.0" in tags["histograms"]
    _, text = events.Tensors("sample/text_summary")
    assert text.step == 2 and text.tensor_proto.string_val[0].decode().startswith("    def ")
