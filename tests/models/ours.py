"""Our model on given tensors, on one process or as a rank of several. Worker processes need not import transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.ops.inputs import tokens_of
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers.recurrent import RecurrentMixer
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import build_cp_context
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits, cross_entropy

State = dict[str, Tensor]


def initialised(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config).to(dtype)
    initialise(model, seed)
    return model


def labels_of(tokens: Tensor, bounds: list[int]) -> Tensor:
    """The next token, none at the last of each document."""
    labels = tokens.roll(-1)
    labels[torch.tensor(bounds[1:]) - 1] = IGNORE
    return labels


def use_methods(
    mixers: Iterable[nn.Module],
    softmax_method: str = "auto",
    linear_method: str = "kcp",
    **_: object,
) -> None:
    """Have mixers exchange by these methods under context parallelism, as `apply_cp` does."""
    for mixer in mixers:
        mixer.cp_method = linear_method if isinstance(mixer, RecurrentMixer) else softmax_method


def run(
    config: ModelConfig,
    state: State,
    tokens: Tensor,
    labels: Tensor,
    plan: BatchPlan,
    softmax_method: str = "auto",
) -> tuple:
    """Logits [T, vocab], summed loss and gradients of our model."""
    model = Decoder(config)
    use_methods((mixer for layer in model.layers for mixer in layer.mixers), softmax_method)
    model.load_state_dict(state, strict=not config.tie_embeddings)
    model.head.chunk = 48
    loss = model(tokens.unsqueeze(0), plan, loss=loss_of(labels))
    loss.backward()
    with torch.no_grad():
        logits = model(tokens.unsqueeze(0), plan)[0]
    return (
        logits,
        loss.item(),
        {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()},
    )


def loss_of(labels: Tensor) -> Callable[[ChunkedLogits], Tensor]:
    return partial(ChunkedLogits.sum, ids=labels.flatten(), terms=cross_entropy)


def positions(bounds: list[int]) -> Tensor:
    return torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])


def packed(bounds: list[int]) -> BatchPlan:
    return BatchPlan(positions(bounds), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item() if b.any() else float(a.abs().max())


def run_on_rank(rank, world_size, config, state, tokens, bounds, layout, softmax_method="auto"):
    """This rank's tokens (global indices), its logits and loss, and gradients summed over the ranks."""
    import torch.distributed as dist

    stream = torch.tensor([*bounds, len(tokens)], dtype=torch.int32)  # padding is a last document
    context = build_cp_context(stream, dist.group.WORLD, layout=layout)
    mine = tokens_of(context)
    labels = labels_of(tokens, stream.tolist())
    plan = BatchPlan(context.position_ids, cp_context=context)
    logits, loss, grads = run(config, state, tokens[mine], labels[mine], plan, softmax_method)
    for grad in grads.values():
        dist.all_reduce(grad)
    return mine, logits, loss, grads
