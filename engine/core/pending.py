"""Commands that wait for something outside the loop, such as a trainer, while the loop goes on with its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class Pending(NamedTuple):
    """The result that a command will have: `finish` of the future's value, called on the loop's thread."""

    future: Future[Any]
    finish: Callable[[Any], Any]


def in_background(function: Callable[[], Any], name: str) -> Future[Any]:
    """Call `function` in a daemon thread, which the end of the process doesn't wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
