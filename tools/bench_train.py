"""Whole training steps: how fast, how much memory, and where the time goes.

    python -m tools.bench_train --models kda/340M gdn/340M hybrid/340M --checkpointing none selective full
    python -m tools.bench_train --models kda/340M gdn/340M -- --compile.enable true
    python -m tools.bench_train --models qwen3.5/9B --documents 4096 -- --model.num_layers 4
    python -m tools.bench_train --models hybrid/340M --documents run -- --training.dataset stdlib
    torchrun --nproc-per-node 4 -m tools.bench_train --models hybrid/1.3B kda/1.3B --seq-len 131072 -- \\
        --parallelism.context_parallel_degree 4 --parallelism.context_parallel_layout zigzag

A row per model and mode of checkpointing, stepped by the trainer. Keys after `--` are the run's, as
for run_train.sh, and hold for all rows (`--metrics.telemetry_freq 1`: the cost of a step with telemetry). A step has
training.local_batch_size streams on each data-parallel rank, unless keys say otherwise. Streams are random bytes, in a
temporary folder that all ranks can read, or with `--documents run` of the keys' corpus. Nothing is saved.

    tokens_per_second, tflops    of a GPU: median of --steps steps after --warmup, of the slowest rank; FLOPs and mfu:
                                 docs/telemetry.md
    memory_gib                   the most that PyTorch allocated in those steps, on the rank that had most
    sm_clock_mhz, power_watts    of the first rank's GPU, means over those steps (nvidia-ml-py)
    first_step_seconds           compilation included; the first row's belongs to a new process. For empty
                                 caches set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to an empty folder

tools/reference_run.py trains FLA's own models on a run's streams, and reports each step's speed.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
import torch.distributed as dist

from titan_linear.commands import command_parser
from titan_linear.config import Config, check_config, load_config
from titan_linear.data import build_tokenizer, write_corpus
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.distributed.groups import on_rank_0, process_group
from titan_linear.distributed.process import (
    ignore_warnings_of_torch,
    own_device,
    refusing,
    run_command,
)
from titan_linear.hooks import Hook, StepResult
from titan_linear.hooks.report import clock_and_power, peak_memory_gib
from titan_linear.models.config import Documents
from titan_linear.run.origin import Origin
from titan_linear.step.feed import FeedStats
from titan_linear.step.flops import peak_tflops, training_flops
from titan_linear.train import Trainer
from tools.harness import Row, Table, be_alone, largest, split_keys, synchronise

# fields of a row → format; a CPU does not tell all
COLUMNS = {
    **dict.fromkeys(("model", "layers", "checkpointing"), ""),
    **dict.fromkeys(("tokens", "documents", "gpus"), ""),
    "tokens_per_second": ",.0f",
    "tflops": ".3g",
    "mfu": ".1%",
    "memory_gib": ".1f",
    "sm_clock_mhz": ".0f",
    "power_watts": ".0f",
    "first_step_seconds": ".1f",
}


# --- Random tokens ---------------------------------------------------------------------------------------------------


@contextmanager
def random_corpus(args: argparse.Namespace, streams: int) -> Iterator[list[str]]:
    """The keys of a corpus of random bytes for so many streams, which is there inside `with`. Every rank calls it."""
    with tempfile.TemporaryDirectory() as own:
        corpus = Path(on_rank_0(lambda: own, dist.group.WORLD)) / "corpus"
        on_rank_0(partial(write_random, corpus, args, streams), dist.group.WORLD)
        yield ["--training.dataset=tokens", f"--training.dataset_path={corpus}"]
        dist.barrier()


def write_random(corpus: Path, args: argparse.Namespace, streams: int) -> None:
    draw = np.random.default_rng(0)
    lengths = np.full(streams, args.seq_len)
    if args.documents != "one":
        mean = int(args.documents)
        count = 2 + 2 * streams * args.seq_len // mean
        lengths = 1 + draw.exponential(mean, size=count).astype(int)
    documents = (DocumentTokens(draw.integers(256, size=n), {}) for n in lengths)
    write_corpus(corpus, documents, build_tokenizer(None))


# --- Measuring -------------------------------------------------------------------------------------------------------


class Fed(Hook):
    """Counts the documents of steps."""

    def __init__(self) -> None:
        self.stats = FeedStats()

    def after_step(self, done: StepResult) -> None:
        self.stats += done.fed


def measure(
    trainer: Trainer, args: argparse.Namespace, device: torch.device
) -> tuple[Row, Documents]:
    """Fields of a row, of the slowest or fullest rank, and the mean documents of a step. Clock and power are this
    rank's."""
    step = trainer.train_step
    # The first step compiles; the others warm up.
    begin = time.perf_counter()
    step()
    synchronise()
    first = time.perf_counter() - begin
    for _ in range(args.warmup):
        step()
    synchronise()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fed = Fed()
    trainer.hooks.append(fed)
    times = []
    readings = []
    begin = time.perf_counter()
    for _ in range(args.steps):
        step()
        # while the device works: the next forward is queued
        readings.append(clock_and_power(device))
        end = time.perf_counter()
        times.append(end - begin)
        begin = end
    synchronise()
    # Of all ranks, the slowest and the fullest.
    slowest, memory, first = largest(median(times), peak_memory_gib(), first)
    row: Row = {"step_ms": 1e3 * slowest, "memory_gib": memory, "first_step_seconds": first}
    for name in readings[0]:
        row[name] = mean(reading[name] for reading in readings)
    return row, Documents(*(total / args.steps for total in fed.stats.documents))


