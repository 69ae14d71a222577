"""The main process of a server with several fronts: one engine, one port, and a process for each front.

Owns the engine, the signals, and that fronts which end are replaced. Answers no request itself: what it does not do
can't hold a stream up. Composes as main.py does for a single front.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from engine.client.async_client import STOP_SECONDS
from engine.client.router import EngineRouter
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport, Run, run_loop
from engine.errors import EngineDead
from engine.protocol.messages import Dead, Ready, Report
from engine.utils.processes import STOP_SIGNALS, start_ignoring_stop_signals
from server.config import ServerConfig
from server.http.keys import Keys
from server.observability.shared_counters import ROW_DOUBLES, SharedCounters
from server.serving.service import STARTED
from server.version import version
from server.workers import api_worker as api_worker
from server.workers.http_server import (
    DRAIN_RESPONSE_SECONDS,
    FILES_BESIDE_CONNECTIONS,
    allow_files,
    backlog,
    listen,
    url_of,
)

log = logging.getLogger("encore.server")
WATCH_SECONDS = 0.1
GRACE_SECONDS = DRAIN_RESPONSE_SECONDS + 10  # beyond the drain, before a front that does not end is killed


async def serve_workers(config: ServerConfig, run_engine: Run = run_loop) -> None:
    """Serve with `config.fronts` fronts until a stop signal; ends and raises as main.run does."""
    keys = Keys.load(config, os.environ)
    listener = listen(config.host, config.port)
    try:
        listener.listen(backlog(config))
        listener.setblocking(False)
        allow_files(config.max_connections + FILES_BESIDE_CONNECTIONS)
        log.info(
            "Encore %s on %s loads %s; keys: %s; fronts: %d",
            version(),
            url_of(listener),
            config.engine.model,
            keys,
            config.api_workers,
        )
        api_workers = WorkerManager(config, listener, keys, run_engine)
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, api_workers.on_signal, number)
        try:
            await api_workers.serve()
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
    finally:
        listener.close()


@dataclass
class _WorkerSlot:
    """A place for a front, and who has it now. `retry_at`: when the next one begins, in seconds of time.monotonic.

    `beat` is the last that was seen of its process, `silent` for how many seconds it has been the last.
    """

    row: int
    number: int = -1
    process: BaseProcess | None = None
    orders: Connection | None = None
    retry_at: float | None = 0.0
    beat: float = 0.0
    silent: float = 0.0


class WorkerManager:
    """The fronts of one server and their engine. `serve` runs until all have ended."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        keys: Keys,
        run_engine: Run = run_loop,
        policy: RestartPolicy | None = None,
    ):
        self._config, self._listener, self._keys = config, listener, keys
        self._policy = policy or RestartPolicy()
        self._context = multiprocessing.get_context("spawn")
        self._memory: ctypes.Array = self._context.RawArray(ctypes.c_double, config.api_workers * ROW_DOUBLES)
        self._counters = SharedCounters(self._memory)
        self._slots = [_WorkerSlot(row) for row in range(config.api_workers)]
        self._hub = EngineRouter(Supervisor(lambda: ProcessTransport(config.engine, routed=True, run=run_engine)))
        self._next_number = 0
        self._replaced: list[float] = []  # when
        self._began = time.time()
        self._looked_at = time.monotonic()
        self._ready: Ready | None = None
        self._failure: Exception | None = None
        self._ends_by: float | None = None  # time.monotonic, once the end has been asked for
        self._told_serving = False

    async def serve(self) -> None:
        """Start engine and fronts, keep them, and end them. Raises what the engine's start failed of."""
        loop = asyncio.get_running_loop()

        def relay(report: Report) -> None:
            loop.call_soon_threadsafe(self._on_report, report)

        self._hub.start(relay)
        try:
            while self._ends_by is None or any(slot.process is not None for slot in self._slots):
                self._supervise_workers()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            for slot in self._slots:
                if slot.process is not None:
                    slot.process.kill()
                    slot.process.join()
            await asyncio.to_thread(self._hub.stop, STOP_SECONDS)
        if self._failure is not None:
            raise self._failure

    def on_signal(self, number: int) -> None:
        """The first signal drains, the next one ends what still runs."""
        log.info("%s: %s", signal.Signals(number).name, "draining" if self._ends_by is None else "stopping at once")
        self._end(api_worker.DRAIN if self._ends_by is None else api_worker.STOP)

    def _end(self, order: bytes) -> None:
        patience = GRACE_SECONDS + (self._config.drain_seconds if order == api_worker.DRAIN else 0.0)
        self._ends_by = time.monotonic() + patience
        for slot in self._slots:
            slot.retry_at = None
            if slot.process is not None and slot.orders is not None:
                if not self._counters.row_gauge(
                    slot.row, api_worker.HEARTBEAT
                ):  # it loads, and would read no order for seconds yet
                    slot.process.kill()
                try:
                    slot.orders.send_bytes(order)
                except OSError as gone:  # its end is about to be noticed
                    log.debug("front %d takes no orders: %s", slot.number, gone)

    def _on_report(self, report: Report) -> None:
        """What the engine says to all; its fronts hear it too."""
        if isinstance(report, Ready):
            self._ready = report
        elif isinstance(report, Dead) and self._ready is None and self._ends_by is None:
            self._failure = report.refused or EngineDead(f"the engine ended: {report.reason}")
            self._end(api_worker.STOP)

    def _supervise_workers(self) -> None:
        # Time in which this process itself did not run (stopped, frozen) is no silence of the fronts'.
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 2 * WATCH_SECONDS), now
        for slot in self._slots:
            if slot.process is not None and not slot.process.is_alive():
                self._ended(slot, now, f"ended with exit code {slot.process.exitcode}")
            elif slot.process is not None and self._must_be_killed(slot, now, passed):
                log.error("front %d does not answer and is killed", slot.number)
                slot.process.kill()
            if slot.process is None and slot.retry_at is not None and now >= slot.retry_at:
                self._begin(slot)
        if not self._told_serving and self._ready is not None and self._all_ready():
            self._told_serving = True
            names = self._config.served_model_name or (self._ready.info.name,)
            log.info("serving %s after %.1f s", names[0], time.time() - self._began)

    def _begin(self, slot: _WorkerSlot) -> None:
        slot.number, slot.retry_at, slot.beat, slot.silent = self._next_number, None, 0.0, 0.0
        self._next_number += 1
        try:
            with ExitStack() as theirs:  # closed here: else the end of the front would not end the pipes
                engine = theirs.enter_context(self._hub.connect(slot.number))
                orders, slot.orders = self._context.Pipe(duplex=False)
                theirs.enter_context(orders)
                given = api_worker.WorkerSettings(
                    config=self._config,
                    number=slot.number,
                    row=slot.row,
                    is_late=self._told_serving,
                    began=self._began,
                    listener=self._listener,
                    keys=self._keys,
                    engine=engine,
                    orders=orders,
                    memory=self._memory,
                )
                process = self._context.Process(
                    target=api_worker.main, args=(given,), name=f"encore-front-{slot.number}", daemon=True
                )
                start_ignoring_stop_signals(process)
        except OSError as error:  # too many processes or files: the other fronts serve on meanwhile
            self._ended(slot, time.monotonic(), f"could not be started: {error}")
        else:
            slot.process = process

    def _ended(self, slot: _WorkerSlot, now: float, how: str) -> None:
        slot.process = None
        if slot.orders is not None:
            slot.orders.close()
        self._counters.forget_gauges(slot.row)  # the places that it held are free
        if self._ends_by is not None:
            return
        recent = sum(now - then < self._policy.window_seconds for then in self._replaced)
        if recent >= self._policy.max_restarts:
            log.error(
                "front %d %s; fronts were replaced %d times within %.0f s already, so it is not: find the cause "
                "in the log, then restart the server",
                slot.number,
                how,
                recent,
                self._policy.window_seconds,
            )
            if all(one.process is None and one.retry_at is None for one in self._slots):
                self._failure = EngineDead("every front of the server has ended; the log says why")
                self._end(api_worker.STOP)
            return
        self._replaced.append(now)
        slot.retry_at = now + self._policy.delay(recent)
        log.error("front %d %s; another one begins", slot.number, how)

    def _must_be_killed(self, slot: _WorkerSlot, now: float, passed: float) -> bool:
        beat = self._counters.row_gauge(slot.row, api_worker.HEARTBEAT)
        slot.silent = slot.silent + passed if beat and beat == slot.beat else 0.0  # none yet: it loads
        slot.beat = beat
        hangs = slot.silent > self._policy.kill_seconds
        return hangs or (self._ends_by is not None and now > self._ends_by)

    def _all_ready(self) -> bool:
        return all(self._counters.row_gauge(slot.row, STARTED) for slot in self._slots)
