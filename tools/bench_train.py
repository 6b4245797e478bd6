"""Whole training steps: how fast, how much memory, and where the time goes.

    python -m tools.bench_train --models kda/340M gdn/340M hybrid/340M --checkpointing none selective full
    python -m tools.bench_train --models kda/340M gdn/340M --checkpointing none full --fla
    torchrun --nproc-per-node 4 -m tools.bench_train --models hybrid/1.3B kda/1.3B --seq-len 131072 -- \\
        --parallelism.context_parallel_degree 4 --parallelism.context_parallel_layout zigzag
    torchrun --nproc-per-node 4 -m tools.bench_train --models hybrid/1.3B --seq-len 131072 --documents 16384 -- \\
        --parallelism.context_parallel_degree 4

A row per model and mode of checkpointing, built and stepped as the trainer does it, on random tokens. Keys after `--`
are the run's, as for run_train.sh, and hold for all rows (`--metrics.telemetry_freq 1`: the cost of a step with
telemetry). A step has one stream on each data-parallel rank, unless keys say otherwise.

    tokens/s/GPU, TFLOP/s, MFU   median of --steps steps after --warmup, of the slowest rank; FLOPs: docs/training.md
    memory                       the most that PyTorch allocated in those steps, GiB, on the rank that had most
    launches, idle               kernels and copies of one more step, under the profiler, and the share of the median
                                 step in which none of them would run. The ten that take most are below the table
    first step                   seconds, compilation included; the first row's is that of a new process. For empty
                                 caches set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to an empty folder

--fla: also FLA's own model of the same configuration, if flash-linear-attention is installed: bfloat16 autocast, fused
AdamW, fused cross-entropy; on one GPU, and for models that FLA has. On the CPU only times are measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from titan_linear.build import (
    build_dims,
    build_model,
    build_sharding,
    mixed_precision,
    model_without_tokenizer,
    sums_replicas_once,
)
from titan_linear.checkpoint import named_parameters
from titan_linear.config import Config, check_config, data_parallel_degrees, load_config, micro_steps
from titan_linear.data import IGNORE, Batch, Stream, StreamLoader
from titan_linear.distributed.feed import Feed
from titan_linear.distributed.groups import of_all_ranks, process_group, unhurried_group
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.flops import peak_tflops, training_flops
from titan_linear.gradients import Passes
from titan_linear.hf_io import find_family
from titan_linear.metrics import peak_memory_gib
from titan_linear.models.adapters import config_to_hf
from titan_linear.models.config import ModelConfig
from titan_linear.models.documents import Documents
from titan_linear.models.init import initialise
from titan_linear.optim import build_optimizer
from titan_linear.process import own_device, run_command
from titan_linear.step import StepEnd
from titan_linear.telemetry import Telemetry
from titan_linear.traces import Cost, events_of, of_trace

HEAD = (
    "model", "by", "checkpointing", "tokens", "documents", "GPUs", "tokens/s/GPU", "TFLOP/s", "MFU", "memory, GiB",
    "launches", "idle", "first step, s",
)  # fmt: skip


# --- Random tokens ---------------------------------------------------------------------------------------------------


class RandomStreams:
    """Stream i is a function of i: documents of random lengths around `mean` tokens, or one document (None)."""

    def __init__(self, seq_len: int, vocab_size: int, mean: int | None):
        self.seq_len, self.vocab_size, self.mean = seq_len, vocab_size, mean

    def __getitem__(self, i: int) -> Stream:
        draw = np.random.Generator(np.random.Philox(key=np.array([0, i], dtype=np.uint64)))
        tokens, T = draw.integers(self.vocab_size, size=self.seq_len), self.seq_len
        edges = [T]
        if self.mean is not None:
            lengths = 1 + draw.exponential(self.mean, size=2 + 8 * T // self.mean).astype(np.int64)
            edges = np.append(lengths.cumsum(), T).clip(max=T)
        cu_seqlens = np.unique([0, *edges]).astype(np.int32)
        labels = np.append(tokens[1:], IGNORE)
        labels[cu_seqlens[1:] - 1] = IGNORE
        positions = np.arange(T) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        return Stream(tokens, labels, cu_seqlens, positions)


# --- What is measured ------------------------------------------------------------------------------------------------


class Ours:
    """The model as a run trains it; `step` does what the trainer's step does."""

    name = "titan_linear"

    def __init__(self, config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device, batches: Batches):
        self.model = build_model(config, model, dims, device)
        self.precision = mixed_precision(config, self.model, dims)
        initialise(self.model, 0, named_parameters(self.model))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.telemetry, self.steps = Telemetry(config, self.model, dims, device), 0
        sharding, t = build_sharding(config, model, dims, device), config.training
        self.feed = Feed(
            batches(), sharding, micro_steps=micro_steps(config, dist.get_world_size()), copies=dims.copies,
            host=unhurried_group(), device=device,
        )  # fmt: skip
        self.passes = Passes(
            self.model, self.feed, self.precision, t.loss_chunk_size, self.telemetry.watching,
            sums_replicas_once(config, dims),
        )  # fmt: skip
        self.end = StepEnd(config, self.model, dims, self.optimizer, self.telemetry)

    def step(self) -> None:
        """A step, and the next step's first forward."""
        self.steps += 1
        self.telemetry.begin(self.steps)
        losses, _ = self.passes.run()
        reading = self.end.run(losses, self.steps)
        self.feed.prefetch()
        if not (self.telemetry.on or self.telemetry.watches(self.steps + 1)):
            self.passes.begin()
        if not all(map(math.isfinite, reading.wait()[:3])):
            raise RuntimeError("the loss or a gradient is not finite")

    def last_step(self) -> None:
        """A step after which nothing goes on: work that ends on gloo's threads once a profiler has stopped writes into
        freed memory."""
        self.step()
        self.passes.drop()
        self.feed.settle()

    def documents(self) -> tuple[int, Documents]:
        """The number of steps since the last call, and their documents."""
        fed = self.feed.take()
        return fed.steps, fed.documents


