"""A limit on the bytes of all request bodies of an API worker together, and who gives way when it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from server.http.errors import WireError
from server.observability.shared_counters import SharedCounters

UNCOUNTED_BYTES = 64 * 1024  # of each body: small requests are served, whatever others upload
BODY_BYTES = "body_bytes"  # gauge: bytes of bodies that count
GRACE_SECONDS = 1.0  # a younger upload never gives way: from a fast client it is complete by then


class BodyBudget:
    """Bytes of request bodies that an API worker holds: `max_bytes` in all, plus UNCOUNTED_BYTES of each body.

    A body counts while it arrives and until it is released: parsed and tokenized, or its request is over. If a body
    doesn't fit, the slowest unfinished upload older than GRACE_SECONDS is dropped, so that stalled uploads can't hold
    the memory. Without one, the body that doesn't fit is refused.
    """

    def __init__(self, max_bytes: int, counters: SharedCounters):
        self.max_bytes = max_bytes
        self._used = 0
        self._unfinished: set[Upload] = set()
        self._counters, self._gauge = counters, counters.gauge_index(BODY_BYTES)

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """Yield the buffer of a new body, which is released on exit."""
        found = Upload(self)
        self._unfinished.add(found)
        try:
            yield found
        finally:
            found.release()

    def reserve(self, upload: Upload, count: int) -> None:
        """Count `count` more bytes for an unfinished upload. Raises WireError 503 if there is no room for them."""
        while self._used + count > self.max_bytes:
            slowest = self._slowest(upload)
            if slowest is None:
                raise self.refusal()
            slowest.drop()
        self._count(count)

    def free(self, count: int) -> None:
        """Stop counting this many bytes."""
        self._count(-count)

    def finish(self, upload: Upload) -> None:
        """Record that a body is complete, so that it is not dropped any more."""
        self._unfinished.discard(upload)

    def refusal(self) -> WireError:
        """Return the error of a body without room."""
        return WireError(
            503, f"request bodies reached the limit of {self.max_bytes} bytes together (--max-total-body-bytes): "
            "retry later",
            type="service_unavailable_error", code="too_many_body_bytes", retry_after=1,
        )  # fmt: skip

    def _count(self, change: int) -> None:
        self._used += change
        self._counters.values[self._gauge] = self._used

    def _slowest(self, newcomer: Upload) -> Upload | None:
        now = asyncio.get_running_loop().time()
        old = (
            one
            for one in self._unfinished
            if one is not newcomer and one.counted and now - one.start_time > GRACE_SECONDS
        )
        return min(old, key=lambda one: len(one.content) / (now - one.start_time), default=None)


class Upload:
    """The body of one request: a buffer while it arrives, and its part of the budget until `release`."""

    def __init__(self, budget: BodyBudget):
        self._budget = budget
        self._deadline: asyncio.Timeout  # set by `arriving`
        self.start_time = asyncio.get_running_loop().time()
        self.content = bytearray()  # a list of chunks of one byte would take forty times their size
        self.counted = 0
        self.is_complete = self._was_dropped = False

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """Bound the wait for this body. Raises WireError 408 after `seconds`, 503 if the body is dropped."""
        try:
            async with asyncio.timeout(seconds) as self._deadline:
                yield
        except TimeoutError:
            late = WireError(
                408, f"the body did not arrive within {seconds:g} seconds (--body-seconds)", code="body_timeout"
            )
            raise (self._budget.refusal() if self._was_dropped else late) from None

    def add(self, chunk: bytes) -> None:
        """Append a chunk. Raises WireError 503 if the budget has no room for it, or if this upload was dropped."""
        if self._was_dropped:
            raise self._budget.refusal()
        counted = max(0, len(self.content) + len(chunk) - UNCOUNTED_BYTES)
        if counted > self.counted:
            self._budget.reserve(self, counted - self.counted)
            self.counted = counted
        self.content += chunk

    def take(self) -> bytes:
        """Return the complete body and drop the buffer. The body still counts."""
        self._budget.finish(self)
        content, self.content = bytes(self.content), bytearray()
        return content

    def drop(self) -> None:
        """Give the memory back at once, and end the wait for the rest of this body."""
        self._was_dropped = True
        self.release()
        self._deadline.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Stop counting this body: it is not in memory any more. A second call does nothing."""
        self._budget.finish(self)
        self._budget.free(self.counted)
        self.content, self.counted = bytearray(), 0
