"""Tokenising on all cores: workers take blocks of documents, and tokens come back in order.

The tokens of a document depend on it alone, so blocks and the number of workers do not
change the result. Workers are forked: they inherit the tokenizer, however large, and import
nothing. They hold no file and end when their pipe does, whatever ended this process. They
leave Ctrl-C to this process.
"""

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from titan_linear.data.corpus.chat import SECONDS, RecordEncoder
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.data.corpus.sources import Document
from titan_linear.data.corpus.tokenizer import Tokenizer

BLOCK_CHARACTERS = 1 << 18
BLOCK_DOCUMENTS = 1024
KILLED = (
    "a process that tokenises was killed, perhaps because memory ran out; start again, with more memory or fewer cores "
    "(taskset)"
)
TOO_LATE = (
    f"model.tokenizer_path: its chat template takes more than {SECONDS:.0f} s for the text of a conversation; take one "
    "from a source that you trust"
)
# Finished blocks per worker that may wait for an earlier one.
AHEAD = 4
Block = list[Document]
# Our end of each worker's pipe → the worker.
Workers = dict[Connection, multiprocessing.Process]
Encoder = Tokenizer | RecordEncoder
# Of a text, [n] int64, or of a conversation.
Tokens = np.ndarray | DocumentTokens
# For each document: its tokens, or the reason why it has none.
Encoded = list[Tokens | str]


def worker_count(num_bytes: int) -> int:
    """Return the number of workers for this many bytes: one per core, or none.

    It is 0 for little text, or in a process that may not have children.
    """
    if num_bytes < 1 << 20 or not may_have_children():
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_have_children() -> bool:
    return not multiprocessing.current_process().daemon


def tokenise(
    encoder: Encoder, documents: Iterable[Document], num_workers: int
) -> Generator[tuple[Document, Tokens | str], None, None]:
    """Yield each document with its tokens, or with the reason why it has none.

    Texts get no end token. Close the generator if you leave it before its end.

    Raises:
        ValueError: a worker was killed.
    """
    blocks = _blocks(documents)
    if not num_workers:
        for block in blocks:
            yield from _of_all(block, _encode(encoder, _contents(block)))
        return
    workers: Workers = {}
    try:
        _start(workers, encoder, num_workers)
        for block, encoded in _in_order(list(workers), blocks):
            yield from _of_all(block, encoded)
        return
    except (EOFError, ConnectionError):
        # The signal that killed it is known once it has been joined.
        pass
    finally:
        for process in workers.values():
            process.kill()
        for process in workers.values():
            process.join()
    late = any(process.exitcode == -signal.SIGVTALRM for process in workers.values())
    raise ValueError(TOO_LATE if late else KILLED)


def _blocks(documents: Iterable[Document]) -> Iterator[Block]:
    block = []
    size = 0
    for document in documents:
        block.append(document)
        size += len(document.content) if isinstance(document.content, str) else int(document.size)
        if size >= BLOCK_CHARACTERS or len(block) == BLOCK_DOCUMENTS:
            yield block
            block = []
            size = 0
    if block:
        yield block


def _contents(block: Block) -> list[Any]:
    """Return the contents of documents without a problem."""
    return [document.content for document in block if not document.problem]


def _of_all(block: Block, encoded: Encoded) -> Iterator[tuple[Document, Tokens | str]]:
    each = iter(encoded)
    for document in block:
        yield document, document.problem or next(each)


def _encode(encoder: Encoder, contents: Sequence[Any]) -> Encoded:
    try:
        return list(encoder.encode_batch(contents))
    except ValueError as error:
        # Find the documents at fault one by one.
        if len(contents) > 1:
            return list(chain.from_iterable(_encode(encoder, [content]) for content in contents))
        if not isinstance(error, UnicodeEncodeError):
            return [str(error)]
        # A byte of a file that is not UTF-8.
        remedy = "; repair it"
        if 0xDC80 <= ord(error.object[error.start]) <= 0xDCFF:
            remedy += ", or train on bytes (no model.tokenizer_path)"
        return [f"not UTF-8 at character {error.start}{remedy}"]


def _in_order(
    workers: list[Connection], blocks: Iterator[Block]
) -> Iterator[tuple[Block, Encoded]]:
    numbered = enumerate(blocks)
    idle = workers
    # Worker → (number, block).
    at_work: dict[Any, Any] = {}
    done: dict[int, tuple[Block, Encoded]] = {}
    # The number of the block to yield next.
    following = 0
    while True:
        # Give each idle worker a block, unless too many finished blocks wait for an earlier
        # one.
        while (
            idle
            and len(done) < AHEAD * (len(idle) + len(at_work))
            and (item := next(numbered, None))
        ):
            worker = idle.pop()
            worker.send(_contents(item[1]))
            at_work[worker] = item
        if not at_work:
            return
        # Collect finished blocks, and yield them in order.
        for worker in wait(list(at_work)):
            number, block = at_work.pop(worker)
            encoded = worker.recv()
            if isinstance(encoded, Exception):
                raise encoded
            done[number] = block, encoded
            idle.append(worker)
        while following in done:
            yield done.pop(following)
            following += 1


def _start(workers: Workers, encoder: Encoder, num_workers: int) -> None:
    """Start workers and add them to `workers`.

    A Ctrl-C meanwhile is raised once all have started.
    """
    fork = multiprocessing.get_context("fork")
    # With this variable set, the library does not warn of the fork, which its threads would
    # not survive.
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    # Workers inherit the mask, and keep it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(num_workers):
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=_work, args=(encoder, theirs, [ours, *workers]), daemon=True
            )
            process.start()
            # Notice here when the worker's end closes.
            theirs.close()
            workers[ours] = process
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(encoder: Encoder, connection: Connection, inherited: list[Connection]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Notice the end of the process that forked us.
    for other in inherited:
        other.close()
    try:
        while True:
            contents = connection.recv()
            try:
                encoded: Encoded | Exception = _encode(encoder, contents)
            except Exception as error:
                # The process that asked raises whatever the tokenizer raises.
                encoded = error
            connection.send(encoded)
    except (EOFError, OSError):
        # The parent is gone.
        return
