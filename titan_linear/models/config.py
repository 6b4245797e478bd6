"""What a model is: the numbers from which `Decoder` builds its layers."""

from __future__ import annotations

import hashlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from torch import nn

from titan_linear.ops.layout.boundaries import CHUNK


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the SwiGLU (see `models/moe.py`)."""

    num_experts: int
    top_k: int  # experts per token
    hidden_dim: int  # of each expert's SwiGLU
    shared_hidden_dim: int = 0  # of the SwiGLU that every token goes through; 0: none
    shared_gate: bool = False  # multiply the shared expert's output by sigmoid(a linear of x)
    score: Literal["softmax", "sigmoid"] = "softmax"  # how router logits become scores
    normalise: bool = True  # divide a token's weights by their sum
    scale: float = 1.0  # factor on the weights
    selection_bias: bool = False  # added to scores to choose experts, not to weigh them (DeepSeek-V3, section 2.1.2)
    groups: int = 1  # number of groups; experts are chosen from the best `top_groups` of them
    top_groups: int = 1
    balance_coefficient: float = 0.0  # of the load-balance loss
    bias_update_rate: float = 0.0  # change of that bias per step, towards equal loads; 0: it stays as it is

    @property
    def contradiction(self) -> str | None:
        """The numbers that contradict each other, worded for a message; None if none do."""
        if self.top_k > self.num_experts:
            return f"top_k = {self.top_k}, more than num_experts = {self.num_experts}"
        if self.groups == 1:
            return None
        size, rest = divmod(self.num_experts, self.groups)
        if rest or size < 2:  # groups are ranked by their two best experts
            return f"num_experts = {self.num_experts} in groups = {self.groups}, which must be of one size, two or more"
        if self.top_groups > self.groups:
            return f"top_groups = {self.top_groups}, more than groups = {self.groups}"
        if self.top_k > self.top_groups * size:
            return f"top_k = {self.top_k}, more than the experts of top_groups = {self.top_groups} groups of {size}"
        return None


class Documents(NamedTuple):
    """Sums over documents, so that the values of several batches add up. They count whole documents: how a stream is
    cut among ranks does not change them."""

    tokens: int
    pairs: int  # (query, key) pairs that the causal mask leaves: n(n + 1)/2 for a document of n tokens
    chunk_pairs: int  # pairs of tokens in one chunk of the delta rule: n² for a chunk of n <= 64 tokens

    @classmethod
    def of(cls, cu_seqlens: np.ndarray) -> Documents:
        """cu_seqlens: [N+1] int boundaries, on the host."""
        n = np.diff(cu_seqlens.astype(np.int64))
        last = n % CHUNK
        chunk_pairs = (n - last) * CHUNK + last * last
        return cls(int(n.sum()), int((n * (n + 1) // 2).sum()), int(chunk_pairs.sum()))


class MixerOptions(ABC):
    """The options from which a mixer of one kind is built: a frozen dataclass in the mixer's file (models/mixers/)."""

    name: ClassVar[str]  # its key in MIXERS (models/mixers/__init__.py)
    linear: ClassVar[bool] = False  # whether it is a recurrence over the tokens; else softmax over them
    over_heads: ClassVar[bool] = False  # whether ranks of cp always share its heads (`tokens_to_heads`)
    growing: ClassVar[tuple[str, ...]] = ()  # tensors of its cache that are [B, tokens, ...]; others have a fixed size

    @abstractmethod
    def build(self, config: ModelConfig) -> nn.Module:
        """Build the module: forward(x [B, T, dim], plan, cache) -> [B, T, dim]. It may have the attributes

        initial: parameter -> its Draw, where it is not normal
        kept_whole: parameters that FSDP neither shards nor casts
        split: parameter -> the dimension along which each rank of tensor parallelism has an equal part; a rank then
            computes its heads, and its part of the sum that is the output

        What telemetry shows of it (telemetry.py) comes from

        watch(x [1, T, dim], window) -> name -> (numerator [heads], denominator [heads]) of a mean by head; x has all
            of the rank's tokens if `window.fragments` is given, and at least the window's W otherwise."""

    @property
    @abstractmethod
    def ops(self) -> dict[str, dict[str, int]]:
        """The ops of titan_linear.ops that the mixer calls, with the sizes on which their implementations depend."""

    @property
    def rotary(self) -> tuple[float, int] | None:
        """(theta, rotated channels of each head); None: no positions."""
        return None

    @property
    def contradiction(self) -> str | None:
        """The numbers that contradict each other or the op, worded for a message; None if none do."""
        return None

    @abstractmethod
    def flops(self, dim: int, documents: Documents) -> int:
        """FLOPs of the products in forward, in a model of width `dim` (see titan_linear/observe/flops.py)."""

    @property
    @abstractmethod
    def head_counts(self) -> dict[str, int]:
        """What `split` splits, by its name in messages: each count must be a multiple of the tensor-parallel degree."""

    def indivisible_heads(self, ranks: int) -> str | None:
        """The heads that an all-to-all cannot split among `ranks` ranks, worded for a message; None if it can."""
        return next((f"{count} {what}" for what, count in self.head_counts.items() if count % ranks), None)


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    dim: int
    pattern: tuple[MixerOptions, ...]  # mixers of the first layers; further layers repeat it
    num_layers: int
    hidden_dim: int  # of SwiGLU
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()  # layers that have a SwiGLU despite `moe`
    zero_centred_norm: bool = False  # norms multiply by (1 + weight), except linear layers' output norm
    post_norm: tuple[str, ...] = ()  # mixers whose blocks norm the outputs of mixer and MLP, not their inputs
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02

    @property
    def layers(self) -> tuple[MixerOptions, ...]:
        """The mixer of every layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    def ops(self, tp: int = 1) -> dict[str, dict[str, int]]:
        """The ops that each rank of tensor parallelism calls, with the sizes on which their implementations depend."""
        ops = {op: dims for mixer in dict.fromkeys(self.layers) for op, dims in mixer.ops.items()}
        experts = [self.has_experts(layer) for layer in range(self.num_layers)]
        if not all(experts) or self.moe.shared_hidden_dim:
            ops["swiglu"] = {}
        if any(experts):
            ops["grouped_linear"] = {"I": self.moe.hidden_dim // tp, "O": self.dim}  # gate and up: from dim to 2 I
        return {**ops, "cross_entropy": {}}

    def first_layers(self, n: int | None) -> ModelConfig:
        """The same model with its first n layers only; None: with all of them."""
        n = self.num_layers if n is None else min(n, self.num_layers)
        return replace(self, num_layers=n, pattern=self.layers[:n])

    @property
    def split_counts(self) -> list[tuple[str, int]]:
        """Everything that tensor parallelism splits: (its name in messages, its number)."""
        mixers = dict.fromkeys(self.layers)
        counts = [(f"{what} of {m.name}", count) for m in mixers for what, count in m.head_counts.items()]
        if not all(map(self.has_experts, range(self.num_layers))):
            counts.append(("hidden channels", self.hidden_dim))
        if self.moe is not None:
            counts.append(("hidden channels of each expert", self.moe.hidden_dim))
            if self.moe.shared_hidden_dim:
                counts.append(("hidden channels of the shared expert", self.moe.shared_hidden_dim))
        return [*counts, ("rows of the vocabulary (model.vocab_size)", self.vocab_size)]

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers


OR_NONE = ("hidden_dim", "shared_hidden_dim")  # may be 0: there is no such MLP


def mistake(model: ModelConfig) -> str | None:
    """What no model can have, worded for a message: a value that is not of its option's type or is too small, or values
    that contradict each other; None if there is nothing."""
    parts = (*([] if model.moe is None else [model.moe]), *model.pattern)
    for part in (model, *parts):
        hints, owner = get_type_hints(type(part)), getattr(part, "name", "moe" if part is model.moe else "the model's")
        for name, value in vars(part).items():
            if not isinstance(value, tuple) and not _fits(value, hints[name]):
                return f"{owner} {name} = {value!r}, which must be {_words(hints[name])}"
            if type(value) in (int, float) and not value >= _least(name, hints[name]):
                return f"{owner} {name} = {value!r}, which is too small"
        if (rotary := getattr(part, "rotary", None)) and (rotary[1] % 2 or rotary[1] > part.head_dim):
            return (
                f"{owner} {rotary[1]} channels to rotate, which must be even, for they go in pairs, and at most a "
                f"head's {part.head_dim}"
            )
    return next((part.contradiction for part in parts if part.contradiction), None)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of an option's type: a number without a decimal point may stand for a float."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, kind) for kind in get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)


def _words(hint: Any) -> str:
    """An option's type, for people to read."""
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_args(hint):
        return " | ".join(map(_words, get_args(hint)))
    return "None" if hint is type(None) else hint.__name__


