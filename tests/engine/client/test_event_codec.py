"""Encoding of events for other processes: round trip, order within a sequence, and splitting by client."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client.event_codec import ReportSplitter, encode_events, is_plain
from engine.errors import EngineError
from engine.protocol.logprobs import TokenLogprobs
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
    "grammar_ended": True, "hidden_states": np.ones((1, 1), np.float32),
    "routed_experts": np.zeros((1, 2, 3), np.int16),
}  # fmt: skip


def plain(name: str, token: int, version: str = "v", bucket: int | None = 8) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=[token], weight_version=version, graph_bucket=bucket)


def decoded(report: Events) -> list[TokenEvent]:
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
def test_encoding_keeps_each_sequences_events_and_order(events):
    report = pickle.loads(pickle.dumps(encode_events(events)))
    for name in {event.request_id for event in events}:
        before = [repr(event) for event in events if event.request_id == name]
        assert [repr(event) for event in decoded(report) if event.request_id == name] == before
    assert len(decoded(report)) == len(events)


def test_plain_events_of_a_step_share_one_pair_of_columns():
    report = encode_events([plain(f"0.{number}", 100 + number) for number in range(64)])
    assert report.events == [] and len(report.tokens) == 1
    assert report.tokens[0] == Tokens([f"0.{n}" for n in range(64)], list(range(100, 164)), "v", 8)
    assert len(pickle.dumps(report)) < 64 * 12


def scored(name: str, token: int) -> TokenEvent:
    event = plain(name, token)
    event.logprobs = TokenLogprobs()
    event.logprobs.append(TokenLogprob(token, -0.5, 1, {token + k: -k - 0.5 for k in range(5)}))
    return event


def test_events_with_log_probabilities_are_columns_too():
    events = [(scored if number % 2 else plain)(f"{number % 3}.{number}", number) for number in range(64)]
    report = encode_events(events)
    assert report.events == [] and len(report.tokens) == 2
    assert len(pickle.dumps(report)) < 32 * (12 + 120)
    parts = unpickled(ReportSplitter().outgoing(report))
    found = {}
    for client, part in parts.items():
        for columns in part.tokens:
            records = columns.logprobs or [None] * len(columns.token_ids)
            for name, token, record in zip(columns.request_ids, columns.token_ids, records, strict=True):
                assert client == int(name.partition(".")[0])
                found[name] = (token, None if record is None else TokenLogprobs([record]))
    assert found == {event.request_id: (event.token_ids[0], event.logprobs) for event in events}


def test_events_with_any_other_field_are_not_plain():
    for name, value in ODD.items():
        assert not is_plain(dataclasses.replace(plain("0.1", 1), **{name: value})), name
    assert not is_plain(dataclasses.replace(plain("0.1", 1), token_ids=[]))
    covered = {"request_id", "weight_version", "graph_bucket", *ODD}
    assert {field.name for field in dataclasses.fields(TokenEvent)} == covered, (
        "new field: decide whether an event with it is plain"
    )


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())


def unpickled(report: AddressedReports) -> dict[int, object]:
    return {client: pickle.loads(payload) for client, payload in report.parcels}


def test_events_are_split_by_client_and_broadcasts_pass_unchanged():
    splitter = ReportSplitter()
    report = encode_events([plain("0.1", 5), plain("3.1", 6), plain("0.2", 7, bucket=None),
                     TokenEvent(request_id="3.2", finish_reason="length")])  # fmt: skip
    found = unpickled(splitter.outgoing(report))
    assert set(found) == {0, 3}
    assert [event.token_ids for event in decoded(found[0])] == [[5], [7]]
    assert [event.request_id for event in decoded(found[3])] == ["3.1", "3.2"]
    assert unpickled(splitter.outgoing(Reply(3 * CLIENT_ID_SPAN + 4, "value"))) == {
        3: Reply(3 * CLIENT_ID_SPAN + 4, "value")
    }
    snapshot = Snapshot(EngineStats())
    assert splitter.outgoing(snapshot) is snapshot


def test_a_disconnected_client_aborts_only_its_own_requests():
    splitter = ReportSplitter()
    splitter.incoming(Submit([request("1.1"), request("1.2#0"), request("1.2#1"), request("2.1")]))
    splitter.outgoing(Events([TokenEvent(request_id="1.2#0", finish_reason="stop")]))
    assert splitter.incoming(ClientDisconnected(1)) == Abort(["1.1", "1.2#1"])
    assert splitter.incoming(ClientDisconnected(1)) == Abort([])
    assert splitter.incoming(ClientDisconnected(2)) == Abort(["2.1"])


@pytest.mark.parametrize("command", [Submit([]), Abort(["1.1"])])
def test_other_commands_pass_unchanged(command):
    assert ReportSplitter().incoming(command) is command
