from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_linear.data import ByteTokenizer, Corpus, open_corpus, write_corpus


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., list[bytes]]:
    """texts(dataset, path, …): the documents of the corpus that open_corpus makes of them, eos checked and cut off."""

    def read(dataset: str, path: Path | str | None, tokenizer: object = None, **kwargs: object) -> list[bytes]:
        corpus = open_corpus(dataset, path and str(path), tokenizer or ByteTokenizer(), cache_dir=tmp_path / "cache",
                             **kwargs)  # fmt: skip
        return documents(corpus)

    return read


def documents(corpus: Corpus) -> list[bytes]:
    found = [corpus.tokens[a:b] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:])]
    assert all(document[-1] == 256 for document in found)
    return [document[:-1].astype(np.uint8).tobytes() for document in found]


class AsciiTokenizer(ByteTokenizer):
    """Cannot take what is no UTF-8, as Hugging Face's cannot."""

    fingerprint = "ascii"

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")
        return super().encode(text)


def test_stdlib(texts: Callable):
    found = texts("stdlib", None)
    assert sum(map(len, found)) > 5e6 and len(found) > 300
    assert any(b"class Thread" in document for document in found)
    with pytest.raises(ValueError, match=r"training\.dataset_path = 'x'.*takes none"):
        texts("stdlib", "x")


def test_text(texts: Callable, tmp_path: Path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    contents = {"b.txt": b"second", "a.txt": b"first\r\nline", "sub/c.md": b"\xff\x00", "d.txt": b"", ".hidden": b"no"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    assert texts("text", folder) == [b"first\r\nline", b"second", b"\xff\x00"]
    corpus = open_corpus("text", str(folder), ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert "3 documents (1 empty files skipped)" in corpus.summary
    assert texts("text", folder / "b.txt") == [b"second"]
    assert texts("text", folder / "*.txt") == [b"first\r\nline", b"second"]
    assert texts("text", f"{folder}/sub/*, {folder}/a.txt,{folder}/*.txt") == [
        b"first\r\nline", b"second", b"\xff\x00"]  # fmt: skip
    assert texts("text", folder / "**" / "*.md") == [b"\xff\x00"]
    with pytest.raises(ValueError, match=r"c\.md: not UTF-8 at character 0"):
        texts("text", folder, AsciiTokenizer())


def test_text_bad_paths(texts: Callable, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "void.txt").touch()
    for path in (tmp_path / "nowhere", tmp_path / "*.nothing", tmp_path / "empty", f"{tmp_path}/void.txt,x.nothing"):
        with pytest.raises(ValueError, match=r"training\.dataset_path = "):
            texts("text", path)
    with pytest.raises(ValueError, match=r"validation\.dataset_path = "):
        texts("text", tmp_path / "nowhere", path_key="validation.dataset_path")
    with pytest.raises(ValueError, match=r"training\.dataset_path is empty"):
        texts("text", None)
    with pytest.raises(ValueError, match="has no text: 1 files, all empty"):
        texts("text", tmp_path / "void.txt")
    with pytest.raises(ValueError, match=r"training\.dataset = 'c4': there are stdlib, text, jsonl, parquet, tokens"):
        texts("c4", None)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="broken cannot be read"):
        texts("text", tmp_path)


def test_jsonl(texts: Callable, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    rows = [{"text": "one"}, {"text": "zwei ü", "other": 1}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "ignored.txt").write_text("no JSON")
    assert texts("jsonl", tmp_path) == [b"one", "zwei ü".encode(), b"three"]
    file.write_text('{"body": "B", "text": "T"}\n')
    assert texts("jsonl", file) == [b"T"]
    assert texts("jsonl", file, text_field="body") == [b"B"]  # and not the other field's cache


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ""}', r"line 2: 'text' has no tokens"),
        (b'{"body": "x"}', r"line 2: no field 'text' \(it has: 'body'\); set training\.dataset_text_field"),
        (b'{"text": null}', r"line 2: 'text' is NoneType, not text"),
        (b'{"text": 3}', r"line 2: 'text' is int, not text"),
        (b'{"text": "cut', r"line 2: not JSON"),
        (b'{"text": "\xff"}', r"line 2: not JSON in UTF-8"),
        (b'["text"]', r"line 2: no field 'text'"),
        (b"", r"line 2: not JSON"),
        (b'{"text": "\\ud800"}', r"line 2: not UTF-8 at character 0"),
    ],
)
def test_jsonl_bad_lines(texts: Callable, tmp_path: Path, line: bytes, message: str):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {message}"):
        texts("jsonl", file)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]  # nothing half-written


def test_parquet(texts: Callable, tmp_path: Path):
    rows = [f"row {i}" for i in range(600)]
    pq.write_table(pa.table({"text": rows, "n": range(600)}), tmp_path / "a.parquet", row_group_size=100)
    pq.write_table(pa.table({"text": pa.array(["x"], pa.large_string())}), tmp_path / "b.parquet")
    assert texts("parquet", tmp_path) == [row.encode() for row in [*rows, "x"]]


def test_parquet_bad(texts: Callable, tmp_path: Path):
    file = tmp_path / "bad.parquet"
    for value, message in ((None, "'text' is NoneType"), ("", "'text' has no tokens")):
        pq.write_table(pa.table({"text": ["good"] * 300 + [value]}), file)
        with pytest.raises(ValueError, match=rf"bad\.parquet, row 301: {message}"):
            texts("parquet", file)
    with pytest.raises(ValueError, match=r"bad\.parquet: no column 'body' \(it has: 'text'\)"):
        texts("parquet", file, text_field="body")
    pq.write_table(pa.table({"text": [1, 2]}), file)
    with pytest.raises(ValueError, match=r"bad\.parquet, row 1: 'text' is int"):
        texts("parquet", file)
    file.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"bad\.parquet: not a whole parquet file"):
        texts("parquet", file)


def test_tokens(texts: Callable, tmp_path: Path):
    write_corpus(tmp_path / "tokens", [np.array([72, 105, 256]), np.array([33, 256])], ByteTokenizer())
    assert texts("tokens", tmp_path / "tokens") == [b"Hi", b"!"]
    with pytest.raises(
        ValueError, match=r"written with tokenizer 'bytes-257', but model\.tokenizer_path gives 'ascii'"
    ):
        texts("tokens", tmp_path / "tokens", AsciiTokenizer())
    with pytest.raises(ValueError, match=r"training\.dataset_path is empty"):
        texts("tokens", None)
    with pytest.raises(ValueError, match=r"training\.dataset_path = .*no such folder"):
        texts("tokens", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"corpus\.json is missing"):
        texts("tokens", tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1], []], "document 1 has no tokens"),
        ([[1], [2, 257]], "document 1 has tokens outside the vocabulary, 0 to 256"),
        ([[-1]], "document 0 has tokens outside"),
        ([], "no documents"),
    ],
)
def test_write_bad_tokens(tmp_path: Path, bad: list, message: str):
    with pytest.raises(ValueError, match=message):
        write_corpus(tmp_path / "tokens", [np.array(ids, dtype=np.int64) for ids in bad], ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.lock"]
