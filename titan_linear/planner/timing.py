"""Plan the time of a step: its layers' work (counting.py) at a GPU's rates (machine.py).

The plan is seconds by part, of the busiest rank:

    products       matrix products, at a rate by the smallest of their three sizes; in bfloat16
                   never faster than their bytes
    attention      the pairs that the mask leaves, at a rate by kernel and head dim
    recurrence     each of its operators: a time per token and head, and per token of the longest
                   entry, which one head scans alone; the convolution, per token and channel
    elementwise    bytes read and written, by single operations or as compiled
    head           its products, the loss's reads and writes of logits
    optimizer      bytes of parameters, gradients and moments; copies in the compute dtype
    communication  only the exposed time: exchanges inside layers, for which ranks wait; the time
                   by which FSDP's exchanges are longer than the layers that hide them
    launches       gaps between kernels; or the time by which the host is slower than the GPU

Not modeled: kernels that slow down during a collective, other jobs, input, checkpoints,
validation. With training.enable_cpu_offload, copies from and to the host, and the update there.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_linear.config import Parallelism
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.ops.cross_entropy import tokens_at_once
from titan_linear.ops.exchange.kcp import sizes_of
from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.levels import Network, direct_messages, duration, messages, route
from titan_linear.ops.layout.segments import PROGRAMS
from titan_linear.ops.runtime.costs import (
    AttentionCost,
    ConvolutionCost,
    ExchangeCost,
    Gathered,
    GroupedCost,
    Incoming,
    ProductCost,
    RecurrenceCost,
    Ring,
    SegmentsCost,
)
from titan_linear.planner.counting import LayerCounts, OperatorCall, PassCounts
from titan_linear.planner.machine import Machine
from titan_linear.planner.memory import (
    MicroBatchShape,
    PlannedRank,
    Units,
    context,
    documents_of,
    hidden_shapes,
    layers,
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
# K and V at which the delta rule's rates are measured.
DIM = 128
# Columns of the state that a program computes.
SLICE = 64
# A product in float32, which tensor cores do not compute, takes as long as this many in
# bfloat16.
WIDE = 15
# Launches per operator, on average.
LAUNCHES = 4
# Seconds of the host for a matrix that torch's Muon takes. Measured with the 288 matrices
# of KDA 340M on an H200, 2026-11-26.
ORTHOGONAL = 0.38e-3
# Number of slices in which keys travel around the ring; ranks wait for the first one.
SLICES = 4


def share_of(K: int, V: int) -> float:
    """Return the time of a recurrence's token and head, relative to the time at K = V =
    DIM.

    Kernels compute the state by whole slices of columns, each from all of q and k.
    """
    return -(-V // SLICE) * _slice(K) / (DIM // SLICE * _slice(DIM))


def _slice(K: int) -> int:
    return K * SLICE + CHUNK * (K + SLICE)


# --- A pass through a layer ---------------------------------------------------------------


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

    def __init__(self, machine: Machine, batch: MicroBatchShape, compiled: bool):
        self.machine = machine
        self.rates = machine.rates
        self.batch = batch
        self.compiled = compiled
        self.cp = machine.group(batch.cp, batch.tp)
        self.tp = machine.group(batch.tp, 1)
        described = context(batch)
        self.gathered = described.gathered
        # Length of the longest entry.
        self.longest = int(described.tables.boundaries.longest)

    def of(self, work: PassCounts, calls: Sequence[OperatorCall]) -> Pass:
        """Return the time of this work. calls: the calls of `work` that run."""
        parts = dict.fromkeys(PARTS, 0.0)
        # Matrix products; one in float32 counts as WIDE products in bfloat16.
        times = work.products + Counter(
            {size: (WIDE - 1) * n for size, n in work.wide_products.items()}
        )
        parts["products"] = sum(self.rates.product(size) * n for size, n in times.items())
        # Elementwise operations.
        if self.compiled:
            parts["elementwise"] = work.fused / self.rates.fused
        else:
            parts["elementwise"] = work.elementwise / self.rates.elementwise
        # Our operators, each of which may add to several parts.
        segments = next(
            (call.cost.number for call in calls if isinstance(call.cost, SegmentsCost)), 0
        )
        for call in calls:
            for part, seconds in self._parts(call, segments):
                parts[part] += seconds
        operations = work.groups if self.compiled else work.operations
        return Pass(parts, work.multiplications + operations + LAUNCHES * len(calls))

    def _parts(self, call: OperatorCall, segments: int) -> Iterator[tuple[str, float]]:
        """Yield parts of a step, and the seconds that the call adds to each."""
        cost = call.cost
        match cost:
            case AttentionCost():
                seconds = self._attention(cost)
                yield "attention", seconds
                yield "communication", self._keys_exposed(cost.keys, seconds, cost.backward)
            case ConvolutionCost():
                yield "recurrence", self.rates.operators[call.name][0] * cost.elements * 1e-9
            case RecurrenceCost() if call.name in self.rates.operators:
                yield "recurrence", self._recurrence(call.name, cost, segments)
            case ProductCost():
                yield "products", self.rates.float8_product(cost)
            case GroupedCost(m, n, k, inside):
                yield "products", self.rates.product((m, n, k), grouped=True)
                yield "elementwise", inside / self.rates.fused
            case ExchangeCost():
                yield "communication", self._exchange(cost)
            case Incoming():
                yield "communication", self._incoming(cost)
            # Everything else is small (tables, folds) or was not measured: count its bytes.
            case _:
                inputs = [x for x in tree_leaves(call.arguments) if isinstance(x, Tensor)]
                yield (
                    "elementwise",
                    sum(x.nbytes for x in (*inputs, *call.outputs)) / self.rates.fused,
                )

    def _attention(self, cost: AttentionCost) -> float:
        pairs_of_ranks = self.gathered.pairs.tolist()
        match cost.keys:
            case None:
                # Ranks exchange heads: each has all tokens, but fewer heads.
                pairs = sum(pairs_of_ranks)
            case Gathered():
                # The others wait for the rank that computes most.
                pairs = max(pairs_of_ranks)
            case Ring(stride=stride):
                # On a ring, `stride` ranks act as one; the last of these groups has the
                # most pairs.
                pairs = sum(pairs_of_ranks[self.batch.cp - stride :])
        flops = 2 * (cost.D + cost.Dv) * cost.heads * pairs
        forward, both = self.machine.attention_rates(cost.D, cost.Dv, self.batch.mean is None)
        seconds = flops / forward / 1e12
        # Both passes compute 3.5 times the FLOPs of forward; backward is the rest of their
        # time.
        return 3.5 * flops / both / 1e12 - seconds if cost.backward else seconds

    def _keys_exposed(self, keys: Ring | Gathered | None, compute: float, backward: bool) -> float:
        """Return the exposed seconds of keys, values and, in backward, their gradients.

        They travel while blocks of attention are computed.
        """
        match keys:
            case None:
                return 0.0
            # In backward there is also a reduce-scatter.
            case Gathered(nbytes, share, slices):
                seconds = (
                    slices * (1 + backward) * self.cp.message + nbytes * share / self.cp.all_gather
                )
            case Ring(nbytes, stride):
                slices = SLICES
                hops = self.batch.cp // stride - 1
                seconds = hops * (self.cp.message + nbytes / self.cp.neighbour)
        return max(seconds - compute, seconds / slices)

    def _recurrence(self, name: str, cost: RecurrenceCost, segments: int) -> float:
        """Return the seconds for all heads, and for the longest scan.

        The second is the time by which one head's scan outlasts the work of the GPU on all
        heads.
        """
        operators = self.rates.operators
        each, of_chain = (
            operators.get(f"{name} any", operators[name]) if cost.any_gate else operators[name]
        )
        tokens, heads, K, V, _ = cost
        chain = tokens / segments if segments else self.longest
        alone = max(chain - tokens * heads * V / 64 / PROGRAMS, 0.0)
        return (each * tokens * heads * share_of(K, V) + of_chain * alone * K / DIM) * 1e-9

    def _exchange(self, cost: ExchangeCost) -> float:
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
                return tp.message + nbytes * (self.batch.tp - 1) / tp.all_gather
            case "scatter":
                return tp.message + nbytes * others_of_tp / tp.reduce_scatter
            case "sum":
                return 2 * tp.message + nbytes * others_of_tp * (
                    1 / tp.all_gather + 1 / tp.reduce_scatter
                )

    def _incoming(self, cost: Incoming) -> float:
        """Return the seconds to bring the states that enter a rank's fragments there, and
        fold them.
        """
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


# --- A step -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedStep:
    """A planned step."""

    # Seconds by part.
    parts: dict[str, float]
    tokens: int
    flops: int
    gpus: int
    peak_tflops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all GPUs."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.gpus / self.peak_tflops / 1e12


def step(rank: PlannedRank, machine: Machine) -> PlannedStep:
    t = rank.training
    model = rank.model
    u = rank.units
    gpus = rank.gpus
    batch = rank.batch._replace(node=machine.node_size)
    clock = Clock(machine, batch, rank.config.compile.enable)
    times = rank.micro_steps
    # Layers; the frozen base as reference adds a forward pass.
    passes = passes_of(clock, rank)
    everything = [p for pair in passes for p in pair]
    if model.base_is_reference:
        everything += [forward for forward, _ in passes[: model.num_layers]]
    parts = {part: times * sum(p.parts[part] for p in everything) for part in PARTS}
    # Head and optimizer.
    parts["head"] = times * _head(rank, machine)
    parts["optimizer"] = _optimizer(rank, machine)
    if rank.config.optimizer.name == "muon":
        parts["optimizer"] += _muon(model, gpus, machine)
        if gpus > 1:
            link = machine.group(gpus, 1)
            parts["communication"] += 2 * (link.message + 2 * u.muon / link.all_to_all)
    # Exposed communication of FSDP, experts and replicas.
    shared = _shared(u, rank.parallelism, machine, passes)
    parts["communication"] += times * (shared + _experts(rank, machine))
    sums = 1 if t.replicas_wait else times
    parts["communication"] += sums * _replicas(rank, machine, passes)
    # Launches: the head has its own, for each chunk of tokens.
    chunk = tokens_at_once(t.loss_chunk_size, u.head // model.dim)
    chunks = -(-batch.tokens * batch.tp // chunk) * (1 + model.mtp_layers + _readings(rank))
    # There are 7 launches for each chunk of logits.
    launches = times * (sum(p.launches for p in everything) + 7 * chunks)
    spent = sum(parts.values())
    parts["launches"] = max(machine.rates.gap * launches, machine.rates.host * launches - spent)
    # FLOPs count the documents' own work, not the recomputed one.
    trees = documents_of(t.seq_len, t.local_batch_size, rank.mean)
    one = Documents.of(trees.edges, trees.depth)
    documents = Documents(*(n * t.global_batch_size // t.local_batch_size for n in one))
    return PlannedStep(
        parts, documents.tokens, training_flops(model, documents), gpus, machine.rates.peak_tflops
    )


def passes_of(clock: Clock, rank: PlannedRank) -> list[tuple[Pass, Pass]]:
    """Return forward and backward of each layer."""
    counted = layers(rank.model, clock.batch)
    pairs = zip(rank.modes, counted, strict=True)
    return [_passes(clock, mode, layer) for mode, layer in pairs]


def _passes(clock: Clock, mode: str, layer: LayerCounts) -> tuple[Pass, Pass]:
    """Return a layer's forward and backward; backward begins with recomputation, if any."""
    forward = clock.of(layer.forward, layer.forward.calls)
    backward = clock.of(layer.backward, layer.backward.calls)
    if mode == "none":
        return forward, backward
    # Outputs that the mode keeps are not recomputed.
    calls = layer.forward.calls
    if mode == "selective" and not clock.compiled:
        calls = [call for call in calls if not call.spec.of_driver]
    calls = [call for call in calls if mode not in call.spec.kept_by]
    again = clock.of(layer.forward, calls)
    both = {part: again.parts[part] + backward.parts[part] for part in PARTS}
    return forward, Pass(both, again.launches + backward.launches)


