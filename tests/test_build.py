"""A model's vocabulary and its tokenizer's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from titan_linear.build import model_config, vocabulary
from titan_linear.config import load_config


def tokenizer(size: int) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=size, fingerprint=str(size))


@pytest.mark.parametrize(("size", "rows"), [(257, 320), (320, 320), (321, 384), (50257, 50304), (151936, 151936)])
def test_a_preset_follows_a_larger_tokenizer(size: int, rows: int) -> None:
    config = load_config([])
    model = model_config(config, tokenizer(size))
    assert model.vocab_size == rows
    line = vocabulary(config, model, tokenizer(size))
    said = f"model.vocab_size = {rows}: the tokenizer's {size}, rounded up; 'debug' alone has 320"
    assert line == ("" if rows == 320 else said)


@pytest.mark.parametrize("keys", [["--model.vocab_size=320"], ["--checkpoint.initial_load_path=outputs/other"]])
def test_what_says_its_size_follows_nothing(keys: list[str]) -> None:
    config = load_config(keys)
    with pytest.raises(ValueError, match=r"model.vocab_size = 320 is smaller than that of the tokenizer .*, 321; set"):
        model_config(config, tokenizer(321))
    assert vocabulary(config, model_config(config, tokenizer(257)), tokenizer(257)) == ""


def test_a_vocabulary_far_larger_than_the_tokenizers_is_said() -> None:
    config = load_config(["--model.flavor=340M"])
    model = model_config(config, tokenizer(257))
    assert model.vocab_size == 32000  # as it always was
    assert "the tokenizer uses 257" in vocabulary(config, model, tokenizer(257))
