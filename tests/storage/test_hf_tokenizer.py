"""AutoTokenizer gives the tokens that a run was trained on, and its end of a document, from a folder of any family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from tests.bpe import byte_bpe
from tests.records import read_json, write_json
from tests.refusals import refused
from titan_linear.commands import convert
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer, build_tokenizer
from titan_linear.models.families import FAMILIES
from titan_linear.models.families.qwen import _WORDS
from titan_linear.models.hf_mapping import placements
from titan_linear.models.presets import preset
from titan_linear.run.preflight import preflight
from titan_linear.storage.hf_writing import find_family, write_folder

transformers.logging.set_verbosity_error()

VOCAB = 700
SOURCE = Path(json.__file__).with_name("decoder.py").read_text()
TEXT = (
    SOURCE + "\r\n\t é e\u0301 漢字 🙂\x00  it's DON'T 1234 <s> </s> <|endoftext|> <|im_end|>\n \n"
)
EXACT = TEXT + "\u2028".join(map(chr, [*range(1, 0xD800, 37), *range(0xE000, 0x110000, 997)]))

# --- Families --------------------------------------------------------------------------------------------------------

_QWEN = replace(preset("qwen3.5", "debug"), vocab_size=VOCAB)
_DENSE = replace(_QWEN, moe=None)
_GDN, _ATTENTION = _QWEN.pattern
MODELS = {
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3NextForCausalLM": _QWEN,
    "OlmoHybridForCausalLM": replace(
        _DENSE,
        zero_centred_norm=False,
        post_norm=("attention",),
        pattern=(
            replace(_GDN, o_norm_eps=1e-5),
            replace(_ATTENTION, qk_norm="width", output_gate=False, rotary_fraction=1.0),
        ),
    ),
    "NemotronHForCausalLM": replace(preset("nemotron-h", "debug"), vocab_size=VOCAB),
    "GraniteMoeHybridForCausalLM": replace(preset("granite-h", "debug"), vocab_size=VOCAB),
    "BambaForCausalLM": replace(preset("bamba", "debug"), vocab_size=VOCAB),
    "FalconH1ForCausalLM": replace(preset("falcon-h1", "debug"), vocab_size=VOCAB),
    "Lfm2ForCausalLM": replace(preset("lfm2", "debug"), vocab_size=VOCAB),
    "Lfm2MoeForCausalLM": replace(preset("lfm2-moe", "debug"), vocab_size=VOCAB),
    "RWKV7ForCausalLM": replace(preset("rwkv7", "debug"), vocab_size=VOCAB),
    "MiniMaxForCausalLM": replace(preset("minimax", "debug"), vocab_size=VOCAB),
    "KimiLinearForCausalLM": replace(preset("kimi-linear", "debug"), vocab_size=VOCAB),
    "BailingHybridForCausalLM": replace(preset("ling-3", "debug"), vocab_size=VOCAB),
    "KDAForCausalLM": replace(preset("kda", "debug"), vocab_size=VOCAB),
    "GatedDeltaNetForCausalLM": replace(preset("gdn", "debug"), vocab_size=VOCAB),
    "TitanLinearForCausalLM": replace(preset("hybrid", "debug"), vocab_size=VOCAB),
}

# --- Tokenizers ------------------------------------------------------------------------------------------------------

SPECIAL = ["<s>", "<|endoftext|>", "<|im_end|>"]


def plain(**parts):
    return byte_bpe([SOURCE], 600, SPECIAL, **parts)


def adding():
    """Begins a text by <s>, cuts it and fills it up."""
    tokenizer = plain()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(20)
    tokenizer.enable_padding(length=30)
    return tokenizer


def pieces():
    spaces = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    tokenizer = plain(**spaces, normalizer=normalizers.NFKC())
    tokenizer.add_tokens([AddedToken("decoder", normalized=False, lstrip=True)])
    return tokenizer


def qwens():
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return plain(
        pre_tokenizer=pre_tokenizers.Sequence([words, level]), normalizer=normalizers.NFC()
    )


BESIDE = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": {"content": "<|im_end|>", "lstrip": False},
    "add_bos_token": True,
    "add_prefix_space": True,
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "unk_token": None,
    "model_max_length": 4096,
    "additional_special_tokens": ["<|im_end|>", "<tool>"],
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"690": {"content": "def", "special": False}},
    "clean_up_tokenization_spaces": True,
    "auto_map": {"AutoTokenizer": ["tokenization_theirs.Theirs", None]},
}
TOKENIZERS = {
    "bytes": (None, {}),
    "plain": (plain, {}),
    "settings beside it": (plain, {"tokenizer_config.json": BESIDE}),
    "special tokens beside it": (
        plain,
        {"special_tokens_map.json": {"eos_token": "<|im_end|>"}, "added_tokens.json": {"def": 690}},
    ),
    "tokens as objects beside it": (
        plain,
        {
            "special_tokens_map.json": {
                "eos_token": {
                    "content": "<|im_end|>",
                    "lstrip": True,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                },
                "bos_token": {"content": "<s>", "lstrip": False},
                "audio_token": {"content": "<|not there|>"},
                "additional_special_tokens": [{"content": "<|im_end|>", "lstrip": True}],
            }
        },
    ),
    "adding": (adding, {}),
    "pieces": (pieces, {}),
    "Qwen's": (qwens, {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """name -> model.tokenizer_path."""
    paths = {}
    for name, (make, beside) in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        paths[name] = str(folder / "tokenizer.json") if make else ""
        if make:
            make().save(paths[name])
        for file, content in beside.items():
            write_json(folder / file, content)
    return paths


def exported(folder, family, path):
    tokenizer, config = build_tokenizer(path), MODELS[family]
    shapes = {entry.name: entry.shape for entry in placements(config, family)}
    write_folder(
        folder,
        config,
        family,
        lambda name: torch.zeros(shapes[name]),
        dtype=torch.bfloat16,
        tokenizer=tokenizer.hugging_face_files(),
        extra={"eos_token_id": tokenizer.eos_id},
    )


def check(folder, path, text=TEXT):
    ours, theirs = build_tokenizer(path), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == theirs.encode(text) == ids
    assert theirs.eos_token_id == ours.eos_id and len(theirs) <= VOCAB
    assert read_json(folder / "config.json")["eos_token_id"] == ours.eos_id
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.decode([*ids, ours.eos_id], skip_special_tokens=True) == ours.decode(ids)
    whole = theirs.decode([*ids, ours.eos_id], skip_special_tokens=False)
    assert whole == ours.decode([*ids, ours.eos_id], special=True) and whole.endswith(
        theirs.eos_token
    )
    again = build_tokenizer(str(folder))
    assert again.encode(text).tolist() == ids and again.eos_id == ours.eos_id


def test_every_family_is_here():
    assert MODELS.keys() == FAMILIES.keys()


READ_AS_THEY_ARE = [
    (name, family)
    for name in TOKENIZERS
    for family in MODELS
    if name == "Qwen's" or family != "Qwen3_5MoeForCausalLM"
]  # the others are refused, below


@pytest.mark.parametrize("name, family", READ_AS_THEY_ARE)
def test_the_same_tokens(name, family, tokenizers, tmp_path):
    exported(tmp_path / "folder", family, tokenizers[name])
    check(tmp_path / "folder", tokenizers[name])


def test_bytes_are_bytes(tmp_path):
    """Of any text, and read again they are our byte tokenizer itself."""
    exported(tmp_path / "folder", "TitanLinearForCausalLM", "")
    check(tmp_path / "folder", "", EXACT)
    assert isinstance(build_tokenizer(str(tmp_path / "folder")), ByteTokenizer)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "folder"), ByteTokenizer()
    broken = [0xC3, 0x28, 0xFF, 0xE2, 0x82, 0x41, 0xF0, 0x9F, 0x99, 256]
    assert theirs.decode(broken, skip_special_tokens=True) == ours.decode(broken)
    theirs.save_pretrained(tmp_path / "saved")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved").encode(EXACT)
        == ours.encode(EXACT).tolist()
    )


def test_what_is_beside_is_kept_where_it_changes_no_token(tokenizers):
    files = build_tokenizer(tokenizers["settings beside it"]).hugging_face_files()
    assert files["tokenizer.json"] == Path(tokenizers["settings beside it"]).read_bytes()
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["chat_template"] == "{{ messages }}" and settings["model_max_length"] == 4096
    assert settings["bos_token"] == "<s>" and settings["additional_special_tokens"] == [
        "<|im_end|>"
    ]
    assert "pad_token" not in settings and settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_templates_by_name_in_a_folder(tokenizers, tmp_path):
    source = tmp_path / "source"
    exported(source, "TitanLinearForCausalLM", tokenizers["plain"])
    source.joinpath("additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        source.joinpath(name).write_text(name)
    exported(tmp_path / "own", "TitanLinearForCausalLM", str(source))
    found = build_tokenizer(str(tmp_path / "own")).chat_templates
    assert found == {
        "default": "chat_template.jinja",
        "tool_use": "additional_chat_templates/tool_use.jinja",
    }


def test_a_tokenizer_that_transformers_would_not_read(tokenizers, tmp_path):
    """A folder of Qwen3.5 with experts is given Qwen's own words: another tokenizer goes to Qwen3-Next, the same model,
    or is refused before a run starts and before a checkpoint is converted."""
    files = {name: build_tokenizer(path).hugging_face_files() for name, path in tokenizers.items()}
    assert find_family(_QWEN, files["Qwen's"]) == find_family(_QWEN) == "Qwen3_5MoeForCausalLM"
    assert (
        find_family(_QWEN, files["plain"])
        == find_family(_QWEN, files["bytes"])
        == "Qwen3NextForCausalLM"
    )
    folder = tmp_path / "folder"
    exported(folder, "Qwen3_5MoeForCausalLM", tokenizers["Qwen's"])
    argv = [
        "--model.flavor",
        "hf",
        "--checkpoint.initial_load_path",
        folder,
        "--checkpoint.initial_load_in_hf",
        "true",
        "--checkpoint.last_save_in_hf",
        "true",
        "--training.dataset_path",
        Path(json.__file__).parent,
        "--training.dataset",
        "text",
        "--job.dump_folder",
        tmp_path / "run",
        "--model.tokenizer_path",
    ]
    words = "Qwen3_5MoeForCausalLM: transformers reads every tokenizer of model_type = 'qwen3_5_moe_text'"
    with refused(f"checkpoint.last_save_in_hf = true: {words}"):
        preflight(load_config([str(word) for word in [*argv, tokenizers["plain"]]]), world_size=1)


def test_converting_refuses_it_too(tokenizers, tmp_path, capsys):
    folder, run = tmp_path / "folder", tmp_path / "run"
    exported(folder, "Qwen3_5MoeForCausalLM", tokenizers["Qwen's"])
    assert convert.main(["from-hf", str(folder), str(run / "checkpoint")]) == 0
    run.joinpath("config.toml").write_text(
        f'[model]\nflavor = "hf"\nhf_assets_path = "{folder}"\ntokenizer_path = "{tokenizers["plain"]}"\n'
    )
    capsys.readouterr()
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 2
    assert "would give other tokens" in capsys.readouterr().err and not (tmp_path / "out").exists()
