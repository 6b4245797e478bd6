"""The decoder: embedding, blocks of a mixer and a SwiGLU or experts, final norm, head. Plain single-device modules."""

from __future__ import annotations

from collections import UserDict
from typing import ClassVar

import torch
from torch import nn

from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import RMSNorm, SwiGLU
from titan_linear.models.moe import MoE
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.cross_entropy import chunked_cross_entropy
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import Choice


class LayerCache(UserDict[str, torch.Tensor]):
    """What a mixer keeps of earlier tokens. Not a dict: FSDP copies dicts (and subclasses) among arguments."""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); post-norm: x + norm(mixer(x)), x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        mixer = config.layers[layer]
        self.post_norm = mixer.name in config.post_norm
        self.mixer_norm = RMSNorm(config.dim, config.norm_eps, config.zero_centred_norm)
        self.mixer = mixer.build(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps, config.zero_centred_norm)
        experts = config.has_experts(layer)
        self.mlp = MoE(config.dim, config.moe) if experts else SwiGLU(config.dim, config.hidden_dim)

    def forward(
        self, x: torch.Tensor, plan: BatchPlan, cache: LayerCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, T, dim] -> [B, T, dim], and the load-balance loss of the experts, if there is one."""
        y = self.mixer(self.mixer_input(x), plan, cache)
        x = x + (self.mixer_norm(y) if self.post_norm else y)
        y, balance = self._mlp(x if self.post_norm else self.mlp_norm(x), plan)
        return x + (self.mlp_norm(y) if self.post_norm else y), balance

    def mixer_input(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.post_norm else self.mixer_norm(x)

    def _mlp(self, x: torch.Tensor, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.mlp(x, plan) if isinstance(self.mlp, MoE) else (self.mlp(x), None)


class Head(nn.Module):
    """Final norm and logits; with labels the summed loss, by chunks of tokens, without ever holding all logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps, config.zero_centred_norm)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.token_losses: torch.Tensor | None = None  # [B·T] into which the loss's terms are written, if set
        self.implementations: dict[str, Choice] = {}

    @property
    def impl(self) -> str | Choice:
        return self.implementations.get("cross_entropy", "auto")

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, loss_chunk: int = 2048) -> torch.Tensor:
        """x [B, T, dim] -> logits [B, T, vocab]; with labels [B, T] the sum of cross-entropies, in float32 or wider."""
        x = self.norm(x)
        if labels is None:
            return x @ self.weight.T
        return chunked_cross_entropy(
            x.flatten(0, 1), self.weight, labels.flatten(), loss_chunk, token_losses=self.token_losses, impl=self.impl
        )


class Decoder(nn.Module):
    split: ClassVar[dict[str, int]] = {"embedding.weight": 0, "head.weight": 0}  # by the vocabulary

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.head = Head(config)
        self.implementations: dict[str, Choice] = {}
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def use(self, impl: str, device: torch.device, dtype: torch.dtype, tp: int = 1) -> Decoder:
        """Decide once which implementation each op runs ("auto" | "triton" | "torch"), for tensors of `dtype` on
        `device`, split over `tp` ranks. Modules hold the answers; without them, an op decides at each call.

        Raises:
            ValueError: an implementation that is named is not supported; the message names model.impl.
        """
        self.implementations = choose_implementations(self.config.ops(tp), impl, device, dtype)
        self.head.implementations = self.implementations
        for mixer, layer in zip(self.config.layers, self.layers, strict=True):
            own = choose_implementations(mixer.ops, impl, device, dtype)  # mixers of one op may differ in dims
            for module in layer.modules():
                if hasattr(module, "implementations"):
                    module.implementations = self.implementations | own
        return self

    def forward(
        self,
        tokens: torch.Tensor,
        plan: BatchPlan,
        labels: torch.Tensor | None = None,
        *,
        loss_chunk: int = 2048,
        balance_weight: float = 1.0,
        caches: list[LayerCache] | None = None,
        logits_to_keep: int | None = None,
    ) -> torch.Tensor:
        """tokens [B, T] int64 -> logits [B, T, vocab], or with labels [B, T] (−100: none) the summed loss.

        With caches, the tokens continue the cached ones; logits_to_keep: only the logits of that many last tokens.
        The load-balance loss, times balance_weight, is in the loss's gradient, not in its value, which stays the sum of
        cross-entropies. It is a sum over all tokens, with or without a label.
        """
        x, balances = self.embedding(tokens), []
        for i, layer in enumerate(self.layers):
            x, balance = layer(x, plan, None if caches is None else caches[i])
            balances += [] if balance is None else [balance]
        out = self.head(x if logits_to_keep is None else x[:, -logits_to_keep:], labels, loss_chunk)
        for balance in balances if labels is not None else []:
            out = out + balance_weight * (balance - balance.detach())
        return out
