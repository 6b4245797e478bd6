import multiprocessing
import os
import signal
import time
from itertools import count

import numpy as np
import pytest

from tests.data.conftest import random_documents
from tests.records import read_json, write_json, write_texts
from tests.refusals import refused
from titan_linear.data import (
    ByteTokenizer,
    Texts,
    load_corpus,
    open_corpus,
    tokenise_corpus,
    verify_changed,
    verify_corpus,
    write_corpus,
)
from titan_linear.data.corpus import corpus as corpus_module
from titan_linear.data.corpus.cache import remove_cache

FORK = multiprocessing.get_context("fork")


def lines_of(path, cache, tokenizer=None, with_paths=False, **options):
    """The corpus of lines of JSON, tokenised by bytes unless said, in a cache."""
    texts = Texts("jsonl", str(path), tokenizer or ByteTokenizer(), **options)
    return open_corpus(texts, cache_dir=cache, with_paths=with_paths)


@pytest.fixture
def lines(tmp_path):
    """3000 documents: three batches of the tokenizer."""
    file = tmp_path / "lines.jsonl"
    write_texts(file, (f"line {i}" for i in range(3000)))
    return file


class SlowTokenizer(ByteTokenizer):
    """Notes who tokenises, slowly enough that processes meet; dies at the batch `die_at`."""

    def __init__(self, log, delay=0, die_at=None):
        self.log, self.delay, self.die_at, self.batches = log, delay, die_at, 0

    def encode_batch(self, texts):
        if self.batches == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches += 1
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(self.delay)
        return super().encode_batch(texts)


def _open(file, cache_dir, tokenizer, results):
    corpus = open_corpus(Texts("jsonl", str(file), tokenizer), cache_dir=cache_dir)
    verify_corpus(corpus)
    results.put((corpus.fingerprint, corpus.num_documents))


