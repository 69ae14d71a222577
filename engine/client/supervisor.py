"""Keeps an engine process running: one that dies or hangs is replaced by a fresh one, within limits.

Owns when a process is given up, when another is started, and when that is no use. A Transport around transports: who
uses it sees one way to an engine, with a Lost report where one process ended and a Ready where the next one serves, and
counters that go on. Knows no requests; those of a lost process end in the client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.client.counters import add_totals, totals_after_exit
from engine.client.transport import OnReport, ProcessTransport
from engine.errors import ConfigError
from engine.protocol.messages import Command, Dead, EngineStats, Lost, Ready, Report, Snapshot

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
REAP_SECONDS = 5.0  # a process that has reported its end may take this long to exit before it is killed


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a process is replaced.

    Up to `max_restarts` within `window_seconds`; then the engine stays dead. The pause before a restart doubles from
    `first_delay` with every restart in the window, up to `max_delay`. A loaded process that reports nothing for
    `kill_seconds` is killed, and then replaced like one that died; it must be longer than the slowest step or capture.
    """

    max_restarts: int = 5
    window_seconds: float = 600.0
    first_delay: float = 0.5
    max_delay: float = 30.0
    kill_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_restarts", "window_seconds", "first_delay", "max_delay", "kill_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: a number of at least 0 is needed")

    def delay(self, recent: int) -> float:
        """Seconds to wait before a restart that `recent` others in the window came before."""
        return min(self.max_delay, self.first_delay * 2 ** min(recent, 30))


class Supervisor:
    """A Transport that starts processes by `make` and replaces what dies or hangs.

    The first process is not replaced before it has been ready: a start that fails is told to who started it. Neither
    is one whose configuration or model is refused: a second try would be refused too.
    """

    def __init__(self, make: Callable[[], ProcessTransport], policy: RestartPolicy | None = None):
        self._make, self._policy = make, policy or RestartPolicy()
        self._on_report: OnReport | None = None
        self._lock = threading.Lock()  # over which process is the current one, and that none begins after a stop
        self._current: ProcessTransport | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="encore-supervisor")
        self._has_served = False
        self._is_serving = False  # only a loaded process owes reports
        self._num_reports = 0
        self._restart_at: float | None = None
        self._restart_times: list[float] = []  # when processes were replaced
        self._hang_reason = ""
        self._previous_totals: EngineStats | None = None  # what the processes before this one counted
        self._latest = EngineStats()

    @property
    def pid(self) -> int | None:
        """The current process' id, once one was started."""
        return self._current.pid if self._current is not None else None

    def start(self, on_report: OnReport) -> None:
        self._on_report = on_report
        self._start_process()
        self._watcher.start()

    def send(self, command: Command) -> None:
        self._current.send(command)

    def stop(self, timeout: float) -> None:
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join(REAP_SECONDS + timeout)
        with self._lock:
            if self._current is not None:
                self._current.stop(timeout)

    def _start_process(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._current = self._make()
                self._current.start(self._relay)

    def _relay(self, report: Report) -> None:
        """Pass a report on, by the current process' reader thread; of an end, what is done about it."""
        self._num_reports += 1
        if isinstance(report, Ready):
            self._is_serving = self._has_served = True
            self._compare_weights(report)
        elif isinstance(report, Snapshot):
            self._latest = (
                report.stats if self._previous_totals is None else add_totals(self._previous_totals, report.stats)
            )
            report = Snapshot(self._latest)
        elif isinstance(report, Dead):
            self._is_serving = False
            report = self._handle_exit(report)
            self._previous_totals = self._latest = totals_after_exit(self._latest, report.reason)
        self._on_report(report)

    def _compare_weights(self, ready: Ready) -> None:
        version = "" if self._previous_totals is None else self._previous_totals.weight_version
        if version and version != ready.info.weight_version:
            logger.warning(
                "the restarted engine serves the weights %r, as they were loaded; before it were %r",
                ready.info.weight_version,
                version,
            )

    def _handle_exit(self, dead: Dead) -> Dead | Lost:
        hang_reason, self._hang_reason = self._hang_reason, ""
        if self._stopping.is_set() or not self._has_served or dead.refused is not None:
            return dead
        reason, now = hang_reason or dead.reason or "the engine process ended", time.monotonic()
        recent = sum(now - restarted < self._policy.window_seconds for restarted in self._restart_times)
        if recent >= self._policy.max_restarts:
            return Dead(
                f"{reason}; restarted {recent} times within {self._policy.window_seconds:.0f} s already, so it is not "
                "restarted again: find the cause in the log, then restart the server"
            )
        delay = self._policy.delay(recent)
        self._restart_times.append(now)
        self._restart_at = now + delay
        logger.error("%s; restart %d of the engine begins in %.1f s", reason, len(self._restart_times), delay)
        return Lost(reason, restarts=len(self._restart_times))

    def _watch(self) -> None:
        """Start what is due and kill what hangs, in a thread of its own, until the stop."""
        seen_reports, silent_seconds, last_tick = -1, 0.0, time.monotonic()
        while not self._stopping.wait(TICK_SECONDS):
            # Time in which this process itself did not run (stopped, suspended) is no silence of the other's.
            now = time.monotonic()
            elapsed, last_tick = min(now - last_tick, 2 * TICK_SECONDS), now
            silent_seconds = silent_seconds + elapsed if self._is_serving and self._num_reports == seen_reports else 0.0
            seen_reports = self._num_reports
            if self._restart_at is not None and now >= self._restart_at:
                self._restart_at = None
                self._replace()
            elif silent_seconds > self._policy.kill_seconds:
                self._hang_reason = f"the engine process hung: no report for {silent_seconds:.0f} s, so it was killed"
                self._current.kill()
                silent_seconds = 0.0

    def _replace(self) -> None:
        self._current.stop(REAP_SECONDS)  # its memory must be free before the next one takes as much
        try:
            self._start_process()
        except OSError as error:
            self._relay(Dead(f"no engine process could be started: {error}"))
