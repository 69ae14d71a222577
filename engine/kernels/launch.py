"""Device requirements of the kernels, and programmatic dependent launch (PDL).

A kernel launched with PDL may start while the previous kernel of its stream still runs. It calls `gdc_wait` before it
reads or writes memory that an earlier kernel may write or read.
"""

from __future__ import annotations

import functools

import torch

SHARED_BYTES = 227 * 1024
"""Shared memory per program on Hopper and data centre Blackwell. Tile sizes assume it."""


def fits(device: torch.device) -> bool:
    """Return whether this CUDA device has the shared memory that all kernels need.

    On a smaller device the first large GEMM would fail to launch.
    """
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES  # ROCm lacks the attribute


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether this tensor's device supports PDL: CUDA with compute capability 9.0 or newer."""
    return tensor.is_cuda and _capability(tensor.device) >= (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return Triton's launch option for PDL; empty where unsupported, since the interpreter rejects the option."""
    return {"launch_pdl": True} if pdl else {}
