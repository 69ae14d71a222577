"""Frames: reports as bytes that a router forwards without decoding them."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

import pytest

from engine.client.frames import decode_report, encode_report
from engine.client.router import EngineRouter
from engine.client.transport import OnReport
from engine.protocol.messages import AddressedReports, ClientDisconnected, Command, EngineStats, Lost, Snapshot
from tests.support.waiting import PATIENCE, wait

UNKNOWN = b"\x80\x05\x8c\x07nowhere\x8c\x05Thing\x93)R."  # a pickle of an object whose module this process lacks


class Wire:
    """A transport without a process: records forwarded commands, and relays the frames that a test gives."""

    def __init__(self) -> None:
        self.forwarded: list[bytes] = []
        self.relay: OnReport

    def start(self, on_report: OnReport) -> None:
        self.relay = on_report

    def send(self, command: Command) -> None:
        self.forward(pickle.dumps(command))

    def forward(self, payload: bytes) -> None:
        self.forwarded.append(payload)

    def stop(self, timeout: float) -> None:
        pass


def received(client: Connection) -> bytes:
    assert client.poll(PATIENCE)
    return client.recv_bytes()


@pytest.mark.parametrize("report", [Snapshot(EngineStats(steps=3)), Lost("it crashed", restarts=2)])
def test_a_broadcast_report_comes_back(report):
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("parcels", [[], [(0, b"")], [(7, b"abc"), (2**32 - 1, b"\0" * 70000), (7, b"d")]])
def test_parcels_come_back_in_order_and_are_not_copied(parcels):
    frame = encode_report(AddressedReports(parcels))
    found = decode_report(frame)
    assert isinstance(found, AddressedReports)
    assert [(client, bytes(payload)) for client, payload in found.parcels] == parcels
    assert all(payload.obj is frame for _, payload in found.parcels)


def test_the_router_forwards_payloads_that_it_can_not_decode():
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(UNKNOWN)
    wire = Wire()
    router = EngineRouter(wire)
    router.start(lambda report: None)
    with router.connect(3) as first, router.connect(4) as second:
        for payload in (UNKNOWN, b"", b"no pickle"):
            first.send_bytes(payload)
        wait(lambda: len(wire.forwarded) == 3, "the commands")
        assert wire.forwarded == [UNKNOWN, b"", b"no pickle"]
        wire.relay(decode_report(encode_report(AddressedReports([(4, UNKNOWN), (9, b"gone"), (3, b"\xff")]))))
        assert received(first) == b"\xff" and received(second) == UNKNOWN
    wait(lambda: len(wire.forwarded) == 5, "the end of the clients")
    assert sorted(pickle.loads(one).client for one in wire.forwarded[3:]) == [3, 4]
    assert isinstance(pickle.loads(wire.forwarded[3]), ClientDisconnected)
    router.stop(1.0)
