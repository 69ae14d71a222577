"""Keep the graphs of a training step to one thread: a replay overwrites what another thread's call still uses."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from graph_cache.core.keys import OTHER_THREAD
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats

T = TypeVar("T")


class OneThread:
    """Serve the calls of one thread, the first that calls, until it ends; run other threads' calls eager.

    Autograd's threads belong to it: checkpoints recompute forwards in them. Other threads' calls wait for a capture to
    end, and the next capture for them: a capture replaces parameters of the modules for a moment.
    """

    def __init__(self, pool: GraphPool, stats: CacheStats):
        self._pool, self._stats = pool, stats
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._owner_id = 0
        self._has_others = False

    def calls(self, call: Callable[[Any, tuple, dict[str, Any]], Any]) -> Callable[[Any, tuple, dict[str, Any]], Any]:
        """Return `call(attached, args, kwargs)` for the owner, and the original method for all other threads."""

        def guarded(attached: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() == self._owner_id or self._takes_over():
                return call(attached, args, kwargs)
            thread = threading.current_thread()
            if _is_autograd(thread):
                if not self._has_others:
                    return call(attached, args, kwargs)
                self._stats.fallbacks[attached.name, "forward", OTHER_THREAD] += 1
                return attached.eager(*args, **kwargs)  # without the lock, which the thread that waits may hold
            with self._pool.lock:
                self._has_others = True
                self._stats.fallbacks[attached.name, "forward", OTHER_THREAD] += 1
                return attached.eager(*args, **kwargs)

        return guarded

    def _takes_over(self) -> bool:
        """Make the calling thread the owner if there is none, or if the owner has ended."""
        thread = threading.current_thread()
        if _is_autograd(thread):
            return False
        with self._lock:
            if self._owner is not None and self._owner.is_alive():
                return False
            self._owner, self._owner_id = thread, threading.get_ident()
            return True


def _is_autograd(thread: threading.Thread) -> bool:
    """Whether a thread of autograd's engine, which Python did not start, runs a backward."""
    is_foreign = isinstance(thread, threading._DummyThread)  # noqa: SLF001
    return is_foreign and torch._C._current_graph_task_id() != -1


def one_at_a_time(method: Callable[..., T]) -> Callable[..., T]:
    """Let one thread at a time into a method of an object; the others wait. Reentrant."""

    @functools.wraps(method)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> T:
        with vars(self).setdefault("_calls_of_threads", threading.RLock()):
            return method(self, *args, **kwargs)

    return waiting
