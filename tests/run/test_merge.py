"""Exports of adapters and merges write what exports of whole runs do, and copy only what is in a folder."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bpe import byte_bpe
from tests.keys import argv_of
from tests.records import change_json, read_json, write_json
from tests.refusals import is_refused, refused
from tests.storage.peft_runs import begun, config_of, make_base, train
from titan_linear.commands.convert import main as convert
from titan_linear.commands.generate import main as generate
from titan_linear.config import Adapter, check_config, load_config
from titan_linear.data import build_tokenizer
from titan_linear.run.export import export
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import preflight
from titan_linear.storage.checkpoint import SaveFailed
from titan_linear.storage.peft import PEFT_CONFIG, PEFT_WEIGHTS, settings_of

pytest.importorskip("peft")
YARN = '{rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 64}'
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
Q = "layers.0.mixer.q_proj.lora_B"


def make_tokenizer(folder: Path) -> Path:
    """One of 300 tokens, which ends texts at the third."""
    (folder / TEMPLATES[1]).parent.mkdir(parents=True)
    byte_bpe(["some words"], 300, ["<s>", "<|endoftext|>", "<|im_end|>"]).save(
        str(folder / "tokenizer.json")
    )
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    for name in TEMPLATES:
        (folder / name).write_text(name)
    return folder


def exported(name: str, tmp_path: Path, dtype: str = "float32", change=None, **keys: object):
    """The PEFT folder of a run that has not trained, but for what `change` does to its parameters."""
    if not (tmp_path / "base").exists():
        make_base(name, tmp_path / "base")
    config = config_of(name, tmp_path, tmp_path, **keys)
    model = begun(Origin.of(config))
    if change:
        with torch.no_grad():
            change(model)
    folder = tmp_path / "adapters"
    get = dict(model.named_parameters()).__getitem__
    export(folder, Origin.of(config), get, dtype=dtype)
    return folder


def test_adapters_and_merges_are_as_whole_exports(corpus, worlds, tmp_path, capsys):
    """Tokenizer, templates, end tokens, length and positions, by way of the PEFT folder and of the run."""
    base, tokenizer = tmp_path / "base", make_tokenizer(tmp_path / "tokenizer")
    make_base("Bamba", base)
    change_json(base / "config.json", {"max_position_embeddings": 16, "pad_token_id": 7})
    write_json(base / "generation_config.json", {"eos_token_id": [0, 5], "top_k": 20})
    keys = {"model__attention__rope_scaling": YARN, "model__tokenizer_path": tokenizer}
    worlds(1).run(train, config_of("Bamba", tmp_path, corpus, training__steps=1, **keys))
    capsys.readouterr()
    run, adapters = tmp_path / "run", tmp_path / "adapters"
    assert convert(["to-hf", str(run), str(adapters)]) == 0
    assert "has no place for --model.attention.rope_scaling={rope" in capsys.readouterr().out

    files = build_tokenizer(str(tokenizer)).hugging_face_files()
    assert files.keys() > set(TEMPLATES)
    for source in (adapters, run):
        merged = tmp_path / f"{source.name}-merged"
        assert convert(["merge", str(source), str(merged)]) == 0
        for folder in (adapters, merged):
            assert all((folder / name).read_bytes() == files[name] for name in files)
            generation = read_json(folder / "generation_config.json")
            assert generation["eos_token_id"] == 2 and generation["top_k"] == 20
        config = read_json(merged / "config.json")
        rope = config.get("rope_parameters") or config["rope_scaling"]
        assert rope["rope_type"] == "yarn" and rope["factor"] == 4
        assert config["max_position_embeddings"] == 256  # 4 × 64
        assert config["eos_token_id"] == 2 and config["pad_token_id"] is None
    one, other = (
        load_file(tmp_path / f"{x}-merged/model.safetensors") for x in ("adapters", "run")
    )
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_merge_of_anothers_adapters_keeps_the_base(tmp_path):
    """Nothing is known of such a folder's tokenizer and length, as of ours."""
    base = tmp_path / "base"
    folder = exported("Bamba", tmp_path)
    change_json(base / "config.json", {"max_position_embeddings": 16})
    assert convert(["merge", str(folder), str(tmp_path / "ours")]) == 0
    assert read_json(tmp_path / "ours/config.json")["max_position_embeddings"] == 32
    shutil.copytree(make_tokenizer(tmp_path / "tokenizer"), base, dirs_exist_ok=True)
    write_json(base / "tokenizer_config.json", {"eos_token": "<|im_end|>", "add_bos_token": True})
    change_json(base / "config.json", {"eos_token_id": 1})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    save_file(load_file(folder / PEFT_WEIGHTS), folder / PEFT_WEIGHTS)
    assert convert(["merge", str(folder), str(tmp_path / "merged")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", *TEMPLATES):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    config = read_json(tmp_path / "merged/config.json")
    assert config["max_position_embeddings"] == 16 and config["eos_token_id"] == 1


def test_a_tokenizer_that_transformers_would_not_read_is_left_out(tmp_path, capsys):
    """As bytes beside Qwen3.5 with experts, where a whole run's export is refused."""
    folder = exported("Qwen3.5 MoE", tmp_path)
    assert (folder / "tokenizer.json").is_file()
    assert convert(["merge", str(folder), str(tmp_path / "merged")]) == 0
    assert "if it were the family's own" in (said := capsys.readouterr().out)
    assert "the folder gets no tokenizer" in said
    assert not list((tmp_path / "merged").glob("tokenizer*"))


@pytest.mark.parametrize("name", ["Kimi-Linear", "Nemotron 3"])
def test_routers_beside_adapters_stay_in_float32(name, tmp_path):
    keys = {"adapter__targets": '["q_proj"]', "adapter__train_extra": '["router"]'}
    folder = exported(name, tmp_path, "bfloat16", **keys)
    dtypes = {n: x.dtype for n, x in load_file(folder / PEFT_WEIGHTS).items()}
    assert {dtype for n, dtype in dtypes.items() if "gate.weight" in n} == {torch.float32}
    assert {dtype for n, dtype in dtypes.items() if "lora" in n} == {torch.bfloat16}


def test_adapters_beyond_a_dtype_are_not_exported_as_infinity(tmp_path):
    def change(model):
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] = 1e5

    with pytest.raises(SaveFailed, match=r"lora_B.weight has values beyond F16's range"):
        exported("Bamba", tmp_path, "float16", change)
    assert not (tmp_path / "adapters").exists()


def test_copies_of_a_tied_embedding_are_not_lost(tmp_path, corpus, capsys):
    """Peft trains two where the base has one: by a merge and by a run that begins from them."""
    name = "Qwen3.5, tied"
    folder = exported(name, tmp_path)
    tensors = load_file(folder / PEFT_WEIGHTS)
    head = "base_model.model.lm_head.weight"
    other = tensors[head].clone()
    other[3, 4] += 1
    argv = ["merge", str(folder), str(tmp_path / "merged")]
    one = {n: x for n, x in tensors.items() if n != head}
    for copies, said in (
        (tensors | {head: other}, f"embed_tokens.weight and {head} are not equal, and the base"),
        (one, f"embed_tokens.weight was trained apart from {head} (ensure_weight_tying = false)"),
    ):
        save_file(copies, folder / PEFT_WEIGHTS)
        assert said in is_refused(convert, argv, capsys)
        with refused(re.escape(said)):
            preflight(config_of(name, tmp_path, corpus, adapter__initial_load_path=folder), 1)
    save_file(tensors, folder / PEFT_WEIGHTS)
    assert convert(argv) == 0
    # One copy of tied weights is enough.
    change_json(folder / PEFT_CONFIG, {"ensure_weight_tying": True})
    save_file(one, folder / PEFT_WEIGHTS)
    assert convert([*argv[:2], str(tmp_path / "one")]) == 0
    both, alone = (load_file(tmp_path / f"{x}/model.safetensors") for x in ("merged", "one"))
    assert all(torch.equal(x, alone[n]) for n, x in both.items())


def test_a_run_says_how_the_adapters_that_it_begins_from_were_trained(tmp_path, corpus, capsys):
    folder = exported("Bamba", tmp_path, model__attention__rope_theta=50000.0)
    preflight(config_of("Bamba", tmp_path, corpus, adapter__initial_load_path=folder), 1)
    said = "were trained with --model.attention.rope_theta=50000.0 --training.seq_len=32"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "key, value",
    [
        ("base_model_name_or_path", 5),
        ("base_model_name_or_path", ["base"]),
        ("r", "4"),
        ("r", 0),
        ("r", None),
        ("lora_alpha", "many"),
        ("lora_alpha", [1]),
        ("use_rslora", "yes"),
        ("target_modules", 3),
        ("target_parameters", "x"),
        ("modules_to_save", {"a": 1}),
    ],
)
def test_settings_of_other_types_are_refused(key, value, tmp_path, capsys):
    write_json(tmp_path / PEFT_CONFIG, {"peft_type": "LORA", key: value})
    said = is_refused(convert, ["merge", str(tmp_path), str(tmp_path / "merged")], capsys)
    assert f"{PEFT_CONFIG}' cannot be read ({key}" in said and "peft has written" in said


