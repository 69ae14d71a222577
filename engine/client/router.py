"""Several fronts on one engine: the hub in the main process, and each front's transport to it.

Owns the pipes between fronts and engine, who is connected, and what a front that comes later is told. Passes on what is
addressed without opening it. Knows no HTTP, and neither how fronts are started nor why they end.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from multiprocessing.connection import Connection

from engine.client.counters import totals_after_exit
from engine.client.transport import OnReport, Outbox, Transport
from engine.errors import EngineDead
from engine.protocol.messages import AddressedReports, ClientDisconnected, Command, Dead, Lost, Ready, Report, Snapshot

logger = logging.getLogger(__name__)


class EngineRouter:
    """The one way to an engine, shared by fronts in processes of their own.

    `start`, `connect` and `stop` belong to one thread. A front ends with its pipe: what it has under way is aborted,
    and the others notice nothing. A front's number is never given to another one, so late tokens find nobody.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._lock = threading.Lock()  # over who is connected and what they were told, so that nobody misses a report
        self._outboxes: dict[int, Outbox] = {}
        self._latest: dict[type, Report] = {}  # what a front that comes later must be told, the latest of each kind
        self._on_report: OnReport | None = None

    def start(self, on_report: OnReport) -> None:
        """Start the engine. `on_report` hears what is for all: Ready, Snapshot, Lost, Dead."""
        self._on_report = on_report
        self._transport.start(self._relay)

    def stop(self, timeout: float) -> None:
        """End the engine, and hang up on every front."""
        self._transport.stop(timeout)
        with self._lock:
            outboxes, self._outboxes = self._outboxes, {}
        for outbox in outboxes.values():
            outbox.close()

    def connect(self, client: int) -> Connection:
        """A new front's end of a pipe. Hand it to that front's process, then close it here."""
        router_end, client_end = multiprocessing.get_context("spawn").Pipe(duplex=True)
        outbox = Outbox(router_end, f"encore-client-{client}")
        with self._lock:
            self._outboxes[client] = outbox
            for report_type in (Lost, Snapshot, Ready, Dead):  # by the time it is ready it knows the counts
                if report_type in self._latest:
                    outbox.put(_pickled(self._latest[report_type]))
        threading.Thread(
            target=self._forward_commands, args=(client, router_end), daemon=True, name=f"encore-client-{client}-in"
        ).start()
        return client_end

    def _forward_commands(self, client: int, connection: Connection) -> None:
        """Pass a front's commands on until it is gone."""
        try:
            while True:
                self._send(connection.recv())
        except (EOFError, OSError):
            with self._lock:
                outbox = self._outboxes.pop(client, None)
            if outbox is not None:
                outbox.close()
            self._send(ClientDisconnected(client))

    def _send(self, command: Command) -> None:
        try:
            self._transport.send(command)
        except EngineDead as error:  # every front is told so by the report of its end
            logger.debug("nobody takes commands: %s", error)

    def _relay(self, report: Report) -> None:
        if isinstance(report, AddressedReports):
            with self._lock:
                for client, payload in report.parcels:
                    outbox = self._outboxes.get(client)
                    if outbox is not None:  # else it is gone; the abort is on its way
                        outbox.put(payload)
            return
        with self._lock:
            self._record(report)
            payload = _pickled(report)
            for outbox in self._outboxes.values():
                outbox.put(payload)
        self._on_report(report)

    def _record(self, report: Report) -> None:
        self._latest[type(report)] = report
        if isinstance(report, (Lost, Dead)):
            self._latest.pop(Ready, None)  # who comes now waits for the next engine
            if Snapshot in self._latest:
                self._latest[Snapshot] = Snapshot(totals_after_exit(self._latest[Snapshot].stats, report.reason))


class RouterTransport:
    """A front's way to the engine, over its pipe to the hub."""

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
            on_report(Dead("" if self._stopping else "the main process is gone"))

    def send(self, command: Command) -> None:
        """Never waits for the hub."""
        if self._stopping:
            raise EngineDead("this front has hung up")
        self._outbox.put(_pickled(command))

    def stop(self, timeout: float) -> None:
        """Hang up: the engine aborts what this front has under way, and serves the others."""
        self._stopping = True
        self._outbox.close()


def _pickled(message: Command | Report) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
