"""What a model is: the numbers from which `Decoder` builds its layers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import nn

from titan_linear.models.layers import Above0, AtLeast0, OpDims, Size, SizeOr0
from titan_linear.models.mlps import Dense, MLPOptions, MoEConfig
from titan_linear.models.mlps.dense import DenseActivation
from titan_linear.models.rope import Rotary
from titan_linear.ops.layout.boundaries import CHUNK


class Documents(NamedTuple):
    """Sums over documents, so that the values of several batches add up. They count whole documents: how a stream is
    cut among ranks does not change them."""

    tokens: int
    # (query, key) pairs that the causal mask leaves: n(n + 1)/2 for a document of n tokens
    pairs: int
    # pairs of tokens in one chunk of the delta rule: n² for a chunk of n <= 64 tokens
    chunk_pairs: int

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, above: np.ndarray | int = 0) -> Documents:
        """cu_seqlens: [N+1] int boundaries, on the host. above: tokens before each document that it continues."""
        n = np.diff(cu_seqlens.astype(np.int64))
        last = n % CHUNK
        chunk_pairs = (n - last) * CHUNK + last * last
        return cls(int(n.sum()), int((n * (n + 1) // 2 + n * above).sum()), int(chunk_pairs.sum()))


class MixerOptions(ABC):
    """The options from which a mixer of one kind is built: a frozen dataclass in the mixer's file (models/mixers/)."""

    name: ClassVar[str]  # its key in MIXERS (models/mixers/__init__.py)
    module: ClassVar[Callable[..., nn.Module]]  # of (options, model, layer's number)
    # whether it is a recurrence over the tokens; else softmax over them
    linear: ClassVar[bool] = False
    # whether ranks of cp always share its heads (`tokens_to_heads`)
    over_heads: ClassVar[bool] = False
    # tensors of its cache that are [B, tokens, ...]; others have a fixed size
    growing: ClassVar[tuple[str, ...]] = ()

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        """Build the module of a layer: forward(x [B, T, dim], plan, cache) -> [B, T, dim]. One that `takes` values
        [B, T, takes] gets them as a fourth argument; `first` returns them in an `Output`. It may have the attributes

        initial: parameter -> its Draw, where it is not normal
        kept_whole: parameters that FSDP neither shards nor casts
        split: parameter -> the dimension along which each rank of tensor parallelism has an equal part; a rank then
            computes its heads, and its part of the sum that is the output
        float8: the products that may be in float8: of each the projections that it joins, none of them to a gate
        ranks: of a module in it with split parameters: None, or the ranks that have the other parts

        What telemetry shows of it (telemetry.py) comes from

        watch(x [1, T, dim], window) -> name -> (numerator [heads], denominator [heads]) of a mean by head; x has all
            of the rank's tokens if `window.fragments` is given, and at least the window's W otherwise."""
        return self.module(self, config, layer)

    @property
    @abstractmethod
    def ops(self) -> OpDims:
        """What the mixer calls."""

    @property
    def first(self) -> MixerOptions:
        """What it is in the first layer of its kind."""
        return self

    @property
    def takes(self) -> int:
        """Channels of the values that it takes from the first layer of its kind, which are split by heads."""
        return 0

    @property
    def rotary(self) -> Rotary | None:
        """How each head is rotated; None: no positions."""
        return None

    @property
    def contradiction(self) -> str | None:
        """The numbers that contradict each other or the op, worded for a message; None if none do."""
        return None

    def flops(self, documents: Documents) -> int:
        """FLOPs of forward's products of tokens with tokens and with states (see titan_linear/step/flops.py)."""
        return 0

    def scan_programs(self, ranks: int) -> int | None:
        """Programs of a scan of its kernels over one entry, with the heads shared out among `ranks`; None: no scan."""
        return None

    @property
    @abstractmethod
    def head_counts(self) -> dict[str, int]:
        """What `split` splits, by its name in messages: each count must be a multiple of the tensor-parallel degree."""

    def indivisible_heads(self, ranks: int) -> str | None:
        """The heads that an all-to-all cannot split among `ranks` ranks, worded for a message; None if it can."""
        return next(
            (f"{count} {what}" for what, count in self.head_counts.items() if count % ranks), None
        )


