"""The engine loop as a service: receive commands, run steps, capture graphs between them, and send reports."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.core.loop import EngineLoop
from engine.core.operations import Operations
from engine.core.pending import Pending
from engine.errors import EngineDead
from engine.protocol.messages import Abort, Ask, Command, Dead, Events, Reply, Report, Snapshot, Stop, Submit
from engine.protocol.request import TokenEvent

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
IDLE_SECONDS = 0.05
QUIET_SECONDS = 0.2  # without work before a capture begins, which the next request would wait for
MANIFEST_SECONDS = 30.0
IDLE_CHECK_SECONDS = 5.0


def serve(loop: EngineLoop, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
    """Process commands and run steps until a Stop command. `receive(timeout)` returns the next command or None.

    The last report is always a Dead, also after an error, which it then names. Closes the loop.
    """
    _Service(loop, receive, send).run()


class _Service:
    """See `serve`."""

    def __init__(self, loop: EngineLoop, receive: Callable[[float], Command | None], send: Callable[[Report], None]):
        self._loop, self._receive, self._send = loop, receive, send
        self._operations = Operations(loop)
        self._inbox: deque[Command] = deque()  # received during a capture
        self._pending: list[tuple[int, Pending]] = []  # with the number of the Ask
        self._next_report = self._next_idle_check = 0.0
        self._next_save = time.monotonic() + MANIFEST_SECONDS

    def run(self) -> None:
        reason, is_lost = "", False
        gc.collect()
        try:
            self._run_until_stopped()
        except Exception as error:
            logger.exception("the engine loop failed")
            reason, is_lost = f"{type(error).__name__}: {error}", isinstance(error, EngineDead)
        finally:
            try:
                self._end_requests(is_lost)
                if not reason:
                    self._loop.save_prefixes()
            except Exception as error:  # scheduler state is broken; the Dead below still ends every request's stream
                logger.exception("the engine loop could not end its requests")
                reason = reason or f"{type(error).__name__}: {error}"
            gc.unfreeze()
            self._send(Dead(reason))
            self._loop.close()

    def _run_until_stopped(self) -> None:
        loop, graphs, captures = self._loop, self._loop.executor.graphs, None
        last_busy = time.monotonic()
        while True:
            if captures != (captures := graphs.stats.captures.total()):
                # Keep the garbage collector off the long-lived objects of model and graphs: walking them would
                # stall a step for 100 ms. Freeze again after each capture, because captures unfreeze.
                gc.freeze()
            loop.executor.check()
            busy = loop.can_step
            command = self._next_command(loop.seconds_to_wait() if busy else IDLE_SECONDS)
            with graphs.pool.turn():
                while command is not None:
                    if isinstance(command, Stop):
                        return
                    self._handle(command)
                    command = self._next_command(0.0)
                if self._pending:
                    self._finish_pending()
                if busy and loop.seconds_to_wait() > 0:
                    continue  # more requests may come for the next step
                if loop.can_step:
                    self._send_events(loop.step())
                    self._next_report = min(self._next_report, time.monotonic() + REPORT_SECONDS)
                if busy or loop.can_step:
                    last_busy = time.monotonic()
                is_quiet = time.monotonic() - last_busy >= QUIET_SECONDS
                captured = (loop.can_step or is_quiet) and loop.capture_between_steps(self._request_waits)
            self._after_turn(became_idle=busy and not loop.can_step, captured=captured)

    def _after_turn(self, *, became_idle: bool, captured: bool) -> None:
        """Check for leaks, report, and save the manifest, each if it is due."""
        loop, now = self._loop, time.monotonic()
        if not loop.can_step:
            loop.poll_tiers()
        if became_idle and not loop.has_work and now >= self._next_idle_check:
            self._next_idle_check = now + IDLE_CHECK_SECONDS
            loop.count_leaks()
            now = time.monotonic()
        if now >= self._next_report or captured or became_idle:
            self._send(Snapshot(loop.stats()))
            self._next_report = now + REPORT_SECONDS
        if now >= self._next_save and not loop.has_work:
            self._next_save = now + MANIFEST_SECONDS
            loop.save_manifest()

    def _end_requests(self, is_lost: bool) -> None:
        """Abort what is live and send the last events; with a lost rank they are invalid, and the Dead ends all."""
        loop = self._loop
        if is_lost:
            loop.take_events()
        else:
            loop.abort([request.request_id for request in loop.live_requests()])
        loop.save_manifest()
        self._send_events(loop.finisher.events)

    # ---- commands and reports --------------------------------------------------------------------------------------

    def _next_command(self, timeout: float) -> Command | None:
        return self._inbox.popleft() if self._inbox else self._receive(timeout)

    def _request_waits(self) -> bool:
        """Return whether a request or the end waits; keeps what arrives for `_next_command`."""
        if (command := self._receive(0.0)) is not None:
            self._inbox.append(command)
        return any(isinstance(command, (Submit, Stop)) for command in self._inbox)

    def _handle(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._loop.submit(command.requests)
        elif isinstance(command, Abort):
            self._loop.abort(command.request_ids)
        elif isinstance(command, Ask):
            self._loop.storage_may_have_moved()
            self._loop.steps.drain()  # the operation may change weights or storage that a step in flight uses
            self._reply(command.number, lambda: self._operations.call(command.method, command.args))

    def _reply(self, number: int, operation: Callable[[], Any]) -> None:
        """Answer an Ask with the result or the error of its operation, later if that is pending."""
        try:
            result = operation()
        except Exception as error:
            self._send(Reply(number, error=error))
            return
        if isinstance(result, Pending):
            self._pending.append((number, result))
        else:
            self._send(Reply(number, result))

    def _finish_pending(self) -> None:
        """Finish the operations whose futures are done, and answer their Asks."""
        done = [one for one in self._pending if one[1].future.done()]
        for one in done:
            number, (future, finish) = one
            self._pending.remove(one)
            self._loop.storage_may_have_moved()
            self._loop.steps.drain()
            self._reply(number, lambda future=future, finish=finish: finish(future.result()))  # type: ignore[misc]

    def _send_events(self, events: list[TokenEvent]) -> None:
        """Send the events of a step. A snapshot precedes the end of a request: its answer is in the counters then.

        A later one could be late by seconds, because a capture may follow the step.
        """
        if any(event.finish_reason is not None for event in events):
            self._send(Snapshot(self._loop.stats()))
        if events:
            self._send(Events(events))
