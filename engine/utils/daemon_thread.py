"""Run a function in a thread that neither the event loop nor the process waits for when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called in a daemon thread.

    `asyncio.to_thread` differs when the caller is cancelled: the end of the event loop waits for its thread. A server
    that is stopped during a download would go on until the download ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(value: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except Exception as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, daemon=True, name=f"encore-{function.__name__}").start()
    return await future
