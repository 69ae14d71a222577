"""Moves of blocks between the tiers: send the scheduler's orders to the workers, and take their reports."""

from __future__ import annotations

import time

from engine.executor.interface import Executor
from engine.scheduling.kv_events import KVEventRecorder
from engine.scheduling.lower_tiers import LowerTiers
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler

WAIT_SECONDS = 0.0005  # between two looks at what is moved, while nothing else can run
SAVE_SECONDS = 2.0  # for writing cached pages to disk when the engine stops
GIB = 2**30


def open_tiers(executor: Executor, cache: PrefixCache | None, events: KVEventRecorder | None) -> LowerTiers | None:
    """Return the tiers that the settings ask for; None if there are none."""
    workers = executor.capabilities
    if cache is None or not workers.host_blocks:
        return None
    disk = workers.config.kv_offloading_disk_size
    files = None if disk is None else executor.call("open_files")
    return LowerTiers(
        cache,
        workers.host_blocks,
        workers.block_bytes,
        disk_bytes=int((disk or 0) * GIB),
        files=files,
        events=events,
    )


class TierMoves:
    """Moves blocks between the tiers of one engine. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, executor: Executor, tiers: LowerTiers):
        self._scheduler, self._executor, self._tiers = scheduler, executor, tiers

    def poll(self) -> None:
        """Take what has been moved. Call it before scheduling."""
        if not self._tiers.is_busy:
            return
        moved = self._executor.call("poll_blocks")
        if moved.promoted:
            self._executor.call("blocks_arrived", list(moved.promoted))
        self._scheduler.finish_moves(moved)

    def send(self) -> None:
        """Begin the moves that scheduling asks for. Call it before the scheduled step is enqueued."""
        if moves := self._tiers.take_moves():
            self._executor.call("move_blocks", moves)

    def wait(self) -> None:
        """Wait a moment if blocks rise: nothing else can run."""
        if self._tiers.num_rising:
            time.sleep(WAIT_SECONDS)

    def drain(self) -> None:
        """Wait until no block rises, so that no page is written to and none is referenced by a promotion."""
        while self._tiers.num_rising:
            self.poll()
            self.wait()

    def save(self) -> None:
        """Write cached pages that are in no file to disk, for at most SAVE_SECONDS. No step may be in flight."""
        if not self._tiers.has_disk:
            return
        deadline = time.monotonic() + SAVE_SECONDS
        self.drain()
        left = self._tiers.max_files
        while time.monotonic() < deadline:
            begun = self._tiers.save_some(left)
            left -= begun
            self.send()
            if not begun and not self._tiers.is_busy:
                return
            self.poll()
            time.sleep(WAIT_SECONDS)
        self.send()  # what the last report has deleted
