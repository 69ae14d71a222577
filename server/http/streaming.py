"""Responses of long requests: server-sent events and large JSON; and cancelling them if the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.http.errors import body_of, error_response, log_failure
from server.http.json_text import Encoded, encoded

T = TypeVar("T")
WriteEvent = Callable[[Any], str]  # `event` or `large_event`

DONE = b"data: [DONE]\n\n"
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one for each event
PIECE_BYTES = 2**20  # of a body that are given to the connection at once


def named_event(name: str, payload: Any) -> str:
    """Return a server-sent event with a name and with `payload` as JSON."""
    return f"event: {name}\n{event(payload)}"


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


def event(payload: Any) -> str:
    """Return a server-sent event with `payload` as JSON."""
    return f"data: {COMPACT.encode(payload)}\n\n"


def _failed(exc: Exception) -> bytes:
    return event(body_of(exc)[1]).encode()


def large_event(payload: Any) -> str:
    """Return the same as `event`, encoded in pieces: a thread that does it leaves the GIL to others in between."""
    return f"data: {encoded(payload).text.decode()}\n\n"


class EventStream(Response):
    """A streaming response that sends the items of `events`, and closes `events` at the end or when it is cancelled.

    An exception before the first event becomes a normal error response with its status. A later one becomes a final
    event: by default the error body. `last` ends the stream, also after an error; by default it is `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes] = _failed, last: bytes = DONE
    ):
        self.events, self._failed, self._last = events, failed, last
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events) as events:
            try:
                first = await anext(events, None)
            except Exception as exc:
                log_if_severe(exc, scope)
                await error_response(exc, scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                if first is not None:
                    await _send_pieces(send, first)
                async for chunk in events:
                    await _send_pieces(send, chunk)
            except OSError:  # the connection broke during a send
                return
            except Exception as exc:
                log_if_severe(exc, scope)
                await send({"type": "http.response.body", "body": self._failed(exc), "more_body": True})
            await send({"type": "http.response.body", "body": self._last, "more_body": False})


class JSONAnswer(JSONResponse):
    """A JSON response whose content may be Encoded."""

    def render(self, content: Any) -> bytes:
        return content.text if isinstance(content, Encoded) else super().render(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_pieces(send, bytes(self.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_pieces(send: Send, text: bytes) -> None:
    """Send a part of a body. The connection copies each piece, and waits while the client has not read enough."""
    for start in range(0, len(text), PIECE_BYTES):
        await send({"type": "http.response.body", "body": text[start : start + PIECE_BYTES], "more_body": True})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise ClientDisconnected."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnected
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Merge several streams: yield (stream number, item) as items arrive.

    Closing the merged stream closes all of them. An exception in one closes all and is raised. At most one item per
    stream is buffered here: the backlog of a slow reader stays in the streams, which bound it.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()
    resume = [asyncio.Event() for _ in streams]

    async def drain(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as open_stream:
                async for item in open_stream:
                    resume[number].clear()
                    arrived.put_nowait((number, item, None))
                    await resume[number].wait()
        except Exception as exc:
            arrived.put_nowait((number, None, exc))
        else:
            arrived.put_nowait((number, None, None))

    tasks = [asyncio.create_task(drain(number, stream)) for number, stream in enumerate(streams)]
    try:
        unfinished = len(tasks)
        while unfinished:
            number, arrival, failure = await arrived.get()
            if failure is not None:
                raise failure
            if arrival is None:
                unfinished -= 1
            else:
                resume[number].set()
                yield number, arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def log_if_severe(exc: Exception, scope: Scope) -> None:
    """Log a failed request if it is the server's fault, with its id."""
    if body_of(exc)[0] >= 500:  # includes the 503 that ends every running stream when the engine dies
        log_failure(exc, scope)
