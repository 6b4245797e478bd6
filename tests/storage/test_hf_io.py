"""Hugging Face folders in and out: by rows on several ranks, whole runs, conversion, and folders that are refused."""

import errno
import itertools
import json
import multiprocessing as mp
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests import hf_workers as workers
from tests.bpe import byte_bpe
from tests.hf_workers import EVERY, KDA, LARGE, mark
from tests.keys import argv_of
from tests.models import hf_models
from tests.models.hf_states import state_from_hf
from tests.models.ours import initialised
from tests.processes import until
from tests.records import change_json, read_json, read_lines, write_json, write_texts
from tests.refusals import is_refused, refused
from titan_linear.commands import convert, generate
from titan_linear.config import check_config, load_config
from titan_linear.data import build_tokenizer
from titan_linear.models import mixers
from titan_linear.models.config import differences
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import config_to_hf, ignored, placements
from titan_linear.models.presets import MODELS, preset
from titan_linear.run import export
from titan_linear.run.console import model_name
from titan_linear.run.generate import Sampling, generate_tokens
from titan_linear.run.origin import Origin, other_tokenizer
from titan_linear.run.preflight import preflight
from titan_linear.storage import hf_io, hf_writing, tensors
from titan_linear.storage.checkpoint import SaveFailed
from titan_linear.storage.files import finish_replacing
from titan_linear.storage.hf_io import load_weights, open_folder, read_model
from titan_linear.storage.hf_writing import find_family, gather, write_folder
from titan_linear.storage.step_folders import Content, Progress

FLA = {
    "FLA KDA": KDA,
    "FLA GDN": replace(preset("gdn", "debug"), norm_eps=1e-6, tie_embeddings=True),
}
CASES = [*hf_models.MODELS, *FLA]
PROCESSORS = (
    "preprocessor_config",
    "video_preprocessor_config",
    "processor_config",
    "chat_template",
)


def save_model(name, folder):
    """The model of a case, in float32."""
    if name in FLA:
        model = initialised(FLA[name], 1)
        write_folder(folder, FLA[name], find_family(FLA[name]), gather(model), dtype=torch.float32)
    else:
        hf_models.build(name).save_pretrained(folder)


def loaded(folder):
    """The family, the configuration and the weights of a folder."""
    family, config = read_model(folder)
    model = Decoder(config)
    load_weights(folder, model)
    return family, config, model


def change_tensors(folder, change, file="model.safetensors"):
    save_file(change(load_file(folder / file)), folder / file, {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, in bfloat16 but for the gates' parameters, as published models are."""
    root, done = tmp_path_factory.mktemp("folders"), {}

    def get(name):
        if name not in done:
            done[name] = root / str(len(done))
            save_model(name, done[name])
            keep = ("A_log", "dt_bias", "correction_bias")
            change_tensors(
                done[name],
                lambda x: {n: t if n.endswith(keep) else t.bfloat16() for n, t in x.items()},
            )
        return done[name]

    return get


def tensor_bytes(folder):
    return {
        name: (t.code, t.shape, t.file.read_bytes()[t.begin : t.end])
        for name, t in open_folder(folder).tensors.items()
    }


# --- In and out ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten(folders, worlds, tmp_path_factory):
    """case -> (folder, the same loaded on two ranks and written again in small files, parameters on each rank)."""
    root = tmp_path_factory.mktemp("rewritten")
    paths = [(folders(name), root / str(i)) for i, name in enumerate(CASES)]
    states = worlds(2).run(workers.in_and_out, paths)
    return {name: (*paths[i], [state[i] for state in states]) for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_in_and_out_on_two_ranks_gives_the_same_bytes(name, rewritten):
    source, target, states = rewritten[name]
    assert tensor_bytes(target) == tensor_bytes(source)
    assert len(list(target.glob("*.safetensors"))) > 1 and (target / hf_io.INDEX).is_file()
    family, config = read_model(target)
    whole = state_from_hf(load_file(source / "model.safetensors"), config, family)
    for state in states:
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[n], whole[n].float()) for n in whole)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_transformers_opens_it(name, rewritten):
    source, target, _ = rewritten[name]
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(tensor, theirs[n]) for n, tensor in model.state_dict().items())


@pytest.mark.parametrize("degrees", [(2,), (1, 1, 1, 2)], ids=["HSDP", "sharded over 2 of 4"])
def test_in_and_out_with_replicas(folders, worlds, tmp_path, degrees):
    source = folders("FLA GDN")
    worlds(4).run(workers.in_and_out, [(source, tmp_path / "out")], *degrees)
    assert tensor_bytes(tmp_path / "out") == tensor_bytes(source)


def with_even_vocabulary(source, folder):
    """A folder without the last row of the vocabulary."""
    shutil.copytree(source, folder)
    rows = hf_models.VOCAB - 1
    change_tensors(
        folder, lambda x: {n: t[:rows] if len(t) == rows + 1 else t for n, t in x.items()}
    )
    change_json(folder / "config.json", {"vocab_size": rows})
    return folder


def test_in_and_out_with_tensor_and_expert_parallelism(folders, worlds, tmp_path):
    """Two ranks of tp, each with two shards, or half of the experts: parts of rows, of columns, of fused tensors."""
    sources = [
        with_even_vocabulary(folders(name), tmp_path / f"in {name}") for name in hf_models.MODELS
    ]
    paths = [(source, tmp_path / f"out {i}") for i, source in enumerate(sources)]
    worlds(4).run(workers.in_and_out, paths, 1, 2, 2)
    assert all(tensor_bytes(target) == tensor_bytes(source) for source, target in paths)


