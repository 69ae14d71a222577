"""What crosses a process border: packed and unpacked, a sequence's events are the same and in the same order."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client.event_codec import ReportSplitter, encode_events, is_plain
from engine.errors import EngineError
from engine.protocol.messages import (
    CLIENT_ID_SPAN,
    Abort,
    AddressedReports,
    ClientDisconnected,
    EngineStats,
    Events,
    Reply,
    Snapshot,
    Submit,
    Tokens,
)
from engine.protocol.request import EngineRequest, SamplingParams, TokenEvent, TokenLogprob

ODD = {
    "token_ids": [1, 2], "logprobs": [TokenLogprob(1, -1.0, 1)], "prompt_logprobs": [None], "finish_reason": "length",
    "stop_reason": 7, "error": "it failed", "refusal": EngineError("no"), "cached_tokens": 16, "queue_time": 0.0,
}  # fmt: skip


def plain(name: str, token: int, version: str = "v", bucket: int | None = 8) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=[token], weight_version=version, graph_bucket=bucket)


def unpacked(report: Events) -> list[TokenEvent]:
    found = [
        plain(name, token, columns.weight_version, columns.graph_bucket)
        for columns in report.tokens for name, token in zip(columns.request_ids, columns.token_ids, strict=True)
    ]  # fmt: skip
    return found + report.events


@st.composite
def steps(draw) -> list[TokenEvent]:
    events = []
    for token in range(draw(st.integers(0, 12))):
        event = plain(draw(st.sampled_from(["0.1", "0.2", "3.4"])), token, draw(st.sampled_from("vw")),
                      draw(st.sampled_from([None, 8])))  # fmt: skip
        if draw(st.integers(0, 3)) == 0:
            field = draw(st.sampled_from(sorted(ODD)))
            setattr(event, field, ODD[field])
        events.append(event)
    return events


@given(steps())
def test_every_sequence_gets_the_same_events_in_the_same_order(events):
    report = pickle.loads(pickle.dumps(encode_events(events)))
    for name in {event.request_id for event in events}:
        before = [repr(event) for event in events if event.request_id == name]
        assert [repr(event) for event in unpacked(report) if event.request_id == name] == before
    assert len(unpacked(report)) == len(events)


def test_a_step_of_plain_events_is_one_pair_of_columns():
    report = encode_events([plain(f"0.{number}", 100 + number) for number in range(64)])
    assert report.events == [] and len(report.tokens) == 1
    assert report.tokens[0] == Tokens([f"0.{n}" for n in range(64)], list(range(100, 164)), "v", 8)
    assert len(pickle.dumps(report)) < 64 * 12


def test_whatever_a_plain_event_could_not_carry_is_left_whole():
    for name, value in ODD.items():
        assert not is_plain(dataclasses.replace(plain("0.1", 1), **{name: value})), name
    assert not is_plain(dataclasses.replace(plain("0.1", 1), token_ids=[]))
    known = {"request_id", "weight_version", "graph_bucket", *ODD}
    assert {field.name for field in dataclasses.fields(TokenEvent)} == known, "a new field: is an event with it plain?"


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())


def opened(report: AddressedReports) -> dict[int, object]:
    return {client: pickle.loads(parcel) for client, parcel in report.parcels}


def test_each_front_gets_its_own_part_and_what_is_for_all_stays_whole():
    board = ReportSplitter()
    report = encode_events([plain("0.1", 5), plain("3.1", 6), plain("0.2", 7, bucket=None),
                     TokenEvent(request_id="3.2", finish_reason="length")])  # fmt: skip
    found = opened(board.outgoing(report))
    assert set(found) == {0, 3}
    assert [event.token_ids for event in unpacked(found[0])] == [[5], [7]]
    assert [event.request_id for event in unpacked(found[3])] == ["3.1", "3.2"]
    assert opened(board.outgoing(Reply(3 * CLIENT_ID_SPAN + 4, "value"))) == {3: Reply(3 * CLIENT_ID_SPAN + 4, "value")}
    snapshot = Snapshot(EngineStats())
    assert board.outgoing(snapshot) is snapshot


def test_a_front_that_leaves_aborts_what_it_has_under_way_and_nothing_else():
    board = ReportSplitter()
    board.incoming(Submit([request("1.1"), request("1.2#0"), request("1.2#1"), request("2.1")]))
    board.outgoing(Events([TokenEvent(request_id="1.2#0", finish_reason="stop")]))
    assert board.incoming(ClientDisconnected(1)) == Abort(["1.1", "1.2#1"])
    assert board.incoming(ClientDisconnected(1)) == Abort([])
    assert board.incoming(ClientDisconnected(2)) == Abort(["2.1"])


@pytest.mark.parametrize("command", [Submit([]), Abort(["1.1"])])
def test_other_commands_pass_unchanged(command):
    assert ReportSplitter().incoming(command) is command
