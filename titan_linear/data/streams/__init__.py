"""The held-out split of a corpus, the order of its documents, packing, mixtures and the
loader.
"""