def _least(name: str, hint: Any) -> float:
    """The least value of a size, of a divisor, of any other number."""
    if hint is int:
        return 0 if name in OR_NONE else 1
    return sys.float_info.min if name.endswith(("eps", "theta")) else -math.inf if name == "lower_bound" else 0


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[object, object]]:
    """Where two models differ as functions: option -> (ours, theirs). Options of training do not count."""
    kinds = [tuple(mixer.name for mixer in model.layers) for model in (ours, theirs)]
    pairs = [("", *({**_without_mixers(model), "layers": kind} for model, kind in zip((ours, theirs), kinds)))]
    if kinds[0] == kinds[1]:
        pairs += [(f"{a.name}.", vars(a), vars(b)) for a, b in zip(ours.layers, theirs.layers)]
    found: dict[str, tuple[object, object]] = {}
    for prefix, a, b in pairs:
        for option in a:
            if a[option] != b[option]:
                found.setdefault(prefix + option, (a[option], b[option]))
    return found


def fingerprint(model: ModelConfig) -> str:
    """A hash of what the model computes: two models with the same hash have no `differences`. An option that a later
    version adds, with a default that changes nothing, leaves the hash as it is."""
    mixers = [(mixer.name, _chosen(mixer, vars(mixer))) for mixer in model.layers]
    moe = model.moe and _chosen(model.moe, vars(_without_mixers(model)["moe"]))
    rest = {name: value for name, value in _chosen(model, _without_mixers(model)).items() if name != "moe"}
    return hashlib.sha256(repr((rest, moe, mixers)).encode()).hexdigest()[:16]


def _chosen(options: object, values: Mapping[str, object]) -> dict[str, object]:
    """The values that are not defaults, numbers as floats: JSON may have 1 for 1.0."""
    defaults = {field.name: field.default for field in fields(options)}
    numbers = {name: float(x) if type(x) in (int, float) else x for name, x in values.items() if x != defaults[name]}
    return dict(sorted(numbers.items()))


def _without_mixers(model: ModelConfig) -> dict[str, object]:
    moe = model.moe and replace(model.moe, balance_coefficient=0.0, bias_update_rate=0.0)
    return vars(replace(model, pattern=(), init_std=0.0, moe=moe))
