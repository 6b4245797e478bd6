"""What ranks do in tests of `titan_linear.transformers`: transformers' models, cut and whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.models import hf_models
from titan_linear.transformers import context_parallel

BOUNDS = [0, 37, 38, 101, 120]  # a document of one token; 64 tokens a chunk
IGNORE = -100


def build(name: str):
    """The model of a case in float64, whose experts then need the implementation without kernels."""
    model = hf_models.build(name).double()
    model.set_experts_implementation("eager")
    return model


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    """One row of packed documents, as transformers' DataCollatorWithFlattening makes it."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, hf_models.VOCAB, (1, BOUNDS[-1]), generator=draw)
    lengths = torch.tensor(BOUNDS).diff().tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions.unsqueeze(0)}


def trained(model, group=None, layout="zigzag", inputs=None):
    """Loss and every gradient of one step, summed over the group."""
    model.zero_grad()
    with context_parallel(model, group, layout) as cp:
        loss = model(**cp.cut(batch() if inputs is None else inputs)).loss
        loss.backward()
    sums = {name: gradient(p) for name, p in model.named_parameters()}
    sums["loss"] = loss.detach().double()
    if group is not None:
        for x in sums.values():
            dist.all_reduce(x, group=group)
    return sums


def gradient(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def alone(model):
    """The same by transformers alone, each document in a call of its own."""
    tokens = batch()["input_ids"][0]
    _, loss, grads = hf_models.reference(model, tokens, BOUNDS)
    count = len(tokens) - len(BOUNDS) + 1
    sums = {name: grads[name] / count for name, _ in model.named_parameters()}
    return sums | {"loss": torch.tensor(loss / count, dtype=torch.float64)}


def errors(ours, theirs):
    """Largest relative difference, by name; of a gradient that is 0 nearly everywhere, compared with the largest."""
    largest = max(x.norm() for name, x in theirs.items() if name != "loss")
    found = {}
    for name, want in theirs.items():
        scale = want.norm() if name == "loss" else torch.maximum(want.norm(), 1e-3 * largest)
        found[name] = ((ours[name] - want).norm() / scale).item()
    return found


class Found(NamedTuple):
    """Largest relative differences of a case, and what has them."""

    cut: float  # loss and gradients of several ranks, compared with our own of one process
    alone: float  # the same, compared with transformers alone
    loss: float  # the loss, compared with transformers alone
    names: list[str]


def compare(rank, world_size, names, layouts):
    """On rank 0: {(case, layout): Found}."""
    results = {}
    for name in names:
        model = build(name)
        if rank == 0:
            theirs, one = alone(model), trained(model)
        for layout in layouts:
            ours = trained(model, dist.group.WORLD, layout)
            if rank == 0:
                cut, whole = errors(ours, one), errors(ours, theirs)
                worst = [max(each, key=each.get) for each in (cut, whole)]
                results[name, layout] = Found(
                    cut[worst[0]], whole[worst[1]], whole["loss"], worst
                )
    return results


def logits_by_token(model, inputs, group=None, layout="zigzag"):
    """Logits [T, vocab] of the whole stream: each rank's at its tokens, 0 elsewhere, summed."""
    with torch.no_grad(), context_parallel(model, group, layout) as cp:
        cut = cp.cut(inputs)
        local = model(**cut).logits[0]
    ranges = [torch.arange(*fragment) for fragment in cut["cp_context"].fragments]
    stream = local.new_zeros(BOUNDS[-1] + 8, local.shape[-1])
    stream[torch.cat(ranges)] = local
    if group is not None:
        dist.all_reduce(stream, group=group)
    return stream[: BOUNDS[-1]]


def edited(inputs, document):
    """The batch with other tokens in one document."""
    start, end = BOUNDS[document], BOUNDS[document + 1]
    tokens = inputs["input_ids"].clone()
    tokens[:, start:end] = (tokens[:, start:end] + 11) % 80 + 3
    return inputs | {"input_ids": tokens, "labels": tokens}


def leaks(rank, world_size, names):
    """For each case: the largest change of other documents' logits when one document changes, and of its own."""
    results = {}
    for name in names:
        model = build(name)
        before = logits_by_token(model, batch(), dist.group.WORLD)
        for document in (0, 2):
            after = logits_by_token(model, edited(batch(), document), dist.group.WORLD)
            change = (after - before).abs().amax(1)
            inside = torch.zeros_like(change, dtype=torch.bool)
            inside[BOUNDS[document] : BOUNDS[document + 1]] = True
            results[name, document] = change[~inside].max().item(), change[inside].max().item()
    return results


def different_batches(rank, world_size):
    model = build("LFM2")
    try:
        trained(model, dist.group.WORLD, inputs=batch(seed=rank))
    except ValueError as error:
        return str(error)
    return None
