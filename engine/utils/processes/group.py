"""Child processes that are only useful together: the first failure of one ends all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait

from engine.utils.processes.child import ChildProcess

logger = logging.getLogger(__name__)

FAILURE_GRACE_SECONDS = 5.0  # a connection error may precede the message with its cause by this much


class ProcessGroup:
    """Several child processes, started by the calls in `starts`. Call the methods from one thread.

    `failure` is the reason once the group has failed: the first one given. If a process can't be started, those before
    it are killed and the error is raised.
    """

    def __init__(self, starts: Iterable[Callable[[], ChildProcess]]):
        self.failure: str | None = None
        self.children: list[ChildProcess] = []
        self._lock = threading.Lock()  # guards `failure`
        self._on_failure: Callable[[], None] | None = None
        self._watcher: threading.Thread | None = None
        self._is_ending = False
        try:
            for start in starts:
                self.children.append(start())
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of the processes."""
        return [child.pid for child in self.children]

    def readable(self, children: Iterable[ChildProcess]) -> list[ChildProcess]:
        """Wait until a pipe of these children has a message or is closed, and return its child or children."""
        by_pipe: dict[Connection, ChildProcess] = {child.pipe: child for child in children}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe)) if isinstance(pipe, Connection)]

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Start a thread that fails the group when a pipe closes or has a message; no more messages are expected.

        When the group fails, `on_failure` is called in a new thread.
        """
        self._on_failure = on_failure
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="encore-group")
        self._watcher.start()

    def _watch(self) -> None:
        reason = self.readable(self.children)[0].exit_reason()
        if not self._is_ending:
            self.fail(reason)

    def fail(self, reason: str) -> str:
        """Mark the group as failed and return the reason; the first reason given is kept."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
                logger.error("%s; all processes of its group are stopped", reason)
                if self._on_failure is not None:
                    threading.Thread(target=self._on_failure, daemon=True, name="encore-group-failed").start()
        return self.failure

    def pending_failure(self) -> str | None:
        """Return why the group failed, waiting up to FAILURE_GRACE_SECONDS for it; None if no failure is reported."""
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        while self._watcher is not None and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def begin_stop(self) -> None:
        """Expect the processes to end: from now on that is no failure. Call it before asking them to stop."""
        self._is_ending = True

    def stop(self, seconds: float) -> None:
        """Wait for processes that were asked to stop, `seconds` for all of them; kill the rest and close the pipes."""
        self._is_ending = True
        deadline = time.monotonic() + seconds
        for child in self.children:
            child.stop(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill_children(self) -> None:
        """Kill all processes and wait for their ends. The pipes stay open."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()

    def kill(self) -> None:
        """Kill all processes and close the pipes. Safe at any time and more than once."""
        self._is_ending = True
        self.kill_children()
        if self._watcher is not None:
            self._watcher.join(1.0)  # it reads the pipes that are closed next
        for child in self.children:
            child.pipe.close()
