"""Between the client, which gets what a step gave, and the one reader of a request: what waits, and in what pieces.

Owns the queue, where a request ends, and the joining of deltas for a reader who is behind. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import EngineError
from engine.protocol.outputs import OutputDelta

UNREAD_BYTES = 2**20  # of a request, beyond which its reader is too slow
UNREAD_BYTES_PER_SEQUENCE = 2**16  # added for each of its n: they are generated side by side
DELTA_BYTES = 300  # of one token without log-probabilities, measured on CPython 3.11
LOGPROB_BYTES = 100  # of one alternative in a token's log-probabilities


class OutputQueue:
    """Outputs that wait for a request's one reader, which takes all of them at once.

    `sequences`: how many the request has. `on_end(count)` is called when the engine is done with `count` of them,
    whether they are read or not, and never for more than there are.
    """

    __slots__ = ("_items", "_limit", "_on_end", "_running", "_unread_bytes", "_waiter")

    def __init__(self, sequences: int = 1, on_end: Callable[[int], None] | None = None) -> None:
        self._items: list[OutputDelta | EngineError] = []
        self._waiter: asyncio.Future[None] | None = None
        self._running, self._on_end = sequences, on_end
        self._unread_bytes, self._limit = 0, UNREAD_BYTES + sequences * UNREAD_BYTES_PER_SEQUENCE

    def add(self, delta: OutputDelta) -> bool:
        """Add a delta, and wake the reader. False once more is unread than is kept: the request must be given up."""
        self._unread_bytes += DELTA_BYTES
        if delta.logprobs is not None:
            self._unread_bytes += LOGPROB_BYTES * sum(len(one.top) for one in delta.logprobs)
        self.put(delta)
        if delta.finish_reason is not None:
            self.end(1)
        return self._unread_bytes <= self._limit

    def give_up(self, error: EngineError) -> None:
        """Drop all that is unread; the reader finds `error` in its place."""
        self._items, self._unread_bytes = [], 0
        self.put(error)
        self.end_all()

    def end(self, count: int) -> None:
        """The engine is done with so many more sequences."""
        count = min(count, self._running)
        self._running -= count
        if count and self._on_end is not None:
            self._on_end(count)

    def end_all(self) -> None:
        """The engine is done with every sequence."""
        self.end(self._running)

    def put(self, item: OutputDelta | EngineError) -> None:
        """Add an item, and wake the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[OutputDelta | EngineError]:
        """All that has come, in order; waits for the first."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items, self._unread_bytes = self._items, [], 0
        return items


def deltas_until_end(
    items: Sequence[OutputDelta | EngineError], open_children: set[str]
) -> tuple[list[OutputDelta], EngineError | None]:
    """The deltas up to an error, or to where the last child ends: what comes after that is the engine's own end."""
    deltas: list[OutputDelta] = []
    for item in items:
        if isinstance(item, EngineError):
            return deltas, item
        deltas.append(item)
        if item.finish_reason is not None:
            open_children.discard(item.child_id)
            if not open_children:
                break
    return deltas, None


def merge_deltas(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """The deltas of each sequence in their order, joined where they can be. The first of each run is written to."""
    found: list[OutputDelta] = []
    last: dict[str, OutputDelta] = {}
    for delta in deltas:
        before = last.get(delta.child_id)
        if before is None or not before.join(delta):
            last[delta.child_id] = delta
            found.append(delta)
    return found
