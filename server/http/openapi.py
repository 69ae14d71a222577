"""/openapi.json, and the responses, errors, examples and security schemes in it.

By default FastAPI documents a 422 that this server never sends, and none of the errors that it does send.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from server.config import ServerConfig
from server.http.keys import ADMIN_PREFIXES, OPEN_PATHS
from server.http.request_examples import REQUEST_EXAMPLES
from server.schemas.answers import Answer, ErrorAnswer
from server.schemas.anthropic_answers import AnthropicError
from server.schemas.ollama_answers import OllamaError

Responses = dict[int | str, dict[str, Any]]
REASONS = {
    400: "Invalid request; `param` names the field",
    401: "The key is missing or not accepted",
    403: "This route is disabled, or priority is not allowed",
    404: "Unknown model or route",
    408: "The request took too long to arrive",
    413: "The body is larger than the limit",
    415: "The body is compressed or not declared as JSON",
    429: "The queue is full; retry after Retry-After seconds",
    431: "Chunk extensions and trailers of the body are too long",
    500: "The engine failed to process this request",
    501: "The engine does not support this yet",
    503: "Loading, restarting or shutting down; retry after Retry-After seconds",
}


def _refusals(*statuses: int | str, model: type[Answer] = ErrorAnswer) -> Responses:
    return {status: {"model": model, "description": REASONS[int(status)]} for status in statuses}


REFUSALS = _refusals(400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503)
ANTHROPIC_REFUSALS = _refusals(*REFUSALS, model=AnthropicError)
OLLAMA_REFUSALS = _refusals(*REFUSALS, model=OllamaError)
ADMIN_REFUSALS = _refusals(400, 401, 403, 408, 413, 415, 431, 500, 503)
NOT_SUPPORTED = _refusals(501)
NOT_SERVING = _refusals(500, 503)


# A server-sent event: JSON text in `data`, or [DONE] in the last event.
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def answered_by(model: type[Answer] | Any, *others: str) -> Responses:
    """Return the OpenAPI entry of a route's 200 response: `model` as JSON, and text of the `others` media types."""
    content = {
        media_type: {"schema": EVENT if media_type == "text/event-stream" else {"type": "string"}}
        for media_type in others
    }
    return {200: {"model": model, "description": "Success", "content": content}}


def failing(model: type[Answer]) -> Responses:
    """Return the OpenAPI entry of a probe's 503 response, which has the body of its 200 response."""
    return {503: {"model": model, "description": "Unhealthy or not ready"}}


class Document:
    """The JSON text of /openapi.json, built by a thread at its first request: the event loop would stall for 0.2 s."""

    def __init__(self, app: FastAPI):
        self._app = app
        self._texts: dict[str, asyncio.Task[bytes]] = {}  # by root path

    async def text(self, root_path: str) -> bytes:
        """Return the document for a server whose paths begin with `root_path` in a proxy."""
        task = self._texts.get(root_path)
        if task is None:
            task = self._texts[root_path] = asyncio.create_task(asyncio.to_thread(self._build, root_path))
        return await asyncio.shield(task)

    def _build(self, root_path: str) -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return json.dumps(self._app.openapi() | servers, ensure_ascii=False, separators=(",", ":")).encode()


def serve_openapi(app: FastAPI) -> None:
    """Add GET /openapi.json, which matches the actual responses and security schemes."""
    _describe(app)
    document = Document(app)

    async def openapi(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        return Response(await document.text(root_path), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)


def _describe(app: FastAPI) -> None:
    """Make `app.openapi()` return the actual responses and security schemes, with examples."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = build()
            components = schema.setdefault("components", {})
            for name in ("HTTPValidationError", "ValidationError"):
                components.get("schemas", {}).pop(name, None)
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, if any is configured"},
                "admin_key": {"type": "http", "scheme": "bearer", "description": "An admin key"},
            }
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    content = operation.get("requestBody", {}).get("content", {})
                    if json_body := content.get("application/json"):
                        json_body["example"] = _example(path, app.state.config)
                    if path.startswith(ADMIN_PREFIXES):
                        operation["security"] = [{"admin_key": []}]
                    elif path not in OPEN_PATHS:
                        operation["security"] = [{"key": []}, {}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _example(path: str, config: ServerConfig) -> dict[str, Any]:
    """Return the route's example, with a served model's name where it is required."""
    example = REQUEST_EXAMPLES[path]
    name = (config.served_model_name or (config.engine.model,))[0]
    return {"model": name, **example} if path.startswith(("/v1/messages", "/api/")) else example