class Fla:
    """flash-linear-attention's own model of the same configuration, on the same streams."""

    name = "FLA"

    def __init__(self, config: Config, model: ModelConfig, dims: ParallelDims, device: torch.device, batches: Batches):
        import fla.models as peers

        family = find_family(model)
        fields = config_to_hf(family, model)
        for ours in ("architectures", "auto_map", "model_type", "pattern", "post_norm", "zero_centred_norm"):
            fields.pop(ours, None)
        if family.startswith("GatedDeltaNet"):
            from fla.ops.common import chunk_o

            chunk_o.TRITON_ABOVE_3_7_1 = True  # lifts its guard against wrong numbers on Hopper: times only
        options = getattr(peers, family.replace("ForCausalLM", "Config"))(**fields, fuse_cross_entropy=True)
        self.model: nn.Module = getattr(peers, family)(options).to(device).train()
        if config.activation_checkpoint.mode == "full":
            self.model.gradient_checkpointing_enable()
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay, fused=True
        )
        self.batches, self.device, self.max_norm = batches(), device, config.training.max_norm
        self.seen: list[Documents] = []

    def step(self) -> None:
        batch: Batch = next(self.batches)
        self.seen.append(Documents.of(batch.cu_seqlens.numpy()))
        packed = {"cu_seqlens": batch.cu_seqlens.to(self.device)} if len(batch.cu_seqlens) > 2 else {}
        labels = batch.labels.roll(1, 1)  # it shifts them itself
        labels[0, 0] = IGNORE
        tokens, labels = batch.tokens.to(self.device), labels.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=tokens, labels=labels, **packed).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    last_step = step

    def documents(self) -> tuple[int, Documents]:
        seen, self.seen = self.seen, []
        return len(seen), Documents(*map(sum, zip(*seen, strict=True)))


Batches = Callable[[], Iterator[Batch]]


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    model: str
    by: str
    checkpointing: str
    tokens: int  # of a stream
    documents: str
    gpus: int
    step_ms: float  # median
    tokens_per_second: float  # per GPU, as are the next two
    tflops: float
    mfu: float | None
    memory_gib: float
    launches: int | None
    idle: float | None  # share of the step
    first_step_seconds: float
    costs: list[Cost]


