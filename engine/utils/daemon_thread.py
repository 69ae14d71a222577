"""Run a function in a thread that neither the event loop nor the process waits for when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Call `function` in a daemon thread of this name, and return the future of its value or exception."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that nobody cancels it

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


async def in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called in a daemon thread.

    `asyncio.to_thread` differs when the caller is cancelled: the end of the event loop waits for its thread. A server
    that is stopped during a download would go on until the download ends.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[T] = loop.create_future()
    done = in_background(lambda: function(*args), f"encore-{function.__name__}")

    def finish() -> None:
        if waiting.done():
            return
        if (error := done.exception()) is None:
            waiting.set_result(done.result())
        else:
            waiting.set_exception(error)

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(finish)

    done.add_done_callback(wake)
    return await waiting
