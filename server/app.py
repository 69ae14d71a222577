"""The ASGI application: routes, middleware and error answers around one engine client. Made, never a module global."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector

from server import routes_admin, routes_control, routes_generate, routes_openai, routes_status, routes_tokens
from server.config import ServerConfig
from server.errors import install_error_handlers
from server.inference import Service
from server.keys import KeyGuard, Keys
from server.logs import RequestLog
from server.metrics import CountResponses, EngineCollector, RequestMetrics, ServiceCollector
from server.middleware import BodyLimit, RequestIds
from server.openapi import describe
from server.status import StatusBoard
from server.streaming import ClientGone
from server.version import version

if TYPE_CHECKING:
    from engine.client import Client


def create_app(
    client: Client, config: ServerConfig, registry: CollectorRegistry | None = None, keys: Keys | None = None
) -> FastAPI:
    """An application that starts `client` with its lifespan and closes it at the end.

    The client starts beside the server: until the model is loaded, /ready says so and inference answers 503.
    `app.state.service` has the start's outcome. Metrics go to `registry`, a fresh one unless given. Without `keys`
    inference is open and the admin routes are off.
    """
    registry = registry if registry is not None else CollectorRegistry()
    service = Service(client, config, RequestMetrics(registry))
    registry.register(ServiceCollector(service))
    registry.register(EngineCollector(client, lambda: service.started))
    ProcessCollector(registry=registry)  # of this process; the engine's own memory is its cgroup's to tell

    board = StatusBoard(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        board.begin()
        try:
            yield
        finally:
            await board.close()
            await service.close()

    # The documentation pages of FastAPI load scripts from elsewhere; /openapi.json is enough for tools.
    app = FastAPI(
        title="Encore", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service, app.state.registry, app.state.config = service, registry, config
    app.state.board = board
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _nobody_listens)
    # The last one added is the outermost: refused bodies carry an id too.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(KeyGuard, keys=keys or Keys())
    app.add_middleware(RequestLog)
    app.add_middleware(RequestIds)
    app.add_middleware(CountResponses, registry=registry)
    for routes in (routes_admin, routes_control, routes_generate, routes_openai, routes_status, routes_tokens):
        app.include_router(routes.router)
    describe(app)
    return app


async def _nobody_listens(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)  # never sent: the connection is gone; access logs show it
