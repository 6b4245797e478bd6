"""Text from a trained model: prefill, then token by token with recurrent states and a key-value cache."""

from __future__ import annotations

import torch

from titan_linear.data import Tokenizer
from titan_linear.models.decoder import Decoder, LayerCache
from titan_linear.models.init import generator
from titan_linear.models.packed import Packed


@torch.no_grad()
def generate(
    model: Decoder, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, temperature: float, seed: int,
    device: torch.device, impl: str = "auto",
) -> str:  # fmt: skip
    """The prompt and what follows it, up to the end of a document. Sharded models: every rank must call it alike."""
    rng = generator(seed, "sample")
    ids = tokenizer.encode(prompt).tolist()
    caches = [LayerCache() for _ in model.layers]
    new, position = ids, 0
    for _ in range(max_new_tokens):
        positions = torch.arange(position, position + len(new), device=device)
        tokens = torch.tensor([new], dtype=torch.int64, device=device)
        logits = model(tokens, Packed(positions, impl=impl), caches=caches)[0, -1, : tokenizer.vocab_size]
        position += len(new)
        new = [_choose(logits.float().cpu(), temperature, rng)]
        if new[0] == tokenizer.eos_id:
            break
        ids += new
    return tokenizer.decode(ids)


def _choose(logits: torch.Tensor, temperature: float, rng: torch.Generator) -> int:
    """logits [vocab] on the CPU, where draws are the same on every rank; temperature 0 takes the likeliest token."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng))
