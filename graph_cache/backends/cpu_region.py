"""Host memory that can be released and restored: pages of tensors go back to the system, addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graph_cache.backends.byte_ranges import Range, range_of

_DONT_NEED = 4  # MADV_DONTNEED of Linux, after which anonymous pages read as zeros


class CpuRegion:
    """Implementation of `backends.base.Region` on a CPU: kept values stay where they are."""

    def __init__(self) -> None:
        self._is_released = False

    def allocation(self) -> AbstractContextManager[None]:
        """Do nothing: only tensors that are discarded are released."""
        return nullcontext()

    def release(self, discarded: Sequence[torch.Tensor] = (), *, keeps: bool = True) -> int:
        """See Region. The pages of `discarded` return to the system on Linux."""
        if self._is_released:
            return 0
        self._is_released = True
        return sum(map(drop, discarded))

    def restore(self) -> None:
        """See Region. The system gives pages at their next use."""
        self._is_released = False


def drop(tensor: torch.Tensor) -> int:
    """Zero a contiguous tensor by returning its whole pages to the system; return their bytes. Others are written."""
    found = range_of(tensor)
    pages = _whole_pages(found)
    if pages.size and not _advise(pages):
        pages = Range(found.start, 0)
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[: pages.start - found.start].zero_()
    flat[pages.end - found.start :].zero_()
    return pages.size


def _whole_pages(found: Range) -> Range:
    start = -(-found.start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = found.end // mmap.PAGESIZE * mmap.PAGESIZE
    return Range(start, end - start) if end > start else Range(found.start, 0)


def _advise(pages: Range) -> bool:
    """Return whether the system took the pages back."""
    if not sys.platform.startswith("linux"):
        return False
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(pages.size), ctypes.c_int(_DONT_NEED)) == 0
