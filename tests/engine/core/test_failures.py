"""Failing steps, and the loop as a service: every request gets a final event, and the others continue."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time

import pytest

from engine.core import service
from engine.core.loop import EngineLoop
from engine.core.steps import MAX_CONSECUTIVE_FAILURES
from engine.errors import EngineError, RequestError
from engine.protocol.messages import Abort, Ask, Dead, Events, Reply, Snapshot, Stop, Submit
from engine.protocol.request import TokenEvent
from tests.engine.lively import MANY, PROMPTS, drain, greedy, request, tokens
from tests.support.waiting import PATIENCE

# ---- steps that fail -----------------------------------------------------------------------------------------------


def fail_once(monkeypatch, runner, times: int = 1) -> None:
    execute, left = runner.execute, iter(range(times))

    def flaky(batch):
        if next(left, None) is not None:
            raise RuntimeError("the device coughed")
        return execute(batch)

    monkeypatch.setattr(runner, "execute", flaky)


def test_a_step_that_raises_fails_its_batch_and_the_engine_continues(make_engine, reference, monkeypatch, caplog):
    engine = make_engine(max_num_seqs=2, graph_buckets=(2,))
    fail_once(monkeypatch, engine.loop.executor.worker.runner)
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(9))
    assert [output.finish_reason for output in outputs] == ["error"] * 2 + ["length"] * 3
    assert "the device coughed" in outputs[0].outputs[0].error
    assert [output.token_ids for output in outputs[2:]] == [reference.greedy(prompt, 9) for prompt in PROMPTS[2:]]
    assert "the device coughed" in engine.stats().last_error and "the device coughed" in caplog.text
    assert engine.stats().ended == {"error": 2, "length": 3}
    again = engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(9))
    assert [output.token_ids for output in again] == [reference.greedy(prompt, 9) for prompt in PROMPTS]


def test_a_failed_step_leaves_no_pages_in_the_padding(make_engine, reference, monkeypatch):
    """Padded rows of the next batch must not write to pages of failed requests, which others may have by now."""
    engine = make_engine(enable_prefix_caching=False, num_pages=20)
    loop = engine.loop
    for i, prompt in enumerate(MANY):
        loop.add(request(f"{i}", prompt, greedy(30)))
    for _ in range(20):
        loop.step()
    fail_once(monkeypatch, loop.executor.worker.runner)
    assert {own[-1].finish_reason for own in drain(loop).values()} == {"error"}
    prompt = list(range(5, 105))
    found = engine.generate(prompt_token_ids=prompt, sampling_params=greedy(60))[0].token_ids
    assert found == reference.greedy(prompt, 60)


def test_failures_in_a_row_end_the_loop_with_the_reason(make_engine, reference, monkeypatch):
    engine = make_engine(max_num_seqs=1, graph_buckets=(1,))
    fail_once(monkeypatch, engine.loop.executor.worker.runner, times=MAX_CONSECUTIVE_FAILURES)
    with pytest.raises(RuntimeError, match="coughed"):
        engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(3))
    engine.idle_check()
    assert engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(3))[0].token_ids == reference.greedy(
        PROMPTS[0], 3
    )


def test_failures_separated_by_good_steps_do_not_end_the_loop(make_engine, monkeypatch):
    engine = make_engine(max_num_seqs=1, graph_buckets=(1,))
    for _ in range(MAX_CONSECUTIVE_FAILURES + 1):
        with monkeypatch.context() as patch:
            fail_once(patch, engine.loop.executor.worker.runner)
            outputs = engine.generate(prompt_token_ids=PROMPTS[:2], sampling_params=greedy(3))
        assert [output.finish_reason for output in outputs] == ["error", "length"]


# ---- as a service --------------------------------------------------------------------------------------------------


def serve(loop: EngineLoop, *commands, patience: int = 200) -> list:
    """Run `serve` over scripted commands (None: no command), then a Stop. Returns its reports."""
    reports, script = [], iter([*commands, *[None] * patience, Stop()])
    service.serve(loop, lambda timeout: next(script), reports.append)
    return reports


def events_of(reports, name: str) -> list[TokenEvent]:
    events = [event for report in reports if isinstance(report, Events) for event in report.events]
    return [event for event in events if event.request_id == name]


def test_serving_answers_and_ends_with_one_dead_without_a_reason(make_engine, reference):
    submit = Submit([request("a", PROMPTS[0], greedy(9))])
    reports = serve(make_engine().loop, submit, Ask(7, "graphs"), Ask(8, "nothing"))
    assert tokens(events_of(reports, "a")) == reference.greedy(PROMPTS[0], 9)
    replies = {report.number: report for report in reports if isinstance(report, Reply)}
    assert isinstance(replies[7].value, list) and isinstance(replies[8].error, RequestError)
    assert reports[-1] == Dead("") and sum(isinstance(report, Dead) for report in reports) == 1
    last = [report for report in reports if isinstance(report, Snapshot)][-1].stats
    assert (last.num_running, last.generation_tokens, last.kv_cache_usage) == (0, 9, 0)


def test_the_counters_of_a_request_are_sent_before_its_end(make_engine):
    """Under `background` a capture follows each step, so that a later snapshot could come seconds after the answer."""
    engine = make_engine(warmup="background", max_num_seqs=8)
    lengths = {"a": 3, "b": 3, "c": 9}
    reports = serve(
        engine.loop,
        Submit([request(name, PROMPTS[0], greedy(length)) for name, length in lengths.items()]),
        Submit([request("refused", [10**6], greedy(3))]),
        None,
        Submit([request("aborted", PROMPTS[1], greedy(200))]),
        Abort(["aborted"]),
    )
    ended, snapshot = [], None
    for report in reports:
        if isinstance(report, Snapshot):
            snapshot = report.stats
        elif isinstance(report, Events):
            ended += [event.request_id for event in report.events if event.finish_reason is not None]
            assert sum(snapshot.ended.values()) == len(ended)
            assert snapshot.generation_tokens >= sum(lengths.get(name, 0) for name in ended)
    assert sorted(ended) == ["a", "aborted", "b", "c", "refused"]


def test_the_first_request_after_a_start_waits_for_no_capture(make_engine):
    """A capture takes half a second on a CPU. It begins once no request came for a while, or beside running ones."""
    engine = make_engine(warmup="background")
    commands = iter([None, Submit([request("a", PROMPTS[0], greedy(3))])])
    sent, quiet = [], time.monotonic() + PATIENCE

    def receive(timeout):
        has_ended = sent and sent[-1][0].finish_reason and engine.loop.stats().graphs["captures"]
        time.sleep(0.0 if not sent else min(timeout, 0.01))
        return next(commands, Stop() if has_ended or time.monotonic() > quiet else None)

    def send(report):
        captures = list(engine.loop.stats().graphs["captures"])
        sent.extend((event, captures) for event in getattr(report, "events", ()))

    service.serve(engine.loop, receive, send)
    assert sent[0][0].token_ids and sent[0][1] == []
    assert engine.loop.stats().graphs["captures"]


@pytest.mark.parametrize("warmup", ["lazy", "background"])
def test_long_lived_objects_are_frozen_for_the_garbage_collector_while_serving(make_engine, warmup):
    loop = make_engine(warmup=warmup).loop
    frozen, turns, until = [], itertools.count(), time.monotonic() + PATIENCE

    def receive(timeout):
        turn = next(turns)
        if turn == 0:
            return Submit([request("a", PROMPTS[0], greedy(5))])
        if turn % 50 == 1:  # counting visits every frozen object
            frozen.append(gc.get_freeze_count())
        captured = turn > 50 and loop.stats().graphs["captures"]
        time.sleep(min(timeout, 0.001))
        return Stop() if captured or time.monotonic() > until else None

    service.serve(loop, receive, lambda report: None)
    assert loop.stats().graphs["captures"] and min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_stop_aborts_running_requests_with_an_event(make_engine):
    reports = serve(make_engine().loop, Submit([request("a", PROMPTS[0], greedy(200))]), patience=10)
    assert events_of(reports, "a")[-1].finish_reason == "abort"
    assert isinstance(reports[-1], Dead)


def test_an_abort_while_serving_reaches_its_request_only(make_engine, reference):
    submit = Submit([request("a", PROMPTS[0], greedy(200)), request("b", PROMPTS[1], greedy(9))])
    reports = serve(make_engine().loop, submit, None, None, Abort(["a"]))
    assert events_of(reports, "a")[-1].finish_reason == "abort"
    assert tokens(events_of(reports, "b")) == reference.greedy(PROMPTS[1], 9)


def test_a_loop_that_fails_for_good_ends_its_requests_and_reports_why(make_engine, monkeypatch):
    loop = make_engine(max_num_seqs=1, graph_buckets=(1,)).loop
    fail_once(monkeypatch, loop.executor.worker.runner, times=1000)
    reports = serve(loop, Submit([request(f"{i}", prompt, greedy(5)) for i, prompt in enumerate(MANY)]))
    reasons = [events_of(reports, f"{i}")[-1].finish_reason for i in range(8)]
    assert reasons == ["error"] * (MAX_CONSECUTIVE_FAILURES - 1) + ["abort"] * (8 - MAX_CONSECUTIVE_FAILURES + 1)
    assert "coughed" in reports[-1].reason


def test_a_broken_scheduler_still_ends_with_a_dead_report(make_engine, monkeypatch):
    """The Dead report must come even if requests can't be ended one by one: it ends all waiting streams."""
    loop = make_engine().loop

    def broken(*_):
        raise EngineError("the scheduler is broken")

    monkeypatch.setattr(loop.scheduler, "finish", broken)
    reports = serve(loop, Submit([request("a", PROMPTS[0], greedy(3))]))
    assert isinstance(reports[-1], Dead) and "broken" in reports[-1].reason
    monkeypatch.undo()
    loop.abort(["a"])
    loop.take_events()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(20)),
        lambda engine: engine.update_weights(weights_of(engine), version="next"),
        lambda engine: engine.weights_changed("next"),
        lambda engine: engine.warm(),
        lambda engine: engine.idle_check(),
        lambda engine: engine.close(),
    ],
    ids=["generate", "update_weights", "weights_changed", "warm", "idle_check", "close"],
)
def test_a_call_waits_while_another_thread_holds_the_device_quiet(make_engine, call):
    engine, done = make_engine(), []
    thread = threading.Thread(target=lambda: [call(engine), done.append(True)])
    with engine.pool.quiet():
        thread.start()
        time.sleep(0.2)
        assert not done
    thread.join(PATIENCE)
    assert done


