"""What every request passes before its route: an id, a body of bounded size, a connection that ends with a drain. Plain
ASGI, no model of requests.

The body is read whole here, so that a chunked upload is cut off like a declared one and no route can forget it.
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

BODY_SECONDS = 60.0  # a body that takes longer to arrive is given up: a stalled upload must not hold its memory
DISCARD_BYTES = 64 * 1024 * 1024  # of a refused body read and thrown away, so that the client hears the refusal
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def new_request_id() -> str:
    """A fresh id: 24 hexadecimal digits."""
    return secrets.token_hex(12)


class RequestIds:
    """Gives each request an id, the client's X-Request-Id where it is harmless, and echoes it in the answer."""

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
    """Ends the connection with the answer to a request that comes while the server drains: the client's next one then
    goes to another server, not into a connection that is about to be closed.
    """

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]):
        self.app, self.is_draining = app, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ends = scope["type"] == "http" and self.is_draining()
        await self.app(scope, receive, _with_header(send, "Connection", "close") if ends else send)


def _with_header(send: Send, name: str, value: str) -> Send:
    """`send`, with this header in the answer."""

    async def send_with_it(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return send_with_it


class BodyLimit:
    """Reads bodies up to `max_bytes` and refuses larger ones with 413, bodies that aren't JSON with 415."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
            if body is None:  # the client went away while sending
                return
            if body:
                _check_content_type(Headers(scope=scope))
        except TimeoutError:
            slow = WireError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", code="body_timeout")
            await error_response(slow)(scope, receive, send)
            return
        except _TooLarge as refusal:
            if refusal.goes_on:
                send = _with_header(_at_once(receive, send), "Connection", "close")
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
        """The whole body, or None if the client left. Raises _TooLarge as soon as the limit is passed."""
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
                raise _TooLarge(self.max_bytes, more)
            if not more:
                return b"".join(chunks)


class _TooLarge(WireError):
    """A body beyond the limit; it `goes_on` where its end has not come yet."""

    def __init__(self, limit: int, goes_on: bool):
        super().__init__(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
        self.goes_on = goes_on


def _at_once(receive: Receive, send: Send) -> Send:
    """`send` for an answer that doesn't wait for the end of its request: what still comes is read after it.

    A connection that is closed on who still sends is reset, and the answer may be lost with it.
    """

    async def send_and_discard(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            await _discard(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_and_discard


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, as long and as much as any."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while size < DISCARD_BYTES:
                message = await receive()
                if not message.get("more_body", False):  # its end, or the client's
                    return
                size += len(message["body"])


def _check_content_type(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    found = kind[:80] or "none"
    raise WireError(
        415, f"the body's content type is {found}; send Content-Type: application/json", code="unsupported_media_type"
    )
