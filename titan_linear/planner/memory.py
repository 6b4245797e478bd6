"""Plan a run's memory per GPU by running its layers on the meta device (counting.py).

Nothing is allocated there. The parts are bytes of the GPU that holds most, at the moment
when it holds most: in the head; in backward of the layer whose activations take most, or of
the first layer; or after backward. A part that does not exist at that moment is 0.

    parameters, gradients, optimizer   this GPU's shards, and the parameters that FSDP does not
                                       shard. Without gradient accumulation there are no
                                       gradients before backward
    copies                             of parameters in the compute dtype: FSDP's two largest
                                       units, gathered, and one unit's gradients; if nothing is
                                       sharded, all parameters, and at the end of backward their
                                       gradients. With offload also the data on its way from or
                                       to the host
    activations                        the columns that the loss reads, and what layers keep of
                                       one micro-step until their backward: all that it needs,
                                       or with compile.enable only what is expensive to
                                       recompute; with activation checkpointing the layer's
                                       input (and what ops/runtime/operators.py lists for the
                                       mode), and all that the layer being recomputed needs
    working                            the most that a layer's backward, or Muon's update, needs
                                       in addition
    head                               the final norm's input and output, the gradients of the
                                       head's input and weight
    logits                             of training.loss_chunk_size tokens, and their gradient

With training.enable_cpu_offload, shards, their gradients and moments are not included:
`host_memory` has them.

`SPARE` of a GPU is left free for what is not planned: fragmentation, workspaces of
libraries and NCCL's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titan_linear.config import ActivationCheckpoint, Config, Parallelism
from titan_linear.distributed.one_process import LocalDims
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.losses import build_loss
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.float8 import use_float8
from titan_linear.models.layers import widened
from titan_linear.models.mlps.moe import Experts, LocalDispatch, MoE
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import CPContext, build_cp_context
from titan_linear.ops.cross_entropy import tokens_at_once
from titan_linear.ops.layout.prefix_trees import PrefixTrees
from titan_linear.ops.registry import OPS
from titan_linear.ops.runtime.support import Target
from titan_linear.planner.counting import LayerCounts, count
from titan_linear.run.build import DTYPES, unallocated
from titan_linear.run.session import Session
from titan_linear.step.optimizer import hidden_matrices

GIB = 2**30
META = torch.device("meta")
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "copies",
    "activations",
    "working",
    "head",
    "logits",
)
# Share of a GPU that stays free.
SPARE = 0.1
# Bytes per element: in bfloat16 a rank's parts, whole matrices, and three copies in torch's
# Muon.
MUON_WORKING = 10


# --- A rank's part of the model -----------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """Numbers of elements of a rank's parameters, and how they are sharded."""

    # Trained elements in the rank's shards.
    local: int
    # Elements that adapters leave frozen, in the compute dtype.
    frozen: int
    # Trained elements in matrices that Muon updates.
    muon: int
    # Elements of parameters that FSDP does not shard, in float32 or wider: trained and
    # frozen.
    whole: int
    frozen_whole: int
    # Elements of each layer and of the head, as FSDP gathers them, and how many of these are
    # trained. The embedding has as many as the head.
    gathered: tuple[int, ...]
    trained: tuple[int, ...]
    # Bytes of an element of parameters, their gradients, each of AdamW's two moments, and
    # Muon's momentum.
    stored: int
    # Bytes of an element of the copies for compute.
    compute: int
    # Bytes of an element of gradients that ranks sum.
    reduce: int
    # FSDP2 manages the parameters.
    sharded: bool
    # Number of ranks that they are sharded over.
    shards: int
    # The shards are in the host's memory.
    offloaded: bool

    @property
    def head(self) -> int:
        return self.gathered[-1]

    @property
    def trained_head(self) -> int:
        return self.trained[-1]


