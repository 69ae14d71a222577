"""Threads for templates and long texts: lanes by size, fair places, a time limit, a shutdown that waits for none."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from engine.utils.fair_queue import FairQueue, Ticket
from server.http.errors import WireError
from server.http.sender import SENDER

T = TypeVar("T")

SMALL_CHARS = 32 * 1024  # of work in the small lane: some 20 ms
LANE_THREADS = 2  # one slow text must not hold a lane alone


class Interrupted(BaseException):
    """Raised inside a thread whose work took too long. Not an Exception, so that no handler of the work catches it."""


class Lane(Enum):
    """Kinds of work that don't wait for each other."""

    SMALL = auto()
    LARGE = auto()
    PROCESS = auto()  # waits for another process
    ANSWER = auto()  # answers with many log-probabilities


def lane_of(chars: int) -> Lane:
    """Return the lane of work on a text of `chars` characters."""
    return Lane.SMALL if chars <= SMALL_CHARS else Lane.LARGE


class TextThreads:
    """Runs functions in daemon threads. The work of one lane never waits for that of another.

    Each piece of work has a separate thread, so that one can be interrupted without harm to the next. At most
    LANE_THREADS of a lane run at a time, also if their requests were cancelled. The places of a lane are shared fairly
    between the senders of requests.
    """

    def __init__(self) -> None:
        self._lanes = {lane: _Places() for lane in Lane}
        self._running: set[_WorkThread] = set()
        self._is_closed = False

    def close(self) -> None:
        """Interrupt the threads and end every call of `run` with WireError 503. Waits for no thread."""
        self._is_closed = True
        for thread in list(self._running):
            thread.interrupt()
            thread.finish(None, _closing())  # gives its place to the next call, which sees that all is over

    async def run(self, work: Callable[[], T], lane: Lane, seconds: float | None = None, rank: int = 0) -> T:
        """Return the result of `work`, which runs in a thread of a lane.

        Work of a higher `rank` makes way for other work of the same sender. Raises TimeoutError if the work takes
        longer than `seconds`, and interrupts it. That works between two instructions of Python, so for any loop, but
        not inside one call of C code. None: no limit, for code that can't be interrupted.
        """
        places = self._lanes[lane]
        ticket = await places.acquire(SENDER.get(), rank)
        if self._is_closed:
            places.release(ticket)
            raise _closing()
        thread = _WorkThread(work, asyncio.get_running_loop(), partial(places.release, ticket))
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            places.release(ticket)
            raise
        self._running.add(thread)
        try:
            async with asyncio.timeout(seconds):
                return await thread.result
        finally:
            self._running.discard(thread)
            if not thread.is_done and seconds is not None:
                thread.interrupt()


class _Places:
    """The places of a lane, for tasks of the event loop to wait for."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[Ticket]] = FairQueue(LANE_THREADS)

    async def acquire(self, sender: str, rank: int) -> Ticket:
        """Wait for a place, which `release` gives back."""
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(turn, sender, rank)
        self._start()
        try:
            return await turn
        except asyncio.CancelledError:
            if not self._queue.remove(ticket):
                self.release(ticket)
            raise

    def release(self, ticket: Ticket) -> None:
        self._queue.done(ticket)
        self._start()

    def _start(self) -> None:
        while (found := self._queue.take()) is not None:
            ticket, turn = found
            if not turn.done():  # else its cancelled task gives the place back
                turn.set_result(ticket)


class _WorkThread(threading.Thread):
    """One piece of work. A daemon: the process can exit while it runs. `release` gives its place back."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, release: Callable[[], None]):
        super().__init__(name="text", daemon=True)
        self.result: asyncio.Future[Any] = loop.create_future()
        self.is_done = False
        self._work, self._loop, self._release = work, loop, release

    def run(self) -> None:
        try:
            self._run()
        except Interrupted as late:  # raised after the work, before its end was reported
            self._report(None, late)

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._work()
        except BaseException as exc:
            error = exc
        self._report(value, error)

    def interrupt(self) -> None:
        """Raise Interrupted in the thread at its next instruction of Python. Call it once."""
        if not self.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Interrupted))

    def _report(self, value: Any, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.finish, value, error)
        except RuntimeError:  # the loop is closed: the server has ended
            return

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Set the result and give back the place in the lane. A second call does nothing."""
        if self.is_done:
            return
        self.is_done = True
        self._release()
        if self.result.done():  # cancelled
            return
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(value)


def _closing() -> WireError:
    return WireError(
        503, "the server is shutting down", type="service_unavailable_error", code="draining", retry_after=5
    )
