"""titan-linear corpus: corpora written, and caches listed, checked and removed, and nothing else."""

import json
import os

import pytest

from tests.processes import elsewhere
from titan_linear.commands import corpus
from titan_linear.data import ByteTokenizer, Texts, load_corpus, open_corpus
from titan_linear.data.corpus.writing import locked


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of texts, last used 40 days ago, in the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(10)) + "[]\n"
    )
    folder = open_corpus(
        Texts("jsonl", str(tmp_path / "texts.jsonl"), ByteTokenizer(), on_bad_document="skip")
    ).folder
    lock = folder.with_name(folder.name + ".lock")
    os.utime(lock, (lock.stat().st_atime, lock.stat().st_mtime - 40 * 86400))
    return folder


def test_a_corpus_is_written_and_bad_records_are_skipped_if_asked(cache, tmp_path, capsys):
    argv = [
        "write",
        str(tmp_path / "out" / "tokens"),
        "--dataset",
        "jsonl",
        "--path",
        str(tmp_path / "*.jsonl"),
    ]
    assert corpus.main(argv) == 2
    assert "texts.jsonl, line 11: not a JSON object with a field 'text'" in capsys.readouterr().err
    assert corpus.main([*argv, "--on-bad-document", "skip"]) == 0
    assert (
        "corpus jsonl: 10 documents, 70 tokens, in " in (said := capsys.readouterr().out)
        and "1 bad doc" in said
    )
    written = open_corpus(Texts("tokens", str(tmp_path / "out" / "tokens"), ByteTokenizer()))
    assert written.fingerprint == load_corpus(cache).fingerprint
    assert corpus.main(argv) == 2
    assert "exists already; choose another folder" in capsys.readouterr().err
    assert corpus.main([*argv, "--format", "completion", "--text-field", "body"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --text-field body is not used by --format completion; "
    )
    assert corpus.main([*argv, "--dataset", "text", "--text-field", "body"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --text-field body is not used by --dataset text; "
    )
    assert corpus.main([*argv[:-1], str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --path = '{tmp_path}/nowhere'")


def test_caches_are_listed_and_nothing_else(cache, capsys):
    (cache.parent / "parquet-0123456789abcdef01234567.tmp").mkdir()
    (cache.parent / "parquet-0123456789abcdef01234567.lock").touch()
    (cache.parent / "mine").mkdir()
    assert corpus.main(["list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.startswith("2 token caches, ") and head.endswith(f" GiB, in {cache.parent}")
    assert first.startswith(cache.name) and first.endswith(
        "used 40 days ago  10 documents, 70 tokens by bytes-257"
    )
    assert second.startswith("parquet-0123456789abcdef01234567") and "unfinished" in second


def test_damaged_caches_are_found(cache, tmp_path, capsys):
    assert (
        corpus.main(["check"])
        == corpus.main(["check", cache.name])
        == corpus.main(["check", str(cache)])
        == 0
    )
    assert capsys.readouterr().out == f"{cache}: whole, 70 tokens\n" * 3
    other = cache.with_name("text-0123456789abcdef01234567")
    assert corpus.main(["check", cache.name, other.name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {other} is not there; ")
    other.with_suffix(".tmp").mkdir()
    assert (
        corpus.main(["check", other.name]) == 0
        and capsys.readouterr().out == f"{other.name}: unfinished\n"
    )
    with (cache / "tokens.bin").open("r+b") as file:
        file.write(b"\xff")
    assert corpus.main(["check"]) == 2
    assert "tokens.bin was altered" in capsys.readouterr().err
    assert corpus.main(["check", str(tmp_path)]) == 2
    assert "is not a corpus of tokens" in capsys.readouterr().err


def test_only_caches_are_removed(cache, capsys):
    mine = cache.parent / "mine-0123456789abcdef01234567"
    mine.mkdir()
    unfinished = cache.parent / "text-0123456789abcdef01234567.tmp"
    unfinished.mkdir()
    unfinished.with_suffix(".lock").touch()
    refused = (
        ["--all", "--older-than", "3"],
        [mine.name],
        ["../xdg"],
        ["--older-than", "nan"],
        ["--older-than=-1"],
        [],
    )
    for argv in (["prune", *arguments] for arguments in refused):
        assert corpus.main(argv) == 2 and capsys.readouterr().err.startswith("error: ")
    assert corpus.main(["prune", "--older-than", "41"]) == 0 and cache.exists()
    with elsewhere(lambda: locked(cache)):
        assert corpus.main(["prune", "--all"]) == 0
    assert cache.exists() and not unfinished.exists()
    assert f"in use: {cache.name}" in capsys.readouterr().out
    os.utime(cache.with_name(cache.name + ".lock"), (0, 0))
    assert corpus.main(["prune", "--older-than", "41"]) == 0
    assert not cache.exists() and mine.exists()
    assert sorted(path.suffix for path in cache.parent.iterdir()) == ["", ".lock", ".lock"]
    assert corpus.main(["list"]) == 0 and capsys.readouterr().out.splitlines()[-1].startswith(
        "0 token caches"
    )
