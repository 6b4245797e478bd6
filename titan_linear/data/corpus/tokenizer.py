"""Tokenizers: bytes, which need no file, and any Hugging Face `tokenizer.json`.

Neither adds a token to a text by itself: `eos_id` is appended to each document when it is
tokenised (cache.py).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy import ndarray

from titan_linear.storage.files import Json, json_bytes, read_inside, read_json

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
# Names of the end token if no settings name one: the first that is a special token.
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# The class with which transformers uses tokenizer.json unchanged, whatever the model's
# name.
_GENERIC_CLASS = "PreTrainedTokenizerFast"
# Settings that make transformers give other tokens than tokenizer.json, or name files that
# we lack.
_CHANGES_TOKENS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "auto_map",
    "split_special_tokens",
    "tokenizer_file",
)
# Settings of one token each, which every tokenizer may have, and settings of several
# tokens, in a list or in an object by name.
NAMED_TOKENS = (
    "bos_token",
    "cls_token",
    "mask_token",
    "pad_token",
    "sep_token",
    "unk_token",
    "eos_token",
)
_TOKEN_LISTS = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
# File names of other kinds of tokenizers.
_OTHER_KIND = re.compile(r"tiktoken|tekken|\.model\b|^vocab\.|^merges\.txt$")
# Values of settings with which no part of a tokenizer adds a space before a text, or strips
# one.
_NO_SPACE = {
    "prepend": "",
    "strip_left": False,
    "prepend_scheme": "never",
    "add_prefix_space": False,
}
# The tokenizer.json of bytes: a byte-level BPE without merges, whose vocabulary has the
# letters by which GPT-2's encoding writes bytes.
_BYTES = Path(__file__).with_name("bytes.json").read_bytes()
# Maximum number of characters made of one; real tokenizers make some tens.
_GROWTH = 10_000
GENERATION = "generation_config.json"
_COPIED = ("vocab.json", "merges.txt", "tokenizer.model", GENERATION)
_TEMPLATES = (CHAT_TEMPLATE, f"{MORE_TEMPLATES}/*.jinja")
# Files of a tokenizer of any kind.
FILES = (
    "tokenizer*.*",
    "vocab.txt",
    "*.model",
    "added_tokens.json",
    SPECIAL,
    *_COPIED,
    *_TEMPLATES,
)


class Tokenizer(Protocol):
    """Interface of a tokenizer for the data path, the model's vocabulary and the sampler.

    Attributes:
        vocab_size: the largest id + 1 (ids may have holes, and a model must embed them
            all).
        eos_id: the token that ends a document, or None.
        end_ids: tokens that each end a generated text.
        bos_id: the token before a text, or None.
        first_ids: [bos_id] if transformers always writes it, else empty.
        fingerprint: changes whenever the tokens of some text may change.
    """

    vocab_size: int
    eos_id: int | None
    end_ids: frozenset[int]
    bos_id: int | None
    first_ids: list[int]
    fingerprint: str

    @property
    def summary(self) -> str:
        """Return a line for the console, and one for a warning if there is any."""

    @property
    def eos(self) -> list[int]:
        """Return the tokens that end a document: one, or none."""
        return [] if self.eos_id is None else [self.eos_id]

    def encode(self, text: str) -> ndarray:
        """Return the tokens of a text, [n] integers, without eos.

        Raises:
            ValueError: the tokenizer refuses the text; UnicodeEncodeError if the text is
                not UTF-8.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[ndarray]:
        """Return `encode` of each text, in parallel where the tokenizer can."""
        return [self.encode(text) for text in texts]

    def continuing(self) -> Tokenizer:
        """Return this tokenizer for texts that continue another.

        It puts no space before them.

        Raises:
            ValueError: such a tokenizer cannot be made.
        """

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return printable text.

        Ids beyond the vocabulary are left out, and special tokens too unless asked for.
        Broken UTF-8 becomes U+FFFD.
        """

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return files for AutoTokenizer, with these tokens and this end token, by name."""


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: token b is byte b, and token 256 ends a document.

    A byte that is not UTF-8 comes in as a surrogate escape (the text sources read files
    this way) and is kept unchanged.
    """

    vocab_size = 257
    eos_id = 256
    end_ids = frozenset({256})
    bos_id = None
    first_ids = []
    fingerprint = "bytes-257"
    summary = "tokenizer: none, bytes are tokens (model.tokenizer_path)"

    def encode(self, text: str) -> ndarray:
        data = text.encode("utf-8", "surrogateescape")
        # The type on disk, uint16, because a document may be large.
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def continuing(self) -> ByteTokenizer:
        return self

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        end = _USUAL_EOS[0].encode() if special else b""
        data = b"".join(bytes([i]) if i < 256 else end for i in map(int, ids))
        return data.decode("utf-8", "replace")

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return files for transformers.

        The end token's name in a text gives its bytes, here and in transformers
        (split_special_tokens).
        """
        settings = _settings({"split_special_tokens": True}, _USUAL_EOS[0])
        return {TOKENIZER: _BYTES, SETTINGS: settings}


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a `tokenizer.json`, read by the `tokenizers` library.

    A text's tokens depend on it alone and are always the same: truncation, padding, a
    post-processor that adds tokens (BOS, EOS) and dropout are off, here and in exports;
    `summary` names them. As in transformers, a special token spelled out in a text becomes
    that token.

    The end token is `eos_token` of the settings next to the file, else the first of the
    usual names (`_USUAL_EOS`) that is a special token of the vocabulary, else there is
    none.
    """

    def __init__(self, file: Path):
        self._file = file
        data = _read(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:
            # tokenizers raises bare Exception, and nothing narrower.
            raise ValueError(
                f"model.tokenizer_path: {file} is not a Hugging Face tokenizer: {error}; fetch it again"
            ) from error
        adds_tokens = self._tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        content = json.loads(data)
        self._added = content.get("added_tokens") or []
        self._special = [token["content"] for token in self._added if token.get("special")]
        # A part that writes n characters for some makes at most n + 1 of each; one that
        # writes bytes as letters, 4.
        growth = math.prod(
            4 if part.get("type") == "ByteLevel" else 1 + len(part.get("content", ""))
            for part in _parts(content)
        )
        if growth > _GROWTH:
            raise ValueError(
                f"model.tokenizer_path: {file} may make {growth:.0e} characters of one, which takes all memory; take "
                "one from a source that you trust"
            )
        # Switch off whatever depends on more than the text.
        self._content, self._off = _of_texts_alone(data, content, adds_tokens)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if "dropout" in self._off:
            self._tokenizer.model.dropout = None
        # Vocabulary and special tokens.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"model.tokenizer_path: {file} has an empty vocabulary; give another")
        self.vocab_size = max(vocabulary.values()) + 1
        self._settings = _read_settings(file.parent)
        self.bos_id = vocabulary.get(_name_of(self._settings.get("bos_token")))
        self.first_ids = [x for x in self._tokenizer.encode("").ids if x == self.bos_id]
        # A post-processor would also move the places of tokens.
        self._tokenizer.post_processor = None
        self.eos_id = self._find_eos(vocabulary)
        # The end of generated texts is in generation_config.json, else in the model's
        # config.json.
        settings = _read_object(file.with_name("config.json"))
        settings |= _read_object(file.with_name(GENERATION))
        ends = settings.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        self.end_ids = frozenset([*self.eos, *(x for x in ends if isinstance(x, int))])
        self.fingerprint = (
            "hf-" + hashlib.sha256(data + f"eos={self.eos_id}".encode()).hexdigest()[:32]
        )

    def _find_eos(self, vocabulary: dict[str, int]) -> int | None:
        eos = _name_of(self._settings.get("eos_token"))
        if eos is not None:
            if eos not in vocabulary:
                raise ValueError(
                    f"model.tokenizer_path: eos_token {eos!r} of {SETTINGS} or {SPECIAL} is not in the vocabulary of "
                    f"{self._file}; name one that is"
                )
            return vocabulary[eos]
        usual = [name for name in _USUAL_EOS if name in self._special and name in vocabulary]
        return vocabulary[usual[0]] if usual else None

    @property
    def summary(self) -> str:
        off = f"; switched off: {', '.join(self._off)}" if self._off else ""
        line = f"tokenizer: '{self._file}', {self.vocab_size:,} tokens{off}"
        try:
            # A letter of cuneiform, which vocabularies do not have.
            known = len(self.encode("\U00012000"))
        except ValueError:
            # A document with such a letter is refused.
            return line
        return (
            line
            if known
            else f"{line}\nwarning: it drops characters that it does not know: no token stands for them"
        )

    def encode(self, text: str) -> ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[ndarray]:
        for text in texts:
            # Raises at a lone surrogate, and names it; the library only says "must be str".
            text.encode("utf-8")
        with _refusals():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[ndarray, ndarray]:
        """Return `encode`, and the characters [begin, end) of each token, [n, 2] int64."""
        text.encode("utf-8")
        with _refusals():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.int64), places

    def continuing(self) -> HuggingFaceTokenizer:
        content = json.loads(self._content)
        for part in _parts(content):
            part |= {key: value for key, value in _NO_SPACE.items() if key in part}
            # All spaces in a text would come from this part, before each word.
            if part.get("type") == "WhitespaceSplit":
                raise ValueError(
                    f"training.dataset_format = 'completion': {self._file} puts a space before every text, so before "
                    "completions too; set model.tokenizer_path to a tokenizer that keeps spaces as they are"
                )
        other = copy(self)
        other._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        return other

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Return the folder's chat templates by name, as transformers finds them.

        Files take precedence over a setting.
        """
        folder = self._file.parent
        files = [folder / CHAT_TEMPLATE, *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
        templates: dict[str, Any] = {}
        for file in files:
            if file.is_file():
                name = "default" if file.parent == folder else file.stem
                templates[name] = _read_text(file)
        # A setting is one template, a list of named ones, or an object by name.
        if not templates:
            setting = self._settings.get("chat_template")
            templates = setting if isinstance(setting, dict) else {"default": setting}
            if isinstance(setting, list):
                entries = [entry for entry in setting if isinstance(entry, dict)]
                templates = {entry.get("name"): entry.get("template") for entry in entries}
        return {name: text for name, text in templates.items() if isinstance(text, str)}

    @cached_property
    def token_names(self) -> dict[str, str]:
        """Map names of tokens to their texts, as chat templates know them.

        Names are bos_token, eos_token, and the model's own (image_token, …).
        """
        tokens = {name: value for name, value in self._settings.items() if name.endswith("_token")}
        for name in _TOKEN_LISTS:
            listed = self._settings.get(name)
            tokens |= listed if isinstance(listed, dict) else {}
        tokens["eos_token"] = self._end
        texts = {name: _name_of(token) for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @property
    def _end(self) -> str | None:
        """Return the end token's text."""
        return None if self.eos_id is None else self._tokenizer.id_to_token(self.eos_id)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Return the texts of the special tokens and of the end token.

        The end token need not be a special one.
        """
        special = self._special
        return tuple(special) if self._end in (None, *special) else (*special, self._end)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        with _refusals():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files, without settings that change a text's tokens."""
        folder = self._file.parent
        # The content of these files is in `_kept_settings`.
        read_inside(folder, SETTINGS, SPECIAL)
        files = read_inside(folder, *_COPIED, *_TEMPLATES)
        return files | {TOKENIZER: self._content, SETTINGS: _settings(*self._kept_settings())}

    def _kept_settings(self) -> tuple[Json, str | None]:
        """Return the settings without keys that change tokens, and the end token's text."""
        kept = {key: value for key, value in self._settings.items() if key not in _CHANGES_TOKENS}
        # Keep tokens as texts: tokenizer.json has the rest. transformers would add unknown
        # ones.
        added = [token["content"] for token in self._added]
        for key, value in list(kept.items()):
            if key.endswith("_token"):
                kept[key] = _name_of(value)
                if kept[key] not in added:
                    del kept[key]
            elif key in _TOKEN_LISTS and isinstance(value, list):
                kept[key] = [text for text in map(_name_of, value) if text in added]
            elif key in _TOKEN_LISTS and isinstance(value, dict):
                texts = {name: _name_of(token) for name, token in value.items()}
                kept[key] = {name: text for name, text in texts.items() if text in added}
        return kept, self._end


def build_tokenizer(path: str | None, key: str = "model.tokenizer_path") -> Tokenizer:
    """Build the tokenizer of `model.tokenizer_path`.

    An empty path stands for bytes; else it is a tokenizer.json or a folder that holds one.

    Raises:
        ValueError: the file does not exist (naming `key`), or is not a usable tokenizer.
    """
    if not path:
        return ByteTokenizer()
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = file / TOKENIZER
    if not file.is_file():
        raise ValueError(f"{key} = {path!r}: {file} does not exist; {_instead(file.parent)}")
    # The folder may be one that we wrote.
    if _read(file) == _BYTES:
        return ByteTokenizer()
    return HuggingFaceTokenizer(file)


def _instead(folder: Path) -> str:
    """Return a remedy for a folder without tokenizer.json."""
    others = sorted(file.name for file in folder.glob("*") if _OTHER_KIND.search(file.name))
    give = (
        "give a Hugging Face tokenizer.json, or a folder that holds one, as hf download OWNER/NAME --local-dir NAME "
        "fetches it (model.tokenizer_path = 'bytes' needs none)"
    )
    path = json.dumps(str(folder))
    how = "docs/hugging_face.md says how"
    if not any("tiktoken" in name or "tekken" in name for name in others):
        code = f"from transformers import AutoTokenizer as A; A.from_pretrained({path}).save_pretrained({path})"
        how = f"python -c {shlex.quote(code)}"
    return f"convert {', '.join(others)} to one ({how}), or {give}" if others else give


def _of_texts_alone(data: bytes, content: Json, adds_tokens: bool) -> tuple[bytes, list[str]]:
    """Return a tokenizer.json under which a text's tokens depend on the text alone.

    Whatever cuts, pads or extends texts, or draws tokens at random, is taken out. Also
    returns the names of what was taken out.

    Args:
        content: the parsed `data`.
    """
    keys = ["truncation", "padding", *["post_processor"] * adds_tokens]
    off = [key for key in keys if content.get(key) is not None]
    content |= dict.fromkeys(off)
    if content["model"].get("dropout"):
        off.append("dropout")
        content["model"]["dropout"] = None
    return json_bytes(content) if off else data, off


def _parts(content: Any) -> Iterator[Json]:
    """Yield the parts of a tokenizer.json that change texts, and all of their parts."""
    parts = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise ValueError for what the library raises.

    It raises bare Exception, and a panic that is not an Exception (a regular expression
    that backtracks too long).
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"the tokenizer refuses it: {error}") from error


def _read(file: Path) -> bytes:
    """Return a file's content, without a byte order mark."""
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ValueError(
            f"model.tokenizer_path: cannot read {file}: {error.strerror}; give the permission"
        ) from error


def _read_text(file: Path) -> str:
    try:
        return _read(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"model.tokenizer_path: {file} is not UTF-8: {error}; write it anew"
        ) from error


def _read_settings(folder: Path) -> Json:
    """Return the settings next to tokenizer.json, as transformers reads them.

    special_tokens_map.json counts only if tokenizer_config.json does not list the added
    tokens, and then takes precedence over it.

    Raises:
        ValueError: a token of NAMED_TOKENS is not a text.
    """
    settings = _read_object(folder / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _read_object(folder / SPECIAL)
    for name in NAMED_TOKENS:
        if not isinstance(_name_of(settings.get(name)), str | None):
            raise ValueError(
                f"model.tokenizer_path: {name} = {settings[name]!r} of {folder / SETTINGS} or {SPECIAL} is not text; "
                "correct it there"
            )
    return settings


def _read_object(file: Path) -> Json:
    """Return the settings in a file, or {} if the file does not exist."""
    return read_json(file, Json, "correct it there") if file.is_file() else {}


def _name_of(token: object) -> Any:
    """Return the text of a token, which settings give directly or in an object."""
    return token.get("content") if isinstance(token, dict) else token


def _settings(kept: Json, eos: str | None) -> bytes:
    """Return the content of tokenizer_config.json."""
    forced = {
        "tokenizer_class": _GENERIC_CLASS,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    return json_bytes({**kept, **forced})
