"""A bounded store of responses and their conversations, for `previous_response_id` and GET /v1/responses.

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

_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
        items BLOB NOT NULL, response BLOB
    )
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
            self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, NULL)", values)
            self._shrink(response_id)
            return True

        return await self._run(store)

    async def finish(self, response_id: str, response: dict[str, Any]) -> bool:
        """Store a response that has begun. Return whether it is stored: its input may be gone, or both too large."""
        content = _encoded(response)

        def store() -> bool:
            found = self._database.execute("SELECT bytes FROM responses WHERE id = ?", (response_id,)).fetchone()
            if found is None:
                return False
            if found[0] + len(content) > self.max_entry_bytes:
                self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                return False
            self._database.execute(
                "UPDATE responses SET response = ?, bytes = bytes + ? WHERE id = ?",
                (content, len(content), response_id),
            )
            self._shrink(response_id)
            return True

        return await self._run(store)

    async def response(self, response_id: str, owner: str) -> bytes | None:
        """Return a stored response as JSON; None if the owner has none of this id."""
        found = await self._run(lambda: self._row(response_id, owner))
        return None if found is None else found[1]

    async def items(self, response_id: str, owner: str) -> list[dict[str, Any]] | None:
        """Return the input items of a stored response, those of its predecessors included; None as in `response`."""
        found = await self._run(lambda: self._row(response_id, owner))
        return None if found is None else await asyncio.to_thread(json.loads, found[0])

    async def conversation(self, response_id: str, owner: str) -> list[dict[str, Any]] | None:
        """Return the items that a next request continues: input, then output. None as in `response`."""
        found = await self._run(lambda: self._row(response_id, owner))
        if found is None:
            return None
        items, response = found
        return await asyncio.to_thread(lambda: [*json.loads(items), *json.loads(response)["output"]])

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
        query = "SELECT items, response FROM responses WHERE id = ? AND owner = ? AND created > ?"
        found = self._database.execute(query, (response_id, owner, time.time() - self.seconds)).fetchone()
        return None if found is None or found[1] is None else found

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


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
