"""Start a server: the engine's process first, then the API workers.

The engine's process imports PyTorch and loads the model while this one imports the web framework.
"""

from __future__ import annotations

import asyncio
import importlib
import os

import uvloop

from engine.client.async_client import make_client
from engine.client.transport import Run, run_loop
from engine.errors import ConfigError
from server.config import ServerConfig
from server.keys import Keys
from server.observability.logs import flush_log, set_up_logging


def run(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, drain running requests up to the drain limit, and return.

    A second signal aborts them. `run_engine` is the main function of the engine process; a benchmark of the HTTP side
    passes its own. Raises ConfigError if the address can't be bound, and the error that the engine's startup failed
    with.
    """
    set_up_logging(config.log_level, config.log_format)
    if config.otlp_traces_endpoint is not None:
        importlib.import_module("server.observability.tracing").check_packages(config.otlp_traces_endpoint)
    if config.is_replicated:
        return _serve_replicas(config)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, run_engine))
    finally:
        flush_log()  # before the caller prints an error


def _serve_replicas(config: ServerConfig) -> None:
    try:
        replicas = importlib.import_module("server.replicas.launch")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        name = "max_replicas" if config.replicas is None else "replicas"
        raise ConfigError(
            f"{name}={getattr(config, name)} needs Ray, which is not installed: pip install 'encore-serve[ray]', or "
            f"leave {name} out"
        ) from error
    replicas.run(config)


async def serve(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Do what `run` does, inside a running event loop."""
    keys = Keys.take(config, os.environ)  # before the engine's process starts, which would inherit them
    if config.api_workers > 1:
        manager = await asyncio.to_thread(importlib.import_module, "server.workers.manager")
        return await manager.serve_workers(config, keys, run_engine)
    client = make_client(config.engine, in_process=config.in_process, run=run_engine)
    client.begin()
    try:
        worker = await asyncio.to_thread(importlib.import_module, "server.workers.single_worker")
        await worker.serve(client, config, keys)
    finally:
        await client.close()
