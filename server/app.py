"""The ASGI application: routes, middleware and error handlers around one engine client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from server.config import ServerConfig
from server.http.body_budget import BodyBudget
from server.http.errors import install_error_handlers
from server.http.hosts import AllowedHosts, listens_on_loopback
from server.http.keys import KeyMiddleware
from server.http.middleware import BodyLimit, CloseWhenDraining, RequestIds
from server.http.openapi import serve_openapi
from server.http.root_path import RootPath
from server.keys import Keys
from server.observability.metrics import CountResponses, EngineCollector, response_counts
from server.observability.process_metrics import ProcessesCollector
from server.observability.shared_counters import SharedCounter, SharedCounters
from server.observability.tracing import TraceRequests, Tracing
from server.pages.assets import Assets
from server.pages.docs import DocsAssets
from server.routes import admin as routes_admin
from server.routes import chat_batch as routes_chat_batch
from server.routes import generate as routes_generate
from server.routes import kv_blocks as routes_kv_blocks
from server.routes import messages as routes_messages
from server.routes import ollama as routes_ollama
from server.routes import openai as routes_openai
from server.routes import pooling as routes_pooling
from server.routes import responses_api as routes_responses_api
from server.routes import sagemaker as routes_sagemaker
from server.routes import server_info as routes_server_info
from server.routes import status as routes_status
from server.routes import token_generate as routes_token_generate
from server.routes import tokens as routes_tokens
from server.routes import trainer as routes_trainer
from server.serving.background_runs import BackgroundRuns
from server.serving.generation_probe import GenerationProbe
from server.serving.request_log import RequestLog
from server.serving.response_store import MEMORY, ResponseStore
from server.serving.service import Service
from server.serving.service_metrics import ResponseStoreCollector, ServiceCollector
from server.serving.status_board import StatusBoard
from server.serving.vllm_metrics import VllmCollector
from server.version import version

if TYPE_CHECKING:
    from engine.client.async_client import Client


def create_app(
    client: Client, config: ServerConfig, keys: Keys | None = None, counters: SharedCounters | None = None,
    start_time: float | None = None, response_store: str = MEMORY,
) -> FastAPI:  # fmt: skip
    """Create an application that starts `client` in its lifespan and closes it on shutdown.

    The client starts in the background: until the model is loaded, /ready and inference routes return 503.
    `app.state.service` holds the outcome of the startup. Without `keys`, inference is open and the admin routes are
    off. `counters` are shared by the API workers of one server; default: private counters. `start_time` is the server's
    start (time.time); default: now. `response_store` is the path of the file with stored responses that API workers
    share; default: in memory.
    """
    registry = CollectorRegistry()
    tracing = None if config.otlp_traces_endpoint is None else Tracing(config.otlp_traces_endpoint, "server")
    service = Service(client, config, counters, start_time, tracing)
    responses = response_counts(service.counters)
    engine_metrics = EngineCollector(client, lambda: service.started, config.engine.num_speculative_tokens)
    registry.register(service.metrics)
    registry.register(responses)
    registry.register(ServiceCollector(service))
    registry.register(engine_metrics)
    if config.compat == "vllm":
        registry.register(VllmCollector(service, [service.metrics, engine_metrics]))
    registry.register(ResponseStoreCollector(lambda: app.state.response_store))
    registry.register(ProcessesCollector(service.counters))

    board = StatusBoard(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = None
        if config.response_store_entries:
            store = ResponseStore(
                response_store, config.response_store_entries, config.response_store_bytes,
                config.response_store_seconds,
            )  # fmt: skip
            store.begin_expiry()
        app.state.response_store = store
        app.state.background_runs = runs = None if store is None else BackgroundRuns(store)
        service.begin()
        board.begin()
        try:
            yield
        finally:
            await board.close()
            if runs is not None:
                await runs.close()
            await service.close()
            if store is not None:
                app.state.response_store = None
                await store.close()
            if tracing is not None:
                await tracing.close()

    # FastAPI's documentation pages load scripts from other hosts; server/pages/docs.py is ours. Its /openapi.json is
    # built on the event loop; server/http/openapi.py builds it in a thread.
    app = FastAPI(
        title="Encore", version=version(), lifespan=lifespan, openapi_url=None, redirect_slashes=False,
        servers=[{"url": config.root_path}] if config.root_path else None,
        middleware=_middleware(service, keys or Keys(), responses, tracing),
    )  # fmt: skip
    app.state.response_store = None
    app.state.service, app.state.registry, app.state.config = service, registry, config
    app.state.board, app.state.large_body = board, asyncio.Lock()
    app.state.probe = GenerationProbe(service)
    install_error_handlers(app)
    # FastAPI matches routes in this order at every request: put the most frequent first. It builds a router's routes
    # when a request first gets there, in up to 0.1 s: all large ones precede /ready, which is asked during the start.
    for routes in (
        routes_openai, routes_generate, routes_token_generate, routes_messages, routes_responses_api, routes_tokens,
        routes_admin, routes_trainer, routes_pooling, routes_status, routes_server_info, routes_chat_batch,
        routes_ollama, routes_sagemaker, routes_kv_blocks,
    ):  # fmt: skip
        app.include_router(routes.router)
    app.mount("/chat", Assets("chat"), name="chat-assets")
    app.mount("/docs", DocsAssets(), name="docs-assets")
    serve_openapi(app)
    return app


def _middleware(
    service: Service, keys: Keys, responses: SharedCounter, tracing: Tracing | None
) -> list[Middleware]:  # fmt: skip
    """Return the middleware of every request, the outermost first."""
    config, is_open = service.config, not keys.guards_inference
    checks_host = bool(config.allowed_hosts) or (is_open and listens_on_loopback(config.host))
    budget = BodyBudget(config.total_body_bytes, service.counters)
    return [
        # All below, and the routes, see paths without the prefix of a proxy.
        *([Middleware(RootPath, prefix=config.root_path)] if config.root_path else []),
        # The spans of requests that are refused below, too.
        *([Middleware(TraceRequests, tracing=tracing)] if tracing is not None else []),
        # Counts the refusals of the middleware below too.
        Middleware(CountResponses, counter=responses),
        # A refusal closes the connection during a drain, as an answer does.
        Middleware(CloseWhenDraining, is_draining=lambda: service.draining),
        # The log and the refusals below name the request by its id.
        Middleware(RequestIds),
        # Logs what is refused below.
        Middleware(RequestLog),
        # A page of another host can't try keys.
        *([Middleware(AllowedHosts, allowed=config.allowed_hosts, checks_origin=is_open)] if checks_host else []),
        # Reads no body without an accepted key.
        Middleware(KeyMiddleware, keys=keys, local_admin=config.admin_without_key == "loopback"),
        # Reads the whole body, so everything that can refuse a request by its head comes before.
        Middleware(
            BodyLimit, max_bytes=config.max_body_bytes, max_items=config.max_body_items, budget=budget,
            seconds=config.body_seconds,
        ),
    ]  # fmt: skip
