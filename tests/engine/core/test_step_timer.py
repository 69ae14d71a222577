"""The next step is scheduled late while the device computes a long one, and never later than that one may end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.service import serve
from engine.core.step_timer import MIN_PROMPT_TOKENS, MIN_WAIT, StepTimer
from engine.protocol.messages import Stop, Submit
from engine.scheduling.batch import Batch, PrefillChunk
from engine.scheduling.request import Request
from tests.engine.lively import greedy, request


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def batch_of(tokens: int) -> Batch:
    batch = Batch()
    if tokens:
        batch.prefills = [PrefillChunk(Request(request("a", [5], greedy(1)), "0", frozenset()), 0, tokens, True, 1)]
    return batch


def run_step(timer: StepTimer, clock: Clock, tokens: int, seconds: float, host_seconds: float) -> None:
    """Let a step take `seconds` on a device that was idle, and `host_seconds` to schedule."""
    since = timer.now()
    clock.now += host_seconds
    enqueued = timer.enqueued(since)
    clock.now += seconds
    timer.finished(batch_of(tokens), enqueued)


STEP = st.tuples(st.just(0) | st.integers(0, 9000), st.floats(1e-6, 1e-4), st.floats(0, 0.02))


@given(steps=st.lists(STEP, max_size=40), tokens=st.integers(0, 9000), elapsed=st.floats(0, 1))
def test_the_wait_ends_before_any_similar_step_of_late_would_have(steps, tokens, elapsed):
    """A step with few prompt tokens is similar to one without any."""
    clock = Clock()
    timer = StepTimer(clock)
    durations = [max(size, 100) * rate for size, rate, _ in steps]
    for (size, _, host_seconds), seconds in zip(steps, durations, strict=True):
        run_step(timer, clock, size, seconds, host_seconds)
    enqueued = timer.now()
    clock.now += elapsed
    wait = timer.seconds_to_wait(batch_of(tokens), enqueued)
    if tokens >= MIN_PROMPT_TOKENS:
        pairs = zip(steps, durations, strict=True)
        similar = [tokens * seconds / step[0] for step, seconds in pairs if step[0] >= MIN_PROMPT_TOKENS][-32:]
    else:
        similar = [seconds for (size, *_), seconds in zip(steps, durations, strict=True) if not size][-8:]
    host_seconds = max([host for *_, host in steps[-32:]], default=0.0)
    latest = 0.85 * min(similar, default=0.0) - host_seconds
    if latest - elapsed < MIN_WAIT - 1e-6:
        assert wait == pytest.approx(0, abs=MIN_WAIT + 1e-6)
    else:
        assert wait == pytest.approx(latest - elapsed, abs=1e-6)


def test_a_step_behind_another_begins_when_that_ends():
    clock = Clock()
    timer = StepTimer(clock)
    run_step(timer, clock, 1000, 0.1, 0.0)
    first = timer.now()  # this one runs until 0.2, the next one was enqueued meanwhile
    clock.now = 0.15
    second = timer.now()
    clock.now = 0.2
    timer.finished(batch_of(1000), first)
    assert timer.seconds_to_wait(batch_of(1000), second) == pytest.approx(0.085)


def test_requests_that_come_during_a_long_step_are_in_the_next_one(make_engine):
    """Both late prompts are computed in the second step, although they come one after the other."""
    loop = make_engine(async_scheduling=True).loop
    batches, schedule = [], loop.scheduler.schedule
    late = [Submit([request(name, [7] * length, greedy(3))]) for name, length in (("late", 9), ("later", 4))]
    first, reports = [Submit([request("first", [5] * 20, greedy(6))])], []

    def recorded() -> Batch:
        batches.append(schedule())
        return batches[-1]

    def receive(timeout: float):
        if first:
            return first.pop()
        if timeout and late and loop.has_work:
            assert len(batches) == 1
            return late.pop(0)
        return None if loop.has_work else Stop()

    loop.scheduler.schedule = recorded
    loop.steps.timer.seconds_to_wait = lambda batch, enqueued: 0.1 if len(batches) == 1 and late else 0.0
    serve(loop, receive, reports.append)
    tokens = Counter()
    for report in reports:
        for event in getattr(report, "events", ()):
            tokens[event.request_id] += len(event.token_ids)
    assert tokens == {"first": 6, "late": 3, "later": 3}
    assert [chunk.request.request_id for chunk in batches[1].prefills] == ["late", "later"]
