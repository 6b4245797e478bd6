"""What the weights in training can do: their loss on held-out documents, and a text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from titan_linear.config import Config
from titan_linear.data import IGNORE, Streams, Tokenizer, validation_batches
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.decoder import Decoder
from titan_linear.run.generate import Sampling, generate
from titan_linear.step.feed import BatchSharding


@dataclass(eq=False)
class Evaluation:
    """Every rank calls every method, however the model is split.

    Args:
        held_out: one pass over the documents to validate on.
        ask: called before each batch of a validation; it may raise.
    """

    config: Config
    model: Decoder
    dims: ParallelDims
    device: torch.device
    _: KW_ONLY
    tokenizer: Tokenizer
    held_out: Streams | None
    sharding: BatchSharding
    precision: AbstractContextManager[object]
    ask: Callable[[], None]

    @torch.no_grad()
    def loss(self) -> float:
        """Nats per token over the held-out documents (or the first validation.steps streams of them)."""
        v = self.config.validation
        batches = validation_batches(
            self.held_out,
            local_batch_size=v.local_batch_size,
            dp_rank=self.dims.dp_rank,
            dp_degree=self.dims.dp,
            limit=v.steps,
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            self.ask()
            tokens, labels, plan = self.sharding(batch)
            with self.precision:
                total[0] += self.model(tokens, plan, labels, loss_chunk=self.config.training.loss_chunk_size)
            total[1] += (labels != IGNORE).sum()
        dist.all_reduce(total)
        return (total[0] / total[1] * self.dims.tp).item()  # all ranks of tp have counted the same labels

    def text(self, prompt: str, tokens: int) -> str:
        """The prompt and the model's continuation; "" if no tokens are asked for."""
        if not tokens:
            return ""
        s = self.config.sample
        # Compiled graphs are for streams, not for a text that grows by a token at each call.
        uncompiled = torch.compiler.set_stance("force_eager") if self.config.compile.enable else nullcontext()
        with self.precision, uncompiled:
            (text,) = generate(
                self.model,
                self.tokenizer,
                [prompt],
                max_new_tokens=tokens,
                device=self.device,
                sampling=Sampling(s.temperature, s.top_p, self.config.debug.seed),
            )
        return text
