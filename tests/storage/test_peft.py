"""PEFT folders of every family in transformers: a run trains and exports, peft opens, merge adds up, a run goes on."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.keys import argv_of
from tests.models import hf_models
from tests.models.ours import relative
from tests.records import change_json
from tests.refusals import refused
from tests.storage.peft_runs import begun, config_of, make_base, train
from titan_linear.commands.convert import main as convert
from titan_linear.config import load_config
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.run.build import allocated
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import preflight
from titan_linear.storage.hf_writing import write_folder
from titan_linear.storage.peft import PEFT_CONFIG, PEFT_WEIGHTS, not_served, peft_config
from titan_linear.storage.tensors import load_weights

peft = pytest.importorskip("peft")
VARIANTS = (
    "OLMo-Hybrid, no positions",
    "Ling 3, unbounded",
    "Nemotron-H",
    "Falcon-H1, no norm",
    "Granite-H, dense",
)
NAMES = [name for name in hf_models.MODELS if name not in VARIANTS]
TOKENS = torch.randint(hf_models.VOCAB, (1, 31), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    bounds = torch.tensor([0, TOKENS.numel()], dtype=torch.int32)
    return deepcopy(model).double()(
        TOKENS, BatchPlan(torch.arange(TOKENS.numel()), cu_seqlens=bounds)
    )


@torch.no_grad()
def logits_of_theirs(model: torch.nn.Module) -> Tensor:
    model.config._experts_implementation = "eager"  # others have no products in float64
    return model.double()(TOKENS).logits


def summed(model: Decoder) -> dict[str, Tensor]:
    """W + s B A of every weight, in its own type, by hand."""
    own, adapter = dict(model.named_parameters()), model.config.adapter
    lead = {name: next(n for n in names if n in own) for names in adapter.shared for name in names}
    whole = {}
    for name, p in own.items():
        stem = (
            f"{name}_"
            if "experts" in name and not name.endswith("weight")
            else name.removesuffix("weight")
        )
        if f"{stem}lora_B" in own:
            A = own[
                f"{lead.get(name, name).removesuffix('weight') if stem != f'{name}_' else stem}lora_A"
            ].double()
            B = own[f"{stem}lora_B"].double()
            delta = torch.einsum("e...r,eri->e...i", B, A) if A.dim() == 3 else B @ A
            p = (p.double() + adapter.factor * delta).to(p.dtype)
        whole[name] = p.detach()
    return {name: p for name, p in whole.items() if "lora_" not in name}


@pytest.mark.parametrize("name", NAMES)
def test_folders_go_out_and_come_back(name, corpus, worlds, tmp_path):
    theirs = make_base(name, tmp_path / "base")
    config = config_of(name, tmp_path, corpus)
    worlds(1).run(train, config)
    folder = tmp_path / "run/checkpoint/step-3-hf"
    ours = begun(Origin.of(config))
    before = logits(ours)
    # some of theirs is in float32 even so
    bound = 1e-6 + relative(logits_of_theirs(theirs), before)
    load_weights(tmp_path / "run/checkpoint/step-3", ours)
    want = logits(ours)
    assert relative(before, want) > 0.01
    scored = begun(Origin.reading(tmp_path / "run", []))
    assert all(torch.equal(p, ours.get_parameter(n)) for n, p in scored.named_parameters())

    assert relative(logits_of_theirs(peft.PeftModel.from_pretrained(theirs, folder)), want) < bound

    for source in (folder, tmp_path / "run"):
        assert convert(["merge", str(source), str(tmp_path / f"{source.name}-merged")]) == 0
        keys = {
            "model__hf_assets_path": tmp_path / f"{source.name}-merged",
            "adapter__enable": "false",
        }
        merged = begun(Origin.of(config_of(name, tmp_path, corpus, **keys)))
        assert all(torch.equal(p, merged.get_parameter(n)) for n, p in summed(ours).items())
    if not name.startswith("Nemotron"):  # which transformers reads with other limits of time steps
        for opened in (folder, tmp_path / "run-merged"):
            model = AutoModelForCausalLM.from_pretrained(opened, dtype=torch.float32)
            assert relative(logits_of_theirs(model), want) < bound

    again = config_of(
        name,
        tmp_path,
        corpus,
        adapter__initial_load_path=folder,
        job__dump_folder=tmp_path / "next",
    )
    preflight(again, 1)
    assert all(
        torch.equal(p, ours.get_parameter(n)) for n, p in begun(Origin.of(again)).named_parameters()
    )


def test_what_does_not_fit_is_refused(corpus, worlds, tmp_path, capsys):
    """Another rank, other weights, another base, and what peft cannot name: by a line, before anything starts."""
    base = make_base("Bamba", tmp_path / "base")
    worlds(1).run(train, config_of("Bamba", tmp_path, corpus))
    folder = tmp_path / "run/checkpoint/step-3-hf"

    assert (
        convert(
            ["to-hf", str(tmp_path / "run"), str(tmp_path / "half"), "--export-dtype", "bfloat16"]
        )
        == 0
    )
    assert {x.dtype for x in load_file(tmp_path / "half" / PEFT_WEIGHTS).values()} == {
        torch.bfloat16
    }

    def check(message, **keys):
        keys = {"adapter__initial_load_path": folder, "job__dump_folder": tmp_path / "next"} | keys
        with refused(message):
            preflight(config_of("Bamba", tmp_path, corpus, **keys), 1)

    check(r"r = 4, and the run has 8; set adapter.rank to that", adapter__rank=8)
    check(r"has base_model\S+ .*which the run does not train", adapter__targets='["mlp"]')
    check(
        r"in_proj.lora_B.weight adapts more of \S+in_proj.weight than the run does",
        adapter__targets='["!x_proj"]',
    )
    check(r"lm_head.weight is missing", adapter__train_extra='["*norm", "embedding", "head"]')
    check(
        r"last_save_in_hf = true: peft takes no \S+A_log of Bamba", adapter__train_extra='["A_log"]'
    )
    for key, value in {
        "peft_type": "LOHA",
        "alora_invocation_tokens": [5],
        "init_lora_weights": "pissa",
    }.items():
        shutil.copytree(folder, tmp_path / key)
        change_json(tmp_path / key / PEFT_CONFIG, {key: value})
        check(
            rf"{key} = \W{value}.?.?[ ,].*(not read|changes the base)",
            adapter__initial_load_path=tmp_path / key,
        )
    change_json(tmp_path / key / PEFT_CONFIG, {"base_model_name_or_path": None})
    for source, to, said in (
        (key, "merged", "is not a Hugging Face folder; give it by --base"),
        ("run", "base", "already"),
    ):
        assert (
            convert(["merge", str(tmp_path / source), str(tmp_path / to)]) == 2
            and said in capsys.readouterr().err
        )
    with torch.no_grad():
        base.lm_head.weight[0, 0] += 1
    hf_models.save(base, tmp_path / "base")
    check(r"has the adapters of another base \(fingerprint \w+; this one has \w+\); give theirs")
    longer = {
        "job__dump_folder": tmp_path / "run",
        "training__steps": 4,
        "lr_scheduler__total_steps": 4,
    }
    check(r"gives another base of its adapters than the run in", **longer)
    assert convert(["merge", str(folder), str(tmp_path / "merged")]) == 2


def test_layers_that_predict_further_tokens_go_out_and_come_back(corpus, worlds, tmp_path):
    """Also from the names of an architecture that contains the language model."""
    model = replace(preset("qwen3.5", "debug"), num_layers=2, mtp_layers=1)
    drawn = allocated(model, torch.float32, torch.device("cpu"))
    initialise(drawn, 0)
    write_folder(
        tmp_path / "base", model, "Qwen3_5MoeForCausalLM", drawn.get_parameter, dtype=torch.float32
    )
    config = config_of("", tmp_path, corpus, model__mtp_layers=1)
    worlds(1).run(train, config)
    folder = tmp_path / "run/checkpoint/step-3-hf"
    file = folder / PEFT_WEIGHTS
    contained = {
        name.replace("model.layers", "model.language_model.layers"): x
        for name, x in load_file(file).items()
    }
    save_file(contained, file)
    for source in (folder, tmp_path / "run"):
        assert convert(["merge", str(source), str(tmp_path / f"{source.name}-merged")]) == 0
    base, one, other = (
        load_file(tmp_path / f"{x}/model.safetensors")
        for x in ("base", "step-3-hf-merged", "run-merged")
    )
    assert one.keys() == base.keys() and all(torch.equal(x, other[name]) for name, x in one.items())
    assert not torch.equal(one["mtp.fc.weight"], base["mtp.fc.weight"])


@pytest.mark.parametrize(
    "keys, said",
    [
        (
            {},
            "SGLang leaves out the adapters of in_proj_a, in_proj_b, shared_expert_gate: serve what",
        ),
        ({"adapter.targets": '["o_proj", "q_proj", "experts"]'}, ""),
        (
            {
                "model.name": "qwen3-next",
                "model.flavor": "80B-A3B",
                "adapter.targets": '["mlp.shared"]',
            },
            "",
        ),
        (
            {
                "adapter.targets": '["mlp.shared"]',
                "adapter.train_extra": '["mixer_norm", "head.weight"]',
            },
            "vLLM takes none with modules_to_save (input_layernorm, lm_head): serve what titan-linear convert merge",
        ),
    ],
)
def test_what_servers_leave_out_is_said(keys, said):
    config = load_config(argv_of({"model.name": "qwen3.5", "adapter.enable": "true"} | keys))
    origin = Origin.of(config)
    written = peft_config(origin.definition, origin.family(), config.adapter, "base")
    line = not_served(written)
    assert line.startswith(said) and bool(line) == bool(said)
    assert "vLLM applies none to Qwen3_5For" in not_served(
        written, "Qwen3_5ForConditionalGeneration"
    )
