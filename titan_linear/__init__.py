"""titan_linear: trains linear-attention and hybrid language models on long sequences.

`Session`, `mesh` and `load` (docs/python.md) and `register` (docs/extending.md) are imported
when they are first asked for: most of them import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
# The public names, by module.
PUBLIC = {
    "Session": "run.session",
    "mesh": "run.session",
    "load": "run.reading",
    "register": "config.registry",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
