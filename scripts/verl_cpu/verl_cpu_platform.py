"""A platform of verl's for a machine without GPUs, so that its PPO trainer runs there. For `main.py` beside it alone.

verl 0.9 has platforms for GPUs only. This one says that the machine has one device, which is the CPU; Ray is told that
there is one GPU, since verl asks for it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

DEVICE = types.ModuleType("cpu_device")  # in place of torch.cuda: nothing to do, and no memory to report
DEVICE.__getattr__ = lambda name: lambda *args, **kwargs: 0
DEVICE.is_available = lambda: True
DEVICE.device_count = lambda: 1
DEVICE.get_device_name = lambda *args: "cpu"
DEVICE.mem_get_info = lambda *args: (1 << 34, 1 << 34)
DEVICE.get_rng_state = torch.get_rng_state


def _nothing(*args: Any) -> None:
    pass


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU as the only device."""

    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)
    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = dist.init_process_group


def _init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Ask for gloo once: verl asks for it for the CPU and for the device, which is the same."""
    _init_process_group("gloo" if backend and backend.startswith("cpu:gloo") else backend, *args, **kwargs)


dist.init_process_group = _init
