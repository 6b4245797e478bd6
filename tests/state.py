"""State of a process that tests share, and leave as they find it."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from titan_linear.models.mixers import MIXERS
from titan_linear.models.presets import MODELS

SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def isolated() -> Iterator[None]:
    """What is inside draws from seed 0, and must restore what it changes: an AssertionError names what it did not.

    Restored here: flavors of [model], filters of warnings, the recursion limit, which Inductor raises, and sys.path, to
    which transformers adds the folder of models' code.
    """
    torch.manual_seed(0)
    before, path, recursion_limit = shared_state(), list(sys.path), sys.getrecursionlimit()
    with warnings.catch_warnings(), patch.dict(MODELS["hybrid"]):
        yield
    sys.path[:] = path
    sys.setrecursionlimit(recursion_limit)
    after = shared_state()
    names = sorted({*before, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    assert not changed, f"it changes {', '.join(changed)}, which other tests share; restore it"


def shared_state() -> dict[str, Any]:
    """By the name that a failure shows."""
    variables = {f"${name}": x for name, x in os.environ.items() if name not in SET_BY_OTHERS}
    return variables | {
        "the working directory": os.getcwd(),
        "handlers of signals": [signal.getsignal(number) for number in SIGNALS],
        "flavors": {name: list(flavors) for name, flavors in MODELS.items()},
        "mixers": list(MIXERS),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "whether gradients are computed": torch.is_grad_enabled(),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "the precision of float32": torch.get_float32_matmul_precision(),
    }
