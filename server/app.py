"""The ASGI application: routes, middleware and error answers around one engine client. Made, never a module global."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry

from server import routes_admin, routes_generate, routes_openai
from server.config import ServerConfig
from server.errors import install_error_handlers
from server.inference import Service
from server.metrics import EngineCollector, RequestMetrics
from server.middleware import BodyLimit, RequestIds
from server.streaming import ClientGone
from server.version import version

if TYPE_CHECKING:
    from engine.client import Client


def create_app(client: Client, config: ServerConfig, registry: CollectorRegistry | None = None) -> FastAPI:
    """An application that starts `client` with its lifespan and closes it at the end.

    The client starts beside the server: until the model is loaded, /ready says so and inference answers 503.
    `app.state.service` has the start's outcome. Metrics go to `registry`, a fresh one unless given.
    """
    registry = registry if registry is not None else CollectorRegistry()
    service = Service(client, config, RequestMetrics(registry))
    registry.register(EngineCollector(client, lambda: service.started))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        try:
            yield
        finally:
            await service.close()

    # The documentation pages of FastAPI load scripts from elsewhere; /openapi.json is enough for tools.
    app = FastAPI(
        title="Encore", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service, app.state.registry, app.state.config = service, registry, config
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _nobody_listens)
    # The last one added is the outermost: refused bodies carry an id too.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(RequestIds)
    for routes in (routes_admin, routes_generate, routes_openai):
        app.include_router(routes.router)
    return app


async def _nobody_listens(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)  # never sent: the connection is gone; access logs show it
