"""The CPU as a platform of verl, which has none, chosen by VERL_PLATFORM=cpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: object, **__: object) -> None:
    pass


def _zero(*_: object, **__: object) -> int:
    return 0


# What verl calls of torch.cuda, with no memory to report.
DEVICE = SimpleNamespace(
    get_device_name=lambda *_: "CPU",
    is_available=torch.cpu.is_available,
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    memory_allocated=_zero,
    memory_reserved=_zero,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    mem_get_info=lambda *_: (0, 0),
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    set_device = _nothing
    synchronize = _nothing
    manual_seed = _nothing
    manual_seed_all = _nothing
    set_allocator_settings = _nothing
    empty_cache = _nothing
    profiler_start = _nothing
    profiler_stop = _nothing
    cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Only VERL_PLATFORM chooses it.
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
