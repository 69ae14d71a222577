"""Threads in which one client's many tasks make way for those of others."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class FairPool:
    """Runs tasks by rank, lowest first, and in order within a rank. Threads start when they are first needed.

    Tasks of a rank above 0 run in at most half of the threads, rounded down, but in one at least: what a client asks
    for first finds a thread although others have filled the queue.
    """

    def __init__(self, max_threads: int, name: str):
        self._max_threads, self._name = max_threads, name
        self._max_further = max(1, max_threads // 2)
        self._changed = threading.Condition()
        self._tasks: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []  # a heap
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = self._further = 0
        self._closed = False

    def submit(self, rank: int, function: Callable[[], Any]) -> Future[Any]:
        """Return the future of `function()`. Cancelled before it begins, it never does.

        Raises RuntimeError once the pool is closed.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            heapq.heappush(self._tasks, (rank, next(self._numbers), future, function))
            if self._idle < len(self._tasks) and len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def cancel_all(self) -> None:
        """Accept no more tasks, and cancel those that have not begun."""
        with self._changed:
            self._closed = True
            tasks, self._tasks = self._tasks, []
            self._changed.notify_all()
        for _, _, future, _ in tasks:
            future.cancel()

    def join(self) -> None:
        """Wait for the tasks that run, after `cancel_all`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._take()) is not None:
            rank, _, future, function = task
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)
            finally:
                del future, function
                if rank:
                    with self._changed:
                        self._further -= 1
                        self._changed.notify()

    def _take(self) -> tuple[int, int, Future[Any], Callable[[], Any]] | None:
        """Wait for a task that may run now; None once the pool is closed."""
        with self._changed:
            self._idle += 1
            try:
                while not self._closed:
                    if self._tasks and (not self._tasks[0][0] or self._further < self._max_further):
                        task = heapq.heappop(self._tasks)
                        self._further += bool(task[0])
                        return task
                    self._changed.wait()
                return None
            finally:
                self._idle -= 1
