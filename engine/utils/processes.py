"""Start child processes that ignore stop signals, and give them the parent's log format."""

from __future__ import annotations

import logging
import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_ignoring_stop_signals(process: BaseProcess) -> None:
    """Start a process with stop signals blocked: Ctrl-C reaches the whole group, and the parent decides what ends.

    Signals are blocked from the start because the child's imports take seconds. The child's main function must call
    `ignore_stop_signals`.
    """
    resource_tracker.ensure_running()  # otherwise start() launches the tracker, which unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore and unblock stop signals in a process started by `start_ignoring_stop_signals`.

    Left blocked, the signals would stay blocked in the process's own children.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def log_format() -> tuple[logging.Formatter | None, int]:
    """Return the formatter and level of this process's log, for a child that logs to the same stream."""
    plain = (handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler)
    formatter = next((handler.formatter for handler in plain), None)
    return formatter, logging.getLogger("engine").getEffectiveLevel()


def set_up_child_log(formatter: logging.Formatter | None, level: int, prefix: str = "") -> None:
    """Log to standard error in the parent's format, with `prefix` before every message."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter or logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def add_prefix(record: logging.LogRecord) -> bool:
        record.msg = f"{prefix}{record.msg}"
        return True

    if prefix:
        handler.addFilter(add_prefix)
    logging.basicConfig(handlers=[handler])
    for name in ("engine", "graph_cache"):
        logging.getLogger(name).setLevel(level)