def _head(rank: PlannedRank, machine: Machine) -> float:
    """Return the seconds of the head.

    There are three products per chunk of tokens, two if the weight is frozen. Logits in
    float32 are written once and read twice, and their gradient is written. The weight's
    float32 gradient is read and written for each chunk. Each reading before that adds a
    product, and its logits, written and read.
    """
    rates = machine.rates
    u = rank.units
    D = rank.model.dim
    rows = u.head // D
    tokens = rank.batch.tokens * rank.batch.tp
    chunk = min(tokens_at_once(rank.training.loss_chunk_size, rows), tokens)
    learned = tokens * (1 + rank.model.mtp_layers)
    read = learned + tokens * _readings(rank)
    products = read * rates.product((chunk, rows, D)) + learned * rates.product((chunk, D, rows))
    products += learned * rates.product((rows, D, chunk)) * (u.trained_head > 0)
    moved = rows * (learned * (4 + 2) + read * 2 * 4) + learned / chunk * u.trained_head * 2 * 4
    return products / chunk + moved / rates.elementwise


def _readings(rank: PlannedRank) -> int:
    """Return how often the head reads all tokens before it learns.

    It does for a base that is the reference, and for a loss of sums over documents.
    """
    return rank.model.base_is_reference + rank.loss.reads_twice


