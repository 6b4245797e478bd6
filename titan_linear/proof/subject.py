"""What is examined: the run's model cut to one period of its layers, a few of its streams, its degrees."""

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

from titan_linear.config import Config, changed, check_config
from titan_linear.data import IGNORE, Batch, Stream, StreamLoader, Streams, Tokenizer
from titan_linear.data.corpus.trees import BACK, SHARE
from titan_linear.distributed.one_process import Degrees
from titan_linear.distributed.parallelize import cp_method
from titan_linear.distributed.process import own_device
from titan_linear.losses import build_loss
from titan_linear.models.config import Entry, MixerOptions, ModelConfig, MoEConfig, mixers_of
from titan_linear.models.decoder import Decoder
from titan_linear.models.draws import generator
from titan_linear.models.init import count_parameters, initialise
from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.run.build import (
    DTYPES,
    allocated,
    implementations,
    model_config,
    open_tokenizer,
    unallocated,
)
from titan_linear.run.data import build_streams, check_size, open_corpora, tokens_of
from titan_linear.run.preflight import check_float8, check_float8_device, check_splits

LENGTH = {"cpu": 256, "cuda": 2048}  # tokens of a stream, at least
CPU_PARAMETERS = 4_000_000  # with this many, a few float64 passes take two cores seconds
# per data-parallel rank; every second one of all is cut into more documents than the corpus has
STREAMS = 2
MOST_RANKS = 64  # in one process
ROOM = 0.6  # share of the free memory that proofs may use


@dataclass(frozen=True)
class Subject:
    config: Config  # the run's, with shorter streams
    run: Config  # the run's
    model: ModelConfig
    degrees: Degrees
    tokenizer: Tokenizer
    streams: Streams
    device: torch.device
    said: tuple[str, ...]  # how it differs from the run
    # batches are of prefix trees, if streams are; else their nodes are documents
    on_trees: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of the run."""
        return DTYPES[self.config.training.mixed_precision_param]

    @property
    def in_float64(self) -> Subject:
        """The same, computed exactly: by PyTorch's operations, uncompiled."""
        types = (
            "training.dtype",
            "training.mixed_precision_param",
            "training.mixed_precision_reduce",
        )
        more = dict.fromkeys(types, "float64") | {"model.impl": "torch", "compile.enable": False}
        return replace(self, config=changed(self.config, more))

    @cached_property
    def batch(self) -> Batch:
        """All streams of a step, as one rank would take them."""
        return next(iter(self.loader(0, 1, STREAMS * self.degrees.dp)))

    def loader(self, dp_rank: int, dp: int, local: int = STREAMS) -> Iterable[Batch]:
        """A data-parallel rank's batches of `local` streams, from the first step on."""
        streams = self.streams if self.on_trees else MoreDocuments(self.streams)
        step = STREAMS * self.degrees.dp
        return StreamLoader(
            streams, global_batch_size=step, local_batch_size=local, dp_rank=dp_rank, dp_degree=dp
        )

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """float32, on the CPU: as a run draws them, except that no two heads or channels are alike."""
        decoder = allocated(self.model, torch.float32, torch.device("cpu"))
        initialise(decoder, self.config.debug.seed)
        vary(decoder, self.config.debug.seed)
        return {name: p.detach() for name, p in decoder.named_parameters()}

    def whole(self, dtype: torch.dtype) -> Decoder:
        """The model, its parameters in `dtype`."""
        decoder = allocated(self.model, dtype, self.device)
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                p.copy_(self.weights[name])
        return decoder

    def document(self, token: int) -> str:
        """Say where a token of `batch` is."""
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
    """Add noise to what a run draws alike for all heads or channels: gates, norms, biases, adapters' B."""
    for name, p in decoder.named_parameters():
        if p.dim() == 1 or name.endswith("lora_B"):
            p += torch.randn(p.shape, generator=generator(seed, "proof", name)) / 4


