"""Watch a server under attack: resident memory of all its processes, /health, and a good request now and then."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

GOOD = json.dumps({"prompt": "red fox", "max_tokens": 2, "temperature": 0}).encode()
MEMORY_SECONDS, HEALTH_SECONDS, GOOD_SECONDS = 0.05, 0.02, 0.1  # between two samples


def processes_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found, unseen = [], [pid]
    while unseen:
        one = unseen.pop()
        found.append(one)
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for task in Path(f"/proc/{one}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    unseen += map(int, (task / "children").read_text().split())
    return found


def resident(pid: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    total = 0
    for one in processes_of(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def ask(url: str, method: str, path: str, body: bytes | None = None, timeout: float = 30) -> int | None:
    """Return the status of a request on a connection of its own; None without an answer."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def quantile(values: list[float], part: float) -> float:
    """Return a quantile; infinity without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else float("inf")


class Watch:
    """Samples of a server between `with` and its end: `health` and `good` in seconds, `peak` in bytes."""

    def __init__(self, url: str, pid: int):
        self.url, self.pid = url, pid
        self.health: list[float] = []
        self.good: list[tuple[float, float]] = []  # (time of the answer, seconds it took), of those with status 200
        self.failed: list[tuple[float, int | None]] = []  # (time, status) of good requests that failed
        self.health_failures = 0
        self.peak = 0
        self._done = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._memory, self._health, self._good)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _memory(self) -> None:
        while not self._done.wait(MEMORY_SECONDS):
            self.peak = max(self.peak, resident(self.pid))

    def _health(self) -> None:
        while not self._done.wait(HEALTH_SECONDS):
            began = time.monotonic()
            status = ask(self.url, "GET", "/health")
            self.health.append(time.monotonic() - began)
            self.health_failures += status != 200

    def _good(self) -> None:
        while not self._done.wait(GOOD_SECONDS):
            began = time.monotonic()
            status = ask(self.url, "POST", "/v1/completions", GOOD)
            now = time.monotonic()
            if status == 200:
                self.good.append((now, now - began))
            else:
                self.failed.append((now, status))
