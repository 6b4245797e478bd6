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
# Boundaries of documents from DataCollatorWithFlattening.
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class PackedStream(NamedTuple):
    """The documents of all rows, one after the other, without the rows' padding."""

    columns: dict[str, Tensor]  # [T] each; labels and weights lie at the token that predicts them
    cu_seqlens: Tensor  # [N+1] int32, on the CPU

    def count(self) -> Tensor:
        """Return the divisor of the loss: the number of labels, or the sum of their weights."""
        labelled = self.columns["shift_labels"] != IGNORE
        return (labelled * self.columns.get("shift_weights", 1)).sum()

    def padded(self, multiple: int) -> "PackedStream":
        """Add a document without labels that makes the length a multiple of this number."""
        missing = -int(self.cu_seqlens[-1]) % multiple
        if not missing:
            return self
        columns = {
            name: F.pad(column, (0, missing), value=FILL[name])
            for name, column in self.columns.items()
        }
        return PackedStream(
            columns, F.pad(self.cu_seqlens, (0, 1), value=len(columns["input_ids"]))
        )


def pack(batch: Mapping[str, Tensor]) -> PackedStream:
    """Lay the documents of a batch's rows [B, T] one after the other.

    A document begins with each row, wherever `position_ids` do not count on, and at each
    boundary of `cu_seq_lens_q`.

    Raises:
        ValueError: a key or shape that cannot be cut, or padding anywhere but on the right.
    """
    ids = batch["input_ids"]
    _check(batch)
    # Find the documents, and drop the padding.
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError(
            "attention_mask has padding on the left or between tokens; pad on the right "
            "(tokenizer.padding_side = 'right'), where states of the layers do not see it"
        )
    starts = _starts(batch)[real].nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=int(real.sum()))
    ends = cu_seqlens[1:] - 1
    first = torch.repeat_interleave(starts, cu_seqlens.diff())
    columns = {
        "input_ids": ids[real],
        "position_ids": torch.arange(len(first), device=ids.device) - first,
    }
    # Positions that do not begin at 0 stay.
    if "position_ids" in batch:
        columns["position_ids"] = batch["position_ids"][real]
    # Labels move to the token that predicts them.
    for name in ("labels", "loss_weights"):
        if name in batch:
            shifted = f"shift_{name.removeprefix('loss_')}"
            columns[shifted] = batch[name][real].roll(-1)
            columns[shifted][ends] = FILL[shifted]
    if "shift_labels" in batch:
        columns["shift_labels"] = batch["shift_labels"][real]
    return PackedStream(columns, cu_seqlens.int().cpu())


def _check(batch: Mapping[str, Tensor]) -> None:
    shape = batch["input_ids"].shape
    if unknown := set(batch) - KEYS - PACKED - {"num_items_in_batch", "use_cache"}:
        raise ValueError(f"batch has {sorted(unknown)}; only {sorted(KEYS)} can be cut")
    for name in KEYS & set(batch):
        if batch[name].shape != shape or len(shape) != 2:
            raise ValueError(f"{name} {tuple(batch[name].shape)} must be [B, T], like input_ids")


def _starts(batch: Mapping[str, Tensor]) -> Tensor:
    """Return [B, T] bool: first tokens of documents."""
    starts = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    starts[:, 0] = True
    if "position_ids" in batch:
        starts[:, 1:] = batch["position_ids"].diff() != 1
    if "cu_seq_lens_q" in batch:
        boundaries = batch["cu_seq_lens_q"].flatten().long()
        if len(starts) != 1 or boundaries[-1] != starts.shape[1]:
            raise ValueError("cu_seq_lens_q must be the boundaries of one row, up to its end")
        starts[0, boundaries[:-1]] = True
    return starts
