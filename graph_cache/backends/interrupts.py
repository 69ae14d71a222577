"""Give up a capture between two operations, because something more urgent waits for the thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graph_cache.guards.dispatch_mode import DispatchMode

POLL_SECONDS = 0.002  # between two questions: each may read from a pipe


class CaptureInterrupted(BaseException):
    """A capture was given up before it was complete; it left no trace and can be tried again.

    Not an Exception, so that no code of the captured callable swallows it.
    """


class Interrupts:
    """Whether captures may be given up, and who decides. One thread captures at a time."""

    def __init__(self) -> None:
        self._is_wanted: Callable[[], bool] | None = None
        self._next_poll = 0.0

    @contextmanager
    def allow(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Within the block, a capture on a CPU raises CaptureInterrupted soon after `is_wanted()` is true."""
        self._is_wanted, self._next_poll = is_wanted, 0.0
        try:
            yield
        finally:
            self._is_wanted = None

    def check(self) -> None:
        """Raise CaptureInterrupted if that is allowed and wanted."""
        if self._is_wanted is None or (now := time.monotonic()) < self._next_poll:
            return
        self._next_poll = now + POLL_SECONDS
        if self._is_wanted():
            raise CaptureInterrupted

    def checking(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run` with a check before each of its operations; `run` itself if captures can't be interrupted."""
        if self._is_wanted is None:
            return run

        def checked() -> None:
            with _Checks(self):
                run()

        return checked


class _Checks(DispatchMode):
    """Check for an interrupt before each operation, which runs as it would without this mode."""

    supports_higher_order_operators = True

    def __init__(self, interrupts: Interrupts):
        super().__init__()
        self._interrupts = interrupts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._interrupts.check()
        return func(*args, **(kwargs or {}))
