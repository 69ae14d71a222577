"""Between the client, which gets what a step gave, and the one reader of a request: what waits, and in what pieces.

Owns the queue, where a request ends, and the joining of deltas for a reader who is behind. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.errors import EngineError
from engine.protocol.outputs import OutputDelta


class OutputQueue:
    """What waits for a request's one reader, who takes all of it at once."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[OutputDelta | EngineError] = []
        self._waiter: asyncio.Future[None] | None = None

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
        items, self._items = self._items, []
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
