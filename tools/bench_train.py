"""Whole training steps: how fast, how much memory, and where the time goes.

    python -m tools.bench_train --models kda/340M gdn/340M hybrid/340M --checkpointing none selective full
    python -m tools.bench_train --models kda/340M gdn/340M --fla -- --compile.enable true
    python -m tools.bench_train --models qwen3.5/9B --layers 4 --documents 4096
    python -m tools.bench_train --models hybrid/340M --documents run -- --training.dataset stdlib
    python -m tools.bench_train --losses ce weights dpo policy sequence distillation mtp --documents 4096
    torchrun --nproc-per-node 4 -m tools.bench_train --models hybrid/1.3B kda/1.3B --seq-len 131072 -- \\
        --parallelism.context_parallel_degree 4 --parallelism.context_parallel_layout zigzag

A row per model, loss and mode of checkpointing, stepped by the trainer. Keys after `--` are the run's, as
for run_train.sh, and hold for all rows (`--metrics.telemetry_freq 1`: the cost of a step with telemetry). A step has
training.local_batch_size streams on each data-parallel rank, unless keys say otherwise. Streams are random bytes, in a
temporary folder that all ranks can read, or with `--documents run` those of the keys' corpus. Nothing is saved.
With several losses all documents have that many tokens: so they fill streams, and pairs and single ones pack alike.

    tokens/s/GPU, TFLOP/s, MFU   median of --steps steps after --warmup, of the slowest rank; FLOPs: docs/telemetry.md
    memory                       the most that PyTorch allocated in those steps, GiB, on the rank that had most
    MHz, W                       SM clock and power of the first rank's GPU, means over those steps (nvidia-ml-py)
    launches, idle               kernels and copies of one more step, under the profiler, and the share of the median
                                 step in which none of them would run
    routing                      of experts: as their router learns it, or "even": to all in turn, as no router does
    first step                   seconds, compilation included; the first row's is that of a new process. For empty
                                 caches set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to an empty folder

--fla: also FLA's own model of the same configuration, eager and compiled, with the kernels that FLA takes on this chip
(tools/peers.py), if flash-linear-attention is installed; on one GPU. If FLA refuses or runs out of memory, its reason
stands below the table's other rows. On the CPU only times are measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import date, timedelta
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.commands import command_parser, line, table
from titan_linear.config import COLUMNS as COLUMNS_READ
from titan_linear.config import Config, check_config, data_parallel_degrees, load_config
from titan_linear.data import build_tokenizer, write_corpus
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.distributed.groups import of_all_ranks, on_rank_0, process_group
from titan_linear.distributed.process import ignore_warnings_of_torch, own_device, run_command
from titan_linear.hooks import Hook, StepResult
from titan_linear.hooks.report import clock_and_power, peak_memory_gib
from titan_linear.losses import build_loss
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.mlps.moe import Router
from titan_linear.run.build import model_without_tokenizer
from titan_linear.step.feed import FeedStats
from titan_linear.step.flops import peak_tflops, training_flops
from titan_linear.step.optimizer import HostCopy
from titan_linear.train import Trainer
from tools import traces
from tools.peers import Peer, be_alone, fla_has, fla_loss, fla_model, split_keys

PACKAGES = ("torch", "triton", "flash-attn-4", "fla-core", "tilelang", "flash-qla")
FLA_MODES = ("none", "full")  # of activation checkpointing
LOSSES = {  # keys of each; its corpus has the columns that it reads
    "ce": [],
    "weights": [],
    "dpo": ["--loss.name=dpo"],
    "policy": ["--loss.name=policy"],
    "sequence": ["--loss.name=policy", "--policy.level=sequence"],
    "distillation": ["--loss.name=distillation"],
    "mtp": ["--model.mtp_layers=1"],
}
TOP = 64  # of the teacher's tokens


# --- Random tokens ---------------------------------------------------------------------------------------------------


@contextmanager
def random_corpora(args: argparse.Namespace, streams: int) -> Iterator[dict[str, list[str]]]:
    """For each loss the keys of a corpus of random bytes for so many streams, which is there inside `with`. Every rank
    calls it."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(on_rank_0(lambda: own, dist.group.WORLD))
        for loss in args.losses:
            on_rank_0(partial(write_random, folder / loss, args, streams, loss), dist.group.WORLD)
        yield {
            loss: ["--training.dataset=tokens", f"--training.dataset_path={folder / loss}"]
            for loss in args.losses
        }
        dist.barrier()


