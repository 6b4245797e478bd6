"""Faults of a run, put in from outside: `fail_at(place)` in a rank's process, before it trains."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from tests.processes import stay
from titan_linear.distributed.ending import peer_is_lost
from titan_linear.hooks import exports
from titan_linear.models.decoder import Decoder
from titan_linear.step.optimizer import AdamW
from titan_linear.storage import checkpoint

STEP = 3  # in which a step fails; saves and validations are due after step 2
CAUSE, FAULT = "the cause", "FAULT "
DELAY = 4.0  # seconds of a slow save
RANK_0 = ("export",)  # exports are made on rank 0; other faults are rank 1's


def note() -> None:
    """When the fault came; seconds since the epoch."""
    print(f"{FAULT}{time.time()}", file=sys.stderr, flush=True)


def fail(*_: object, **options: object) -> NoReturn:
    note()
    raise KeyError(CAUSE)


def mistake(*_: object) -> NoReturn:
    note()
    raise ValueError(CAUSE)


def no_memory(*_: object) -> None:
    """On a GPU, of the allocator itself."""
    note()
    if torch.cuda.is_available():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 PiB. GPU 0 has a total capacity of ..."
    )


def no_host_memory(*_: object) -> NoReturn:
    note()
    raise MemoryError(CAUSE)


def die(*_: object) -> None:
    note()
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_: object) -> NoReturn:
    note()
    stay()


def _forward(fault: Callable[[], None], training: bool = True) -> None:
    """In a forward with gradients, of step STEP; or in the first one without."""
    forward, passes = Decoder.forward, []

    def failing(self, *args, **options):
        if torch.is_grad_enabled() == training:
            passes.append(1)
            if len(passes) == (STEP if training else 1):
                fault()
        return forward(self, *args, **options)

    Decoder.forward = failing


def _backward() -> None:
    forward = Decoder.forward

    def failing(self, *args, **options):
        loss = forward(self, *args, **options)
        if torch.is_grad_enabled():
            loss.register_hook(fail)
        return loss

    Decoder.forward = failing


def _compilation() -> None:
    from torch._inductor import compile_fx

    compile_fx.compile_fx = fail


def _while_saving() -> None:
    """In the step after an async save has begun, which takes DELAY seconds."""
    write = checkpoint._Writer.write_data

    def slowly(*given):
        time.sleep(DELAY)
        return write(*given)

    checkpoint._Writer.write_data = slowly
    _forward(fail)


PLACES: dict[str, Callable[[], None]] = {
    "forward": lambda: _forward(fail),
    "mistake": lambda: _forward(mistake),
    "compilation": _compilation,
    "backward": _backward,
    "optimizer": lambda: setattr(AdamW, "step", fail),
    "sync save": lambda: setattr(checkpoint.Checkpointer, "_sync", fail),
    "staging": lambda: setattr(checkpoint.DefaultStager, "stage", no_host_memory),
    "async save": lambda: setattr(checkpoint.Checkpointer, "_write", fail),
    "while saving": _while_saving,
    "validation": lambda: _forward(fail, training=False),
    "export": lambda: setattr(exports.Exports, "_begin", fail),
    "out of memory": lambda: _forward(no_memory),
    "SIGKILL": lambda: _forward(die),
    "hang": lambda: _forward(hang),
}
# Keys that a place needs.
KEYS = {
    "compilation": {"compile.enable": "true"},
    "staging": {"checkpoint.async_mode": "async"},
    "async save": {"checkpoint.async_mode": "async"},
    "while saving": {"checkpoint.async_mode": "async"},
    "validation": {"validation.enable": "true", "validation.freq": 2},
    "export": {"checkpoint.export_interval": 2},
    "hang": {"comm.train_timeout_seconds": 8},
}


def says(place: str) -> tuple[str, ...]:
    """Parts of lines of which one names what fails at a place."""
    return {
        "out of memory": ("error: rank 1: CUDA out of memory. Tried to allocate",),
        "mistake": (f"error: rank 1: {CAUSE}",),
        "sync save": ("error: saving step-2 in",),
        # the ranks, the launcher, torchrun
        "SIGKILL": ("no answer from rank 1", "rank 1 failed", "(SIGKILL)"),
        "hang": ("rank 1 not there",),
    }.get(place, (CAUSE,))


# others: 1
CODES = {"mistake": 2, "out of memory": 3, "sync save": 3, "SIGKILL": -signal.SIGKILL, "hang": 4}


def fail_at(place: str, rank: int) -> None:
    """Prepare this rank's process for a fault of one rank at a place."""
    if rank == (0 if place in RANK_0 else 1):
        PLACES[place]()


def wait_as_nccl_does() -> None:
    """On the CPU: have this process wait for a rank that is gone, where gloo raises an error."""
    # on GPUs this module is imported before that one runs as a program
    from titan_linear.train import Trainer

    train = Trainer.train

    def waiting(self):
        try:
            train(self)
        except RuntimeError as error:
            if peer_is_lost(error):
                stay()
            raise

    Trainer.train = waiting
