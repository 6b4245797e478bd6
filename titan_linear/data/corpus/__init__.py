"""Texts → tokens on disk: sources, tokenizers, conversations, the corpus, its writer and its caches."""
