"""Start, message, watch and stop the worker processes (ranks 1 and up) from rank 0.

Each worker runs worker_main.py and is connected by a pipe. The loss of a worker is detected at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import queue
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import EngineDead, EngineError
from engine.executor.messages import PackedMessage
from engine.executor.reports import (
    HEARTBEAT_SECONDS,
    DeviceReady,
    Heartbeat,
    RankFailed,
    Reply,
    WeightsLoaded,
    WorkerReady,
)
from engine.utils.processes.child import ChildProcess, anonymous_file
from engine.utils.processes.group import ProcessGroup

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
STOP_SECONDS = 2.5  # a worker told to stop may take this long before it is killed
SILENCE_SECONDS = 60.0  # a worker without a heartbeat for this long hangs: it is stopped, or its interpreter is blocked


Message = TypeVar("Message", DeviceReady, WeightsLoaded, WorkerReady)


class WorkerGroup(ProcessGroup):
    """The worker processes. Call the methods from one thread; a second thread watches the pipes.

    `failure` is the reason once a worker is lost. From then on the whole group is unusable, because a rank that missed
    a call differs from the others. `rendezvous` is the path of an empty file that all ranks can open.
    """

    def __init__(self, count: int):
        self._file, self.rendezvous = _rendezvous_file()
        self._replies: queue.SimpleQueue[tuple[ChildProcess, Reply]] = queue.SimpleQueue()
        super().__init__(functools.partial(self._start, rank) for rank in range(1, count + 1))

    def _start(self, rank: int) -> ChildProcess:
        # Named, not imported: worker_main imports this module.
        return ChildProcess(f"the process of rank {rank}", "engine.executor.worker_main:main", self._file)

    # ---- messages --------------------------------------------------------------------------------------------------

    def broadcast(self, message: Any) -> None:
        """Send a message to every worker. Raises EngineDead if one is lost."""
        self.check()
        with PackedMessage(message) as packed:
            for child in self.children:
                self._send(child, packed)

    def send_each(self, messages: list[Any]) -> None:
        """Send each worker its own message, in order of rank. Raises EngineDead if one is lost."""
        self.check()
        for child, message in zip(self.children, messages, strict=True):
            with PackedMessage(message) as packed:
                self._send(child, packed)

    def _send(self, child: ChildProcess, packed: PackedMessage) -> None:
        try:
            packed.send(child.pipe)
        except OSError as error:
            raise EngineDead(self.pending_failure() or self.fail(child.exit_reason())) from error

    def replies(self, number: int) -> dict[int, EngineError]:
        """Wait until every worker has answered call `number`, and return the errors by rank.

        Raises EngineDead if a worker is lost meanwhile.
        """
        ranks = {child: rank for rank, child in enumerate(self.children, 1)}
        errors: dict[int, EngineError] = {}
        while ranks:
            self.check()
            with contextlib.suppress(queue.Empty):
                child, reply = self._replies.get(timeout=POLL_SECONDS)
                if reply.number != number:
                    raise EngineDead(self.fail(f"{child.name} answered call {reply.number}, {number} was expected"))
                rank = ranks.pop(child)
                if reply.error is not None:
                    errors[rank] = reply.error
        return errors

    def wait_for(self, message_type: type[Message]) -> list[Message]:
        """Receive one message of this type from each worker and return them in order of rank.

        Raises the EngineError that a worker reports, or EngineDead.
        """
        received: dict[ChildProcess, Message] = {}
        while len(received) < len(self.children):
            for child in self.readable(child for child in self.children if child not in received):
                message = _receive(child)
                if isinstance(message, RankFailed):
                    raise message.error or EngineDead(self.fail(message.reason))
                if not isinstance(message, message_type):
                    raise EngineDead(self.fail(f"{child.name} sent {message!r}, {message_type.__name__} was expected"))
                received[child] = message
        return [received[child] for child in self.children]

    # ---- failures --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the workers' messages, and fail the group if one ends, fails or hangs."""
        silence = dict.fromkeys(
            self.children, 0.0
        )  # seconds; not a time, because this process may have been stopped too
        while self.failure is None and not self._is_ending:
            began = time.monotonic()
            ready = wait([child.pipe for child in self.children], HEARTBEAT_SECONDS)
            elapsed = min(time.monotonic() - began, HEARTBEAT_SECONDS)
            for child in self.children:
                if child.pipe in ready:
                    silence[child] = 0.0
                    self._handle(child, _receive(child))
                else:
                    silence[child] += elapsed
                    if silence[child] > SILENCE_SECONDS and not self._is_ending:
                        self.fail(f"{child.name} has not answered for {SILENCE_SECONDS:.0f} s and is killed")
                        child.kill()  # gloo and a full pipe block until its process ends

    def _handle(self, child: ChildProcess, message: Any) -> None:
        """Handle a message of a worker that serves calls."""
        if isinstance(message, Reply):
            self._replies.put((child, message))
        elif isinstance(message, RankFailed) and not self._is_ending:
            self.fail(message.reason)
        elif not isinstance(message, Heartbeat) and not self._is_ending:
            self.fail(f"{child.name} sent {message!r} unexpectedly")

    def poll(self) -> None:
        """Raise a worker's EngineError, or EngineDead, if a worker has exited. For use before `watch`."""
        for child in self.children:
            if child.exit_code is not None:
                message = _receive(child) if child.pipe.poll() else None
                if isinstance(message, RankFailed):
                    raise message.error or EngineDead(self.fail(message.reason))
                raise EngineDead(self.fail(child.exit_reason()))

    def check(self) -> None:
        """Raise EngineDead if a worker is lost."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Tell all workers to stop, without waiting. If one is lost, kill them all."""
        self.begin_stop()
        try:
            self.broadcast(None)
        except EngineDead as error:
            logger.debug("the workers are killed: %s", error)
            self.kill_children()

    def end(self) -> None:
        """Wait for the workers to exit, kill those that take more than STOP_SECONDS, and clean up."""
        self.stop(STOP_SECONDS)

    def kill(self) -> None:
        super().kill()
        if not self.rendezvous.startswith("/proc/"):
            Path(self.rendezvous).unlink(missing_ok=True)


def _receive(child: ChildProcess) -> Any:
    """Return the next message of a worker, or a RankFailed if it has ended."""
    try:
        return child.pipe.recv()
    except (EOFError, OSError):
        return RankFailed(child.exit_reason())


def _rendezvous_file() -> tuple[io.FileIO, str]:
    """Return an empty file and its path for every rank, which inherits the descriptor under the same number."""
    if os.path.isdir("/proc/self/fd"):
        with anonymous_file("encore-rendezvous") as file:  # vanishes with the last rank, also if all are killed
            # Not closed before this process ends: a process group's store opens the path once more when it is freed,
            # which a reference may delay, and the number could be another file's by then.
            fd = os.dup(file.fileno())
        return io.FileIO(fd, "r+b", closefd=False), f"/proc/self/fd/{fd}"
    fd, path = tempfile.mkstemp(prefix="encore-ranks-")
    return io.FileIO(fd, "r+b"), path
