"""The decoder: embedding, blocks of mixers and an MLP, final norm, head.

These are plain single-device modules.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.models.config import Factors, ModelConfig
from titan_linear.models.layers import (
    Cache,
    LayerNorm,
    OpModule,
    Output,
    RMSNorm,
    as_output,
    parameter,
    projection,
    scaled,
)
from titan_linear.models.lora import add_adapters
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import CPContext
from titan_linear.ops.cross_entropy import ChunkedLogits, Sum, weighted
from titan_linear.ops.exchange.collectives import Ranks, gather_along, gather_tokens
from titan_linear.ops.registry import choose_implementations


def norm_of(config: ModelConfig) -> nn.Module:
    if config.layer_norm:
        return LayerNorm(config.dim, config.norm_eps)
    return RMSNorm(config.dim, config.norm_eps, config.zero_centred_norm)


class LayerCache(UserDict[str, UserDict[str, Tensor]]):
    """State that each branch keeps of earlier tokens.

    It is not a dict because FSDP copies dicts (and subclasses) among arguments.
    """

    def __missing__(self, branch: str) -> UserDict[str, Tensor]:
        self[branch] = UserDict()
        return self[branch]


def of_branch(cache: LayerCache | None, branch: str) -> Cache:
    return None if cache is None else cache[branch]


class Block(nn.Module):
    """A residual layer: x + mixer(norm(x)), then x + mlp(norm(x)), or one of the two.

    With post-norm it is x + norm(mixer(x)), then x + norm(mlp(x)). The outputs of parallel
    mixers are summed; the first is the module `mixer`, others are `mixer1`, ….
    `config.residual_factor` multiplies the branch's output, and `kept_factor` what it is
    added to: x, or norm(x) if `normed_residual`.

    Multi-token prediction (DeepSeek-V3, section 2.2): a block that `joins` normalizes and
    projects [embedding of a further token, hidden states]; a block that `ends` has a final
    norm.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.options = options = config.layers[layer]
        self.post_norm = options.name in config.post_norm
        self.normed_residual = config.normed_residual
        self.factors: Factors = config
        self.mixer_names = tuple(f"mixer{n or ''}" for n in range(len(options.mixers)))
        self.takes = tuple(mixer.takes > 0 for mixer in options.mixers)
        self.mlp = None
        # Modules for predicting a further token.
        if options.joins:
            self.enorm = norm_of(config)
            self.hnorm = norm_of(config)
            self.eh_proj = projection(2 * config.dim, config.dim)
            self.float8 = (("eh_proj",),)
        if options.ends:
            self.final_norm = norm_of(config)
        # Mixers and MLP, each with a norm.
        if options.mixers:
            self.mixer_norm = norm_of(config)
        for name, mixer in zip(self.mixer_names, options.mixers, strict=True):
            setattr(self, name, mixer.build(config, layer))
        if options.mlp is not None:
            self.mlp_norm = norm_of(config)
            self.mlp = options.mlp.build(config.dim, layer / config.num_layers)

    def forward(
        self,
        x: Tensor,
        plan: BatchPlan,
        cache: LayerCache | None = None,
        values: Tensor | None = None,
    ) -> Output:
        """Apply the layer.

        Args:
            x: [B, T, dim], or [B, T, 2 dim] if the block joins.

        Returns:
            [B, T, dim], the load-balance loss of its experts, and the values that it hands
            on.
        """
        x = self.joined(x)
        mixed = out = Output(x)
        # Branch of the mixers.
        if self.mixer_names:
            inputs = self.mixer_input(x)
            mixed = self._mixed(inputs, plan, cache, values)
            x = self._added(x, inputs, mixed.y, self.mixer_norm)
        # Branch of the MLP or experts.
        if self.mlp is not None:
            inputs = x if self.post_norm else self.mlp_norm(x)
            out = as_output(self.mlp(inputs, plan, of_branch(cache, "mlp")))
            x = self._added(x, inputs, scaled(out.y, self.factors.mlp_factor), self.mlp_norm)
        x = self.final_norm(x) if self.options.ends else x
        return Output(x, out.balance, mixed.values)

    def joined(self, x: Tensor) -> Tensor:
        """Return the residual stream's input: x, or the projected [embedding, hidden]."""
        if not self.options.joins:
            return x
        embedded, hidden = x.chunk(2, -1)
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))

    @property
    def mixers(self) -> list[nn.Module]:
        """Modules of the mixers, in the order of `options.mixers`."""
        return [getattr(self, name) for name in self.mixer_names]

    def _mixed(
        self, x: Tensor, plan: BatchPlan, cache: LayerCache | None, values: Tensor | None
    ) -> Output:
        """Return the sum of the mixers' outputs, and the values that one of them hands on."""
        outputs = []
        handed_on = None
        for name, mixer, takes in zip(self.mixer_names, self.mixers, self.takes):
            taken = (values,) if takes else ()
            out = as_output(mixer(x, plan, of_branch(cache, name), *taken))
            outputs.append(out.y)
            handed_on = handed_on if out.values is None else out.values
        return Output(sum(outputs[1:], outputs[0]), values=handed_on)

    def mixer_input(self, x: Tensor) -> Tensor:
        return x if self.post_norm else self.mixer_norm(x)

    def _added(self, x: Tensor, inputs: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add a branch's output y to x, or to the branch's inputs if `normed_residual`."""
        x = inputs if self.normed_residual else x
        y = norm(y) if self.post_norm else y
        return scaled(x, self.factors.kept_factor) + scaled(y, self.factors.residual_factor)


@dataclass(eq=False)
class Between:
    """Results that layers hand on in addition to x."""

    # Values that later layers take.
    values: Tensor | None = None
    balances: list[Tensor] = field(default_factory=list)  # load-balance losses


# Normed hidden states -> per MTP depth: hidden states [1, T, dim], labels and weights [T].
Further = Callable[[Tensor], Iterable[tuple[Tensor, Tensor, Tensor]]]


Loss = Callable[[ChunkedLogits], Tensor]


class Head(OpModule):
    """Final norm and logits; or a loss by chunks of tokens, which never holds all logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = norm_of(config)
        self.divisor = config.logits_divisor
        self.depth = config.mtp_layers
        self.mtp_factor = config.mtp_weight / max(config.mtp_layers, 1)
        self.weight = parameter(config.vocab_size, config.dim)
        # Tokens whose logits exist at once; 0: `tokens_at_once`.
        self.chunk = 0
        # [1 + further tokens, B·T]: if set, receives −log p of the labels.
        self.token_losses: Tensor | None = None
        # Ranks that have the other rows of the weight.
        self.ranks: Ranks | None = None

    def forward(
        self,
        x: Tensor,
        loss: Loss | None = None,
        further: Further | None = None,
        branches: Tensor | None = None,
    ) -> Tensor:
        """Compute logits or a loss: x [B, T, dim] -> logits [B, T, vocab] or `loss`.

        A loss is in float32 or wider. With a split vocabulary, the result is this rank's part
        of the loss.

        Args:
            branches: rows that the loss reads again, behind all others.
            further: yields the further tokens, whose losses are in the gradient, but not in
                the value. It is called here, where FSDP has gathered norm and weight, and
                keeps them until backward is done with all losses.
        """
        x = self.norm(x)
        if loss is None:
            return self.logits(x)

        # Rows of logits that the loss reads: all tokens of the tensor-parallel ranks, then
        # branches.
        def all_tokens(x: Tensor) -> Tensor:
            x = self.divided(x)
            rows = (
                gather_tokens(x, self.ranks) if self.ranks and torch.is_grad_enabled() else x
            ).flatten(0, 1)
            return rows if branches is None else torch.cat([rows, rows[branches]])

        # Each further token contributes one more sum over the same head.
        own, *losses = [None] * (1 + self.depth) if self.token_losses is None else self.token_losses
        more = tuple(
            Sum(
                all_tokens(h),
                labels.unsqueeze(1),
                partial(weighted, self.mtp_factor, weights),
                token_losses=of,
            )
            for (h, labels, weights), of in zip(further(x) if further else (), losses)
        )
        impl = self.impl("cross_entropy")
        return loss(
            ChunkedLogits(all_tokens(x), self.weight, self.chunk, self.ranks, own, impl, more)
        )

    def divided(self, x: Tensor) -> Tensor:
        return x if self.divisor == 1 else x / self.divisor

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of normed x; a split vocabulary has no gradients."""
        logits = self.divided(x) @ self.weight.T
        if self.ranks is None:
            return logits
        assert not torch.is_grad_enabled(), "logits of a split vocabulary have no gradient"
        return gather_along(logits.movedim(-1, 0), 0, self.ranks.group, self.ranks.size).movedim(
            0, -1
        )


class Before(OpModule):
    """Shifts x [1, T, dim] to the next token on each path; a first token receives 0."""

    def forward(self, x: Tensor, context: CPContext) -> Tensor:
        # A convolution whose only nonzero tap is at the previous token.
        taps = F.pad(x.new_ones(x.shape[-1], 1), ((context.tables.conv1d_kernel_size or 2) - 2, 1))
        return self.convolve(x, taps, None, "", cp_context=context)


class Decoder(OpModule):
    # Both are split by vocabulary.
    split = {"embedding.weight": 0, "head.weight": 0}

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.embedding_norm = norm_of(config) if config.layer_norm else nn.Identity()
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(len(config.layers)))
        self.before = Before()
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        if config.adapter:
            add_adapters(self, config.adapter)

    def use(self, impl: str, device: torch.device, dtype: torch.dtype, tp: int = 1) -> Decoder:
        """Decide once which implementation each op runs.

        Modules hold the decision; without it, an op decides at each call.

        Args:
            impl: "auto", "triton" or "torch".
            device, dtype: of the tensors.
            tp: number of ranks over which they are split.

        Raises:
            ValueError: the named implementation is not supported; the message names
                model.impl.
        """
        self.implementations = choose_implementations(self.config.ops(tp), impl, device, dtype)
        self.head.implementations = self.implementations
        for layer in self.layers:
            of_mixers = zip(layer.mixers, layer.options.mixers, strict=True)
            for part, ops in [(layer, {}), *((mixer, options.ops) for mixer, options in of_mixers)]:
                # Mixers that call the same op may differ in its sizes.
                own = choose_implementations(ops, impl, device, dtype)
                for module in part.modules():
                    if hasattr(module, "implementations"):
                        module.implementations = self.implementations | own
        return self

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding_norm(scaled(self.embedding(tokens), self.config.embedding_factor))

    def forward(
        self,
        tokens: Tensor,
        plan: BatchPlan,
        *,
        loss: Loss | None = None,
        balance_weight: float = 1.0,
        caches: list[LayerCache] | None = None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Compute logits or a loss: tokens [B, T] int64 -> logits [B, T, vocab] or `loss`.

        The load-balance loss, times balance_weight, is in the loss's gradient but not in
        its value. It is a sum over all tokens, with or without a label. The loss of further
        tokens, if the plan has any, is also in the gradient only.

        Args:
            caches: if given, the tokens continue the cached ones.
            logits_to_keep: compute the logits of this many last tokens only.
        """
        # Embed the tokens together with the further tokens that the model learns to
        # predict.
        learns = loss is not None and torch.is_grad_enabled()
        later = plan.later if learns else None
        count = len(tokens)
        embedded = []
        if later is not None:
            tokens = torch.cat([tokens, later.tokens])
        x = self.embedded(tokens)
        if later is not None:
            x, *embedded = x.split(count)
        # All layers of the trunk.
        between = Between()
        x = self.through(range(self.config.num_layers), x, plan, caches, between)

        def further(h: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            """Yield hidden states, labels and weights of each depth.

            A depth starts from the hidden states of the previous one.
            """
            plans = later.of_trees or [plan] * len(embedded)
            for depth, (token, own, *targets) in enumerate(
                zip(embedded, plans, later.labels, later.weights, strict=True)
            ):
                h = self.before(h, plan.cp_context) if later.of_trees else h
                h = self.through(
                    self.predictor(depth), torch.cat([token, h], -1), own, caches, between
                )
                yield h, *targets

        if logits_to_keep is not None:
            x = x[:, -logits_to_keep:]
        out = self.head(x, loss, further if later else None, plan.branches)
        # Adds 0 to the value, and the load-balance losses to the gradient.
        for balance in between.balances if learns else []:
            out = out + balance_weight * (balance - balance.detach())
        return out

    def through(
        self,
        layers: range,
        x: Tensor,
        plan: BatchPlan,
        caches: list[LayerCache] | None,
        between: Between,
    ) -> Tensor:
        """Apply these layers to x."""
        for i in layers:
            cache = None if caches is None else caches[i]
            x, balance, own = self.layers[i](x, plan, cache, between.values)
            between.values = between.values if own is None else own
            between.balances += [] if balance is None else [balance]
        return x

    def predictor(self, depth: int) -> range:
        """Return the layers that predict the token `depth` positions after the next token."""
        each = (len(self.layers) - self.config.num_layers) // self.config.mtp_layers
        first = self.config.num_layers + depth * each
        return range(first, first + each)
