"""Log to standard error without ever waiting for its reader: a pipe that nobody reads must not stop a server."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import traceback
from collections import deque
from types import TracebackType

MAX_BYTES = 1 << 20  # of lines that wait to be written
FLUSH_SECONDS = 1.0  # limit for writing the lines that wait when the process ends
STDERR = 2
logger = logging.getLogger(__name__)


class StderrHandler(logging.Handler):
    """Write records to standard error from a thread.

    If more than `max_bytes` wait to be written, or if writing fails, lines are dropped and counted in `num_dropped`. A
    line in their place says how many are missing. Standard error stays in blocking mode, which it shares with other
    processes.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        super().__init__()
        self.num_dropped = 0
        self._num_reported = 0  # of the dropped lines
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0  # with the lines that are being written
        self._changed = threading.Condition()
        threading.Thread(target=self._write_lines, daemon=True, name="encore-log").start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. Never blocks."""
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
        else:
            self._put(line)

    def handleError(self, record: logging.LogRecord) -> None:
        """Log that a record can't be formatted, with the traceback."""
        self._put(self._own_line("a record of %s can't be formatted: %s", record.name, traceback.format_exc()))

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_SECONDS)

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _own_line(self, message: str, *args: object) -> bytes:
        return self._line(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, args, None))

    def _put(self, line: bytes) -> None:
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + len(line) > self._max_bytes:
                self.num_dropped += 1
                return
            if missing := self.num_dropped - self._num_reported:
                self._num_reported = self.num_dropped
                line = self._own_line("%d log lines are missing: standard error was not read", missing) + line
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            is_written = _write(line)
            with self._changed:
                self._waiting_bytes -= len(line)
                self.num_dropped += not is_written
                self._changed.notify_all()


def _write(data: bytes) -> bool:
    """Write to standard error, waiting for its reader. Return False if that fails, as after the reader's end."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(STDERR, rest) :]
        except BlockingIOError:  # another process has made it non-blocking
            select.select([], [STDERR], [])
        except OSError:
            return False
    return True


def log_uncaught() -> None:
    """Log warnings and uncaught exceptions, which Python would print to standard error itself, and wait there."""
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    threading.excepthook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)


def _log_exception(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, SystemExit):
        return
    logger.critical("uncaught exception", exc_info=(kind, value or kind(), trace))
