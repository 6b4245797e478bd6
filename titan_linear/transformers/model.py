"""`context_parallel`: transformers' hybrid models on packed documents, on one rank or several.

Inside the block, the functions that mix tokens are ours (functions.py). After it, all are transformers' again.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss
from transformers.masking_utils import AttentionMaskInterface

from titan_linear.ops import build_cp_context
from titan_linear.ops.exchange.stream import take_fragments
from titan_linear.transformers.cut import IGNORE, IMAGES, PackedStream, pack
from titan_linear.transformers.functions import FAMILIES, softmax_attention
from titan_linear.transformers.rows import WholeRows

# The name of our attention among transformers'. It refuses batches that were not cut.
ATTENTION = "titan_linear"
AttentionInterface.register(ATTENTION, softmax_attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
# Classes without a loss, or with one of single tokens, by their endings.
ENDINGS = "ForCausalLM", "ForConditionalGeneration", "Model"
# Classes with scores of tokens, of which a trainer needs whole rows.
ROWS = ("ForSequenceClassification",)
# Keywords of a model that are about whole rows.
NOT_CUT = "cache", "past_key_values", "attention_mask", "output_router_logits"


@dataclass
class ContextParallel:
    """Cuts batches while the block of `context_parallel` lasts."""

    group: dist.ProcessGroup | None
    layout: str
    has_vision: bool = False
    active: bool = True

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's keywords for the model from a batch that all ranks of the group have.

        The rows [B, T] become one stream of documents (cut.py), and the model's tokens [1, T/W]. Its loss is the sum
        of this rank's cross-entropies over `num_items_in_batch`, by default over the batch's number of labels (the sum
        of `loss_weights`): losses and gradients of the ranks add up to one process's.

        Args:
            batch: `input_ids`, and any of `labels` (or `shift_labels`), `loss_weights`, `position_ids` and
                `attention_mask`, [B, T]; `num_items_in_batch`, and what `DataCollatorWithFlattening` returns. For a
                model with images, what its processor returns for rows that are documents.

        Raises:
            ValueError: another key, padding that is not on the right, or batches that differ between ranks.
        """
        images = {name: batch[name] for name in IMAGES & set(batch)}
        # Processors give types of tokens to texts, too.
        if "mm_token_type_ids" in images and len(images) == 1:
            images = {}
        if images and not self.has_vision:
            raise ValueError(f"batch has {sorted(images)}, but the model has no vision_config")
        ranks = 1 if self.group is None else self.group.size()
        stream = pack(batch, 2 * ranks if self.layout == "zigzag" else ranks)
        inputs: dict[str, Any] = {"use_cache": False}
        if "shift_labels" in stream.columns:
            inputs["num_items_in_batch"] = batch.get("num_items_in_batch", stream.count())
        # Cut the stream, and take this rank's tokens.
        device = stream.columns["input_ids"].device
        place: dict[str, Any] = {"rank": 0, "world_size": 1}
        if self.group is not None:
            self._check_shared(stream, images)
            place = {"group": self.group, "layout": self.layout}
        context = build_cp_context(stream.cu_seqlens, **place, device=device)
        for name, column in stream.columns.items():
            inputs[name] = take_fragments(column.unsqueeze(0), context)
        # Models compute a loss where there are labels; it reads the shifted ones.
        inputs |= {"labels": inputs.get("shift_labels"), "cp_context": context}
        if images:
            # Embeddings and positions are of whole rows: `_cut_embeddings` cuts them.
            del inputs["position_ids"]
            whole = {"input_ids": batch["input_ids"], "attention_mask": stream.real.long()}
            inputs |= images | whole | {"cp_stream": stream}
        return inputs

    def _check_shared(self, stream: PackedStream, images: Mapping[str, Tensor]) -> None:
        # A number that depends on all tokens and boundaries has the same minimum and maximum.
        ids = stream.columns["input_ids"]
        columns = [*stream.columns.values(), stream.cu_seqlens.to(ids), *images.values()]
        numbers = torch.cat([column.flatten().double() for column in columns])
        digest = numbers @ torch.arange(1, len(numbers) + 1).to(numbers)
        extremes = torch.stack([digest, -digest])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        if extremes.sum() != 0:
            raise ValueError("ranks of a context-parallel group have different batches")

    def guard_backward(self, model: Any, _: Any, output: Any) -> None:
        # Layers that run again in backward must find our functions.
        for x in output.values():
            if model.is_activation_checkpointing and torch.is_tensor(x) and x.requires_grad:
                x.register_hook(self._check_active)

    def _check_active(self, _: Tensor) -> None:
        if not self.active:
            raise RuntimeError("layers run again in backward: call backward() inside the block")


