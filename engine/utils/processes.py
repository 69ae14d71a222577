"""Start child processes that ignore stop signals, and give them the parent's log format."""

from __future__ import annotations

import logging
import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_ignoring_stop_signals(process: BaseProcess) -> None:
    """Start a process that hears no stop signal: a terminal's Ctrl-C reaches all, and the parent decides who ends.

    From its first moment: what it imports takes seconds. Its main function calls `ignore_stop_signals`.
    """
    resource_tracker.ensure_running()  # else the start would see to it, and that ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore stop signals, and unblock them, in a process begun by `start_ignoring_stop_signals`.

    A blocked signal would be inherited by the process's own children.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def log_format() -> tuple[logging.Formatter | None, int]:
    """Return the formatter and level of this process's log, for a child that writes to the same stream."""
    plain = (handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler)
    formatter = next((handler.formatter for handler in plain), None)
    return formatter, logging.getLogger("engine").getEffectiveLevel()


def set_up_child_log(formatter: logging.Formatter | None, level: int, prefix: str = "") -> None:
    """Log to standard error in the parent's format; `prefix` goes before every message."""
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
