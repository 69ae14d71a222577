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
from engine.client.hub import Hub
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport, Run, run_loop
from engine.errors import EngineDead
from engine.protocol.messages import Dead, Ready, Report
from engine.utils.processes import STOP_SIGNALS, start_deaf
from server.config import ServerConfig
from server.http.keys import Keys
from server.observability.shared_counters import ROW_DOUBLES, Tally
from server.serving.service import STARTED
from server.version import version
from server.workers import api_worker as front
from server.workers.http_server import (
    FILES_BESIDE_CONNECTIONS,
    LAST_WORDS_SECONDS,
    allow_files,
    backlog,
    listen,
    url_of,
)

log = logging.getLogger("encore.server")
WATCH_SECONDS = 0.1
GRACE_SECONDS = LAST_WORDS_SECONDS + 10  # beyond the drain, before a front that does not end is killed


async def serve_fronts(config: ServerConfig, run_engine: Run = run_loop) -> None:
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
            config.fronts,
        )
        fronts = Fronts(config, listener, keys, run_engine)
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, fronts.heard_signal, number)
        try:
            await fronts.serve()
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
    finally:
        listener.close()


@dataclass
class _Seat:
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


class Fronts:
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
        self._memory: ctypes.Array = self._context.RawArray(ctypes.c_double, config.fronts * ROW_DOUBLES)
        self._tally = Tally(self._memory)
        self._seats = [_Seat(row) for row in range(config.fronts)]
        self._hub = Hub(Supervisor(lambda: ProcessTransport(config.engine, routed=True, run=run_engine)))
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
        self._hub.start(lambda report: loop.call_soon_threadsafe(self._heard, report))
        try:
            while self._ends_by is None or any(seat.process is not None for seat in self._seats):
                self._look_after_fronts()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            for seat in self._seats:
                if seat.process is not None:
                    seat.process.kill()
                    seat.process.join()
            await asyncio.to_thread(self._hub.stop, STOP_SECONDS)
        if self._failure is not None:
            raise self._failure

    def heard_signal(self, number: int) -> None:
        """The first signal drains, the next one ends what still runs."""
        log.info("%s: %s", signal.Signals(number).name, "draining" if self._ends_by is None else "stopping at once")
        self._end(front.DRAIN if self._ends_by is None else front.STOP)

    def _end(self, order: bytes) -> None:
        patience = GRACE_SECONDS + (self._config.drain_seconds if order == front.DRAIN else 0.0)
        self._ends_by = time.monotonic() + patience
        for seat in self._seats:
            seat.retry_at = None
            if seat.process is not None:
                if not self._tally.row_gauge(seat.row, front.BEAT):  # it loads, and would read no order for seconds yet
                    seat.process.kill()
                try:
                    seat.orders.send_bytes(order)
                except OSError as gone:  # its end is about to be noticed
                    log.debug("front %d takes no orders: %s", seat.number, gone)

    def _heard(self, report: Report) -> None:
        """What the engine says to all; its fronts hear it too."""
        if isinstance(report, Ready):
            self._ready = report
        elif isinstance(report, Dead) and self._ready is None and self._ends_by is None:
            self._failure = report.refused or EngineDead(f"the engine ended: {report.reason}")
            self._end(front.STOP)

    def _look_after_fronts(self) -> None:
        # Time in which this process itself did not run (stopped, frozen) is no silence of the fronts'.
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 2 * WATCH_SECONDS), now
        for seat in self._seats:
            if seat.process is not None and not seat.process.is_alive():
                self._ended(seat, now, f"ended with exit code {seat.process.exitcode}")
            elif seat.process is not None and self._must_be_killed(seat, now, passed):
                log.error("front %d does not answer and is killed", seat.number)
                seat.process.kill()
            if seat.process is None and seat.retry_at is not None and now >= seat.retry_at:
                self._begin(seat)
        if not self._told_serving and self._ready is not None and self._all_serve():
            self._told_serving = True
            names = self._config.served_model_name or (self._ready.info.name,)
            log.info("serving %s after %.1f s", names[0], time.time() - self._began)

    def _begin(self, seat: _Seat) -> None:
        seat.number, seat.retry_at, seat.beat, seat.silent = self._next_number, None, 0.0, 0.0
        self._next_number += 1
        try:
            with ExitStack() as theirs:  # closed here: else the end of the front would not end the pipes
                engine = theirs.enter_context(self._hub.connect(seat.number))
                orders, seat.orders = self._context.Pipe(duplex=False)
                theirs.enter_context(orders)
                given = front.Seat(config=self._config, number=seat.number, row=seat.row, is_late=self._told_serving,
                                   began=self._began, listener=self._listener, keys=self._keys, engine=engine,
                                   orders=orders, memory=self._memory)  # fmt: skip
                process = self._context.Process(
                    target=front.main, args=(given,), name=f"encore-front-{seat.number}", daemon=True
                )
                start_deaf(process)
        except OSError as error:  # too many processes or files: the other fronts serve on meanwhile
            self._ended(seat, time.monotonic(), f"could not be started: {error}")
        else:
            seat.process = process

    def _ended(self, seat: _Seat, now: float, how: str) -> None:
        seat.process = None
        if seat.orders is not None:
            seat.orders.close()
        self._tally.forget_gauges(seat.row)  # the places that it held are free
        if self._ends_by is not None:
            return
        recent = sum(now - then < self._policy.window_seconds for then in self._replaced)
        if recent >= self._policy.max_restarts:
            log.error(
                "front %d %s; fronts were replaced %d times within %.0f s already, so it is not: find the cause "
                "in the log, then restart the server",
                seat.number,
                how,
                recent,
                self._policy.window_seconds,
            )
            if all(one.process is None and one.retry_at is None for one in self._seats):
                self._failure = EngineDead("every front of the server has ended; the log says why")
                self._end(front.STOP)
            return
        self._replaced.append(now)
        seat.retry_at = now + self._policy.delay(recent)
        log.error("front %d %s; another one begins", seat.number, how)

    def _must_be_killed(self, seat: _Seat, now: float, passed: float) -> bool:
        beat = self._tally.row_gauge(seat.row, front.BEAT)
        seat.silent = seat.silent + passed if beat and beat == seat.beat else 0.0  # none yet: it loads
        seat.beat = beat
        hangs = seat.silent > self._policy.kill_seconds
        return hangs or (self._ends_by is not None and now > self._ends_by)

    def _all_serve(self) -> bool:
        return all(self._tally.row_gauge(seat.row, STARTED) for seat in self._seats)
