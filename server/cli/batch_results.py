"""The results file of a batch, to which every finished line is appended at once, and the index of what is done.

The results file alone records what is done, so that no line is lost or doubled when the process is killed. A line that
was being written then is cut off at the next start, and its request runs again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError

SYNC_SECONDS = 1.0
CUSTOM_ID = "custom_id"


class InputLine(NamedTuple):
    """A line of the input: its number from 1, its custom_id, and its JSON object."""

    number: int
    custom_id: str
    values: dict[str, Any]


def read_input(path: str) -> Iterator[InputLine]:
    """Yield the lines of an input file that are not blank. Raises ConfigError for one without a custom_id."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path} is not a file: a batch is read twice, so a pipe or folder won't do")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if text:
                    yield _parse(path, number, text)
    except OSError as error:
        raise ConfigError(f"the batch file {path} can't be read: {error.strerror or error}") from error


def _parse(path: str, number: int, text: bytes) -> InputLine:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} line {number}: not valid JSON ({error}); every line must be a JSON object") from None
    custom_id = values.get(CUSTOM_ID) if isinstance(values, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        found = "no custom_id" if custom_id is None else f"custom_id={custom_id!r}"
        raise ConfigError(f"{path} line {number}: found {found}; each line needs one, a string that no other line has")
    return InputLine(number, custom_id, values)


class Index:
    """The custom_ids of a batch, and which are done. On disk, so that memory doesn't grow with the files."""

    def __init__(self) -> None:
        # A database without a name is a temporary file, which SQLite deletes. Used under a lock.
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE lines (id TEXT PRIMARY KEY, number INT, done INT) WITHOUT ROWID")

    def add(self, line: InputLine) -> int | None:
        """Add a line of the input. Return the number of the line that has this custom_id already, or None."""
        key = _key(line.custom_id)
        try:
            self._database.execute("INSERT INTO lines VALUES (?, ?, 0)", (key, line.number))
        except sqlite3.IntegrityError:
            return int(self._database.execute("SELECT number FROM lines WHERE id = ?", (key,)).fetchone()[0])
        return None

    def mark_done(self, custom_id: str) -> bool:
        """Mark a line as done; return whether the input has it."""
        return self._database.execute("UPDATE lines SET done = 1 WHERE id = ?", (_key(custom_id),)).rowcount > 0

    def is_done(self, custom_id: str) -> bool:
        """Return whether the results have this line."""
        return bool(self._database.execute("SELECT done FROM lines WHERE id = ?", (_key(custom_id),)).fetchone()[0])

    def count_done(self) -> int:
        """Return the number of lines that are done."""
        return int(self._database.execute("SELECT count(*) FROM lines WHERE done = 1").fetchone()[0])

    def close(self) -> None:
        """Delete the database."""
        self._database.close()


def _key(custom_id: str) -> bytes:
    return custom_id.encode("utf-8", "surrogatepass")  # JSON may have lone surrogates, SQLite's text may not


class Results:
    """The results file, opened for one process. Lines may be written by several threads.

    Raises ConfigError if the file can't be written, or if another process writes it.
    """

    def __init__(self, path: str):
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the results file {path} can't be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(f"another process writes {path}: wait for its end, or give another file") from None
        self._lock = threading.Lock()
        self._closed = False
        self._synced = time.monotonic()

    def read_done(self, index: Index) -> int:
        """Mark the lines of the file in `index`, and repair its end. Return the number of lines with an error.

        Raises ConfigError, and leaves the file as it is, if it has anything but results of this batch.
        """
        failed, end, torn = 0, 0, b""
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    torn = line
                    break
                end += len(line)
                failed += self._mark(index, number, line)
        if torn:
            self._repair(index, torn, end)
        return failed

    def _mark(self, index: Index, number: int, line: bytes) -> bool:
        try:
            result = json.loads(line)
            known = index.mark_done(result[CUSTOM_ID])
        except (ValueError, TypeError, KeyError, AttributeError):
            known = False
        if not known:
            raise ConfigError(
                f"{self._path} line {number} is not a result of this batch: give a file that does not exist "
                "yet, or the one of an interrupted run of the same batch"
            )
        return result.get("error") is not None

    def _repair(self, index: Index, torn: bytes, end: int) -> None:
        """Cut off an unfinished last line, so that its request runs again."""
        if not torn.startswith(START[: len(torn)]) and torn.strip(b"\0"):
            raise ConfigError(f"{self._path} ends in text that is no result of a batch: give another file")
        os.ftruncate(self._fd, end)
        os.fsync(self._fd)

    def write(self, result: dict[str, Any]) -> None:
        """Append a line. Raises OSError, and removes what was written of it, if the disk is full."""
        try:
            line = json.dumps(result, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
        except UnicodeEncodeError:  # a lone surrogate
            line = json.dumps(result, separators=(", ", ": ")).encode() + b"\n"
        with self._lock:
            if self._closed:  # by an interrupt: the number of the file may be another file's
                raise ValueError(f"{self._path} is closed")
            size = os.fstat(self._fd).st_size
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                os.ftruncate(self._fd, size)
                raise
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._fd)
                self._synced = time.monotonic()

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        with self._lock:
            self._closed = True
            os.fsync(self._fd)
            os.close(self._fd)


START = b'{"id": "batch_req_'
"""The beginning of every line."""


def is_same_file(left: str, right: str) -> bool:
    """Return whether two paths lead to one file."""
    return Path(left).exists() and Path(right).exists() and os.path.samefile(left, right)
