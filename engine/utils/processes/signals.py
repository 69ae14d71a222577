"""Stop signals: Ctrl-C and a closed terminal reach the whole process group, but the parent alone stops its children."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """Ignore and unblock the stop signals in a process that was started with these signals blocked.

    Left blocked, the signals would stay blocked in the process's own children.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def hold_stop_signals() -> None:
    """Block the stop signals in this thread and those that it starts. One that comes waits for `handle_stop_signals`.

    Without that, a stop signal during the imports would kill the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def handle_stop_signals(loop: asyncio.AbstractEventLoop, handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler(number)` in the event loop for each stop signal during the block, and for one that was held.

    Call it in the main thread. Afterwards the signals are held again if they were before. SIGHUP stays ignored if the
    process ignores it, as `nohup` demands.
    """
    numbers = [one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in numbers:
            loop.remove_signal_handler(number)
