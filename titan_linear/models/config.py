"""The model configuration: the numbers from which `Decoder` builds its layers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from operator import add
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
    """Sums over documents, so that the values of several batches add up.

    They count whole documents: how ranks share a stream does not change them.
    """

    tokens: int
    # (query, key) pairs that the causal mask leaves: n(n + 1)/2 for a document of n tokens.
    pairs: int
    # Pairs of tokens in one chunk of the delta rule: n² for a chunk of n ≤ 64 tokens.
    chunk_pairs: int

    def __add__(self, more: Documents) -> Documents:  # type: ignore[override]  # not a tuple's
        return Documents(*map(add, self, more))

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, above: np.ndarray | int = 0) -> Documents:
        """Count the documents of a packed stream.

        Args:
            cu_seqlens: [N+1] int boundaries, on the host.
            above: number of earlier tokens that each document continues (in prefix trees).
        """
        n = np.diff(cu_seqlens.astype(np.int64))
        last = n % CHUNK
        chunk_pairs = (n - last) * CHUNK + last * last
        return cls(int(n.sum()), int((n * (n + 1) // 2 + n * above).sum()), int(chunk_pairs.sum()))


class MixerOptions(ABC):
    """Options of one kind of mixer: a frozen dataclass in a file of models/mixers/."""

    chosen_by = "model.pattern"
    # Its key in MIXERS (models/mixers/__init__.py), and its name in a pattern.
    name: ClassVar[str]
    # Constructor from (options, model, number of the layer).
    module: ClassVar[Callable[..., nn.Module]]
    # Whether it is a recurrence over the tokens; otherwise it is softmax attention over
    # them.
    linear: ClassVar[bool] = False
    # Whether cp ranks always share its heads (`tokens_to_heads`).
    over_heads: ClassVar[bool] = False
    # Tensors of its cache with shape [B, tokens, ...]; others have a fixed size.
    growing: ClassVar[tuple[str, ...]] = ()

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        """Build the module of a layer: forward(x [B, T, dim], plan, cache) -> [B, T, dim].

        If `takes` is not 0, the module receives values [B, T, takes] as a fourth argument;
        the module of `first` returns them in an `Output`. The module may have these
        attributes:

            initial: parameter -> its Draw, where it is not normal
            kept_whole: parameters that FSDP neither shards nor casts
            split: parameter -> the dimension along which each tensor-parallel rank has an
                equal part; a rank then computes its heads, and its part of the sum that is
                the output
            float8: the products that may be in float8, each with the projections that it
                joins, none of them to a gate
            ranks: of a submodule with split parameters: None, or the ranks that have the
                other parts

        Telemetry (telemetry.py) shows the results of

            watch(x [1, T, dim], window) -> name -> (numerator [heads], denominator [heads])
                of a mean by head; x has all of the rank's tokens if `window.fragments` is
                given, and at least the window's W tokens otherwise
        """
        return self.module(self, config, layer)

    @property
    @abstractmethod
    def ops(self) -> OpDims:
        """Ops that the mixer calls, with the sizes that their implementations depend on."""

    @property
    def first(self) -> MixerOptions:
        """The options in the first layer of this kind."""
        return self

    @property
    def takes(self) -> int:
        """Channels of the values from the first layer of its kind, which heads split."""
        return 0

    @property
    def rotary(self) -> Rotary | None:
        """Rotary embedding of each head; None: no positions."""
        return None

    @property
    def contradiction(self) -> str | None:
        """Values that contradict each other or the op, worded for a message, or None."""
        return None

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of forward's products of tokens with tokens and states.

        Products with weights are counted elsewhere (step/flops.py).
        """
        return 0

    def scan_programs(self, ranks: int) -> int | None:
        """Return the number of programs of a kernel scan over one entry.

        None: the mixer has no scan.

        Args:
            ranks: number of ranks that share the heads.
        """
        return None

    @property
    @abstractmethod
    def head_counts(self) -> dict[str, int]:
        """Counts of what `split` splits, by name for messages.

        Each count must be a multiple of the tensor-parallel degree.
        """

    def indivisible_heads(self, ranks: int) -> str | None:
        """Return the heads that an all-to-all over `ranks` ranks cannot split.

        The text is worded for a message. None: it can split all of them.
        """
        return next(
            (f"{count} {what}" for what, count in self.head_counts.items() if count % ranks), None
        )


class Layer(NamedTuple):
    """Branches of a layer: parallel mixers, whose outputs add, then an MLP.

    It may lack mixers or an MLP.
    """

    mixers: tuple[MixerOptions, ...]
    mlp: MLPOptions | None
    # The first layer that predicts a further token: it also takes this token's embedding.
    joins: bool = False
    # The last layer that predicts a further token: a norm follows it.
    ends: bool = False

    @property
    def name(self) -> str:
        """Its name in the pattern of a model."""
        return BESIDE.join(part.name for part in self.mixers or (self.mlp,))

    @property
    def kinds(self) -> tuple[type[MixerOptions], ...]:
        """Option classes of its mixers."""
        return tuple(map(type, self.mixers))

    @property
    def linear(self) -> bool:
        return all(mixer.linear for mixer in self.mixers)


