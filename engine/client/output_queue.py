"""Queue the outputs of one request for its single reader, and merge deltas for a reader that falls behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.errors import EngineError
from engine.protocol.outputs import OutputDelta


class OutputQueue:
    """Outputs that wait for a request's single reader, which takes all of them at once."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[OutputDelta | EngineError] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: OutputDelta | EngineError) -> None:
        """Append an item and wake the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[OutputDelta | EngineError]:
        """Return all queued items in order, waiting until there is at least one."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        return items


def deltas_until_end(
    items: Sequence[OutputDelta | EngineError], open_children: set[str]
) -> tuple[list[OutputDelta], EngineError | None]:
    """Return the deltas up to the first error or the end of the last child, and that error or None.

    Removes finished children from `open_children`. Items after the end of the last child are ignored: they can only be
    errors from an engine that ended later.
    """
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
    """Merge consecutive deltas of each sequence where possible. The first of each run is modified in place."""
    found: list[OutputDelta] = []
    last: dict[str, OutputDelta] = {}
    for delta in deltas:
        before = last.get(delta.child_id)
        if before is None or not before.join(delta):
            last[delta.child_id] = delta
            found.append(delta)
    return found
