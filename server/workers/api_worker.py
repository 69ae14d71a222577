"""The process of one API worker: serves HTTP on the shared port and reaches the engine through a pipe.

Workers ignore stop signals. The main process receives them and sends DRAIN or STOP through the command pipe. A worker
also exits when that pipe closes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import mmap
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from engine.client.async_client import EngineClient
from engine.client.router import RouterTransport
from engine.errors import EngineDead
from server.app import create_app
from server.config import ServerConfig
from server.http.connections import OpenConnections
from server.keys import Keys
from server.observability.logs import set_up_logging
from server.observability.shared_counters import SharedCounters
from server.serving.service import Service
from server.workers.http_server import Acceptor, Server, freeze_memory, uvicorn_config

log = logging.getLogger("encore.server")
DRAIN, STOP = b"drain", b"stop"
HEARTBEAT = "beat"  # gauge that tells the main process that this event loop runs; time.monotonic
HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Arguments of a worker process.

    `number` is unique to the process; `row` is its row of shared counters, which it takes over from its predecessor.
    `is_replacement`: the server serves already, so accept no connection before this worker can serve too.
    `start_time`: the server's start (time.time). `engine`: this worker's end of its pipe to the EngineRouter. `memory`:
    the file of the shared counters. `response_store`: the path of the shared store of responses.
    """

    config: ServerConfig
    number: int
    row: int
    is_replacement: bool
    start_time: float
    listener: socket.socket
    keys: Keys
    engine: Connection
    memory: io.FileIO
    response_store: str


def main(commands: Connection, settings: WorkerSettings) -> None:
    """Serve until the main process sends DRAIN or STOP through `commands`."""
    set_up_logging(settings.config.log_level, settings.config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(commands, settings))


async def _serve(commands: Connection, settings: WorkerSettings) -> None:
    counters = SharedCounters(mmap.mmap(settings.memory.fileno(), 0), settings.row)
    client = EngineClient(settings.config.engine, RouterTransport(settings.engine), client=settings.number)
    app = create_app(
        client,
        settings.config,
        keys=settings.keys,
        counters=counters,
        start_time=settings.start_time,
        response_store=settings.response_store,
    )
    connections = OpenConnections(counters)
    service: Service = app.state.service
    may_accept = asyncio.Event() if settings.is_replacement else None
    acceptor = Acceptor(settings.listener, connections, may_accept)
    server = Server(uvicorn_config(app, settings.config, connections), service, acceptor, handles_signals=False)
    loop = asyncio.get_running_loop()

    def on_command() -> None:
        try:
            command = commands.recv_bytes()
        except (EOFError, OSError):  # the main process has ended
            command = STOP
            loop.remove_reader(commands.fileno())
        server.request_shutdown(force=command == STOP)

    loop.add_reader(commands.fileno(), on_command)
    service.before_ready = freeze_memory
    tasks = [asyncio.create_task(_heartbeat(counters))]
    if may_accept is not None:
        tasks.append(asyncio.create_task(_accept_or_exit(server, service, may_accept)))
    try:
        await server.serve(sockets=[])
    finally:
        for task in tasks:
            task.cancel()
        await service.close()


async def _heartbeat(counters: SharedCounters) -> None:
    index = counters.gauge_index(HEARTBEAT)
    while True:
        counters.values[index] = time.monotonic()
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _accept_or_exit(server: Server, service: Service, may_accept: asyncio.Event) -> None:
    """Let a replacement worker accept connections once it can serve; exit if it can't, so that another one is tried."""
    await service.settled.wait()
    if service.startup_error is not None and not isinstance(service.startup_error, EngineDead):
        log.error("this API worker can't serve: %s", service.startup_error)
        server.request_shutdown(force=True)
    else:  # also if the engine is gone for good: this worker then reports that, as the others do
        may_accept.set()
