"""The decoder: embedding, pre-norm blocks of a mixer and a SwiGLU, final norm, head. Plain single-device modules."""

from __future__ import annotations

from collections import UserDict

import torch
from torch import nn

from titan_linear.loss import chunked_cross_entropy
from titan_linear.models.attention_mixer import AttentionMixer
from titan_linear.models.config import ModelConfig
from titan_linear.models.delta_mixers import GDNMixer, KDAMixer
from titan_linear.models.layers import RMSNorm, SwiGLU
from titan_linear.models.packed import Packed

MIXERS = {"kda": KDAMixer, "gdn": GDNMixer, "attention": AttentionMixer}


class LayerCache(UserDict[str, torch.Tensor]):
    """What a mixer keeps of earlier tokens. Not a dict: FSDP copies those (and their subclasses) among arguments.

    "k" and "v" [B, tokens, ...] grow with the text; any other entry [B, ...] has one size.
    """


class Block(nn.Module):
    def __init__(self, config: ModelConfig, mixer: str):
        super().__init__()
        self.mixer_norm = RMSNorm(config.dim, config.norm_eps)
        self.mixer = MIXERS[mixer](config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.hidden_dim)

    def forward(self, x: torch.Tensor, packed: Packed, cache: LayerCache | None = None) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x), packed, cache)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Final norm and vocabulary. With labels it gives the summed loss, by chunks of tokens, and never all logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, loss_chunk: int = 2048) -> torch.Tensor:
        """x [B, T, dim] -> logits [B, T, vocab]; with labels [B, T] the sum of cross-entropies, in float32 or wider."""
        x = self.norm(x)
        if labels is None:
            return x @ self.weight.T
        return chunked_cross_entropy(x.flatten(0, 1), self.weight, labels.flatten(), loss_chunk)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in config.layers)
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: torch.Tensor,
        packed: Packed,
        labels: torch.Tensor | None = None,
        *,
        loss_chunk: int = 2048,
        caches: list[LayerCache] | None = None,
        logits_to_keep: int | None = None,
    ) -> torch.Tensor:
        """tokens [B, T] int64 -> logits [B, T, vocab], or with labels [B, T] (−100: none) the summed loss.

        With caches, the tokens go on from those; logits_to_keep: logits of the last tokens alone.
        """
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, packed, None if caches is None else caches[i])
        return self.head(x if logits_to_keep is None else x[:, -logits_to_keep:], labels, loss_chunk)
