"""GPU memory that can be released and restored at the same addresses: a torch.cuda.MemPool over virtual memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from graph_cache.backends.byte_ranges import Range, range_of, without
from graph_cache.backends.virtual_memory import virtual_memory
from graph_cache.errors import GraphError


def segments_of(pool_id: tuple[int, int]) -> list[dict]:
    """Return the allocator's segments of a pool, as given by `torch.cuda.memory_snapshot`.

    That function drops a reference too many to each number of the pool id (pytorch/pytorch#196366). Numbers above 256
    are then freed while in use, which crashes a process that has made that many pools. This function compares the
    reference counts before and after the call and restores them.
    """
    first, second = pool_id
    before = sys.getrefcount(first), sys.getrefcount(second)
    try:
        return torch.cuda.memory_snapshot(pool_id)
    finally:
        after = sys.getrefcount(first), sys.getrefcount(second)
        for place, number in enumerate(pool_id):
            for _ in range(before[place] - after[place]):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))


class CudaRegion:
    """Implementation of `backends.base.Region` on a GPU.

    Kept values go to one buffer of pinned host memory, which is kept for the next release: pinning takes seconds.
    """

    def __init__(self, device: torch.device):
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device, self._index = torch.device("cuda", index), index
        self._memory = virtual_memory()
        self._pool = torch.cuda.MemPool(self._memory.allocator)
        self.id: tuple[int, int] = self._pool.id
        self._released: list[Range] | None = None  # the segments that are unmapped; None: all are mapped
        self._kept: list[Range] = []
        self._discarded: list[Range] = []
        self._host: _PinnedBuffer | None = None

    @contextmanager
    def allocation(self) -> Iterator[None]:
        """Place the tensors that this thread creates in the block in this region."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def release(self, discarded: Sequence[torch.Tensor] = (), *, keeps: bool = True) -> int:
        """See Region."""
        if self._released is not None:
            return 0
        torch.cuda.synchronize(self._device)
        segments = segments_of(self.id)
        blocks = [
            Range(block["address"], block["size"])
            for segment in segments
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]
        dropped = [range_of(tensor) for tensor in discarded]
        kept = without(blocks, dropped) if keeps else []
        if kept:
            self._save(kept)
        released: list[Range] = []
        self._released, self._kept, self._discarded = released, kept, dropped
        for segment in segments:
            one = Range(segment["address"], segment["total_size"])
            self._memory.unmap(one.start, one.size, self._index)
            released.append(one)
        return sum(one.size for one in released)

    def restore(self) -> None:
        """See Region."""
        if self._released is None:
            return
        mapped: list[Range] = []
        present = {segment["address"] for segment in segments_of(self.id)}  # empty ones may have been freed meanwhile
        try:
            for one in self._released:
                if one.start not in present:
                    continue
                self._memory.map(one.start, one.size, self._index)
                mapped.append(one)
        except GraphError:
            for one in mapped:
                self._memory.unmap(one.start, one.size, self._index)
            raise
        self._released = None
        for one in self._discarded:
            self._bytes(one).zero_()
        start = 0
        for one in self._kept:
            assert self._host is not None
            self._bytes(one).copy_(self._host.bytes[start : start + one.size], non_blocking=True)
            start += one.size
        torch.cuda.synchronize(self._device)

    @property
    def nbytes(self) -> int:
        """Physical bytes that the region has now."""
        return 0 if self._released is not None else sum(segment["total_size"] for segment in segments_of(self.id))

    def _save(self, kept: list[Range]) -> None:
        size = sum(one.size for one in kept)
        if self._host is None or len(self._host.bytes) < size:
            self._host = None  # frees the smaller one first
            self._host = _PinnedBuffer(size)
        start = 0
        for one in kept:
            self._host.bytes[start : start + one.size].copy_(self._bytes(one), non_blocking=True)
            start += one.size
        torch.cuda.synchronize(self._device)

    def _bytes(self, one: Range) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(one.start, self._device, one.size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (one.size,), (1,))


class _PinnedBuffer:
    """Host memory of exactly `size` bytes, pinned. PyTorch's pinned tensors are rounded up to a power of two."""

    def __init__(self, size: int):
        self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0)
        if int(result):
            raise GraphError(f"{size >> 20} MiB of host memory can't be pinned: {runtime.cudaGetErrorString(result)}")
        self._unregister = runtime.cudaHostUnregister

    def __del__(self) -> None:
        if hasattr(self, "_unregister"):
            self._unregister(self.bytes.data_ptr())
