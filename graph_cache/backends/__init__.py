"""Backends that capture graphs: `cuda` (CUDA graphs) and `cpu` (a recorded tape), behind one interface."""

from __future__ import annotations

import torch

from graph_cache.backends.base import Backend, Region
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


def region_for(device: torch.device | str) -> Region:
    """Return a new region of memory on `device`. Raises GraphConfigError if it can't be made on this machine."""
    device = torch.device(device)
    if device.type == "cuda":
        from graph_cache.backends.cuda_region import CudaRegion

        return CudaRegion(device)
    if device.type == "cpu":
        from graph_cache.backends.cpu_region import CpuRegion

        return CpuRegion()
    raise GraphConfigError(f"memory of device {device} can't be released: use cpu or cuda")
