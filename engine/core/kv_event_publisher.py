"""Publishes events of the prefix cache over ZeroMQ, in the format of vLLM's publisher.

Needs pyzmq and msgspec: `pip install 'encore-serve[kv-events]'`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import Empty, Full, Queue
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_events_config import SETTING, KVEventsConfig
from engine.scheduling.kv_events import Event

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # for which a request for a replay may wait while nothing is published
CLOSE_SECONDS = 1.0  # to publish what is queued when the engine ends
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
DATA_PARALLEL_RANK = 0  # AIBrix refuses a batch whose rank is null
BOUND = ("*", "::", "0.0.0.0")


class KVEventPublisher:
    """A PUB socket, a ROUTER socket for replays, and the thread that uses them.

    A message has three frames: the topic, a sequence number (8 bytes, big-endian, from 0), and a msgpack array of the
    time in seconds, the events and the data-parallel rank. A request for a replay has an empty frame and the sequence
    number to begin with; each answer has an empty frame, a number and a batch, the last one -1 and nothing.

    Neither a slow nor an absent subscriber delays `publish`. Raises ConfigError if a package is missing or an address
    can't be used.
    """

    def __init__(self, config: KVEventsConfig):
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"{SETTING} needs {error.name}, which is not installed: pip install 'encore-serve[kv-events]', or "
                "leave it out"
            ) from error
        self._encode = msgspec.msgpack.encode
        self._topic = config.topic.encode("utf-8", "surrogatepass")
        self._queue: Queue[list[Any]] = Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._dropped = 0
        self._is_closed = threading.Event()
        context: Any = zmq.Context.instance()
        self._sender = context.socket(zmq.PUB)
        self._sender.set_hwm(config.hwm)
        self._replays = None
        try:
            is_bound = config.endpoint.startswith(("ipc://", "inproc://")) or any(
                one in config.endpoint for one in BOUND
            )
            _open(self._sender.bind if is_bound else self._sender.connect, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                self._replays = context.socket(zmq.ROUTER)
                self._replays.set_hwm(config.buffer_steps + 1)  # a ROUTER drops what exceeds its limit
                _open(self._replays.bind, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[Event]) -> bool:
        """Queue one batch and return True. Returns False, without waiting, if the queue is full: the batch is lost."""
        try:
            self._queue.put_nowait([time.time(), events, DATA_PARALLEL_RANK])
        except Full:
            if not self._dropped:
                logger.warning(
                    "KV events arise faster than they are published: batches are dropped, and subscribers are told to "
                    "forget what they know of this server (%s: max_queue_size=%d)", SETTING, self._queue.maxsize
                )  # fmt: skip
            self._dropped += 1
            return False
        return True

    def close(self) -> None:
        """Publish what is queued, within a second, and close the sockets."""
        self._is_closed.set()
        self._thread.join(2 * CLOSE_SECONDS)

    def _run(self) -> None:
        deadline = float("inf")
        while True:
            if self._is_closed.is_set():
                deadline = min(deadline, time.monotonic() + CLOSE_SECONDS)
                if self._queue.empty() or time.monotonic() > deadline:
                    break
            try:
                if self._replays is not None and self._replays.poll(0):
                    self._replay()
                self._send(self._queue.get(timeout=POLL_SECONDS))
            except Empty:
                pass
            except Exception:  # of one batch or one request; the next may succeed
                logger.exception("KV events were not published")
        self._close_sockets(int(1000 * CLOSE_SECONDS))

    def _send(self, batch: list[Any]) -> None:
        number = self._next_number.to_bytes(8, "big")
        payload = self._encode(batch)
        self._sender.send_multipart((self._topic, number, payload))
        self._kept.append((number, payload))
        self._next_number += 1

    def _replay(self) -> None:
        """Answer one request with all kept batches from its sequence number on."""
        assert self._replays is not None
        client, *rest = self._replays.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            logger.warning("a request for a replay of KV events needs an empty frame and 8 bytes; found %r", rest)
            return
        for number, payload in self._kept:
            if number >= rest[1]:  # big-endian numbers compare as their bytes
                self._replays.send_multipart((client, b"", number, payload))
        self._replays.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _close_sockets(self, linger_ms: int = 0) -> None:
        for one in (self._sender, self._replays):
            if one is not None:
                one.close(linger=linger_ms)


def _open(attach: Any, name: str, address: str) -> None:
    """Bind or connect a socket. Raises ConfigError that names the setting."""
    import zmq

    try:
        attach(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{SETTING}: {name}={address!r} can't be used: {error}; give another address") from error


def open_publisher(config: EngineConfig) -> KVEventPublisher | None:
    """Return the publisher that the settings ask for; None without one."""
    settings = config.kv_events_config
    return KVEventPublisher(settings) if settings is not None and settings.is_on else None
