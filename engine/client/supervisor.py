"""Keep an engine process running: restart it when it dies or hangs, within limits.

The Supervisor is a Transport around other transports. Its user sees one engine, with a Lost report when a process
ends, a Ready report when the next one serves, and counters that continue. The client fails the requests of a lost
process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.client.counters import add_totals, totals_after_exit
from engine.client.transport import OnReport, ProcessTransport
from engine.errors import ConfigError, EngineDead
from engine.protocol.messages import Command, Dead, EngineStats, Lost, Ready, Report, Snapshot

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
REAP_SECONDS = 5.0  # a process that has reported its end may take this long to exit before it is killed


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits for restarting the engine process. All times are in seconds.

    At most `max_restarts` restarts happen within `window_seconds`; after that the engine stays dead. The delay before a
    restart doubles from `first_delay` with every restart in the window, up to `max_delay`. A loaded process that sends
    no report for `kill_seconds` is killed and restarted; the value must exceed the slowest step or capture.
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
        """Return the seconds to wait before a restart, given `recent` earlier restarts in the window."""
        return min(self.max_delay, self.first_delay * 2 ** min(recent, 30))


class Supervisor:
    """A Transport that starts processes with `make` and replaces those that die or hang.

    If the first process ends before it was ready, it is not restarted: the Dead report goes to the caller. The same
    holds at any time for a rejected configuration or model, which would be rejected again.
    """

    def __init__(self, make: Callable[[], ProcessTransport], policy: RestartPolicy | None = None):
        self._make, self._policy = make, policy or RestartPolicy()
        self._on_report: OnReport | None = None
        self._lock = threading.Lock()  # guards _current, and that no process starts after stop()
        self._current: ProcessTransport | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="encore-supervisor")
        self._has_served = False
        self._is_serving = False  # only a loaded process must report regularly
        self._num_reports = 0
        self._restart_at: float | None = None
        self._restart_times: list[float] = []  # times of all restarts
        self._hang_reason = ""
        self._previous_totals: EngineStats | None = None  # counters of earlier processes
        self._latest = EngineStats()

    @property
    def pid(self) -> int | None:
        """The current process' id, or None before the first start."""
        return self._current.pid if self._current is not None else None

    def start(self, on_report: OnReport) -> None:
        self._on_report = on_report
        self._start_process()
        self._watcher.start()

    def send(self, command: Command) -> None:
        if self._current is None:
            raise EngineDead("no engine process was started")
        self._current.send(command)

    def forward(self, payload: bytes) -> None:
        """Send a pickled command, as `send`."""
        if self._current is None:
            raise EngineDead("no engine process was started")
        self._current.forward(payload)

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
        """Forward a report; replace Dead by Lost if a restart follows. Runs in the process' reader thread."""
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
        if self._on_report is not None:
            self._on_report(report)

    def _compare_weights(self, ready: Ready) -> None:
        version = "" if self._previous_totals is None else self._previous_totals.weight_version
        if version and version != ready.info.weight_version:
            logger.warning(
                "the restarted engine serves the weights %r from its model folder; the previous one served %r",
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
        """Start a due restart and kill a hung process; runs in the watcher thread until `stop`."""
        seen_reports, silent_seconds, last_tick = -1, 0.0, time.monotonic()
        while not self._stopping.wait(TICK_SECONDS):
            # Time in which this process itself was stopped or suspended does not count as silence.
            now = time.monotonic()
            elapsed, last_tick = min(now - last_tick, 2 * TICK_SECONDS), now
            silent_seconds = silent_seconds + elapsed if self._is_serving and self._num_reports == seen_reports else 0.0
            seen_reports = self._num_reports
            if self._restart_at is not None and now >= self._restart_at:
                self._restart_at = None
                self._replace()
            elif silent_seconds > self._policy.kill_seconds:
                self._hang_reason = f"the engine process hung: no report for {silent_seconds:.0f} s, so it was killed"
                if self._current is not None:
                    self._current.kill()
                silent_seconds = 0.0

    def _replace(self) -> None:
        if self._current is not None:
            self._current.stop(REAP_SECONDS)  # frees its memory before the next process needs as much
        try:
            self._start_process()
        except OSError as error:
            self._relay(Dead(f"no engine process could be started: {error}"))
