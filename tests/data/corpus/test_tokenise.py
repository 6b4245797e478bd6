"""Tokenising in worker processes: the same tokens in the same order, and an end whenever one is asked for."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import count

import numpy as np
import pytest

from tests.processes import children, gone, stay, until
from tests.records import write_texts
from tests.refusals import refused
from titan_linear.data import ByteTokenizer, Texts, open_corpus
from titan_linear.data.corpus import tokenise as module
from titan_linear.data.corpus.sources import Document
from titan_linear.data.corpus.tokenise import tokenise, worker_count

OTHERS = set()  # processes that tests of other files share


@pytest.fixture(autouse=True)
def notice_others():
    OTHERS.update(process.pid for process in multiprocessing.active_children())


def workers():
    return [process for process in multiprocessing.active_children() if process.pid not in OTHERS]


class Uneven(ByteTokenizer):
    """Takes longest for what comes first; refuses surrogates; dies, fails or never ends on request."""

    def encode(self, text):
        text.encode("utf-8")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "fail":
            raise ArithmeticError("no such token")
        if text == "slow":
            print(text, flush=True)
            stay()
        time.sleep(0.05 if text.startswith("0") else 0)
        return super().encode(text)


def documents(*texts):
    return [Document(text, f"document {i}", len(text)) for i, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 3)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_documents_stay_in_order(num_workers):
    texts = [f"{i % 7} text {i}" for i in range(200)]
    texts[5], texts[77] = "a\ud800", "\udcff"
    found = list(tokenise(Uneven(), documents(*texts), num_workers))
    assert [document.content for document, _ in found] == texts
    for i, (_, tokens) in enumerate(found):
        if i == 5:
            assert tokens == "not UTF-8 at character 1; repair it"
        elif i == 77:
            assert (
                tokens
                == "not UTF-8 at character 0; repair it, or train on bytes (no model.tokenizer_path)"
            )
        else:
            assert bytes(tokens.astype(np.uint8)).decode() == texts[i]
    assert list(tokenise(Uneven(), [], num_workers)) == []
    assert not workers()


@pytest.mark.parametrize("characters, blocks", [(1, 4), (12, 3), (1 << 18, 2)])
def test_blocks_end_at_documents_or_characters(monkeypatch, characters, blocks):
    """Whichever come first; a conversation counts as its record's bytes. Tokens do not depend on them."""
    sizes = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):
            sizes.append(len(texts))
            return super().encode_batch(texts)

    monkeypatch.setattr(module, "BLOCK_CHARACTERS", characters)
    texts = ["seven of", "seventy", "", "a longer document", "b"]
    found = list(tokenise(Counting(), documents(*texts), 0))
    assert [bytes(tokens.astype(np.uint8)).decode() for _, tokens in found] == texts
    assert len(sizes) == blocks
    records = [Document({"messages": []}, "", 9) for _ in range(4)]
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 100)
    assert len(list(module._blocks(records))) == {1: 4, 12: 2}.get(characters, 1)


@pytest.mark.parametrize("ahead", [1, 4])
def test_blocks_wait_for_an_earlier_one(monkeypatch, ahead):
    """However many may be finished before it, the order stays."""
    monkeypatch.setattr(module, "AHEAD", ahead)
    texts = [f"{i % 7} text {i}" for i in range(60)]
    assert [d.content for d, _ in tokenise(Uneven(), documents(*texts), 2)] == texts


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_the_tokenizer_are_raised(num_workers):
    with pytest.raises(ArithmeticError, match="no such token"):
        list(tokenise(Uneven(), documents(*"abcdefgh", "fail"), num_workers))
    assert not workers()


def test_a_killed_worker_is_an_error():
    with refused("a process that tokenises was killed, perhaps because memory ran out"):
        list(tokenise(Uneven(), documents(*"abcdefgh", "die"), 2))
    assert not workers()


def test_sources_are_read_a_little_ahead():
    taken = []

    def endless():
        for i in count():
            taken.append(i)
            yield Document(str(i), "", 1)

    found = tokenise(ByteTokenizer(), endless(), 2)
    for _ in range(30):
        next(found)
    found.close()
    assert len(taken) < 100 and not workers()


def test_as_many_workers_as_cores():
    assert worker_count(1000) == 0
    assert worker_count(1 << 30) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("dataset_format", ["text", "tokens"])
def test_a_corpus_is_the_same_by_one_process_and_by_several(tmp_path, monkeypatch, dataset_format):
    texts = [f"{i} " * (i % 300) for i in range(4000)]
    if dataset_format == "tokens":
        texts = [list(text.encode()) for text in texts if text]
    lines = [{dataset_format: text} for text in texts]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert file.stat().st_size > 1 << 20
    found = []
    for num_workers in (0, 1, 3):
        monkeypatch.setattr(
            "titan_linear.data.corpus.cache.worker_count", lambda _, n=num_workers: n
        )
        corpus = open_corpus(
            Texts("jsonl", str(file), Uneven(), dataset_format=dataset_format),
            cache_dir=tmp_path / str(num_workers),
        )
        assert dataset_format == "tokens" or "14 empty texts skipped" in corpus.summary
        found.append(
            [
                corpus.info,
                *((corpus.folder / name).read_bytes() for name in ("tokens.bin", "offsets.bin")),
            ]
        )
    assert found[0] == found[1] == found[2]


SCRIPT = """
import signal, sys
from pathlib import Path
from tests.data.corpus.test_tokenise import Uneven
from titan_linear.data import Texts, open_corpus
from titan_linear.data.corpus import cache
cache.worker_count = lambda _: 2
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, tests among them, ignore it
print("ready", flush=True)
open_corpus(Texts("jsonl", sys.argv[1], Uneven()), cache_dir=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_at_once(number, tmp_path):
    """Ctrl-C comes to the whole group, while a worker is busy; nothing that could be opened is left."""
    file = tmp_path / "slow.jsonl"
    write_texts(file, ["a"] * 2000 + ["slow"] * 2)
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(file), str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "slow\n"
    workers = children(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    process.wait()
    if number == signal.SIGINT:
        assert all(map(gone, workers))
        text = (tmp_path / "errors").read_text()
        # the script's own, which has no answer
        assert text.count("Traceback") == text.count("KeyboardInterrupt") == 1
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
        return
    # the one that has no work; the other would notice when it has done its own
    until(lambda: any(map(gone, workers)))
    for worker in workers:
        if not gone(worker):
            os.kill(worker, signal.SIGKILL)
