"""The processes of ranks 1 and up, as rank 0 has them: started, told what to do, watched, ended.

Owns the processes and their pipes, and that the loss of one is noticed at once. Knows neither what they are told nor
what a rank is made of; what they do with it is engine/executor/worker_main.py.
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

STOP_SECONDS = 2.5  # a rank that was told to end may take this long before it is killed
FAILURE_GRACE_SECONDS = 2.0  # an error of a broken connection may come this much sooner than the news why it broke


@dataclass(frozen=True)
class DeviceReady:
    """A rank has its device, and is about to meet the others."""


@dataclass(frozen=True)
class WeightsLoaded:
    """A rank has its weights, and room for this many KV pages."""

    num_pages: int


@dataclass(frozen=True)
class LoopReady:
    """A rank has its loop and waits for calls."""


@dataclass(frozen=True)
class RankFailed:
    """A rank ends. `error` is what a user can put right."""

    reason: str
    error: EngineError | None = None


Message = TypeVar("Message", DeviceReady, WeightsLoaded, LoopReady)


class WorkerGroup:
    """The other ranks' processes. One thread calls the methods; another one watches.

    `failure` says why they are lost, once one is: from then on none of them is of use, since a rank that has missed a
    call is not where the others are. `rendezvous` is a file, not there yet, in a folder that goes with them.
    """

    def __init__(self, count: int):
        self.failure: str | None = None
        self._folder = tempfile.mkdtemp(prefix="encore-ranks-")
        self.rendezvous = os.path.join(self._folder, "rendezvous")
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._watcher: threading.Thread | None = None
        self._on_loss: Callable[[], None] | None = None
        self._lock = threading.Lock()  # over who is the first to say that they are lost
        self._ending = False
        try:
            for _ in range(count):
                self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        """Start a process that imports nothing of the caller's main module, and may be started by a daemonic one, both
        of which multiprocessing's can't.
        """
        parent_end, child_end = multiprocessing.Pipe(duplex=True)
        self._pipes.append(parent_end)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # Until it ignores them: rank 0 decides who ends.
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
            child_end.close()  # else the end of the process would not end the pipe

    @property
    def pids(self) -> list[int]:
        """The processes' ids, from rank 1 on."""
        return [process.pid for process in self._processes]

    # ---- talking ---------------------------------------------------------------------------------------------------

    def broadcast(self, message: Any) -> None:
        """Send a message to every rank. Raises EngineDead if one is gone."""
        self.check()
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in range(1, len(self._pipes) + 1):
            self._send(rank, payload)

    def send_each(self, messages: list[Any]) -> None:
        """Send each rank a message of its own, in order of rank. Raises EngineDead if one is gone."""
        self.check()
        for rank, message in enumerate(messages, 1):
            self._send(rank, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send(self, rank: int, payload: bytes) -> None:
        try:
            self._pipes[rank - 1].send_bytes(payload)
        except OSError as error:
            raise EngineDead(self.pending_failure() or self.fail(self._exit_reason(rank))) from error

    def wait_for(self, message_type: type[Message]) -> list[Message]:
        """One message of this kind from each rank, in order. Raises what a rank failed of, or EngineDead."""
        received: dict[Connection, Message] = {}
        while len(received) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in received]):
                message = self._receive(pipe)
                if isinstance(message, RankFailed):
                    raise message.error or EngineDead(self.fail(message.reason))
                if not isinstance(message, message_type):
                    raise EngineDead(
                        self.fail(f"rank {self._rank_of(pipe)} sent {message!r}, {message_type.__name__} was due")
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

    # ---- losing one ------------------------------------------------------------------------------------------------

    def watch(self, on_loss: Callable[[], None]) -> None:
        """From now on notice the end of a rank as it comes. Once they are lost a thread of its own calls `on_loss`."""
        self._on_loss = on_loss
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="encore-ranks")
        self._watcher.start()

    def _watch(self) -> None:
        message = self._receive(wait(self._pipes)[0])
        if not self._ending:
            self.fail(message.reason if isinstance(message, RankFailed) else f"a rank sent {message!r} out of turn")

    def poll(self) -> None:
        """Raise what a rank failed of, or EngineDead, if the process of one has ended; for when nobody watches yet."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                pipe = self._pipes[rank - 1]
                message = self._receive(pipe) if pipe.poll() else None
                error = message.error if isinstance(message, RankFailed) else None
                raise error or EngineDead(
                    self.fail(message.reason if isinstance(message, RankFailed) else self._exit_reason(rank))
                )

    def check(self) -> None:
        """Raise EngineDead if a rank is lost."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    def pending_failure(self) -> str | None:
        """Why the ranks are lost, waiting a moment for it; None if no rank said so."""
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        while self._watcher is not None and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def fail(self, reason: str) -> str:
        """Hold that the ranks are lost, for the first of the reasons given, and return it."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
                logger.error("%s; the ranks can't go on", reason)
                if self._on_loss is not None:
                    threading.Thread(target=self._on_loss, daemon=True, name="encore-ranks-lost").start()
        return self.failure

    # ---- ending ----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Tell all to end, without waiting for it; they are killed where one is lost."""
        self._ending = True
        try:
            self.broadcast(None)
        except EngineDead as error:
            logger.debug("nobody is told to end: %s", error)
            self._kill()

    def end(self) -> None:
        """Wait for the ends of those dismissed, kill who takes too long, and clean up."""
        deadline = time.monotonic() + STOP_SECONDS
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("the process of rank %d did not end within %.0f s; it is killed", rank, STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all at once. Safe at any time, and more than once."""
        self._ending = True
        self._kill()
        if self._watcher is not None:
            self._watcher.join(1.0)  # it reads the lines
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
