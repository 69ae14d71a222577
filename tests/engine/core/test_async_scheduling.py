"""Async scheduling: every request gets the same results as without it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from engine import Engine, EngineConfig, SamplingParams
from engine.core.loop import EngineLoop
from engine.errors import PromptTooLong
from engine.loader.weights import iterate_safetensors
from engine.protocol.request import TokenEvent
from graph_cache.core.host_ring import HostRing
from tests.engine.core.test_loop import ARRIVALS, SMALL, prompt_of
from tests.engine.lively import MANY, PROMPTS, SETTINGS, drain, greedy, request, tokens
from tests.support.waiting import PATIENCE

SAMPLING_PARAMS = (
    greedy(12), greedy(1), greedy(40, frequency_penalty=0.5), greedy(25, prompt_logprobs=0, logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=1), SamplingParams(max_tokens=20, temperature=1.5, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, min_tokens=5, presence_penalty=0.7),
    SamplingParams(max_tokens=45, temperature=3.0, stop_token_ids=tuple(range(100, 160)), min_tokens=3),
    SamplingParams(max_tokens=45, temperature=3.0, stop_token_ids=tuple(range(100, 160)), repetition_penalty=1.3),
    greedy(30, structured_outputs={"json": {"type": "array", "items": {"enum": ["a", "red"]}, "maxItems": 3}}),
    SamplingParams(max_tokens=40, temperature=1.5, logprobs=1, structured_outputs={"regex": "[a-z ]{3,25}[.]"}),
    SamplingParams(max_tokens=40, top_p=0.9, presence_penalty=0.5, min_tokens=4,
                   structured_outputs={"choice": ["red", "red fox", "blue river under the moon"]}),
)  # fmt: skip


@pytest.fixture
def async_loop(make_engine):
    """A factory of loops with async scheduling and the given settings."""

    def make(**options) -> EngineLoop:
        return make_engine(**({"async_scheduling": True} | options)).loop

    return make


# ---- the same results ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["prefixes cached", "no prefix cache"])
def pair(lively_model, request):
    """The loops of two engines with few pages, without and with async scheduling."""
    base = {"model": str(lively_model)} | SETTINGS | SMALL | {"max_num_batched_tokens": 16}
    engines = [
        Engine(EngineConfig(**base, enable_prefix_caching=request.param, async_scheduling=behind))
        for behind in (False, True)
    ]
    for engine in engines:  # else a request's first step depends on when its grammar is compiled
        for params in SAMPLING_PARAMS:
            if params.structured_outputs is not None:
                engine.loop.constraints.compile(params).result(PATIENCE)
    yield [engine.loop for engine in engines]
    for engine in engines:
        engine.close()


def run_workload(loop: EngineLoop, arrivals) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    plan = [
        (arrives, request(f"{i}", prompt_of(i, length, shared), SAMPLING_PARAMS[kind], priority), abort)
        for i, (kind, length, arrives, abort, priority, shared) in enumerate(arrivals)
    ]
    for step in itertools.count():
        for arrives, asked, abort in plan:
            if arrives == step:
                try:
                    loop.add(asked)
                except PromptTooLong:
                    pass
            if abort == step:
                loop.abort([asked.request_id])
        for event in loop.step():
            own = events.setdefault(event.request_id, [])
            assert not own or own[-1].finish_reason is None
            own.append(event)
        loop.scheduler.check()
        if step > 60 and not loop.has_work:
            break
        assert step < 5000
    loop.idle_check()
    return events


def scores(entries) -> list:
    return [
        entry
        if entry is None
        else (
            entry.token_id,
            pytest.approx(entry.logprob, abs=1e-3),
            list(entry.top),
            pytest.approx(list(entry.top.values()), abs=1e-3),
        )
        for entry in entries
    ]


def plain(entries) -> list:
    return [
        entry if entry is None else (entry.token_id, entry.logprob, list(entry.top), list(entry.top.values()))
        for entry in entries
    ]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS.map(lambda rows: [(row[0] % len(SAMPLING_PARAMS), *row[1:]) for row in rows]))
def test_any_workload_gives_the_same_results_as_without_async_scheduling(pair, arrivals):
    synchronous, asynchronous = (run_workload(loop, arrivals) for loop in pair)
    assert synchronous.keys() == asynchronous.keys()
    for name, expected in synchronous.items():
        found = asynchronous[name]
        if "abort" in (expected[-1].finish_reason, found[-1].finish_reason):
            count = min(len(tokens(expected)), len(tokens(found)))
            assert tokens(found)[:count] == tokens(expected)[:count]
            continue
        assert tokens(found) == tokens(expected)
        assert len(found) == len(expected)
        last, wanted = found[-1], expected[-1]
        assert (last.finish_reason, last.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        for one, other in zip(found, expected, strict=True):
            assert plain(one.logprobs or []) == scores(other.logprobs or [])
            assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
            assert plain(one.prompt_logprobs or []) == scores(other.prompt_logprobs or [])


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_every_scope_feeds_its_tokens_back_on_the_device(async_loop, reference, scope):
    loop = async_loop(inference_cuda_graph_scope=scope, graph_buckets=(1, 2, 4, 8))
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, greedy(20 - 4 * i)))
    events = drain(loop)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(events[f"{i}"]) == reference.greedy(prompt, 20 - 4 * i)


def test_events_come_in_the_same_order_with_the_same_bucket(make_engine):
    found = []
    for behind in (False, True):
        loop = make_engine(async_scheduling=behind).loop
        for i, prompt in enumerate(MANY):
            loop.add(request(f"{i}", prompt, greedy(9)))
        events = []
        while loop.has_work:
            events += [(event.request_id, event.token_ids, event.graph_bucket) for event in loop.step()]
        found.append(events)
    assert found[0] == found[1] and len(found[0]) == 72


# ---- async scheduling ------------------------------------------------------------------------------------------------


def outputs_of(loop, monkeypatch):
    """Return a list that grows by the output of each step that the loop enqueues from now on."""
    outputs, execute = [], loop.executor.worker.runner.execute
    monkeypatch.setattr(
        loop.executor.worker.runner, "execute", lambda batch: (outputs.append(execute(batch)), outputs[-1])[1]
    )
    return outputs


def test_a_first_token_has_no_bucket_beside_a_prompt_that_was_aborted(async_loop):
    loop = async_loop()
    loop.add(request("running", MANY[0], greedy(40)))
    for _ in range(4):
        loop.step()
    for name in ("aborted", "kept"):
        loop.add(request(name, MANY[1], greedy(2)))
    loop.step()  # enqueues both prompts
    loop.abort(["aborted"])
    events = drain(loop)
    assert events["kept"][0].graph_bucket is None and events["running"][-1].graph_bucket is not None


def test_a_step_is_enqueued_before_the_one_before_it_is_read(async_loop, reference, monkeypatch):
    loop = async_loop()
    outputs = outputs_of(loop, monkeypatch)
    loop.add(request("a", PROMPTS[0], greedy(5)))
    given = []
    while loop.has_work:
        given.append([token for event in loop.step() for token in event.token_ids])
        assert [output.is_read for output in outputs] == [True] * (len(outputs) - 1) + [not loop.has_work]
    assert given == [[], *([token] for token in reference.greedy(PROMPTS[0], 5))]


def test_no_request_computes_a_token_beyond_its_limit(async_loop):
    loop = async_loop()
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, greedy(i)))
    drain(loop)
    # Decodes: one fewer than max_tokens, as the prefill gives the first token; the one-token prompt has no prefill.
    assert dict(loop.stats().graphs["real_tokens"])["decode",] == (1 + 0) + 1 + 2 + 3
    assert loop.stats().generation_tokens == sum(range(5))


def test_a_steady_batch_sends_nothing_but_new_pages(async_loop, monkeypatch):
    loop = async_loop()
    for i, prompt in enumerate(MANY):
        loop.add(request(f"{i}", prompt, greedy(40)))
    sent = []
    copy = torch.Tensor.index_copy_
    monkeypatch.setattr(
        torch.Tensor,
        "index_copy_",
        lambda self, *rest: (
            sent.append(len(rest[1])) if self is loop.executor.worker.runner.buffers["state"] else None,
            copy(self, *rest),
        )[1],
    )
    for _ in range(30):
        loop.step()
    # The first decode uploads rows, positions and pages; a page holds 16 tokens and the prompts have 3.
    assert sent == [8 + 8 + 8, 8]
    drain(loop)


def test_slot_and_pages_are_reused_while_a_step_of_the_stopped_request_runs(async_loop, reference):
    prompt, long = PROMPTS[0], list(range(3, 40))
    stop = reference.greedy(prompt, 6)[-1]
    loop = async_loop(max_num_seqs=1, graph_buckets=(1,), max_num_batched_tokens=64, num_pages=5)
    for turn in range(3):
        loop.add(request(f"stops-{turn}", prompt, greedy(50, stop_token_ids=(stop,), frequency_penalty=turn * 1e-9)))
        loop.add(request(f"next-{turn}", long, greedy(20)))
    events = drain(loop)
    for turn in range(3):
        assert tokens(events[f"stops-{turn}"]) == reference.greedy(prompt, 6)
        assert events[f"stops-{turn}"][-1].stop_reason == stop
        assert tokens(events[f"next-{turn}"]) == reference.greedy(long, 20)
    assert loop.stats().generation_tokens == 3 * 26


def test_a_token_in_flight_is_dropped_by_a_preemption_and_recomputed(async_loop, reference):
    loop = async_loop()
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, SamplingParams(max_tokens=20, temperature=1.0, presence_penalty=0.5)))
    expected = {name: tokens(own) for name, own in drain(loop).items()}
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, SamplingParams(max_tokens=20, temperature=1.0, presence_penalty=0.5)))
    events = {}
    for step in itertools.count():
        if step in (1, 2, 5, 9):
            loop.scheduler.preempt_all()
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        if not loop.has_work:
            break
    assert {name: tokens(own) for name, own in events.items()} == expected


def test_a_capture_between_steps_does_not_change_the_step_in_flight(async_loop, reference):
    loop = async_loop(warmup="background", graph_buckets=(1, 2, 4, 8))
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, greedy(20)))
    events = {}
    while loop.has_work:
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        loop.executor.worker.runner.cache.warm_next()
    assert [tokens(events[f"{i}"]) for i in range(5)] == [reference.greedy(prompt, 20) for prompt in PROMPTS]
    captures = dict(loop.stats().graphs["captures"])
    assert captures["decode", "block", "background"] == 4


# ---- new weights, failures and interruptions -----------------------------------------------------------------------


def test_tokens_in_flight_keep_the_weight_version_that_computed_them(
    async_loop, reference, other_reference, other_model
):
    loop = async_loop()
    prompt = list(range(3, 53))
    loop.add(request("a", prompt, greedy(20)))
    events = [event for _ in range(8) for event in loop.step()]
    assert len(events) == 7
    loop.update_weights(iterate_safetensors(other_model), "second")
    events += drain(loop)["a"]
    assert tokens(events)[:8] == reference.greedy(prompt, 8)
    assert tokens(events)[8:] == other_reference.greedy([*prompt, *tokens(events)[:8]], 12)
    assert [event.weight_version for event in events] == ["initial"] * 8 + ["second"] * 12


def test_a_failed_step_keeps_the_results_of_the_step_before_it(async_loop, reference, monkeypatch):
    loop = async_loop(max_num_batched_tokens=16)
    loop.add(request("a", PROMPTS[0], greedy(20)))
    events = [event for _ in range(4) for event in loop.step()]
    loop.add(request("late", list(range(3, 40)), greedy(5)))  # admitted by the step that fails
    execute = loop.executor.worker.runner.execute
    with monkeypatch.context() as patch:
        patch.setattr(loop.executor.worker.runner, "execute", lambda batch: (execute(batch), 1 / 0))
        events += loop.step()
    assert tokens(events) == reference.greedy(PROMPTS[0], 4)
    ends = [event for event in events if event.finish_reason]
    assert [(event.request_id, event.finish_reason) for event in ends] == [("a", "error"), ("late", "error")]
    assert "ZeroDivisionError" in ends[0].error and not loop.has_work
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, greedy(9)))
    found = drain(loop)
    assert [tokens(found[f"{i}"]) for i in range(5)] == [reference.greedy(prompt, 9) for prompt in PROMPTS]


def test_an_unreadable_result_fails_its_step_and_no_other(async_loop, reference, monkeypatch):
    loop = async_loop()
    outputs = outputs_of(loop, monkeypatch)
    loop.add(request("a", PROMPTS[0], greedy(20)))
    events = [event for _ in range(4) for event in loop.step()]
    loop.add(request("b", PROMPTS[2], greedy(20)))
    for ticket in outputs[-1].tickets:
        ticket.read()  # a ticket is read once: the loop's own read fails
    for own in drain(loop).values():
        events += own
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"a": "error", "b": "length"}
    assert tokens(event for event in events if event.request_id == "a") == reference.greedy(PROMPTS[0], 3)
    assert tokens(event for event in events if event.request_id == "b") == reference.greedy(PROMPTS[2], 20)


@pytest.mark.parametrize("where", ["before execute", "after execute"])
def test_an_interruption_of_a_step_loses_no_token_and_repeats_none(async_loop, reference, monkeypatch, where):
    loop = async_loop()
    for i, prompt in enumerate(PROMPTS):
        loop.add(request(f"{i}", prompt, greedy(20, presence_penalty=1e-9)))
    events = [event for _ in range(6) for event in loop.step()]
    execute = loop.executor.worker.runner.execute

    def interrupted(batch):
        if where == "after execute":
            execute(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.executor.worker.runner, "execute", interrupted)
        loop.step()
    for own in drain(loop).values():
        events += own
    for i, prompt in enumerate(PROMPTS):
        assert tokens(event for event in events if event.request_id == f"{i}") == reference.greedy(prompt, 20)


def test_an_interruption_between_the_results_of_a_step_loses_no_token(async_loop, reference, monkeypatch):
    loop = async_loop()
    loop.add(request("a", PROMPTS[0], greedy(20)))
    events = [event for _ in range(3) for event in loop.step()]
    loop.add(request("b", PROMPTS[2], greedy(20)))
    events += loop.step()  # a step with a decode and a prefill is in flight
    read, calls = HostRing.read, itertools.count()

    def interrupted(ring, ticket):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return read(ring, ticket)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostRing, "read", interrupted)
        loop.step()
    for own in drain(loop).values():
        events += own
    for name, prompt in (("a", PROMPTS[0]), ("b", PROMPTS[2])):
        assert tokens(event for event in events if event.request_id == name) == reference.greedy(prompt, 20)


@pytest.mark.parametrize("end", ["abort", "preemption"])
def test_a_prefill_that_ends_early_leaves_no_nan_for_the_next_request(async_loop, reference, end):
    small = {"max_num_seqs": 1, "graph_buckets": (1,), "max_num_batched_tokens": 8, "max_model_len": 48}
    loop = async_loop(num_pages=4, enable_prefix_caching=False, **small)
    loop.executor.worker.runner.model.embedding.weight.data[319] = float("nan")
    loop.add(request("a", [319, *range(2, 22)], greedy(4)))
    loop.step()  # the first chunk writes NaN to a page, and no token is sampled
    if end == "abort":
        loop.abort(["a"])
    loop.add(request("b", PROMPTS[0], greedy(20), priority=-1))
    events = drain(loop)
    assert tokens(events["b"]) == reference.greedy(PROMPTS[0], 20)
    assert events["a"][-1].finish_reason == ("abort" if end == "abort" else "error")


def test_an_interrupted_weight_update_changes_no_weights(async_loop, reference, other_model, monkeypatch):
    loop = async_loop()
    loop.add(request("a", PROMPTS[0], greedy(20)))
    events = [event for _ in range(4) for event in loop.step()]

    def interrupted(ring, ticket):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostRing, "read", interrupted)
        loop.update_weights(iterate_safetensors(other_model), "v2")
    events += drain(loop)["a"]
    assert tokens(events) == reference.greedy(PROMPTS[0], 20)
    assert loop.weight_version == events[-1].weight_version != "v2"


def test_a_request_with_nan_logits_fails_while_its_next_step_runs_and_leaves_clean_pages(async_loop, reference):
    loop = async_loop(num_pages=12, enable_prefix_caching=False)
    loop.add(request("a", PROMPTS[0], greedy(20)))
    events = [event for _ in range(5) for event in loop.step()]
    weight = loop.executor.worker.runner.model.layers[0].input_norm.weight
    kept = weight.clone()
    weight.data.fill_(float("nan"))
    while not events[-1].finish_reason:
        events += loop.step()
    assert tokens(events) == reference.greedy(PROMPTS[0], 5)
    assert events[-1].finish_reason == "error" and "not finite" in events[-1].error
    weight.data.copy_(kept)
    loop.steps.drain()
    assert all(
        torch.isfinite(pages).all() for pages in (*loop.executor.worker.runner.kv.k, *loop.executor.worker.runner.kv.v)
    )
    loop.add(request("b", PROMPTS[2], greedy(20)))
    assert tokens(drain(loop)["b"]) == reference.greedy(PROMPTS[2], 20)
