"""State of a process that tests share."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from titan_linear.config.registry import TABLES
from titan_linear.models.presets import MODELS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def isolated() -> Iterator[None]:
    """What is inside draws from seed 0. What it changes is restored, however it ends."""
    torch.manual_seed(0)
    restore = [restore_python(), restore_environment(), restore_torch()]
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for table in (MODELS["hybrid"], *TABLES.values()):
                stack.enter_context(patch.dict(table))
            yield
    finally:
        for each in restore:
            each()


def restore_python():
    """Inductor raises the recursion limit where it compiles; transformers adds to sys.path."""
    recursion_limit, path, folder = sys.getrecursionlimit(), list(sys.path), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def restore():
        sys.setrecursionlimit(recursion_limit)
        sys.path[:] = path
        os.chdir(folder)
        for number, handler in handlers.items():
            if handler is not None:  # set by Python
                signal.signal(number, handler)

    return restore


def restore_environment():
    variables = dict(os.environ)

    def restore():
        for name in {*os.environ} - {*variables}:
            del os.environ[name]
        for name, value in variables.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def restore_torch():
    states = (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    )
    before = [get() for get, _ in states]

    def restore():
        for (get, set_state), state in zip(states, before, strict=True):
            if get() != state:
                set_state(state)

    return restore
