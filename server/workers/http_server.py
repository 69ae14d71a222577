"""The HTTP server of one process: uvicorn's settings, the listener, its acceptor, and a drain on shutdown."""

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
from engine.utils.processes.signals import handle_stop_signals
from server.config import ServerConfig
from server.http.connections import OpenConnections, limited_protocol
from server.http.hosts import is_loopback
from server.keys import API_KEYS, Keys
from server.serving.service import Service

log = logging.getLogger("encore.server")
DRAIN_RESPONSE_SECONDS = 5  # to send responses that are complete when the drain ends
FIRST_REQUEST_SECONDS = 0.5  # at shutdown, for the first request on a connection that was just accepted
FILES_BESIDE_CONNECTIONS = 256
MAX_BACKLOG = 2048  # connections that the system queues until they are accepted
ACCEPTS = 64  # per iteration of the event loop
MAX_CONNECTION_LEAD = 2  # a worker with more connections than this above the lowest count yields a new one
YIELD_SECONDS = 0.004  # how long it yields: the other worker may be busy or hung
PAUSE_SECONDS = 1.0  # before the next accept, after the system refused one for lack of resources


def uvicorn_config(app: object, config: ServerConfig, connections: OpenConnections | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration. uvicorn's logging and limits are off where this server has its own."""
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
        proxy_headers=bool(config.forwarded_allow_ips),
        forwarded_allow_ips=list(config.forwarded_allow_ips),
        timeout_keep_alive=math.ceil(config.keep_alive_seconds),
        timeout_graceful_shutdown=DRAIN_RESPONSE_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. Raises ConfigError with the reason if binding fails."""
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


def open_listener(config: ServerConfig, keys: Keys) -> socket.socket:
    """Return a socket that listens on the configured address. Connections wait until an acceptor takes them.

    Raises ConfigError if binding fails, and if the address is not loopback while inference requires no key, unless
    `allow_unauthenticated` is set. The bound address is checked, not the setting, which may be a host name.
    """
    listener = listen(config.host, config.port)
    if not keys.guards_inference and not is_loopback(bound := listener.getsockname()[0]):
        if not config.allow_unauthenticated:
            listener.close()
            shown = config.host if config.host == bound else f"{config.host} ({bound})"
            raise ConfigError(
                f"--host {shown} can be reached from other machines, and no API keys are set: set {API_KEYS} or "
                "--api-key-file, or listen on 127.0.0.1, or pass --allow-unauthenticated to serve without keys"
            )
        log.warning("inference on %s is open to anyone who reaches the port: no API keys are set", url_of(listener))
    listener.listen(min(config.max_connections, MAX_BACKLOG))
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the listener's address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit(wanted: int) -> None:
    """Raise the process's limit of open files to `wanted`, or as far as the system allows. A connection is one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        log.warning("the system allows %d open files, too few for --max-connections", limit)


def freeze_memory() -> None:
    """Exclude all objects loaded so far from garbage collection: scanning them stalls every stream for 0.1 s."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """uvicorn's server with a drain on shutdown and a clean exit on stop signals.

    uvicorn's own signal handlers re-raise the signal, so the exit status would not be 0. Its graceful shutdown closes
    the listener at once, so new requests would get no response. Connections come through the acceptor. Signals of one
    of several API workers (`handles_signals` is False) are handled by the main process; its commands reach the worker,
    which calls `request_shutdown`.
    """

    def __init__(self, config: uvicorn.Config, service: Service, acceptor: Acceptor, handles_signals: bool = True):
        super().__init__(config)
        self._service, self._acceptor, self._handles_signals = service, acceptor, handles_signals
        self._drain_task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the stop signals while serving. One of several API workers keeps ignoring them."""
        if not self._handles_signals:
            yield
        else:
            with handle_stop_signals(asyncio.get_running_loop(), self.handle_exit):
                yield

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """Drain at the first signal; abort running requests at the second."""
        log.info("%s: %s", signal.Signals(sig).name, "draining" if self._drain_task is None else "stopping at once")
        self.request_shutdown(force=self._drain_task is not None)

    def request_shutdown(self, force: bool) -> None:
        """Drain, then exit. With `force`, exit without waiting for requests, also during a drain."""
        if force:
            if self._drain_task is not None:
                self._drain_task.cancel()
            self.force_exit = self.should_exit = True
        elif self._drain_task is None:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn, then open the acceptor."""
        await super().startup(sockets)
        if self.should_exit:  # the application did not start
            return
        protocol: Any = self.config.http_protocol_class
        self._acceptor.open(
            lambda: protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down uvicorn without its two flaws.

        uvicorn closes new connections without a response. After a second signal it leaves the lifespan to be cancelled,
        which prints a traceback.
        """
        await self._acceptor.close()
        await self._serve_accepted_connections()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # stops the engine, which ends every running response
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=1.0)

    async def _serve_accepted_connections(self) -> None:
        """Wait for the first request of each newly accepted connection, so that it gets a 503 instead of a reset."""
        loop = asyncio.get_running_loop()
        connections: set[Any] = self.server_state.connections
        until = loop.time() + FIRST_REQUEST_SECONDS
        while loop.time() < until and not self.force_exit:
            if all(connection.cycle is not None for connection in connections):
                return
            await asyncio.sleep(0.01)

    async def _drain_and_exit(self) -> None:
        """Refuse new requests with 503, wait for running ones up to the drain limit, abort the rest, and exit."""
        limit = self._service.config.drain_seconds
        if not await self._service.admission.drain(limit):
            unanswered = self._service.admission.unanswered
            log.warning("%d requests are not answered %g s after the signal and are aborted", unanswered, limit)
            await self._service.close()
        self.should_exit = True


