"""A micro-batch's part of the step's loss, and its gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from titan_linear.distributed.feed import MicroBatch
from titan_linear.models.decoder import Decoder


def forward_backward(
    model: Decoder, batch: MicroBatch, valid: int, precision: AbstractContextManager[object], loss_chunk: int
) -> torch.Tensor:
    """This rank's part of the loss of one micro-batch; gradients are added up, as sums over the step's tokens.

    valid: tokens with a label of the whole step, over all ranks.
    """
    with precision:
        loss = model(batch.tokens, batch.plan, batch.labels, loss_chunk=loss_chunk) / max(valid, 1)
        with torch.autograd.set_multithreading_enabled(False):  # a thread of its own takes the host twice as long
            loss.backward()
    return loss.detach()
