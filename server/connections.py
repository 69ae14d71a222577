"""Limits that hold before there is a request: how many connections, and how long headers may take.

Owns one subclass of uvicorn's HTTP protocol, which has neither limit: its `limit_concurrency` refuses probes too, in
plain text, and nothing in it ends a connection that never sends, or never finishes, its headers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import error_body

PROBES = tuple(f"GET {path} ".encode() for path in ("/health", "/ready", "/metrics"))
REFUSED_SECONDS = 1.0  # how long a refused connection may take to say something: only then it hears why


def limited_protocol(max_connections: int, header_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol with two limits.

    Connections beyond `max_connections` are answered 503 and closed, but for probes, which get their one answer: a
    server that is full must not be restarted for it. A connection on which no complete request header arrives within
    `header_seconds`, counted from its opening or from the header's first byte, is answered 408 and closed.
    """

    class LimitedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _surplus = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._surplus = len(self.connections) > max_connections
            self._start_timer(REFUSED_SECONDS if self._surplus else header_seconds)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._surplus and self.cycle is None and not data.startswith(PROBES):
                self._refuse(503, "the server has as many connections as it may have", "too_many_connections", 1)
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._timer is None:
                self._start_timer(header_seconds)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._surplus:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self, seconds: float) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self._refuse(408, f"no request came within {header_seconds:g} seconds", "header_timeout", None)

        def _refuse(self, status: int, message: str, code: str, retry_after: int | None) -> None:
            self.transport.write(_raw_answer(status, message, code, retry_after))
            self.transport.close()

    return LimitedProtocol


_PHRASES = {408: "Request Timeout", 503: "Service Unavailable"}
_TYPES = {408: "invalid_request_error", 503: "service_unavailable_error"}


def _raw_answer(status: int, message: str, code: str, retry_after: int | None) -> bytes:
    body = json.dumps(_body(status, message, code)).encode()
    lines = [
        f"HTTP/1.1 {status} {_PHRASES[status]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *([] if retry_after is None else [f"Retry-After: {retry_after}"]),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _body(status: int, message: str, code: str) -> dict[str, Any]:
    return error_body(message, _TYPES[status], None, code)
