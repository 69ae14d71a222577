"""Frames: reports of an engine process as bytes that a router can forward without unpickling them.

A frame begins with a header: its kind, and the number of its parcels. An ADDRESSED frame continues with the client and
the length of each parcel, then the parcels, each of which is one pickled report. A BROADCAST frame is one pickled
report for everybody: Ready, Snapshot, Dead; a few per second. Commands have one destination and need no header.
"""

from __future__ import annotations

import pickle
import struct

from engine.protocol.messages import AddressedReports, Report

BROADCAST, ADDRESSED = 0, 1
HEADER = struct.Struct("<BI")  # kind, number of parcels
PARCEL = struct.Struct("<II")  # client, length in bytes


def encode_report(report: Report) -> bytes:
    """Encode a report as a frame."""
    if not isinstance(report, AddressedReports):
        return HEADER.pack(BROADCAST, 0) + pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
    table = [PARCEL.pack(client, len(payload)) for client, payload in report.parcels]
    payloads = [payload for _, payload in report.parcels]
    return b"".join((HEADER.pack(ADDRESSED, len(table)), *table, *payloads))


def decode_report(frame: bytes) -> Report:
    """Decode a frame. The parcels of an ADDRESSED frame are views into it, still pickled."""
    kind, count = HEADER.unpack_from(frame)
    if kind == BROADCAST:
        return pickle.loads(memoryview(frame)[HEADER.size :])
    start, view = HEADER.size + count * PARCEL.size, memoryview(frame)
    parcels: list[tuple[int, bytes | memoryview]] = []
    for client, length in PARCEL.iter_unpack(view[HEADER.size : start]):
        parcels.append((client, view[start : start + length]))
        start += length
    return AddressedReports(parcels)
