"""How long a start takes on a corpus of any size, how much memory it needs, and how long a stream takes; and loaders.

python -m tools.bench_data start                                     # 10⁹ documents, 10¹³ tokens, simulated
python -m tools.bench_data start --documents 100000000 --seq-len 131072 --processes 8
python -m tools.bench_data loaders                                   # the trainer's loader beside others, on real text

start: offsets, hashes and tokens are computed when they are read, from a repeating pattern: no disk takes part. Timed
is what trainers do: the sums of the split, once per machine (kept beside the token caches); then, in all processes at
once, the start (mapping the sums, and the order of an epoch) and streams at random places. Memory is what each process
has alone and its share of what they have in common (PSS), less what it had before.

loaders: batches of one stream, packed from Python's standard library as bytes, by the trainer's `StreamLoader` (threads
of torchdata.nodes), torch's DataLoader and torchdata's StatefulDataLoader (processes). Printed are the time until the
first batch; batches per second when they are asked for at once; and how long the trainer waits for one when a step
takes 50 ms.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_linear.data import Batch, Corpus, PackedStreams, StreamLoader, build_tokenizer, open_corpus, split_corpus
from titan_linear.data.streams.loader import micro_batch
from titan_linear.distributed.process import run_command

MEAN = 10_000  # tokens per document
PERIOD = 1 << 16  # documents after which the pattern repeats


class Simulated:
    """An array whose elements are computed when they are read."""

    base = None

    def __init__(self, length: int, value: Any):
        self.length, self.value = length, value

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: Any) -> np.ndarray:
        index = np.arange(*where.indices(self.length)) if isinstance(where, slice) else np.asarray(where)
        return self.value(index)


def simulated_corpus(num_documents: int) -> Corpus:
    """Documents of 1 to 2 · MEAN tokens, MEAN on average."""
    rng = np.random.default_rng(0)
    half = rng.integers(1, MEAN, PERIOD // 2)
    inside = np.concatenate([[0], np.cumsum(np.concatenate([half, 2 * MEAN - half]))])[:-1]  # [PERIOD]
    hashes = rng.integers(2**64, size=PERIOD, dtype=np.uint64)

    def offset(index: np.ndarray) -> np.ndarray:
        return (index >> 16) * (PERIOD * MEAN) + inside[index & PERIOD - 1]

    def token(index: np.ndarray) -> np.ndarray:
        return (index % 257).astype(np.uint16)

    return Corpus(
        folder=Path("simulated"),
        tokens=Simulated(num_documents * MEAN, token),
        offsets=Simulated(num_documents + 1, offset),
        hashes=Simulated(num_documents, lambda index: hashes[index & PERIOD - 1]),
        info={"fingerprint": f"simulated-{num_documents}"},
    )


def own_memory() -> float:
    """MB that this process has alone, and its share of what it shares with others."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def measure(args: argparse.Namespace, start: Any, results: Any) -> None:
    """In one process: put the seconds of its start and of each stream, and its MB, into `results`."""
    corpus, rng = simulated_corpus(args.documents), np.random.default_rng(0)
    before = own_memory()
    start.wait()
    began, own = time.perf_counter(), time.process_time()
    train, validation = (split_corpus(corpus, args.holdout, split) for split in ("train", "validation"))
    streams = PackedStreams(train, seq_len=args.seq_len, seed=0)
    held_out = PackedStreams(validation, seq_len=args.seq_len, seed=0, repeat=False)
    streams[0], held_out[0]
    started = time.perf_counter() - began, time.process_time() - own
    seconds = [timed(streams, int(i)) for i in rng.integers(streams.num_tokens // args.seq_len, size=200)]
    seconds += [timed(held_out, int(i)) for i in rng.integers(len(held_out), size=50)]
    start.wait()  # memory is measured while all processes still hold what they hold
    memory = own_memory() - before
    start.wait()
    results.put((started, seconds, memory))


def timed(streams: PackedStreams, i: int) -> tuple[float, float]:
    """Elapsed seconds of a stream, and the processor's."""
    began, own = time.perf_counter(), time.thread_time()
    streams[i]
    return time.perf_counter() - began, time.thread_time() - own


def start_processes(args: argparse.Namespace) -> None:
    began, own = time.perf_counter(), time.process_time()
    split_corpus(simulated_corpus(args.documents), args.holdout, "train")
    seconds, own = time.perf_counter() - began, time.process_time() - own
    print(
        f"sums of {args.documents:,} documents, {args.documents * MEAN:,} tokens: {seconds:.1f} s, {own:.1f} s of "
        "processors, most of it for the simulation"
    )
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(args.processes), context.Queue()
    processes = [context.Process(target=measure, args=(args, start, results)) for _ in range(args.processes)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    seconds, owns = (sorted(s) for s in zip(*(pair for _, pairs, _ in found for pair in pairs), strict=True))
    started, its_own = (max(times) for times in zip(*(times for times, *_ in found), strict=True))
    print(f"{args.processes} processes start in {started:.2f} s, each in at most {its_own:.2f} s of a processor")
    print(
        f"a stream of {args.seq_len:,} tokens at a random place: median {statistics.median(seconds) * 1e3:.1f} ms, "
        f"99% {seconds[int(0.99 * len(seconds))] * 1e3:.1f} ms, longest {seconds[-1] * 1e3:.1f} ms, of which the "
        f"processor at most {owns[-1] * 1e3:.1f} ms"
    )
    print(f"memory of all together: {sum(memory for *_, memory in found):,.0f} MB")


# --- Loaders ---------------------------------------------------------------------------------------------------------


class Batches(Dataset):
    """Batch n has stream n."""

    def __init__(self, streams: PackedStreams):
        self.streams = streams

    def __getitem__(self, n: int) -> Batch:
        return micro_batch(self.streams, n, local_batch_size=1, dp_rank=0, dp_degree=1)


def batches_of(loader: type, streams: PackedStreams, num_workers: int) -> Iterator[Batch]:
    if loader is StreamLoader:
        one = {"global_batch_size": 1, "local_batch_size": 1, "dp_rank": 0, "dp_degree": 1}
        return iter(StreamLoader(streams, **one, num_workers=num_workers))
    return iter(loader(Batches(streams), batch_size=None, sampler=range(10**9), num_workers=num_workers))


def compare_loaders(seq_len: int, step: float = 0.05) -> None:
    side = split_corpus(open_corpus("stdlib", None, build_tokenizer(None), show_progress=True), 0.01, "train")
    for loader, num_workers in itertools.product((StreamLoader, DataLoader, StatefulDataLoader), (0, 1, 2, 4)):
        began = time.perf_counter()
        batches = batches_of(loader, PackedStreams(side, seq_len=seq_len, seed=0), num_workers)
        next(batches)
        first = time.perf_counter() - began

        count = 200 * 32768 // seq_len + 2 * num_workers
        began = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        per_second = count / (time.perf_counter() - began)

        waits = []
        for _ in range(40):
            time.sleep(step)
            began = time.perf_counter()
            next(batches)
            waits.append(1e3 * (time.perf_counter() - began))
        print(
            f"{seq_len:7,} tokens  {loader.__name__:18} {num_workers} workers: first {first * 1e3:5.0f} ms, "
            f"{per_second:6,.0f} per second, waits: median {statistics.median(waits):.2f} ms, longest {max(waits):.2f}",
            flush=True,
        )


# --- The command -----------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.what == "loaders":
        for seq_len in args.seq_len:
            compare_loaders(seq_len)
    else:
        start_processes(args)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    start = what.add_parser("start")
    start.add_argument("--documents", type=int, default=10**9)
    start.add_argument("--seq-len", type=int, default=32768)
    start.add_argument("--holdout", type=float, default=0.01)
    start.add_argument("--processes", type=int, default=8)
    loaders = what.add_parser("loaders")
    loaders.add_argument("--seq-len", type=int, nargs="+", default=[32768, 131072])
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
