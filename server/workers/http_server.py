"""uvicorn as this server uses it: its settings, its listener, a drain before its end, and connections shared by fronts.

Owns one HTTP server in one process, from its socket to its last answer. Knows no engine beyond its Service.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from engine.errors import ConfigError
from engine.utils.processes import STOP_SIGNALS
from server.config import ServerConfig
from server.http.connections import OpenConnections, limited_protocol
from server.serving.service import Service

log = logging.getLogger("encore.server")
DRAIN_RESPONSE_SECONDS = 5  # for answers that are complete and not sent yet when the drain is over
FIRST_REQUEST_SECONDS = 0.5  # for a request on a connection that was taken and has brought none yet, at the very end
FILES_BESIDE_CONNECTIONS = 256
AHEAD = 2  # connections by which a front may be ahead of another before it leaves a new one to it
YIELD_SECONDS = 0.004  # how long it leaves it: the other may be busy, or hang
PAUSE_SECONDS = 1.0  # after the system refused a connection, before the next one is tried


def uvicorn_config(app: object, config: ServerConfig, connections: OpenConnections | None = None) -> uvicorn.Config:
    """uvicorn's settings: its own log, limits and signals are off where this server has its own."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        http=limited_protocol(
            config.max_connections, config.header_seconds, config.write_seconds, connections or OpenConnections()
        ),
        server_header=False,
        timeout_keep_alive=math.ceil(config.keep_alive_seconds),
        timeout_graceful_shutdown=DRAIN_RESPONSE_SECONDS,
        backlog=backlog(config),
    )


def backlog(config: ServerConfig) -> int:
    """How many connections the system keeps until they are taken."""
    return min(config.max_connections, 2048)


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


def url_of(listener: socket.socket) -> str:
    """The address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_files(wanted: int) -> None:
    """Raise the process' limit of open files to `wanted`, as far as the system lets it; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < best:
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
    if best < wanted:
        log.warning("the system allows %d open files: fewer connections than --max-connections will fit", best)


def freeze_memory() -> None:
    """Leave what is loaded out of every later garbage collection: looking through it stops all streams for 0.1 s."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """uvicorn's server with a drain before its end, and signals that end it cleanly.

    uvicorn's own handlers raise their signal again, and the exit status is not 0; its graceful end closes the listener
    at once, so that new requests are refused without an answer. With an `acceptor` it is one of several API workers:
    connections come through it, and signals are for the main process, which calls `ask_to_end`.
    """

    def __init__(self, config: uvicorn.Config, service: Service, acceptor: SharedAcceptor | None = None):
        super().__init__(config)
        self._service, self._door = service, acceptor
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the stop signals while serving; a front goes on ignoring them."""
        loop, numbers = asyncio.get_running_loop(), STOP_SIGNALS if self._door is None else ()
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the next one ends what still runs."""
        log.info("%s: %s", signal.Signals(sig).name, "draining" if self._drain is None else "stopping at once")
        self.ask_to_end(at_once=self._drain is not None)

    def ask_to_end(self, at_once: bool) -> None:
        """Drain and end; or end at once, also in the midst of a drain."""
        if at_once:
            if self._drain is not None:
                self._drain.cancel()
            self.force_exit = self.should_exit = True
        elif self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then open the door."""
        await super().startup(sockets)
        if self._door is not None:
            protocol: Any = self.config.http_protocol_class
            self._door.open(
                lambda: protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which closes new connections with no answer, and leaves the lifespan to be cancelled, with a
        traceback, after a second signal.
        """
        if self._door is not None:
            await self._door.close()
        for server in self.servers:
            server.close()
        await self._serve_accepted_connections()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # ends the engine, and so every answer under way
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=1.0)

    async def _serve_accepted_connections(self) -> None:
        """Let the requests arrive whose connections were just taken: they are told why they aren't served."""
        loop = asyncio.get_running_loop()
        connections: set[Any] = self.server_state.connections
        until = loop.time() + FIRST_REQUEST_SECONDS
        while loop.time() < until and not self.force_exit:
            if all(connection.cycle is not None for connection in connections):
                return
            await asyncio.sleep(0.01)

    async def _drained(self) -> None:
        """Refuse what is new with 503, wait for what runs, then end; who runs past the limit is told so."""
        limit = self._service.config.drain_seconds
        if not await self._service.drain(limit):
            left = self._service.unanswered
            log.warning("%d requests are not answered %g s after the signal and are ended", left, limit)
            await self._service.close()
        self.should_exit = True


class SharedAcceptor:
    """Takes connections from a listener that several fronts share, so that each has about as many as the others.

    Whoever wakes first would take the most: a front that is ahead leaves a connection to another one for a moment.
    With `after` it takes none before that is set.
    """

    def __init__(self, listener: socket.socket, connections: OpenConnections, after: asyncio.Event | None = None):
        self._listener, self._connections, self._after = listener, connections, after
        self._loop: asyncio.AbstractEventLoop  # set by `open`, like the next two
        self._make_protocol: Callable[[], asyncio.Protocol]
        self._opening: asyncio.Task[None]
        self._arrivals: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._waited = False

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Take connections from now on."""
        self._loop, self._make_protocol = asyncio.get_running_loop(), make_protocol
        self._opening = self._loop.create_task(self._open())

    async def _open(self) -> None:
        if self._after is not None:
            await self._after.wait()
        self._connections.begin()
        self._loop.add_reader(self._listener.fileno(), self._on_connection)

    async def close(self) -> None:
        """Take no more; those that were taken are there when it returns."""
        self._opening.cancel()
        self._connections.end()
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        await asyncio.gather(*self._arrivals, return_exceptions=True)

    def _on_connection(self) -> None:
        if not self._waited and self._connections.ahead() > AHEAD:
            self._retry_in(YIELD_SECONDS)
            self._waited = True
            return
        self._waited = False
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another front took it, or it is gone
            return
        except OSError as refused:
            if refused.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            log.error("no connection can be taken: %s", refused.strerror)
            self._retry_in(PAUSE_SECONDS)
            return
        connection.setblocking(False)
        arrival = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, connection))
        self._arrivals.add(arrival)
        arrival.add_done_callback(self._arrivals.discard)

    def _retry_in(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(
            seconds, self._loop.add_reader, self._listener.fileno(), self._on_connection
        )
