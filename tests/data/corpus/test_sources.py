import bz2
import gzip
import json
import lzma
import os
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tqdm import TqdmWarning

from tests.records import write_json, write_lines, write_record, write_table, write_texts
from tests.refusals import refused
from titan_linear.data import (
    ByteTokenizer,
    Texts,
    load_corpus,
    open_corpus,
    tokenise_corpus,
    write_corpus,
)
from titan_linear.data.corpus.sources import read_documents, source_files


@pytest.fixture
def texts(tmp_path):
    """texts(dataset, path, …): the documents of the corpus that open_corpus makes of them, eos checked and cut off."""

    def read(dataset, path, tokenizer=None, **kwargs):
        given = Texts(dataset, path and str(path), tokenizer or ByteTokenizer(), **kwargs)
        corpus = open_corpus(given, cache_dir=tmp_path / "cache")
        return documents(corpus)

    return read


def documents(corpus):
    found = [corpus.tokens[a:b] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:])]
    assert all(document[-1] == 256 for document in found)
    return [document[:-1].astype(np.uint8).tobytes() for document in found]


class AsciiTokenizer(ByteTokenizer):
    """Cannot take what is no UTF-8, as Hugging Face's cannot."""

    fingerprint = "ascii"

    def encode(self, text):
        text.encode("utf-8")
        return super().encode(text)


def test_stdlib_is_pythons_own_source(texts):
    found = texts("stdlib", None)
    assert sum(map(len, found)) > 5e6 and len(found) > 300
    assert any(b"class Thread" in document for document in found)
    with refused(r"training\.dataset_path = 'x'.*takes none"):
        texts("stdlib", "x")


