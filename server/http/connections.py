"""Limits that hold before there is a request: how many connections, how long headers may take and be.

Owns one subclass of uvicorn's HTTP protocol, which has none of them: its `limit_concurrency` refuses probes too, in
plain text, and nothing in it ends a connection that never sends, or never finishes, its headers, or never reads.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import socket
import struct
import sys
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http.errors import error_body
from server.observability.shared_counters import SharedCounters

log = logging.getLogger("encore.server")

PROBES = tuple(f"GET {path} ".encode() for path in ("/health", "/ready", "/metrics"))
HEADER_BYTES = 64 * 1024
FRAMING_BYTES = 64 * 1024  # of one body's chunk extensions and trailers
CHUNK_SIZE_BYTES = 20  # a chunk's size of 16 digits, and the line ends after it and after the chunk
REFUSED_SECONDS = 1.0  # how long a refused connection may take to say something: only then it hears why
TAKES_CONNECTIONS = "takes_connections"  # the gauge that is 1 while a front of several takes part


class OpenConnections:
    """How many connections each front of a server has open: this one's to set, all of them to read.

    A front that takes connections shows one more than it has, since 0 is a row without a front.
    """

    def __init__(self, counters: SharedCounters | None = None):
        self._counters = counters if counters is not None else SharedCounters()
        self._place, self._takes = self._counters.gauge("connections"), self._counters.gauge(TAKES_CONNECTIONS)
        self._own = 0

    def begin(self) -> None:
        """Take part in the sharing of connections."""
        self._counters.values[self._takes] = 1.0
        self.set(self._own)

    def end(self) -> None:
        """Take no more part."""
        self._counters.values[self._takes] = self._counters.values[self._place] = 0.0

    def set(self, count: int) -> None:
        """This front has `count` now."""
        self._own = count
        self._counters.values[self._place] = count + 1

    def total(self) -> int:
        """All fronts' together."""
        return int(sum(shown - 1 for shown in self._shown()))

    def ahead(self) -> int:
        """How many more this front has than the one with the fewest."""
        return int(self._own + 1 - min(self._shown(), default=0))

    def _shown(self) -> list[float]:
        return [shown for shown in self._counters.each_gauge("connections") if shown]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, on the C parser, with limits, which a subclass sets.

    Connections beyond `max_connections` are answered 503 and closed, but for probes, which get their one answer: a
    server that is full must not be restarted for it. A connection on which no complete request header arrives within
    `header_seconds`, counted from its opening or from the header's first byte, is answered 408 and closed; one whose
    header is longer than HEADER_BYTES, 400. Chunk extensions and trailers of one body longer than FRAMING_BYTES are
    answered 431 and the connection is closed. Trailers are read and dropped: no route reads them. A connection that
    takes nothing of what waits for it for `write_seconds` is reset, which aborts its request.
    """

    max_connections: int
    header_seconds: float
    write_seconds: float
    open_connections: OpenConnections

    _timer: asyncio.TimerHandle | None = None
    _surplus = False
    _in_header = True
    _header_bytes = 0  # of the header that is being read
    _header_too_long = False
    _framing_bytes = 0  # of the body that is being read: received bytes that are neither its content nor a chunk's size
    _body_bytes = 0  # delivered by the parser, with an allowance for each chunk's size, since the last piece of data
    _message_ended = False  # in this piece of data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Counted(transport))  # type: ignore[arg-type]
        self._sent, self._sent_at = 0, self.loop.time()
        self._write_check = self.loop.call_later(self._check_seconds, self._check_writing)
        self.open_connections.set(len(self.connections))
        self._surplus = self.open_connections.total() > self.max_connections
        self._start_timer(REFUSED_SECONDS if self._surplus else self.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._surplus and self.cycle is None and not data.startswith(PROBES):
            self._refuse(503, "the server has as many connections as it may have", "too_many_connections", 1)
            return
        self._header_bytes += len(data) if self._in_header else 0
        was_in_body, self._body_bytes, self._message_ended = not self._in_header, 0, False
        super().data_received(data)
        if self.transport.is_closing():  # the parser refused it
            return
        if was_in_body and not self._message_ended:
            # The parser reports no extension and collects a trailer of any length: only raw bytes show both.
            self._framing_bytes = max(0, self._framing_bytes + len(data) - self._body_bytes)
            if self._framing_bytes > FRAMING_BYTES:
                message = f"chunk extensions and trailers are longer than {FRAMING_BYTES} bytes"
                self._refuse(431, message, "trailers_too_long", None)
                return
        if self._header_too_long or (self._in_header and self._header_bytes > HEADER_BYTES):
            self._refuse(400, f"the header is longer than {HEADER_BYTES} bytes", "header_too_long", None)
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer(self.header_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._body_bytes += CHUNK_SIZE_BYTES

    def on_headers_complete(self) -> None:
        self._header_too_long = sum(len(name) + len(value) for name, value in self.headers) > HEADER_BYTES
        if not self._header_too_long:
            self._in_header, self._framing_bytes = False, 0
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._header_too_long:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_header, self._header_bytes, self._message_ended = True, 0, True
        if not self._header_too_long:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._surplus:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._write_check.cancel()
        super().connection_lost(exc)
        self.open_connections.set(len(self.connections))

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"no request came within {self.header_seconds:g} seconds", "header_timeout", None)

    @property
    def _check_seconds(self) -> float:
        return self.write_seconds / 4

    def _check_writing(self) -> None:
        """Reset a connection whose client took nothing since `write_seconds`; also one that is closing.

        Closing alone waits for the client for ever, and a connection that is not reset leaves megabytes to the system.
        """
        transport: Any = self.transport
        waiting, now = transport.get_write_buffer_size() + _unsent(transport), self.loop.time()
        sent = transport.written - waiting
        if not waiting or sent != self._sent:
            self._sent, self._sent_at = sent, now
        elif now - self._sent_at >= self.write_seconds:
            log.warning("a connection is closed: its client left %d bytes unread for %g s", waiting, self.write_seconds)
            at_once = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self.transport.abort()
            return
        self._write_check = self.loop.call_later(self._check_seconds, self._check_writing)

    def _refuse(self, status: int, message: str, code: str, retry_after: int | None) -> None:
        if self._awaits_answer():
            self.transport.write(_raw_answer(status, message, code, retry_after))
        self.transport.close()

    def _awaits_answer(self) -> bool:
        """Whether the next answer on this connection belongs to the request that is being read.

        Written in the midst of another request's answer, a refusal would be read as part of that one.
        """
        if self.cycle is None:
            return True
        if self.pipeline:
            return False
        return self.cycle.response_complete if self._in_header else not self.cycle.response_started


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that the system holds until the client's takes them; 0 where it doesn't say.

    It takes new ones only when a third of its buffer is free: a slow reader of megabytes would seem to stand still.
    """
    try:
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # not on this system; or the socket was closed a moment ago
        return 0
    return int.from_bytes(answer, sys.byteorder)


class _Counted:
    """A transport that counts the bytes written to it: the client has taken those that wait nowhere any more."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def limited_protocol(
    max_connections: int, header_seconds: float, write_seconds: float, open_connections: OpenConnections
) -> type[LimitedProtocol]:
    """LimitedProtocol with these limits."""
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {
            "max_connections": max_connections,
            "header_seconds": header_seconds,
            "write_seconds": write_seconds,
            "open_connections": open_connections,
        },
    )


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_TYPES = dict.fromkeys((400, 408, 431), "invalid_request_error") | {503: "service_unavailable_error"}


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