def test_what_is_written_is_not_what_was_computed_with(folders, worlds):
    """After a forward FSDP leaves the head whole, in bfloat16."""
    assert worlds(2).run(workers.gathered_after_a_forward, folders("FLA KDA")) == [[], []]


def test_what_is_not_ours_is_kept(folders, tmp_path):
    """Vision, multi-token prediction and the settings of processors come out as they went in; a copy of a tied
    embedding, stale, is left out."""
    source = tmp_path / "source"
    shutil.copytree(folders("Qwen3.5, tied"), source)
    settings = {f"{name}.json": name.encode() for name in PROCESSORS}
    for name, content in settings.items():
        (source / name).write_bytes(content)
    tensors = load_file(source / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(3, 5).half(), "model.visual.ids": torch.arange(4)}
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | extra | copy, source / "model.safetensors", {"format": "pt"})
    family, config, model = loaded(source)
    write_folder(tmp_path / "out", config, family, gather(model), dtype=torch.float32, like=source)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in settings} == settings
    assert out.keys() == {*tensors, *extra}
    assert all(torch.equal(out[n], t) and out[n].dtype == t.dtype for n, t in extra.items())
    assert all(torch.equal(out[n], t.float()) for n, t in tensors.items())


def test_an_export_opens_in_its_own_dtype(tmp_path):
    """Of a model with vision beside the text, from whose text_config alone transformers opens the language model."""
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=4
    )
    vision |= dict(spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16)
    text = dict(
        hf_models.QWEN,
        intermediate_size=48,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_id=7,
    )
    whole = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    source, out = tmp_path / "source", tmp_path / "out"
    hf_models.randomise(Qwen3_5ForConditionalGeneration(whole)).bfloat16().save_pretrained(source)
    config = read_json(source / "config.json")
    assert config["text_config"]["dtype"] == "bfloat16"
    for older in ({}, {"torch_dtype": "bfloat16"}):
        write_json(source / "config.json", config | {"text_config": config["text_config"] | older})
        family, model, decoder = loaded(source)
        decoder.embedding.weight.data.add_(1e-4)
        extra = {"eos_token_id": 3}
        write_folder(
            out, model, family, gather(decoder), dtype=torch.float32, like=source, extra=extra
        )
        opened = AutoModelForCausalLM.from_pretrained(out)
        assert {p.dtype for p in opened.parameters()} == {
            torch.float32
        } and opened.config.eos_token_id == 3
        assert torch.equal(opened.get_input_embeddings().weight, decoder.embedding.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*hf_models.MODELS, *FLA])
def test_an_export_rounds_what_transformers_rounds(name, dtype, tmp_path):
    """Tensor by tensor the dtype in which their class saves the model that it opened in this one, by either's names."""
    source, out, saved = tmp_path / "source", tmp_path / "out", tmp_path / "saved"
    save_model(name, source)
    AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, trust_remote_code=True
    ).save_pretrained(saved)
    theirs = load_file(saved / "model.safetensors")
    family, config, decoder = loaded(source)
    constants = ignored(config, family, open_folder(source).shapes)
    for like in (source, None):
        write_folder(out, config, family, gather(decoder), dtype=dtype, like=like)
        ours = load_file(out / "model.safetensors")
        assert ours.keys() | constants == theirs.keys()
        assert {n: t.dtype for n, t in ours.items() if n not in constants} == {
            n: t.dtype for n, t in theirs.items() if n not in constants
        }
        if like:  # else three convolutions may be of other sizes
            assert [n for n in ours.keys() - constants if not torch.equal(ours[n], theirs[n])] == []


def test_numbers_beyond_a_dtype_are_not_exported_as_infinity(folders, tmp_path):
    family, model = read_model(folders("FLA KDA"))
    decoder, out = initialised(model), tmp_path / "out"
    decoder.head.norm.weight.data[0] = 65504.0  # float16's largest
    write_folder(out, model, family, gather(decoder), dtype=torch.float16)
    decoder.head.norm.weight.data[0] = 7e4
    with pytest.raises(
        SaveFailed, match=r"out' failed: model.norm.weight has values beyond F16.s range"
    ):
        write_folder(out, model, family, gather(decoder), dtype=torch.float16)
    # the earlier folder is there still
    assert load_file(out / "model.safetensors")["model.norm.weight"][0] == 65504.0


def test_a_head_that_is_not_the_embedding_is_not_dropped(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders("Qwen3.5, tied"), source)
    change_tensors(source, lambda x: x | {hf_io.HEAD: x["model.embed_tokens.weight"] + 1})
    _, config = read_model(source)
    with refused(r"though config\.json has tie_word_embeddings = true; set it"):
        hf_io.check_folder(source, config)


def test_weights_beside_other_weights_are_refused(folders, tmp_path):
    """transformers reads model.safetensors; and no tensor of a shard is left over because the index forgot it."""
    source = tmp_path / "source"
    shutil.copytree(folders("Qwen3.5, tied"), source)
    _, config = read_model(source)
    names = open_folder(source).shapes
    (source / "model.safetensors").rename(source / "shard.safetensors")
    write_json(source / hf_io.INDEX, {"weight_map": dict.fromkeys(names, "shard.safetensors")})
    hf_io.check_folder(source, config)
    shutil.copy(source / "shard.safetensors", source / "model.safetensors")
    with refused(r"holds model\.safetensors beside the files of"):
        open_folder(source)
    (source / "model.safetensors").unlink()
    bias = {"model.layers.0.linear_attn.q_proj.bias": torch.zeros(3)}
    change_tensors(source, lambda x: x | bias, "shard.safetensors")
    with refused(r"q_proj.bias \[3\]: not used"):
        hf_io.check_folder(source, config)


