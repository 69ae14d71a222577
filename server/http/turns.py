"""Let work that arrives in a burst begin in turns, so that probes and streams share the event loop with it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

STARTS = 4  # per iteration of the event loop; a request takes about a millisecond until it waits for its engine


class Turns:
    """Begin at most STARTS pieces of work in an iteration of the event loop, first come, first served.

    An event loop runs all that is ready before it reads again: the first work of a thousand requests that arrive
    together would take a second, during which no probe is answered.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0  # in this iteration

    def take(self, later: Callable[[], None]) -> bool:
        """Return whether the caller may begin now. If not, `later` is called when it is its turn."""
        if self._begun == STARTS:
            self._waiting.append(later)
            return False
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._begun += 1
        return True

    def _next_iteration(self) -> None:
        self._begun = min(STARTS, len(self._waiting))
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        for _ in range(self._begun):
            self._waiting.popleft()()
