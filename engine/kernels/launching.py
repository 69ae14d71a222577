"""Programmatic dependent launch: which devices have it, and how Triton is asked for it.

A kernel launched so may start while the one ahead on its stream is still running; it calls `gdc_wait` before it reads
or writes anything that a kernel before it might write or read.
"""

from __future__ import annotations

import functools

import torch


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched so: CUDA from compute capability 9.0."""
    return tensor.is_cuda and _capability(tensor.device) >= (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Triton's launch option for it; the interpreter and devices without it are not given the name."""
    return {"launch_pdl": True} if pdl else {}
