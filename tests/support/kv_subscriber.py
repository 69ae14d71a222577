"""A subscriber to KV events, written from the definitions of vLLM, llm-d, Dynamo and AIBrix, with strict types.

The batch is an array and each event a map with its name under "type", as vLLM sends them since June 2026.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.kv_view import View
from tests.support.waiting import PATIENCE

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # Dynamo's


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


def decode(payload: bytes) -> Batch:
    return msgspec.msgpack.decode(payload, type=Batch)


def subscribed(endpoint: str, topic: str) -> zmq.Socket:
    """Return a SUB socket that the publisher knows: a PUB socket sends nothing to others."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(topic)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(endpoint)
    assert monitor.poll(1000 * PATIENCE), f"no publisher at {endpoint}"
    socket.disable_monitor()
    monitor.close(linger=0)
    time.sleep(0.3)  # the topic follows the handshake
    return socket


class Subscriber:
    """A SUB socket on one topic, which checks that sequence numbers have no gap, and a view."""

    def __init__(self, endpoint: str, topic: str = "", replay_endpoint: str | None = None):
        self.view = View()
        self.next = 0
        self._socket = subscribed(endpoint, topic)
        self._topic, self._replay_endpoint = topic.encode(), replay_endpoint

    def receive(self, seconds: float = PATIENCE) -> Batch | None:
        if not self._socket.poll(1000 * seconds):
            return None
        topic, number, payload = self._socket.recv_multipart()
        assert topic.startswith(self._topic) and len(number) == 8
        assert int.from_bytes(number, "big") == self.next, "a batch was missed"
        self.next += 1
        batch = decode(payload)
        self.view.apply(msgspec.msgpack.decode(payload)[1])
        return batch

    def receive_all(self, seconds: float = 0.5) -> None:
        """Apply all batches until none comes for so long."""
        while self.receive(seconds) is not None:
            pass

    def receive_until(self, condition: Callable[[], bool]) -> None:
        """Apply batches until a condition holds."""
        while not condition():
            assert self.receive() is not None, "the last batch changed nothing"

    def replay(self, start: int = 0) -> list[tuple[int, Batch]]:
        """Request earlier batches from sequence number `start` on."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(self._replay_endpoint)
        try:
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            found = []
            while True:
                assert socket.poll(1000 * PATIENCE), "the replay has no end"
                empty, number, payload = socket.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert payload == b""
                    return found
                found.append((int.from_bytes(number, "big"), decode(payload)))
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._socket.close(linger=0)
