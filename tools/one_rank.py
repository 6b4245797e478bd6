"""One rank of many on one GPU or the CPU, for tools/bench_cp.py --as-rank: what its part of a step takes.

Forward and backward of a whole model on one stream, as the trainer computes them: the plan of the batch, KCP's packs
and folds, attention's blocks. What the rank receives is what it sends, repeated; its parameters are not sharded. So its
work and its memory are measured; the time in which messages travel is counted from their bytes, and comes on top.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from titan_linear.commands import line, table
from titan_linear.config import Config, load_config
from titan_linear.data import Batch
from titan_linear.distributed.one_process import LocalGroup, run_one
from titan_linear.models.config import ModelConfig
from titan_linear.models.init import initialise
from titan_linear.ops.layout.levels import FARTHER, H200, Network
from titan_linear.planner.memory import GIB, moments
from titan_linear.planner.memory import Batch as Planned
from titan_linear.planner.timing import Clock, Machine, passes_of, read_rates, shipped, step
from titan_linear.run.build import build_model, build_sharding, mixed_precision, model_without_tokenizer
from titan_linear.step.feed import MicroBatch, StepTokens
from titan_linear.step.passes import Forward

STEPS, WARMUP = 10, 3
ALONE = ("--training.local_batch_size=1", "--training.global_batch_size=1", "--checkpoint.enable=false")
TITLES = (
    "ranks",
    "rank",
    "plan of the batch, host ms",
    "forward + backward, ms",
    "planned",
    "messages",
    "MiB received",
    "ms of messages",
    "exchanges and folds planned, ms",
    "of one GPU's rate",
    "planned",
    "GiB held",
    "planned",
)
HELD = ("activations", "working", "head", "logits")  # parts of the plan's memory that a pass allocates


@dataclass(frozen=True)
class OneRank:
    """The counterpart of `ParallelDims` for a rank that is alone, and whose parameters nobody shares."""

    cp: int
    cp_group: LocalGroup
    tp: int = 1
    ep: int = 1
    sharded: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True)
class Found:
    """Of one rank's forward and backward."""

    seconds: float
    host: float  # seconds that the plan of a batch takes the host
    held: float  # the most bytes allocated in a pass, besides parameters
    received: list[dict[int, float]]  # in each exchange, the bytes from each rank


def measure(config: Config, model: ModelConfig, device: torch.device, group: LocalGroup) -> Found:
    """Forward and backward of a stream of one document on this rank."""
    dims, tokens = OneRank(group.size(), group), config.training.seq_len
    decoder = build_model(config, model, dims, device)
    initialise(decoder, 0)
    sharding, precision = build_sharding(config, model, dims, device), mixed_precision(config, decoder, dims)
    x = torch.randint(model.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    cu, positions = torch.tensor([0, tokens], dtype=torch.int32), torch.arange(tokens).unsqueeze(0)
    batch = Batch(x[:, :-1], x[:, 1:], cu, positions, num_streams=1, streams=(0,))
    spans, host, cuda = [], [], device.type == "cuda"
    for _ in range(WARMUP + STEPS):
        begin = time.perf_counter()
        micro = MicroBatch(*sharding(batch), batch.streams)
        host.append(time.perf_counter() - begin)
        group.received.clear()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        Forward(decoder, micro, StepTokens(tokens, tokens), precision, config.training.loss_chunk_size).backward()
        if cuda:
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - begin)
        decoder.zero_grad(set_to_none=False)  # gradients are there before the next pass, as parameters are
    return Found(
        seconds=median(spans[WARMUP:]),
        host=min(host),
        held=torch.cuda.max_memory_allocated() - before if cuda else 0,
        received=[by_sender for by_sender in group.received if by_sender],
    )


def seconds_of(received: Sequence[dict[int, float]], rank: int, node: int, rates: Network) -> float:
    """Seconds that exchanges take: a message's latency, and its bytes, those of other nodes by the network."""
    moved = 0.0
    for by_sender in received:
        here = sum(n for sender, n in by_sender.items() if sender // node == rank // node)
        away = sum(by_sender.values()) - here
        moved += rates.latency + FARTHER * (away > 0) + max(here / rates.in_node, away / rates.between_nodes)
    return moved


def planned(config: Config, model: ModelConfig, machine: Machine) -> tuple[float, float, float]:
    """Seconds of a rank's forward and backward without exchanges, those of exchanges, and bytes held."""
    cp, clock = (
        config.parallelism.context_parallel_degree,
        Clock(machine, Planned.of(config, node=machine.node_size), config.compile.enable),
    )
    exchanges = sum(p.parts["communication"] for layer in passes_of(clock, config, model) for p in layer)
    parts = step(config, model, cp, machine).parts
    own = sum(seconds for part, seconds in parts.items() if part not in ("optimizer", "communication"))
    held = max(sum(moment[part] for part in HELD) for moment in moments(config, model, cp).values())
    return own, exchanges, held


def rows(keys: Sequence[str], rank: int, ranks: Sequence[int], tokens: int, gpu: str, node: int) -> Iterator[str]:
    """The lines of the table: of one GPU alone, then of rank `rank` of each number of ranks, counted from the end if it
    is negative. tokens: of a rank; gpu: whose rates plan; node: GPUs per node."""
    cuda = torch.cuda.is_available()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # torch's, about its own code
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    machine = Machine(read_rates(shipped()[gpu]), node, H200.between_nodes, "flash4")
    yield table(TITLES, [])
    for W in (1, *ranks):
        cut = [f"--parallelism.context_parallel_degree={W}", f"--training.seq_len={tokens * W}", *ALONE]
        config = load_config([*keys, *cut, "--training.dtype=" + ("bfloat16" if cuda else "float32")])
        model, R = model_without_tokenizer(config), rank % W
        torch.compiler.reset()  # torch compiles a function only a few times, fewer than there may be rows
        found = run_one(partial(measure, config, model, device), R, W, min(node, W))
        if cuda:
            torch.cuda.empty_cache()
        moved = seconds_of(found.received, R, node, H200)
        own, exchanges, held = planned(config, model, machine)
        if W == 1:
            alone = found.seconds, own
        yield line(
            (
                W,
                R,
                f"{1e3 * found.host:.0f}",
                f"{1e3 * found.seconds:.1f}",
                f"{1e3 * own:.1f}",
                len(found.received),
                f"{sum(sum(by.values()) for by in found.received) / 2**20:.1f}",
                f"{1e3 * moved:.1f}",
                f"{1e3 * exchanges:.1f}",
                f"{alone[0] / (found.seconds + moved):.1%}",
                f"{alone[1] / (own + exchanges):.1%}",
                f"{found.held / GIB:.2f}" if cuda else "–",
                f"{held / GIB:.2f}",
            )
        )
