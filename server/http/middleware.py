"""ASGI middleware for every request: request ids, a body limit, and closing connections during a drain.

The whole body is read here, so that the limit also holds for chunked uploads and for every route.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import WireError, error_response

BODY_SECONDS = 60.0  # a body must arrive within this time: a stalled upload must not hold its memory
DISCARD_BYTES = 64 * 1024 * 1024  # read and discarded of a refused body, so that the client receives the error
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def new_request_id() -> str:
    """Return a random request id of 24 hexadecimal digits."""
    return secrets.token_hex(12)


class RequestIds:
    """Assign each request an id and echo it in the response. A valid X-Request-Id of the client is used as it is."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        await self.app(scope, receive, _with_header(send, "X-Request-Id", request_id))


class CloseWhenDraining:
    """Close the connection after the response to a request that arrives during a drain.

    The client's next request then opens a connection to another server instead of reusing one that is about to close.
    """

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]):
        self.app, self.is_draining = app, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closes = scope["type"] == "http" and self.is_draining()
        await self.app(scope, receive, _with_header(send, "Connection", "close") if closes else send)


def _with_header(send: Send, name: str, value: str) -> Send:
    """Return a `send` that adds this header to the response."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return send_with_header


class BodyLimit:
    """Read bodies up to `max_bytes`. Refuses larger ones with 413, and bodies not declared as JSON with 415."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
            if body is None:  # the client disconnected while sending
                return
            if body:
                _check_content_type(Headers(scope=scope))
        except TimeoutError:
            slow = WireError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", code="body_timeout")
            await error_response(slow)(scope, receive, send)
            return
        except _BodyTooLarge as refusal:
            if refusal.is_incomplete:
                send = _with_header(_respond_then_discard(receive, send), "Connection", "close")
            await error_response(refusal)(scope, receive, send)
            return
        except WireError as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        pending = [body]

        async def replay() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            return await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body, or None if the client left. Raises _BodyTooLarge as soon as the limit is exceeded."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > self.max_bytes:
                chunks.clear()  # the error keeps this frame while the rest is read
                raise _BodyTooLarge(self.max_bytes, more)
            if not more:
                return b"".join(chunks)


class _BodyTooLarge(WireError):
    """A body beyond the limit. `is_incomplete`: its end has not arrived yet."""

    def __init__(self, limit: int, is_incomplete: bool):
        super().__init__(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
        self.is_incomplete = is_incomplete


def _respond_then_discard(receive: Receive, send: Send) -> Send:
    """Return a `send` that responds at once and then reads and discards the rest of the request body.

    Closing the connection while the client still sends would reset it, and the client might lose the response.
    """

    async def send_and_discard(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            await _discard(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_and_discard


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of a body, up to BODY_SECONDS and DISCARD_BYTES."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while size < DISCARD_BYTES:
                message = await receive()
                if not message.get("more_body", False):  # end of the body, or disconnect
                    return
                size += len(message["body"])


def _check_content_type(headers: Headers) -> None:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        return
    found = content_type[:80] or "none"
    raise WireError(
        415, f"the body's content type is {found}; send Content-Type: application/json", code="unsupported_media_type"
    )
