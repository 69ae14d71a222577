"""The composition root: builds listener, engine client, application and HTTP server in order, closes in reverse.

Owns the process: its signals, its exit and its log. `run` returns when the server has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.config
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from engine.client import make_client
from engine.errors import ConfigError
from server.app import create_app
from server.config import ServerConfig
from server.connections import limited_protocol
from server.inference import Service
from server.keys import Keys
from server.logs import log_settings
from server.version import version

log = logging.getLogger("encore.server")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS_SECONDS = 5  # for answers that are complete and not sent yet when the drain is over
FILES_BESIDE_CONNECTIONS = 256


def run(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, let running requests finish up to the drain limit, and return.

    A second signal ends them at once. Raises ConfigError if the address can't be listened on, and what the engine's
    start failed of.
    """
    logging.config.dictConfig(log_settings(config.log_level, config.log_format))
    asyncio.run(serve(config))


async def serve(config: ServerConfig) -> None:
    """`run` inside a running loop."""
    keys = Keys.load(config, os.environ)
    listener = listen(config.host, config.port)  # before the model: a taken port is known in a moment
    try:
        allow_files(config.max_connections + FILES_BESIDE_CONNECTIONS)
        app = create_app(make_client(config.engine, in_process=config.in_process), config, keys=keys)
        service: Service = app.state.service
        server = Server(uvicorn_config(app, config), service)
        log.info("Encore %s on %s loads %s; keys: %s", version(), _url(listener), config.engine.model, keys)
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


def uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's settings: its own log, limits and signals are off where this server has its own."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        http=limited_protocol(config.max_connections, config.header_seconds),
        server_header=False,
        timeout_keep_alive=math.ceil(config.keep_alive_seconds),
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        backlog=min(config.max_connections, 2048),
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ConfigError that says why it can't be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"can't listen on {host} port {port}: {exc.strerror or exc}; choose another --host or --port"
        ) from exc
    listener.set_inheritable(False)
    return listener


def allow_files(wanted: int) -> None:
    """Raise the process' limit of open files to `wanted`, as far as the system lets it; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < best:
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
    if best < wanted:
        log.warning("the system allows %d open files: fewer connections than --max-connections will fit", best)


class Server(uvicorn.Server):
    """uvicorn's server with a drain before its end, and signals that end it cleanly.

    uvicorn's own handlers raise their signal again, and the exit status is not 0; its graceful end closes the listener
    at once, so that new requests are refused without an answer.
    """

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the stop signals while serving."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the next one ends what still runs."""
        log.info("%s: %s", signal.Signals(sig).name, "draining" if self._drain is None else "stopping at once")
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drained())
        else:
            self._drain.cancel()
            self.force_exit = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which leaves the lifespan to be cancelled, with a traceback, after a second signal."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # ends the engine, and so every answer under way
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=1.0)

    async def _drained(self) -> None:
        """Refuse what is new with 503, wait for what runs, then end; who runs past the limit is told so."""
        limit = self._service.config.drain_seconds
        if not await self._service.drain(limit):
            log.warning("%d sequences still run %g s after the signal and are ended", self._service.in_flight, limit)
            await self._service.close()
        self.should_exit = True


async def _report_start(server: Server, service: Service) -> None:
    """Log when the model is loaded; end the server where it can't be."""
    began = time.perf_counter()
    await service.settled.wait()
    if service.startup_error is not None:
        server.should_exit = True
    else:
        log.info("serving %s after %.1f s", service.model_names()[0], time.perf_counter() - began)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
