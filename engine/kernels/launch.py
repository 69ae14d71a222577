"""What these kernels need of a device, and programmatic dependent launch: who has it, how Triton is asked for it.

A kernel launched so may start while the one ahead on its stream is still running; it calls `gdc_wait` before it reads
or writes anything that a kernel before it might write or read.
"""

from __future__ import annotations

import functools

import torch

SHARED_BYTES = 227 * 1024
"""Shared memory that one program may take: what Hopper and data centre Blackwell have. Tiles are chosen for it."""


def fits(device: torch.device) -> bool:
    """Whether every kernel can be launched on this CUDA device; others would fail at their first large product."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES  # ROCm says nothing of it


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched so: CUDA from compute capability 9.0."""
    return tensor.is_cuda and _capability(tensor.device) >= (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Triton's launch option for it; the interpreter and devices without it are not given the name."""
    return {"launch_pdl": True} if pdl else {}
