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
        self._lines: dict[int, Outbox] = {}
        self._known: dict[type, Report] = {}  # what a front that comes later must be told, the latest of each kind
        self._on_report: OnReport | None = None

    def start(self, on_report: OnReport) -> None:
        """Start the engine. `on_report` hears what is for all: Ready, Snapshot, Lost, Dead."""
        self._on_report = on_report
        self._transport.start(self._relay)

    def stop(self, timeout: float) -> None:
        """End the engine, and hang up on every front."""
        self._transport.stop(timeout)
        with self._lock:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def connect(self, client: int) -> Connection:
        """A new front's end of a pipe. Hand it to that front's process, then close it here."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=True)
        line = Outbox(ours, f"encore-front-{client}")
        with self._lock:
            self._lines[client] = line
            for kind in (Lost, Snapshot, Ready, Dead):  # by the time it is ready it knows the counts
                if kind in self._known:
                    line.put(_pickled(self._known[kind]))
        threading.Thread(
            target=self._listen, args=(client, ours), daemon=True, name=f"encore-front-{client}-in"
        ).start()
        return theirs

    def _listen(self, client: int, connection: Connection) -> None:
        """Pass a front's commands on until it is gone."""
        try:
            while True:
                self._send(connection.recv())
        except (EOFError, OSError):
            with self._lock:
                line = self._lines.pop(client, None)
            if line is not None:
                line.close()
            self._send(ClientDisconnected(client))

    def _send(self, command: Command) -> None:
        try:
            self._transport.send(command)
        except EngineDead as gone:  # every front is told so by the report of its end
            logger.debug("nobody takes commands: %s", gone)

    def _relay(self, report: Report) -> None:
        if isinstance(report, AddressedReports):
            with self._lock:
                for client, parcel in report.parcels:
                    line = self._lines.get(client)
                    if line is not None:  # else it is gone; the abort is on its way
                        line.put(parcel)
            return
        with self._lock:
            self._remember(report)
            parcel = _pickled(report)
            for line in self._lines.values():
                line.put(parcel)
        self._on_report(report)

    def _remember(self, report: Report) -> None:
        self._known[type(report)] = report
        if isinstance(report, (Lost, Dead)):
            self._known.pop(Ready, None)  # who comes now waits for the next engine
            if Snapshot in self._known:
                self._known[Snapshot] = Snapshot(totals_after_exit(self._known[Snapshot].stats, report.reason))


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
