"""The subject of proofs: the run's model, some of its streams, its degrees.

The model is cut to one period of its layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_linear.config import Config, Model, Parallelism, check_config
from titan_linear.data import IGNORE, Batch, Stream, StreamLoader, Streams, Tokenizer
from titan_linear.data.corpus.tree_records import BACK, SHARE
from titan_linear.distributed.one_process import Degrees
from titan_linear.distributed.parallelize import cp_method
from titan_linear.distributed.process import own_device
from titan_linear.losses import LossFunction, build_loss
from titan_linear.models.config import MixerOptions, ModelConfig, MoEConfig, mixers_of
from titan_linear.models.decoder import Decoder
from titan_linear.models.draws import generator
from titan_linear.models.init import count_parameters, initialise
from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.run.build import DTYPES, allocated, implementations
from titan_linear.run.data import RunData, tokens_of
from titan_linear.run.model_checks import check_float8, check_float8_device, check_splits
from titan_linear.run.origin import Origin

# Least number of tokens of a stream.
LENGTH = {"cpu": 256, "cuda": 2048}
# With this many parameters, a few float64 passes take seconds on two cores.
CPU_PARAMETERS = 4_000_000
# With this many parameters, frozen ones included, drawing and copying them takes seconds.
MOST_PARAMETERS = {"cpu": 64_000_000, "cuda": 1_000_000_000}
# Streams per data-parallel rank. Of all streams, every second one is cut into more
# documents than the corpus has.
STREAMS = 2
# The most ranks in one process.
MOST_RANKS = 64
# Share of the free memory that proofs may use.
ROOM = 0.6


@dataclass(frozen=True)
class ProofSubject:
    # The run's configuration, with shorter streams, and the run's own.
    config: Config
    run: Config
    model: ModelConfig
    degrees: Degrees
    tokenizer: Tokenizer
    streams: Streams
    device: torch.device
    # Lines that describe how the subject differs from the run.
    said: tuple[str, ...]
    # Batches are of prefix trees, if streams are. Otherwise their nodes are documents.
    on_trees: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype of the run."""
        return DTYPES[self.config.training.mixed_precision_param]

    @property
    def loss(self) -> LossFunction:
        return build_loss(self.config.loss.name, self.config.objective)

    @cached_property
    def in_float64(self) -> ProofSubject:
        """Return the subject computed exactly: by PyTorch's operations, uncompiled.

        Kernels do not take float64.
        """
        types = (
            "training.dtype",
            "training.mixed_precision_param",
            "training.mixed_precision_reduce",
        )
        more = dict.fromkeys(types, "float64") | {"model.impl": "torch", "compile.enable": False}
        return replace(self, config=self.config.changed(more))

    @property
    def in_each_dtype(self) -> list[ProofSubject]:
        """Return the subject in float64 and, if it differs, in the run's dtype."""
        return [self.in_float64, *([self] if self.dtype != torch.float64 else [])]

    @cached_property
    def batch(self) -> Batch:
        """Return all streams of a step, as one rank would take them."""
        return next(iter(self.loader(0, 1, STREAMS * self.degrees.dp)))

    def loader(self, dp_rank: int, dp: int, local: int = STREAMS) -> Iterable[Batch]:
        """Return a data-parallel rank's batches of `local` streams, from the first step on."""
        streams = self.streams if self.on_trees else MoreDocuments(self.streams)
        step = STREAMS * self.degrees.dp
        return StreamLoader(
            streams, global_batch_size=step, local_batch_size=local, dp_rank=dp_rank, dp_degree=dp
        )

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Return the weights in float32, on the CPU.

        They are drawn as in a run, except that no two heads or channels are alike.
        """
        decoder = allocated(self.model, torch.float32, torch.device("cpu"))
        initialise(decoder, self.config.debug.seed)
        vary(decoder, self.config.debug.seed)
        return {name: p.detach() for name, p in decoder.named_parameters()}

    def whole(self, dtype: torch.dtype) -> Decoder:
        """Return the model with its parameters in `dtype`."""
        decoder = allocated(self.model, dtype, self.device)
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                p.copy_(self.weights[name])
        return decoder

    def document(self, token: int) -> str:
        """Describe the place of a token of `batch`."""
        bounds = self.batch.cu_seqlens.tolist()
        seq_len = self.config.training.seq_len
        stream = token // seq_len
        n = int(np.searchsorted(bounds, token, side="right")) - 1
        first = int(np.searchsorted(bounds, stream * seq_len, side="right")) - 1
        return f"stream {stream}, document {n - first}, token {token - bounds[n]}"

    def layer(self, i: int) -> str:
        return f"layer {i} ({'mtp ' * (i >= self.model.num_layers)}{self.model.layers[i].name})"


@torch.no_grad()
def vary(decoder: Decoder, seed: int) -> None:
    """Add noise to parameters that a run draws alike for all heads or channels.

    They are gates, norms, biases, and adapters' B.
    """
    for name, p in decoder.named_parameters():
        if p.dim() == 1 or name.endswith("lora_B"):
            p += torch.randn(p.shape, generator=generator(seed, "proof", name)) / 4


class MoreDocuments:
    """Streams of which every second one is cut into more documents than the corpus has
    there.

    The further documents have 5 tokens, more than half of the stream, 1 token, 2 tokens,
    and the rest. A very short stream gets only the ones that it has room for. Nodes of
    prefix trees are documents.
    """

    def __init__(self, streams: Streams):
        self.streams = streams

    def __getitem__(self, i: int) -> Stream:
        s = self.streams[i]
        T = len(s.tokens)
        # New boundaries between documents; labels do not cross them.
        more = [5, 5 * T // 8 + 1, 5 * T // 8 + 2, 5 * T // 8 + 4] if i % STREAMS else []
        edges = np.unique([*s.cu_seqlens, *(edge for edge in more if edge < T)])
        labels = s.labels.copy()
        positions = np.concatenate([np.arange(b - a) for a, b in pairwise(edges)])
        labels[edges[1:-1] - 1] = IGNORE
        of_labels = ((name, x) for name, x in s.columns.items() if name not in (BACK, SHARE))
        columns = {name: (x.T * (labels != IGNORE)).T for name, x in of_labels}
        return Stream(s.tokens, labels, edges.astype(np.int32), positions, columns)


# --- From a configuration -----------------------------------------------------------------


def subject_of(config: Config) -> ProofSubject:
    """Return the subject of a run's configuration, cut to what this machine can examine.

    Raises:
        ValueError: the run could not start; a corpus of less than a step; no memory for a
            layer.
    """
    # Check the run as the launcher does.
    p = config.parallelism
    t = config.training
    device = own_device()
    processes = _processes(p)
    check_config(config, processes)
    # With one token, softmax attention's gradients are 0, and no error is a share of them.
    if t.seq_len == 1:
        raise ValueError("training.seq_len = 1: streams of one token prove nothing; use 2 or more")
    origin = Origin.of(config)
    tokenizer = origin.tokenizer
    full = origin.model
    check_splits(full, config.model, p)
    check_float8(full, config.model, config.float8)
    check_float8_device(config.float8, t.mixed_precision_param)
    implementations(config, full, device)
    # Cut the degrees, the layers, the widths and the streams.
    data = RunData(config, tokenizer)
    trees = any(BACK in corpus.columns for corpus in data.corpora())
    degrees = _degrees(p, processes)
    model, factor = fitting(_one_period(full), config.model, p, degrees, device)
    seq_len = t.seq_len if trees or data.loss.group else _length(t.seq_len, p, device)
    dp = processes // p.copies
    layers = full.num_layers
    # Lines for the report, each with whether it applies.
    said = {
        f"dp {dp} → {degrees.dp}": dp != degrees.dp,
        f"ep {p.expert_parallel_degree} → {degrees.ep}": degrees.ep != p.expert_parallel_degree,
        f"layers {layers} → {model.num_layers}, one period of their pattern": layers
        > model.num_layers,
        f"widths / {factor}: dim {full.dim} → {model.dim}": factor > 1,
        f"training.seq_len {t.seq_len} → {seq_len}": seq_len != t.seq_len,
        "training.seq_len_schedule left out": t.seq_len_schedule,
        "adapter.targets → all": model.adapter != full.adapter,
        "compile.enable true → false, but in the run's own type": config.compile.enable,
        "float8.enable true → false, but for its products by themselves": config.float8.enable,
    }
    # Build the streams of the shorter configuration.
    cut = config.changed(
        {
            "float8.enable": False,
            "training.seq_len": seq_len,
            "training.seq_len_schedule": [],
            "training.loss_chunk_size": min(t.loss_chunk_size or seq_len, seq_len // 2 + 1),
        },
    )
    streams, _ = RunData(cut, tokenizer).streams(None)
    data.check_size(tokens_of(streams))
    applies = tuple(line for line, holds in said.items() if holds)
    return ProofSubject(cut, config, model, degrees, tokenizer, streams, device, applies)


def _processes(p: Parallelism) -> int:
    """Return the number of processes.

    It is torchrun's, else NGPU, else the fewest that the degrees allow.
    """
    asked = os.environ.get("WORLD_SIZE", os.environ.get("NGPU", ""))
    if asked.isdecimal() and int(asked):
        return int(asked)
    return p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1) * p.copies


def _degrees(p: Parallelism, processes: int) -> Degrees:
    """Return the run's degrees, with at most two data-parallel ranks: all of them do the
    same.
    """
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    dp = processes // p.copies
    if (
        dp == 1
        and p.data_parallel_shard_degree == -1
        and not {"NGPU", "WORLD_SIZE"} & os.environ.keys()
    ):
        # -1 stands for the rest of the GPUs, whose number is not known.
        dp = 2
    dp = min(dp, 2, max(MOST_RANKS // p.copies, 1))
    return Degrees(dp, cp, tp, math.gcd(p.expert_parallel_degree, dp * cp))


def _one_period(model: ModelConfig) -> ModelConfig:
    """Return the first layers, until their pattern repeats."""
    layers = replace(model, mtp_layers=0).layers
    n = next(
        n
        for n in range(1, len(layers) + 1)
        if all(layers[i] == layers[i % n] for i in range(len(layers)))
    )
    # Without a period, take layers until every kind has occurred.
    if n == len(layers):
        n = max(layers.index(kind) for kind in set(layers)) + 1
    cut = replace(model.first_layers(n), mtp_layers=model.mtp_layers)
    if count_parameters(cut):
        return cut
    assert model.adapter
    # The run's adapters are all in later layers, so adapt every layer that is left.
    return replace(cut, adapter=replace(model.adapter, targets=()))


def fitting(
    model: ModelConfig, keys: Model, p: Parallelism, degrees: Degrees, device: torch.device
) -> tuple[ModelConfig, int]:
    """Return the model, or a narrower one that fits this device, and the divisor.

    The device must hold the copies that proofs need.
    """
    most = CPU_PARAMETERS
    if device.type == "cuda":
        # These are mostly gradients.
        most = torch.cuda.mem_get_info(device)[0] * ROOM / (24 + 8 * degrees.ranks)
    thinner, factor = narrowed(model, p, most, MOST_PARAMETERS[device.type])
    if device.type == "cuda" and (least := count_parameters(thinner)) > most:
        raise ValueError(
            f"{keys.preset}: this device has room for {most:,.0f} parameters of the model with {degrees.ranks} "
            f"ranks, and the narrowest, of {model.num_layers} layers, has {least:,}; take a larger one, or a smaller "
            "vocabulary or degree"
        )
    return thinner, factor


def narrowed(
    model: ModelConfig, p: Parallelism, trained: float, total: float = math.inf
) -> tuple[ModelConfig, int]:
    """Return the model, narrowed until it is small enough, and the divisor.

    It has then a dim of at most 128, or at most this many trained parameters and, together
    with frozen ones, at most `total`.
    """
    for factor in (1, 2, 4, 8, 16, 32):
        thinner = _thinner(model, factor, p)
        fits = count_parameters(thinner) <= trained and count_parameters(thinner.base) <= total
        if fits or thinner.dim <= 128:
            break
    return thinner, factor


def _thinner(model: ModelConfig, factor: int, p: Parallelism) -> ModelConfig:
    tp = p.tensor_parallel_degree
    ep = p.expert_parallel_degree
    if factor == 1:
        return model
    moe = model.moe and _fewer_experts(model.moe, factor, tp, ep)
    # Entries without mixers stay.
    pattern = []
    for entry in model.pattern:
        fewer = tuple(_fewer_heads(mixer, factor, p) for mixer in mixers_of(entry))
        pattern.append(fewer or entry)
    return replace(
        model,
        dim=_divided(model.dim, factor, 2),
        hidden_dim=_divided(model.hidden_dim, factor, tp),
        moe=moe,
        pattern=tuple(pattern),
    )


def _divided(count: int, factor: int, multiple: int) -> int:
    return max(count // factor // multiple, 1) * multiple


def _fewer_experts(moe: MoEConfig, factor: int, tp: int, ep: int) -> MoEConfig:
    fewer = replace(moe, num_experts=moe.num_experts // factor)
    uneven = moe.num_experts % factor or fewer.num_experts % ep
    if uneven or fewer.num_experts < 2 * moe.top_k or fewer.contradiction:
        fewer = moe
    shared = moe.shared_hidden_dim and _divided(moe.shared_hidden_dim, factor, tp)
    return replace(fewer, hidden_dim=_divided(moe.hidden_dim, factor, tp), shared_hidden_dim=shared)


def _fewer_heads(mixer: Any, factor: int, p: Parallelism) -> MixerOptions:
    """Keep a fraction of all heads, at least four, if ranks can still split them.

    Heads stay as wide.
    """
    names = ("heads", "v_heads", "kv_heads", "groups")
    kinds = {name: count for name in names if (count := getattr(mixer, name, 1)) > 1}
    # Try the largest divisor first.
    while factor > 1:
        fewer = replace(mixer, **{name: count // factor for name, count in kinds.items()})
        whole = (
            all(count % factor == 0 for count in kinds.values()) and getattr(fewer, "heads", 4) >= 4
        )
        splits = all(count % p.tensor_parallel_degree == 0 for count in fewer.head_counts.values())
        over_heads = mixer.over_heads or cp_method(mixer, p) in ("ulysses", "ulysses+ring")
        if whole and splits and not (over_heads and fewer.indivisible_heads(p.copies)):
            return fewer
        factor //= 2
    return mixer


def _length(seq_len: int, p: Parallelism, device: torch.device) -> int:
    """Return the tokens per stream.

    Every fragment gets more than a chunk, but the stream is not longer than the run's.
    """
    unit = math.lcm(p.fragments, p.copies)
    length = max(LENGTH[device.type], p.fragments * (CHUNK + CHUNK // 2))
    return min(-(-length // unit) * unit, seq_len)
