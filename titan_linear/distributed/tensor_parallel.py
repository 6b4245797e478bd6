"""Tensor parallelism: `tp` ranks share every layer.

Between layers, they share the tokens (sequence parallelism).

A module's `split` states which of its parameters are split, and along which dimension. A
rank has a part of these parameters, and all of the others. Mixers derive their numbers of
heads from the widths of their parameters, so their code does not change.

    embedding   rows of the vocabulary    each rank looks up the tokens whose rows it has; the sum
                                          is scattered
    norms       whole                     on this rank's tokens
    mixer, MLP  heads, hidden channels    on all tokens: gathered before, the sum scattered after
    head        rows of the vocabulary    on all tokens: gathered before; each rank returns its
                                          part of the loss

There is one rule for gradients: what a rank computes is its part of a sum over the tp
ranks. The backward of gathering tokens sums all ranks' gradients of them. A split
parameter's gradient is complete, because no other rank has this part. The gradient of a
whole parameter, be it a norm on some of the tokens or a projection that feeds some of the
heads, is summed once per step (`sum_gradients`).

Without gradients (validation, generation), every rank keeps all tokens and receives the
whole of each sum, so tp need not divide the number of tokens.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_linear.distributed.parts import shard_parameter
from titan_linear.models.decoder import Before, Decoder
from titan_linear.models.layers import Output, RMSNorm, lora_name, widen
from titan_linear.models.mlps.moe import MoE
from titan_linear.ops import CPContext
from titan_linear.ops.exchange.collectives import (
    Ranks,
    gather_tokens,
    scatter_tokens,
    sum_over_ranks,
)


def tensor_splits(model: nn.Module) -> dict[str, int]:
    """Return parameter → the dimension that is split, as the modules state it.

    A tied parameter has its first name. For an adapter, B is split, or A if the weight is
    split by columns.
    """
    own = dict(model.named_parameters())
    splits = {}
    of_adapters = {}
    for prefix, module in model.named_modules():
        for leaf, dim in getattr(module, "split", {}).items():
            name = f"{prefix}.{leaf}".removeprefix(".")
            if name not in own:
                continue
            splits[name] = dim
            lora = lora_name(name, "A" if dim == own[name].dim() - 1 else "B")
            if lora in own:
                of_adapters[lora] = dim
    return splits | of_adapters


def apply_tp(model: Decoder, ranks: Ranks) -> dict[str, int]:
    """Leave a decoder one rank's part; its modules gather tokens and sum outputs.

    Returns:
        The splits of its parameters.
    """
    # Cut the parameters. A norm over a split width needs sums over ranks.
    splits = tensor_splits(model)
    for name, dim in splits.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        shard_parameter(module, leaf, dim, ranks.size, ranks.rank)
        if isinstance(module, RMSNorm):
            _share(module, ranks, _norm_over_ranks)
        elif hasattr(module, "ranks"):
            module.ranks = ranks
    if model.config.tie_embeddings:
        model.head.weight = model.embedding.weight
    # Replace the forwards between which tokens are split.
    for layer in model.layers:
        for part in filter(None, (*layer.mixers, layer.mlp)):
            _share(part, ranks, _moe if isinstance(part, MoE) else _on_all_tokens)
    _share(model.embedding, ranks, _embed)
    _share(model.before, ranks, _before)
    model.head.ranks = ranks
    return splits


def _share(module: nn.Module, ranks: Ranks, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module of which each of `ranks` has a part.

    The new forward may call the forward of the module's class. It is a bound method because
    torch.compile goes by a method's function: layers of one kind then share their graphs
    (`apply_compile`).
    """
    module.forward = MethodType(forward, module)
    module.ranks = ranks


# --- Forwards of modules of which a rank has a part -----------------------------------


def _summed(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of x [B, T, dim] over the ranks.

    With gradients, this rank receives only its tokens.
    """
    return scatter_tokens(x, ranks) if torch.is_grad_enabled() else sum_over_ranks(x, ranks)


def _on_all_tokens(module: nn.Module, x: Tensor, *arguments: object) -> Any:
    """Run a mixer or an MLP on all tokens.

    The values that a mixer hands to later layers are of this rank's heads, and of all
    tokens.
    """
    # Without gradients, x [B, T, dim] has all tokens.
    if torch.is_grad_enabled():
        x = gather_tokens(x, module.ranks)
    out = type(module).forward(module, x, *arguments)
    if isinstance(out, Tensor):
        return _summed(out, module.ranks)
    # torch 2.11 does not compile `_replace`.
    return Output(_summed(out.y, module.ranks), *out[1:])


def _moe(moe: MoE, x: Tensor, *arguments: object) -> Output:
    """Run experts.

    Their load-balance loss is the same on all ranks, so each contributes an equal part.
    """
    out = _on_all_tokens(moe, x, *arguments)
    return out if out.balance is None else Output(out.y, out.balance / moe.ranks.size, out.values)


def _embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    # Tokens whose rows other ranks have contribute 0.
    rows = len(embedding.weight)
    ranks = embedding.ranks
    own = tokens - ranks.rank * rows
    elsewhere = (own < 0) | (own >= rows)
    x = F.embedding(own.masked_fill(elsewhere, 0), embedding.weight)
    x = x.masked_fill(elsewhere.unsqueeze(-1), 0)
    return torch.cat([_summed(row, ranks) for row in x.split(1)])


def _before(before: nn.Module, x: Tensor, context: CPContext) -> Tensor:
    ranks: Any = before.ranks
    out = Before.forward(before, gather_tokens(x, ranks), context)
    return out.chunk(ranks.size, 1)[ranks.rank]


def _norm_over_ranks(norm: RMSNorm, x: Tensor) -> Tensor:
    """Compute an RMSNorm over a width of which each rank has a part."""
    wide = widen(x)
    weight = widen(norm.weight)
    ranks = norm.ranks
    if norm.zero_centred:
        weight = 1 + weight
    squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), ranks)
    mean = squares / (x.shape[-1] * ranks.size)
    return (wide * torch.rsqrt(mean + norm.eps) * weight).to(x.dtype)
