"""A server in one process: listener, application and HTTP server, closed in reverse order."""

from __future__ import annotations

import asyncio
import logging
import time

from engine.client.async_client import EngineClient
from server.app import create_app
from server.config import ServerConfig
from server.http.connections import OpenConnections
from server.keys import Keys
from server.serving.service import Service
from server.version import version
from server.workers.http_server import (
    FILES_BESIDE_CONNECTIONS,
    Acceptor,
    Server,
    freeze_memory,
    open_listener,
    raise_file_limit,
    url_of,
    uvicorn_config,
)

log = logging.getLogger("encore.server")


async def serve(client: EngineClient, config: ServerConfig, keys: Keys) -> None:
    """Serve with this process as the only API worker, and close the client.

    Returns and raises as `launch.run` does.
    """
    listener = open_listener(config, keys)
    try:
        raise_file_limit(config.max_connections + FILES_BESIDE_CONNECTIONS)
        app = create_app(client, config, keys=keys)
        service: Service = app.state.service
        service.before_ready = freeze_memory
        connections = OpenConnections()
        acceptor = Acceptor(listener, connections)
        server = Server(uvicorn_config(app, config, connections), service, acceptor)
        log.info("Encore %s on %s loads %s; keys: %s", version(), url_of(listener), config.engine.model, keys)
        reporter = asyncio.create_task(_report_start(server, service))
        try:
            await server.serve(sockets=[])
        finally:
            reporter.cancel()
            await service.close()
        if service.startup_error is not None:
            raise service.startup_error
    finally:
        listener.close()


async def _report_start(server: Server, service: Service) -> None:
    """Log when the model is loaded; stop the server if loading failed."""
    start = time.perf_counter()
    await service.settled.wait()
    if service.startup_error is not None:
        server.should_exit = True
    else:
        log.info("serving %s after %.1f s", service.model_names()[0], time.perf_counter() - start)