class MoreDocuments:
    """Streams of which every second one is cut into more documents than the corpus has there: one of 5 tokens, one that
    spans more than half of the stream, one of 1 token, one of 2, and the rest; a very short stream gets only those that
    it has room for. Nodes of prefix trees are documents."""

    def __init__(self, streams: Streams):
        self.streams = streams

    def __getitem__(self, i: int) -> Stream:
        s = self.streams[i]
        T = len(s.tokens)
        more = [5, 5 * T // 8 + 1, 5 * T // 8 + 2, 5 * T // 8 + 4] if i % STREAMS else []
        edges = np.unique([*s.cu_seqlens, *(edge for edge in more if edge < T)])
        labels = s.labels.copy()
        positions = np.concatenate([np.arange(b - a) for a, b in pairwise(edges)])
        labels[edges[1:-1] - 1] = IGNORE
        of_labels = ((name, x) for name, x in s.columns.items() if name not in (BACK, SHARE))
        columns = {name: (x.T * (labels != IGNORE)).T for name, x in of_labels}
        return Stream(s.tokens, labels, edges.astype(np.int32), positions, columns)


# --- From a configuration --------------------------------------------------------------------------------------------


def subject_of(config: Config) -> Subject:
    """The subject of a run's configuration, cut to what can be examined on this machine.

    Raises:
        ValueError: the run could not start; a corpus of less than a step; no memory for a layer.
    """
    p, t = config.parallelism, config.training
    device = own_device()
    processes = _processes(config)
    check_config(config, processes)
    if t.seq_len == 1:  # softmax attention's gradients are 0 then, and no error is a share of them
        raise ValueError("training.seq_len = 1: streams of one token prove nothing; use 2 or more")
    tokenizer = open_tokenizer(config)
    full = model_config(config, tokenizer)
    check_splits(full, config)
    check_float8(full, config)
    check_float8_device(config)
    implementations(config, full, device)
    trees = any(BACK in corpus.columns for corpus in open_corpora(config, tokenizer))
    degrees = _degrees(config, processes)
    model, factor = fitting(_one_period(full), config, degrees, device)
    seq_len = t.seq_len if trees or build_loss(config).group else _length(config, device)
    dp = processes // (p.context_parallel_degree * p.tensor_parallel_degree)
    layers = full.num_layers
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
    cut = changed(
        config,
        {
            "float8.enable": False,
            "training.seq_len": seq_len,
            "training.seq_len_schedule": [],
            "training.loss_chunk_size": min(t.loss_chunk_size or seq_len, seq_len // 2 + 1),
        },
    )
    streams, _ = build_streams(cut, tokenizer, None)
    check_size(tokens_of(streams), config)
    applies = tuple(line for line, holds in said.items() if holds)
    return Subject(cut, config, model, degrees, tokenizer, streams, device, applies)


def _processes(config: Config) -> int:
    """The number of processes: torchrun's, else NGPU, else the fewest that the degrees allow."""
    asked = os.environ.get("WORLD_SIZE", os.environ.get("NGPU", ""))
    if asked.isdecimal() and int(asked):
        return int(asked)
    p = config.parallelism
    dp = p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1)
    return dp * p.context_parallel_degree * p.tensor_parallel_degree


def _degrees(config: Config, processes: int) -> Degrees:
    """The run's degrees, with at most two data-parallel ranks, since these all do the same."""
    p = config.parallelism
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    dp = processes // (cp * tp)
    if (
        dp == 1
        and p.data_parallel_shard_degree == -1
        and not {"NGPU", "WORLD_SIZE"} & os.environ.keys()
    ):
        dp = 2  # -1 is the rest of the GPUs, whose number is not known
    dp = min(dp, 2, max(MOST_RANKS // (cp * tp), 1))
    return Degrees(dp, cp, tp, math.gcd(p.expert_parallel_degree, dp * cp))


def _one_period(model: ModelConfig) -> ModelConfig:
    """The first layers, until their pattern repeats."""
    layers = replace(model, mtp_layers=0).layers
    n = next(
        n
        for n in range(1, len(layers) + 1)
        if all(layers[i] == layers[i % n] for i in range(len(layers)))
    )
    if n == len(layers):  # no period: until every kind has occurred
        n = max(layers.index(kind) for kind in set(layers)) + 1
    cut = replace(model.first_layers(n), mtp_layers=model.mtp_layers)
    if model.adapter and not any(
        p.requires_grad for p in unallocated(cut, torch.float32).parameters()
    ):
        # the run's are of later layers
        return replace(cut, adapter=replace(model.adapter, targets=()))
    return cut


def fitting(
    model: ModelConfig, config: Config, degrees: Degrees, device: torch.device
) -> tuple[ModelConfig, int]:
    """The model, or a narrower one of which this device holds the copies that proofs need; and the divisor."""
    most = CPU_PARAMETERS
    if device.type == "cuda":
        # gradients, mostly
        most = torch.cuda.mem_get_info(device)[0] * ROOM / (24 + 8 * degrees.ranks)
    thinner, factor = narrowed(model, config, most)
    if device.type == "cuda" and (least := count_parameters(thinner)) > most:
        raise ValueError(
            f"model.name = {config.model.name!r}, model.flavor = {config.model.flavor!r}: this device has room for "
            f"{most:,.0f} parameters of the model with {degrees.ranks} ranks, and the narrowest, of {model.num_layers} "
            f"layers, has {least:,}; take a larger one, or a smaller vocabulary or degree"
        )
    return thinner, factor


def narrowed(model: ModelConfig, config: Config, most: float) -> tuple[ModelConfig, int]:
    """The model, narrowed until it has at most `most` parameters or a dim of at most 128; and the divisor."""
    for factor in (1, 2, 4, 8, 16, 32):
        thinner = _thinner(model, factor, config)
        if count_parameters(thinner) <= most or thinner.dim <= 128:
            break
    return thinner, factor


def _thinner(model: ModelConfig, factor: int, config: Config) -> ModelConfig:
    p = config.parallelism
    tp = p.tensor_parallel_degree
    ep = p.expert_parallel_degree
    if factor == 1:
        return model
    moe = model.moe and _fewer_experts(model.moe, factor, tp, ep)
    return replace(
        model,
        dim=_divided(model.dim, factor, 2),
        hidden_dim=_divided(model.hidden_dim, factor, tp),
        moe=moe,
        pattern=tuple(_thinner_entry(entry, factor, config) for entry in model.pattern),
    )


def _thinner_entry(entry: Entry, factor: int, config: Config) -> Entry:
    return tuple(_fewer_heads(mixer, factor, config) for mixer in mixers_of(entry)) or entry


def _divided(count: int, factor: int, multiple: int) -> int:
    return max(count // factor // multiple, 1) * multiple


def _fewer_experts(moe: MoEConfig, factor: int, tp: int, ep: int) -> MoEConfig:
    fewer = replace(moe, num_experts=moe.num_experts // factor)
    uneven = moe.num_experts % factor or fewer.num_experts % ep
    if uneven or fewer.num_experts < 2 * moe.top_k or fewer.contradiction:
        fewer = moe
    shared = moe.shared_hidden_dim and _divided(moe.shared_hidden_dim, factor, tp)
    return replace(fewer, hidden_dim=_divided(moe.hidden_dim, factor, tp), shared_hidden_dim=shared)


def _fewer_heads(mixer: Any, factor: int, config: Config) -> MixerOptions:
    """Keep a fraction of all heads, at least four, if ranks can still split them; heads stay as wide."""
    p = config.parallelism
    names = ("heads", "v_heads", "kv_heads", "groups")
    kinds = {name: count for name in names if (count := getattr(mixer, name, 1)) > 1}
    while factor > 1:
        fewer = replace(mixer, **{name: count // factor for name, count in kinds.items()})
        whole = all(count % factor == 0 for count in kinds.values()) and fewer.heads >= 4
        splits = all(count % p.tensor_parallel_degree == 0 for count in fewer.head_counts.values())
        ranks = p.context_parallel_degree * p.tensor_parallel_degree
        over_heads = mixer.over_heads or cp_method(mixer, p) in ("ulysses", "ulysses+ring")
        if whole and splits and not (over_heads and fewer.indivisible_heads(ranks)):
            return fewer
        factor //= 2
    return mixer


def _length(config: Config, device: torch.device) -> int:
    """Tokens per stream: enough for every fragment to have more than a chunk, and no more than the run's."""
    p, t = config.parallelism, config.training
    blocks = p.context_parallel_degree * (2 if p.context_parallel_layout == "zigzag" else 1)
    unit = math.lcm(blocks, p.context_parallel_degree * p.tensor_parallel_degree)
    length = max(LENGTH[device.type], blocks * (CHUNK + CHUNK // 2))
    return min(-(-length // unit) * unit, t.seq_len)
