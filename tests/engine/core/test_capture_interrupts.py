"""Background captures give way to requests: on a CPU they are given up between two operations, and tried again."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine import SamplingParams
from engine.core.service import serve
from engine.protocol.messages import Ask, Command, Events, Reply, Report, Stop, Submit
from engine.protocol.request import EngineRequest
from graph_cache.backends.interrupts import CaptureInterrupted, Interrupts

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


def after(polls: int):
    """Return a function that is true from its `polls`-th call on."""
    left = [polls]

    def wanted() -> bool:
        left[0] -= 1
        return left[0] < 0

    return wanted


@pytest.fixture
def every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graph_cache.backends.interrupts.POLL_SECONDS", 0.0)


@pytest.mark.parametrize("polls", [0, 1, 20, 90, 150])
def test_a_capture_that_is_given_up_leaves_no_trace_and_is_tried_again(make_engine, every_poll, polls):
    with make_engine(warmup="background") as engine, make_engine() as plain:
        loop = engine.loop
        pending = list(loop.executor.worker.runner.cache.pending())
        generator = torch.get_rng_state()
        buffers = {name: tensor.clone() for name, tensor in loop.executor.worker.runner.buffers.items()}
        assert not loop.capture_between_steps(after(polls))
        assert loop.executor.worker.runner.cache.pending() == pending
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in loop.executor.worker.runner.buffers.items())
        while loop.capture_between_steps():
            pass
        assert loop.stats().warm["pending"] == 0
        first, second = (one.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS) for one in (engine, plain))
        assert first[0].token_ids == second[0].token_ids


def test_the_smallest_bucket_is_captured_first(make_engine):
    with make_engine(warmup="background", graph_buckets=(1, 2, 8)) as engine:
        keys = []
        loop = engine.loop
        while loop.executor.worker.runner.cache.pending():
            before = set(loop.executor.worker.runner.cache.pending())
            loop.capture_between_steps()
            keys += before - set(loop.executor.worker.runner.cache.pending())
        sizes = [key.bucket for key in keys]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_request_that_arrives_during_a_capture_is_answered_before_it_is_complete(make_engine, monkeypatch):
    """The loop's own service: the command is kept, the capture ends, and the request runs at once."""
    with make_engine(warmup="background") as engine:
        loop, capture = engine.loop, engine.loop.captures.capture_next
        request = EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=PARAMS)
        inbox: list[Command] = []
        reports: list[Report] = []
        given_up: list[float] = []

        def capture_next(key=None):
            if not given_up:  # the request arrives while the first capture runs
                threading.Timer(0.0, inbox.append, [Submit(requests=[request])]).start()
            try:
                return capture(key)
            except CaptureInterrupted:
                given_up.append(time.monotonic())
                raise

        def receive(timeout: float) -> Command | None:
            until = time.monotonic() + timeout
            while not inbox and time.monotonic() < until:
                time.sleep(0.001)
            return inbox.pop(0) if inbox else None

        def send(report: Report) -> None:
            reports.append(report)
            if isinstance(report, Events) and any(event.finish_reason for event in report.events):
                inbox.append(Ask(number=1, method="stats", args=()))
            if isinstance(report, Reply):
                inbox.append(Stop())

        monkeypatch.setattr(loop.captures, "capture_next", capture_next)
        monkeypatch.setattr("graph_cache.backends.interrupts.POLL_SECONDS", 0.0)
        serve(loop, receive, send)
        events = [event for report in reports if isinstance(report, Events) for event in report.events]
        tokens = [token for event in events for token in event.token_ids]
        [reply] = [report for report in reports if isinstance(report, Reply)]
        assert len(tokens) == PARAMS.max_tokens and reply.error is None
        assert given_up or reply.value.warm["captured"]  # a capture that was as good as complete may end instead


def test_interrupts_are_off_outside_of_the_block():
    interrupts = Interrupts()
    interrupts.check()
    run = lambda: None  # noqa: E731
    assert interrupts.checking(run) is run
    with pytest.raises(CaptureInterrupted), interrupts.allow(lambda: True):
        interrupts.check()
    interrupts.check()


def test_the_log_says_how_far_the_captures_are(make_engine, caplog, monkeypatch):
    monkeypatch.setattr("engine.core.captures.LOG_SECONDS", 0.0)
    with make_engine(warmup="background") as engine, caplog.at_level("INFO", logger="engine.core.captures"):
        total = len(engine.loop.executor.graphs.pending())
        while engine.loop.capture_between_steps():
            pass
        engine.loop.capture_between_steps()  # nothing is missing, and the log has said so
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"capturing {total} graphs between requests; until then their steps run eager"
    assert lines[1:-1] == [f"captured {index} of {total} graphs" for index in range(2, total + 1)]
    assert lines[-1].startswith(f"captured {total} graphs in ") and lines[-1].endswith("; none is missing")


def test_a_capture_that_holds_up_live_requests_for_long_waits_until_there_are_none(make_engine, monkeypatch):
    monkeypatch.setattr("engine.core.captures.MAX_STALL_SECONDS", 0.0)
    monkeypatch.setattr("graph_cache.backends.interrupts.POLL_SECONDS", 0.0)
    with make_engine(warmup="background") as engine:
        loop = engine.loop
        pending = list(loop.executor.graphs.pending())
        loop.add(EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=PARAMS))
        while loop.has_work:
            assert loop.executor.graphs.pending() == pending
            loop.step()
            captured = loop.scheduler.has_work and loop.capture_between_steps()
            assert not captured
        while loop.capture_between_steps():
            pass
        assert not loop.executor.graphs.pending()