def write_random(corpus: Path, args: argparse.Namespace, streams: int, loss: str) -> None:
    draw = np.random.default_rng(0)
    tokens = streams * args.seq_len
    if args.documents == "one":
        lengths = np.full(streams, args.seq_len)
    elif len(args.losses) > 1:
        lengths = np.full(tokens // int(args.documents), int(args.documents))
    else:
        mean = int(args.documents)
        lengths = 1 + draw.exponential(mean, size=2 + 2 * tokens // mean).astype(int)
    read = build_loss(load_config(LOSSES[loss]))

    def document(n: int) -> DocumentTokens:
        # Log-probabilities; and advantages for which no policy of random bytes is clipped, which would save power.
        columns = {
            name: draw.normal(5.5 if name == "advantages" else -5.5, 0.1, n)
            for name in read.columns
        }
        if "teacher_ids" in columns:
            columns["teacher_ids"] = draw.random((n, 256)).argsort(1)[:, :TOP]
            columns["teacher_logprobs"] = np.full((n, TOP), math.log(0.9 / TOP))
        if loss == "weights":
            columns["weights"] = draw.random(n, dtype=np.float32)
        return DocumentTokens(draw.integers(256, size=n), columns)

    write_corpus(
        corpus,
        map(document, lengths),
        build_tokenizer(None),
        columns={
            name: COLUMNS_READ[name] for name in (*["weights"] * (loss == "weights"), *read.columns)
        },
        pairs=read.group == 2,
    )


# --- What is measured ------------------------------------------------------------------------------------------------


class Ours(Hook):
    """The trainer of a run."""

    name = "titan_linear"

    def __init__(self, config: Config, _: ModelConfig):
        self.trainer = Trainer(config)
        self.fed = FeedStats()
        self.trainer.hooks.append(self)

    def step(self) -> None:
        self.trainer.train_step()

    def last_step(self) -> None:
        """A step after which nothing goes on: work that ends on gloo's threads once a profiler has stopped writes into
        freed memory."""
        self.step()
        self.trainer.passes.drop()
        self.trainer.feed.settle()

    def after_step(self, done: StepResult) -> None:
        self.fed += done.fed

    def documents(self) -> tuple[int, Documents]:
        """The number of steps since the last call, and their documents."""
        fed = self.fed
        self.fed = FeedStats()
        return fed.steps, fed.documents


class Fla:
    """FLA's model on the same streams."""

    def __init__(self, config: Config, model: ModelConfig, compiled: bool):
        device = own_device()
        checkpointing = config.activation_checkpoint.mode == "full"
        self.name = "FLA, compiled" if compiled else "FLA"
        network = fla_model(model, device, compiled=compiled, checkpointing=checkpointing)
        self.peer = Peer(config, network, fla_loss, device)
        self.begun = 0  # steps when documents were last asked for
        self.reading: HostCopy | None = None  # of the last step

    def step(self) -> None:
        """A step; the host then waits for the one before, so that it is never more than a step ahead."""
        before = self.reading
        self.reading = self.peer.train_step()
        if before and not (
            math.isfinite((numbers := before.wait()).loss) and math.isfinite(numbers.grad_norm)
        ):
            raise RuntimeError("the loss or a gradient is not finite")

    last_step = step

    def documents(self) -> tuple[int, Documents]:
        steps = self.peer.step - self.begun
        self.begun = self.peer.step
        seen = self.peer.documents
        self.peer.documents = []
        return steps, Documents(*map(sum, zip(*seen, strict=True)))


Kind = Callable[[Config, ModelConfig], Ours | Fla]


# --- Measuring -------------------------------------------------------------------------------------------------------


Row = dict[str, Any]  # COLUMNS by their fields, what a CPU does not tell None; and a step's


def measure(
    subject: Ours | Fla, args: argparse.Namespace, device: torch.device
) -> tuple[Row, Documents]:
    """Fields of a row, of the slowest or fullest rank, and the mean documents of a step. Launches, clock and power
    are this rank's."""
    first = _seconds(subject.step, device)
    for _ in range(args.warmup):
        subject.step()
    _synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    subject.documents()
    ends = [time.perf_counter()]
    readings = []
    for _ in range(args.steps):
        subject.step()
        # while the device works: the next forward is queued
        readings.append(clock_and_power(device))
        ends.append(time.perf_counter())
    _synchronise(device)
    steps, documents = subject.documents()
    times = [end - begin for begin, end in pairwise(ends)]
    step, memory, first = _largest(median(times), peak_memory_gib(), first)
    launches, busy = profiled(subject.last_step, device)
    row: Row = {
        "step_ms": 1e3 * step,
        "memory_gib": memory,
        "launches": launches,
        "idle": None if busy is None else max(1 - busy / step, 0.0),
        "first_step_seconds": first,
        "sm_clock_mhz": None,
        "power_watts": None,
        **{name: mean(reading[name] for reading in readings) for name in readings[0]},
    }
    return row, Documents(*(total / steps for total in documents))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - begin


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _largest(*numbers: float) -> list[float]:
    """The largest of each number over all ranks."""
    return [max(column) for column in zip(*of_all_ranks(numbers, dist.group.WORLD), strict=True)]


def profiled(step: Callable[[], None], device: torch.device) -> tuple[int | None, float | None]:
    """Number of launches of a step, and the seconds in which one of them ran. None on a CPU."""
    if device.type != "cuda":
        return None, None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        _synchronise(device)
    ran = traces.events_of(profile)
    return len(ran), traces.busy(ran)


@contextmanager
def routing(kind: str) -> Iterator[None]:
    """Inside, "even" sends tokens to all experts in turn, whatever the router says."""
    learnt = Router.choose
    if kind == "even":
        Router.choose = in_turn
    try:
        yield
    finally:
        Router.choose = learnt


def in_turn(router: Router, scores: Tensor) -> Tensor:
    N, E = scores.shape
    k = router.config.top_k
    return torch.arange(N * k, device=scores.device).view(N, k) % E


# --- Rows ------------------------------------------------------------------------------------------------------------


def configurations(
    args: argparse.Namespace, keys: list[str], ranks: int, corpora: Mapping[str, list[str]]
) -> Iterator[tuple[str, str, Config]]:
    """(model, loss, configuration) of each row. ValueError: keys that do not fit together."""
    for model, mode, loss in product(args.models, args.checkpointing, args.losses):
        name, _, flavor = model.partition("/")
        argv = [
            f"--model.name={name}",
            f"--model.flavor={flavor or 'debug'}",
            f"--training.seq_len={args.seq_len}",
            f"--activation_checkpoint.mode={mode}",
            "--checkpoint.enable=false",
            # the last one is not done: a step always follows
            f"--training.steps={args.steps + args.warmup + 3}",
            *([f"--model.num_layers={args.layers}"] if args.layers else []),
            *LOSSES[loss],
            *corpora.get(loss, []),
        ]
        config = load_config([*argv, *keys])
        if not any(key.startswith("--training.global_batch_size") for key in keys):
            streams = (
                math.prod(data_parallel_degrees(config, ranks)) * config.training.local_batch_size
            )
            config = load_config([*argv, f"--training.global_batch_size={streams}", *keys])
        check_config(config, ranks)
        yield model, loss, config


def measured(args: argparse.Namespace, keys: list[str]) -> Iterator[Row | str]:
    """The rows, one after the other; where FLA gives none, its reason. Every rank calls this, in a process group."""
    ranks = dist.get_world_size()
    largest = max(
        config.training.global_batch_size for *_, config in configurations(args, keys, ranks, {})
    )
    of_losses = nullcontext({}) if args.documents == "run" else random_corpora(args, 4 * largest)
    with of_losses as corpora, tempfile.TemporaryDirectory() as folder:
        for name, loss, config in configurations(
            args, [*keys, f"--job.dump_folder={folder}"], ranks, corpora
        ):
            kinds = [Ours]
            if (
                args.fla
                and fla_has(model_without_tokenizer(config))
                and config.activation_checkpoint.mode in FLA_MODES
            ):
                kinds += [partial(Fla, compiled=compiled) for compiled in (False, True)]
            for kind, how in product(kinds, args.routing):
                with routing(how):
                    row = _row_or_reason(args, name, config, kind)
                yield row if isinstance(row, str) else row | {"loss": loss, "routing": how}
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


def _row_or_reason(args: argparse.Namespace, name: str, config: Config, kind: Kind) -> Row | str:
    try:
        return _row(args, name, config, kind)
    except RuntimeError as error:
        if kind is Ours:
            raise
        return f"{name}: no row of FLA: {str(error).partition(chr(10))[0]}"


def _row(args: argparse.Namespace, name: str, config: Config, kind: Kind) -> Row:
    model = model_without_tokenizer(config)
    device = own_device()
    mode = config.activation_checkpoint.mode
    # torch compiles a function only a few times, fewer than there may be rows
    torch.compiler.reset()
    subject = kind(config, model)
    measured_row, documents = measure(subject, args, device)
    gpus = dist.get_world_size()
    tflops = training_flops(model, documents) / measured_row["step_ms"] / 1e9 / gpus
    peak = peak_tflops(config, device)
    return {
        "model": name,
        "layers": model.num_layers,
        "by": subject.name,
        "checkpointing": mode,
        "tokens": args.seq_len,
        "documents": args.documents,
        "gpus": gpus,
        "in_step": documents,  # of all GPUs, means over the steps
        "tokens_per_second": documents.tokens / measured_row["step_ms"] * 1e3 / gpus,
        "tflops": tflops,
        "mfu": peak and tflops / peak,
        **measured_row,
    }


# Title, field of a row, format.
COLUMNS = (
    ("model", "model", ""),
    ("layers", "layers", ""),
    ("by", "by", ""),
    ("loss", "loss", ""),
    ("routing", "routing", ""),
    ("checkpointing", "checkpointing", ""),
    ("tokens", "tokens", ""),
    ("documents", "documents", ""),
    ("GPUs", "gpus", ""),
    ("tokens/s/GPU", "tokens_per_second", ",.0f"),
    ("TFLOP/s", "tflops", ".3g"),
    ("MFU", "mfu", ".1%"),
    ("memory, GiB", "memory_gib", ".1f"),
    ("MHz", "sm_clock_mhz", ".0f"),
    ("W", "power_watts", ".0f"),
    ("launches", "launches", ""),
    ("idle", "idle", ".1%"),
    ("first step, s", "first_step_seconds", ".1f"),
)


def cells(row: Row) -> list[str]:
    values = [(row[field], form) for _, field, form in COLUMNS]
    return ["–" if value is None else format(value, form) for value, form in values]


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    arguments, keys = split_keys(argv)
    parser = command_parser("python -m tools.bench_train", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["kda/340M"],
        help="NAME/FLAVOR of each row (default: kda/340M)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=32768, help="tokens per stream (default: 32768)"
    )
    parser.add_argument("--layers", type=int, help="cut each model to so many layers")
    parser.add_argument(
        "--documents",
        default="one",
        help='"one" per stream, the mean tokens of packed ones, or "run": the keys\'',
    )
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        default=["none"],
        help="activation_checkpoint.mode of each row",
    )
    parser.add_argument(
        "--losses", nargs="+", choices=LOSSES, default=["ce"], help="loss of each row (default: ce)"
    )
    parser.add_argument(
        "--routing", nargs="+", choices=("learnt", "even"), default=["learnt"], help="of each row"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument(
        "--warmup", type=int, default=3, help="untimed steps after the first (default: 3)"
    )
    parser.add_argument(
        "--fla", action="store_true", help="also time flash-linear-attention's models"
    )
    parser.add_argument("--out", default="", help="JSON file to write all numbers to")
    return parser.parse_args(arguments), keys


def check(args: argparse.Namespace, keys: list[str], ranks: int) -> None:
    """ValueError: arguments or configurations that cannot be measured."""
    if args.documents not in ("one", "run") and not (
        args.documents.isdigit() and int(args.documents)
    ):
        raise ValueError(
            f"--documents {args.documents!r} must be 'one', 'run', or a mean length in tokens"
        )
    if len(args.losses) > 1 and not (
        args.documents.isdigit() and args.seq_len % (2 * int(args.documents)) == 0
    ):
        raise ValueError(
            f"--losses: on the same tokens all documents are of --documents {args.documents!r} tokens, an even number "
            "in a stream; give a divisor of half of --seq-len"
        )
    if args.steps < 1 or args.warmup < 0:
        raise ValueError(
            f"--steps {args.steps} must be 1 or more, --warmup {args.warmup} 0 or more"
        )
    if args.fla and not find_spec("fla"):
        raise ValueError("--fla needs flash-linear-attention, which is not installed here")
    if args.fla and (ranks > 1 or not torch.cuda.is_available()):
        raise ValueError(
            "--fla times its models on one GPU; start one process, where there is a GPU"
        )
    for *_, config in configurations(args, keys, ranks, {}):
        model_without_tokenizer(config)  # refuses a model that does not exist


def header() -> str:
    """Where, when and with what the rows are measured."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = sorted(
        {f"{found.name} {found.version}" for found in distributions() if found.name in PACKAGES}
    )
    return ", ".join([where, str(date.today()), f"commit {commit}", *versions])


def main(argv: list[str]) -> int:
    ignore_warnings_of_torch()
    args, keys = parse(argv)
    be_alone()
    first = os.environ["RANK"] == "0"
    try:
        check(args, keys, int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    where = header()
    rows = []
    with process_group(timedelta(minutes=30)):
        if first:
            print(f"{where}\n\n{table([title for title, *_ in COLUMNS], [])}")
        for row in measured(args, keys):
            rows.append(row)
            if first:
                print(row if isinstance(row, str) else line(cells(row)))
    rows = [row for row in rows if not isinstance(row, str)]
    if first and args.out:
        fields = [field for _, field, _ in COLUMNS] + ["step_ms"]
        found = [{field: row[field] for field in fields} for row in rows]
        text = json.dumps({"measured": where, "keys": keys, "rows": found}, indent=1)
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
