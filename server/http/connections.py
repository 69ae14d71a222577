"""Connection limits: the number of connections, header size and timeout, and a write timeout.

They are a subclass of uvicorn's HTTP protocol, which has none of them: its `limit_concurrency` refuses probes too, in
plain text, and it never closes a connection whose client does not finish its headers or does not read.
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

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.http.direct import EXTENSION, DirectBody
from server.http.errors import error_body
from server.http.request_head import HEADER_BYTES, InvalidHead, check_head, header_too_long
from server.http.turns import Turns
from server.observability.shared_counters import SharedCounters

log = logging.getLogger("encore.server")

PROBES = tuple(f"GET {path} ".encode() for path in ("/health", "/ready", "/metrics"))
FRAMING_BYTES = 64 * 1024  # limit for the chunk extensions and trailers of one body
CHUNK_SIZE_BYTES = 20  # allowance per chunk: a size of 16 digits, and the line ends after it and after the chunk
HALF_CLOSED_SECONDS = 0.1  # between probes of a client that closed its sending side
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REFUSED_SECONDS = 1.0  # a refused connection may send its request for this long, to receive the reason
ACCEPTING = "takes_connections"  # gauge, 1 while an API worker accepts connections


class OpenConnections:
    """Open connections of each API worker. A worker sets its own count and reads the counts of all workers.

    The gauge holds the count plus one while the worker accepts connections; 0 means a row without a worker.
    """

    def __init__(self, counters: SharedCounters | None = None):
        self._counters = counters if counters is not None else SharedCounters()
        self._connections_index = self._counters.gauge_index("connections")
        self._accepting_index = self._counters.gauge_index(ACCEPTING)
        self._own = 0

    def begin(self) -> None:
        """Publish this worker's count: it accepts connections from now on."""
        self._counters.values[self._accepting_index] = 1.0
        self.set(self._own)

    def end(self) -> None:
        """Withdraw this worker's count: it no longer accepts connections."""
        self._counters.values[self._accepting_index] = self._counters.values[self._connections_index] = 0.0

    def set(self, count: int) -> None:
        """Set this worker's number of open connections."""
        self._own = count
        self._counters.values[self._connections_index] = count + 1

    def total(self) -> int:
        """Return the number of open connections of all workers."""
        return int(sum(published - 1 for published in self._published()))

    def lead(self, accepted: int) -> int:
        """Return by how many connections this worker is ahead of the one with the fewest; 0 if there is no other.

        `accepted`: its connections that are not in its count yet.
        """
        published = self._published()
        return int(self._own + 1 + accepted - min(published)) if len(published) > 1 else 0

    def _published(self) -> list[float]:
        return [published for published in self._counters.gauge_per_row("connections") if published]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with limits. A subclass sets the limits (`limited_protocol`).

    - Connections beyond `max_connections` get 503 and are closed. Probes still get one response: a full server must
      not be restarted.
    - 408 if no complete request header arrives within `header_seconds` of the connection's start or of the header's
      first byte. 400 if the header is longer than HEADER_BYTES.
    - 431 if chunk extensions and trailers of one body are longer than FRAMING_BYTES. Trailers are dropped: no route
      reads them.
    - A connection whose client reads none of its pending response for `write_seconds` is reset, which aborts its
      request.
    - A client that closes only its sending side gets the answers to its complete requests. See `eof_received`.
    - 400 for requests that can't be parsed, or that a proxy might read differently (`check_head`), with the error body
      of all other errors. Upgrades are ignored.
    - A request that is refused here gets its error after the answers to the requests before it.
    - Requests begin in turns. Probes don't wait for theirs.
    """

    max_connections: int
    header_seconds: float
    write_seconds: float
    open_connections: OpenConnections
    turns: Turns

    _timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None  # of a client that closed its sending side
    _unread = b""  # the beginning of a request that waits for its turn
    _over_limit = False
    _in_header = True
    _header_bytes = 0  # received of the current header
    _framing_bytes = 0  # received of the current body beyond content and chunk sizes
    _body_bytes = 0  # delivered by the parser for the current piece of data, plus an allowance per chunk size
    _message_ended = False  # within the current piece of data
    _earlier: RequestResponseCycle | None = None  # the request before the current one
    _refusal: bytes | None = None  # sent after the answers that are due; data that arrives until then is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_CountingTransport(transport))  # type: ignore[arg-type]
        self._sent, self._progress_time = 0, self.loop.time()
        self._write_check = self.loop.call_later(self._check_interval, self._check_write_progress)
        self.open_connections.set(len(self.connections))
        self._over_limit = self.open_connections.total() > self.max_connections
        self._start_timer(REFUSED_SECONDS if self._over_limit else self.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._unread += data
            return
        begins = self._in_header and not self._header_bytes
        if begins and not data.startswith(PROBES) and not self.turns.take(self._read_in_turn):
            self._unread = data
            self.flow.pause_reading()
            self._stop_timer()  # the client has not been slow: `_read` starts it again
            return
        self._read(data)

    def _read_in_turn(self) -> None:
        """Read what arrived before this connection's turn."""
        if self._unread:
            data, self._unread = self._unread, b""
            self.flow.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._over_limit and self.cycle is None and not data.startswith(PROBES):
            self._refuse(503, "the server has reached its limit of connections", "too_many_connections", 1)
            return
        self._header_bytes += len(data) if self._in_header else 0
        was_in_body, self._body_bytes, self._message_ended = not self._in_header, 0, False
        self._feed(data)
        if self.transport.is_closing() or self._refusal is not None:  # the parser refused it
            return
        if was_in_body and not self._message_ended:
            # The parser reports no extensions and buffers trailers of any length: count raw bytes to bound both.
            self._framing_bytes = max(0, self._framing_bytes + len(data) - self._body_bytes)
            if self._framing_bytes > FRAMING_BYTES:
                message = f"chunk extensions and trailers are longer than {FRAMING_BYTES} bytes"
                self._refuse(431, message, "trailers_too_long", None)
                return
        if self._in_header and self._header_bytes > HEADER_BYTES:
            self._refuse_head(header_too_long())
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
        if self._wants_upgrade():
            return  # parsed again by `_feed_without_upgrade`
        check_head(self.parser.get_http_version(), self.url, self.headers)
        earlier = self.cycle
        super().on_headers_complete()  # fails for an invalid URL
        self.cycle.scope["extensions"] = {EXTENSION: {"body": DirectBody(self.cycle)}}
        self._earlier, self._in_header, self._framing_bytes = earlier, False, 0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade():
            return
        self._in_header, self._header_bytes, self._message_ended = True, 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if self._over_limit:
            self.transport.close()
        if was_last and self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open if the client awaits answers: it may have closed its sending side only.

        Closing both sides looks the same until something is written, and a request whose client left must be aborted.
        So interim responses (100 Continue), which clients skip, are written until the response starts: the second one
        fails if the client left.
        """
        self._read_in_turn()
        self._stop_timer()
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        if last is None or last.response_complete or last.more_body or self.transport.is_closing():
            return None
        if last.scope["http_version"] != "1.1":  # HTTP/1.0 has no interim responses
            return None
        if self._refusal is None:
            last.keep_alive = False  # closes the connection after the last answer
        self._probe_half_closed()
        return True

    def _probe_half_closed(self) -> None:
        self._probe = None
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(CONTINUE)
        self._probe = self.loop.call_later(HALF_CLOSED_SECONDS, self._probe_half_closed)

    def _feed(self, data: bytes) -> None:
        """Parse received data, like uvicorn's data_received, which drops the body of a request with an upgrade."""
        self._unset_keepalive_if_required()
        rest = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            found = error.__context__  # what a callback raised
            self._refuse_head(found if isinstance(found, InvalidHead) else InvalidHead("the request is not valid HTTP"))
        if rest is not None and self._wants_upgrade():
            self._feed_without_upgrade(rest)

    def _wants_upgrade(self) -> bool:
        """Return whether the header asks for another protocol. The parser skips the body of such a request."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse the current request again without its upgrade, which no route offers, and then `rest`, its body."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = b""
        self._stop_timer()
        if self._probe is not None:
            self._probe.cancel()
        self._write_check.cancel()
        super().connection_lost(exc)
        self.open_connections.set(len(self.connections))

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._on_header_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_header_timeout(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(
                408, f"no request header arrived within {self.header_seconds:g} seconds", "header_timeout", None
            )

    @property
    def _check_interval(self) -> float:
        return self.write_seconds / 4

    def _check_write_progress(self) -> None:
        """Reset the connection if its client has read nothing for `write_seconds`, also while it is closing.

        A plain close would wait for the client forever and leave megabytes in the kernel's send buffer.
        """
        transport: Any = self.transport
        waiting, now = transport.get_write_buffer_size() + _unsent_bytes(transport), self.loop.time()
        sent = transport.written - waiting
        if not waiting or sent != self._sent:
            self._sent, self._progress_time = sent, now
        elif now - self._progress_time >= self.write_seconds:
            log.warning("reset a connection: its client left %d bytes unread for %g s", waiting, self.write_seconds)
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()
            return
        self._write_check = self.loop.call_later(self._check_interval, self._check_write_progress)

    def _refuse_head(self, error: InvalidHead) -> None:
        log.info("a request is refused: %s", error)
        self._refuse(400, str(error), error.code, None)

    def _refuse(self, status: int, message: str, code: str, retry_after: int | None) -> None:
        """Answer the request being read with an error and close the connection, once earlier requests are answered."""
        response = _raw_response(status, message, code, retry_after)
        if self.pipeline and not self._in_header:  # the request waits: it must not start
            assert self._earlier is not None  # it is being answered, or waits too
            self.pipeline.popleft()
            self.cycle, self._in_header = self._earlier, True
        if self._in_header and self.cycle is not None and not self.cycle.response_complete:
            self._refusal = response
            self._stop_timer()
            return
        if self._in_header or not self.cycle.response_started:
            self.transport.write(response)
        self.transport.close()


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send buffer that the client has not acknowledged; 0 if unknown.

    Needed to see the progress of a slow reader: the kernel accepts new bytes only when a third of its buffer is free.
    """
    try:
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # not supported on this system, or the socket is closed
        return 0
    return int.from_bytes(queued, sys.byteorder)


class _CountingTransport:
    """A transport that counts the bytes written to it, from which the protocol derives the bytes that were sent."""

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
    """Return a subclass of LimitedProtocol with these limits."""
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {
            "max_connections": max_connections,
            "header_seconds": header_seconds,
            "write_seconds": write_seconds,
            "open_connections": open_connections,
            "turns": Turns(),
        },
    )


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_TYPES = dict.fromkeys((400, 408, 431), "invalid_request_error") | {503: "service_unavailable_error"}


def _raw_response(status: int, message: str, code: str, retry_after: int | None) -> bytes:
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
