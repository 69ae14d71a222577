"""The main process of a server with several API workers: starts the engine and the workers and supervises them.

The main process holds the engine, the listening socket and the signal handlers, and replaces workers that exit or
hang. It serves no requests itself, so its work can't delay a stream. `single_worker.py` does the same for a single
worker.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import signal
import socket
import time
from dataclasses import dataclass

from engine.client.async_client import STOP_SECONDS
from engine.client.router import EngineRouter
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport, Run, run_loop
from engine.errors import EngineDead
from engine.protocol.messages import Dead, Ready, Report
from engine.utils.processes.child import ChildProcess, anonymous_file
from engine.utils.processes.signals import handle_stop_signals
from server.config import ServerConfig
from server.keys import Keys
from server.observability.shared_counters import ROW_DOUBLES, SharedCounters
from server.serving.lifecycle import STARTED
from server.serving.response_store import MEMORY
from server.version import version
from server.workers import api_worker
from server.workers.http_server import (
    DRAIN_RESPONSE_SECONDS,
    FILES_BESIDE_CONNECTIONS,
    open_listener,
    raise_file_limit,
    url_of,
)
from server.workers.store_folder import StoreFolder

log = logging.getLogger("encore.server")
WATCH_SECONDS = 0.1
GRACE_SECONDS = DRAIN_RESPONSE_SECONDS + 10  # after the drain limit, before a worker that did not exit is killed


async def serve_workers(config: ServerConfig, keys: Keys, run_engine: Run = run_loop) -> None:
    """Serve with `config.api_workers` API workers until a stop signal. Returns and raises as `launch.run` does."""
    listener = open_listener(config, keys)
    try:
        raise_file_limit(config.max_connections + FILES_BESIDE_CONNECTIONS)
        log.info(
            "Encore %s on %s loads %s; keys: %s; API workers: %d",
            version(),
            url_of(listener),
            config.engine.model,
            keys,
            config.api_workers,
        )
        api_workers = WorkerManager(config, listener, keys, run_engine)
        with handle_stop_signals(asyncio.get_running_loop(), api_workers.on_signal):
            await api_workers.serve()
    finally:
        listener.close()


@dataclass
class _WorkerSlot:
    """One worker slot: its row of shared counters and the process that currently uses it.

    `start_at`: when to start the next process (time.monotonic), or None if none is due. `heartbeat`: the last heartbeat
    read from the process. `silent_seconds`: how long that value has not changed.
    """

    row: int
    number: int = -1
    process: ChildProcess | None = None
    start_at: float | None = 0.0
    heartbeat: float = 0.0
    silent_seconds: float = 0.0


class WorkerManager:
    """Run the API workers of one server and their engine. `serve` returns when all have exited."""

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
        self._memory = anonymous_file("encore-counters", config.api_workers * ROW_DOUBLES * 8)
        self._counters = SharedCounters(mmap.mmap(self._memory.fileno(), 0))
        self._slots = [_WorkerSlot(row) for row in range(config.api_workers)]
        self._router = EngineRouter(Supervisor(lambda: ProcessTransport(config.engine, routed=True, run=run_engine)))
        self._store_folder = StoreFolder() if config.response_store_entries else None
        self._next_number = 0
        self._replacement_times: list[float] = []  # time.monotonic
        self._start_time = time.time()
        self._last_check = time.monotonic()
        self._ready: Ready | None = None
        self._failure: Exception | None = None
        self._exit_deadline: float | None = None  # time.monotonic; set once shutdown has begun
        self._logged_serving = False

    async def serve(self) -> None:
        """Start the engine and the workers, supervise them, and stop them.

        Raises the error that the engine's startup failed with, or EngineDead if every worker has exited for good.
        """
        loop = asyncio.get_running_loop()

        def relay(report: Report) -> None:
            loop.call_soon_threadsafe(self._on_report, report)

        self._router.start(relay)
        try:
            while self._exit_deadline is None or any(slot.process is not None for slot in self._slots):
                self._supervise_workers()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            for slot in self._slots:
                if slot.process is not None:
                    slot.process.kill()
                    slot.process.wait()
            await asyncio.to_thread(self._router.stop, STOP_SECONDS)
            self._memory.close()
            if self._store_folder is not None:
                self._store_folder.close()
        if self._failure is not None:
            raise self._failure

    def on_signal(self, number: int) -> None:
        """Drain at the first signal; abort running requests at the second."""
        log.info(
            "%s: %s", signal.Signals(number).name, "draining" if self._exit_deadline is None else "stopping at once"
        )
        self._shut_down(api_worker.DRAIN if self._exit_deadline is None else api_worker.STOP)

    def _shut_down(self, command: bytes) -> None:
        grace = GRACE_SECONDS + (self._config.drain_seconds if command == api_worker.DRAIN else 0.0)
        self._exit_deadline = time.monotonic() + grace
        for slot in self._slots:
            slot.start_at = None
            if slot.process is not None:
                if not self._counters.row_gauge(slot.row, api_worker.HEARTBEAT):
                    slot.process.kill()  # still loading: it would not read the command for seconds
                try:
                    slot.process.pipe.send_bytes(command)
                except OSError as error:  # it has exited; supervision will notice
                    log.debug("API worker %d does not accept commands: %s", slot.number, error)

    def _on_report(self, report: Report) -> None:
        """Handle an engine report that is broadcast to the main process and all workers."""
        if isinstance(report, Ready):
            self._ready = report
        elif isinstance(report, Dead) and self._ready is None and self._exit_deadline is None:
            self._failure = report.refused or EngineDead(f"the engine ended: {report.reason}")
            self._shut_down(api_worker.STOP)

    def _supervise_workers(self) -> None:
        # Cap the elapsed time: if this process was stopped itself, the gap says nothing about the workers.
        now = time.monotonic()
        elapsed, self._last_check = min(now - self._last_check, 2 * WATCH_SECONDS), now
        for slot in self._slots:
            if slot.process is not None and slot.process.exit_code is not None:
                self._on_worker_exit(slot, now, slot.process.exit_reason())
            elif slot.process is not None and self._must_be_killed(slot, now, elapsed):
                log.error("%s does not respond and is killed", slot.process.name)
                slot.process.kill()
            if slot.process is None and slot.start_at is not None and now >= slot.start_at:
                self._start_worker(slot)
        if not self._logged_serving and self._ready is not None and self._all_ready():
            self._logged_serving = True
            names = self._config.served_model_name or (self._ready.info.name,)
            log.info("serving %s after %.1f s", names[0], time.time() - self._start_time)

    def _start_worker(self, slot: _WorkerSlot) -> None:
        slot.number, slot.start_at, slot.heartbeat, slot.silent_seconds = self._next_number, None, 0.0, 0.0
        self._next_number += 1
        try:
            # Close the worker's end of the pipe in this process: else the pipe would stay open after the worker's exit.
            with self._router.connect(slot.number) as engine:
                settings = api_worker.WorkerSettings(
                    config=self._config,
                    number=slot.number,
                    row=slot.row,
                    is_replacement=self._logged_serving,
                    start_time=self._start_time,
                    listener=self._listener,
                    keys=self._keys,
                    engine=engine,
                    memory=self._memory,
                    response_store=MEMORY if self._store_folder is None else self._store_folder.file,
                )
                slot.process = ChildProcess(f"API worker {slot.number}", api_worker.main, settings)
        except OSError as error:  # too many processes or open files; the other workers keep serving
            self._on_worker_exit(slot, time.monotonic(), f"API worker {slot.number} could not be started: {error}")

    def _on_worker_exit(self, slot: _WorkerSlot, now: float, reason: str) -> None:
        if slot.process is not None:
            slot.process.pipe.close()
            slot.process = None
        self._counters.reset_gauges(slot.row)  # releases the queue capacity that it held
        if self._exit_deadline is not None:
            return
        recent = sum(now - then < self._policy.window_seconds for then in self._replacement_times)
        if recent >= self._policy.max_restarts:
            log.error(
                "%s; it is not replaced because workers were already replaced %d times within %.0f s: "
                "find the cause in the log, then restart the server",
                reason,
                recent,
                self._policy.window_seconds,
            )
            if all(one.process is None and one.start_at is None for one in self._slots):
                self._failure = EngineDead("every API worker has exited; see the log for the cause")
                self._shut_down(api_worker.STOP)
            return
        self._replacement_times.append(now)
        slot.start_at = now + self._policy.delay(recent)
        log.error("%s; it is being replaced", reason)

    def _must_be_killed(self, slot: _WorkerSlot, now: float, elapsed: float) -> bool:
        heartbeat = self._counters.row_gauge(slot.row, api_worker.HEARTBEAT)
        # A heartbeat of 0 means that the worker is still loading.
        slot.silent_seconds = slot.silent_seconds + elapsed if heartbeat and heartbeat == slot.heartbeat else 0.0
        slot.heartbeat = heartbeat
        hangs = slot.silent_seconds > self._policy.kill_seconds
        return hangs or (self._exit_deadline is not None and now > self._exit_deadline)

    def _all_ready(self) -> bool:
        return all(self._counters.row_gauge(slot.row, STARTED) for slot in self._slots)