def _optimizer(rank: PlannedRank, machine: Machine) -> float:
    """Return the seconds of the optimizer, by bytes.

    The bytes are of the gradient's norm, AdamW and copies. In every micro-step FSDP2 also
    splits units once gathered, and joins gradients to reduce them. Without FSDP2,
    gradients are accumulated.
    """
    u = rank.units
    times = rank.micro_steps
    stored = u.stored
    compute = u.compute
    copies = not u.sharded and compute != stored
    gradient = compute if copies and times == 1 else stored
    update = u.local * (6 * stored + 2 * gradient + copies * compute)
    if u.shards > 1:
        gathers = 2 if rank.parallelism.fsdp_reshard_after_forward == "always" else 1
        copied = (sum(u.gathered) + u.head) * 2 * gathers * compute
        copied += (sum(u.trained) + u.trained_head) * (compute + u.reduce)
        update += times * copied
    elif copies:
        update += (times - 1) * u.local * (2 * stored + compute)
    return update / machine.rates.elementwise


def _muon(model: ModelConfig, gpus: int, machine: Machine) -> float:
    """Return the seconds of Muon's five iterations, for matrices that GPUs share evenly.

    A matrix takes the time of its products, or of the host to queue them.
    """
    seconds = 0.0
    for shape in hidden_shapes(model):
        m, n = sorted(shape[-2:])
        each = sum(machine.rates.product(size) for size in ((m, m, n), (m, m, m), (m, n, m)))
        seconds += max(5 * each, ORTHOGONAL) * shape[:-2].numel()
    return seconds / gpus


