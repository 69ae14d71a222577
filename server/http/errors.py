"""Error responses: the table from exceptions to HTTP statuses, and the error body.

Every response of 400 and above is `{"error": {"message", "type", "param", "code"}}`; that of a path in ANTHROPIC_PATHS
is `{"type": "error", "error": {"type", "message"}, "request_id"}`, that of a path under OLLAMA_PREFIX `{"error":
message}`. Routes raise exceptions and never build an error response themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from engine.errors import (
    EngineDead,
    EngineError,
    EnginePaused,
    PromptTooLong,
    QueueFull,
    ReaderTooSlow,
    RequestError,
    WeightUpdateError,
)
from server.observability.logs import FIELDS
from server.schemas.field_paths import OBJECTS, field_path

log = logging.getLogger("encore.server")

INVALID = "invalid_request_error"
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/")  # the first exactly, the second as a prefix
OLLAMA_PREFIX = "/api/"
THREAD_NOT_FOUND = "thread_not_found"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class WireError(Exception):
    """An error of the HTTP layer, such as an unknown model, an oversized body, or a server that is not ready."""

    def __init__(
        self, status: int, message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.type, self.param, self.code, self.retry_after = status, type, param, code, retry_after


def aborted() -> WireError:
    """Return the error of an aborted request, for APIs without a finish reason for it."""
    return WireError(
        503, "the request was aborted, by the server's shutdown or by an operator", type="service_unavailable_error",
        code="draining",
    )  # fmt: skip


class Outcome(NamedTuple):
    """The response to one exception class. `retry_after` is in seconds, None if a retry won't help."""

    status: int
    type: str
    code: str
    retry_after: int | None = None


# The first matching class decides, so a subclass comes before its base class.
OUTCOMES: tuple[tuple[type[EngineError], Outcome], ...] = (
    (PromptTooLong, Outcome(400, INVALID, "context_length_exceeded")),
    (RequestError, Outcome(400, INVALID, "invalid_value")),
    (EnginePaused, Outcome(503, "service_unavailable_error", "engine_paused", 1)),
    (QueueFull, Outcome(429, "rate_limit_error", "queue_full", 1)),
    (ReaderTooSlow, Outcome(408, INVALID, "reader_too_slow")),
    (EngineDead, Outcome(503, "service_unavailable_error", "engine_dead", 5)),
    (WeightUpdateError, Outcome(400, INVALID, "weight_update_refused")),
    (EngineError, Outcome(500, "server_error", "engine_error")),
)
INTERNAL = Outcome(500, "server_error", "internal_error")


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error body. Text that UTF-8 can't encode is replaced, so that sending the response can't fail."""
    return {"error": {"message": _sendable(message), "type": type, "param": _sendable(param), "code": code}}


def body_of(exc: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and extra headers for any exception. An unexpected one is a 500 without details."""
    if isinstance(exc, WireError):
        headers = _retry_header(exc.retry_after)
        return exc.status, error_body(str(exc), exc.type, exc.param, exc.code), headers
    if isinstance(exc, EngineError):
        outcome = next(outcome for kind, outcome in OUTCOMES if isinstance(exc, kind))
        body = error_body(str(exc), outcome.type, getattr(exc, "param", None), outcome.code)
        return outcome.status, body, _retry_header(outcome.retry_after)
    if isinstance(exc, HTTPException):
        type_, code = _HTTP_NAMES.get(exc.status_code, (INVALID, None))
        return exc.status_code, error_body(str(exc.detail), type_, None, code), dict(exc.headers or {})
    message = "internal error while handling this request; see the server's log"
    return INTERNAL.status, error_body(message, INTERNAL.type, None, INTERNAL.code), {}


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is for a route of Anthropic's API."""
    path: str = scope["path"]
    return path == ANTHROPIC_PATHS[0] or path.startswith(ANTHROPIC_PATHS[1])


def in_format_of(scope: Scope, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error body in the format of the API that the request is for."""
    if scope["path"].startswith(OLLAMA_PREFIX):
        return {"error": body["error"]["message"]}
    if not is_anthropic(scope):
        return body
    error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(status, INVALID), "message": body["error"]["message"]}
    if body["error"]["code"] == THREAD_NOT_FOUND:  # Anthropic's clients then send the whole conversation
        error["details"] = {"error_code": THREAD_NOT_FOUND}
    return {"type": "error", "error": error, "request_id": scope.get("state", {}).get("request_id")}


def failure(exc: Exception, scope: Scope) -> dict[str, Any]:
    """Return the error body of an exception, in the format of the API that the request is for."""
    status, body, _ = body_of(exc)
    return in_format_of(scope, status, body)


def error_response(exc: Exception, scope: Scope) -> JSONResponse:
    """Return the response to an exception."""
    status, body, headers = body_of(exc)
    return JSONResponse(in_format_of(scope, status, body), status_code=status, headers=headers)


def log_failure(exc: Exception, scope: Scope) -> None:
    """Log a failed request with its id. Adds a traceback for unexpected exceptions only."""
    expected = isinstance(exc, (EngineError, WireError))
    fields = {"request_id": scope.get("state", {}).get("request_id")}
    log.error(
        "a request failed: %s: %s", type(exc).__name__, exc, exc_info=None if expected else exc, extra={FIELDS: fields}
    )


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers so that every exception of routes and routing gets the error body."""

    async def answer(request: Request, exc: Exception) -> JSONResponse:
        if isinstance(exc, HTTPException) and exc.status_code in (404, 405):
            what = "unknown route" if exc.status_code == 404 else "method not allowed on this route"
            exc = HTTPException(exc.status_code, f"{what}: {request.method} {request.url.path}", exc.headers)
        response = error_response(exc, request.scope)
        if response.status_code == INTERNAL.status:
            log_failure(exc, request.scope)
        return response

    async def invalid(request: Request, exc: RequestValidationError) -> JSONResponse:
        message, param = _first_error(exc)
        body = error_body(message, INVALID, param, "invalid_value")
        return JSONResponse(in_format_of(request.scope, 400, body), status_code=400)

    async def internal(request: Request, exc: Exception) -> JSONResponse:
        response = error_response(exc, request.scope)
        request_id = request.scope.get("state", {}).get("request_id")
        if request_id:  # this handler runs outside the middleware that adds the header
            response.headers["X-Request-Id"] = request_id
        return response

    app.add_exception_handler(WireError, answer)
    app.add_exception_handler(EngineError, answer)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]  # Starlette wants Exception
    app.add_exception_handler(Exception, internal)


_HTTP_NAMES: Mapping[int, tuple[str, str | None]] = {
    400: (INVALID, "invalid_value"),
    404: ("not_found_error", "route_not_found"),
    405: (INVALID, "method_not_allowed"),
}


def _first_error(exc: RequestValidationError) -> tuple[str, str | None]:
    """Return the first validation error of a body as (message, field)."""
    error = exc.errors()[0]
    loc = [str(part) for part in error.get("loc", ())[1:]]
    if error.get("type") == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return f"the body is not valid JSON: {reason}".rstrip(": "), None
    message = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    if not loc and error.get("type") == "string_unicode":
        return "the name of a field contains a lone surrogate, which is not valid Unicode: correct it", None
    if not loc:
        return f"the body must be a JSON object: {message}", None
    path = field_path(error["loc"][1:])
    return f"{path}: {message}", path if loc[0] in OBJECTS else loc[0]


def _retry_header(seconds: int | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(seconds)}


def _sendable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")
