"""Waits for what another thread or process does.

A machine that runs several suites at once takes tens of times as long as an idle one. So a test waits for the event
itself, with a limit that only a hang reaches, and proves an order or a cause instead of a duration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE = 300.0  # seconds after which the awaited event will not come


def wait(condition: Callable[[], object], what: str, seconds: float = PATIENCE, pause: float = 0.01) -> None:
    """Wait until `condition` holds. Raise AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        time.sleep(pause)


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE, pause: float = 0.01) -> None:
    """Do what `wait` does in a coroutine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        await asyncio.sleep(pause)


def is_alive(pid: int) -> bool:
    """Return whether a process runs: it has neither been reaped nor become a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until the processes have ended."""
    pids = list(pids)
    wait(lambda: not any(map(is_alive, pids)), f"the end of the processes {pids}")
