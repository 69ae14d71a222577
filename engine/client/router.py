"""Share one engine between several clients: EngineRouter in the main process, RouterTransport in each client's.

The router forwards commands to the engine and reports to the connected clients as bytes, and sends the current state to
a client that connects later. It decodes only the reports about the engine itself: Ready, Snapshot, Lost and Dead.
"""

from __future__ import annotations

import logging
import pickle
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from engine.client.counters import totals_after_exit
from engine.client.transport import OnReport, Outbox, Transport
from engine.errors import EngineDead
from engine.protocol.messages import AddressedReports, ClientDisconnected, Command, Dead, Lost, Ready, Report, Snapshot

logger = logging.getLogger(__name__)


class RoutedTransport(Transport, Protocol):
    """A transport whose reports come as AddressedReports, and that takes commands pickled already."""

    def forward(self, payload: bytes) -> None:
        """Send a pickled command. Raises EngineDead if the loop has ended."""


class EngineRouter:
    """Route commands and reports between one engine and clients in other processes.

    Call `start`, `connect` and `stop` from one thread. When a client's pipe closes, its running requests are aborted;
    other clients are not affected. Never reuse a client number, so that late tokens of an ended client are dropped.
    """

    def __init__(self, transport: RoutedTransport):
        self._transport = transport
        self._lock = threading.Lock()  # guards _outboxes and _latest, so that a new client misses no report
        self._outboxes: dict[int, Outbox] = {}
        self._latest: dict[type, Report] = {}  # the latest report of each type, for clients that connect later
        self._on_report: OnReport | None = None

    def start(self, on_report: OnReport) -> None:
        """Start the engine. `on_report` receives the broadcast reports: Ready, Snapshot, Lost, Dead."""
        self._on_report = on_report
        self._transport.start(self._relay)

    def stop(self, timeout: float) -> None:
        """Stop the engine, then disconnect every client."""
        self._transport.stop(timeout)
        with self._lock:
            outboxes, self._outboxes = self._outboxes, {}
        for outbox in outboxes.values():
            outbox.close()

    def connect(self, client: int) -> Connection:
        """Connect a new client and return its end of the pipe. Pass it to the client's process, then close it here."""
        router_end, client_end = Pipe(duplex=True)
        outbox = Outbox(router_end, f"encore-client-{client}")
        with self._lock:
            self._outboxes[client] = outbox
            for report_type in (Lost, Snapshot, Ready, Dead):  # Snapshot before Ready: a ready client has the counters
                if report_type in self._latest:
                    outbox.put(_pickled(self._latest[report_type]))
        threading.Thread(
            target=self._forward_commands, args=(client, router_end), daemon=True, name=f"encore-client-{client}-in"
        ).start()
        return client_end

    def _forward_commands(self, client: int, connection: Connection) -> None:
        """Forward a client's commands to the engine until its pipe closes."""
        try:
            while True:
                self._forward(connection.recv_bytes())
        except (EOFError, OSError):
            with self._lock:
                outbox = self._outboxes.pop(client, None)
            if outbox is not None:
                outbox.close()
            self._forward(_pickled(ClientDisconnected(client)))

    def _forward(self, payload: bytes) -> None:
        try:
            self._transport.forward(payload)
        except EngineDead as error:  # the Dead report reaches every client
            logger.debug("the engine takes no commands: %s", error)

    def _relay(self, report: Report) -> None:
        if isinstance(report, AddressedReports):
            with self._lock:
                for client, payload in report.parcels:
                    outbox = self._outboxes.get(client)
                    if outbox is not None:  # else the client has disconnected and its abort is on its way
                        outbox.put(payload)
            return
        with self._lock:
            self._record(report)
            payload = _pickled(report)
            for outbox in self._outboxes.values():
                outbox.put(payload)
        if self._on_report is not None:
            self._on_report(report)

    def _record(self, report: Report) -> None:
        self._latest[type(report)] = report
        if isinstance(report, (Lost, Dead)):
            self._latest.pop(Ready, None)  # a client that connects now waits for the next engine
            snapshot = self._latest.get(Snapshot)
            if isinstance(snapshot, Snapshot):
                self._latest[Snapshot] = Snapshot(totals_after_exit(snapshot.stats, report.reason))


class RouterTransport:
    """A client's transport to the engine, over its pipe to the EngineRouter."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._outbox = Outbox(connection, "encore-commands")
        self._stopping = False

    def start(self, on_report: OnReport) -> None:
        threading.Thread(target=self._read, args=(on_report,), daemon=True, name="encore-reports").start()

    def _read(self, on_report: OnReport) -> None:
        try:
            while True:
                on_report(self._connection.recv())
        except (EOFError, OSError):
            on_report(Dead("" if self._stopping else "the main process has ended"))

    def send(self, command: Command) -> None:
        """Queue a command; never blocks on the router."""
        if self._stopping:
            raise EngineDead("this client was stopped")
        self._outbox.put(_pickled(command))

    def stop(self, timeout: float) -> None:
        """Disconnect. The engine aborts this client's requests and serves the others."""
        self._stopping = True
        self._outbox.close()


def _pickled(message: Command | Report) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