def test_a_folder_of_another_model_is_no_pattern_for_an_export(folders, tmp_path):
    source = folders("FLA KDA")
    family, config, model = loaded(source)
    for like, words in (("FLA GDN", "layers"), ("FLA KDA", "norm_eps = ")):
        other = tmp_path / like
        shutil.copytree(folders(like), other)
        change_json(other / "config.json", {"norm_eps": 0.5})
        with refused(rf"is another model: .*{words}.*; use model.flavor"):
            write_folder(
                tmp_path / "out", config, family, gather(model), dtype=torch.float32, like=other
            )
    assert not (tmp_path / "out").exists()


# --- Whole runs ------------------------------------------------------------------------------------------------------


def make_tokenizer(folder):
    """A byte-level tokenizer of 300 tokens."""
    tokenizer = byte_bpe(["def import class self return " * 9], 300, ["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """KDA, latent attention and experts, with a tokenizer."""
    folder = tmp_path_factory.mktemp("kimi")
    sizes = hf_models.KIMI | hf_models.KIMI_MOE | {"vocab_size": 301}
    config = KimiLinearConfig(**sizes, layer_types=["linear_attention", "full_attention"])
    hf_models.randomise(KimiLinearForCausalLM(config)).bfloat16().save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    return write_texts(file, (f"def f{i}(self): return {i * i}" for i in range(300)))


def arguments(corpus, run, **keys):
    base = {
        "job.dump_folder": run,
        "training.dataset": "jsonl",
        "training.dataset_path": corpus,
        "training.seq_len": 64,
        "training.global_batch_size": 2,
        "training.steps": 5,
        "parallelism.context_parallel_degree": 2,
        "lr_scheduler.warmup_steps": 1,
        "metrics.enable_tensorboard": "false",
        "model.flavor": "hf",
        "checkpoint.initial_load_in_hf": "true",
    }
    return argv_of(base, **keys)


def test_a_run_from_a_folder_to_a_folder(kimi, corpus, worlds, tmp_path, capsys):
    """Two processes train five steps; the folder they leave, the checkpoint converted, and texts of both agree."""
    run = tmp_path / "run"
    argv = arguments(
        corpus,
        run,
        checkpoint__initial_load_path=kimi,
        checkpoint__last_save_in_hf="true",
        checkpoint__export_dtype="source",
        sample__max_new_tokens=4,
    )
    check_config(load_config(argv), world_size=2)
    preflight(load_config(argv), world_size=2)
    run.mkdir()
    worlds(2).run(workers.train_on_rank, argv)

    checkpoint, exported = run / "checkpoint" / "step-5", run / "checkpoint" / "step-5-hf"
    losses = [line["loss"] for line in read_lines(run / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    with pytest.raises(SystemExit):
        preflight(load_config(argv), world_size=2)  # the run is finished
    longer = [*argv, "--training.steps", "6"]
    embedding = load_file(exported / "model.safetensors")["model.embed_tokens.weight"]
    for step, found in worlds(2).run(workers.go_on, longer):
        assert step == 5 and torch.equal(found.bfloat16(), embedding)
    assert (
        convert.main(["to-hf", str(checkpoint), str(tmp_path / "out"), "--export-dtype", "source"])
        == 0
    )
    before, after = tensor_bytes(kimi), tensor_bytes(exported)
    assert after == tensor_bytes(tmp_path / "out")
    assert {n: t[:2] for n, t in after.items()} == {n: t[:2] for n, t in before.items()}
    assert sum(after[n] != before[n] for n in before) > len(before) / 2  # it trained
    assert (exported / "tokenizer.json").read_bytes() == (kimi / "tokenizer.json").read_bytes()
    text, tokenizers = (
        Path(__file__).read_text(),
        (AutoTokenizer.from_pretrained(exported), build_tokenizer(str(kimi))),
    )
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text).tolist()
    assert tokenizers[0].eos_token_id == tokenizers[1].eos_id == 0
    _, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    assert convert.main(["from-hf", str(exported), str(run / "again")]) == 0
    texts = []
    for path in (exported, run / "again", run):
        capsys.readouterr()
        assert (
            generate.main(
                [str(path), "--prompt", "def f", "--prompt", "return", "--max-new-tokens", "6"]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def f") and "\n---\nreturn" in texts[0]
    assert texts[2].startswith("def f")  # of other weights: exported ones are rounded


def test_keys_extend_the_context_of_a_folder(corpus, tmp_path):
    """Its weights start a run of the longer model; another model they do not."""
    config = Qwen3_5TextConfig(**hf_models.QWEN | {"vocab_size": 301}, intermediate_size=48)
    hf_models.randomise(Qwen3_5ForCausalLM(config)).save_pretrained(tmp_path / "folder")
    make_tokenizer(tmp_path / "folder")
    yarn = "{rope_type = 'yarn', factor = 4.0, original_max_position_embeddings = 16}"
    run = {
        "checkpoint__initial_load_path": tmp_path / "folder",
        "checkpoint__last_save_in_hf": "true",
    }
    argv = arguments(corpus, tmp_path / "run", **run, model__attention__rope_scaling=yarn)
    config = load_config(argv)
    preflight(config, world_size=2)
    assert "rope_scaling" in model_name(Origin.of(config))
    with refused(r"another model: attention.scale = None \(this run: 0.5\)"):
        preflight(load_config([*argv, "--model.attention.scale", "0.5"]), world_size=2)


def test_the_shipped_configuration_continues_any_folder(kimi, corpus, tmp_path, monkeypatch):
    """With its two lines changed: of its tokenizer, at a low rate, to a folder like it."""
    monkeypatch.chdir(tmp_path)
    keys = {
        "checkpoint.initial_load_path": kimi,
        "training.dataset_path": corpus,
        "training.seq_len": 4096,
    }
    argv = ["--job.config_file", str(Path(__file__).parents[2] / "train_configs/continue_hf.toml")]
    config = load_config(argv + [f"--{key}={value}" for key, value in keys.items()])
    check_config(config, world_size=2)
    preflight(config, world_size=2)
    assert config.optimizer.lr <= 1e-4 and config.checkpoint.last_save_in_hf
    assert (
        config.checkpoint.export_dtype == "source"
        and Origin.of(config).tokenizer_path == f"{kimi}/tokenizer.json"
    )


@pytest.mark.parametrize(
    "others", [["tiktoken.model"], ["merges.txt", "vocab.json"], ["tokenizer.model.v3"]]
)
def test_weights_whose_tokenizer_is_of_another_kind(others, kimi, corpus, tmp_path, capsys):
    """They are not trained on bytes unless that is asked for, and the start says what is loaded."""
    folder = tmp_path / "folder"
    shutil.copytree(kimi, folder)
    (folder / "tokenizer.json").unlink()
    for name in others:
        (folder / name).write_text("")
    argv = arguments(corpus, tmp_path / "run", checkpoint__initial_load_path=folder)
    how = "docs/huggi" if others == ["tiktoken.model"] else "python -c 'f"
    with refused(rf"tokenizer\.json does not exist; convert {', '.join(others)} to one \({how}"):
        preflight(load_config(argv), world_size=2)
    preflight(load_config([*argv, "--model.tokenizer_path", "bytes"]), world_size=2)
    assert "tokenizer: none, bytes are tokens" in capsys.readouterr().out
    config = load_config(arguments(corpus, tmp_path / "run", checkpoint__initial_load_path=kimi))
    preflight(config, world_size=2)
    assert f"tokenizer: '{kimi}/tokenizer.json', 281 tokens\n" in capsys.readouterr().out
    assert (
        model_name(Origin.of(config)) == f"KimiLinearForCausalLM of '{kimi}'"
        and Origin.of(config).title == f"weights of '{kimi}'"
    )
    drawn = load_config(["--model.flavor", "hf", "--model.hf_assets_path", str(kimi)])
    assert (
        model_name(Origin.of(drawn)) == model_name(Origin.of(config))
        and Origin.of(drawn).title == "weights drawn from debug.seed = 0"
    )


def test_the_command_of_the_message_converts_a_tokenizer(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    make_tokenizer(folder)
    text, whole = Path(__file__).read_text(), build_tokenizer(str(folder))
    # vocab.json and merges.txt
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}
    write_json(folder / "tokenizer_config.json", settings)
    with refused("to one") as refusal:
        build_tokenizer(str(folder))
    command = re.search(r"to one \((python .*)\), or give", str(refusal.value))[1]
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True, capture_output=True)
    converted = build_tokenizer(str(folder))
    assert converted.encode(text[:2000]).tolist() == whole.encode(text[:2000]).tolist()
    assert converted.eos_id == whole.eos_id == 0


def test_generation_equals_that_of_transformers(kimi):
    theirs = AutoModelForCausalLM.from_pretrained(kimi, dtype=torch.float32)
    model, tokenizer = generate.load(kimi, "", torch.float32, torch.device("cpu"))
    prompt = tokenizer.encode("def self return class").tolist()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    cpu = torch.device("cpu")
    assert generate_tokens(model, [prompt], max_new_tokens=8, sampling=Sampling(), device=cpu) == [
        expected
    ]


@pytest.mark.parametrize(
    "name", [name for name, sizes in MODELS.items() if "debug" in sizes and name != "rwkv7"]
)
def test_a_preset_is_exported_with_its_length(name, tmp_path):
    """The class, by whatever name it has it, knows as long a text as the model was trained on."""
    model = MODELS[name]["debug"]
    decoder = initialised(model)
    for longest in (16384, 10**6):
        write_folder(
            tmp_path / "out",
            model,
            find_family(model),
            gather(decoder),
            dtype=torch.float32,
            longest=longest,
        )
        config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert config.max_position_embeddings == longest
        assert not differences(read_model(tmp_path / "out")[1], model)


@pytest.mark.parametrize("name", ["Kimi-Linear", "Qwen3-Next", "Granite-H"])
def test_a_folder_keeps_its_length_or_gets_a_longer_one(name, tmp_path):
    """By the name that it has there, and the scale of positions that follows from its length stays what it was."""
    source, out = tmp_path / "source", tmp_path / "out"
    hf_models.build(name).save_pretrained(source)
    written = read_json(source / "config.json")
    if name == "Qwen3-Next":
        del written["rope_parameters"]["original_max_position_embeddings"]
    (key,) = written.keys() & set(hf_writing.LENGTHS)
    for length in (128, None):
        write_json(source / "config.json", written | {key: length} if length else written)
        family, model, decoder = loaded(source)
        had = length or written[key]
        for longest in (64, 2 * had):
            write_folder(
                out, model, family, gather(decoder), dtype=None, like=source, longest=longest
            )
            # by YaRN, now said
            reached = 4 * had if name == "Qwen3-Next" and longest > had else max(longest, had)
            assert AutoConfig.from_pretrained(out).max_position_embeddings == reached
            assert read_model(out) == (family, model)


def test_an_export_ends_where_its_tokenizer_does(corpus, tmp_path):
    """After the folder's end token was changed, in config.json, also of a text_config, and in generation_config.json;
    lists that have it stay as they are."""
    source, out = tmp_path / "source", tmp_path / "out"
    config = Qwen3NextConfig(
        **hf_models.QWEN | hf_models.QWEN_MOE | {"vocab_size": 301}, eos_token_id=7
    )
    hf_models.randomise(Qwen3NextForCausalLM(config)).save_pretrained(source)
    make_tokenizer(source)  # its end token is 0
    run = load_config(arguments(corpus, tmp_path / "run", checkpoint__initial_load_path=source))
    for known, said in ((7, 0), ([7, 9], 0), ([7, 0], [7, 0]), (None, 0)):
        change_json(source / "config.json", {"bos_token_id": 5, "eos_token_id": known})
        write_json(source / "generation_config.json", {"eos_token_id": known, "top_k": 20})
        _, _, decoder = loaded(source)
        export.export(out, Origin.of(run), gather(decoder), dtype="source")
        whole, generation = (
            read_json(out / name) for name in ("config.json", "generation_config.json")
        )
        assert whole["eos_token_id"] == generation["eos_token_id"] == said
        assert whole["bos_token_id"] == 5 and generation["top_k"] == 20
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (
        tokenizer.eos_token_id
        == AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id
        == 0
    )


# --- Folders and runs that are refused -------------------------------------------------------------------------------


SHARD = "model-00001-of-00005.safetensors"
BETA = "model.layers.0.attn.b_proj.weight"


def remove_pickles(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")


def make_large_tokenizer(folder):
    make_tokenizer(folder)
    tokenizer = read_json(folder / "tokenizer.json")
    tokenizer["model"]["vocab"]["zz"] = 400
    write_json(folder / "tokenizer.json", tokenizer)


def change_beta(change):
    return lambda folder: change_tensors(
        folder, lambda x: x | {BETA: change(x[BETA]).contiguous()}, SHARD
    )


DAMAGES = {
    "a shard is missing": (
        lambda folder: (folder / SHARD).unlink(),
        rf"{SHARD}' is missing: .* it holds tensor 'model",
    ),
    "a shard is cut": (
        lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 10),
        rf"{SHARD}' is cut short or no safetensors file \(.*not fully covered",
    ),
    "a header is cut": (
        lambda folder: os.truncate(folder / SHARD, 40),
        rf"{SHARD}' is cut short or no safetensors file \(.*header",
    ),
    "another shape": (
        change_beta(lambda w: w.T),
        rf"{BETA}: shape \[128, 4\], not \[4, 128\].*in {SHARD}",
    ),
    "another dtype": (
        change_beta(lambda w: w.to(torch.int64)),
        rf"{SHARD}': tensor '{BETA}' is I64",
    ),
    "a tensor is lost": (
        lambda folder: change_tensors(
            folder, lambda x: {n: t for n, t in x.items() if n != BETA}, SHARD
        ),
        rf"{SHARD}' lacks tensor '{BETA}'",
    ),
    "unknown architecture": (
        lambda folder: write_json(folder / "config.json", {"architectures": ["GPT2LMHeadModel"]}),
        r"config.json': architectures = \['GPT2LMHeadModel'\]",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config.json' cannot be read",
    ),
    "pickles": (remove_pickles, r"pytorch_model.bin is a pickle file, which is never loaded"),
    "a large tokenizer": (
        make_large_tokenizer,
        r"vocabulary of .*config.json', 320, is smaller than that of the tokenizer '.*tokenizer.json', 401",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_refused_before_training(damage, corpus, tmp_path):
    model, folder = initialised(KDA), tmp_path / "folder"
    files = build_tokenizer(None).hugging_face_files()
    write_folder(
        folder,
        KDA,
        "KDAForCausalLM",
        gather(model),
        dtype=torch.float32,
        shard_bytes=600_000,
        tokenizer=files,
    )
    assert len(list(folder.glob("*.safetensors"))) == 5
    argv = arguments(corpus, tmp_path / "run", checkpoint__initial_load_path=folder)
    preflight(load_config(argv), world_size=2)
    change, message = DAMAGES[damage]
    change(folder)
    with refused(message):
        preflight(load_config(argv), world_size=2)
    assert not (tmp_path / "run").exists()


def test_generation_warns_of_a_tokenizer_that_the_weights_do_not_know(tmp_path, capsys):
    """Of a folder and of a checkpoint; sizes of vocabularies need not tell."""
    model, folder, checkpoint, other = (
        initialised(KDA),
        *(tmp_path / name for name in ("folder", "step-3", "other")),
    )
    write_folder(folder, KDA, "KDAForCausalLM", gather(model), dtype=torch.float32)
    checkpoint.mkdir()
    other.mkdir()
    make_large_tokenizer(other)
    bytes_again, their_own = build_tokenizer(None), build_tokenizer(str(other))

    def warned(path, asked, tokenizer):
        key = "--tokenizer" if asked else "model.tokenizer_path of its run"
        return other_tokenizer(path, tokenizer, f"'{path}'", key)

    assert generate.main([str(folder), "--prompt", "x", "--max-new-tokens", "1"]) == 2
    assert (
        f"{folder}/tokenizer.json does not exist; give a Hugging Face tokenizer"
        in capsys.readouterr().err
    )
    assert (
        generate.main(
            [str(folder), "--prompt", "x", "--max-new-tokens", "1", "--tokenizer", "bytes"]
        )
        == 0
    )
    (folder / "tokenizer.json").write_bytes(bytes_again.hugging_face_files()["tokenizer.json"])
    assert generate.main([str(folder), "--prompt", "x", "--max-new-tokens", "1"]) == 0
    assert not capsys.readouterr().err
    said = f"'{folder}' were trained with another tokenizer than --tokenizer"
    assert said in warned(folder, "other", their_own)
    generate.main([str(folder), "--prompt", "x", "--tokenizer", str(other)])
    assert said in capsys.readouterr().err

    (checkpoint / "progress.json").write_text(Progress(step=3).model_dump_json())  # imported
    assert not warned(checkpoint, "", bytes_again)
    content = Content(tokenizer=their_own.fingerprint, model="m", corpora={}, mixture=[])
    (checkpoint / "progress.json").write_text(Progress(step=3, content=content).model_dump_json())
    assert "trained with another tokenizer than --tokenizer" in warned(
        checkpoint, "elsewhere", bytes_again
    )
    assert "another tokenizer than model.tokenizer_path of its run" in warned(
        checkpoint, "", bytes_again
    )
    assert not warned(checkpoint, "other", their_own)


def test_a_model_that_is_not_read_is_said_before_its_tokenizer_is_missed(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"d_model": 768, "ssm_cfg": {"layer": "Mamba2"}}')
    assert generate.main([str(tmp_path), "--prompt", "x"]) == 2
    assert (
        "config.json: ssm_cfg = {'layer': 'Mamba2'}: mamba_ssm's own format is not"
        in capsys.readouterr().err
    )


def test_generation_names_the_tokenizer_that_it_was_given(tmp_path):
    model, folder, other = initialised(KDA), tmp_path / "folder", tmp_path / "other"
    write_folder(folder, KDA, "KDAForCausalLM", gather(model), dtype=torch.float32)
    other.mkdir()
    make_large_tokenizer(other)
    with refused(
        r"that of the tokenizer '.*other', 401; set .* \(titan-linear generate: --tokenizer\)"
    ):
        generate.load(folder, str(other), torch.float32, torch.device("cpu"))


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


# in the brackets: what the library says
REFUSED = r"is cut short or no safetensors file \(.*\); fetch it again$"


def write_file(file, header, size):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


@pytest.mark.parametrize(
    "placement",
    [
        3,
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F31", "shape": [2], "data_offsets": [24, 32]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [24, 32]},
        {"dtype": "F32", "shape": [3], "data_offsets": [24, 32]},
        {"dtype": "F32", "shape": [2], "data_offsets": [20, 28]},
        {"dtype": "F32", "shape": [1], "data_offsets": [28, 32]},
        {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]},
    ],
)
def test_a_malformed_header_is_refused(placement, tmp_path):
    file = tmp_path / "model.safetensors"
    write_file(
        file,
        {"__metadata__": {"format": "pt"}, "bad": {**GOOD, "data_offsets": [24, 48]}, "good": GOOD},
        48,
    )
    assert [tensor.shape for tensor in hf_io.read_header(file).values()] == [(2, 3), (2, 3)]
    write_file(file, {"good": GOOD, "bad": placement}, 32)
    with refused(f"'{file}' {REFUSED}"):
        open_folder(tmp_path)


def test_a_header_is_what_safetensors_takes(tmp_path):
    file = tmp_path / "model.safetensors"
    for metadata in (None, {}, {"a": "b"}):
        write_file(file, {"__metadata__": metadata, "good": GOOD}, 24)
        assert list(open_folder(tmp_path).tensors) == ["good"]
    utf16 = json.dumps({"good": GOOD}).encode("utf-16")
    for header in (
        {"__metadata__": {"a": 1}, "good": GOOD},
        utf16,
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
    ):
        write_file(file, header, 24)
        with refused(f"'{file}' {REFUSED}"):
            open_folder(tmp_path)


def test_an_index_stays_in_its_folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        write_file(place / "x.safetensors", {"w": GOOD}, 24)
    write_json(folder / hf_io.INDEX, {"weight_map": {"w": "sub/x.safetensors"}})
    assert open_folder(folder).shapes == {"w": (2, 3)}
    for file in ("../x.safetensors", "sub/../../x.safetensors", str(tmp_path / "x.safetensors")):
        write_json(folder / hf_io.INDEX, {"weight_map": {"w": file}})
        with refused(rf"index.json' names a file outside its folder, '{file}', for tensor 'w'"):
            open_folder(folder)
    (folder / hf_io.INDEX).unlink()
    (folder / "sub" / "x.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with refused(r"fetch .*index.json too, which says what model-00001-of-00002"):
        open_folder(folder)
    for damaged in (
        "[]",
        "{",
        "{}",
        '{"weight_map": [["w", "x"]]}',
        '{"weight_map": {"w": 3}}',
        "[" * 100_000,
    ):
        (folder / hf_io.INDEX).write_text(damaged)
        with refused(r"index.json' cannot be read \(.*\); fetch it again"):
            open_folder(folder)


OURS, NOT_HF = {"model__flavor": "debug"}, {"checkpoint__initial_load_in_hf": "false"}
EXPORT, BYTES = {"checkpoint__last_save_in_hf": "true"}, {"model__tokenizer_path": "bytes"}


@pytest.mark.parametrize(
    "keys, message",
    [
        (NOT_HF, "model.flavor = 'hf' needs model.hf_assets_path"),
        ({}, "checkpoint.initial_load_in_hf = true has nothing to load"),
        (
            {**OURS, **BYTES, "model__name": "kda", "checkpoint__initial_load_path": "FLA KDA"},
            "norm_eps = 1e-06",
        ),
        (
            {"checkpoint__initial_load_path": "FLA KDA", "checkpoint__export_dtype": "source"},
            "no effect without",
        ),
        (
            {**OURS, **NOT_HF, "checkpoint__initial_load_path": "FLA KDA"},
            "is a Hugging Face folder; set checkpoint",
        ),
        ({**OURS, **NOT_HF, "model__hf_assets_path": "x"}, "is the model of model.flavor = 'hf'"),
        (
            {**OURS, **NOT_HF, **EXPORT, "checkpoint__export_dtype": "source"},
            "checkpoint.export_dtype = 'source'",
        ),
        (
            {**BYTES, "checkpoint__initial_load_path": "FLA KDA", "model__vocab_size": 400},
            "320 .this run: 400",
        ),
        (
            {"checkpoint__initial_load_path": "none"},
            "checkpoint.initial_load_path = 'none' is not a folder",
        ),
        (
            {**NOT_HF, "model__hf_assets_path": "none"},
            "model.hf_assets_path = 'none' is not a folder; .*: hf download OWNER/none --local-dir none$",
        ),
        ({"checkpoint__initial_load_path": "FLA KDA"}, "exist; give .*'bytes'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message, folders, corpus, tmp_path):
    keys = {key: folders(value) if value in CASES else value for key, value in keys.items()}
    with refused(message):
        preflight(load_config(arguments(corpus, tmp_path / "run", **keys)), world_size=2)


def test_what_no_architecture_holds_is_refused(corpus, tmp_path, monkeypatch):
    latent = replace(
        preset("hybrid", "debug"),
        pattern=(
            mixers.GDN(heads=2, v_heads=2, head_dim=16, v_head_dim=16),
            mixers.MLA(heads=2, kv_rank=16, nope_dim=16, shared_k_dim=8, v_dim=16),
        ),
    )
    monkeypatch.setitem(MODELS["hybrid"], "debug", latent)
    argv = arguments(corpus, tmp_path / "run", **OURS, **NOT_HF, **EXPORT)
    with refused(r"checkpoint.last_save_in_hf = true: no Hugging Face architecture"):
        preflight(load_config(argv), world_size=2)


def test_presets_have_an_architecture():
    """The first that holds the model, options that it does not read aside."""
    found = {
        f"{name} {flavor}": find_family(m)
        for name, flavors in MODELS.items()
        for flavor, m in flavors.items()
    }
    assert found["kda 340M"] == "KDAForCausalLM" and found["gdn 1.3B"] == "GatedDeltaNetForCausalLM"
    assert found["hybrid 340M"] == found["hybrid debug"] == "TitanLinearForCausalLM"


def test_commands_say_what_is_wrong(folders, tmp_path, capsys):
    folder = str(folders("FLA KDA"))
    assert convert.main(["from-hf", folder, str(tmp_path / "checkpoints")]) == 0
    step, bytes_alone = str(tmp_path / "checkpoints" / "step-0"), tmp_path / "tokenizer.json"
    bytes_alone.write_bytes(build_tokenizer(None).hugging_face_files()["tokenizer.json"])
    prompt = ["--prompt", "x"]
    for main, argv, words in (
        (convert.main, ["to-hf", step, folder], "is there already"),
        (
            convert.main,
            ["to-hf", step, str(tmp_path / "out")],
            "config.toml of its run; keep checkpoints in their run's folder, and of one that titan-linear convert",
        ),
        (
            convert.main,
            ["to-hf", str(tmp_path), str(tmp_path / "out")],
            "neither a whole checkpoint",
        ),
        (
            convert.main,
            ["from-hf", str(tmp_path), str(tmp_path / "out")],
            "config.json' cannot be read",
        ),
        (
            convert.main,
            ["from-hf", folder, str(tmp_path / "checkpoints")],
            "holds checkpoints already",
        ),
        (generate.main, [str(tmp_path), *prompt], "neither a whole checkpoint"),
        (
            generate.main,
            [folder, "--prompt", "", "--tokenizer", str(bytes_alone)],
            "prompt '' has no tokens",
        ),
        (generate.main, [folder, *prompt, "--tokenizer", "none.json"], "none.json does not exist"),
    ):
        assert words in is_refused(main, argv, capsys)
    assert not (tmp_path / "out").exists()


def test_what_takes_long_shows_how_far_it_is(folders, tmp_path, monkeypatch, capsys):
    # each tensor takes seconds
    monkeypatch.setattr("tqdm.std.time", itertools.count(0, 3).__next__)
    folder = folders("FLA KDA")
    assert convert.main(["from-hf", str(folder), str(tmp_path)]) == 0
    tensors.load_weights(tmp_path, Decoder(read_model(folder)[1]))
    said = capsys.readouterr().err
    assert re.search(f"reading {folder.name}: +[1-9]", said) and re.search("loading: +[1-9]", said)


def test_a_failed_export_is_an_error_on_every_rank(folders, worlds, tmp_path):
    """A full disk, and what PyTorch raises."""
    for failure in (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("not enough memory"),
    ):
        messages = worlds(2).run(
            workers.export_fails, folders("FLA KDA"), tmp_path / "out", failure
        )
        reason = failure.strerror if isinstance(failure, OSError) else repr(failure)
        assert messages == [f"writing '{tmp_path / 'out'}' failed: {reason}"] * 2
        assert list(tmp_path.iterdir()) == []


def value_of(folder):
    """Of every tensor of a whole folder."""
    (value,) = {
        v for t in load_file(folder / "model.safetensors").values() for v in t.unique().tolist()
    }
    read_model(folder)
    return value


def test_a_kill_while_a_folder_is_replaced_leaves_either(tmp_path):
    context, seen = mp.get_context("forkserver"), []
    for moment in itertools.count():
        folder = tmp_path / str(moment) / "out"
        folder.parent.mkdir()
        workers.export(folder, 1.0)
        (folder / "tokenizer.json").write_text("{}")  # one file more: a removal of several steps
        process = context.Process(target=workers.export_until_killed, args=(folder, moment))
        process.start()
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        aside = folder.with_name(".out.replaced")
        seen.append(value_of(folder if folder.exists() else aside))
        finish_replacing(folder)  # as the next export begins
        assert value_of(folder) == seen[-1] and not aside.exists()
        workers.export(folder, 3.0)
        assert value_of(folder) == 3.0 and list(folder.parent.iterdir()) == [folder]
    assert value_of(folder) == 2.0 and list(folder.parent.iterdir()) == [folder]
    assert len(seen) > 4 and seen == sorted(seen) and set(seen) == {1.0, 2.0}


def test_a_replacement_that_fails_gives_the_old_folder_back(tmp_path, monkeypatch):
    folder, rename = tmp_path / "out", Path.rename
    workers.export(folder, 1.0)

    def fail(self, target):
        if self.name == ".out.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(SaveFailed, match="Input/output error"):
        workers.export(folder, 2.0)
    assert value_of(folder) == 1.0 and list(tmp_path.iterdir()) == [folder]


def test_two_do_not_write_one_folder(tmp_path):
    folder, waits = tmp_path / "out", tmp_path / "waits"
    first, killed = (
        mp.get_context("forkserver").Process(target=workers.export_and_wait, args=(folder,))
        for _ in "12"
    )
    first.start()
    until(waits.exists)
    with pytest.raises(
        SaveFailed, match=f"^writing '{folder}' failed: another process is writing it$"
    ):
        workers.export(folder, 1.0)
    waits.unlink()
    first.join(60)
    assert first.exitcode == 0 and value_of(folder) == 2.0 and list(tmp_path.iterdir()) == [folder]
    killed.start()
    until(waits.exists)
    killed.kill()
    killed.join(60)
    waits.unlink()
    workers.export(folder, 1.0)
    assert value_of(folder) == 1.0 and list(tmp_path.iterdir()) == [folder]


def test_a_folder_behind_a_link_is_replaced_as_a_link(tmp_path):
    folder, disk = tmp_path / "out", tmp_path / "disk"
    workers.export(disk, 1.0)
    folder.symlink_to(disk)
    workers.export(folder, 2.0)
    assert (value_of(folder), value_of(disk)) == (2.0, 1.0) and sorted(tmp_path.iterdir()) == [
        disk,
        folder,
    ]


# --- Memory ----------------------------------------------------------------------------------------------------------


def make_large_folder(folder):
    """A folder of several shards, of which only marked values take up the disk; its tensors' bytes."""
    folder.mkdir()
    plan = {
        s.name: s.shape
        for placement in placements(LARGE, "KDAForCausalLM")
        for s in placement.sources
    }
    plan = {
        name: hf_writing.Planned("F32", shape, 4 * torch.Size(shape).numel())
        for name, shape in plan.items()
    }
    tensors = hf_writing._create(folder, plan, 10**9).values()
    for tensor in tensors:
        with open(tensor.file, "r+b") as file:
            for row in range(0, tensor.shape[0], EVERY):
                file.seek(tensor.begin + row * (tensor.end - tensor.begin) // tensor.shape[0])
                file.write(struct.pack("<f", mark(tensor.name, row)))
    write_json(folder / "config.json", config_to_hf("KDAForCausalLM", LARGE))
    return sum(tensor.end - tensor.begin for tensor in tensors)


def test_a_large_folder_loads_in_the_memory_of_what_a_rank_owns(worlds, tmp_path):
    """4 GB of shards on two processes: at most the bytes that each owns, and 0.75 GB, of anonymous memory."""
    free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    if free < 6 * 2**20:
        pytest.skip(f"needs 6 GiB of memory, {free / 2**20:.1f} are available")
    total = make_large_folder(tmp_path / "large")
    assert total > 4e9 and len(list((tmp_path / "large").glob("*.safetensors"))) > 3
    results = worlds(2).run(workers.load_large, tmp_path / "large")
    assert sum(owned for owned, _, _ in results) - total < 1e6  # gates' parameters are on both
    for owned, peak, marks in results:
        print(f"owned {owned / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, {marks} marks")
        assert owned < peak < owned + 0.75e9 and marks > 1000