# Families list layers one by one.
MOST_LAYERS = 10_000
# Joins the names of parallel mixers.
BESIDE = "+"
# An entry of a model's pattern.
Entry = MixerOptions | tuple[MixerOptions, ...] | Literal["mlp", "moe"]


def mixers_of(entry: Entry) -> tuple[MixerOptions, ...]:
    """Return the mixers of a pattern's entry."""
    if isinstance(entry, MixerOptions):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Multipliers of muP, and MiniMax's multipliers of its residuals."""

    # On the embedding's output.
    embedding_factor: AtLeast0 = 1.0
    # On what each branch adds to the residual stream.
    residual_factor: AtLeast0 = 1.0
    # On the residual stream to which a branch adds.
    kept_factor: AtLeast0 = 1.0
    # On the gate's input to the activation of a SwiGLU.
    gate_factor: AtLeast0 = 1.0
    # On the outputs of MLPs and experts.
    mlp_factor: AtLeast0 = 1.0
    logits_divisor: Above0 = 1.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a frozen model (models/lora.py)."""

    rank: int
    # Scale of the adapters' outputs.
    factor: float
    # Patterns of the names of adapted weights; (): all.
    targets: tuple[str, ...] = ()
    # Patterns of the names of other parameters that are trained too.
    extra: tuple[str, ...] = ()
    # Groups of weights that share A, because each group is one matrix in a Hugging Face
    # folder.
    shared: tuple[tuple[str, ...], ...] = ()
    # Whether the base model is the loss's reference, and runs first in each step.
    base_is_reference: bool = False


@dataclass(frozen=True)
class ModelConfig(Factors):
    vocab_size: Size
    dim: Size
    # The first layers; further layers repeat the pattern.
    pattern: tuple[Entry, ...]
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    # Of MLPs; 0: no MLPs, except experts.
    hidden_dim: SizeOr0
    moe: MoEConfig | None = None
    # Layers that have an MLP even if `moe` is set.
    dense_layers: tuple[int, ...] = ()
    # Whether norms multiply by (1 + weight), except linear layers' output norm.
    zero_centred_norm: bool = False
    # Whether norms are LayerNorms with biases, with another one after the embedding;
    # otherwise RMSNorms.
    layer_norm: bool = False
    # Mixers whose blocks normalize the outputs of mixer and MLP instead of the inputs.
    post_norm: tuple[str, ...] = ()
    tie_embeddings: bool = False
    norm_eps: Above0 = 1e-5
    init_std: AtLeast0 = 0.02
    # Whether a layer is one entry of the pattern; otherwise an MLP or experts follow its
    # mixers.
    one_branch: bool = False
    # Activation of MLPs.
    activation: DenseActivation = "swiglu"
    # Whether a branch adds its output to the normalized input of the layer, which is also
    # its own input.
    normed_residual: bool = False
    # Number of further tokens that additional layers predict.
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    # Weight of the mean of their losses (multi-token prediction).
    mtp_weight: AtLeast0 = 0.1
    adapter: LoraConfig | None = None

    @property
    def base(self) -> ModelConfig:
        """The model without adapters."""
        return replace(self, adapter=None)

    @property
    def base_is_reference(self) -> bool:
        """Whether the model without its adapters is the loss's reference."""
        return self.adapter is not None and self.adapter.base_is_reference

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Composition of every layer.

        Layers that predict further tokens follow the first `num_layers`.
        """
        trunk = tuple(
            self._layer(i, self.pattern[i % len(self.pattern)]) for i in range(self.num_layers)
        )
        return trunk + self.mtp_layers * self._predictor(trunk) if self.mtp_layers else trunk

    def _predictor(self, trunk: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Compose the layer that predicts one further token, or two of one branch each.

        It has softmax attention if any layer has it, and experts if there are any.
        """
        # The last layer with softmax attention, or else the last with a mixer.
        mixing = [layer for layer in trunk if layer.mixers]
        *_, last = [layer for layer in mixing if not layer.linear] or mixing
        # The first layer of a kind takes no values from others.
        mixers = tuple(mixer.first for mixer in last.mixers)
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
        # The first layer of a kind may have other options.
        earlier = {type(mixer) for before in self.pattern[:i] for mixer in mixers_of(before)}
        mixers = tuple(
            mixer if type(mixer) in earlier else mixer.first for mixer in mixers_of(entry)
        )
        # Experts, unless this is one of `dense_layers`.
        mlp = self._dense if self.moe is None or i in self.dense_layers else self.moe
        return Layer(mixers, None if self.one_branch else mlp)

    @property
    def composition(self) -> str:
        """Numbers of layers by kind, for people: 3 kda + 1 attention + 1 mtp attention."""
        counts = Counter(
            "mtp " * (i >= self.num_layers) + layer.name for i, layer in enumerate(self.layers)
        )
        return " + ".join(f"{count} {name}" for name, count in counts.items())

    @property
    def mixers(self) -> tuple[MixerOptions, ...]:
        """The distinct mixers, in the order of their first layers."""
        return tuple(dict.fromkeys(mixer for layer in self.layers for mixer in layer.mixers))

    @property
    def mlps(self) -> tuple[MLPOptions, ...]:
        """The distinct MLPs, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers if layer.mlp is not None))

    @property
    def softmax(self) -> bool:
        """Whether any layer has softmax attention."""
        return not all(layer.linear for layer in self.layers)

    def ops(self, tp: int = 1) -> OpDims:
        """Return the ops that each tensor-parallel rank calls, with their sizes."""
        of_parts = self.ops_of_parts(tp)
        return {op: dims for ops in of_parts for op, dims in ops.items()} | {"cross_entropy": {}}

    def ops_of_parts(self, tp: int) -> list[OpDims]:
        """Return `ops` of each distinct mixer and MLP, which may differ in sizes."""
        of_mlps = [mlp.ops(self.dim, tp) for mlp in self.mlps]
        return [mixer.ops for mixer in self.mixers] + of_mlps

    def first_layers(self, n: int) -> ModelConfig:
        """Return the same model with its first n layers only.

        Layers that predict further tokens need all other layers, and are dropped.
        """
        if n > self.num_layers:
            return self
        period = self.pattern * -(-n // len(self.pattern))
        return replace(self, num_layers=n, pattern=period[:n], mtp_layers=0)

    @property
    def split_counts(self) -> list[tuple[str, int]]:
        """Everything that tensor parallelism splits: (name for messages, count)."""
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
    # Pydantic applies the configuration to elements of a tuple.
    return TypeAdapter(GenericAlias(tuple, kind), config=config)


def mistake(model: ModelConfig) -> str | None:
    """Return what no model can have, worded for a message; None if nothing is wrong.

    Faults are values with another type than their option, values too small or too large,
    and values that contradict each other.
    """
    # Types and ranges of the options.
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
    # A pattern with MLPs or experts needs their sizes.
    for entry, sizes in ((MoEConfig.name, model.moe), (Dense.name, model.hidden_dim)):
        if entry in model.pattern and not (sizes and model.one_branch):
            return f"a pattern with {entry!r}, and no sizes for it"
    if model.mtp_layers and not mixers:
        return f"mtp_layers = {model.mtp_layers}, which take a mixer of the pattern, and a pattern without one"
    # Contradictions within the experts, the mixers and their nested options.
    nested = [x for mixer in mixers for x in vars(mixer).values() if is_dataclass(x)]
    parts = [*filter(None, [model.moe]), *mixers, *nested]
    return next((part.contradiction for part in parts if part.contradiction), None)


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[object, object]]:
    """Return the options in which two models differ as functions: option -> (ours, theirs).

    Options that only affect training do not count.
    """
    # Options of the model, with the names of its layers.
    a, b = (
        _without_mixers(model) | {"layers": tuple(layer.name for layer in model.layers)}
        for model in (ours, theirs)
    )
    pairs: list[Any] = [("", a, b)]
    # Options of the mixers, if the layers are of the same kinds.
    if a["layers"] == b["layers"]:
        for layer, other in zip(ours.layers, theirs.layers):
            for mixer, its_mixer in zip(layer.mixers, other.mixers):
                pairs.append((f"{mixer.name}.", vars(mixer), vars(its_mixer)))
    # Keep the first difference of each option.
    found: dict[str, tuple[object, object]] = {}
    for prefix, a, b in pairs:
        for option in a:
            if a[option] != b[option]:
                found.setdefault(prefix + option, (a[option], b[option]))
    return found


def fingerprint(model: ModelConfig) -> str:
    """Return a hash of what the model computes.

    Models with the same hash have no `differences`.

    An option that a later version adds, with a default that changes nothing, does not
    change the hash.
    """
    # Leave out defaults, so that new options do not change the hash.
    mixers = []
    for layer in model.layers:
        options = [_chosen(mixer, vars(mixer)) for mixer in layer.mixers]
        mixers.append((layer.name, *(options or [{}])))
    moe = model.moe and _chosen(model.moe, vars(_without_mixers(model)["moe"]))
    rest = _chosen(model, _without_mixers(model))
    rest.pop("moe", None)
    return hashlib.sha256(repr((rest, moe, mixers)).encode()).hexdigest()[:16]


def _chosen(options: object, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that are not defaults.

    Numbers become floats, because JSON may have 1 for 1.0.
    """
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
