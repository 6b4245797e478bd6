"""Layers that predict further tokens: their definition, each document by itself, all logits at once; their folders."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models import hf_models
from tests.models.ours import labels_of, positions, relative
from tests.records import read_json
from tests.refusals import refused
from titan_linear.config import Config
from titan_linear.data import Batch
from titan_linear.losses import build_loss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.decoder import Between, Decoder
from titan_linear.models.init import initialise
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.step.cut import later_of
from titan_linear.storage.hf_io import load_weights, read_model
from titan_linear.storage.hf_writing import gather, write_folder

BOUNDS = [0, 1, 3, 6, 40, 64]  # of documents shorter than the depth, too
DEPTH, WEIGHT = 3, 0.3


def config_of(name):
    config = replace(preset(name, "debug"), vocab_size=97, mtp_layers=DEPTH, mtp_weight=WEIGHT)
    # The load of experts counts tokens beyond a document's end, which a document by itself lacks.
    return replace(
        config,
        moe=config.moe and replace(config.moe, balance_coefficient=0.0, bias_update_rate=0.0),
    )


def norm(x, weight, config):
    scale = 1 + weight if config.zero_centred_norm else weight
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * scale


def definition(model, tokens, labels, weights):
    """Loss of a document, and the sum of those of its further tokens. Sequences become shorter by a token each time."""
    config = model.config

    def through(x, layers):
        plan, between = BatchPlan(torch.arange(len(x))), Between()
        return model.through(layers, x.unsqueeze(0), plan, None, between)[0]

    def loss(h, k):
        terms = F.cross_entropy(
            h @ model.head.weight.T, labels[k:], reduction="none", ignore_index=-100
        )
        return (weights[k:] * terms).sum()

    embedded = model.embedding.weight[tokens]
    h = norm(through(embedded, range(config.num_layers)), model.head.norm.weight, config)
    losses = [loss(h, 0)]
    for k in range(1, min(DEPTH, len(tokens) - 1) + 1):
        layers = model.predictor(k - 1)
        joins, ends = model.layers[layers[0]], model.layers[layers[-1]]
        e, h = (
            norm(embedded[k:], joins.enorm.weight, config),
            norm(h[:-1], joins.hnorm.weight, config),
        )
        with swapped(joins, ends):
            x = through(torch.cat([e, h], -1) @ joins.eh_proj.weight.T, layers)
        h = norm(x, ends.final_norm.weight, config)
        losses.append(loss(h, k))
    return losses[0], sum(losses[1:], torch.zeros((), dtype=torch.float64))


@contextmanager
def swapped(*layers):
    """Have layers neither join nor norm what they give: both are done by hand."""
    options = [layer.options for layer in layers]
    for layer in layers:
        layer.options = layer.options._replace(joins=False, ends=False)
    yield
    for layer, own in zip(layers, options, strict=True):
        layer.options = own


@pytest.mark.parametrize("name", ["hybrid", "kda", "qwen3.5", "nemotron-h", "ling-3"])
def test_loss_and_gradients_are_those_of_the_definition(name):
    model = Decoder(config_of(name)).double()
    initialise(model, seed=0)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p += (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 8
                if "norm" in n
                else 0
            )
    tokens = torch.randint(97, (BOUNDS[-1],), generator=torch.Generator().manual_seed(0))
    labels = labels_of(tokens, BOUNDS)
    labels[10:20] = -100  # a message that is not learnt
    weights = torch.rand(len(tokens), generator=torch.Generator().manual_seed(0))
    bounds, columns = torch.tensor(BOUNDS, dtype=torch.int32), {"weights": weights[None]}
    batch = Batch(tokens[None], labels[None], bounds, positions(BOUNDS)[None], 1, (0,), columns)
    plan = BatchPlan(positions(BOUNDS), cu_seqlens=bounds, later=later_of(batch, DEPTH))
    micro = LocalBatch(batch.tokens, batch.labels, columns, batch.streams, plan=plan)
    model.head.chunk = 24
    got = model(
        batch.tokens,
        plan,
        loss=partial(build_loss("cross_entropy", Config().cross_entropy), batch=micro),
    )
    got.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    documents = (
        definition(model, tokens[a:b], labels[a:b], weights[a:b].double())
        for a, b in pairwise(BOUNDS)
    )
    losses, further = zip(*documents)
    (sum(losses) + WEIGHT / DEPTH * sum(further)).backward()
    assert relative(got, sum(losses)) < 1e-10  # the loss that is printed
    for n, p in model.named_parameters():
        if p.requires_grad and not n.endswith("selection_bias"):
            assert p.grad.any() and relative(found[n], p.grad) < 1e-10, n


# --- Folders ---------------------------------------------------------------------------------------------------------

# family: the key of config.json; (of an MTP layer, the layer that is like it); names of what else it has
PUBLISHED = {
    "Qwen3.5, tied": (
        "mtp_num_hidden_layers",
        {"mtp.layers.0.": "layers.1."},
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    ),
    "Nemotron 3": (
        "num_nextn_predict_layers",
        {"mtp.layers.0.": "layers.2.", "mtp.layers.1.": "layers.3."},
        (
            "mtp.layers.0.enorm",
            "mtp.layers.0.hnorm",
            "mtp.layers.0.eh_proj",
            "mtp.layers.1.final_layernorm",
        ),
    ),
    "Ling 3": (
        "num_nextn_predict_layers",
        {"model.layers.2.": "layers.1."},
        tuple(
            f"model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")
        ),
    ),
}


@pytest.fixture(params=PUBLISHED)
def folder(request, tmp_path):
    """With the layers that published models have, and transformers leaves out."""
    key, layers, others = PUBLISHED[request.param]
    hf_models.build(request.param).save_pretrained(tmp_path / "folder")
    config = read_json(tmp_path / "folder/config.json")
    (tmp_path / "folder/config.json").write_text(json.dumps(config | {key: 1}))
    tensors = load_file(tmp_path / "folder/model.safetensors")
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    of_layers = [
        (mtp + name.partition(layer)[2], tensor.shape)
        for mtp, layer in layers.items()
        for name, tensor in tensors.items()
        if layer in name
    ]
    more = [
        (f"{name}.weight", (32, 64) if name.endswith(("fc", "eh_proj")) else (32,))
        for name in others
    ]
    tensors |= {name: draw(shape).bfloat16() for name, shape in of_layers + more}
    save_file(tensors, tmp_path / "folder/model.safetensors", {"format": "pt"})
    return tmp_path / "folder"


def test_in_and_out_gives_the_same_bytes(folder, tmp_path):
    """And what was trained comes back, by the names of published folders, with one beside it or without."""
    family, config = read_model(folder, 1)
    model = Decoder(config)
    load_weights(folder, model)
    write_folder(tmp_path / "same", config, family, gather(model), dtype=None, like=folder)
    before, same = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "same"))
    assert before.keys() == same.keys()
    assert all(torch.equal(same[n], x) and same[n].dtype == x.dtype for n, x in before.items())
    with torch.no_grad():
        for layer in model.layers[config.num_layers :]:
            for p in layer.parameters():
                p += 1
    for like in (folder, None):
        write_folder(
            tmp_path / "out", config, family, gather(model), dtype=torch.float32, like=like
        )
        assert read_model(tmp_path / "out", 1) == (family, config)
        again = Decoder(config)
        load_weights(tmp_path / "out", again)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
        )
        assert load_file(tmp_path / "out/model.safetensors").keys() == before.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_depth_that_a_folder_lacks_is_refused(folder):
    with refused(r"model.mtp_layers = 2, but .* config.json predict 1 .*set it to 1"):
        read_model(folder, 2)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith(("mtp.fc.weight", "eh_proj.weight")))
    save_file({n: x for n, x in tensors.items() if n != name}, folder / "model.safetensors")
    _, config = read_model(folder, 1)
    with refused(rf"{name}: missing, \[32, 64\]"):
        load_weights(folder, Decoder(config))
