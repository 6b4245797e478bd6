"""One rank of many on one GPU or the CPU, for tools/bench_cp.py --as-rank: what its part of a step takes.

Forward and backward of a whole model on one stream, as the trainer computes them: the plan of the batch, KCP's packs
and folds, attention's blocks. What the rank receives is noise of ordinary size, since a GPU draws less power for zeros
and NaN, and its clock is then higher; its parameters are not sharded. So its work and its memory are measured, in turn
with one GPU's on as many tokens, since clocks change; the time in which messages travel is counted from their bytes,
and comes on top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from titan_linear.commands import line, table
from titan_linear.config import Config, load_config
from titan_linear.data import Batch
from titan_linear.distributed.one_process import LocalDims, LocalGroup, Shared, Work, registered, take_turns
from titan_linear.distributed.process import ignore_warnings_of_torch, own_device
from titan_linear.hooks.report import clock_and_power
from titan_linear.losses import CrossEntropy
from titan_linear.models.config import ModelConfig
from titan_linear.models.init import initialise
from titan_linear.ops.layout.levels import FARTHER, H200
from titan_linear.ops.torch import flash4
from titan_linear.planner.machine import Group, Machine, read_rates, shipped
from titan_linear.planner.memory import GIB, moments
from titan_linear.planner.memory import Batch as Planned
from titan_linear.planner.timing import Clock, passes_of, step
from titan_linear.run.build import build_model, build_sharding, mixed_precision, model_without_tokenizer
from titan_linear.step.feed import MicroBatch, StepTokens
from titan_linear.step.passes import Forward

STEPS, WARMUP = 8, 2
ALONE = ("--training.local_batch_size=1", "--training.global_batch_size=1", "--checkpoint.enable=false")
MEASURED = """\
Measured: forward + backward, in turn with those of one GPU alone, "host" to queue them, GiB held. Synthesised: what
ranks receive. Counted: messages and their ms, as if nothing hid them, at the rates of {gpu} and {network:.0f} GB/s to
other nodes of {node}, at which the rest is planned.
"""
TITLES = (
    "ranks",
    "rank",
    "plan of the batch, host ms",
    "forward + backward, ms",
    "one GPU alone",
    "planned",
    "host",
    "MHz",
    "W",
    "messages",
    "MiB received",
    "ms of messages",
    "exposed and folds planned, ms",
    "of one GPU's rate",
    "planned",
    "GiB held",
    "planned",
)
HELD = ("activations", "working", "head", "logits")  # parts of the plan's memory that a pass allocates
Medians = dict[str, float]
Exchange = tuple[str, dict[int, float]]  # its kind, and the bytes that come from each rank


def noise(message: Tensor) -> None:
    """Fill a message, of which any matrix up to 256 × 256 is a contraction: a product of many does not overflow. Bytes
    are rows of bfloat16 and float32 side by side: two of the former make one of the latter."""
    numbers = message.detach()
    (numbers.view(torch.bfloat16) if message.dtype == torch.uint8 else numbers).normal_(std=0.03)


class Alone(LocalGroup):
    """A rank without the others: it receives noise, so that only times and shapes mean something."""

    def __init__(self, rank: int, size: int, node_size: int):
        super().__init__(Shared(size, 0), rank)
        self.node_size = node_size
        self._name = "one process, alone"  # a constant of compiled graphs, which are then found in the compiler's cache
        self.received: list[Exchange] = []

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return Work(lambda: True, "", lambda: None)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Work:
        self.received.append(("send", {of: tensors[0].nbytes}))
        noise(tensors[0])
        return Work(lambda: True, "", lambda: None)

    def meet(self, kind: str, x: Tensor, out: Tensor, more: Any = None) -> Work:
        whole = x if kind == "reduce_scatter" else out
        sizes = more[0] if kind == "all_to_all" and more[0] else [len(whole) // self.size()] * self.size()
        row = whole.nbytes / max(len(whole), 1)
        self.received.append((kind, {r: n * row for r, n in enumerate(sizes) if n and r != self.rank()}))
        noise(out)
        return Work(lambda: True, "", lambda: None)


class Rank:
    """A rank's model, and a stream of one document for all ranks."""

    def __init__(self, config: Config, device: torch.device, group: Alone):
        self.config, self.device, self.group = config, device, group
        model = model_without_tokenizer(config)
        dims = LocalDims(cp=group.size(), groups={"cp": group})
        tokens = config.training.seq_len
        self.decoder = build_model(config, model, dims, device)
        initialise(self.decoder, 0)
        self.sharding = build_sharding(config, model, dims, device)
        self.precision = mixed_precision(config, self.decoder, dims)
        x = torch.randint(model.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        positions = torch.arange(tokens).unsqueeze(0)
        self.batch = Batch(x[:, :-1], x[:, 1:], cu, positions, num_streams=1, streams=(0,))

    def passes(self, micro: MicroBatch) -> None:
        tokens = self.config.training.seq_len
        loss_chunk = self.config.training.loss_chunk_size
        Forward(self.decoder, micro, StepTokens(tokens, tokens), self.precision, CrossEntropy(), loss_chunk).backward()

    def step(self) -> dict[str, float]:
        """Seconds of forward and backward, of the host to queue them, and of it to plan the batch; clock and power; the
        most bytes that the passes allocate. On a GPU a first pass puts the host ahead, as it is in training."""
        begin = time.perf_counter()
        micro = self.sharding(self.batch)
        found = {"plan": time.perf_counter() - begin}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.passes(micro)
            start.record()
        self.group.received.clear()
        begin = time.perf_counter()
        self.passes(micro)
        found |= {"host": time.perf_counter() - begin} | clock_and_power(self.device)
        if self.device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            found["held"] = torch.cuda.max_memory_allocated() - before
            found["seconds"] = start.elapsed_time(end) / 1e3
        else:
            found["seconds"] = found["host"]
        self.decoder.zero_grad(set_to_none=False)  # gradients are there before the next pass, as parameters are
        return found


def measure(config: Config, device: torch.device, alone: Rank | None, group: Alone) -> tuple[Rank, list[Medians]]:
    """This rank, and the medians of its steps and of those of `alone`, in turn."""
    ranks = [Rank(config, device, group), *([alone] if alone else [])]
    steps = [[rank.step() for rank in ranks] for _ in range(WARMUP + STEPS)][WARMUP:]
    return ranks[0], [{name: median(x[name] for x in of) for name in of[0]} for of in zip(*steps, strict=True)]


def seconds_of(received: Sequence[Exchange], rank: int, machine: Machine, gathers: Group) -> float:
    """Seconds that exchanges take if nothing hides them: a message's latency, and its bytes, those of other nodes by
    the network; `gathers` are those of all ranks."""
    moved = 0.0
    link = machine.rates.node
    node = machine.node_size
    for kind, by_sender in received:
        here = sum(n for sender, n in by_sender.items() if sender // node == rank // node)
        away = sum(by_sender.values()) - here
        if kind in ("all_gather", "reduce_scatter"):
            moved += gathers.ring + (here + away) / getattr(gathers, kind)
        else:
            moved += link.latency + FARTHER * (away > 0) + max(here / link.all_to_all, away / machine.network)
    return moved


def machine_here(gpu: str, node: int) -> Machine:
    """The planner's: nodes of the GPUs that are here if their rates are known, else of `gpu`."""
    known = {read_rates(path).gpu: path for path in shipped().values()}
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    kernel = "cudnn" if torch.cuda.is_available() and flash4.installed() else "flash4"
    return Machine(read_rates(known.get(here, shipped()[gpu])), node, H200.between_nodes, kernel)


def planned(config: Config, model: ModelConfig, machine: Machine) -> tuple[float, float, float]:
    """Seconds of a rank's forward and backward without exchanges, those of exchanges, and bytes held."""
    cp = config.parallelism.context_parallel_degree
    clock = Clock(machine, Planned.of(config, node=machine.node_size), config.compile.enable)
    exchanges = sum(p.parts["communication"] for layer in passes_of(clock, config, model) for p in layer)
    parts = step(config, model, cp, machine).parts
    own = sum(seconds for part, seconds in parts.items() if part not in ("optimizer", "communication"))
    held = max(sum(moment[part] for part in HELD) for moment in moments(config, model, cp).values())
    return own, exchanges, held


def rows(keys: Sequence[str], rank: int, ranks: Sequence[int], tokens: int, gpu: str, node: int) -> Iterator[str]:
    """The lines of the table: of one GPU alone, then of rank `rank` of each number of ranks, counted from the end if it
    is negative. tokens: of a rank; gpu: whose rates plan where those of the GPU here are not known; node: GPUs per
    node."""
    cuda = torch.cuda.is_available()
    ignore_warnings_of_torch()
    device = own_device()
    machine = machine_here(gpu, node)
    alone = None
    yield MEASURED.format(gpu=machine.rates.gpu, network=machine.network / 1e9, node=node)
    yield table(TITLES, [])
    for W in (1, *ranks):
        cut = [f"--parallelism.context_parallel_degree={W}", f"--training.seq_len={tokens * W}", *ALONE]
        config = load_config([*keys, *cut, "--training.dtype=" + ("bfloat16" if cuda else "float32")])
        R = rank % W
        with registered([group := Alone(R, W, min(node, W))]):
            ((found, (mine, *others)),) = take_turns([partial(measure, config, device, alone, group)])
        received = [exchange for exchange in found.group.received if exchange[1]]
        moved = seconds_of(received, R, machine, machine.group(W, 1))
        model = model_without_tokenizer(config)
        own, exchanges, held = planned(config, model, machine)
        if W == 1:
            alone, planned_alone = found, own
        one = others[0]["seconds"] if others else mine["seconds"]
        ms = f"{1e3 * mine['plan']:.0f}", *(f"{1e3 * s:.1f}" for s in (mine["seconds"], one, own, mine["host"]))
        clock = [f"{mine[name]:.0f}" if name in mine else "–" for name in ("sm_clock_mhz", "power_watts")]
        messages = len(received), f"{sum(sum(by.values()) for _, by in received) / 2**20:.1f}", f"{1e3 * moved:.1f}"
        exposed = f"{1e3 * exchanges:.1f} ({exchanges / (own + exchanges):.1%})"
        rates = [f"{one / (mine['seconds'] + moved):.1%}", f"{planned_alone / (own + exchanges):.1%}"]
        if not all(mixer.linear for mixer in model.mixers):  # one GPU attends to fewer tokens
            rates = ["–", "–"]
        memory = f"{mine['held'] / GIB:.2f}" if cuda else "–", f"{held / GIB:.2f}"
        yield line((W, R, *ms, *clock, *messages, exposed, *rates, *memory))
        del found
        if cuda:
            torch.cuda.empty_cache()