def test_what_peft_does_not_take_is_left_out_of_the_key_that_has_it(tmp_path):
    with refused(r"peft takes no \S+A_log of Bamba.*; leave it out of adapter.train_extra, or"):
        exported("Bamba", tmp_path, adapter__train_extra='["A_log"]')
    shutil.rmtree(tmp_path / "base")
    with refused(r"peft takes no \S+out_proj.weight of Falcon.*; leave it out by adapter.targets"):
        exported("Falcon-H1", tmp_path, adapter__targets="[]")


# --- What is copied ---------------------------------------------------------------------------------------------------


def link(file: Path, victim: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(victim)


def pipe(file: Path, victim: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


NAMES = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)


@pytest.mark.parametrize("put", [link, pipe])
@pytest.mark.parametrize("name", NAMES)
def test_only_files_of_the_folder_are_copied(put, name, tmp_path, corpus, capsys):
    """By merges of both kinds, and by a whole run's export, which is refused before it trains."""
    base, victim = tmp_path / "base", tmp_path / "victim"
    folder = exported("Bamba", tmp_path)
    shutil.copytree(make_tokenizer(tmp_path / "tokenizer"), base, dirs_exist_ok=True)
    victim.write_text('{"secret": 1}')
    put(base / name, victim)
    (folder / "tokenizer.json").unlink()  # that it takes the base's
    (folder / "tokenizer_config.json").unlink()
    said = f"'{base / name}' is not a regular file, or a link to one elsewhere"
    merge = ["merge", str(folder), str(tmp_path / "merged")]
    assert said in is_refused(convert, merge, capsys) and not (tmp_path / "merged").exists()
    config = config_of("Bamba", tmp_path, corpus, adapter__enable="false", adapter__rank=16)
    own = {"model": config.model.model_copy(update={"tokenizer_path": ""})}
    own["adapter"] = config.adapter.model_copy(update={"train_extra": []})
    with refused(said):
        preflight(config.model_copy(update=own), 1)


def test_caches_of_the_hub_are_copied(tmp_path):
    """Their folders are links to blobs beside them."""
    folder = exported("Bamba", tmp_path)
    (folder / "tokenizer.json").unlink()
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    shutil.copytree(tmp_path / "base", cache / "snapshots/1")
    shutil.copytree(
        make_tokenizer(tmp_path / "tokenizer"), cache / "snapshots/1", dirs_exist_ok=True
    )
    for i, file in enumerate((cache / "snapshots/1").iterdir()):
        if file.is_file():
            file.rename(cache / f"blobs/{i}")
            file.symlink_to(f"../../blobs/{i}")
    base = str(cache / "snapshots/1")
    assert convert(["merge", str(folder), str(tmp_path / "merged"), "--base", base]) == 0
    assert (tmp_path / "merged/chat_template.jinja").read_text() == "chat_template.jinja"
    assert not any(file.is_symlink() for file in (tmp_path / "merged").iterdir())


def test_a_pipe_in_a_folder_does_not_hang(tmp_path, capsys):
    os.mkfifo(tmp_path / "config.json")
    argv = ["from-hf", str(tmp_path), str(tmp_path / "checkpoints")]
    assert "it is not a regular file" in is_refused(convert, argv, capsys)
    folder = exported("Bamba", tmp_path)
    (folder / PEFT_WEIGHTS).unlink()
    os.mkfifo(folder / PEFT_WEIGHTS)
    argv = ["merge", str(folder), str(tmp_path / "merged")]
    assert f"{PEFT_WEIGHTS}' is not a regular file" in is_refused(convert, argv, capsys)


# --- What is not a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, said",
    [
        (PEFT_CONFIG, "it is a PEFT folder: titan-linear convert merge adds"),
        ("scores.json", "it is a folder of scores, for loss.scores"),
        ("corpus.json", "it is a tokenised corpus, for training.dataset_path"),
        ("config.toml", "it is the folder of a run, of which titan-linear convert to-hf writes"),
        ("tokenizer.json", "it is a tokenizer without a model, for model.tokenizer_path"),
    ],
)
def test_other_folders_are_named(file, said, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / file).write_text("")
    argv = ["from-hf", str(folder), str(tmp_path / "checkpoints")]
    assert said in is_refused(convert, argv, capsys)
    if file != PEFT_CONFIG:
        with refused(said):
            settings_of(folder)
    assert said in is_refused(generate, [str(folder), "--prompt", "x"], capsys)


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_the_reference_is_what_the_run_begins_from():
    """The base is not, if that has adapters."""
    keys = {"adapter.enable": "true", "loss.reference": "base"}
    for loss in ({"loss.name": "dpo"}, {"loss.name": "policy", "policy.kl": 0.1}):
        check_config(load_config(argv_of(keys | loss)), 1)
        with refused(r"this run begins from those of adapter.initial_load_path = '/x'; begin from"):
            check_config(load_config(argv_of(keys | loss | {"adapter.initial_load_path": "/x"})), 1)


