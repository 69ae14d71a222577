"""Backends that capture graphs: `cuda` (CUDA graphs) and `cpu` (a recorded tape), behind one interface."""

from __future__ import annotations

import torch

from graph_cache.backends.base import Backend
from graph_cache.errors import GraphConfigError


def backend_for(device: torch.device | str) -> Backend:
    """Return the backend that captures on `device`, importing it on demand."""
    device = torch.device(device)
    if device.type == "cuda":
        from graph_cache.backends.cuda import CudaBackend

        return CudaBackend(device)
    if device.type == "cpu":
        from graph_cache.backends.cpu import CpuBackend

        return CpuBackend()
    raise GraphConfigError(f"no graph backend for device {device}: use cpu or cuda, or disable graphs")
