"""From texts to tokens on disk: sources, tokenizers, conversations, corpora and caches."""
