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

from server.http.body_budget import BodyBudget, Upload
from server.http.errors import OLLAMA_PREFIX, WireError, error_response, is_anthropic
from server.http.sender import REQUEST_ID

UNCOUNTED_BYTES = 256 * 1024  # of a body: parsing as many takes up to 10 ms
_ITEM_BYTES = b',:"[{'
BINARY_PATHS = frozenset({"/kv_blocks/import"})  # routes whose bodies are bytes
BINARY = "application/octet-stream"
DISCARD_BYTES = 64 * 1024 * 1024  # read and discarded of a refused body, so that the client receives the error
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def new_request_id() -> str:
    """Return a random request id of 24 hexadecimal digits."""
    return secrets.token_hex(12)


class RequestIds:
    """Assign each request an id and echo it in the response. A valid X-Request-Id of the client is used as it is.

    `state["warnings"]` is a list to which a route appends warnings for the response's header X-Encore-Warning.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        REQUEST_ID.set(request_id)
        warnings: list[str] = []
        scope.setdefault("state", {}).update(request_id=request_id, warnings=warnings)
        names = ("X-Request-Id", "request-id") if is_anthropic(scope) else ("X-Request-Id",)  # as their clients read

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = request_id
                if warnings:
                    headers["X-Encore-Warning"] = "; ".join(warnings)
            await send(message)

        await self.app(scope, receive, send_with_headers)


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
    """Read bodies up to `max_bytes` within `seconds`, all of them together within a budget.

    Refuses a larger body and one of more than `max_items` items with 413, a slow one with 408, one without room with
    503, and one that is compressed or not declared as JSON, or as bytes for BINARY_PATHS, with 415. The body counts
    until its route calls `state["upload"].release`, or its request is over.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_items: int, budget: BodyBudget, seconds: float):
        self.app, self.max_bytes, self.max_items = app, max_bytes, max_items
        self.seconds, self._budget = seconds, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        with self._budget.upload() as upload:
            headers = MutableHeaders(scope=scope)
            try:
                self._check_size(int(headers.get("content-length", 0)))
                body = await self._read(receive, upload)
                if body is None:  # the client disconnected while sending
                    return
                if body and scope["path"] in BINARY_PATHS:
                    _check_content_type(headers, BINARY)
                elif body:
                    if scope["path"].startswith(OLLAMA_PREFIX):
                        _declare_json(headers)
                    _check_content_type(headers)
                    _check_items(body, self.max_items)
            except WireError as refusal:
                upload.release()  # before the rest of the body is discarded
                if not upload.is_complete:
                    send = _with_header(_respond_then_discard(receive, send, self.seconds), "Connection", "close")
                await error_response(refusal, scope)(scope, receive, send)
                return
            scope["state"]["upload"] = upload
            pending = [body]
            del body

            async def replay() -> Message:
                if pending:
                    return {"type": "http.request", "body": pending.pop(), "more_body": False}
                return await receive()

            await self.app(scope, replay, send)

    def _check_size(self, size: int) -> None:
        """Refuse a body of at least `size` bytes: declared by Content-Length before any of it is read, or received."""
        if size > self.max_bytes:
            raise WireError(
                413, f"the body is larger than the limit of {self.max_bytes} bytes (--max-body-bytes): shorten it",
                code="body_too_large",
            )  # fmt: skip

    async def _read(self, receive: Receive, upload: Upload) -> bytes | None:
        """Return the whole body, or None if the client left. Raises WireError as soon as a limit is exceeded."""
        async with upload.arriving(self.seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                upload.is_complete = not message.get("more_body", False)
                chunk = message.get("body", b"")
                self._check_size(len(upload.content) + len(chunk))
                upload.add(chunk)
                if upload.is_complete:
                    return upload.take()
        raise AssertionError("unreachable")


def _respond_then_discard(receive: Receive, send: Send, seconds: float) -> Send:
    """Return a `send` that responds at once and then reads and discards the rest of the request body.

    Closing the connection while the client still sends would reset it, and the client might lose the response.
    """

    async def send_and_discard(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            await _discard(receive, seconds)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_and_discard


async def _discard(receive: Receive, seconds: float) -> None:
    """Read and drop the rest of a body, for up to `seconds` and DISCARD_BYTES."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while size < DISCARD_BYTES:
                message = await receive()
                if not message.get("more_body", False):  # end of the body, or disconnect
                    return
                size += len(message["body"])


def _declare_json(headers: MutableHeaders) -> None:
    """Declare a body as JSON, for routes of Ollama: it ignores the type, so `curl -d` and litellm don't give this one.

    A web page has to declare it: its browser then asks the server before it sends the request to another site.
    """
    if "origin" not in headers:
        headers["content-type"] = "application/json"


def _check_content_type(headers: Headers, wanted: str = "application/json") -> None:
    """Refuse a body that is not declared as `wanted`, or as compressed. Other kinds of JSON count as JSON."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise WireError(
            415, f"the body's content encoding is {encoding[:80]}; send it uncompressed, without Content-Encoding",
            code="unsupported_media_type",
        )  # fmt: skip
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = content_type.startswith("application/") and content_type.endswith("+json")
    if content_type == wanted or (wanted == "application/json" and is_json):
        return
    found = content_type[:80] or "none"
    raise WireError(
        415, f"the body's content type is {found}; send Content-Type: {wanted}", code="unsupported_media_type"
    )


def _check_items(content: bytes, limit: int) -> None:
    """Refuse a body whose parsing would stall the event loop: 8 MB of short items take up to a second."""
    if len(content) <= UNCOUNTED_BYTES:
        return
    items = len(content) - len(content.translate(None, _ITEM_BYTES))
    if items > limit:
        raise WireError(
            413, f"the body has {items} commas, colons, quotes and opening brackets, and at most {limit} are allowed "
            "(--max-body-items): send several smaller requests",
            code="too_many_body_items",
        )  # fmt: skip