def _shared(u: Units, p: Parallelism, machine: Machine, passes: list[tuple[Pass, Pass]]) -> float:
    """Return the exposed seconds of FSDP2's exchanges in a micro-step.

    A layer is gathered while the one before it computes, and again in backward if it was
    freed. In backward, gradients of the layer after it are reduced at the same time.
    """
    n = u.shards
    stride = p.tensor_parallel_degree
    exposed = 0.0
    if n > 1:
        link = machine.group(n, stride)
        part = (n - 1) / n
        gather = [link.message + size * u.compute * part / link.all_gather for size in u.gathered]
        reduce = [link.message + size * u.reduce * part / link.reduce_scatter for size in u.trained]
        # Nothing hides the first and the last exchange.
        exposed += gather[0] + gather[-1] + reduce[0] + reduce[-1]
        freed = p.fsdp_reshard_after_forward == "always"
        for i in range(1, len(passes)):
            forward, backward = (one.seconds for one in passes[i - 1])
            again = gather[i - 1] if freed else 0.0
            exposed += max(gather[i] - forward, 0.0) + max(again + reduce[i] - backward, 0.0)
    return exposed


def _replicas(rank: PlannedRank, machine: Machine, passes: list[tuple[Pass, Pass]]) -> float:
    """Return the exposed seconds of summing gradients over copies of shards.

    It is the time that the layers' backward does not hide.
    """
    replicas, shards = rank.parallelism.fsdp_degrees(rank.gpus)
    if replicas == 1:
        return 0.0
    u = rank.units
    link = machine.group(replicas, shards * rank.batch.tp)
    sums = 2 * u.local * u.reduce * (replicas - 1) / replicas / link.reduce_scatter
    return 2 * link.message + max(
        sums - sum(backward.seconds for _, backward in passes), sums / len(passes)
    )


def _experts(rank: PlannedRank, machine: Machine) -> float:
    """Return the seconds of a micro-step's exchanges of tokens with the ranks of their
    experts.

    Tokens travel there and sums come back, in forward and in backward; if the layer is
    recomputed, tokens travel again. In forward ranks first tell each other how many tokens
    come.

    A token goes to `ranks` ranks, the expected number if experts are chosen evenly. Its
    copies are written on the way out and added up on the way back, which reads and writes
    these rows in addition to the experts' work.
    """
    model = rank.model
    batch = rank.batch
    if model.moe is None or batch.ep == 1:
        return 0.0
    link = machine.group(batch.ep, batch.tp)
    ranks = batch.ep * (1 - (1 - 1 / batch.ep) ** model.moe.top_k)
    rows = batch.tokens * batch.tp * ranks * model.moe.width(model.dim) * batch.dtype.itemsize
    exchange = link.message + rows * (batch.ep - 1) / batch.ep / link.all_to_all
    times = [
        4 if mode == "none" else 5 for i, mode in enumerate(rank.modes) if model.has_experts(i)
    ]
    return len(times) * link.message + sum(times) * (exchange + 2 * rows / machine.rates.fused)
