"""Start a server: listener, engine client, application and HTTP server, closed in reverse order.

`run` returns when the server has shut down. `workers/manager.py` starts a server with several API workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

import uvloop

from engine.client.async_client import make_client
from engine.client.transport import Run, run_loop
from server.app import create_app
from server.config import ServerConfig
from server.http.keys import Keys
from server.observability.logs import flush_log, set_up_logging
from server.serving.service import Service
from server.version import version
from server.workers.http_server import (
    FILES_BESIDE_CONNECTIONS,
    Server,
    freeze_memory,
    open_listener,
    raise_file_limit,
    url_of,
    uvicorn_config,
)
from server.workers.manager import serve_workers

log = logging.getLogger("encore.server")


def run(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, drain running requests up to the drain limit, and return.

    A second signal aborts them. `run_engine` is the main function of the engine process; a benchmark of the HTTP side
    passes its own. Raises ConfigError if the address can't be bound, and the error that the engine's startup failed
    with.
    """
    set_up_logging(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, run_engine) if config.api_workers == 1 else serve_workers(config, run_engine))
    finally:
        flush_log()  # before the caller prints an error


async def serve(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Do what `run` does, inside a running event loop, with this process as the only API worker."""
    keys = Keys.take(config, os.environ)
    listener = open_listener(config, keys)  # before loading the model, so that a port in use fails at once
    try:
        raise_file_limit(config.max_connections + FILES_BESIDE_CONNECTIONS)
        client = make_client(config.engine, in_process=config.in_process, run=run_engine)
        app = create_app(client, config, keys=keys)
        service: Service = app.state.service
        service.before_ready = freeze_memory
        server = Server(uvicorn_config(app, config), service)
        log.info("Encore %s on %s loads %s; keys: %s", version(), url_of(listener), config.engine.model, keys)
        reporter = asyncio.create_task(_report_start(server, service))
        try:
            await server.serve(sockets=[listener])
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
