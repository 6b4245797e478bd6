"""titan_linear: trains linear-attention and hybrid language models on long sequences."""

__version__ = "0.1.0"
