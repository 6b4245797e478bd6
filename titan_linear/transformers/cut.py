"""A batch from transformers' collators -> one packed stream of documents."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
# Columns of a stream, and their values in padding.
FILL = {"input_ids": 0, "position_ids": 0, "shift_labels": IGNORE, "shift_weights": 0}
KEYS = {"input_ids", "labels", "shift_labels", "loss_weights", "position_ids", "attention_mask"}
# position_ids imply these.
IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
SETTINGS = {"num_items_in_batch", "use_cache"}
# Read from whole rows, before their embeddings are cut.
IMAGES = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}
IMAGES |= {"mm_token_type_ids"}


class PackedStream(NamedTuple):
    """The documents of all rows, one after the other, without the rows' padding."""

    columns: dict[str, Tensor]  # [T] each; labels and weights lie at the token that predicts them
    cu_seqlens: Tensor  # [N+1] int32, on the CPU
    real: Tensor  # [B, T] bool, tokens of the rows that are in the stream

    def count(self) -> Tensor:
        """Return the divisor of the loss: the number of labels, or the sum of their weights."""
        labelled = self.columns["shift_labels"] != IGNORE
        return (labelled * self.columns.get("shift_weights", 1)).sum()

    def lay(self, x: Tensor) -> Tensor:
        """Lay the rows [B, T, D] as the stream [1, T, D], with zeros in its padding."""
        tokens = x[self.real]
        missing = len(self.columns["input_ids"]) - len(tokens)
        return F.pad(tokens, (0, 0, 0, missing)).unsqueeze(0)


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return which tokens [B, T] of the rows are not padding."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def pack(batch: Mapping[str, Tensor], multiple: int = 1) -> PackedStream:
    """Lay the documents of a batch's rows [B, T] one after the other.

    A document begins with each row, and wherever `position_ids` do not count on. A document
    without labels at the end makes the length a multiple of this number.

    Raises:
        ValueError: a key or shape that cannot be cut, or padding anywhere but on the right.
    """
    _check(batch)
    # Find the documents, and drop the rows' padding.
    ids, real = batch["input_ids"], real_tokens(batch)
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError(
            "attention_mask has padding on the left or between tokens, which would enter states; "
            "pad on the right (tokenizer.padding_side = 'right')"
        )
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).to(ids).expand_as(ids))
    starts = F.pad(positions.diff() != 1, (1, 0), value=True)
    starts = starts[real].nonzero().flatten()
    columns = {"input_ids": ids[real], "position_ids": positions[real]}
    length = len(columns["input_ids"])
    ends = torch.cat([starts[1:], starts.new_tensor([length])])
    # Labels move to the token that predicts them.
    for name, shifted in (("labels", "shift_labels"), ("loss_weights", "shift_weights")):
        if name in batch:
            columns[shifted] = batch[name][real].roll(-1)
            columns[shifted][ends - 1] = FILL[shifted]
    if "shift_labels" in batch:
        columns["shift_labels"] = batch["shift_labels"][real]
    # Add the document without labels.
    missing = -length % multiple
    for name, column in columns.items():
        columns[name] = F.pad(column, (0, missing), value=FILL[name])
    edges = [0, *ends.tolist(), length + missing]
    return PackedStream(columns, torch.tensor(edges, dtype=torch.int32), real)


def _check(batch: Mapping[str, Tensor]) -> None:
    if "input_ids" not in batch:
        raise ValueError(f"batch has {sorted(batch)} without input_ids, whose documents are cut")
    shape = batch["input_ids"].shape
    allowed = KEYS | SETTINGS | (IMPLIED if "position_ids" in batch else IMAGES)
    if unknown := set(batch) - allowed:
        raise ValueError(
            f"batch has {sorted(unknown)}, which cannot be cut; use {sorted(KEYS)}, with documents "
            "by position_ids that begin again"
        )
    for name in KEYS & set(batch):
        if batch[name].shape != shape or len(shape) != 2:
            raise ValueError(f"{name} {tuple(batch[name].shape)} must be [B, T], like input_ids")
