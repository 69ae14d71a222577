"""Messages from a worker process to rank 0. This module does not import torch."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import EngineError

HEARTBEAT_SECONDS = 1.0
GLOO_TIMEOUTS = ("Timed out waiting", "Application timeout")  # in the messages of gloo's errors


@dataclass(frozen=True)
class DeviceReady:
    """The worker has its device and is about to join the rendezvous."""


@dataclass(frozen=True)
class WeightsLoaded:
    """The worker has loaded its weights and has memory for `num_pages` KV pages."""

    num_pages: int


@dataclass(frozen=True)
class WorkerReady:
    """The worker is built and waits for calls. From now on it sends a Heartbeat every HEARTBEAT_SECONDS."""


@dataclass(frozen=True)
class Heartbeat:
    """The worker's process runs."""


@dataclass(frozen=True)
class Reply:
    """The worker has finished call `number`, or refused it with an error that leaves it usable."""

    number: int
    error: EngineError | None = None


@dataclass(frozen=True)
class RankFailed:
    """The worker failed and exits. `error` is set if the user can fix the cause."""

    reason: str
    error: EngineError | None = None


def describe_error(error: BaseException) -> str:
    """Return an error of a step as text. Says so if a collective waited too long for another rank."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in GLOO_TIMEOUTS):
        return f"a collective waited too long for another rank, which hangs ({error})"
    return f"{type(error).__name__}: {error}".rstrip(": ")


class Reports:
    """Sends messages to rank 0. Thread-safe."""

    def __init__(self, pipe: Connection):
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message. Raises OSError if rank 0 is gone."""
        with self._lock:
            self._pipe.send(message)

    def start_heartbeat(self) -> None:
        """Send a Heartbeat every HEARTBEAT_SECONDS from another thread."""
        threading.Thread(target=self._beat, daemon=True, name="encore-heartbeat").start()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone, which ends this process
            while True:
                self.send(Heartbeat())
                time.sleep(HEARTBEAT_SECONDS)