class Layer(NamedTuple):
    """A layer's branches: mixers side by side, whose outputs add, then an MLP; or no mixers, or no MLP."""

    mixers: tuple[MixerOptions, ...]
    mlp: MLPOptions | None
    # the first layer that predicts a further token: it takes that token's embedding too
    joins: bool = False
    ends: bool = False  # the last of these: a norm follows

    @property
    def name(self) -> str:
        """Its name in a model's pattern."""
        return BESIDE.join(part.name for part in self.mixers or (self.mlp,))

    @property
    def kinds(self) -> tuple[type[MixerOptions], ...]:
        """Of its mixers."""
        return tuple(map(type, self.mixers))


MOST_LAYERS = 10_000  # families list layers one by one
BESIDE = "+"  # between the names of mixers side by side
Entry = MixerOptions | tuple[MixerOptions, ...] | Literal["mlp", "moe"]  # of a pattern


def mixers_of(entry: Entry) -> tuple[MixerOptions, ...]:
    """Those of a layer."""
    if isinstance(entry, MixerOptions):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The multipliers of muP, and those that MiniMax puts on its residuals."""

    embedding_factor: AtLeast0 = 1.0  # on the embedding's output
    residual_factor: AtLeast0 = 1.0  # on what each branch adds
    kept_factor: AtLeast0 = 1.0  # on what it adds that to
    gate_factor: AtLeast0 = 1.0  # on what gates a SwiGLU
    mlp_factor: AtLeast0 = 1.0  # on the outputs of MLPs and experts
    logits_divisor: Above0 = 1.0


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters of a frozen model (models/lora.py)."""

    rank: int
    factor: float  # on what they add
    targets: tuple[str, ...] = ()  # patterns of names of the weights; (): all
    extra: tuple[str, ...] = ()  # patterns of names of other parameters, which are trained too
    # weights that share A, being one matrix in a Hugging Face folder
    shared: tuple[tuple[str, ...], ...] = ()
    base_is_reference: bool = False  # of the loss: it computes as well, first


