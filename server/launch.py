"""The composition root: builds listener, engine client, application and HTTP server in order, closes in reverse.

Owns the process: its exit and its log. `run` returns when the server has ended. Where there is more than one front, it
is fronts.py that composes.
"""

from __future__ import annotations

import asyncio
import logging
import logging.config
import os
import time

import uvloop

from engine.client.async_client import make_client
from engine.client.transport import Run, run_loop
from server.app import create_app
from server.config import ServerConfig
from server.http.keys import Keys
from server.observability.logs import log_settings
from server.serving.service import Service
from server.version import version
from server.workers.http_server import (
    FILES_BESIDE_CONNECTIONS,
    Server,
    freeze_memory,
    listen,
    raise_file_limit,
    url_of,
    uvicorn_config,
)
from server.workers.manager import serve_workers

log = logging.getLogger("encore.server")


def run(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Serve until SIGTERM or SIGINT, let running requests finish up to the drain limit, and return.

    A second signal ends them at once. Raises ConfigError if the address can't be listened on, and what the engine's
    start failed of. `run_engine` is what the engine's process runs: a benchmark of the HTTP side gives one of its own.
    """
    logging.config.dictConfig(log_settings(config.log_level, config.log_format))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, run_engine) if config.api_workers == 1 else serve_workers(config, run_engine))


async def serve(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """`run` inside a running loop, with one front, which is this process."""
    keys = Keys.load(config, os.environ)
    listener = listen(config.host, config.port)  # before the model: a taken port is known in a moment
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
    """Log when the model is loaded; end the server where it can't be."""
    start = time.perf_counter()
    await service.settled.wait()
    if service.startup_error is not None:
        server.should_exit = True
    else:
        log.info("serving %s after %.1f s", service.model_names()[0], time.perf_counter() - start)
