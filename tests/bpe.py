"""Small tokenizers of the library's kind."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_bpe(
    texts: list[str], vocab_size: int, special_tokens: list[str], **parts: object
) -> Tokenizer:
    """A byte-level BPE, trained on these texts; parts: of the tokenizer, beside its decoder and its model."""
    tokenizer = Tokenizer(models.BPE())
    own = {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    for part, value in (own | parts).items():
        setattr(tokenizer, part, value)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
