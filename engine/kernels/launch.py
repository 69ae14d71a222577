"""Device requirements of the kernels, sizes of grids, and programmatic dependent launch (PDL).

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


@functools.cache
def has_gluon(device: torch.device) -> bool:
    """Return whether kernels in Gluon, an interface of Triton that changes between versions, run on this device.

    They are written for CUDA devices of compute capability 9.0.
    """
    if _capability(device) != (9, 0):
        return False
    import triton  # installed only with CUDA, by distributions of several names

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) in ((3, 6), (3, 7))


def has_hopper_kernels(device: torch.device, dtype: torch.dtype, dim: int, page_size: int) -> bool:
    """Return whether hopper_prefill.py computes heads of `dim` over pages of `page_size` tokens on this CUDA device.

    Its kernels use WGMMA instructions, through Gluon.
    """
    return (
        has_gluon(device)
        and dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and page_size in (8, 16, 32, 64, 128)
    )


def cdiv(count: int, size: int) -> int:
    """Return how many tiles of `size` cover `count`. Triton's own function takes 20 times as long."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`, which is positive. As fast as `cdiv`."""
    return 1 << (count - 1).bit_length()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether this tensor's device supports PDL: CUDA with compute capability 9.0 or newer."""
    return tensor.is_cuda and _capability(tensor.device) >= (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)  # Triton's interpreter


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return Triton's launch option for PDL; empty where unsupported, since the interpreter rejects the option."""
    return {"launch_pdl": True} if pdl else {}
