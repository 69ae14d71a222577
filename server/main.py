"""The composition root: builds listener, engine client, application and HTTP server in order, closes in reverse.

Owns the process: its signals, its exit and its log. `run` returns when the server has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.config
import math
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
from server.inference import Service
from server.version import version

log = logging.getLogger("encore.server")
PROBES = ("/health", "/ready", "/metrics")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, let running requests finish up to the drain limit, and return.

    A second signal ends them at once. Raises ConfigError if the address can't be listened on, and what the engine's
    start failed of.
    """
    logging.config.dictConfig(log_settings(config.log_level))
    asyncio.run(serve(config))


async def serve(config: ServerConfig) -> None:
    """`run` inside a running loop."""
    listener = listen(config.host, config.port)  # before the model: a taken port is known in a moment
    try:
        app = create_app(make_client(config.engine, in_process=config.in_process), config)
        server = Server(
            uvicorn.Config(
                app,
                log_config=None,
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds),
            )
        )
        service: Service = app.state.service
        log.info("Encore %s on %s loads %s", version(), _url(listener), config.engine.model)
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


class Server(uvicorn.Server):
    """uvicorn's server with signals that end it cleanly: its own raises them again, and the exit status is not 0."""

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
        log.info("%s: %s", signal.Signals(sig).name, "stopping at once" if self.should_exit else "draining")
        self.force_exit = self.should_exit
        self.should_exit = True


async def _report_start(server: Server, service: Service) -> None:
    """Log when the model is loaded; end the server where it can't be."""
    began = time.perf_counter()
    await service.settled.wait()
    if service.startup_error is not None:
        server.should_exit = True
    else:
        log.info("serving %s after %.1f s", service.model_names()[0], time.perf_counter() - began)


def log_settings(level: str) -> dict[str, object]:
    """Settings for logging.config: one line per record, on standard error."""
    ours = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "filters": {"no_probes": {"()": NoProbes}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": dict.fromkeys(("encore", "engine", "graph_cache"), ours)
        | {"uvicorn.access": ours | {"filters": ["no_probes"]}},
    }


class NoProbes(logging.Filter):
    """Keeps out of the log what monitors ask several times a second, as long as nothing is wrong with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether an access record is worth a line; its arguments are client, method, path, version and status."""
        path, status = record.args[2], record.args[4]
        return path.partition("?")[0] not in PROBES or (status >= 400 and path != "/ready")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
