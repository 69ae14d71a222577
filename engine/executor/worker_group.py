"""Start, message, watch and stop the worker processes (ranks 1 and up) from rank 0.

Each worker runs worker_main.py and is connected by a pipe. The loss of a worker is detected at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from engine.errors import EngineDead, EngineError
from engine.utils.processes import STOP_SIGNALS

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.5  # a worker told to stop may take this long before it is killed
FAILURE_GRACE_SECONDS = 2.0  # a connection error may precede the message with its cause by this much


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


def _readable(pipes: list[Connection]) -> list[Connection]:
    """Wait until at least one of the pipes can be read, and return those that can."""
    ready = wait(pipes)
    return [pipe for pipe in pipes if pipe in ready]


class WorkerGroup:
    """The worker processes. Call the methods from one thread; a second thread watches the pipes.

    `failure` is the reason once a worker is lost. From then on the whole group is unusable, because a rank that missed
    a call differs from the others. `rendezvous` is the path of a file that does not exist yet, in a temporary folder
    that is removed with the group.
    """

    def __init__(self, count: int):
        self.failure: str | None = None
        self._folder = tempfile.mkdtemp(prefix="encore-ranks-")
        self.rendezvous = os.path.join(self._folder, "rendezvous")
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._watcher: threading.Thread | None = None
        self._on_loss: Callable[[], None] | None = None
        self._lock = threading.Lock()  # guards `failure`: the first reason wins
        self._ending = False
        try:
            for _ in range(count):
                self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        """Start one worker.

        Uses subprocess because multiprocessing would import the caller's main module and can't start a process from a
        daemonic one.
        """
        parent_end, child_end = multiprocessing.Pipe(duplex=True)
        self._pipes.append(parent_end)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # The child inherits the block until it ignores the signals itself: rank 0 decides when workers stop.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "engine.executor.worker_main", str(child_end.fileno()), self._folder],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(child_end.fileno(),),
                    env=os.environ | {"PYTHONPATH": path},
                )
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            child_end.close()  # else the pipe would stay open after the worker exits

    @property
    def pids(self) -> list[int]:
        """The process ids, in order of rank from 1."""
        return [process.pid for process in self._processes]

    # ---- messages --------------------------------------------------------------------------------------------------

    def broadcast(self, message: Any) -> None:
        """Send a message to every worker. Raises EngineDead if one is lost."""
        self.check()
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in range(1, len(self._pipes) + 1):
            self._send(rank, payload)

    def send_each(self, messages: list[Any]) -> None:
        """Send each worker its own message, in order of rank. Raises EngineDead if one is lost."""
        self.check()
        for rank, message in enumerate(messages, 1):
            self._send(rank, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send(self, rank: int, payload: bytes) -> None:
        try:
            self._pipes[rank - 1].send_bytes(payload)
        except OSError as error:
            raise EngineDead(self.pending_failure() or self.fail(self._exit_reason(rank))) from error

    def wait_for(self, message_type: type[Message]) -> list[Message]:
        """Receive one message of this type from each worker and return them in order of rank.

        Raises the EngineError that a worker reports, or EngineDead.
        """
        received: dict[Connection, Message] = {}
        while len(received) < len(self._pipes):
            for pipe in _readable([pipe for pipe in self._pipes if pipe not in received]):
                message = self._receive(pipe)
                if isinstance(message, RankFailed):
                    raise message.error or EngineDead(self.fail(message.reason))
                if not isinstance(message, message_type):
                    raise EngineDead(
                        self.fail(f"rank {self._rank_of(pipe)} sent {message!r}, {message_type.__name__} was expected")
                    )
                received[pipe] = message
        return [received[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return RankFailed(self._exit_reason(self._rank_of(pipe)))

    def _rank_of(self, pipe: Connection) -> int:
        return self._pipes.index(pipe) + 1

    def _exit_reason(self, rank: int) -> str:
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FAILURE_GRACE_SECONDS / 2)
        return f"the process of rank {rank} ended with exit code {process.poll()}"

    # ---- failures --------------------------------------------------------------------------------------------------

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Start watching for the end of a worker. When one is lost, `on_loss` is called in a thread of its own."""
        self._on_loss = on_loss
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="encore-ranks")
        self._watcher.start()

    def _watch(self) -> None:
        message = self._receive(_readable(self._pipes)[0])
        if not self._ending:
            self.fail(message.reason if isinstance(message, RankFailed) else f"a worker sent {message!r} unexpectedly")

    def poll(self) -> None:
        """Raise a worker's EngineError, or EngineDead, if a worker has exited. For use before `watch`."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                pipe = self._pipes[rank - 1]
                message = self._receive(pipe) if pipe.poll() else None
                error = message.error if isinstance(message, RankFailed) else None
                raise error or EngineDead(
                    self.fail(message.reason if isinstance(message, RankFailed) else self._exit_reason(rank))
                )

    def check(self) -> None:
        """Raise EngineDead if a worker is lost."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    def pending_failure(self) -> str | None:
        """Return why the group failed, waiting up to FAILURE_GRACE_SECONDS for it; None if no failure is reported."""
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        while self._watcher is not None and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def fail(self, reason: str) -> str:
        """Mark the group as failed and return the reason; the first reason given is kept."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
                logger.error("%s; all ranks are stopped", reason)
                if self._on_loss is not None:
                    threading.Thread(target=self._on_loss, daemon=True, name="encore-ranks-lost").start()
        return self.failure

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Tell all workers to stop, without waiting. If one is lost, kill them all."""
        self._ending = True
        try:
            self.broadcast(None)
        except EngineDead as error:
            logger.debug("the workers are killed: %s", error)
            self._kill()

    def end(self) -> None:
        """Wait for the workers to exit, kill those that take more than STOP_SECONDS, and clean up."""
        deadline = time.monotonic() + STOP_SECONDS
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("the process of rank %d did not end within %.0f s; it is killed", rank, STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all workers and clean up. Safe at any time and more than once."""
        self._ending = True
        self._kill()
        if self._watcher is not None:
            self._watcher.join(1.0)  # it reads the pipes that are closed next
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
