"""What /openapi.json says beyond the bodies: answers, refusals, keys. Knows the wire types, no request.

FastAPI would promise a 422 that this server never sends, and nothing of the errors that it does send.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.http.keys import ADMIN_PREFIXES, OPEN_PATHS
from server.schemas.responses import Answer, ErrorAnswer

Responses = dict[int | str, dict[str, Any]]
REASONS = {
    400: "A value, a combination or a length that can't be served; `param` names the field",
    401: "A key is needed, or the one that was sent is not accepted",
    403: "This route is off",
    404: "No such model or route",
    408: "The body took too long to arrive",
    413: "The body is larger than the limit",
    415: "The body is not declared as JSON",
    429: "The queue is full; Retry-After says when to try again",
    500: "The engine failed at this request",
    503: "Loading, restarting or shutting down; Retry-After says when to try again",
}


def _refusals(*statuses: int) -> Responses:
    return {status: {"model": ErrorAnswer, "description": REASONS[status]} for status in statuses}


REFUSALS = _refusals(400, 401, 404, 408, 413, 415, 429, 500, 503)
ADMIN_REFUSALS = _refusals(400, 401, 403, 408, 413, 415, 500, 503)
NOT_SERVING = _refusals(500, 503)


# One server-sent event: JSON text in `data`, or [DONE] in the last.
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def answered_by(model: type[Answer] | Any, *others: str) -> Responses:
    """The 200 of a route: `model` as JSON, and texts of these other media types."""
    content = {
        media_type: {"schema": EVENT if media_type == "text/event-stream" else {"type": "string"}}
        for media_type in others
    }
    return {200: {"model": model, "description": "The answer", "content": content}}


def failing(model: type[Answer]) -> Responses:
    """The 503 of a probe, whose body says the same as its 200."""
    return {503: {"model": model, "description": "Not so"}}


def describe(app: FastAPI) -> None:
    """Make the application's /openapi.json say what its routes really answer."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = build()
            components = schema.setdefault("components", {})
            for name in ("HTTPValidationError", "ValidationError"):
                components.get("schemas", {}).pop(name, None)
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, where the server has any"},
                "admin_key": {"type": "http", "scheme": "bearer", "description": "An admin key"},
            }
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if path.startswith(ADMIN_PREFIXES):
                        operation["security"] = [{"admin_key": []}]
                    elif path not in OPEN_PATHS:
                        operation["security"] = [{"key": []}, {}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