@dataclass(frozen=True)
class ModelConfig(Factors):
    vocab_size: Size
    dim: Size
    pattern: tuple[Entry, ...]  # of the first layers; further layers repeat it
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_dim: SizeOr0  # of MLPs; 0: there are none, except experts
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP despite `moe`
    # norms multiply by (1 + weight), except linear layers' output norm
    zero_centred_norm: bool = False
    # norms are LayerNorms with biases, one after the embedding too; else RMSNorms
    layer_norm: bool = False
    # mixers whose blocks norm the outputs of mixer and MLP, not their inputs
    post_norm: tuple[str, ...] = ()
    tie_embeddings: bool = False
    norm_eps: Above0 = 1e-5
    init_std: AtLeast0 = 0.02
    # a layer is what the pattern names; else mixers and the MLP or experts that follow them
    one_branch: bool = False
    activation: DenseActivation = "swiglu"  # of MLPs
    # branches add to the norm of the layer's input, which they have too
    normed_residual: bool = False
    # number of further tokens that more layers predict
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    mtp_weight: AtLeast0 = 0.1  # of their losses' mean (multi-token prediction)
    adapter: Adapter | None = None

    @property
    def base(self) -> ModelConfig:
        """Without adapters."""
        return replace(self, adapter=None)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What every layer is made of; after `num_layers` come those that predict further tokens."""
        trunk = tuple(
            self._layer(i, self.pattern[i % len(self.pattern)]) for i in range(self.num_layers)
        )
        return trunk + self.mtp_layers * self._predictor(trunk) if self.mtp_layers else trunk

    def _predictor(self, trunk: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """The layer that predicts one further token, or two of one branch each: with softmax, if any layer has it, and
        with experts, if there are some."""
        mixing = [layer for layer in trunk if layer.mixers]
        *_, last = [
            layer for layer in mixing if not all(mixer.linear for mixer in layer.mixers)
        ] or mixing
        mixers = tuple(mixer.first for mixer in last.mixers)  # which takes no values
        mlp = self.moe or self._dense
        if self.one_branch:
            return Layer(mixers, None, joins=True), Layer((), mlp, ends=True)
        return (Layer(mixers, mlp, joins=True, ends=True),)

    @property
    def _dense(self) -> Dense | None:
        return (
            Dense(self.hidden_dim, self.activation, self.gate_factor) if self.hidden_dim else None
        )

    def _layer(self, i: int, entry: Entry) -> Layer:
        if isinstance(entry, str):
            return Layer((), self.moe if entry == MoEConfig.name else self._dense)
        earlier = {type(mixer) for before in self.pattern[:i] for mixer in mixers_of(before)}
        mixers = tuple(
            mixer if type(mixer) in earlier else mixer.first for mixer in mixers_of(entry)
        )
        mlp = self._dense if self.moe is None or i in self.dense_layers else self.moe
        return Layer(mixers, None if self.one_branch else mlp)

    @property
    def composition(self) -> str:
        """Its numbers of layers, for people to read: 3 kda + 1 attention + 1 mtp attention."""
        counts = Counter(
            "mtp " * (i >= self.num_layers) + layer.name for i, layer in enumerate(self.layers)
        )
        return " + ".join(f"{count} {name}" for name, count in counts.items())

    @property
    def mixers(self) -> tuple[MixerOptions, ...]:
        """The different mixers, in the order of their first layers."""
        return tuple(dict.fromkeys(mixer for layer in self.layers for mixer in layer.mixers))

    @property
    def mlps(self) -> tuple[MLPOptions, ...]:
        """The different MLPs, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers if layer.mlp is not None))

    @property
    def softmax(self) -> bool:
        """Whether any layer has softmax attention."""
        return not all(mixer.linear for mixer in self.mixers)

    def ops(self, tp: int = 1) -> OpDims:
        """What each rank of tensor parallelism calls."""
        of_parts = [
            *(mixer.ops for mixer in self.mixers),
            *(mlp.ops(self.dim, tp) for mlp in self.mlps),
        ]
        return {op: dims for ops in of_parts for op, dims in ops.items()} | {"cross_entropy": {}}

    def first_layers(self, n: int) -> ModelConfig:
        """The same model with its first n layers only; those that predict further tokens need all others."""
        if n > self.num_layers:
            return self
        period = self.pattern * -(-n // len(self.pattern))
        return replace(self, num_layers=n, pattern=period[:n], mtp_layers=0)

    @property
    def split_counts(self) -> list[tuple[str, int]]:
        """Everything that tensor parallelism splits: (its name in messages, its number)."""
        counts = [
            (f"{what} of {m.name}", count)
            for m in self.mixers
            for what, count in m.head_counts.items()
        ]
        counts += [pair for mlp in self.mlps for pair in mlp.split_counts.items()]
        return [
            *dict.fromkeys(counts),
            ("rows of the vocabulary (model.vocab_size)", self.vocab_size),
        ]

    def has_experts(self, layer: int) -> bool:
        return isinstance(self.layers[layer].mlp, MoEConfig)


@cache
def _validator(kind: type) -> TypeAdapter:
    config = ConfigDict(strict=True, revalidate_instances="always", arbitrary_types_allowed=True)
    # config holds for what is in the tuple
    return TypeAdapter(GenericAlias(tuple, kind), config=config)


def mistake(model: ModelConfig) -> str | None:
    """What no model can have, worded for a message: a value of another type than its option, too small or too large, or
    values that contradict each other; None if there is nothing."""
    mixers: list[Any] = [mixer for entry in model.pattern for mixer in mixers_of(entry)]
    for part in (model, *mixers):
        owner = getattr(part, "name", "the model's")
        try:
            _validator(type(part)).validate_python((part,))
        except ValidationError as invalid:
            error = invalid.errors()[0]
            option = " ".join(map(str, error["loc"][1:]))
            return f"{owner} {option} = {error['input']!r}, which must {error['msg'].partition(' should ')[2]}"
        if (rotary := getattr(part, "rotary", None)) and (
            rotary[1] % 2 or rotary[1] > part.head_dim
        ):
            return (
                f"{owner} {rotary[1]} channels to rotate, which must be even, for they go in pairs, and at most a "
                f"head's {part.head_dim}"
            )
    for entry, sizes in ((MoEConfig.name, model.moe), (Dense.name, model.hidden_dim)):
        if entry in model.pattern and not (sizes and model.one_branch):
            return f"a pattern with {entry!r}, and no sizes for it"
    if model.mtp_layers and not mixers:
        return f"mtp_layers = {model.mtp_layers}, which take a mixer of the pattern, and a pattern without one"
    nested = [x for mixer in mixers for x in vars(mixer).values() if is_dataclass(x)]
    parts = (*([] if model.moe is None else [model.moe]), *mixers, *nested)
    return next((part.contradiction for part in parts if part.contradiction), None)


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[object, object]]:
    """Where two models differ as functions: option -> (ours, theirs). Options of training do not count."""
    kinds = [tuple(layer.name for layer in model.layers) for model in (ours, theirs)]
    pairs: list[Any] = [
        (
            "",
            *(
                {**_without_mixers(model), "layers": kind}
                for model, kind in zip((ours, theirs), kinds)
            ),
        )
    ]
    if kinds[0] == kinds[1]:
        of_both = ((m for layer in model.layers for m in layer.mixers) for model in (ours, theirs))
        pairs += [(f"{a.name}.", vars(a), vars(b)) for a, b in zip(*of_both)]
    found: dict[str, tuple[object, object]] = {}
    for prefix, a, b in pairs:
        for option in a:
            if a[option] != b[option]:
                found.setdefault(prefix + option, (a[option], b[option]))
    return found