def measure(
    subject: Ours | Fla, model: ModelConfig, args: argparse.Namespace, device: torch.device, trace: Path | None
) -> dict[str, Any]:
    """The measured fields of `Row`, of the slowest or fullest rank; launches, costs and trace are this rank's."""
    first = _seconds(subject.step, device)
    for _ in range(args.warmup):
        subject.step()
    _synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    subject.documents()
    ends = [time.perf_counter()]
    for _ in range(args.steps):
        subject.step()
        ends.append(time.perf_counter())
    _synchronise(device)
    steps, documents = subject.documents()
    times = [end - begin for begin, end in pairwise(ends)]
    step, memory, first = _largest(median(times), peak_memory_gib(), first)
    launches, busy, costs = profiled(subject.last_step, device, trace)
    return {
        "step_ms": 1e3 * step, "tokens_per_second": documents.tokens / steps / step / dist.get_world_size(),
        "tflops": training_flops(model, documents) / steps / step / dist.get_world_size() / 1e12,
        "memory_gib": memory, "launches": launches, "idle": None if busy is None else max(1 - busy / step, 0.0),
        "first_step_seconds": first, "costs": costs,
    }  # fmt: skip


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


def profiled(
    step: Callable[[], None], device: torch.device, trace: Path | None
) -> tuple[int | None, float | None, list[Cost]]:
    """Number of launches of a step, the seconds in which one of them ran, and the ten largest costs; on a CPU only the
    costs. A GPU's trace is kept as `trace`."""
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        step()
        _synchronise(device)
    if device.type != "cuda":
        ops = sorted(profile.key_averages(), key=lambda op: -op.self_cpu_time_total)
        return None, None, [Cost(op.key, op.self_cpu_time_total / 1e3, op.count) for op in ops[:10]]
    return of_trace(events_of(profile, trace))


# --- Rows ------------------------------------------------------------------------------------------------------------


def configurations(args: argparse.Namespace, keys: list[str], ranks: int) -> list[tuple[str, Config]]:
    """(model, configuration) of each row. ValueError: keys that do not fit together."""
    rows = []
    for model in args.models:
        name, _, flavor = model.partition("/")
        for mode in args.checkpointing:
            argv = [f"--model.name={name}", f"--model.flavor={flavor or 'debug'}", f"--training.seq_len={args.seq_len}",
                    f"--activation_checkpoint.mode={mode}"]  # fmt: skip
            config = load_config([*argv, *keys])
            if not any(key.startswith("--training.global_batch_size") for key in keys):
                streams = math.prod(data_parallel_degrees(config, ranks)) * config.training.local_batch_size
                config = load_config([*argv, f"--training.global_batch_size={streams}", *keys])
            check_config(config, ranks)
            rows.append((model, config))
    return rows


def measured(args: argparse.Namespace, keys: list[str]) -> Iterator[Row]:
    """The rows, one after the other. Every rank calls this, in a process group."""
    ranks, device, dims = dist.get_world_size(), own_device(), None
    mean = None if args.documents == "one" else int(args.documents)
    for name, config in configurations(args, keys, ranks):
        model = model_without_tokenizer(config).first_layers(args.layers)
        dims = dims or build_dims(config, device)
        batches = _batches(config, model, dims, mean)
        with_fla = args.fla and _fla_has(model) and config.activation_checkpoint.mode in ("none", "full")
        peak = peak_tflops(config, device)
        for kind in (Ours, Fla) if with_fla else (Ours,):
            if config.compile.enable:
                torch.compiler.reset()  # torch compiles a function only a few times, fewer than there may be rows
            mode = config.activation_checkpoint.mode
            trace = _trace(args, name, kind.name, mode)
            found = measure(kind(config, model, dims, device, batches), model, args, device, trace)
            mfu = None if peak is None else found["tflops"] / peak
            yield Row(name, kind.name, mode, args.seq_len, args.documents, ranks, mfu=mfu, **found)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _batches(config: Config, model: ModelConfig, dims: ParallelDims, mean: int | None) -> Batches:
    t, streams = config.training, RandomStreams(config.training.seq_len, model.vocab_size, mean)
    sizes = {"global_batch_size": t.global_batch_size, "local_batch_size": t.local_batch_size}
    return lambda: iter(StreamLoader(streams, dp_rank=dims.dp_rank, dp_degree=dims.dp, **sizes))


