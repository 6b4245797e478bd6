"""Held-out split of a corpus, order of its documents, packing, mixtures and the loader."""
