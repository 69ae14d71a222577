"""One of several fronts: a process that answers HTTP on the shared port, with the engine at the other end of a pipe.

Owns what runs in that process. Obeys the main process, which alone hears signals, and ends when that is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import logging.config
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from engine.client.async_client import EngineClient
from engine.client.router import RouterTransport
from engine.errors import EngineDead
from engine.utils.processes import ignore_stop_signals
from server.app import create_app
from server.config import ServerConfig
from server.http.connections import OpenConnections
from server.http.keys import Keys
from server.observability.logs import log_settings
from server.observability.shared_counters import SharedCounters
from server.serving.service import Service
from server.workers.http_server import Server, SharedAcceptor, freeze_memory, uvicorn_config

log = logging.getLogger("encore.server")
DRAIN, STOP = b"drain", b"stop"
HEARTBEAT = "beat"  # the gauge that shows the main process that this one's loop turns; time.monotonic
HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """All that a front's process is given. `number` is its own alone, `row` its predecessor's too; `began` in seconds
    of time.time is the server's start, `orders` where DRAIN and STOP come from. One that `is_late` comes to a server
    that serves: it takes no connection before it can serve too.
    """

    config: ServerConfig
    number: int
    row: int
    is_late: bool
    began: float
    listener: socket.socket
    keys: Keys
    engine: Connection
    orders: Connection
    memory: ctypes.Array


def main(slot: WorkerSettings) -> None:
    """Serve until ordered to end."""
    ignore_stop_signals()
    logging.config.dictConfig(log_settings(slot.config.log_level, slot.config.log_format))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(slot))


async def _serve(slot: WorkerSettings) -> None:
    counters = SharedCounters(slot.memory, slot.row)
    client = EngineClient(slot.config.engine, RouterTransport(slot.engine), client=slot.number)
    app = create_app(client, slot.config, keys=slot.keys, counters=counters, began=slot.began)
    connections = OpenConnections(counters)
    service: Service = app.state.service
    may_begin = asyncio.Event() if slot.is_late else None
    acceptor = SharedAcceptor(slot.listener, connections, may_begin)
    server = Server(uvicorn_config(app, slot.config, connections), service, acceptor)
    loop = asyncio.get_running_loop()

    def obey() -> None:
        try:
            order = slot.orders.recv_bytes()
        except (EOFError, OSError):  # the main process is gone
            order = STOP
            loop.remove_reader(slot.orders.fileno())
        server.ask_to_end(at_once=order == STOP)

    loop.add_reader(slot.orders.fileno(), obey)
    service.before_ready = freeze_memory
    tasks = [asyncio.create_task(_heartbeat(counters))]
    if may_begin is not None:
        tasks.append(asyncio.create_task(_begin_or_end(server, service, may_begin)))
    try:
        await server.serve(sockets=[])
    finally:
        for task in tasks:
            task.cancel()
        await service.close()


async def _heartbeat(counters: SharedCounters) -> None:
    place = counters.gauge(HEARTBEAT)
    while True:
        counters.values[place] = time.monotonic()
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _begin_or_end(server: Server, service: Service, may_begin: asyncio.Event) -> None:
    """Let a late front take connections; end one that can't serve where others do, so that another one is tried."""
    await service.settled.wait()
    if service.startup_error is not None and not isinstance(service.startup_error, EngineDead):
        log.error("this front can't serve: %s", service.startup_error)
        server.ask_to_end(at_once=True)
    else:  # where the engine is gone for good it says so, as the others do
        may_begin.set()
