"""The memory of the tiers below the KV cache: copies of pages in host memory, and the files behind them.

On a GPU, pages are gathered into a buffer on the stream of the steps, and copied from there to pinned memory on another
stream, so that a step waits for the gathering only. Pages rise on that other stream too; steps read them once they are
reported. On a CPU all copies are made at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import host_memory
from engine.attention.kv_cache import KVCache
from engine.errors import ConfigError
from engine.protocol.kv_moves import Moved, Moves, PromotionOrder, RisingBlock
from engine.utils.async_copy import ids_to
from engine.worker.block_files import BlockFiles

STAGING_BYTES = 64 << 20  # of each of the three buffers on a GPU
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _Rising(NamedTuple):
    order: PromotionOrder
    reads: list[Future[bool] | None]


class KVTiers:
    """Host memory for `num_slots` blocks of `kv`, and optionally files. Not thread-safe: the loop's thread uses it.

    A block is what all tensors of the cache hold for one page, in their order. Raises ConfigError if there is no room.
    """

    def __init__(self, kv: KVCache, num_slots: int, files: BlockFiles | None = None):
        storage = [pages for tensors in kv.storage for pages in tensors]
        self.files, self.device = files, kv.device
        self.num_slots, self.block_bytes = num_slots, block_bytes(kv)
        word = next(one for one in WORDS if all(pages[0].nbytes % one.itemsize == 0 for pages in storage))
        self._pages = [pages.view(kv.num_pages, -1).view(word) for pages in storage]
        ends = torch.tensor([pages.shape[1] for pages in self._pages]).cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._host = _host_memory((num_slots, ends[-1]), word, self.device)
        self._bytes = self._host.view(torch.uint8).numpy()
        self._stream: torch.cuda.Stream | None = None
        self._down: list[tuple[Tensor, torch.cuda.Event]] = []  # buffers, used in turn, and when each is free
        self._up: Tensor | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            rows = max(1, min(num_slots, STAGING_BYTES // self.block_bytes))
            first, second, self._up = torch.empty((3, rows, ends[-1]), dtype=word, device=self.device)
            self._down = [(first, torch.cuda.Event()), (second, torch.cuda.Event())]
        self._reading: list[_Rising] = []
        self._copying: dict[int, tuple[torch.cuda.Event | None, list[int]]] = {}
        self._unwritten: list[tuple[torch.cuda.Event | None, dict[str, int]]] = []  # until their copies have arrived
        self._writing: list[tuple[int, Future[int]]] = []
        self._discarded: list[int] = []  # slots whose writes were dropped
        self._events: dict[int, torch.cuda.Event | None] = {}

    # ---- moves -----------------------------------------------------------------------------------------------------

    def move(self, moves: Moves, fingerprint: str = "") -> None:
        """Begin all moves. `fingerprint`: of the model, if files are cleared. See Moves for the order."""
        if moves.clears and self.files is not None:
            self._discarded += [slot for _, writes in self._unwritten for slot in writes.values()]
            self._unwritten.clear()
            self.files.clear(fingerprint)
        if moves.offloads:
            self._offload(moves.offloads)
        if moves.deletions and self.files is not None:
            self.files.delete(moves.deletions)
        for order in moves.promotions:
            self._begin(order)
        if moves.writes:
            self._unwritten.append((self._recorded(), moves.writes))

    def poll(self) -> Moved:
        """Go on with what is under way, and report what has ended. Steps may read the pages of ended promotions after
        `arrived`.
        """
        moved = Moved()
        for rising in self._reading.copy():
            if all(read is None or read.done() for read in rising.reads):
                self._reading.remove(rising)
                self._copy_up(rising)
        for number, (event, failed) in list(self._copying.items()):
            if event is None or event.query():
                del self._copying[number]
                moved.promoted[number] = failed
        while self._unwritten and ((event := self._unwritten[0][0]) is None or event.query()):
            _, writes = self._unwritten.pop(0)
            assert self.files is not None
            self._writing += [(slot, self.files.write(name, self._block(slot))) for name, slot in writes.items()]
        for one in self._writing.copy():
            if one[1].done():  # asked once: a thread may end it at any time
                self._writing.remove(one)
                moved.written[one[0]] = one[1].result()
        moved.written |= dict.fromkeys(self._discarded, 0)
        self._discarded = []
        return moved

    def arrived(self, numbers: Sequence[int]) -> None:
        """Let all later steps wait for the pages of these promotions, which have ended on rank 0."""
        for number in numbers:
            event = self._events.pop(number)
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
            self._copying.pop(number, None)

    # ---- blocks from and to elsewhere ------------------------------------------------------------------------------

    def read_blocks(self, places: Mapping[str, int | None]) -> dict[str, bytes | None]:
        """Return blocks by name, from their slots, or from their files where it is None; None if one can't be read."""
        self._wait()
        found: dict[str, bytes | None] = {}
        buffers = {name: bytearray(self.block_bytes) for name, slot in places.items() if slot is None}
        reads = {}
        for name, buffer in buffers.items():
            assert self.files is not None
            reads[name] = self.files.read(name, memoryview(buffer))
        for name, slot in places.items():
            if slot is not None:
                found[name] = bytes(self._block(slot))
            else:
                found[name] = bytes(buffers[name]) if reads[name].result() else None
        return found

    def write_blocks(self, blocks: Mapping[int, bytes]) -> None:
        """Write blocks to slots, which no move uses."""
        self._wait()
        for slot, block in blocks.items():
            self._block(slot)[:] = block

    def _wait(self) -> None:
        """Wait for the copies from and to host memory."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Wait for the copies, and close the files."""
        self._wait()
        if self.files is not None:
            self.files.close()

    # ---- copies ----------------------------------------------------------------------------------------------------

    def _offload(self, offloads: dict[int, int]) -> None:
        slots, pages = list(offloads), list(offloads.values())
        if self._stream is None:
            index, target = torch.tensor(pages), torch.tensor(slots)
            for source, (start, end) in zip(self._pages, self._spans, strict=True):
                self._host[:, start:end].index_copy_(0, target, source.index_select(0, index))
            return
        steps, size = torch.cuda.current_stream(self.device), len(self._down[0][0])
        for first in range(0, len(slots), size):
            buffer, is_free = self._down[0]
            self._down.reverse()
            steps.wait_event(is_free)
            part = slots[first : first + size]
            rows, index = buffer[: len(part)], ids_to(self.device, pages[first : first + size])
            for source, (start, end) in zip(self._pages, self._spans, strict=True):
                rows[:, start:end].copy_(source.index_select(0, index))
            self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                for row, slot, count in _runs(part):
                    self._host[slot : slot + count].copy_(rows[row : row + count], non_blocking=True)
                is_free.record(self._stream)

    def _begin(self, order: PromotionOrder) -> None:
        """Read the files of a promotion; without any, copy at once."""
        reads: list[Future[bool] | None] = []
        for block in order.blocks:
            assert not block.name or self.files is not None
            reads.append(self.files.read(block.name, self._block(block.slot)) if self.files and block.name else None)
        rising = _Rising(order, reads)
        if any(read is not None for read in reads):
            self._reading.append(rising)
        else:
            self._copy_up(rising)

    def _copy_up(self, rising: _Rising) -> None:
        results = [read is None or read.result() for read in rising.reads]
        blocks = [block for block, is_read in zip(rising.order.blocks, results, strict=True) if is_read]
        failed = [index for index, is_read in enumerate(results) if not is_read]
        if self._stream is None:
            pages, slots = (torch.tensor(ids, dtype=torch.int64) for ids in _ids(blocks))
            for target, (start, end) in zip(self._pages, self._spans, strict=True):
                target.index_copy_(0, pages, self._host[:, start:end].index_select(0, slots))
        else:
            self._upload(self._stream, blocks)
        event = self._recorded()
        self._events[rising.order.number] = event
        self._copying[rising.order.number] = event, failed

    def _upload(self, stream: torch.cuda.Stream, blocks: Sequence[RisingBlock]) -> None:
        # Steps that were enqueued before may still write to these pages, for requests that have ended.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        assert self._up is not None
        with torch.cuda.stream(stream):
            for first in range(0, len(blocks), len(self._up)):
                pages, slots = _ids(blocks[first : first + len(self._up)])
                rows, index = self._up[: len(pages)], ids_to(self.device, pages)
                for row, slot, count in _runs(slots):
                    rows[row : row + count].copy_(self._host[slot : slot + count], non_blocking=True)
                for target, (start, end) in zip(self._pages, self._spans, strict=True):
                    target.index_copy_(0, index, rows[:, start:end])

    def _recorded(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def _block(self, slot: int) -> memoryview:
        return memoryview(self._bytes[slot])


def block_bytes(kv: KVCache) -> int:
    """Return the bytes of one page in all tensors of a cache."""
    return sum(pages[0].nbytes for tensors in kv.storage for pages in tensors)


def _ids(blocks: Sequence[RisingBlock]) -> tuple[list[int], list[int]]:
    return [block.page for block in blocks], [block.slot for block in blocks]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, first slot, count) of each run of neighbouring slots, which one copy moves."""
    first = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield first, slots[first], end - first
            first = end


def _host_memory(shape: tuple[int, int], word: torch.dtype, device: torch.device) -> Tensor:
    try:
        if device.type == "cuda":
            return torch.empty(shape, dtype=word, pin_memory=True)
        return host_memory.zeros(shape, word)
    except (OSError, RuntimeError) as error:
        size = shape[0] * shape[1] * word.itemsize / 2**30
        raise ConfigError(
            f"kv_offloading_size: the system has no {size:.1f} GiB of memory for it ({error}): lower it"
        ) from error
