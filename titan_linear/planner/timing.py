"""Plan the time of a training step: the work of its layers (counting.py), at rates measured on a GPU (machine.py).

The plan is seconds by part, of the busiest rank:

    products       matrix products, at a rate by the smallest of their three sizes; in bfloat16 never faster than their
                   bytes
    attention      the pairs that the mask leaves, at a rate by kernel and head dim
    recurrence     each of its operators: a time per token and head, and per token of the longest entry, which one head
                   scans alone; the convolution, per token and channel
    elementwise    bytes read and written, by single operations or as compiled
    head           its products, the loss's reads and writes of logits
    optimizer      bytes of parameters, gradients and moments; copies in the compute dtype. With offload the host does
                   this, and accumulates gradients
    communication  only what is exposed: exchanges inside layers, which wait; of FSDP's exchanges, and of copies from
                   and to the host, what takes longer than the layers that hide it. On one GPU FSDP waits for what
                   comes from the host. In all micro-steps but the first, the host waits for what comes to it
    launches       gaps between kernels; or the time by which the host is slower than the GPU

Not modelled: kernels that slow down beside a collective, other jobs, input, checkpoints, validation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_linear.config import (
    Config,
    fsdp_degrees,
    layer_checkpointing,
    micro_steps,
    replicas_wait,
)
from titan_linear.losses import build_loss
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.ops.cross_entropy import tokens_at_once
from titan_linear.ops.exchange.kcp import sizes_of
from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.levels import Network, direct_messages, duration, messages, route
from titan_linear.ops.layout.segments import PROGRAMS
from titan_linear.ops.runtime.costs import (
    Attention,
    Convolution,
    Exchange,
    Gathered,
    Grouped,
    Incoming,
    Product,
    Recurrence,
    Ring,
    Segments,
)
from titan_linear.planner.counting import Call, Layer, Work
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import (
    Batch,
    Mean,
    Units,
    context,
    documents_of,
    hidden_shapes,
    layers,
    units,
)
from titan_linear.step.flops import training_flops

PARTS = (
    "products",
    "attention",
    "recurrence",
    "elementwise",
    "head",
    "optimizer",
    "communication",
    "launches",
)
DIM = 128  # K and V at which the delta rule's rates are measured
SLICE = 64  # columns
# products in bfloat16 that take as long as one in float32, which tensor cores do not compute
WIDE = 15
LAUNCHES = 4  # per operator, on average
# seconds of the host for a matrix that torch's Muon takes: 288 of KDA 340M, an H200, 2026-11-26
ORTHOGONAL = 0.38e-3
SLICES = 4  # number of slices in which keys travel around the ring: the first one is waited for


def share_of(K: int, V: int) -> float:
    """What a recurrence's token and head of these dims take, of the time at K = V = DIM. Kernels compute the state by
    whole slices of columns, each from all of q and k."""
    return -(-V // SLICE) * _slice(K) / (DIM // SLICE * _slice(DIM))


def _slice(K: int) -> int:
    return K * SLICE + CHUNK * (K + SLICE)


# --- A pass through a layer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Seconds by part, and the number of kernel launches."""

    parts: dict[str, float]
    launches: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Clock:
    """Times the layers of one micro-step on a rank."""

    def __init__(self, machine: Machine, batch: Batch, compiled: bool):
        self.machine = machine
        self.rates = machine.rates
        self.batch = batch
        self.compiled = compiled
        self.cp = machine.group(batch.cp, batch.tp)
        self.tp = machine.group(batch.tp, 1)
        described = context(batch)
        self.gathered = described.gathered
        self.longest = int(described.tables.boundaries.longest)  # entry's length

    def of(self, work: Work, calls: Sequence[Call]) -> Pass:
        """The time of this work. calls: those of `work` that run."""
        parts = dict.fromkeys(PARTS, 0.0)
        times = work.products + Counter(
            {size: (WIDE - 1) * n for size, n in work.wide_products.items()}
        )
        parts["products"] = sum(self.rates.product(size) * n for size, n in times.items())
        if self.compiled:
            parts["elementwise"] = work.fused / self.rates.fused
        else:
            parts["elementwise"] = work.elementwise / self.rates.elementwise
        segments = next((call.cost.number for call in calls if isinstance(call.cost, Segments)), 0)
        for call in calls:
            for part, seconds in self._parts(call, segments):
                parts[part] += seconds
        operations = work.groups if self.compiled else work.operations
        return Pass(parts, work.multiplications + operations + LAUNCHES * len(calls))

    def _parts(self, call: Call, segments: int) -> Iterator[tuple[str, float]]:
        """Parts of a step, and the seconds that the call adds to each."""
        cost = call.cost
        match cost:
            case Attention():
                seconds = self._attention(cost)
                yield "attention", seconds
                yield "communication", self._keys_exposed(cost.keys, seconds, cost.backward)
            case Convolution():
                yield "recurrence", self.rates.operators[call.name][0] * cost.elements * 1e-9
            case Recurrence() if call.name in self.rates.operators:
                yield "recurrence", self._recurrence(call.name, cost, segments)
            case Product():
                yield "products", self.rates.float8_product(cost)
            case Grouped(m, n, k, inside):
                yield "products", self.rates.product((m, n, k), grouped=True)
                yield "elementwise", inside / self.rates.fused
            case Exchange():
                yield "communication", self._exchange(cost)
            case Incoming():
                yield "communication", self._incoming(cost)
            case _:  # also tables and folds, which are small, and what was not measured
                inputs = [x for x in tree_leaves(call.arguments) if isinstance(x, Tensor)]
                yield (
                    "elementwise",
                    sum(x.nbytes for x in (*inputs, *call.outputs)) / self.rates.fused,
                )

    def _attention(self, cost: Attention) -> float:
        pairs_of_ranks = self.gathered.pairs.tolist()
        match cost.keys:
            case None:
                pairs = sum(pairs_of_ranks)  # all tokens, but fewer heads
            case Gathered():
                pairs = max(pairs_of_ranks)  # the others wait for it
            case Ring(stride=stride):
                # of the ranks that are one on it
                pairs = sum(pairs_of_ranks[self.batch.cp - stride :])
        flops = 2 * (cost.D + cost.Dv) * cost.heads * pairs
        forward, both = self.machine.attention_rates(cost.D, cost.Dv, self.batch.mean is None)
        seconds = flops / forward / 1e12
        return 3.5 * flops / both / 1e12 - seconds if cost.backward else seconds

    def _keys_exposed(self, keys: Ring | Gathered | None, compute: float, backward: bool) -> float:
        """Exposed seconds of keys, values and, in backward, their gradients, which travel beside the blocks."""
        match keys:
            case None:
                return 0.0
            case Gathered(nbytes, share, slices):  # in backward also a reduce-scatter
                seconds = (
                    slices * (1 + backward) * self.cp.ring + nbytes * share / self.cp.all_gather
                )
            case Ring(nbytes, stride):
                slices = SLICES
                hops = self.batch.cp // stride - 1
                seconds = hops * (self.cp.message + nbytes / self.cp.neighbour)
        return max(seconds - compute, seconds / slices)

    def _recurrence(self, name: str, cost: Recurrence, segments: int) -> float:
        """Seconds for all heads, plus the time by which one head's scan outlasts what the GPU needs for all of them."""
        operators = self.rates.operators
        each, of_chain = (
            operators.get(f"{name} any", operators[name]) if cost.any_gate else operators[name]
        )
        tokens, heads, K, V, _ = cost
        chain = tokens / segments if segments else self.longest
        alone = max(chain - tokens * heads * V / 64 / PROGRAMS, 0.0)
        return (each * tokens * heads * share_of(K, V) + of_chain * alone * K / DIM) * 1e-9

    def _exchange(self, cost: Exchange) -> float:
        cp = self.cp
        tp = self.tp
        nbytes = cost.nbytes
        others_of_tp = (self.batch.tp - 1) / self.batch.tp
        match cost.kind:
            case "halo":
                return cp.message
            case "heads":
                group = self.machine.group(cost.ranks, self.batch.tp)
                return group.message + nbytes * (cost.ranks - 1) / cost.ranks / group.all_to_all
            case "gather":
                return tp.ring + nbytes * (self.batch.tp - 1) / tp.all_gather
            case "scatter":
                return tp.ring + nbytes * others_of_tp / tp.reduce_scatter
            case "sum":
                return 2 * tp.ring + nbytes * others_of_tp * (
                    1 / tp.all_gather + 1 / tp.reduce_scatter
                )

    def _incoming(self, cost: Incoming) -> float:
        """Seconds to bring the states that enter a rank's fragments there, and to fold them."""
        most = int(Chains(*cost.tables).most)
        W = self.batch.cp
        sizes = sizes_of(cost.S_ext, cost.M)
        node = math.gcd(W, max(self.machine.node_size // self.batch.tp, 1))
        levels = route(most, W, node, sizes)
        exchange = (
            messages(levels, node, sizes) if levels else direct_messages(most, W, node, sizes)
        )
        return duration(
            exchange,
            Network(self.rates.node.latency, self.rates.node.all_to_all, self.machine.network),
        )


# --- A step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A planned step."""

    parts: dict[str, float]  # seconds
    tokens: int
    flops: int
    gpus: int
    peak_tflops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.gpus / self.peak_tflops / 1e12


def step(
    config: Config, model: ModelConfig, gpus: int, machine: Machine, mean: Mean = None
) -> Step:
    batch = Batch.of(config, mean, machine.node_size)
    t = config.training
    u = units(config, model, gpus)
    clock = Clock(machine, batch, config.compile.enable)
    times = micro_steps(config, gpus)
    passes = passes_of(clock, config, model)
    everything = [p for pair in passes for p in pair]
    if model.adapter and model.adapter.base_is_reference:
        everything += [forward for forward, _ in passes[: model.num_layers]]
    parts = {part: times * sum(p.parts[part] for p in everything) for part in PARTS}
    parts["head"] = times * _head(config, model, u, batch, machine)
    parts["optimizer"] = _optimizer(config, u, times, machine)
    if config.optimizer.name == "muon":
        parts["optimizer"] += _muon(model, gpus, machine)
        if gpus > 1:
            link = machine.group(gpus, 1)
            parts["communication"] += 2 * (link.message + 2 * u.muon / link.all_to_all)
    parts["communication"] += times * (
        _shared(config, u, machine, passes) + _experts(config, model, batch, machine)
    )
    sums = 1 if replicas_wait(t) else times
    parts["communication"] += sums * _replicas(config, u, gpus, machine, passes)
    if u.offloaded:
        parts["communication"] += (times - 1) * u.local * u.stored / machine.offload.to_host
    chunk = tokens_at_once(t.loss_chunk_size, u.vocabulary // model.dim)
    chunks = -(-batch.tokens * batch.tp // chunk) * (
        1 + model.mtp_layers + _readings(config, model)
    )
    # 7 for each chunk of logits
    launches = times * (sum(p.launches for p in everything) + 7 * chunks)
    spent = sum(parts.values())
    parts["launches"] = max(machine.rates.gap * launches, machine.rates.host * launches - spent)
    nodes = documents_of(t.seq_len, t.local_batch_size, mean)
    one = Documents.of(nodes.edges, nodes.depth)
    documents = Documents(*(n * t.global_batch_size // t.local_batch_size for n in one))
    return Step(
        parts, documents.tokens, training_flops(model, documents), gpus, machine.rates.peak_tflops
    )


def passes_of(clock: Clock, config: Config, model: ModelConfig) -> list[tuple[Pass, Pass]]:
    """Forward and backward of each layer."""
    modes = [layer_checkpointing(config.activation_checkpoint, i) for i in range(len(model.layers))]
    return [
        _passes(clock, mode, layer)
        for mode, layer in zip(modes, layers(model, clock.batch), strict=True)
    ]


def _passes(clock: Clock, mode: str, layer: Layer) -> tuple[Pass, Pass]:
    """A layer's forward and backward; backward begins with recomputation, if there is any."""
    forward = clock.of(layer.forward, layer.forward.calls)
    backward = clock.of(layer.backward, layer.backward.calls)
    if mode == "none":
        return forward, backward
    calls = layer.forward.calls
    if mode == "selective" and not clock.compiled:
        calls = [call for call in calls if not call.spec.of_driver]
    calls = [call for call in calls if mode not in call.spec.kept_by]
    again = clock.of(layer.forward, calls)
    both = {part: again.parts[part] + backward.parts[part] for part in PARTS}
    return forward, Pass(both, again.launches + backward.launches)


def _head(config: Config, model: ModelConfig, u: Units, batch: Batch, machine: Machine) -> float:
    """Seconds: three products per chunk of tokens, two if the weight is frozen; float32 logits, written once and read
    twice, and their gradient, written; the weight's float32 gradient, read and written for each chunk. Of each reading
    before: a product, and its logits, written and read."""
    rates, D = machine.rates, model.dim
    rows, tokens = u.vocabulary // D, batch.tokens * batch.tp
    chunk = min(tokens_at_once(config.training.loss_chunk_size, rows), tokens)
    learned = tokens * (1 + model.mtp_layers)
    read = learned + tokens * _readings(config, model)
    products = read * rates.product((chunk, rows, D)) + learned * rates.product((chunk, D, rows))
    products += learned * rates.product((rows, D, chunk)) * (u.trained_head > 0)
    moved = rows * (learned * (4 + 2) + read * 2 * 4) + learned / chunk * u.trained_head * 2 * 4
    return products / chunk + moved / rates.elementwise


def _readings(config: Config, model: ModelConfig) -> int:
    """How often the head reads all tokens before it learns: for a base that is the reference, and for a loss of sums
    over documents."""
    return bool(model.adapter and model.adapter.base_is_reference) + build_loss(config).reads_twice


def _optimizer(config: Config, u: Units, times: int, machine: Machine) -> float:
    """Seconds, by bytes: the gradient's norm, AdamW, copies; in every micro-step what FSDP2 takes apart once gathered,
    and puts together to reduce; without it, and on the host, gradient accumulation."""
    stored, compute = u.stored, u.compute
    if u.offloaded:
        return u.local * stored * (10 + 3 * (times - 1)) / machine.offload.adamw
    copies = not u.sharded and compute != stored
    gradient = compute if copies and times == 1 else stored
    update = u.local * (6 * stored + 2 * gradient + copies * compute)
    if u.shards > 1:
        gathers = 2 if config.parallelism.fsdp_reshard_after_forward == "always" else 1
        copied = (sum(u.layers) + 2 * u.vocabulary) * 2 * gathers * compute
        copied += (sum(u.trained) + 2 * u.trained_head) * (compute + u.reduce)
        update += times * copied
    elif copies:
        update += (times - 1) * u.local * (2 * stored + compute)
    return update / machine.rates.elementwise


def _muon(model: ModelConfig, gpus: int, machine: Machine) -> float:
    """Seconds of the products of Muon's five iterations, or of the host to queue them, of matrices that GPUs share out
    evenly."""
    seconds = 0.0
    for shape in hidden_shapes(model):
        m, n = sorted(shape[-2:])
        each = sum(machine.rates.product(size) for size in ((m, m, n), (m, m, m), (m, n, m)))
        seconds += max(5 * each, ORTHOGONAL) * shape[:-2].numel()
    return seconds / gpus


def _shared(config: Config, u: Units, machine: Machine, passes: list[tuple[Pass, Pass]]) -> float:
    """Exposed seconds of FSDP2's exchanges in a micro-step. A layer is gathered while the one before it computes, and
    again in backward if it was freed; in backward, gradients of the one before are reduced at the same time."""
    p = config.parallelism
    n, stride = u.shards, p.tensor_parallel_degree
    exposed = 0.0
    if n > 1 or u.offloaded:
        link = machine.group(n, stride)
        part = (n - 1) / n
        sizes, trained = (*u.layers, u.vocabulary), (*u.trained, u.trained_head)
        # seconds per element
        comes = u.stored / n / machine.offload.to_device if u.offloaded else 0.0
        goes = u.stored / n / machine.offload.to_host if u.offloaded else 0.0
        gather = [link.ring + size * (u.compute * part / link.all_gather + comes) for size in sizes]
        reduce = [
            link.ring + size * (u.reduce * part / link.reduce_scatter + goes) for size in trained
        ]
        exposed += gather[0] + gather[-1] + reduce[0] + reduce[-1]
        freed = p.fsdp_reshard_after_forward == "always"
        for i in range(1, len(u.layers)):
            forward, backward = (one.seconds for one in passes[i - 1])
            again = gather[i - 1] if freed else 0.0
            if n == 1:
                exposed += gather[i] + again + max(reduce[i] - backward, 0.0)
            else:
                exposed += max(gather[i] - forward, 0.0) + max(again + reduce[i] - backward, 0.0)
    return exposed


def _replicas(
    config: Config, u: Units, gpus: int, machine: Machine, passes: list[tuple[Pass, Pass]]
) -> float:
    """Exposed seconds of summing gradients over copies of shards: what the layers' backward does not hide."""
    replicas, shards = fsdp_degrees(config, gpus)
    if replicas == 1:
        return 0.0
    link = machine.group(replicas, shards * config.parallelism.tensor_parallel_degree)
    sums = 2 * u.local * u.reduce * (replicas - 1) / replicas / link.reduce_scatter
    return 2 * link.ring + max(
        sums - sum(backward.seconds for _, backward in passes), sums / len(u.layers)
    )


def _experts(config: Config, model: ModelConfig, batch: Batch, machine: Machine) -> float:
    """Seconds in which a micro-step's tokens travel to ranks with their experts and sums come back, in forward and in
    backward; where the layer is recomputed, tokens travel again. In forward ranks first tell each other how many come.

    A token goes to `ranks` ranks, as expected of experts that are chosen evenly. Its copies are written on the way out
    and added up on the way back, and so many tokens more are read and written beside the experts."""
    if model.moe is None or batch.ep == 1:
        return 0.0
    link = machine.group(batch.ep, batch.tp)
    ranks = batch.ep * (1 - (1 - 1 / batch.ep) ** model.moe.top_k)
    rows = batch.tokens * batch.tp * ranks * model.moe.width(model.dim) * batch.dtype.itemsize
    exchange = link.message + rows * (batch.ep - 1) / batch.ep / link.all_to_all
    modes = [layer_checkpointing(config.activation_checkpoint, i) for i in range(len(model.layers))]
    times = [4 if mode == "none" else 5 for i, mode in enumerate(modes) if model.has_experts(i)]
    return len(times) * link.message + sum(times) * (exchange + 2 * rows / machine.rates.fused)
