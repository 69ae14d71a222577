"""Threads in which one client's many tasks make way for other clients' tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.utils.fair_queue import FairQueue, Ticket


class FairPool:
    """Runs tasks in threads, in the order of a FairQueue. Threads start when they are first needed."""

    def __init__(self, max_threads: int, name: str):
        self._max_threads, self._name = max_threads, name
        self._changed = threading.Condition()
        self._tasks: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue(max_threads)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, rank: int, function: Callable[[], Any], client: str = "") -> Future[Any]:
        """Return the future of `function()`. Cancelled before it begins, it never does.

        `client`, `rank`: as in FairQueue. Raises RuntimeError once the pool is closed.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._tasks.push((future, function), client, rank)
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
            tasks = self._tasks.clear()
            self._changed.notify_all()
        for future, _ in tasks:
            future.cancel()

    def join(self) -> None:
        """Wait for the tasks that run, after `cancel_all`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._take()) is not None:
            ticket, (future, function) = task
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)
            finally:
                del future, function, task
                with self._changed:
                    self._tasks.done(ticket)
                    self._changed.notify()

    def _take(self) -> tuple[Ticket, tuple[Future[Any], Callable[[], Any]]] | None:
        """Wait for a task that may run now; None once the pool is closed."""
        with self._changed:
            self._idle += 1
            try:
                while not self._closed:
                    if (task := self._tasks.take()) is not None:
                        return task
                    self._changed.wait()
                return None
            finally:
                self._idle -= 1