def test_a_run_of_any_export_is_read(tmp_path):
    step = tmp_path / "run/checkpoint/step-1"
    step.mkdir(parents=True)
    write_json(step / "manifest.json", {})
    write_json(step / "progress.json", {"step": 1})
    (tmp_path / "run/config.toml").write_text(
        '[model]\nname = "gdn"\n[adapter]\nenable = true\ninitial_load_path = "/gone"\n[loss]\nname = "dpo"\n'
        f'reference = "base"\n[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = "{tmp_path}"\n'
        'last_save_in_hf = true\nexport_dtype = "source"\n'
    )
    check_config(Origin.reading(tmp_path / "run", []).config, 1)
    # Adapters that are asked for are not left out without a word.
    with refused(r"adapter\.initial_load_path = '/a' is for runs .* convert merge"):
        Origin.reading(tmp_path / "run", ["--adapter.initial_load_path", "/a"])


def test_a_checkpoint_of_adapters_begins_no_run(corpus, worlds, tmp_path):
    """It is named, with what makes a beginning of it: for runs with adapters and without."""
    make_base("Bamba", tmp_path / "base")
    worlds(1).run(train, config_of("Bamba", tmp_path, corpus, training__steps=1))
    keys = {
        "checkpoint__initial_load_in_hf": "false",
        "checkpoint__initial_load_path": tmp_path / "run",
        "job__dump_folder": tmp_path / "next",
    }
    said = r"step-1' holds adapters without their base, .*convert merge writes .*convert to-hf a"
    for more in ({}, {"adapter__enable": "false", "adapter__rank": 16}):
        config = config_of("Bamba", tmp_path, corpus, **keys, **more)
        plain = config.model_copy(update={"adapter": Adapter(enable=config.adapter.enable)})
        with refused(said):
            preflight(plain, 1)
