"""Write a piece of a response where its content arrives, instead of waking the task of the response.

For a token, the task switch and the way through generators and middleware cost several times what its text costs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fastapi import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from engine.protocol.outputs import OutputDelta

EXTENSION = "encore.direct"  # of the ASGI scope; only this server's protocol has it


class DirectBody:
    """The body of a response that has begun: pieces are written at once, past the middleware.

    Use it only while the response's task sends nothing, or pieces would overtake each other.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = weakref.ref(cycle)  # the cycle's scope holds this object

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written now: the response has begun, and its client reads it."""
        cycle = self._cycle()
        return (
            cycle is not None and bool(cycle.chunked_encoding) and not cycle.response_complete
            and not cycle.disconnected and not cycle.flow.write_paused
        )  # fmt: skip

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty, as a chunk of the body. Only if `is_ready`."""
        cycle = self._cycle()
        assert cycle is not None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class DirectWriter:
    """Writes the events of deltas to a body. `events_of(delta)` returns them, or b"" if there are none."""

    def __init__(self, body: DirectBody, events_of: Callable[[OutputDelta], bytes]):
        self._body, self._events_of = body, events_of

    @property
    def is_ready(self) -> bool:
        """Whether the events of a delta can be written now."""
        return self._body.is_ready

    def write(self, delta: OutputDelta) -> None:
        """Write the events of a delta. Only if `is_ready`."""
        events = self._events_of(delta)
        if events:
            self._body.write(events)


def direct_writer(request: Request, events_of: Callable[[OutputDelta], bytes]) -> DirectWriter | None:
    """Return a writer to the response of a request; None if its server has no direct way to it."""
    body = request.scope.get("extensions", {}).get(EXTENSION, {}).get("body")
    return None if body is None else DirectWriter(body, events_of)
