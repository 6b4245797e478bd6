"""What ranks do in tests of `titan_linear.transformers`: transformers' models, cut and whole."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import DistributedType, PartialState
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorWithFlattening,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.models import hf_models
from titan_linear.transformers import ContextParallelMixin, context_parallel


class CPTrainer(ContextParallelMixin, Trainer):
    pass


BOUNDS = [0, 37, 38, 101, 121]  # a document of one token; a length that no number of ranks divides
IGNORE = -100
FSDP2 = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
}


class Wide:
    """torch, but that float32 is float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def in_float64(model):
    """transformers' modeling file, with float64 where it computes in float32 inside a float64 model."""
    module = sys.modules[type(model).__module__]
    with (
        patch.object(module, "torch", Wide()),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


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


def compare(rank, world_size, names, layouts):
    """On rank 0: {(case, layout): (largest relative difference to transformers alone, its name)}."""
    results = {}
    for name in names:
        model = build(name)
        with in_float64(model):
            theirs = alone(model) if rank == 0 else None
            for layout in layouts:
                ours = trained(model, dist.group.WORLD, layout)
                if rank == 0:
                    found = errors(ours, theirs)
                    worst = max(found, key=found.get)
                    results[name, layout] = found[worst], worst
    return results


def logits_by_token(model, inputs, group=None, layout="zigzag"):
    """Logits [T, vocab] of the whole stream: each rank's at its tokens, 0 elsewhere, summed."""
    with torch.no_grad(), context_parallel(model, group, layout) as cp:
        cut = cp.cut(inputs)
        local = model(**cut).logits[0]
    ranges = [torch.arange(*fragment) for fragment in cut["cp_context"].fragments]
    stream = local.new_zeros(BOUNDS[-1] + 8, local.shape[-1])  # and padding
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


def trainer(rank, world_size, folder, degree, accumulation, fsdp=False):
    """Weights and gradient norms after some steps of transformers' Trainer, and the loss of its evaluation."""
    os.environ |= {"ACCELERATE_USE_CPU": "true"}
    draw = torch.Generator().manual_seed(4)
    rows = [row(draw) for _ in range(32)]
    args = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=accumulation,
        gradient_accumulation_steps=accumulation,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        prediction_loss_only=True,
        fsdp=fsdp,
        fsdp_config=FSDP2 if fsdp else None,
    )
    # On CPUs accelerate would take DDP.
    if fsdp and args.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    hf = build("Qwen3.5, tied").float().train()
    run = CPTrainer(
        hf,
        args,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=False),
        context_parallel_degree=degree,
    )
    run.train()
    norms = [line["grad_norm"] for line in run.state.log_history if "grad_norm" in line]
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    weights = torch.cat([whole(p.detach()).double().flatten() for p in run.model.parameters()])
    assert isinstance(next(run.model.parameters()), DTensor) == fsdp
    return norms, losses, weights, run.evaluate()["eval_loss"]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded(rank, world_size):
    """Errors under FSDP2, whose gradients are means over ranks: of ours in one process."""
    one = build("Qwen3.5, tied")
    want = trained(one)
    model = build("Qwen3.5, tied")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with context_parallel(model, dist.group.WORLD) as cp:
        loss = model(**cp.cut(batch())).loss
        (loss * world_size).backward()
    dist.all_reduce(loss.detach())
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return errors(found | {"loss": loss.detach()}, want)


def vision_model():
    """A small Qwen3.5 with images, in float64."""
    text = build("Qwen3.5, tied").config.to_dict()
    sizes = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32)
    width = dict(out_hidden_size=text["hidden_size"])
    vision = sizes | width | dict(patch_size=4, num_position_embeddings=64)
    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=5, tie_word_embeddings=True
    )
    return Qwen3_5ForConditionalGeneration(config).double().eval()


def images(model) -> list[dict[str, torch.Tensor]]:
    """Rows [1, T] with an image each, of 4 and of 2 tokens, as Qwen's processor makes them."""
    draw = torch.Generator().manual_seed(7)
    config = model.config.vision_config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    rows = []
    for length, grid in ((37, (1, 4, 4)), (22, (1, 2, 4))):
        patches, count = grid[1] * grid[2], grid[1] * grid[2] // config.spatial_merge_size**2
        tokens = torch.randint(6, hf_models.VOCAB, (1, length), generator=draw)
        tokens[:, 9 : 9 + count] = model.config.image_token_id
        is_image = (tokens == model.config.image_token_id).long()
        pixels = torch.randn(patches, width, generator=draw, dtype=torch.float64)
        rows.append(
            {
                "input_ids": tokens,
                "labels": tokens.masked_fill(is_image == 1, IGNORE),
                "mm_token_type_ids": is_image,
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([grid]),
            }
        )
    return rows


def with_images(rank, world_size, layouts):
    """For each layout: the largest relative difference to transformers alone, a call for each row."""
    model = vision_model()
    rows = images(model)
    width = max(row["input_ids"].shape[1] for row in rows)
    inputs = {}
    for name in rows[0]:
        columns = [row[name] for row in rows]
        if name in ("input_ids", "labels", "mm_token_type_ids"):
            fill = IGNORE if name == "labels" else 0
            columns = [F.pad(x, (0, width - x.shape[1]), value=fill) for x in columns]
        inputs[name] = torch.cat(columns)
    lengths = torch.tensor([[row["input_ids"].shape[1]] for row in rows])
    inputs["attention_mask"] = (torch.arange(width) < lengths).long()
    results = {}
    with in_float64(model):
        count = sum(row["labels"][:, 1:].ne(IGNORE).sum() for row in rows)
        losses = [model(**row, use_cache=False, num_items_in_batch=count).loss for row in rows]
        sum(losses).backward()
        theirs = {name: gradient(p) for name, p in model.named_parameters()}
        theirs["loss"] = sum(losses).detach()
        for layout in layouts:
            found = errors(trained(model, dist.group.WORLD, layout, inputs), theirs)
            results[layout] = max((error, name) for name, error in found.items())
            visual = [g.norm().item() for name, g in theirs.items() if ".visual." in name]
            assert len(visual) > 10 and min(visual) > 0
    return results


def row(draw):
    """A prompt without labels and its answer, of some length."""
    length = int(torch.randint(40, 70, (), generator=draw))
    tokens = torch.randint(3, hf_models.VOCAB, (length,), generator=draw).tolist()
    return {"input_ids": tokens, "labels": [IGNORE] * 9 + tokens[9:]}