def test_processes_that_start_together_write_once(lines, tmp_path):
    log, results = tmp_path / "log", FORK.Queue()
    processes = [
        FORK.Process(
            target=_open, args=(lines, tmp_path / "cache", SlowTokenizer(log, 0.1), results)
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    assert len(set(found)) == 1 and found[0][1] == 3000
    # one process, three batches
    assert len(log.read_text().split()) == 3 and len(set(log.read_text().split())) == 1
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_killed_while_writing(lines, tmp_path):
    cache, results = tmp_path / "cache", FORK.Queue()
    process = FORK.Process(
        target=_open, args=(lines, cache, SlowTokenizer(tmp_path / "log", die_at=2), results)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # nothing that could be opened
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".tmp"]
    corpus = lines_of(lines, cache)
    verify_corpus(corpus)
    assert corpus.num_documents == 3000
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]  # the remains are gone


def test_reused_until_something_changes(lines, tmp_path):
    log = tmp_path / "log"

    def batches(path=lines, fingerprint="slow"):
        tokenizer = SlowTokenizer(log)
        tokenizer.fingerprint = fingerprint
        lines_of(path, tmp_path / "cache", tokenizer)
        return tokenizer.batches

    assert (batches(), batches()) == (3, 0)
    assert (batches(fingerprint="other"), batches(fingerprint="other")) == (3, 0)
    content = lines.read_text()
    lines.write_text(content.replace("line 7", "LINE 7"))  # the same size
    os.utime(lines, ns=(0, 1))
    assert batches() == 3


def test_the_same_texts_elsewhere(lines, tmp_path, monkeypatch):
    """Moved, copied or touched they are not tokenised again, and not even read again once that is known."""
    log, cache = tmp_path / "log", tmp_path / "cache"

    def batches(path, **options):
        tokenizer = SlowTokenizer(log)
        verify_corpus(lines_of(path, cache, tokenizer, **options))
        return tokenizer.batches

    assert batches(lines) == 3
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(lines.read_bytes())
    os.utime(lines, ns=(0, 1))
    moved = lines.rename(tmp_path / "moved.jsonl")
    assert batches(copy) == batches(moved) == 0
    with monkeypatch.context() as patch:
        patch.setattr("titan_linear.data.corpus.cache.add_file", None)
        assert batches(copy) == batches(moved) == 0
    assert sorted(path.suffix for path in cache.iterdir()) == [
        "",
        ".lock",
        ".lock",
        ".lock",
        ".same",
        ".same",
    ]
    other = tmp_path / "other.jsonl"
    other.write_text(moved.read_text().replace("line 7", "LINE 7"))
    assert batches(other) == 3
    copy.write_text(copy.read_text().replace('"text"', '"body"'))
    assert batches(copy, text_field="body") == 3
    for folder in [path for path in cache.iterdir() if path.is_dir()]:
        remove_cache(folder)
    assert (batches(moved), batches(moved)) == (3, 0)  # what its name meant is gone
    (next(path for path in cache.iterdir() if path.is_dir()) / "corpus.json").write_text("{")
    assert batches(other) == 3  # a damaged one is nobody's


def test_content_identifies_a_corpus(lines, tmp_path):
    def fingerprint(path):
        return lines_of(path, tmp_path / "cache").fingerprint

    before = fingerprint(lines)
    moved = lines.rename(tmp_path / "moved.jsonl")
    assert fingerprint(moved) == before
    text = moved.read_text().splitlines(keepends=True)
    moved.write_text("".join([text[1], text[0], *text[2:]]))
    assert fingerprint(moved) != before


def test_changed_while_read(lines, tmp_path):
    class Meddler(ByteTokenizer):
        def encode_batch(self, texts):
            os.utime(lines, ns=(0, 0))
            return super().encode_batch(texts)

    with refused("changed while they were read"):
        lines_of(lines, tmp_path / "cache", Meddler())
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_cache_is_in_xdg_cache_home(monkeypatch, lines, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus = open_corpus(Texts("jsonl", str(lines), ByteTokenizer()))
    assert corpus.folder.parent == tmp_path / "xdg" / "titan_linear"
    with refused(r"the token cache .* cannot be written .*set XDG_CACHE_HOME"):
        open_corpus(Texts("jsonl", str(lines), ByteTokenizer()), cache_dir=lines / "below a file")


def test_a_tokenizer_without_an_end_token_is_a_warning(lines, tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.eos_id, tokenizer.fingerprint = None, "no end"
    corpus = lines_of(lines, tmp_path / "cache", tokenizer)
    _, warning = corpus.summary.splitlines()
    assert (
        warning.startswith("warning: the tokenizer has no end token, so nothing")
        and "generation goes on" in warning
    )
    assert corpus.num_tokens == sum(len(f"line {i}") for i in range(3000))


# --- stopped, and gone on ---------------------------------------------------------------------------------------------


@pytest.fixture
def few_lines(tmp_path, monkeypatch):
    """30 documents: three batches; the journal is written after each document."""
    monkeypatch.setattr("titan_linear.data.corpus.tokenise.BLOCK_DOCUMENTS", 10)
    monkeypatch.setattr("titan_linear.data.corpus.writing.JOURNAL_SECONDS", 0)
    file = tmp_path / "few.jsonl"
    write_texts(file, (f"line {i}" for i in range(30)))
    return file


def test_it_goes_on_where_it_was_stopped(few_lines, tmp_path):
    lines = few_lines
    lines.write_text(
        "".join(['{"text": ""}\n[]\n', *lines.read_text().splitlines(keepends=True)[:28]])
    )
    log, options = tmp_path / "log", {"on_bad_document": "skip"}
    whole = lines_of(lines, tmp_path / "whole", SlowTokenizer(log), **options)
    cache = tmp_path / "cache"
    for stop in (Interrupted(log, KeyboardInterrupt), Interrupted(log, SystemExit)):
        with pytest.raises(BaseException) as stopping:
            lines_of(lines, cache, stop, **options)
        assert stopping.type is stop.how and len(list(cache.glob("*.tmp"))) == 1
        with (next(cache.glob("*.tmp")) / "tokens.bin").open("ab") as file:
            file.write(b"torn")
    tokenizer = SlowTokenizer(log)
    corpus = lines_of(lines, cache, tokenizer, **options)
    assert tokenizer.batches == 1  # the last of three
    assert corpus.info == whole.info and corpus.info["source"]["skipped_bad"] == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]
    assert sorted(path.name for path in corpus.folder.iterdir()) == [
        "corpus.json",
        "files.bin",
        "files.json",
        "hashes.bin",
        "offsets.bin",
        "tokens.bin",
    ]
    verify_corpus(corpus)


class Interrupted(SlowTokenizer):
    def __init__(self, log, how):
        super().__init__(log)
        self.how = how

    def encode_batch(self, texts):
        if self.batches == 1:
            raise self.how
        return super().encode_batch(texts)


@pytest.fixture
def folder(few_lines):
    """Files with 9, 0, 0 and 18 documents; others are empty or bad, and skipped."""
    lines = few_lines.read_text().splitlines(keepends=True)
    few_lines.unlink()
    for name, own in {
        "a": ["[]\n", *lines[:9]],
        "b": [],
        "c": ['{"text": ""}\n'],
        "d": [*lines[9:27], "[]\n"],
    }.items():
        (few_lines.parent / "texts").mkdir(exist_ok=True)
        (few_lines.parent / "texts" / f"{name}.jsonl").write_text("".join(own))
    return few_lines.parent / "texts"


FILES = [0, 9, 9, 9, 27]


def test_it_knows_which_file_a_document_is_from(folder, tmp_path):
    log, cache, options = tmp_path / "log", tmp_path / "cache", {"on_bad_document": "skip"}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            lines_of(folder, cache, Interrupted(log, KeyboardInterrupt), **options)
    corpus = lines_of(folder, cache, SlowTokenizer(log), **options)
    assert corpus.files.tolist() == FILES and corpus.paths is None
    verify_corpus(corpus)
    moved = folder.rename(tmp_path / "moved")
    corpus = lines_of(moved, cache, SlowTokenizer(log), **options, with_paths=True)
    assert (
        corpus.paths == tuple(str(moved / f"{name}.jsonl") for name in "abcd")
        and corpus.files.tolist() == FILES
    )

    own = tokenise_corpus(tmp_path / "own", Texts("jsonl", str(moved), ByteTokenizer(), **options))
    moved.rename(folder)
    again = open_corpus(Texts("tokens", str(own.folder), ByteTokenizer()), with_paths=True)
    assert again.files.tolist() == FILES and again.paths == corpus.paths  # of when it was written
    write_corpus(tmp_path / "tokens", random_documents([5]), ByteTokenizer())
    corpus = open_corpus(
        Texts("tokens", str(tmp_path / "tokens"), ByteTokenizer()), with_paths=True
    )
    assert corpus.files is corpus.paths is None
    (own.folder / "files.json").write_text("[]".ljust((own.folder / "files.json").stat().st_size))
    with refused(r"files.json does not fit the other files; restore it"):
        open_corpus(Texts("tokens", str(own.folder), ByteTokenizer()), with_paths=True)
    with refused(r"files.json was altered"):
        verify_corpus(load_corpus(own.folder))


@pytest.mark.parametrize("damage", ["journal", "arrays", "key", "stop", "foreign"])
def test_what_cannot_go_on_starts_anew(few_lines, tmp_path, damage):
    lines = few_lines
    lines.write_text(("[]\n" if damage == "stop" else "") + lines.read_text())
    cache, log = tmp_path / "cache", tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        lines_of(lines, cache, Interrupted(log, KeyboardInterrupt), on_bad_document="skip")
    temporary = next(cache.glob("*.tmp"))
    journal = read_json(temporary / "journal.json")
    assert journal["num_documents"] == (9 if damage == "stop" else 10)
    if damage == "journal":
        (temporary / "journal.json").write_text("{")
    elif damage == "arrays":
        os.truncate(temporary / "tokens.bin", 100)
    elif damage == "key":
        write_json(temporary / "journal.json", journal | {"key": "another"})
    elif damage == "stop":
        with refused(r"line 1: not a JSON object with a field 'text'"):
            lines_of(lines, cache, SlowTokenizer(log))
        return
    else:
        (temporary / "journal.json").unlink()
        (temporary / "thesis.txt").write_text("mine")
        with refused(r"holds 'thesis.txt'; choose another folder"):
            lines_of(lines, cache, SlowTokenizer(log))
        assert (temporary / "thesis.txt").read_text() == "mine"
        return
    tokenizer = SlowTokenizer(log)
    corpus = lines_of(lines, cache, tokenizer)
    assert tokenizer.batches == 3 and corpus.num_documents == 30
    verify_corpus(corpus)


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_tokens_have_the_smallest_type_for_the_vocabulary(tmp_path, vocab_size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    write_corpus(tmp_path / "corpus", [np.array([vocab_size - 1, 0])], tokenizer)
    tokens = load_corpus(tmp_path / "corpus").tokens
    assert tokens.dtype == dtype and tokens.tolist() == [vocab_size - 1, 0]


def test_nothing_is_overwritten(make_corpus):
    corpus = make_corpus(random_documents([5]))
    with refused("exists already"):
        write_corpus(corpus.folder, random_documents([6]), ByteTokenizer())
    verify_corpus(load_corpus(corpus.folder))


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "hashes.bin", "corpus.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "zeroed", "flipped"])
def test_damage_is_caught(make_corpus, name, damage):
    folder = make_corpus(random_documents([3000, 1, 9000, *[7] * 700])).folder
    path, data = folder / name, bytearray((folder / name).read_bytes())
    block = min(4096, len(data))
    if damage == "missing":
        path.unlink()
    else:
        if damage == "truncated":
            del data[-1:]
        elif damage == "longer":
            data += b"1"
        elif damage == "zeroed":
            data[-block:] = bytes(block)
        else:
            data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with refused(rf"{name}.*(delete its folder|restore)"):
        verify_corpus(load_corpus(folder))


def test_damage_beyond_the_first_block(make_corpus, monkeypatch):
    monkeypatch.setattr("titan_linear.data.corpus.corpus.CRC_BLOCK", 1000)
    corpus = make_corpus(random_documents([3000]))
    with (corpus.folder / "tokens.bin").open("r+b") as file:
        file.seek(4321)
        file.write(b"\x55\x55")
    with refused(r"tokens\.bin was altered: bytes 4,000 to 5,000"):
        verify_corpus(corpus)


def test_a_document_without_tokens(make_corpus, monkeypatch):
    """Offsets that another program wrote, checksums and all."""
    folder = make_corpus(random_documents([3, 4, 5])).folder
    (folder / "offsets.bin").write_bytes(np.array([0, 3, 3, 12], dtype="<i8").tobytes())
    with refused(r"offsets\.bin: document 1 has no tokens"):
        load_corpus(folder)


@pytest.mark.parametrize("dtype", ["O", "<i8", None])
def test_tokens_of_another_type(make_corpus, dtype):
    """With its checksum; "O" would have numpy take what is in the file for addresses."""
    file = make_corpus(random_documents([3])).folder / "corpus.json"
    info = read_json(file) | {"dtype": dtype}
    write_json(file, info | {"checksum": corpus_module.info_checksum(info)})
    with refused(rf"corpus\.json: dtype = {dtype!r} must be '<u2' or '<u4'"):
        load_corpus(file.parent)


@pytest.mark.parametrize(
    "columns",
    [
        {"weights": ["O", 0]},
        {"weights": ["<f8", 0]},
        {"weights": ["<f4", -1]},
        {"weights": ["<f4", 2]},
        {"weights": ["<f4", 1 << 40]},
        {"reference": ["<f4", 0]},
        {"../weights": ["<f4", 0]},
    ],
)
def test_columns_of_another_type(columns, tmp_path):
    """With their checksum; files have the sizes that corpus.json says."""
    weighted = [(np.arange(8), {"weights": np.ones(8)})]
    write_corpus(tmp_path / "c", weighted, ByteTokenizer(), columns={"weights": "<f4"})
    file = tmp_path / "c" / "corpus.json"
    info = read_json(file) | {"columns": columns}
    info["files"] |= {"column-../weights.bin": info["files"]["column-weights.bin"]}
    info["files"] |= {"column-reference.bin": {"size": 4, "crc32": [0]}}
    (tmp_path / "c" / "column-reference.bin").write_bytes(bytes(4))
    write_json(file, info | {"checksum": corpus_module.info_checksum(info)})
    with refused("column|reshape"):
        load_corpus(file.parent)


def test_damaged_cache_is_not_rebuilt_silently(lines, tmp_path):
    folder = lines_of(lines, tmp_path / "cache").folder
    (folder / "tokens.bin").write_bytes(b"")
    with refused(r"tokens\.bin has 0 bytes instead of .*delete its folder"):
        lines_of(lines, tmp_path / "cache")
    assert (folder / "corpus.json").exists()


def test_a_corpus_that_did_not_change_is_read_once(make_corpus, tmp_path, monkeypatch, capsys):
    read, whole = [], corpus_module.verify_files
    monkeypatch.setattr(
        corpus_module,
        "verify_files",
        lambda folder, files: (read.append(folder), whole(folder, files)),
    )
    one, other = (make_corpus([[n, n + 1, 256]]) for n in (1, 2))
    for corpus in (one, one, other, load_corpus(one.folder)):
        verify_changed(corpus)
    assert read == [one.folder, other.folder]
    os.utime(one.folder / "hashes.bin", (1, 1))
    verify_changed(one)
    verify_changed(one)
    assert len(read) == 3
    data = (one.folder / "tokens.bin").read_bytes()
    (one.folder / "tokens.bin").write_bytes(b"\xff" + data[1:])
    for _ in range(2):  # a damaged one is never noted as whole
        with refused(r"tokens.bin was altered"):
            verify_changed(one)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tqdm.std.time", count(0, 3).__next__)  # a block takes seconds
    for _ in range(2):  # it is whole, but that cannot be noted
        verify_changed(other)
        (warning,), progress = (text.splitlines() for text in capsys.readouterr())
        assert any(f"reading {other.folder}/tokens.bin" in line for line in progress)
        assert "cannot be written" in warning and warning.endswith(
            "; set XDG_CACHE_HOME to a folder that can"
        )
    (other.folder / "tokens.bin").write_bytes(
        b"\xff" + (other.folder / "tokens.bin").read_bytes()[1:]
    )
    with refused(r"tokens.bin was altered"):
        verify_changed(other)