def test_text_files_are_documents_in_order(texts, tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    contents = {
        "b.txt": b"second",
        "a.txt": b"first\r\nline",
        "sub/c.md": b"\xff\x00",
        "d.txt": b"",
        ".hidden": b"no",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    assert texts("text", folder) == [b"first\r\nline", b"second", b"\xff\x00"]
    corpus = open_corpus(Texts("text", str(folder), ByteTokenizer()), cache_dir=tmp_path / "cache")
    assert "3 documents (1 empty files skipped)" in corpus.summary
    assert texts("text", folder / "b.txt") == [b"second"]
    assert texts("text", folder / "*.txt") == [b"first\r\nline", b"second"]
    assert texts("text", f"{folder}/sub/*, {folder}/a.txt,{folder}/*.txt") == [
        b"first\r\nline",
        b"second",
        b"\xff\x00",
    ]
    assert texts("text", folder / "**" / "*.md") == [b"\xff\x00"]
    assert texts("text", f"{folder}/b.txt,{folder}/sub/../b.txt") == [b"second"]
    with refused(r"b\.txt,': nothing stands beside a comma; leave the comma out"):
        texts("text", f"{folder}/b.txt,")
    with refused(r"c\.md: not UTF-8 at character 0"):
        texts("text", folder, AsciiTokenizer())


def test_linked_folders_are_followed_once(texts, tmp_path, monkeypatch):
    """A corpus of shards elsewhere; a link back up is no way to read everything again."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, text in ((here, "x"), (there, "y")):
        folder.mkdir()
        (folder / f"{text}.txt").write_text(text)
    (here / "linked").symlink_to(there)
    (there / "back").symlink_to(here)
    assert texts("text", here) == [b"y", b"x"]
    (here / "another").symlink_to(there)
    walk = os.walk

    def backwards(*arguments, **options):  # as another file system lists folders
        for root, folders, names in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield root, folders, names

    monkeypatch.setattr(os, "walk", backwards)
    assert source_files("text", str(here)) == [here / "another" / "y.txt", here / "x.txt"]

    def refuse(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with refused("here cannot be read: Permission denied; give the permission"):
        texts("text", here)


def test_a_file_by_several_paths_is_read_once(texts, tmp_path):
    """As in a cache of snapshots, whose files are links."""
    folder, blob = tmp_path / "snapshots", tmp_path / "blob"
    blob.write_text("x")
    for link in ("new/a.txt", "old/a.txt", "old/latest.txt"):
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(blob)
    (folder / "new" / "b.txt").write_text("x")  # the same text in another file is another document
    assert texts("text", folder) == [b"x", b"x"]
    assert source_files("text", str(folder)) == [folder / "new" / "a.txt", folder / "new" / "b.txt"]


def test_text_bad_paths(texts, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "void.txt").touch()
    for path in (
        tmp_path / "nowhere",
        tmp_path / "*.nothing",
        tmp_path / "empty",
        f"{tmp_path}/void.txt,x.nothing",
    ):
        with refused(r"training\.dataset_path = "):
            texts("text", path)
    with refused(r"validation\.dataset_path = "):
        texts("text", tmp_path / "nowhere", path_key="validation.dataset_path")
    with refused(r"training\.dataset_path is empty"):
        texts("text", None)
    (tmp_path / "void2.txt").touch()
    for path, named in (("void.txt", r"void\.txt"), ("void*.txt", r"void\.txt and 1 more")):
        with refused(rf"^training\.dataset_path has no text in \S+{named}: all empty; give"):
            texts("text", tmp_path / path)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with refused("broken cannot be read"):
        texts("text", tmp_path)


def test_lines_of_jsonl_are_documents(texts, tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"text": "one"}, {"text": "zwei ü", "other": 1}]
    file.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "ignored.txt").write_text("no JSON")
    assert texts("jsonl", tmp_path) == [b"one", "zwei ü".encode(), b"three"]
    file.write_text('{"body": "B", "text": "T"}\n')
    assert texts("jsonl", file) == [b"T"]
    assert texts("jsonl", file, text_field="body") == [b"B"]  # and not the other field's cache


@pytest.mark.parametrize(
    "line, message",
    [
        (
            b'{"body": "x"}',
            r"line 2: no field 'text' \(it has: 'body'\); set training\.dataset_text_field",
        ),
        (b'{"text": null}', r"line 2: 'text' is NoneType, not text"),
        (b'{"text": 3}', r"line 2: 'text' is int, not text"),
        (b'{"text": "cut', r"line 2: not JSON"),
        (b'{"text": "\xff"}', r"line 2: not JSON in UTF-8"),
        (b'["text"]', r"line 2: not a JSON object with a field 'text'"),
        pytest.param(b"[" * 100_000, r"line 2: it is nested 100,000 deep", id="deep"),
        (b'{"text": "\\ud800"}', r"line 2: not JSON in UTF-8: .*'\\ud800'.*; repair it"),
        # else it would be byte 0x80
        (b'{"text": "a\\udc80b"}', r"line 2: not JSON in UTF-8: .*'\\udc80'"),
    ],
)
def test_jsonl_bad_lines(texts, tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    with refused(rf"bad\.jsonl, {message}"):
        texts("jsonl", file)
    # nothing half-written
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("depth", [300, 900])
def test_a_record_that_is_nested_deeply_is_a_bad_one(tmp_path, depth):
    file = tmp_path / "deep.jsonl"
    file.write_text('{"prompt": "x", "completion": ' + '{"a": ' * depth + "1" + "}" * depth + "}\n")
    with refused(rf"deep\.jsonl, line 1: it is nested {depth + 1} deep, and 250 is the most"):
        tokenise_corpus(
            tmp_path / "o", Texts("jsonl", str(file), ByteTokenizer(), dataset_format="completion")
        )


def test_jsonl_as_it_is_found(texts, tmp_path):
    """Blank lines, a byte order mark, empty texts, and compressed files, of one member or frame or of several."""
    lines = [
        b'\xef\xbb\xbf{"text": "one"}\r\n',
        b"\n",
        b"  \t\n",
        b'{"text": ""}\n',
        b'{"text": "two"}\n',
        b"\n",
    ]
    plain, halves = b"".join(lines), (b"".join(lines[:3]), b"".join(lines[3:]))
    contents = {
        "a.jsonl": plain,
        "b.jsonl.gz": gzip.compress(plain),
        "c.jsonl.gz": b"".join(map(gzip.compress, halves)),
        "d.jsonl.zst": zstd(plain),
        "e.jsonl.zst": b"".join(map(zstd, halves)),
        "f.json": b"not among them",
        "g.jsonl.xz": b"".join(map(lzma.compress, halves)),
        "h.jsonl.bz2": bz2.compress(plain),
        "i.jsonl": gzip.compress(plain),  # whatever its name
        "j.jsonl.gz": plain,
        "k.jsonl": zstd(plain),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert texts("jsonl", tmp_path) == [b"one", b"two"] * 10
    summary = open_corpus(
        Texts("jsonl", str(tmp_path), ByteTokenizer()), cache_dir=tmp_path / "cache"
    ).summary
    assert summary.startswith("corpus jsonl: 20 documents (10 empty texts skipped), 80 tokens, in ")
    for name in ("b.jsonl.gz", "d.jsonl.zst", "g.jsonl.xz", "h.jsonl.bz2"):
        (tmp_path / name).write_bytes(contents[name][:-3])
        with refused(rf"{name} cannot be read: "):
            texts("jsonl", tmp_path / name)
    (tmp_path / "b.jsonl.gz").write_bytes(contents["b.jsonl.gz"][:12] + b"\xff" * 40)
    with refused(r"b.jsonl.gz cannot be read: "):
        texts("jsonl", tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize(
    "content, kind",
    [
        ('{"text": "x"}\n'.encode("utf-16"), "UTF-16"),
        ('{"text": "x"}\n'.encode("utf-16-be"), "UTF-16"),
        (gzip.compress('{"text": "x"}\n'.encode("utf-16-le"), mtime=0), "UTF-16"),
        (bz2.compress('{"text": "x"}\n'.encode("utf-16")), "UTF-16"),
        (b'\xef\xbb\xbf\n [\n{"text": "x"},\n{"text": "y"}]', r"one JSON array; write a line .*jq"),
        (b'[{"text": "x"}, {"text": "y"}]\n', "one JSON array"),
        (b"PAR1\x15\x04", "a parquet file; training.dataset = 'parquet'"),
        (b"ARROW1\0\0", "an arrow file"),
        (b"PK\3\4\x14\0", "a zip archive"),
        (b'\x04"M\x18\x64', "compressed with lz4"),
    ],
)
def test_a_file_of_another_kind_is_named(texts, tmp_path, content, kind):
    """And not passed over line by line."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with refused(rf"a\.jsonl does not hold lines of JSON: it is {kind}"):
        texts("jsonl", tmp_path, on_bad_document="skip")
    if "array" not in kind:
        with refused(rf"a\.jsonl does not hold text: it is {kind}"):
            texts("text", tmp_path, on_bad_document="skip")


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl", "a.jsonl.gz"])
def test_lines_of_json_are_no_text(texts, tmp_path, name):
    """Two lines that are objects, or the begin of one where the name says so; other JSON and other texts are texts."""
    pack = gzip.compress if name.endswith("gz") else bytes
    for lines in (
        b'\xef\xbb\xbf{"text": "a"}\n\n {"b": 1}\n',
        b'{"text": "a"}\n' * 3 + b"not JSON",
    ):
        (tmp_path / name).write_bytes(pack(lines))
        with refused(rf"{name}: lines of JSON; training\.dataset = 'jsonl' reads them; training"):
            texts("text", tmp_path / name)
    for text in (
        b'{"a":\n{"b": 1}}\n',
        b"{}, {}\n{}",
        b"[1]\n[2]\n",
        b"plain\n{}\n{}\n",
        b'{"a": 1}',
    ):
        (tmp_path / name).write_bytes(pack(text))
        if text.startswith(b"{") and ".jsonl" in name:
            with refused("lines of JSON"):
                texts("text", tmp_path / name)
        else:
            assert texts("text", tmp_path / name) == [text]
    (tmp_path / "b.txt").write_bytes(b"good")
    (tmp_path / name).write_bytes(pack(lines))
    assert texts("text", tmp_path / "*.*", on_bad_document="skip") == [b"good"]


@pytest.mark.parametrize(
    "record", [{"messages": []}, {"conversations": []}, {"prompt": "x", "completion": "y"}]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_read_as_texts_name_the_key(texts, tmp_path, record, kind):
    file = tmp_path / f"a.{kind}"
    write_record(file, record)
    fits = "completion" if "prompt" in record else "messages"
    remedy = rf'for conversations set training\.dataset_format = "{fits}" \(titan-linear corpus: --format {fits}\), '
    with refused(r"no (field|column) 'text' \(it has: .*\); " + remedy):
        texts(kind, file)
    if "prompt" not in record:
        with refused(r"' is list, not text; " + remedy):
            texts(kind, file, text_field=next(iter(record)))


@pytest.mark.parametrize(
    "pattern", ["", "*", "**/*.parquet", "*/*.parquet", "*/*/*/*.parquet", "../t/**"]
)
def test_folders_of_tables_that_hold_no_rows(texts, tmp_path, pattern):
    """Spark's, Delta's and Hive's, found in a folder, by a glob, or in a folder that a glob finds."""
    for name in (
        "day=1",
        "_delta_log",
        "_change_data/day=1",
        "day=1/_temporary/0",
        ".hive-staging",
        "day=1/z/y",
    ):
        (tmp_path / "t" / name).mkdir(parents=True)
        write_table(tmp_path / "t" / name / "_0.parquet", {"text": [name]})
    one, two = {"*/*.parquet": (1, 0), "*/*/*/*.parquet": (0, 1)}.get(pattern, (1, 1))
    assert texts("parquet", tmp_path / "t" / pattern) == [b"day=1"] * one + [b"day=1/z/y"] * two


def test_a_folder_that_is_named(texts, tmp_path):
    """It is read, whatever its name; and texts are any files, _posts too."""
    folder = tmp_path / "_corpora" / "_x"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "a"}')
    for path in (
        folder,
        folder / "*.jsonl",
        folder.parent / "*",
        tmp_path / "*" / "_x" / "*.jsonl",
    ):
        if path.name == "*":
            with refused(r"no \.jsonl file, compressed or not, is at "):
                texts("jsonl", path)
        elif path.parts[-3] != "*":
            assert texts("jsonl", path) == [b"a"]
    (folder / "a.txt").write_text("b")
    (folder / "a.jsonl").unlink()
    assert texts("text", tmp_path / "_corpora") == texts("text", tmp_path / "_cor*") == [b"b"]


def test_a_name_that_is_not_utf8(texts, tmp_path):
    """In errors, in the corpus's files, and on the console, also of one that skipped documents."""
    folder = tmp_path / "data"
    folder.mkdir()
    file = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl"))
    file.write_text('{"text": "good"}\n[]\n')
    with refused(r"caf\\xe9\.jsonl, line 2: not a JSON object"):
        texts("jsonl", folder)
    given = Texts("jsonl", str(folder), ByteTokenizer(), on_bad_document="skip")
    for write in (
        lambda: tokenise_corpus(tmp_path / "o", given),
        lambda: open_corpus(given, cache_dir=tmp_path / "c"),
    ):
        corpus = write()
        assert documents(corpus) == [b"good"] and r"caf\xe9.jsonl, line 2" in corpus.summary
        corpus.summary.encode()
        assert load_corpus(corpus.folder).info == corpus.info
    tokens = Texts("tokens", str(tmp_path / "o"), ByteTokenizer())
    for opened in (
        open_corpus(tokens, with_paths=True),
        open_corpus(given, cache_dir=tmp_path / "c", with_paths=True),
    ):
        assert opened.paths == (str(folder / r"caf\xe9.jsonl"),)


def test_texts_as_they_are_found(texts, tmp_path):
    """Compressed, whatever their names; with a byte order mark; in bytes that are not UTF-8."""
    contents = [
        b"\xef\xbb\xbfone\n",
        gzip.compress(b"two"),
        lzma.compress(b"three"),
        bz2.compress(b"4"),
        zstd(b"five"),
    ]
    contents += [b"BZh, six", b"\x80\x81 \xef\xbb\xbf", b"[7]"]
    for n, content in enumerate(contents):
        (tmp_path / f"{n}.txt").write_bytes(content)
    assert texts("text", tmp_path) == [b"one\n", b"two", b"three", b"4", b"five", *contents[5:]]


def test_pairs_of_escapes_are_characters(texts, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude00", "unused": "\\ud800"}\n')
    assert texts("jsonl", tmp_path) == ["\U0001f600".encode()]


def test_pipes_are_not_waited_for(texts, tmp_path):
    os.mkfifo(tmp_path / "b.txt")
    for path in (tmp_path, tmp_path / "b.txt", f"{tmp_path}/*.txt"):
        with refused(r"training\.dataset_path: \S+b\.txt is a pipe or a device; write its"):
            texts("text", path)


def test_globs_below_a_folder_with_brackets(texts, tmp_path, monkeypatch):
    folder = tmp_path / "old [1]*"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("x")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for pattern in ("data/*.txt", "~/data/[a-b].txt", f"{folder}/*/a.txt", "**/*.txt"):
        assert texts("text", pattern) == [b"x"]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_bad_documents_are_skipped_if_asked(texts, tmp_path):
    file = tmp_path / "a.jsonl"
    bad = [b"{", b'{"body": 1}', b'{"text": null}', b'{"text": "\\ud800"}', b'{"text": "\xff"}']
    file.write_bytes(b"\n".join(b'{"text": "%d"}\n%s' % (i, line) for i, line in enumerate(bad)))
    assert texts("jsonl", file, on_bad_document="skip") == [b"0", b"1", b"2", b"3", b"4"]
    for tokenizer in (ByteTokenizer(), AsciiTokenizer()):
        skipping = Texts("jsonl", str(file), tokenizer, on_bad_document="skip")
        for _ in range(2):  # tokenised, and from the cache
            line, warning = open_corpus(skipping, cache_dir=tmp_path / "cache").summary.splitlines()
            assert "5 documents, 10 tokens" in line
            assert warning.startswith(
                f"warning: 5 bad documents skipped: {file}, line 2: not JSON in UTF-8"
            )
            assert f"{file}, line 4: no field 'text'" in warning and "line 6" in warning
    for _ in range(2):  # neither does the cache hide them, nor is it lost
        with refused(r"a\.jsonl, line 2: not JSON .*training\.on_bad_document = \"skip\""):
            texts("jsonl", file)
    file.write_bytes(b"{\n{\n")
    with refused(
        r"^--path has no text in \S+a\.jsonl: bad documents: 2, the first .*a\.jsonl, line 1"
    ):
        texts("jsonl", file, on_bad_document="skip", path_key="--path")
    write_table(tmp_path / "a.parquet", {"text": ["x", None, "", "y"]})
    assert texts("parquet", tmp_path / "a.parquet", on_bad_document="skip") == [b"x", b"y"]


def test_skipped_documents_are_counted_by_reason(texts, tmp_path):
    """Each reason with the first of its documents; there is a limit to the reasons, as fields could have any name."""
    lines = ["{", '{"text": 3}', "[", '{"text": 4}', '{"text": 5}', '{"text": "good"}']
    (file := tmp_path / "a.jsonl").write_text("\n".join(lines))
    skipping = Texts("jsonl", str(file), ByteTokenizer(), on_bad_document="skip")
    _, warning = open_corpus(skipping, cache_dir=tmp_path / "cache").summary.splitlines()
    assert warning.startswith("warning: 5 bad documents skipped: ")
    assert "line 1: not JSON" in warning and "line 2: 'text' is int, not text" in warning
    assert "(3 such)" in warning and "line 4" not in warning and "line 5" not in warning


def test_several_files_and_globs(texts, tmp_path):
    """Of each kind alike."""
    for place in ("a/1", "a/2", "b"):
        (tmp_path / place).mkdir(parents=True)
        write_texts(tmp_path / place / "x.jsonl", [place])
        write_table(tmp_path / place / "x.parquet", {"text": [place]})
        write_table(tmp_path / place / "x.arrow", {"text": [place]})
    for kind in ("jsonl", "parquet", "arrow"):
        assert texts(kind, tmp_path) == [b"a/1", b"a/2", b"b"]
        assert texts(kind, f"{tmp_path}/b/x.{kind}, {tmp_path}/a/*/x.{kind}") == [
            b"a/1",
            b"a/2",
            b"b",
        ]
        assert texts(kind, f"{tmp_path}/a/*") == [b"a/1", b"a/2"]  # folders
        assert texts(kind, f"{tmp_path}/a/1,{tmp_path}/b/*.{kind}") == [b"a/1", b"b"]


# --- folders of Hugging Face's `datasets` ----------------------------------------------------------------------------


def save_dataset(folder, shards, **state):
    """What `Dataset.save_to_disk` leaves, and a cache of its `map`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards):
        write_table(folder / name, {"text": rows})
    write_table(folder / "cache-1.arrow", {"text": ["of a map"]})
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_format_type": None,
        "_split": None,
    } | state
    write_json(folder / "state.json", state)
    (folder / "dataset_info.json").write_text("{}")


def test_arrow_folders_and_files_are_read(texts, tmp_path):
    rows = [f"row {i}" for i in range(2500)]
    save_dataset(tmp_path / "saved", [rows[:2000], rows[2000:]])
    assert texts("arrow", tmp_path / "saved") == [row.encode() for row in rows]
    assert texts("arrow", tmp_path / "saved" / "data-00001-of-00002.arrow") == [
        row.encode() for row in rows[2000:]
    ]
    table = pa.table({"text": ["a", "b"]})
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as stream:
        stream.write_table(table)
    assert texts("arrow", tmp_path / "file.arrow") == [b"a", b"b"]
    state = tmp_path / "saved" / "state.json"
    names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in (1, 0)]
    write_json(state, {"_data_files": names})
    assert texts("arrow", tmp_path / "saved") == [row.encode() for row in rows[2000:] + rows[:2000]]


def test_arrow_folders_of_several_splits_are_refused(texts, tmp_path):
    save_dataset(tmp_path / "dict" / "train", [["x"]])
    save_dataset(tmp_path / "dict" / "test", [["y"]])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refused(r"dict holds the splits test, train; give one, .*dict/test"):
        texts("arrow", tmp_path / "dict")
    assert texts("arrow", tmp_path / "dict" / "train") == [b"x"]
    save_dataset(
        tmp_path / "selected", [["x"]], _indices_data_files=[{"filename": "indices.arrow"}]
    )
    with refused(r"state\.json: the dataset is a selection of rows"):
        texts("arrow", tmp_path / "selected")
    save_dataset(tmp_path / "missing", [["x"], ["y"]])
    (tmp_path / "missing" / "data-00001-of-00002.arrow").unlink()
    with refused(r"data-00001-of-00002\.arrow is missing: state\.json lists it"):
        texts("arrow", tmp_path / "missing")
    (tmp_path / "missing" / "state.json").write_text("[]")
    with refused(r"state\.json' cannot be read \(Input should be an object\); save the dataset"):
        texts("arrow", tmp_path / "missing")


def hostile_arrow(file, offsets, kind):
    """Two texts at these offsets in a buffer of 4 bytes: rows, or contents of one message each."""
    column = pa.array(["ab", "cd"])
    if kind == "messages":
        messages = pa.StructArray.from_arrays(
            [pa.array(["user"] * 2), column], names=["role", "content"]
        )
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), messages)
    write_table(file, {kind: column})
    sound, hostile = (
        np.array(numbers, dtype=np.int32).tobytes() for numbers in ([0, 2, 4], offsets)
    )
    assert file.read_bytes().count(sound) == 1
    file.write_bytes(file.read_bytes().replace(sound, hostile))


@pytest.mark.parametrize("kind", ["text", "messages"])
@pytest.mark.parametrize("offsets", [[0, 2, 1 << 20], [0, 1 << 30, 4], [0, -9, 4], [0, 5, 4]])
def test_arrow_values_outside_of_their_buffer(tmp_path, offsets, kind):
    hostile_arrow(tmp_path / "sound.arrow", [0, 2, 4], kind)
    hostile_arrow(tmp_path / "bad.arrow", offsets, kind)
    assert len(list(read_documents("arrow", tmp_path / "sound.arrow", "text", kind))) == 2
    with refused(r"bad\.arrow: not a whole arrow file: "):
        list(read_documents("arrow", tmp_path / "bad.arrow", "text", kind))


def test_a_message_that_is_not_utf8_spoils_its_row_alone(tmp_path):
    file = tmp_path / "a.arrow"
    hostile_arrow(file, [0, 2, 4], "messages")
    file.write_bytes(file.read_bytes().replace(b"abcd", b"abc\xff"))
    first, second = read_documents("arrow", file, "text", "messages")
    assert not first.problem and second.problem.startswith("not UTF-8")


def test_parquet_rows_are_documents(texts, tmp_path):
    rows = [f"row {i}" for i in range(600)]
    write_table(tmp_path / "a.parquet", {"text": rows, "n": range(600)}, row_group_size=100)
    write_table(tmp_path / "b.parquet", {"text": pa.array(["x"], pa.large_string())})
    assert texts("parquet", tmp_path) == [row.encode() for row in [*rows, "x"]]


def test_the_bar_of_rows_ends_at_their_files(texts, tmp_path, monkeypatch):
    """A row's size is a fraction of its file's, and the sum of such fractions may pass it, at which tqdm warns."""
    monkeypatch.setattr("tqdm.std.time", count().__next__)  # a row takes seconds: the bar is shown
    with warnings.catch_warnings():
        warnings.simplefilter("error", TqdmWarning)
        for rows in range(290, 310):
            file = tmp_path / f"{rows}.parquet"
            write_table(file, {"text": ["row"] * rows})
            assert len(texts("parquet", file)) == rows


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_row_that_is_not_utf8(texts, tmp_path, kind):
    buffers = [
        None,
        pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32)),
        pa.py_buffer(b"x\xff\xfey"),
    ]
    file = write_table(
        tmp_path / f"a.{kind}", {"text": pa.Array.from_buffers(pa.string(), 3, buffers)}
    )
    with refused(rf"a\.{kind}, row 2: not UTF-8 \(.*0xff"):
        texts(kind, file)
    assert texts(kind, file, on_bad_document="skip") == [b"x", b"y"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_bad_rows_and_columns_of_tables_are_refused(texts, tmp_path, kind):
    file = write_table(
        tmp_path / f"bad.{kind}", {"id": range(301), "text": ["good"] * 300 + [None]}
    )
    with refused(rf"bad\.{kind}, row 301: 'text' is NoneType, not text; training\.on_bad_doc"):
        texts(kind, file)
    with refused(rf"bad\.{kind}: no column 'body' \(it has: 'id', 'text'\)"):
        texts(kind, file, text_field="body")
    for content in (b"", b"ARROW1", b"PAR1 nothing", b"no arrow", file.read_bytes()[:900]):
        file.write_bytes(content)
        with refused(rf"bad\.{kind}: not a whole {kind} file|bad\.arrow cannot be read"):
            texts(kind, file)
    write_table(file, {"text": [1, 2]})
    with refused(rf"bad\.{kind}, row 1: 'text' is int"):
        texts(kind, file)


def test_columns_of_one_name(texts, tmp_path):
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    for kind in ("parquet", "arrow"):
        write_table(tmp_path / f"a.{kind}", table)
        with refused(rf"a\.{kind} has several columns 'text'; write it with one"):
            texts(kind, tmp_path)


def test_a_tokenised_folder_needs_its_tokenizer(texts, tmp_path):
    write_corpus(
        tmp_path / "tokens", [np.array([72, 105, 256]), np.array([33, 256])], ByteTokenizer()
    )
    assert texts("tokens", tmp_path / "tokens") == [b"Hi", b"!"]
    with refused(r"written with tokenizer 'bytes-257', but model\.tokenizer_path gives 'ascii'"):
        texts("tokens", tmp_path / "tokens", AsciiTokenizer())
    with refused(r"training\.dataset_path = .*no such folder"):
        texts("tokens", tmp_path / "nowhere")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("mine")
    with refused(r"corpus\.json is missing: .*texts is not a corpus .*is text, jsonl") as error:
        texts("tokens", tmp_path / "texts")
    assert "delete" not in str(error.value)


@pytest.mark.parametrize(
    "bad, message",
    [
        ([[1], []], "document 1 has no tokens"),
        ([[1], [2, 257]], "document 1 has tokens outside the vocabulary, 0 to 256"),
        ([[-1]], "document 0 has tokens outside"),
        ([], "no documents"),
        ([[1], [[1, 2]]], r"document 1 is int64 \[1, 2\]; give its tokens as integers \[n\]"),
        ([3], r"document 0 is int64 \[\]"),
        ([[1.5]], r"document 0 is float64 \[1\]"),
        ([[np.nan]], r"document 0 is float64 \[1\]"),
        ([[True]], r"document 0 is bool \[1\]"),
    ],
)
def test_write_bad_tokens(tmp_path, bad, message):
    with refused(message):
        write_corpus(tmp_path / "tokens", [np.array(ids) for ids in bad], ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.lock"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_fields_like_columns_that_nothing_reads(tmp_path, kind):
    """Every start names each once, with the first record that has it."""
    records = [
        {"tokens": [1, 2], "id": 7, "weights": 1.0},
        {"tokens": [3, 4], "id": 8, "weights": 1.0, "wieght": 0.5, "advantages": [1.0, 2.0]},
    ]
    if kind == "jsonl":
        file = write_lines(tmp_path / "a.jsonl", records)
    else:
        rows = [dict.fromkeys(records[1]) | record for record in records]
        file = write_table(tmp_path / f"a.{kind}", pa.Table.from_pylist(rows))
    read = {"weights": "<f4"}
    given = Texts(kind, str(file), ByteTokenizer(), dataset_format="tokens", columns=read)
    for _ in range(2):
        lines = open_corpus(given, cache_dir=tmp_path / "cache").summary.splitlines()
        (line,) = [line for line in lines if "not read" in line]
        first = "line 2" if kind == "jsonl" else "row 1"
        assert (
            "warning: fields that are not read: " in line
            and "training.dataset_columns reads" in line
        )
        assert line.count(first) == 2 and "'wieght': " in line and "'advantages': " in line
        assert "'weights'" not in line and "'id'" not in line


@pytest.mark.parametrize(
    "name", ["weights", "loss_mask", "labels", "rewards", "weigth", "old_logprobs", "is_trainable"]
)
def test_names_like_columns(tmp_path, name):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "x", "constraint": 1, name: 0}])
    corpus = open_corpus(Texts("jsonl", str(file), ByteTokenizer()), cache_dir=tmp_path / "cache")
    assert list(corpus.info["source"]["unread"]) == [name]


def test_fields_of_messages_like_weights(tmp_path):
    """Those that are read are not named."""
    nodes = [{"text": "a", "wieght": 0}, {"text": "b", "loss": False}]
    file = write_lines(tmp_path / "a.jsonl", [{"text": "x", "children": nodes}])
    given = Texts("jsonl", str(file), ByteTokenizer(), dataset_format="tree")
    corpus = open_corpus(given, cache_dir=tmp_path / "cache")
    assert list(corpus.info["source"]["unread"]) == ["wieght"]
