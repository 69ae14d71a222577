"""Zeroed host memory for caches.

`torch.zeros` writes all of it before it returns: half a second for 1 GiB. The kernel zeroes each page at its first use.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a zeroed tensor in anonymous pages, which are resident from their first use on.

    Raises OSError if the system can't reserve them.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))  # its storage keeps `pages` alive
