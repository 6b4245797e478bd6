"""A model's vocabulary and its tokenizer's; what a run says of its layers."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.keys import argv_of
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.run.build import implementations
from titan_linear.run.console import uncompiled, vocabulary
from titan_linear.run.data import check_alike
from titan_linear.run.origin import Origin
from titan_linear.storage.step_folders import Content


def tokenizer(size):
    return SimpleNamespace(vocab_size=size, fingerprint=str(size))


@pytest.mark.parametrize("path", ["", "outputs/other"])
@pytest.mark.parametrize(
    "size, rows", [(257, 320), (320, 320), (321, 384), (50257, 50304), (151936, 151936)]
)
def test_a_preset_follows_a_larger_tokenizer(size, rows, path):
    """As the run did whose weights it begins with, or which are generated from."""
    config = load_config([f"--checkpoint.initial_load_path={path}"])
    model = Origin.of(config).model_for(tokenizer(size))
    assert model.vocab_size == rows
    line = vocabulary(Origin.of(config), model, tokenizer(size))
    said = f"model.vocab_size = {rows}: the tokenizer's {size}, rounded up; 'debug' alone has 320"
    assert line == ("" if rows == 320 else said)


@pytest.mark.parametrize(
    "keys, factor",
    [
        ({"adapter.alpha": 12}, 12 / 4),
        ({"adapter.alpha": 12, "adapter.rslora": "true"}, 12 / 4**0.5),
    ],
)
def test_adapters_are_scaled_by_alpha_over_the_rank_or_its_root(keys, factor):
    config = load_config(argv_of({"adapter.enable": "true", "adapter.rank": 4} | keys))
    assert Origin.of(config).model_for(tokenizer(257)).adapter.factor == factor


def unlike(rank, world_size, keys, corpus):
    content = Content(tokenizer="t", model="m", corpora={"": corpus if rank else "a"}, mixture=[])
    try:
        check_alike(load_config(keys if rank else []).flat_keys(), content, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "keys, corpus, said",
    [
        ([], "a", ""),
        (["--model.tokenizer_path=x", "--job.dump_folder=y"], "a", ""),  # a node's own
        (["--profiling.save_traces_folder=x", "--profiling.enable_memory_snapshot=true"], "a", ""),
        (
            ["--optimizer.lr=0.5"],
            "a",
            "optimizer.lr is 0.5 on rank 1 and 0.0003 on rank 0; start every",
        ),
        (
            ["--profiling.enable_profiling=true"],
            "a",
            "profiling.enable_profiling is True on rank 1",
        ),
        ([], "b", "the content of corpora is {'': 'b'} on rank 1 and {'': 'a'} on rank 0; start"),
    ],
)
def test_ranks_with_other_data_or_keys_are_refused(keys, corpus, said, worlds):
    found = worlds(2).run(unlike, keys, corpus)
    assert found[0] == found[1] and found[0].startswith(said) and bool(found[0]) == bool(said)


@pytest.mark.parametrize("tp, name", [(8, "grouped_mm"), (16, "loop")])
def test_implementations_are_those_for_a_ranks_part_of_the_experts(tp, name):
    """Of 64 hidden channels."""
    keys = ["--model.name=qwen3.5", "--training.mixed_precision_param=bfloat16"]
    config = load_config([*keys, f"--parallelism.tensor_parallel_degree={tp}"])
    choice = implementations(
        config, Origin.of(config).model_for(tokenizer(257)), torch.device("cuda")
    )["grouped_linear"]
    assert choice.implementation == name and ("rows of 4 are" in choice.why) == (name == "loop")


def test_layers_that_are_not_compiled_are_said_on_gpus():
    assert "compile.enable = true" in uncompiled(False, torch.device("cuda"))
    assert uncompiled(True, torch.device("cuda")) == uncompiled(False, torch.device("cpu")) == ""


IN_HF = ["--checkpoint.initial_load_path=other", "--checkpoint.initial_load_in_hf=true"]


@pytest.mark.parametrize("keys", [["--model.vocab_size=320"], IN_HF])
def test_what_says_its_size_follows_nothing(keys):
    config = load_config(keys)
    with refused(r"model.vocab_size = 320 is smaller than that of the tokenizer .*, 321; set"):
        Origin.of(config).model_for(tokenizer(321))
    assert (
        vocabulary(Origin.of(config), Origin.of(config).model_for(tokenizer(257)), tokenizer(257))
        == ""
    )


def test_a_vocabulary_far_larger_than_the_tokenizers_is_said():
    config = load_config(["--model.flavor=340M"])
    model = Origin.of(config).model_for(tokenizer(257))
    assert model.vocab_size == 32000  # as it always was
    assert "the tokenizer uses 257" in vocabulary(Origin.of(config), model, tokenizer(257))