# --- Rows ------------------------------------------------------------------------------------------------------------


def configurations(
    args: argparse.Namespace,
    keys: list[str],
    ranks: int,
    corpus: Sequence[str] = (),
) -> Iterator[tuple[str, Config]]:
    """(model, configuration) of each row. ValueError: keys that do not fit together."""
    for model, mode in product(args.models, args.checkpointing):
        name, _, flavor = model.partition("/")
        argv = [
            f"--model.name={name}",
            f"--model.flavor={flavor or 'debug'}",
            f"--training.seq_len={args.seq_len}",
            f"--activation_checkpoint.mode={mode}",
            "--checkpoint.enable=false",
            # the last one is not done: a step always follows
            f"--training.steps={args.steps + args.warmup + 2}",
            *corpus,
        ]
        config = load_config([*argv, *keys])
        if not any(key.startswith("--training.global_batch_size") for key in keys):
            degrees = config.parallelism.data_parallel_degrees(ranks)
            streams = math.prod(degrees) * config.training.local_batch_size
            config = config.changed({"training.global_batch_size": streams})
        check_config(config, ranks)
        yield model, config


def measured(args: argparse.Namespace, keys: list[str]) -> Iterator[Row]:
    """The rows, one after the other. Every rank calls this, in a process group."""
    # A corpus of enough streams for the largest batch.
    ranks = dist.get_world_size()
    every = configurations(args, keys, ranks)
    streams = 4 * max(config.training.global_batch_size for _, config in every)
    random = nullcontext(()) if args.documents == "run" else random_corpus(args, streams)
    with random as corpus, tempfile.TemporaryDirectory() as folder:
        keys = [*keys, f"--job.dump_folder={folder}"]
        for name, config in configurations(args, keys, ranks, corpus):
            yield _row(args, name, config)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _row(args: argparse.Namespace, name: str, config: Config) -> Row:
    model = Origin.of(config).definition
    device = own_device()
    # torch compiles a function only a few times, fewer than there may be rows
    torch.compiler.reset()
    figures, documents = measure(Trainer(config), args, device)
    gpus = dist.get_world_size()
    gpu_seconds = figures["step_ms"] / 1e3 * gpus
    tflops = training_flops(model, documents) / gpu_seconds / 1e12
    compute = config.training.mixed_precision_param
    peak = peak_tflops(config.metrics.peak_tflops, compute, device)
    return {
        "model": name,
        "layers": model.num_layers,
        "checkpointing": config.activation_checkpoint.mode,
        "tokens": args.seq_len,
        "documents": args.documents,
        "gpus": gpus,
        "in_step": documents,  # of all GPUs, means over the steps
        "tokens_per_second": documents.tokens / gpu_seconds,
        "tflops": tflops,
        "mfu": peak and tflops / peak,
        **figures,
    }


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    arguments, keys = split_keys(argv)
    parser = command_parser("python -m tools.bench_train", __doc__)
    option = parser.add_argument
    option("--models", nargs="+", default=["kda/340M"], help="NAME/FLAVOR of each row (kda/340M)")
    option("--seq-len", type=int, default=32768, help="tokens per stream (default: 32768)")
    option("--documents", default="one", help='(above; or "run": the keys\')')
    option("--checkpointing", nargs="+", default=["none"], help="activation_checkpoint.mode")
    option("--steps", type=int, default=10, help="timed steps (default: 10)")
    option("--warmup", type=int, default=3, help="untimed steps after the first (default: 3)")
    option("--out", default="", help="JSON file to write all numbers to")
    return parser.parse_args(arguments), keys


def check(args: argparse.Namespace, keys: list[str], ranks: int) -> None:
    """ValueError: arguments or configurations that cannot be measured."""
    # Documents.
    length = int(args.documents) if args.documents.isdigit() else 0
    if args.documents not in ("one", "run") and not length:
        raise ValueError(
            f"--documents {args.documents!r} must be 'one', 'run', or a mean length in tokens"
        )
    if args.steps < 1 or args.warmup < 0:
        raise ValueError(
            f"--steps {args.steps} must be 1 or more, --warmup {args.warmup} 0 or more"
        )
    for _, config in configurations(args, keys, ranks):
        _ = Origin.of(config).definition  # refuses a model that does not exist


@refusing
def main(argv: list[str]) -> int:
    ignore_warnings_of_torch()
    args, keys = parse(argv)
    be_alone()
    check(args, keys, int(os.environ["WORLD_SIZE"]))
    with process_group(timedelta(minutes=30)):
        table = Table(COLUMNS)
        for row in measured(args, keys):
            table.add(row)
    if args.out:
        table.write(args.out, keys=keys)
    return 0


if __name__ == "__main__":
    run_command(main)
