"""Arena for the intermediates of all CPU graphs, and the layout of a tape's buffers in it.

The arena is reserved as address space and committed on touch, so it never moves, and the order of captures does not
matter: its size is that of the largest live graph.
"""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from collections.abc import Container, Sequence

import torch

from graph_cache.backends.cpu_tape import Buffer
from graph_cache.errors import CaptureError

ALIGNMENT = 64  # a cache line, and the widest vector
RESERVED_BYTES = 1 << 36


def plan_layout(buffers: Sequence[Buffer], kept: Container[int] = ()) -> tuple[list[int], int]:
    """Compute byte offsets for buffers with known lifetimes, and the bytes needed: first fit in order of birth.

    Buffers in `kept` are not placed. Two buffers share memory only if no operation touches both: an operation's inputs
    are still alive while its outputs are placed.
    """
    offsets = [0] * len(buffers)
    free: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent
    top = 0
    expiring: dict[int, list[int]] = {}
    placed = [index for index in range(len(buffers)) if index not in kept]
    order = sorted(placed, key=lambda index: buffers[index].first)
    op_index = 0
    for index in order:
        buffer = buffers[index]
        while op_index < buffer.first:
            for expired in expiring.pop(op_index, ()):
                top = _release(free, offsets[expired], _aligned(buffers[expired].nbytes), top)
            op_index += 1
        size = _aligned(buffer.nbytes)
        for position, (offset, free_size) in enumerate(free):
            if free_size >= size:
                offsets[index] = offset
                free[position : position + 1] = [(offset + size, free_size - size)] if free_size > size else []
                break
        else:
            offsets[index] = top
            top += size
        expiring.setdefault(buffer.last, []).append(index)
    need = max((offsets[i] + _aligned(buffers[i].nbytes) for i in placed), default=0)
    return offsets, need


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


def _release(free: list[tuple[int, int]], offset: int, size: int, top: int) -> int:
    """Return a range to the free list, merged with its neighbours. Returns the new top if the last range reaches it."""
    free.append((offset, size))
    free.sort()
    joined: list[tuple[int, int]] = []
    for start, length in free:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    if joined and joined[-1][0] + joined[-1][1] == top:
        top = joined.pop()[0]
    free[:] = joined
    return top


class Claim:
    """One graph's use of the arena's first `nbytes` bytes, until the graph closes."""

    def __init__(self, arena: Arena, nbytes: int):
        self.nbytes = nbytes
        self._arena = arena

    def tensor(
        self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], byte_offset: int
    ) -> torch.Tensor:
        """Return a view of the arena. `byte_offset` must be aligned to the dtype."""
        storage = self._arena.storage
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, byte_offset // dtype.itemsize, size, stride)


class Arena:
    """Memory shared by all CPU graphs of one pool. As a pool's `Memory`, its size is that of its largest claim."""

    def __init__(self) -> None:
        self._map = _reserve(RESERVED_BYTES)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.storage = self._bytes.untyped_storage()
        self._claims: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._touched = 0

    def claim(self, nbytes: int) -> Claim:
        """Claim the first `nbytes` bytes. Raises CaptureError beyond the reserved address space."""
        if nbytes > len(self._map):
            raise CaptureError(f"a graph needs {nbytes} bytes of intermediates; the arena reserves {len(self._map)}")
        claim = Claim(self, nbytes)
        self._claims.add(claim)
        self._touched = max(self._touched, nbytes)
        return claim

    def nbytes(self) -> int:
        """Return the bytes of the largest live claim."""
        return max((claim.nbytes for claim in self._claims), default=0)

    def trim(self) -> None:
        """Return pages above the largest live claim to the system."""
        keep_end = -(-self.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = -(-self._touched // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > keep_end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, keep_end, end - keep_end)
        self._touched = min(self._touched, keep_end)

    def release(self) -> int:
        """Return all pages to the system, which gives new ones at the next replay; return their bytes."""
        end = -(-self._touched // mmap.PAGESIZE) * mmap.PAGESIZE
        if not end or not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        self._map.madvise(mmap.MADV_DONTNEED, 0, end)
        return end

    def restore(self) -> None:
        """Do nothing: pages come back when they are used."""


def _reserve(nbytes: int) -> mmap.mmap:
    """Reserve private address space without committing memory; a smaller range if the system refuses.

    Dropped pools are parts of reference cycles. If the system refuses, they are collected first.
    """
    collected = False
    while True:
        try:
            if sys.platform.startswith("linux"):
                no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's mmap from 3.13 on
                return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
            return mmap.mmap(-1, nbytes)
        except OSError:
            if not collected:
                gc.collect()
                collected = True
                continue
            if nbytes <= 1 << 28:
                raise
            nbytes >>= 2
