"""Text generation: prompts are prefilled in chunks, then all rows advance token by token.

A row carries what its layers keep of earlier tokens (`LayerCache`): recurrent states, tails
of convolutions, keys and values. Prompts are prefilled one by one, so memory is bounded by
one chunk; then the rows become one batch. Keys and values of shorter rows get padding in
front, which attention excludes (`BatchPlan.first_key`). Nothing else depends on a text's
length.

Decoding equals one forward pass over the whole text. A row's text depends only on (seed,
its index) and its own prompt.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_linear.data import Streams, Tokenizer
from titan_linear.models.decoder import Between, Decoder, LayerCache
from titan_linear.models.draws import generator
from titan_linear.models.plan import BatchPlan
from titan_linear.run.reading import Reader
from titan_linear.step.passes import with_reference

# Tokens of a text, and of several texts.
Ids = Sequence[int]
Rows = list[list[int]]


@dataclass(frozen=True)
class Sampling:
    # 0 takes the likeliest token.
    temperature: float = 0.0
    # Draw among the likeliest tokens whose probabilities reach top_p.
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature = {self.temperature} must be 0 (the likeliest token) or more"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must be above 0 and at most 1")


class DecodingState(NamedTuple):
    """Texts in progress: caches of the tokens read, and logits of the next token."""

    # One cache per layer.
    caches: list[LayerCache]
    # [B] int64, number of tokens read.
    lengths: Tensor
    logits: Tensor  # [B, vocab]


def generate(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], **options: Any
) -> list[str]:
    """Return each prompt with its continuation, up to the end of a document.

    If the model is sharded, every rank makes the same call.

    Args:
        options: the options of `continuations`.

    Raises:
        ValueError: a prompt has no tokens.
    """
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    for prompt, row in zip(prompts, ids, strict=True):
        if not row:
            raise ValueError(f"prompt {prompt!r} has no tokens; give some text to continue")
    new = continuations(model, tokenizer, ids, **options)
    return [tokenizer.decode(row + more) for row, more in zip(ids, new, strict=True)]


def continuations(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    drafts: Drafts | None = None,
    **options: Any,
) -> Rows:
    """Return the new tokens of each prompt, by `generate_tokens` with this tokenizer.

    With `drafts`, the model drafts tokens, which are counted there, and the likeliest
    tokens are taken.
    """
    options |= {"ends": tokenizer.end_ids, "vocab_size": tokenizer.vocab_size}
    if drafts is None:
        return generate_tokens(model, prompts, sampling=sampling, **options)
    return [draft_tokens(model, row, drafts, **options) for row in prompts]


@torch.no_grad()
def generate_tokens(
    model: Decoder,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    device: torch.device,
    ends: Collection[int] = (),
    stops: Callable[[list[int]], bool] = lambda new: False,
    vocab_size: int | None = None,
    prefill_chunk: int = 2048,
) -> Rows:
    """Return the tokens that follow each prompt, all below `vocab_size`.

    A row ends before a token of `ends`, and where `stops` is true of its new tokens.
    """
    rngs = [generator(sampling.seed, "sample", i) for i in range(len(prompts))]
    new: Rows = [[] for _ in prompts]
    done = [max_new_tokens == 0] * len(prompts)
    rows = None if all(done) else prefill(model, prompts, chunk=prefill_chunk, device=device)
    while not all(done):
        # On the CPU, draws are the same everywhere.
        logits = rows.logits[:, :vocab_size].double().cpu()
        chosen = [choose(row, sampling, rng) for row, rng in zip(logits, rngs, strict=True)]
        tokens = _agreed(model, torch.tensor(chosen, device=device))
        # Rows that are done are still decoded, but their tokens are dropped.
        for i, token in enumerate(tokens.tolist()):
            done[i] = done[i] or token in ends
            if not done[i]:
                new[i].append(token)
                done[i] = len(new[i]) == max_new_tokens or stops(new[i])
        rows = rows if all(done) else decode(model, rows, tokens)
    return new


@torch.no_grad()
def prefill(
    model: Decoder, prompts: Sequence[Ids], *, chunk: int, device: torch.device
) -> DecodingState:
    """Read the prompts (each of one token or more), `chunk` tokens at a time."""
    read = [_prefill_one(model, prompt, chunk, device) for prompt in prompts]
    caches_of_rows, logits = zip(*read)
    # Merge the rows' caches, layer by layer.
    caches = []
    for layer, rows in zip(model.config.layers, zip(*caches_of_rows)):
        growing = {name for mixer in layer.mixers for name in mixer.growing}
        caches.append(_batched(rows, growing))
    lengths = torch.tensor(list(map(len, prompts)), device=device)
    return DecodingState(caches, lengths, torch.cat(logits))


@torch.no_grad()
def decode(model: Decoder, rows: DecodingState, tokens: Tensor) -> DecodingState:
    """Read one more token of each row, tokens [B]. The caches are updated in place."""
    plan = BatchPlan(rows.lengths.unsqueeze(1), first_key=rows.lengths.max() - rows.lengths)
    logits = model(tokens.unsqueeze(1), plan, caches=rows.caches, logits_to_keep=1)[:, -1]
    return rows._replace(lengths=rows.lengths + 1, logits=logits)


def _prefill_one(
    model: Decoder, prompt: Ids, chunk: int, device: torch.device
) -> tuple[list[LayerCache], Tensor]:
    caches = [LayerCache() for _ in model.layers]
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    for start in range(0, len(prompt), chunk):
        part = tokens[:, start : start + chunk]
        plan = BatchPlan(torch.arange(start, start + part.shape[1], device=device))
        logits = model(part, plan, caches=caches, logits_to_keep=1)[:, -1]  # [1, vocab]
    return caches, logits


def _batched(caches: Sequence[LayerCache], growing: set[str]) -> LayerCache:
    """Merge one layer's caches of single rows into the cache of a batch.

    Entries that grow with the text are padded in front to the longest.
    """
    batch = LayerCache()
    for branch, kept in caches[0].items():
        for name in kept:
            parts = [cache[branch][name] for cache in caches]
            if name in growing:
                longest = max(x.shape[1] for x in parts)
                parts = [
                    F.pad(x, (0, 0) * (x.dim() - 2) + (longest - x.shape[1], 0)) for x in parts
                ]
            batch[branch][name] = torch.cat(parts)
    return batch


# --- One text, of which the model drafts a token at each step --------------------------------------------------------


@dataclass
class Drafts:
    made: int = 0
    # Drafts that the model itself would have chosen.
    accepted: int = 0


class _Reader:
    """A text in progress: layer caches, and hidden states that the predictor has not read."""

    def __init__(self, model: Decoder, vocab_size: int | None, device: torch.device):
        self.model = model
        self.vocab_size = vocab_size
        self.device = device
        self.caches = [LayerCache() for _ in model.layers]
        # Tokens read, and the hidden states of the last of them that the predictor has not
        # read.
        self.length = 0
        self.pending = model.embedding.weight.new_empty(1, 0, model.config.dim)

    def read(self, tokens: Ids) -> list[int]:
        """Read these tokens, and return the likeliest token after each."""
        h = self.model.head.norm(
            self._through(range(self.model.config.num_layers), self.length, tokens)
        )
        self.length += len(tokens)
        self.pending = torch.cat([self.pending, h], 1)
        return self._likeliest(h)

    def draft(self, tokens: Ids) -> int:
        """Return the likeliest token after these.

        They follow the tokens of the first pending hidden states.
        """
        first = self.length - self.pending.shape[1]
        h, self.pending = self.pending.tensor_split([len(tokens)], 1)
        return self._likeliest(self._through(self.model.predictor(0), first, tokens, h)[:, -1:])[0]

    def copy(self) -> _Reader:
        other = copy(self)
        other.caches = [
            LayerCache({branch: UserDict(x) for branch, x in kept.items()}) for kept in self.caches
        ]
        return other

    def _through(self, layers: range, first: int, tokens: Ids, *h: Tensor) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(first, first + len(tokens), device=self.device)
        x = torch.cat([self.model.embedded(ids), *h], -1)
        return self.model.through(layers, x, BatchPlan(positions), self.caches, Between())

    def _likeliest(self, h: Tensor) -> list[int]:
        logits = self.model.head.logits(h)[0, :, : self.vocab_size].double().cpu()
        return [choose(row, Sampling(), None) for row in logits]


@torch.no_grad()
def draft_tokens(
    model: Decoder,
    prompt: Ids,
    drafts: Drafts,
    *,
    max_new_tokens: int,
    device: torch.device,
    ends: Collection[int] = (),
    vocab_size: int | None = None,
    prefill_chunk: int = 2048,
) -> list[int]:
    """Return the likeliest tokens, as `generate_tokens` does, with drafts.

    Each step reads the last token and a draft of the next one. If the model chooses the
    draft itself, two tokens are known. Otherwise, the last token is read again, alone.
    """
    reader = _Reader(model, vocab_size, device)
    new = []
    # Prefill, by the model and by the predictor.
    for start in range(0, len(prompt), prefill_chunk):
        part = prompt[start : start + prefill_chunk]
        new = reader.read(part)[-1:]
        if following := prompt[start + 1 : start + 1 + len(part)]:
            reader.draft(following)
    while len(new) < max_new_tokens and not set(ends).intersection(new[-2:]):
        # Try the draft on a copy of the caches.
        draft = reader.draft(new[-reader.pending.shape[1] :])
        ahead = reader.copy()
        chosen = ahead.read([new[-1], draft])
        if chosen[0] == draft:
            reader = ahead
        else:
            chosen = reader.read(new[-1:])
        new += chosen
        drafts.made += 1
        drafts.accepted += len(chosen) - 1
    return list(takewhile(lambda token: token not in ends, new[:max_new_tokens]))


def choose(logits: Tensor, sampling: Sampling, rng: torch.Generator | None) -> int:
    """Choose a token from logits [vocab].

    Raises:
        ValueError: the logits are not finite.
    """
    scaled = logits / (sampling.temperature or 1.0)
    if not scaled.isfinite().all():
        raise ValueError(
            f"the model's logits are not finite at --temperature {sampling.temperature:g}; its weights are damaged, or "
            "the temperature is too low: give 0 for the likeliest token"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    # The likeliest token is always kept.
    kept = torch.where(before < sampling.top_p, probabilities, 0.0)
    return int(order[torch.multinomial(kept, 1, generator=rng)])


def _agreed(model: Decoder, tokens: Tensor) -> Tensor:
    """Return rank 0's tokens if ranks share the model.

    Ranks that round differently would diverge and hang.
    """
    if hasattr(model, "parts") or any(isinstance(p, DTensor) for p in model.parameters()):
        dist.broadcast(tokens, 0)
    return tokens


# --- In training: the loss on held-out documents, and a text ----------------------------------------------------------


@dataclass(eq=False)
class Validator:
    """Loss on held-out documents and sample texts, during training.

    Every rank calls every method, however the model is split.

    Args:
        held_out: one pass over the documents to validate on.
        ask: called before each batch of a validation; it may raise.
    """

    reader: Reader
    held_out: Streams | None
    ask: Callable[[], None]

    @torch.no_grad()
    def validate(self) -> list[float]:
        """Return the loss, in nats per token, and its reports, over the held-out documents.

        With validation.steps, only the first streams count.
        """
        session = self.reader.session
        v = self.reader.config.validation
        size = 2 + len(session.loss.reports)
        total = torch.zeros(size, dtype=torch.float64, device=session.device)
        for batch in self.reader.batches(self.held_out, v.local_batch_size, limit=v.steps):
            self.ask()
            micro = with_reference(session.model, session.sharding(batch), session.precision)
            loss = partial(session.loss, batch=micro)
            with session.precision:
                total[1:] += session.model(micro.tokens, micro.plan, loss=loss)
            total[0] += batch.weight / session.dims.copies
        dist.all_reduce(total)
        return (total[1:] / total[0]).tolist()

    def text(self, prompt: str, tokens: int) -> str:
        """Return the prompt and the model's continuation; "" if no tokens are asked for."""
        if not tokens:
            return ""
        config = self.reader.config
        session = self.reader.session
        # Compiled graphs are for streams, not for a text that grows by one token per call.
        uncompiled = (
            torch.compiler.set_stance("force_eager") if config.compile.enable else nullcontext()
        )
        sample = config.sample
        with session.precision, uncompiled:
            (text,) = generate(
                session.model,
                self.reader.tokenizer,
                [prompt],
                max_new_tokens=tokens,
                device=session.device,
                sampling=Sampling(sample.temperature, sample.top_p, config.debug.seed),
            )
        return text
