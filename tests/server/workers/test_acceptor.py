"""How the acceptor takes connections that wait."""

import asyncio
import socket
from pathlib import Path

import pytest

from server.config import ServerConfig
from server.http.connections import OpenConnections
from server.keys import Keys
from server.observability.shared_counters import ROW_DOUBLES, SharedCounters
from server.workers import http_server
from server.workers.http_server import ACCEPTS, MAX_CONNECTION_LEAD, Acceptor, open_listener
from tests.support.waiting import PATIENCE, wait


@pytest.fixture
def listener():
    with open_listener(ServerConfig(port=0), Keys()) as listener:
        yield listener


def backlog(listener: socket.socket) -> int:
    """Return the number of connections that wait to be accepted."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f":{listener.getsockname()[1]:04X}"
    [queues] = [row[4] for row in rows if row[1].endswith(port) and row[3] == "0A"]
    return int(queues.partition(":")[2], 16)


async def accepted_after(acceptor: Acceptor, listener: socket.socket, clients: int, iterations: int) -> int:
    """Return how many of `clients` waiting connections have their protocol after so many iterations of the loop."""
    made = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            made.append(transport)

    waiting = [socket.create_connection(listener.getsockname()) for _ in range(clients)]
    wait(lambda: backlog(listener) == clients, "the connections")  # a busy kernel queues them later
    acceptor.open(Counted)
    for _ in range(iterations):
        await asyncio.sleep(0)
    count = len(made)
    await acceptor.close()
    for one in (*made, *waiting):
        one.close()
    return count


async def test_a_probe_behind_a_burst_of_connections_waits_for_a_few_iterations(listener) -> None:
    acceptor = Acceptor(listener, OpenConnections())
    assert await accepted_after(acceptor, listener, 3 * ACCEPTS, iterations=12) == 3 * ACCEPTS


async def test_a_worker_ahead_of_another_leaves_it_its_share(listener, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "YIELD_SECONDS", PATIENCE)  # iterations may take milliseconds
    memory = bytearray(8 * 2 * ROW_DOUBLES)
    OpenConnections(SharedCounters(memory, row=1)).begin()
    acceptor = Acceptor(listener, OpenConnections(SharedCounters(memory, row=0)))
    assert await accepted_after(acceptor, listener, 10, iterations=12) <= MAX_CONNECTION_LEAD + 1
