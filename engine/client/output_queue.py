"""Queue the outputs of one request for its single reader, and merge deltas for a reader that falls behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from engine.errors import EngineError
from engine.protocol.outputs import OutputDelta

UNREAD_BYTES = 2**20  # limit of unread output per request; beyond it the reader is too slow
UNREAD_BYTES_PER_SEQUENCE = 2**16  # added per sequence, since the n sequences generate in parallel
UNREAD_TOKENS_PER_SEQUENCE = 4  # the same for log-probabilities of a whole vocabulary, one of which may be larger
DELTA_BYTES = 300  # per token without log-probabilities, measured on CPython 3.11
LOGPROB_BYTES = 100  # per alternative in a token's log-probabilities, once they are objects to be written as JSON


class OutputQueue:
    """Outputs that wait for a request's single reader, which takes all of them at once.

    `sequences` is the number of the request's sequences. `on_end(count)` is called when the engine has finished `count`
    of them, read or not; the counts add up to `sequences` at most. `on_hidden_states(parts)` is called for hidden
    states and experts that arrive, which don't count as unread output here. Each token has log-probabilities of
    `num_alternatives` others. `on_delta(delta)` is offered a delta for which the reader waits, and returns whether it
    took it: the reader is not woken then.
    """

    __slots__ = (
        "_items", "_limit", "_on_delta", "_on_end", "_on_hidden_states", "_running", "_unread_bytes", "_waiter",
    )  # fmt: skip

    def __init__(
        self,
        sequences: int = 1,
        on_end: Callable[[int], None] | None = None,
        on_hidden_states: Callable[[Sequence[np.ndarray]], None] | None = None,
        num_alternatives: int = 0,
        on_delta: Callable[[OutputDelta], bool] | None = None,
    ) -> None:
        self._on_hidden_states, self._on_delta = on_hidden_states, on_delta
        self._items: list[OutputDelta | Exception] = []
        self._waiter: asyncio.Future[None] | None = None
        self._running, self._on_end = sequences, on_end
        per_sequence = max(UNREAD_BYTES_PER_SEQUENCE, UNREAD_TOKENS_PER_SEQUENCE * LOGPROB_BYTES * num_alternatives)
        self._unread_bytes, self._limit = 0, UNREAD_BYTES + sequences * per_sequence

    def add(self, delta: OutputDelta) -> bool:
        """Add a delta and wake the reader. Return False once the unread output exceeds the limit: abort the request."""
        if self._on_delta is not None and self._is_taken(delta, self._on_delta):
            return True
        self._unread_bytes += DELTA_BYTES
        if delta.logprobs is not None:
            self._unread_bytes += LOGPROB_BYTES * delta.logprobs.num_alternatives
        if self._on_hidden_states is not None and (delta.hidden_state_parts or delta.routed_expert_parts):
            self._on_hidden_states([*delta.hidden_state_parts, *delta.routed_expert_parts])
        self.put(delta)
        if delta.finish_reason is not None:
            self.end(1)
        return self._unread_bytes <= self._limit

    def _is_taken(self, delta: OutputDelta, on_delta: Callable[[OutputDelta], bool]) -> bool:
        """Offer a delta to `on_delta`. What it raises reaches the reader."""
        if self._items or self._waiter is None or self._waiter.done():  # the reader is busy with earlier deltas
            return False
        try:
            return on_delta(delta)
        except Exception as error:
            self.put(error)
            return True

    def give_up(self, error: EngineError) -> None:
        """Replace the unread output by `error`."""
        self._items, self._unread_bytes = [], 0
        self.put(error)
        self.end_all()

    def end(self, count: int) -> None:
        """Record that the engine has finished `count` more sequences."""
        count = min(count, self._running)
        self._running -= count
        if count and self._on_end is not None:
            self._on_end(count)

    def end_all(self) -> None:
        """Record that the engine has finished every sequence."""
        self.end(self._running)

    def put(self, item: OutputDelta | Exception) -> None:
        """Append an item and wake the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[OutputDelta | Exception]:
        """Return all queued items in order, waiting until there is at least one."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items, self._unread_bytes = self._items, [], 0
        return items


def deltas_until_end(
    items: Sequence[OutputDelta | Exception], open_children: set[str]
) -> tuple[list[OutputDelta], Exception | None]:
    """Return the deltas up to the first error or the end of the last child, and that error or None.

    Removes finished children from `open_children`. Items after the end of the last child are ignored: they can only be
    errors from an engine that ended later.
    """
    deltas: list[OutputDelta] = []
    for item in items:
        if isinstance(item, Exception):
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