class Acceptor:
    """Accept a listener's connections, up to ACCEPTS of them in an iteration of the event loop.

    uvloop's servers accept one in an iteration: behind a thousand connections, a probe would wait for a thousand
    iterations. Several API workers share a listener, and accept about equally many each: the worker that wakes first
    would accept most, so a worker that is ahead of the others waits for a moment. If `may_accept` is given, accept
    nothing before it is set.
    """

    def __init__(self, listener: socket.socket, connections: OpenConnections, may_accept: asyncio.Event | None = None):
        self._listener, self._connections, self._may_accept = listener, connections, may_accept
        self._loop: asyncio.AbstractEventLoop  # set by `open`, like the next two
        self._make_protocol: Callable[[], asyncio.Protocol]
        self._open_task: asyncio.Task[None]
        self._accept_tasks: set[asyncio.Task[object]] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._yielded = False

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Start accepting connections."""
        self._loop, self._make_protocol = asyncio.get_running_loop(), make_protocol
        self._open_task = self._loop.create_task(self._open())

    async def _open(self) -> None:
        if self._may_accept is not None:
            await self._may_accept.wait()
        self._connections.begin()
        self._loop.add_reader(self._listener.fileno(), self._on_connections)

    async def close(self) -> None:
        """Stop accepting. Connections accepted before have their protocol when this returns."""
        self._open_task.cancel()
        self._connections.end()
        self._loop.remove_reader(self._listener.fileno())
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        await asyncio.gather(*self._accept_tasks, return_exceptions=True)

    def _on_connections(self) -> None:
        for _ in range(ACCEPTS):
            if not self._yielded and self._connections.lead(len(self._accept_tasks)) > MAX_CONNECTION_LEAD:
                self._retry_in(YIELD_SECONDS)
                self._yielded = True
                return
            self._yielded = False
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept a connection. Return whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another worker accepted it, or the client left
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            log.error("can't accept connections: %s", error.strerror)
            self._retry_in(PAUSE_SECONDS)
            return False
        connection.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, connection))
        self._accept_tasks.add(task)
        task.add_done_callback(self._accept_tasks.discard)
        return True

    def _retry_in(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry_timer = self._loop.call_later(
            seconds, self._loop.add_reader, self._listener.fileno(), self._on_connections
        )