def _local(model: ModelConfig, shards: int, tp: int, ep: int) -> dict[nn.Parameter, int]:
    """Return the number of elements in each of a rank's shards."""
    decoder, experts = _parts(model, tp, ep)
    return {p: _owned(p, shards // ep if p in experts else shards) for p in _sharded(decoder)}


@cache
def hidden_shapes(model: ModelConfig) -> list[torch.Size]:
    """Return the shapes of the matrices that Muon would update, and of stacks of them."""
    return [p.shape for p in hidden_matrices(_parts(model, 1, 1)[0]).values()]


def parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model."""
    return sum(p.numel() for p in _parts(model, 1, 1)[0].parameters())


def _on_a_rank(
    model: ModelConfig, dtype: torch.dtype, tp: int, ep: int, **parallelism: str
) -> Decoder:
    """Return a rank's part of the model under tp and ep, on the meta device.

    Rows for experts stay on this rank: with equal loads it receives as many rows as it
    sends.
    """
    options = SessionOptions(compute_dtype=dtype, parallelism=Parallelism(**parallelism))
    dims = LocalDims(tp=tp, ep=ep)
    decoder = Session(unallocated(model, dtype), dims, options, device=META).model
    for moe in (m for m in decoder.modules() if isinstance(m, MoE)):
        moe.dispatch = LocalDispatch
    return decoder


@cache
def _parts(model: ModelConfig, tp: int, ep: int) -> tuple[Decoder, set[nn.Parameter]]:
    """Return a rank's part of the model, and the set of its parameters that are experts'."""
    decoder = _on_a_rank(model, torch.float32, tp, ep)
    return decoder, {p for m in decoder.modules() if isinstance(m, Experts) for p in m.parameters()}


def _sharded(model: nn.Module) -> list[nn.Parameter]:
    whole = set(replicated_parameters(model))
    return [p for p in model.parameters() if p not in whole]


def _owned(parameter: Tensor, shards: int) -> int:
    """Return the elements of the largest shard; FSDP pads the others to it."""
    return -(-parameter.shape[0] // shards) * parameter[0].numel()


# --- A rank's part of a micro-step --------------------------------------------------------


# Mean tokens per document; None: each stream is one document. Or a prefix tree, level by
# level: how many nodes continue each node of the level above, and their number of tokens.
Mean = int | tuple[tuple[int, int], ...] | None


class MicroBatchShape(NamedTuple):
    """The data that determine how a layer runs on the busiest rank.

    They are a micro-step's streams, and how these are cut.
    """

    seq_len: int
    streams: int
    mean: Mean
    cp: int
    layout: str
    softmax_method: str
    linear_method: str
    tp: int
    ep: int
    dtype: torch.dtype
    # GPUs per node.
    node: int = 8
    # float8.filter_fqns; None: no float8.
    float8: tuple[str, ...] | None = None

    @classmethod
    def of(cls, config: Config, mean: Mean = None) -> MicroBatchShape:
        t = config.training
        p = config.parallelism
        layout = p.context_parallel_layout if p.context_parallel_degree > 1 else "contiguous"
        return cls(
            seq_len=t.seq_len,
            streams=t.local_batch_size,
            mean=mean,
            cp=p.context_parallel_degree,
            layout=layout,
            softmax_method=p.context_parallel_method,
            linear_method=p.context_parallel_linear_method,
            tp=p.tensor_parallel_degree,
            ep=p.expert_parallel_degree,
            dtype=DTYPES[t.mixed_precision_param],
            float8=tuple(config.float8.filter_fqns) if config.float8.enable else None,
        )

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a rank, between layers."""
        return self.streams * self.seq_len // (self.cp * self.tp)


@cache
def documents_of(seq_len: int, streams: int, mean: Mean) -> PrefixTrees:
    """Return streams of documents with this mean length.

    They have one document each, documents of random lengths around `mean`, or as many trees
    as fit.
    """
    if isinstance(mean, tuple):
        return _trees(seq_len, streams, mean)
    edges = [np.arange(streams + 1) * seq_len]
    # Lengths are drawn with a fixed key, so that a plan is repeatable.
    if mean is not None:
        draw = np.random.Generator(np.random.Philox(key=seq_len))
        lengths = 1 + draw.exponential(mean, size=2 + 8 * streams * seq_len // mean).astype(
            np.int64
        )
        edges.append(lengths.cumsum().clip(max=streams * seq_len))
    return PrefixTrees.apart(np.unique(np.concatenate(edges)))


def _trees(seq_len: int, streams: int, levels: tuple[tuple[int, int], ...]) -> PrefixTrees:
    # Offsets to parent tokens in the part below a node, as in `PrefixTrees.behind`.
    back = np.zeros(0, dtype=np.int64)
    for n, tokens in reversed(levels):
        node = np.append(np.ones(tokens, dtype=np.int64), back)
        back = np.tile(node, n)
        back[:: len(node)] = np.arange(n) * len(node) + 1
    back[0] = 0
    # Fill a stream with whole trees; the rest of it is one document.
    trees, padding = divmod(seq_len, len(back))
    if not trees:
        raise ValueError(
            f"--documents: its tree has {len(back):,} tokens, and training.seq_len = {seq_len}; raise that"
        )
    return PrefixTrees.behind(
        np.tile([*np.tile(back, trees), *np.minimum(range(padding), 1)], streams)
    )


@cache
def context(batch: MicroBatchShape) -> CPContext:
    """Return the context of the last cp rank, on the meta device.

    With contiguous fragments, that rank sees the most keys.
    """
    trees = documents_of(batch.seq_len, batch.streams, batch.mean)
    described = build_cp_context(
        torch.from_numpy(trees.edges.astype(np.int32)),
        parents=torch.from_numpy(trees.parents),
        rank=batch.cp - 1,
        world_size=batch.cp,
        layout=batch.layout,
        num_streams=batch.streams,
        node_size=math.gcd(batch.cp, max(batch.node // batch.tp, 1)),
        device=META,
    )
    if batch.cp > 1:
        # No exchange runs on this group.
        planned = {"group": "planned", "group_name": "planned"}
        # Prefix trees have no context of nodes, because rings do not support trees.
        for cp in (described, *([] if described.cut.trees.joined else [described.of_nodes])):
            cp.ranks = replace(cp.ranks, **planned)
    return described


def layers(model: ModelConfig, batch: MicroBatchShape) -> list[LayerCounts]:
    """Count each layer of a rank.

    With equal loads, the number of rows for experts on a rank does not depend on ep.

    Raises:
        ValueError: the GPU's kernels do not support the model.
    """
    for name, dims in (pair for mixer in model.mixers for pair in mixer.ops.items()):
        op = OPS[name]
        target = Target("meta", None, batch.dtype, dims)
        kernels = op.implementations.get("triton")
        if kernels and (reason := op.reason_against("triton", target)):
            raise ValueError(
                f"{name} is planned as the GPU's kernels compute it: {reason}; use a model that they take"
            )
    # Equal layers are counted once. With float8 a layer's number matters as well.
    alike = batch._replace(ep=1)
    of_kind = model.layers
    firsts = [of_kind.index(layer) for layer in of_kind]
    return [
        _layer(model.first_layers(n + 1), n, alike, i - n if batch.float8 else 0)
        for i, n in enumerate(firsts)
    ]


@cache
def _layer(model: ModelConfig, n: int, batch: MicroBatchShape, shift: int) -> LayerCounts:
    """Count layer n.

    shift: offset of the layer's number, by which float8.filter_fqns names it.
    """
    # Cut this layer out of the model, with this rank's part of its parameters.
    methods = {
        "context_parallel_method": batch.softmax_method,
        "context_parallel_linear_method": batch.linear_method,
    }
    decoder = _on_a_rank(model, batch.dtype, batch.tp, 1, **methods)
    block = decoder.layers[n]
    width = model.dim * (2 if block.options.joins else 1)
    x = torch.empty(1, batch.tokens, width, dtype=batch.dtype, device=META, requires_grad=True)
    if batch.float8 is not None:
        use_float8(decoder, batch.float8, first=shift)
    cp = context(batch)
    # Some mixers take values from another layer, which are an input here.
    width = sum(options.takes for options in block.options.mixers) // batch.tp
    values = x.new_empty(1, len(cp.position_ids), width, requires_grad=True) if width else None
    return count(
        block, x, BatchPlan(cp.position_ids, cp_context=cp, num_streams=batch.streams), values
    )


# --- Memory -------------------------------------------------------------------------------


class PlannedRank:
    """The GPU that holds most, of the GPUs that share a configuration's step.

    Args:
        mean: as in `MicroBatchShape`.
    """

    def __init__(self, config: Config, model: ModelConfig, gpus: int, mean: Mean = None):
        self.config = config
        self.model = model
        self.gpus = gpus
        self.mean = mean
        self.training = config.training
        self.parallelism = config.parallelism
        self.loss = build_loss(config.loss.name, config.objective)
        self.batch = MicroBatchShape.of(config, mean)

    def changed(self, changes: Mapping[str, object]) -> PlannedRank:
        """Return the same with other values of some keys, by "section.key"."""
        return PlannedRank(self.config.changed(changes), self.model, self.gpus, self.mean)

    @property
    def micro_steps(self) -> int:
        return self.config.micro_steps(self.gpus)

    @property
    def modes(self) -> list[str]:
        """The activation checkpointing mode of each layer."""
        ac = self.config.activation_checkpoint
        return [ac.mode_of(i) for i in range(len(self.model.layers))]

    @cached_property
    def layers(self) -> list[LayerCounts]:
        return layers(self.model, self.batch)

    @cached_property
    def units(self) -> Units:
        """This rank's parameters."""
        t = self.training
        p = self.parallelism
        replicas, shards = p.fsdp_degrees(self.gpus)
        # Count elements of a rank's part under tp and ep, and of its FSDP shards.
        decoder, _ = _parts(self.model, self.batch.tp, self.batch.ep)
        elements = _local(self.model, shards, self.batch.tp, self.batch.ep)
        whole = replicated_parameters(decoder)
        by_muon = self.config.optimizer.name == "muon"
        matrices = hidden_matrices(decoder).values() if by_muon else ()
        units = [_sharded(layer) for layer in decoder.layers]
        units.append([decoder.head.weight])
        return Units(
            local=sum(n for p, n in elements.items() if p.requires_grad),
            frozen=sum(n for p, n in elements.items() if not p.requires_grad),
            muon=sum(elements[p] for p in matrices),
            whole=sum(p.numel() for p in whole if p.requires_grad),
            frozen_whole=sum(p.numel() for p in whole if not p.requires_grad),
            gathered=tuple(sum(p.numel() for p in unit) for unit in units),
            trained=tuple(sum(p.numel() for p in unit if p.requires_grad) for unit in units),
            stored=DTYPES[t.dtype].itemsize,
            compute=DTYPES[t.mixed_precision_param].itemsize,
            reduce=DTYPES[t.mixed_precision_reduce].itemsize,
            sharded=replicas * shards > 1 or t.enable_cpu_offload,
            shards=shards,
            offloaded=t.enable_cpu_offload,
        )

    @property
    def degrees(self) -> str:
        """The degrees above 1, to read."""
        p = self.parallelism
        replicas, shards = p.data_parallel_degrees(self.gpus)
        copies, fsdp = p.fsdp_degrees(self.gpus)
        degrees = {
            "dp_replicate": replicas,
            "dp_shard": shards,
            "cp": p.context_parallel_degree,
            "tp": p.tensor_parallel_degree,
            "ep": p.expert_parallel_degree,
            "fsdp": fsdp if copies > replicas else 1,
        }
        shown = {name: f"{name} {degree}" for name, degree in degrees.items() if degree > 1}
        if "cp" in shown:
            shown["cp"] += f" ({p.context_parallel_layout})"
        return ", ".join(shown.values()) or "one GPU"

    @cached_property
    def needs(self) -> float:
        """The bytes that the GPU holds at most."""
        return sum(self.memory().values())

    def memory(self) -> dict[str, float]:
        """Return bytes by PARTS at the moment when the GPU holds most."""
        return max(self.moments().values(), key=lambda moment: sum(moment.values()))

    def moments(self) -> dict[str, dict[str, float]]:
        """Return bytes by PARTS at each moment that may be the peak."""
        # Stored parameters, and gradients accumulated over micro-steps.
        u = self.units
        batch = self.batch
        # With offload, shards are in the host's memory.
        here = 0 if u.offloaded else 1
        stored = here * u.local * u.stored + u.whole * widened(DTYPES[self.training.dtype]).itemsize
        accumulates = self.micro_steps > 1
        accumulated = stored if accumulates else 0
        # Activations of each layer, and the columns that the loss reads.
        kept, again, working = self.saved()
        kept = (kept[0] + self._columns(), *kept[1:])
        sizes = sorted(u.gathered)
        # FSDP gathers the next unit while one computes.
        gathered = sizes if self.parallelism.fsdp_reshard_after_forward == "never" else sizes[-2:]
        copies = _copies(u, sum(gathered), max(u.trained))
        # Bytes held when each layer's backward begins, and the layer at which most are held.
        held = list(accumulate(kept))
        fullest = max(range(len(held)), key=lambda i: held[i] + again[i] + working[i])
        # The gradient of the residual stream (in float32 too, for the final norm), and of the
        # head until it is reduced.
        stream = self.model.dim * batch.tokens * (u.compute + 4)
        around = stream + u.trained_head * u.compute
        optimizer = 2 * stored - here * u.muon * u.stored
        begins = {"gradients": accumulated, "copies": copies, "activations": sum(kept)}
        # At the end of backward, only the first layer and the embedding have no gradients yet.
        # The second layer's are being reduced.
        last = u.gathered[0] + u.head
        missing = here * (last // u.shards) * u.stored
        ends = {
            "gradients": accumulated or stored - missing,
            "copies": _copies(u, last, max(u.trained[:-1][:2])),
        }
        ends |= {"activations": held[0] + again[0], "working": stream + working[0]}
        update = {"gradients": stored, "copies": copies, "working": u.muon * MUON_WORKING}
        if copies and not u.sharded:
            # Without FSDP, all parameters have copies, and gradients are in the copies' dtype.
            # A second micro-step, or Muon, converts the first gradients to the stored dtype.
            ends |= {"gradients": accumulated, "copies": 2 * copies, "working": around + working[0]}
            update["gradients"] = accumulated or u.muon * u.stored
            update["copies"] = (3 if accumulates else 2) * copies
        # Parts that differ from moment to moment, then the parts that are always there.
        by_moment = {
            "head": begins | self._head(),
            "fullest layer": begins
            | {"activations": held[fullest] + again[fullest], "working": around + working[fullest]},
            "first layer": ends,
            "update": update,
        }
        frozen = here * u.frozen * u.compute
        frozen += u.frozen_whole * widened(batch.dtype).itemsize
        always = {"parameters": stored + frozen, "optimizer": optimizer}
        return {
            name: {part: float((moment | always).get(part, 0)) for part in PARTS}
            for name, moment in by_moment.items()
        }

    def host_memory(self) -> int:
        """Return the bytes of the host's memory that a rank takes with offload, else 0.

        They are shards and their gradients, pinned (PyTorch rounds each tensor up to a
        power of two), and AdamW's two moments or Muon's one. Offload is
        training.enable_cpu_offload.
        """
        u = self.units
        if not u.offloaded:
            return 0
        elements = _local(self.model, u.shards, self.batch.tp, self.batch.ep)
        each = [size * u.stored for parameter, size in elements.items() if parameter.requires_grad]
        frozen = [
            size * u.compute for parameter, size in elements.items() if not parameter.requires_grad
        ]
        pinned = sum(1 << (n - 1).bit_length() for n in each * 2 + frozen)
        return pinned + 2 * sum(each) - u.muon * u.stored

    def saved(self) -> list[tuple[int, ...]]:
        """Return the bytes of each layer, as three tuples.

        They are the bytes kept from forward until its backward begins; the bytes kept while
        it is recomputed, 0 if it is not; and the most that its backward takes in addition.
        """
        found = []
        for mode, layer in zip(self.modes, self.layers, strict=True):
            of = layer.compiled if self.config.compile.enable else layer.plain
            kept = {"selective": of.selective, "attention": of.attention, "full": 0}
            # Kept tensors are reused, and freed if nothing else holds them.
            again = of.kept - kept.get(mode, 0)
            found.append(
                (of.kept, 0, of.working)
                if mode == "none"
                else (layer.input + kept[mode], again, of.working)
            )
        return [*zip(*found, strict=True)]

    def _columns(self) -> int:
        """Return the bytes of the columns that the loss reads, 4 for each number.

        They are weights, and the loss's columns with the most numbers that they may have.
        With several ids per token, the loss reads these numbers once more.
        """
        widths = self.loss.columns.values()
        numbers = 1 + sum(max(width, 1) for width in widths) + max(widths, default=0)
        return 4 * numbers * self.batch.tokens * self.batch.tp

    def _head(self) -> dict[str, int]:
        """Return the bytes of the head and of logits.

        The head has the final norm's input in float32; its output and the output's
        gradient, for the tokens of all tp ranks; and the head weight's gradient in float32,
        and the weight itself if FSDP gathers it. Logits are in float32, with their
        gradient.
        """
        u = self.units
        dim = self.model.dim
        tokens = self.batch.tokens * self.batch.tp
        stream = dim * (4 * self.batch.tokens + 2 * u.compute * tokens)
        stream *= 1 + self.model.mtp_layers
        rows = u.head // dim
        chunk = min(tokens_at_once(self.training.loss_chunk_size, rows), tokens)
        weight = u.trained_head * 4 + (u.head * u.compute if u.sharded else 0)
        return {"head": stream + weight, "logits": chunk * rows * (4 + u.compute)}


def _copies(u: Units, gathered: int, reduced: int) -> int:
    """Return the bytes of copies of parameters and gradients.

    With FSDP: `gathered` elements, and a unit's gradients of `reduced` elements, before and
    during reduction. With offload also a unit's shard on its way from the host, and its
    gradient on its way back (on a single rank, sent from a copy). Without FSDP: all
    parameters, if the compute dtype is not the stored one.
    """
    compute = u.compute
    stored = u.stored
    if not u.sharded:
        return 0 if compute == stored else u.local * compute
    copies = gathered * compute + reduced * (compute + u.reduce)
    if u.offloaded:
        moving = stored + u.reduce * (2 if u.shards == 1 else 1)
        copies += -(-max(u.gathered) // u.shards) * moving
    return copies


def checkpointings(model: ModelConfig) -> list[list[ActivationCheckpoint]]:
    """Return the kinds of activation checkpointing that differ for this model, in groups.

    Each group begins with the one that keeps most and recomputes least.
    """
    layers = len(model.layers)
    # Intervals by the number of layers that are recomputed; of equal ones the smallest
    # counts.
    every = {layers // n: n for n in range(layers, 1, -1)}
    nth = [
        ActivationCheckpoint(mode="selective", selective_ac_option=str(n)) for n in every.values()
    ]
    by_op = ("selective", "attention") if model.softmax else ("selective",)
    return [
        [ActivationCheckpoint(), *nth, ActivationCheckpoint(mode="full")],
        *([ActivationCheckpoint(mode=mode)] for mode in by_op),
    ]