def weights_of(engine):
    return [
        (name, slot.read().clone()) for name, slot in engine.loop.executor.worker.runner.model.weight_slots().items()
    ]


def test_waiting_for_weights_does_not_block_the_pool(make_engine):
    engine, box = make_engine(), queue.Queue()
    weights = weights_of(engine)
    updating = threading.Thread(target=lambda: engine.update_weights(iter(box.get, None), version="next"), daemon=True)
    updating.start()
    time.sleep(0.1)

    def capture_and_send():
        with engine.pool.quiet():
            pass
        for pair in (*weights, None):
            box.put(pair)

    sending = threading.Thread(target=capture_and_send, daemon=True)
    sending.start()
    sending.join(PATIENCE)
    updating.join(PATIENCE)
    assert not sending.is_alive() and engine.weight_version == "next"


def test_a_serving_loop_waits_while_another_thread_holds_the_device_quiet(make_engine):
    loop = make_engine().loop
    commands, reports = queue.Queue(), []

    def receive(timeout):
        try:
            return commands.get(timeout=timeout) if timeout else commands.get_nowait()
        except queue.Empty:
            return None

    thread = threading.Thread(target=service.serve, args=(loop, receive, reports.append))
    thread.start()
    with loop.executor.worker.runner.cache.pool.quiet():
        commands.put(Submit([request("a", PROMPTS[0], greedy(20))]))
        time.sleep(0.3)
        assert not [report for report in reports if isinstance(report, Events)]
    while not any(
        event.finish_reason for report in list(reports) if isinstance(report, Events) for event in report.events
    ):
        time.sleep(0.01)
    commands.put(Stop())
    thread.join(PATIENCE)
    assert not thread.is_alive()
