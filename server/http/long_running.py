"""Endpoints that run for long: without the JSON of their body, and only as long as their client listens."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.streaming import ClientDisconnected, until_disconnect

P = ParamSpec("P")
T = TypeVar("T")


def long_running(endpoint: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """Run an endpoint of a BodyRoute once FastAPI has parsed the body and let go of its JSON.

    FastAPI's handler holds the JSON until the endpoint returns: 8 MB and their objects for each waiting request. So the
    handler gets a response that runs the endpoint when it is sent. If the client disconnects, the endpoint or the
    response that it returned is cancelled. What they hold by `hold` is left then, or after the last byte.
    """

    @wraps(endpoint)
    async def parsed(*args: P.args, **kwargs: P.kwargs) -> Response:
        return _Run(partial(endpoint, *args, **kwargs))

    # FastAPI 0.115 looks up the names of types in the module of `parsed`.
    parsed.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
    return parsed


def hold(request: Request, context: AbstractContextManager[T]) -> T:
    """Enter a context in a long-running endpoint, and leave it once the response is sent or the request has failed."""
    held: ExitStack = request.state.held
    return held.enter_context(context)


class _Run(Response):
    """Runs an endpoint and sends the response that it returns."""

    def __init__(self, endpoint: Callable[[], Awaitable[Response]]):
        self._endpoint: Callable[[], Awaitable[Response]] | None = endpoint
        self.status_code, self.background = 200, None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(Request(scope, receive), self._answer(scope, receive, send))
        except ClientDisconnected:
            if self._endpoint is not None:  # for the log only, since the connection is closed
                await Response(status_code=499)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._endpoint is not None
        with ExitStack() as scope["state"]["held"]:
            response = await self._endpoint()
            self._endpoint = None
            await response(scope, receive, send)
