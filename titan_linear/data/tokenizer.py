"""Tokenizers: bytes, which need no file, and any Hugging Face `tokenizer.json`.

Neither adds a token to a text by itself: the corpus writer appends `eos_id` to each document (cache.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

# What ends a document where no file beside tokenizer.json says so: the first of these that is a special token.
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What the data path, the model's vocabulary and the sampler need of a tokenizer.

    vocab_size: the largest id + 1 (ids may have holes, and a model must embed them all).
    eos_id: the token that ends a document, or None.
    fingerprint: changes whenever the tokens of some text may change.
    """

    vocab_size: int
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, [n] int64, without eos. A UnicodeEncodeError if it cannot take the text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel where the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Printable text; special tokens and ids beyond the vocabulary are left out, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Token b is byte b of the UTF-8 text; token 256 ends a document.

    A byte that is no UTF-8 comes in as Python's surrogateescape (how the text sources read files) and is kept as is.
    """

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-257"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes: the inverse of `encode` for any input."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library.

    Its own truncation, padding and post-processor (BOS, EOS) are off: documents are tokenised whole. As in
    transformers, a special token spelled out in a text becomes that token.
    eos is `eos_token` of tokenizer_config.json or special_tokens_map.json beside the file; else the first of the
    usual names (`_USUAL_EOS`) that is a special token of the vocabulary; else there is none.
    """

    def __init__(self, file: Path):
        data = _read(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception, and nothing narrower
            raise ValueError(f"model.tokenizer_path: {file} is no Hugging Face tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"model.tokenizer_path: {file} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _find_eos(file, json.loads(data), vocabulary)
        self.fingerprint = "hf-" + hashlib.sha256(data + f"eos={self.eos_id}".encode()).hexdigest()[:32]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            text.encode("utf-8")  # a lone surrogate: say which; the library only says "must be str"
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def build_tokenizer(path: str | None) -> Tokenizer:
    """`model.tokenizer_path`: nothing for bytes, else a tokenizer.json or a folder that holds one.

    ValueError (naming model.tokenizer_path): there is no such file, or it is no usable tokenizer.
    """
    if not path:
        return ByteTokenizer()
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"model.tokenizer_path = {path!r}: {file} does not exist; give a Hugging Face tokenizer.json, a folder "
            "that holds one, or nothing for bytes"
        )
    return HuggingFaceTokenizer(file)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"model.tokenizer_path: cannot read {file}: {error.strerror}") from error


def _find_eos(file: Path, content: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        try:
            settings = json.loads(_read(beside))
        except ValueError as error:
            raise ValueError(f"model.tokenizer_path: {beside} is not JSON: {error}") from error
        eos = settings.get("eos_token") if isinstance(settings, dict) else None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if eos is not None:
            if eos not in vocabulary:
                raise ValueError(f"model.tokenizer_path: eos_token {eos!r} of {beside} is not in {file}'s vocabulary")
            return vocabulary[eos]
    special = {token["content"] for token in content.get("added_tokens") or [] if token.get("special")}
    return next((vocabulary[name] for name in _USUAL_EOS if name in special and name in vocabulary), None)
