"""The one pool: memory, capture stream and capture lock that every graph shares, for inference and for training.

Owns who may capture when, and the queries whether a capture or a warm-up is in progress. A process normally has one.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from graph_cache.backends.base import Backend, Memory


class GraphPool:
    """Shared memory and the lock around captures. Captures of all threads go one at a time."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.memory = self.new_memory()
        self.lock = threading.RLock()
        self._turn_lock = threading.RLock()
        self._turn_gate = threading.RLock()  # who waits for the end of a turn holds it, or the next would begin before
        self._captures = 0
        self._warmups = 0
        self._sessions = 0

    @property
    def capturing(self) -> bool:
        """Whether a capture is in progress, in any thread."""
        return self._captures > 0

    @property
    def warming(self) -> bool:
        """Whether eager runs that prepare a capture are in progress, in any thread."""
        return self._warmups > 0

    def new_memory(self) -> Memory:
        """Memory for graphs that may not share that of others: those of a training step, alive until its backward."""
        memory = self.backend.new_memory()
        self._memories.add(memory)
        return memory

    def nbytes(self) -> int:
        """Bytes that the graphs of this pool hold for their intermediates."""
        return sum(memory.nbytes() for memory in list(self._memories))

    def trim(self) -> None:
        """Return memory that no live graph needs."""
        with self.lock:
            for memory in list(self._memories):
                memory.trim()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the lock for one or many captures, with the garbage collector frozen until the last is done.

        A finaliser that frees a tensor in the middle can invalidate a capture, and a collection makes it slow. Nests.
        """
        with self.lock:
            self._sessions += 1
            collector_was_on = gc.isenabled()
            if self._sessions == 1:
                gc.disable()
                gc.freeze()
            try:
                yield
            finally:
                self._sessions -= 1
                if self._sessions == 0:
                    gc.collect()  # while older objects are frozen: only what the session left, which takes no time
                    gc.unfreeze()
                    if collector_was_on:
                        gc.enable()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What a thread that runs an engine holds while it calls the device, for `quiet` to wait for. Nests."""
        if self._turn_lock._is_owned():  # whoever waits for its end holds the gate
            yield
            return
        with self._turn_gate:
            pass
        with self._turn_lock:
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold off every other thread's captures and every engine's next turn.

        For captures by others in CUDA's global mode, which any thread's allocation would break.
        """
        with self._turn_gate, self._turn_lock, self.lock:
            yield

    @contextmanager
    def capture_flag(self) -> Iterator[None]:
        """Mark a capture as in progress; undone however the block ends."""
        self._captures += 1
        try:
            yield
        finally:
            self._captures -= 1

    @contextmanager
    def warmup_flag(self) -> Iterator[None]:
        """Mark warm-up runs as in progress; undone however the block ends."""
        self._warmups += 1
        try:
            yield
        finally:
            self._warmups -= 1
