"""A bounded store of responses, their conversations and the events of background responses, for later requests.

It is an SQLite database: in memory for one API worker, in a file that the API workers share otherwise. Nothing is kept
across a restart of the server.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.errors import RequestError
from server.http.errors import WireError

T = TypeVar("T")
MEMORY = ":memory:"
LOCK_SECONDS = 10.0  # another API worker holds the file for milliseconds
ENTRY_SHARE = 8  # an entry may have this part of all bytes; a large one takes long to read
EXPIRY_SECONDS = 60.0  # between deletions of old entries without a request
MAX_EVENTS_READ = 256  # of a stream at once
LOST_SECONDS = 30.0  # without a sign of life, the API worker of a background response has ended

_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
        items BLOB NOT NULL, response BLOB, alive REAL NOT NULL DEFAULT 0
    )
    """,
    "CREATE TABLE IF NOT EXISTS events (id TEXT, number INTEGER, data BLOB, PRIMARY KEY (id, number)) WITHOUT ROWID",
    """
    CREATE TRIGGER IF NOT EXISTS drop_events AFTER DELETE ON responses
    BEGIN DELETE FROM events WHERE id = OLD.id; END
    """,
    "CREATE INDEX IF NOT EXISTS sizes ON responses (owner, created, bytes)",
    "CREATE INDEX IF NOT EXISTS ages ON responses (created)",
)
# The oldest entry of the owner with the most bytes: nobody pushes out the entries of those who hold less.
_EVICT = """
DELETE FROM responses WHERE id = (
    SELECT id FROM responses JOIN (SELECT owner, SUM(bytes) AS held FROM responses GROUP BY owner) USING (owner)
    WHERE id != ? ORDER BY held DESC, created LIMIT 1
)
"""