@contextmanager
def context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    whole_rows: bool = False,
) -> Iterator[ContextParallel]:
    """Train a hybrid model of transformers on packed documents, cut among a group's ranks.

        with context_parallel(model, group) as cp:
            loss = model(**cp.cut(batch)).loss

    Args:
        model: a model of transformers, or PEFT's, DDP's or FSDP's wrapper of one.
        group: the context-parallel group; None: this rank has whole documents.
        layout: "contiguous" or "zigzag", as in `build_cp_context`.
        whole_rows: the model itself cuts its batches, and every rank has the outputs of whole rows (rows.py).

    Raises:
        ValueError: a class or setting that cannot be exact; the message has the reason.
    """
    inner: Any = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)
    module, functions = _replacements(inner, ENDINGS + ROWS * whole_rows)
    config = inner.config.get_text_config()
    _check(inner, config)
    has_vision = hasattr(inner.config, "vision_config")
    cp = ContextParallel(group, "contiguous" if group is None else layout, has_vision)
    with ExitStack() as stack:
        for path, function in functions.items():
            stack.enter_context(patch(f"{module}.{path}", function))
        # The attributes behind properties: patch restores these exactly.
        stack.enter_context(patch.object(config, "_attn_implementation_internal", ATTENTION))
        stack.enter_context(patch.object(inner, "_loss_function", causal_loss, create=True))
        handles = [
            inner.register_forward_pre_hook(_check_call, with_kwargs=True),
            inner.register_forward_hook(cp.guard_backward),
        ]
        if whole_rows:
            handles += WholeRows(cp, inner).register()
        if has_vision:
            decoder = inner.get_decoder()
            handles.append(decoder.register_forward_pre_hook(_cut_embeddings, with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)
        stack.callback(setattr, cp, "active", False)
        yield cp


def _replacements(model: nn.Module, endings: tuple[str, ...]) -> tuple[str, Mapping]:
    # The modeling file of a model, and what to replace in it. FSDP2 derives a class from the model's.
    files = (kind for kind in type(model).__mro__ if ".modeling_" in kind.__module__)
    kind = next(files, type(model))
    family = kind.__module__.rpartition(".modeling_")[2]
    if family in FAMILIES and kind.__name__.endswith(endings):
        return kind.__module__, FAMILIES[family]
    raise ValueError(
        f"{type(model).__name__} is not supported: its layers or its loss may mix tokens of other ranks or "
        f"documents; use {', '.join(FAMILIES)}, in classes that end in {', '.join(endings)}"
    )


def _check(model: Any, config: Any) -> None:
    # Refuse settings under which the ranks would not add up to one process.
    reasons = {
        "output_router_logits": "its loss is a product of means over all ranks' tokens",
        "z_loss_coefficient": "its loss is a mean over a rank's tokens",
        "sliding_window": "attention has no windows here",
        "attention_dropout": "attention has no dropout here",
    }
    for name, reason in reasons.items():
        if value := getattr(config, name, None):
            raise ValueError(f"config.{name} = {value}: {reason}; set it to 0, False or None")
    if model.use_kernels:
        raise ValueError("use_kernels = True: these kernels ignore documents; load without it")
    if model.loss_function not in (ForCausalLMLoss, ForSequenceClassificationLoss):
        raise ValueError(
            "the model has a loss_function of its own, or is inside context_parallel; compute from the logits"
        )


def _check_call(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    present = [name for name in NOT_CUT if kwargs.get(name) is not None]
    if "cp_stream" in kwargs:
        present.remove("attention_mask")
    # transformers' default is a cache.
    if present or kwargs.get("use_cache", True):
        raise ValueError(
            f"the model was called with {', '.join(present) or 'use_cache=True'}, which is about "
            "whole rows; call model(**cp.cut(batch)), and generate outside context_parallel"
        )


def _cut_embeddings(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    # Before the language model: whole rows, with their images, -> this rank's tokens.
    if stream := kwargs.pop("cp_stream", None):
        context = kwargs["cp_context"]
        embeddings = take_fragments(stream.lay(kwargs["inputs_embeds"]), context)
        # [3, B, T]: time, height and width
        positions = kwargs["position_ids"].permute(1, 2, 0)
        positions = take_fragments(stream.lay(positions), context).permute(2, 0, 1)
        kwargs |= {"inputs_embeds": embeddings, "position_ids": positions, "attention_mask": None}
    return args, kwargs


def causal_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any, **columns: Any
) -> Tensor:
    """Return this rank's part of transformers' `ForCausalLMLoss`, where labels, shifted, may have weights."""
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(-1, vocab_size)
    losses = F.cross_entropy(rows, labels.view(-1), ignore_index=IGNORE, reduction="none")
    if "shift_weights" in columns:
        losses = losses * columns["shift_weights"].view(-1)
    # A batch may have no label.
    return losses.sum() / max(num_items_in_batch, 1e-9)
