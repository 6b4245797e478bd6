"""A corpus → batches: the held-out split, the order of documents, packing, mixtures, the loader."""