class ResponseStore:
    """Entries of id, owner, conversation items and response; at most `max_entries` and `max_bytes` together.

    An entry has at most `max_entry_bytes`, an eighth of all bytes. Its owner can read it once it has its response, for
    `seconds` after its creation; older entries are deleted. When a limit is reached, the oldest entries of the owner
    with the most bytes go first. Blocking calls run in threads.

    A background response can be read while it runs: `publish` stores it unfinished. It runs until `finish` or `cancel`,
    or until its entry is deleted. It fails if `still_running` is not called for it for LOST_SECONDS.
    """

    def __init__(self, path: str, max_entries: int, max_bytes: int, seconds: float):
        self.max_entries, self.max_bytes, self.seconds = max_entries, max_bytes, seconds
        self.max_entry_bytes = max_bytes // ENTRY_SHARE
        self._lock = threading.Lock()
        self._is_closed = False
        self._database = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        # The file need not survive the machine, only a process that is killed while it writes.
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA secure_delete = ON")
        for statement in _SCHEMA:
            self._database.execute(statement)
        self._expiry: asyncio.Task[None] | None = None

    def begin_expiry(self) -> None:
        """Delete old entries in a task from now on, so that none outlives its time by more than a minute."""

        async def expire() -> None:
            while True:
                await asyncio.sleep(min(EXPIRY_SECONDS, self.seconds))
                await self._run(self._expire)

        self._expiry = asyncio.create_task(expire())

    async def close(self) -> None:
        """Close the database, which deletes one in memory. Waits for calls that run."""
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        with self._lock:
            self._is_closed = True
            self._database.close()

    async def begin(self, response_id: str, owner: str, items: list[dict[str, Any]]) -> bool:
        """Store the input of a response that is being generated. Return whether it fits.

        Raises RequestError for items that JSON can't hold.
        """

        def store() -> bool:
            try:
                content = _encoded(items)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"input can't be stored: {error}; send store=false", param="input") from error
            if len(content) > self.max_entry_bytes:
                return False
            self._expire()
            values = (response_id, owner, time.time(), len(content), content)
            self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, NULL, 0)", values)
            self._shrink(response_id)
            return True

        return await self._run(store)

    async def publish(self, response_id: str, response: dict[str, Any]) -> bool:
        """Store a background response as it is, before or while it runs. Return whether it fits and was not ended."""
        content = _encoded(response)
        return await self._run(lambda: self._put(response_id, content, is_running=True))

    async def finish(
        self, response_id: str, response: dict[str, Any], if_too_large: dict[str, Any] | None = None
    ) -> bool:
        """Store a response that has begun. Return whether it is stored: its input may be gone, or both too large.

        A background response that is too large is replaced by `if_too_large`, without its events. A cancelled one stays
        as it is.
        """
        content = _encoded(response)
        instead = None if if_too_large is None else _encoded(if_too_large)

        def store() -> bool:
            if self._put(response_id, content, is_running=False):
                return True
            if instead is None:
                where = "id = ? AND response IS NULL"
                self._database.execute(f"DELETE FROM responses WHERE {where}", (response_id,))
            else:
                self._drop_events(response_id)
                self._put(response_id, instead, is_running=False, checks_size=False)
            return False

        return await self._run(store)

    async def cancel(self, response_id: str, owner: str) -> bytes | None:
        """End a background response as cancelled, if it runs. Return it as JSON; None as in `response`."""

        def cancel() -> bytes | None:
            found = self._row(response_id, owner)
            if found is None or not self._still_running([response_id]):
                return None if found is None else found[1]
            content = _encoded(json.loads(found[1]) | {"status": "cancelled"})
            self._put(response_id, content, is_running=False, checks_size=False)
            return content

        return await self._run(cancel)

    async def still_running(self, response_ids: list[str]) -> set[str]:
        """Return which of the background responses still run. They are alive: their API worker calls this."""

        def read() -> set[str]:
            found = self._still_running(response_ids)
            now = time.time()
            self._database.executemany("UPDATE responses SET alive = ? WHERE id = ?", [(now, one) for one in found])
            return found

        return await self._run(read)

    async def append(self, response_id: str, events: list[tuple[int, bytes]]) -> bool:
        """Store further events of a background response, with their numbers. Return whether it still runs.

        Raises WireError, without its events, if the entry becomes too large.
        """
        size = sum(len(data) for _, data in events)

        def store() -> bool | None:
            if not self._still_running([response_id]):
                return False
            (held,) = self._database.execute("SELECT bytes FROM responses WHERE id = ?", (response_id,)).fetchone()
            if held + size > self.max_entry_bytes:
                self._drop_events(response_id)
                return None
            self._database.executemany(
                "INSERT INTO events VALUES (?, ?, ?)", [(response_id, number, data) for number, data in events]
            )
            self._database.execute("UPDATE responses SET bytes = bytes + ? WHERE id = ?", (size, response_id))
            self._shrink(response_id)
            return True

        found = await self._run(store)
        if found is None:
            raise too_large()
        return found

    async def events(self, response_id: str, owner: str, after: int) -> tuple[list[tuple[int, bytes]], bool] | None:
        """Return the next events after number `after`, and whether more may follow; None as in `response`.

        Empty and False: the response has no events, or no more.
        """

        def read() -> tuple[list[tuple[int, bytes]], bool] | None:
            if self._row(response_id, owner) is None:
                return None
            query = "SELECT number, data FROM events WHERE id = ? AND number > ? ORDER BY number LIMIT ?"
            found = self._database.execute(query, (response_id, after, MAX_EVENTS_READ)).fetchall()
            return found, len(found) == MAX_EVENTS_READ or bool(self._still_running([response_id]))

        return await self._run(read)

    async def has_events(self, response_id: str) -> bool:
        """Return whether there are events of a response."""
        query = "SELECT 1 FROM events WHERE id = ? LIMIT 1"
        return await self._run(lambda: self._database.execute(query, (response_id,)).fetchone() is not None)

    async def response(self, response_id: str, owner: str) -> bytes | None:
        """Return a stored response as JSON; None if the owner has none of this id."""
        found = await self._run(lambda: self._row(response_id, owner))
        return None if found is None else found[1]

    async def items(self, response_id: str, owner: str) -> list[dict[str, Any]] | None:
        """Return the input items of a stored response and of its predecessors; None as in `response`."""
        found = await self._run(lambda: self._row(response_id, owner))
        return None if found is None else await asyncio.to_thread(json.loads, found[0])

    async def conversation(self, response_id: str, owner: str) -> list[dict[str, Any]] | None:
        """Return the items that a next request continues: input, then output. None as in `response`.

        Raises RequestError for a response that has not ended, or not well.
        """
        found = await self._run(lambda: self._row(response_id, owner))
        if found is None:
            return None
        items, response = await asyncio.to_thread(lambda: [json.loads(one) for one in found])
        status = response.get("status", "completed")
        if status not in ("completed", "incomplete"):
            raise RequestError(
                f"previous_response_id: {response_id} has the status {status!r}: continue a completed response",
                param="previous_response_id",
            )
        return [*items, *response["output"]]

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete a stored response. Return whether the owner had it."""

        def delete() -> bool:
            where = "id = ? AND owner = ? AND response IS NOT NULL AND created > ?"
            values = (response_id, owner, time.time() - self.seconds)
            return self._database.execute(f"DELETE FROM responses WHERE {where}", values).rowcount > 0

        return await self._run(delete)

    def drop(self, response_id: str) -> None:
        """Delete an entry whose response failed. Uses no thread, since it also runs when a request is cancelled."""
        with self._lock:
            if not self._is_closed:
                self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def usage(self) -> tuple[int, int]:
        """Return the number of entries and their bytes."""
        with self._lock:
            count, size = self._database.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM responses").fetchone()
        return count, size

    async def _run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, as one transaction."""

        def locked() -> T:
            with self._lock:
                if self._is_closed:
                    raise WireError(
                        503, "the server is shutting down", type="service_unavailable_error", code="draining",
                        retry_after=5,
                    )  # fmt: skip
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    found = work()
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
                return found

        return await asyncio.to_thread(locked)

    def _row(self, response_id: str, owner: str) -> tuple[bytes, bytes] | None:
        query = "SELECT items, response, alive FROM responses WHERE id = ? AND owner = ? AND created > ?"
        found = self._database.execute(query, (response_id, owner, time.time() - self.seconds)).fetchone()
        if found is None or found[1] is None:
            return None
        items, response, alive = found
        if 0 < alive < time.time() - LOST_SECONDS:
            error = {"code": "server_error", "message": "the API worker that generated the response has ended"}
            response = _encoded(json.loads(response) | {"status": "failed", "error": error})
            self._put(response_id, response, is_running=False, checks_size=False)
        return items, response

    def _put(self, response_id: str, content: bytes, is_running: bool, checks_size: bool = True) -> bool:
        """Store the response of an entry that has none yet or that runs. Return False if there is none, or no room."""
        query = "SELECT bytes - COALESCE(LENGTH(response), 0) FROM responses WHERE id = ?"
        is_open = " AND (response IS NULL OR alive > 0)"
        found = self._database.execute(query + is_open, (response_id,)).fetchone()
        if found is None or (checks_size and found[0] + len(content) > self.max_entry_bytes):
            return False
        self._database.execute(
            "UPDATE responses SET response = ?, bytes = ?, alive = ? WHERE id = ?",
            (content, found[0] + len(content), time.time() if is_running else 0.0, response_id),
        )
        self._shrink(response_id)
        return True

    def _still_running(self, response_ids: list[str]) -> set[str]:
        query = "SELECT 1 FROM responses WHERE id = ? AND alive > 0"
        return {one for one in response_ids if self._database.execute(query, (one,)).fetchone() is not None}

    def _drop_events(self, response_id: str) -> None:
        query = "SELECT COALESCE(SUM(LENGTH(data)), 0) FROM events WHERE id = ?"
        (size,) = self._database.execute(query, (response_id,)).fetchone()
        self._database.execute("DELETE FROM events WHERE id = ?", (response_id,))
        self._database.execute("UPDATE responses SET bytes = bytes - ? WHERE id = ?", (size, response_id))

    def _expire(self) -> None:
        self._database.execute("DELETE FROM responses WHERE created <= ?", (time.time() - self.seconds,))

    def _shrink(self, kept: str) -> None:
        """Delete entries other than `kept` until the limits hold."""
        while True:
            totals = "SELECT COUNT(*), SUM(bytes) FROM responses"
            count, size = self._database.execute(totals).fetchone()
            if count <= self.max_entries and size <= self.max_bytes:
                return
            self._database.execute(_EVICT, (kept,))


def too_large() -> WireError:
    """Return the error of a background response that doesn't fit the store."""
    return WireError(
        507, "the response is too large to be stored (--response-store-bytes): send it without background",
        type="server_error", code="response_too_large",
    )  # fmt: skip


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
