"""Answers that take time: server-sent events, and the rule that a client that leaves ends its request.

Owns the event format and the watch on the connection; knows no model and no schema.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.errors import body_of, error_response, log_failure

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before its answer was complete; there is nobody to tell."""


def event(payload: Any) -> str:
    """One server-sent event that carries `payload` as JSON."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Sends what `events` yields. A client that leaves closes `events`, at once, wherever it is waiting.

    An exception before the first event becomes an ordinary error answer with its status; a later one becomes a last
    event with the error's body. `[DONE]` ends the stream either way.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        self.events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(scope, receive, send))
        watcher = asyncio.create_task(_disconnected(receive))
        await _first_of(sender, watcher)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events) as events:
            try:
                first = await anext(events, None)
            except Exception as exc:
                _log_failure(exc, scope)
                await error_response(exc)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                if first is not None:
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except OSError:  # the connection broke under a send
                return
            except Exception as exc:
                _log_failure(exc, scope)
                await send({"type": "http.response.body", "body": event(body_of(exc)[1]).encode(), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancelled, and ClientGone raised, if the client leaves first."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    await _first_of(task, watcher)
    if task.cancelled():
        raise ClientGone
    return task.result()


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several streams yield, as it comes, each item with its stream's number.

    Closing the merged stream closes all of them; an exception of one ends all and is raised. Of each stream one item
    waits at most: what a slow reader leaves piles up in the streams, which bound it.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()
    may_go_on = [asyncio.Event() for _ in streams]

    async def drain(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as open_stream:
                async for item in open_stream:
                    may_go_on[number].clear()
                    arrived.put_nowait((number, item, None))
                    await may_go_on[number].wait()
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
                may_go_on[number].set()
                yield number, arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(task: asyncio.Task[Any], watcher: asyncio.Task[Any]) -> None:
    """Wait for `task`, or cancel it when `watcher` ends first; both are over on return. Raises what `task` raised."""
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


def _log_failure(exc: Exception, scope: Scope) -> None:
    if body_of(exc)[0] >= 500:  # also a 503, which ends every stream under way at once
        log_failure(exc, scope)
