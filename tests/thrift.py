"""What processes of tests do without: work of PyTorch's whose results nothing here uses."""

from __future__ import annotations

import gc

from torch.distributed import ProcessGroupGloo


def be_thrifty() -> None:
    """For a process that runs tests one after the other, before it makes its first group."""
    gc.set_threshold(20_000, 20, 20)  # the compiler makes many objects, of which few are in cycles
    do_not_time_guards()
    share_gloo_device()


def do_not_time_guards() -> None:
    """The compiler empties the processor's caches and times a graph's guards, 50 ms each, for a line of its log."""
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *_: 0.0


def share_gloo_device() -> None:
    """One for all groups, instead of one each: a device has a thread, which wakes up a hundred times a second."""
    device, make = ProcessGroupGloo.create_default_device(), ProcessGroupGloo.__init__

    def on_device(self, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = on_device
