"""Texts from which prompts are made."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from titan_linear.data import ByteTokenizer
from titan_linear.data.streams import prompts


@pytest.mark.parametrize("decoded", [7, 1 << 14])
def test_long_documents_are_decoded_in_parts(monkeypatch, decoded):
    """All of the text, in lines of at most 80 characters, whatever is decoded at a time."""
    monkeypatch.setattr(prompts, "DECODED", decoded)
    texts = ["a line\n\n" + "word " * 40 + "\nthe end", "", "b"]
    tokens = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    questions = SimpleNamespace(_documents=lambda rng: tokens, tokenizer=ByteTokenizer())
    pieces = list(prompts.Questions._text(questions, random.Random(0)))
    assert "".join(pieces) == "".join(texts)
    assert all(0 < len(piece.rstrip("\n")) <= 80 or piece == "\n" for piece in pieces)
