"""The devices that graphs run on: `cuda` (CUDA graphs) and `cpu` (a recorded tape), under one contract."""

from __future__ import annotations

import torch

from graph_cache.backends.base import Backend
from graph_cache.errors import GraphConfigError


def backend_for(device: torch.device | str) -> Backend:
    """The backend that captures on `device`; imported only when asked for."""
    device = torch.device(device)
    if device.type == "cuda":
        from graph_cache.backends.cuda import CudaBackend

        return CudaBackend(device)
    if device.type == "cpu":
        from graph_cache.backends.cpu import CpuBackend

        return CpuBackend()
    raise GraphConfigError(f"no graph backend for device {device}: use cpu or cuda, or turn graphs off")
