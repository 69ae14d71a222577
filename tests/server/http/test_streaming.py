"""Streams in isolation: merging, early close, failures, and their latencies in the metrics."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from engine.errors import EngineDead, QueueFull, RequestError
from engine.protocol.outputs import OutputDelta, RequestOutput
from engine.protocol.request import SamplingParams
from server.http.errors import OUTCOMES, WireError, body_of, error_body
from server.http.long_running import long_running
from server.http.streaming import EventStream, event, merge
from server.observability.metrics import RequestMetrics
from server.observability.shared_counters import SharedCounters
from server.serving.jobs import Job
from tests.support.waiting import PATIENCE


class Source:
    """An endless stream that records whether it was closed."""

    def __init__(self, name, fail_at=None):
        self.name, self.fail_at, self.closed, self.given = name, fail_at, False, 0

    async def stream(self):
        try:
            while True:
                await asyncio.sleep(0)
                if self.given == self.fail_at:
                    raise EngineDead("the engine ended: killed")
                yield f"{self.name}{self.given}"
                self.given += 1
        finally:
            self.closed = True


async def test_merge_gives_each_streams_items_in_order():
    async def finite(name):
        for number in range(3):
            await asyncio.sleep(0)
            yield f"{name}{number}"

    found = [item async for item in merge([finite("a"), finite("b")])]
    assert sorted(found) == [(i, f"{name}{n}") for i, name in enumerate("ab") for n in range(3)]
    assert [item for i, item in found if i == 1] == ["b0", "b1", "b2"]
    assert [item async for item in merge([finite("a")])] == [(0, "a0"), (0, "a1"), (0, "a2")]


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_a_merged_stream_closes_all_of_them(count):
    sources = [Source(str(number)) for number in range(count)]
    merged = merge([source.stream() for source in sources])
    seen = set()
    while len(seen) < count:
        seen.add((await anext(merged))[0])
    await merged.aclose()
    assert all(source.closed for source in sources)


async def test_one_failure_ends_a_merged_stream_and_closes_the_others():
    sources = [Source("a"), Source("b", fail_at=2)]
    with pytest.raises(EngineDead):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.closed for source in sources)


class Connection:
    """The ASGI side of one response: collects sent messages, and disconnects when `gone` is set, or after a text."""

    def __init__(self, leaves_after=b""):
        self.sent, self.gone, self._leaves_after = [], asyncio.Event(), leaves_after

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if self._leaves_after and self._leaves_after in message.get("body", b""):
            self.gone.set()

    async def answer(self, events):
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "state": {}}

        @long_running
        async def endpoint() -> Response:
            return EventStream(events)

        response = await endpoint()
        await asyncio.wait_for(response(scope, self.receive, self.send), PATIENCE)
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_events_are_sent_and_done_ends_them():
    async def events():
        yield event({"text": "é"}).encode()

    connection = Connection()
    assert await connection.answer(events()) == 'data: {"text":"é"}\n\ndata: [DONE]\n\n'.encode()
    assert connection.sent[0]["status"] == 200


async def test_a_failure_before_the_first_event_keeps_its_status():
    async def events():
        raise QueueFull("full")
        yield b""

    connection = Connection()
    body = await connection.answer(events())
    assert connection.sent[0]["status"] == 429 and json.loads(body)["error"]["code"] == "queue_full"
    assert (b"retry-after", b"1") in connection.sent[0]["headers"]


async def test_a_failure_after_the_first_event_is_a_last_event(caplog):
    async def events():
        yield event({"text": "a"}).encode()
        raise EngineDead("the engine ended: killed")

    lines = (await Connection().answer(events())).decode().split("\n\n")
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert lines[2] == "data: [DONE]"
    assert "killed" in caplog.text


async def test_internal_errors_are_logged_and_not_shown_to_the_client(caplog):
    async def events():
        yield event({}).encode()
        raise ZeroDivisionError("secret")

    assert b"secret" not in await Connection().answer(events())
    assert "secret" in caplog.text


async def test_a_client_that_disconnects_closes_waiting_events():
    closed = asyncio.Event()

    async def events():
        try:
            yield event({}).encode()
            await asyncio.sleep(3600)
        finally:
            closed.set()

    connection = Connection(leaves_after=event({}).encode())
    assert await connection.answer(events()) == event({}).encode()
    assert closed.is_set()


def test_every_outcome_is_reachable_before_its_base_class():
    for index, (kind, outcome) in enumerate(OUTCOMES):
        assert not any(issubclass(kind, earlier) for earlier, _ in OUTCOMES[:index])
        assert body_of(kind("why"))[:2] == (outcome.status, error_body("why", outcome.type, None, outcome.code))


def test_error_bodies_carry_the_exceptions_fields():
    status, body, _ = body_of(RequestError("bad \ud800", param="n"))
    assert status == 400 and body["error"]["param"] == "n" and body["error"]["message"] == "bad ?"
    status, body, headers = body_of(WireError(503, "soon", retry_after=2))
    assert (status, headers) == (503, {"Retry-After": "2"})


def test_times_are_observed_per_token_and_every_sequence_is_counted_once():
    registry, metrics = CollectorRegistry(), RequestMetrics(SharedCounters())
    registry.register(metrics)
    output = RequestOutput.empty("r", None, [1], 3)
    watch = metrics.watch(Job(public_id="r", output=output, params=SamplingParams(n=3), max_tokens=16))
    began = time.perf_counter()
    for index, finish in ((0, None), (0, None), (0, "length"), (1, "stop")):
        time.sleep(0.02)
        tokens = [] if index else [5, 6]
        watch.observe_deltas(
            [OutputDelta(request_id="r", child_id="r", index=index, token_ids=tokens, finish_reason=finish)]
        )
    took = time.perf_counter() - began
    watch.close()
    watch.close()

    def value(name, **labels):
        return registry.get_sample_value(f"encore_{name}", labels)

    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 2
    # Two gaps of 20 ms or more, two tokens each; the third gap is the other sequence's.
    assert 0.02 <= value("inter_token_latency_seconds_sum") <= (took - 0.04) / 2
    assert value("request_time_per_output_token_seconds_count") == 1
    assert value("e2e_request_latency_seconds_count") == 2
    reasons = [value("request_success_total", finished_reason=one) for one in ("length", "stop", "abort", "error")]
    assert reasons == [1, 1, 1, 0]
