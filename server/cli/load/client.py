"""Send requests to an OpenAI-compatible server at given times, and measure when the parts of each stream arrive.

An asyncio protocol on httptools, so that one process can read tens of thousands of events per second.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json

from engine.errors import ConfigError

ERROR_BYTES = 2000  # of an error response, that are kept


@dataclass
class Measured:
    """One request: seconds since the start of the run, and tokens as the server counted them.

    - sent, ended: when the request was sent and its response was complete.
    - arrivals: when the events with generated text arrived. Events that were read at once have the same time.
    - prompt_tokens, output_tokens: of the response's usage; None if it has none.
    - error: why the request failed; empty if it succeeded.
    """

    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


class Target:
    """The server: its address, the headers of a request, and the route of the load."""

    def __init__(self, url: str, key: str, path: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a server's address, such as http://127.0.0.1:8000")
        self.url, self.host = url, parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._host_header = parts.netloc.rpartition("@")[2]
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self.path = path

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the bytes of a request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host_header}\r\n{self._authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


class Connection(asyncio.Protocol):
    """A connection to the server, kept open from request to request. Implements httptools' callbacks."""

    def __init__(self, origin: float) -> None:
        self._origin, self._now = origin, 0.0
        self._transport: asyncio.Transport
        self._response: asyncio.Future[None] | None = None
        self.is_open = True
        self.has_answered = False  # any byte of the current response

    async def send(self, request: bytes, stream: bool) -> tuple[Measured, int, bytes]:
        """Send a request; return what was measured, the status, and the body if it is not a stream of events.

        `stream`: anything else than a stream is an error.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._line, self._body, self._is_stream, self._is_done = b"", b"", False, False
        self._has_length = self.has_answered = False
        self._response = asyncio.get_running_loop().create_future()
        self._found = found = Measured(sent=time.perf_counter() - self._origin)
        self._transport.write(request)
        try:
            await self._response
        finally:
            self._response = None
        found.ended = self._now
        status = self._parser.get_status_code()
        if status != 200:
            found.error = f"status {status}: {self._body[:ERROR_BYTES].decode('utf-8', 'replace')}"
        elif self._is_stream and not self._is_done and not found.error:
            found.error = "the stream ended without [DONE]"
        elif stream and not self._is_stream:
            found.error = f"the response is no stream of events: {self._body[:ERROR_BYTES].decode('utf-8', 'replace')}"
        return found, status, self._body

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._response is None or self._response.done():
            return
        if error is None and self.has_answered and not self._has_length:  # the end of such a response
            self._response.set_result(None)
        else:
            self._response.set_exception(
                ConnectionError(f"the server closed the connection{f': {error}' * bool(error)}")
            )

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter() - self._origin
        if self._response is None:  # a proxy's word before it closes an idle connection
            return self.close()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._transport.abort()
            if not self._response.done():
                self._response.set_exception(ConnectionError(f"no valid HTTP response: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif name.lower() == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        if not self._is_stream:
            self._body += data
            if not self._body.startswith(b"data:"):
                return
            self._is_stream, data, self._body = True, self._body, b""  # a server that names no type
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = from_json(data)
        except ValueError:
            event = {"error": f"an event is not JSON: {data[:200].decode('utf-8', 'replace')}"}
        if error := event.get("error"):
            self._found.error = str(error.get("message") if isinstance(error, dict) else error)
        if usage := event.get("usage"):
            self._found.prompt_tokens = usage.get("prompt_tokens")
            self._found.output_tokens = usage.get("completion_tokens")
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            self._found.arrivals.append(self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._response is not None and not self._response.done():
            self._response.set_result(None)


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


class Client:
    """Connections to a server. Must be used in one event loop."""

    def __init__(self, target: Target):
        self.target = target
        self.origin = time.perf_counter()
        self._idle: list[Connection] = []

    async def send(self, request: bytes, stream: bool) -> tuple[Measured, int, bytes]:
        """Send a request on an idle connection, or on a new one. Raises OSError."""
        while (connection := self._take()) is not None:
            if connection.is_open:
                try:
                    return await self._send_on(connection, request, stream)
                except ConnectionError:
                    if connection.has_answered:
                        raise  # else the server closed the idle connection meanwhile
        return await self._send_on(await self._connect(), request, stream)

    async def _send_on(self, connection: Connection, request: bytes, stream: bool) -> tuple[Measured, int, bytes]:
        try:
            return await connection.send(request, stream)
        finally:
            if connection.is_open:
                self._idle.append(connection)

    def _take(self) -> Connection | None:
        return self._idle.pop() if self._idle else None

    async def _connect(self) -> Connection:
        target = self.target
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self.origin), target.host, target.port, ssl=target.tls
        )
        return connection

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the JSON of its response. Raises ConfigError with the server's own words."""
        try:
            found, status, text = await self.send(self.target.request(method, path, body), stream=False)
        except OSError as error:
            raise ConfigError(f"{self.target.url}: {error}; is the server running?") from error
        if status != 200:
            raise ConfigError(f"{self.target.url}: {method} {path}: {' '.join(found.error.split())}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{self.target.url}: {method} {path}: the response is not JSON") from error

    async def run(
        self, bodies: Sequence[dict[str, Any]], delays: Iterable[float], max_concurrency: int | None
    ) -> list[Measured]:
        """Send each body at its time, in seconds from now, with at most `max_concurrency` at once; return all results.

        A request that has to wait for others is sent as soon as it may be; its times begin there.
        """
        requests = [self.target.request("POST", self.target.path, body) for body in bodies]
        gate = asyncio.Semaphore(max_concurrency or len(bodies))
        await self.close()  # connections that measure from the old origin
        self.origin = time.perf_counter()

        async def one(request: bytes) -> Measured:
            async with gate:
                began = time.perf_counter() - self.origin
                try:
                    return (await self.send(request, stream=True))[0]
                except OSError as error:
                    return Measured(sent=began, ended=time.perf_counter() - self.origin, error=str(error))

        tasks = []
        for request, delay in zip(requests, delays, strict=True):
            wait = self.origin + delay - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(request)))
        return list(await asyncio.gather(*tasks))

    async def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0.01)  # until their transports have ended
