"""Graph pool: the memory, capture stream and capture lock that all graphs share, for inference and training.

Serialises captures, and reports whether a capture or a warm-up is in progress. A process normally has one pool.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graph_cache.backends.base import Backend, Memory


class GraphPool:
    """Shared graph memory and the capture lock. Captures of all threads run one at a time.

    `releasable`: graphs of sites, whose results don't outlive the next replay, have a separate memory, `site_memory`,
    which can be released between replays.
    """

    def __init__(self, backend: Backend, *, releasable: bool = False):
        self.backend = backend
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.memory = self.new_memory()
        self.site_memory = self.memory
        if releasable:
            self.site_memory = backend.new_memory(releasable=True)
            self._memories.add(self.site_memory)
        self.lock = threading.RLock()
        self._turn_lock: Any = threading.RLock()  # Any: typeshed lacks _is_owned
        self._turn_gate = threading.RLock()  # held by `quiet` while it waits, so that no new turn starts first
        self._captures = 0
        self._warmups = 0
        self._sessions = 0

    @property
    def capturing(self) -> bool:
        """Whether a capture is in progress, in any thread."""
        return self._captures > 0

    @property
    def warming(self) -> bool:
        """Whether warm-up runs before a capture are in progress, in any thread."""
        return self._warmups > 0

    def new_memory(self) -> Memory:
        """Return separate memory for graphs that cannot share it, such as a training step until its backward."""
        memory = self.backend.new_memory()
        self._memories.add(memory)
        return memory

    def nbytes(self) -> int:
        """Return the bytes that the graphs of this pool hold for intermediates."""
        return sum(memory.nbytes() for memory in list(self._memories))

    def trim(self) -> None:
        """Return memory that no live graph needs to the system."""
        with self.lock:
            for memory in list(self._memories):
                memory.trim()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the lock for one or more captures, with the garbage collector frozen meanwhile. Reentrant.

        A finaliser that frees a tensor during a capture can invalidate it, and a collection slows it down.
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
                    gc.collect()  # fast: older objects are still frozen
                    gc.unfreeze()
                    if collector_was_on:
                        gc.enable()

    @property
    def in_turn(self) -> bool:
        """Whether the calling thread holds the turn lock."""
        return bool(self._turn_lock._is_owned())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn lock while a thread that runs an engine calls the device; `quiet` waits for it. Reentrant."""
        if self._turn_lock._is_owned():  # nested: taking the gate would deadlock with a waiting `quiet`
            yield
            return
        with self._turn_gate:
            pass
        with self._turn_lock:
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Exclude other threads' captures and every engine's next turn.

        For captures by other libraries in CUDA's global capture mode, which an allocation in any thread would
        invalidate.
        """
        with self._turn_gate, self._turn_lock, self.lock:
            yield

    @contextmanager
    def capture_flag(self) -> Iterator[None]:
        """Mark a capture as in progress until the block ends, also on an error."""
        self._captures += 1
        try:
            yield
        finally:
            self._captures -= 1

    @contextmanager
    def warmup_flag(self) -> Iterator[None]:
        """Mark warm-up runs as in progress until the block ends, also on an error."""
        self._warmups += 1
        try:
            yield
        finally:
            self._warmups -= 1