def _trace(args: argparse.Namespace, model: str, by: str, mode: str) -> Path | None:
    """Where the first rank writes a row's trace; None: nowhere."""
    if not args.traces or dist.get_rank():
        return None
    args.traces.mkdir(parents=True, exist_ok=True)
    return args.traces / f"{model.replace('/', '_')}_{by}_{mode}_{args.seq_len}.json.gz"


def _fla_has(model: ModelConfig) -> bool:
    return find_family(model) in ("KDAForCausalLM", "GatedDeltaNetForCausalLM")


def _share(x: float | None) -> str:
    return "–" if x is None else f"{x:.1%}"


def line(row: Row) -> str:
    """A line of the table, below HEAD."""
    cells = (
        row.model, row.by, row.checkpointing, row.tokens, row.documents, row.gpus, f"{row.tokens_per_second:,.0f}",
        f"{row.tflops:.3g}", _share(row.mfu), f"{row.memory_gib:.1f}", "–" if row.launches is None else row.launches,
        _share(row.idle), f"{row.first_step_seconds:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def largest_costs(row: Row) -> str:
    title = f"{row.model}, {row.by}, checkpointing {row.checkpointing}: {row.step_ms:.1f} ms a step"
    lines = [f"{title}\n", "| ms | calls | |\n|---|---|---|"]
    lines += [f"| {cost.ms:.2f} | {cost.calls} | `{cost.name.replace('|', ' ')}` |" for cost in row.costs]
    return "\n".join(lines)


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    own, keys = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["kda/340M"], help="NAME/FLAVOR of each row (default: kda/340M)")
    parser.add_argument("--seq-len", type=int, default=32768, help="tokens per stream (default: 32768)")
    parser.add_argument("--layers", type=int, help="build only the first LAYERS of each model")
    parser.add_argument("--documents", default="one", help='"one" per stream, or the mean tokens of packed documents')
    parser.add_argument("--checkpointing", nargs="+", default=["none"], help="activation_checkpoint.mode of each row")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps after the first (default: 3)")
    parser.add_argument("--fla", action="store_true", help="also time flash-linear-attention's models")
    parser.add_argument("--out", default="", help="JSON file to write all numbers to")
    parser.add_argument("--traces", type=Path, help="folder for a trace of each row's profiled step")
    return parser.parse_args(own), keys


def check(args: argparse.Namespace, keys: list[str], ranks: int) -> None:
    """ValueError: arguments or configurations that cannot be measured."""
    if args.documents != "one" and not (args.documents.isdigit() and int(args.documents)):
        raise ValueError(f"--documents {args.documents!r} must be 'one', or the mean length of a document in tokens")
    if args.steps < 1 or args.warmup < 0:
        raise ValueError(f"--steps {args.steps} must be 1 or more, --warmup {args.warmup} 0 or more")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers {args.layers} must be 1 or more")
    if args.fla and not find_spec("fla"):
        raise ValueError("--fla needs flash-linear-attention, which is not installed here")
    if args.fla and (ranks > 1 or not torch.cuda.is_available()):
        raise ValueError("--fla times its models on one GPU; start one process, where there is a GPU")
    for _, config in configurations(args, keys, ranks):
        model_without_tokenizer(config)


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # torch's, about its own code
    args, keys = parse(argv)
    if "RANK" not in os.environ:  # without torchrun: one process
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in alone.items()})
    first = os.environ["RANK"] == "0"
    try:
        check(args, keys, int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    where, rows = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", []
    with process_group(timedelta(minutes=30)):
        if first:
            print(f"{where}, torch {torch.__version__}\n\n| {' | '.join(HEAD)} |")
            print("|---" * len(HEAD) + "|", flush=True)
        for row in measured(args, keys):
            rows.append(row)
            if first:
                print(line(row), flush=True)
    if first:
        print("\n" + "\n\n".join(map(largest_costs, rows)))
        if args.out:
            found = {"device": where, "torch": torch.__version__, "keys": keys, "rows": [asdict(row) for row in rows]}
            Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
