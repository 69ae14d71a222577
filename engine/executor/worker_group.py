"""Start, message, watch and stop the worker processes (ranks 1 and up) from rank 0.

Each worker runs worker_main.py and is connected by a pipe. The loss of a worker is detected at once.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import EngineDead, EngineError
from engine.utils.processes.child import ChildProcess, anonymous_file
from engine.utils.processes.group import ProcessGroup

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.5  # a worker told to stop may take this long before it is killed


@dataclass(frozen=True)
class DeviceReady:
    """The worker has its device and is about to join the rendezvous."""


@dataclass(frozen=True)
class WeightsLoaded:
    """The worker has loaded its weights and has memory for `num_pages` KV pages."""

    num_pages: int


@dataclass(frozen=True)
class LoopReady:
    """The worker has built its loop and waits for calls."""


@dataclass(frozen=True)
class RankFailed:
    """The worker failed and exits. `error` is set if the user can fix the cause."""

    reason: str
    error: EngineError | None = None


Message = TypeVar("Message", DeviceReady, WeightsLoaded, LoopReady)


class WorkerGroup(ProcessGroup):
    """The worker processes. Call the methods from one thread; a second thread watches the pipes.

    `failure` is the reason once a worker is lost. From then on the whole group is unusable, because a rank that missed
    a call differs from the others. `rendezvous` is the path of an empty file that all ranks can open.
    """

    def __init__(self, count: int):
        self._file, self.rendezvous = _rendezvous_file()
        super().__init__(functools.partial(self._start, rank) for rank in range(1, count + 1))

    def _start(self, rank: int) -> ChildProcess:
        # Named, not imported: worker_main imports this module.
        return ChildProcess(f"the process of rank {rank}", "engine.executor.worker_main:main", self._file)

    # ---- messages --------------------------------------------------------------------------------------------------

    def broadcast(self, message: Any) -> None:
        """Send a message to every worker. Raises EngineDead if one is lost."""
        self.check()
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for child in self.children:
            self._send(child, payload)

    def send_each(self, messages: list[Any]) -> None:
        """Send each worker its own message, in order of rank. Raises EngineDead if one is lost."""
        self.check()
        for child, message in zip(self.children, messages, strict=True):
            self._send(child, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send(self, child: ChildProcess, payload: bytes) -> None:
        try:
            child.pipe.send_bytes(payload)
        except OSError as error:
            raise EngineDead(self.pending_failure() or self.fail(child.exit_reason())) from error

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

    def describe_failure(self, child: ChildProcess) -> str:
        message = _receive(child)
        return message.reason if isinstance(message, RankFailed) else f"{child.name} sent {message!r} unexpectedly"

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
        self._file.close()
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
        file = anonymous_file("encore-rendezvous")  # vanishes with the last rank, also if all are killed
        return file, f"/proc/self/fd/{file.fileno()}"
    fd, path = tempfile.mkstemp(prefix="encore-ranks-")
    return io.FileIO(fd, "r+b"), path