def fingerprint(model: ModelConfig) -> str:
    """A hash of what the model computes: two models with the same hash have no `differences`. An option that a later
    version adds, with a default that changes nothing, leaves the hash as it is."""
    of_layers = [
        (layer.name, [_chosen(mixer, vars(mixer)) for mixer in layer.mixers])
        for layer in model.layers
    ]
    mixers = [(name, *(options or [{}])) for name, options in of_layers]
    moe = model.moe and _chosen(model.moe, vars(_without_mixers(model)["moe"]))
    rest = {
        name: value
        for name, value in _chosen(model, _without_mixers(model)).items()
        if name != "moe"
    }
    return hashlib.sha256(repr((rest, moe, mixers)).encode()).hexdigest()[:16]


def _chosen(options: object, values: Mapping[str, object]) -> dict[str, object]:
    """The values that are not defaults, numbers as floats: JSON may have 1 for 1.0."""
    defaults = {field.name: field.default for field in fields(options)}
    chosen = {name: x for name, x in values.items() if x != defaults[name]}
    numbers = {name: float(x) if type(x) in (int, float) else x for name, x in chosen.items()}
    parts = {name: _chosen(x, vars(x)) for name, x in chosen.items() if is_dataclass(x)}
    return dict(sorted((numbers | parts).items()))


def _without_mixers(model: ModelConfig) -> dict[str, object]:
    moe = model.moe and replace(model.moe, balance_coefficient=0.0, bias_update_rate=0.0)
    return vars(
        replace(
            model,
            pattern=(),
            init_std=0.0,
            moe=moe,
            adapter=None,
            mtp_weight=ModelConfig.mtp_weight,
        )
    )
