"""The loop: every accepted request ends once, with its own tokens, and frees its slot and pages."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Engine, SamplingParams
from engine.core.service import serve
from engine.errors import PromptTooLong, RequestError
from engine.protocol.messages import Dead, Events, Stop, Submit
from tests.engine.lively import MANY, PROMPTS, drain, greedy, request, tokens

SMALL = {"num_pages": 16, "page_size": 4, "max_model_len": 128}  # 60 tokens of KV for 8 sequences


# ---- prefix caching ------------------------------------------------------------------------------------------------


def test_a_second_request_finds_the_prompt_in_the_cache_and_gives_the_same_tokens(make_engine, reference):
    engine = make_engine()
    prompt = list(range(3, 53))  # three full pages of 16 and two tokens
    first, second = (engine.generate(prompt_token_ids=prompt, sampling_params=greedy(20))[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids == reference.greedy(prompt, 20)
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prompt_tokens) == (100, 48, 100)


def test_an_answer_is_cached_for_the_conversation_that_follows(make_engine, reference):
    engine = make_engine()
    prompt = list(range(3, 13))
    answer = engine.generate(prompt_token_ids=prompt, sampling_params=greedy(40))[0].token_ids
    longer = [*prompt, *answer, 7, 7]
    output = engine.generate(prompt_token_ids=longer, sampling_params=greedy(20))[0]
    assert output.cached_tokens == 48  # of 49 tokens with stored KV: the last sampled token has none
    assert output.token_ids == reference.greedy(longer, 20)


def test_a_prompt_that_is_cached_whole_still_computes_a_token(make_engine, reference):
    engine = make_engine()
    prompt = list(range(3, 35))
    outputs = [engine.generate(prompt_token_ids=prompt, sampling_params=greedy(5))[0] for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 16]
    assert outputs[1].token_ids == reference.greedy(prompt, 5)


def test_prompt_logprobs_are_computed_though_the_prompt_is_cached(make_engine):
    engine = make_engine()
    prompt = list(range(3, 53))
    first, second = (
        engine.generate(prompt_token_ids=prompt, sampling_params=greedy(2, prompt_logprobs=0))[0] for _ in range(2)
    )
    assert second.cached_tokens == 0
    assert second.prompt_logprobs == first.prompt_logprobs and len(first.prompt_logprobs) == 50


def test_without_prefix_caching_nothing_is_found(make_engine, reference):
    engine = make_engine(enable_prefix_caching=False)
    prompt = list(range(3, 53))
    outputs = [engine.generate(prompt_token_ids=prompt, sampling_params=greedy(9))[0] for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 9)] * 2
    assert engine.stats().prefix_cache_queries == 0


# ---- preemption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_with_few_pages_requests_are_preempted_and_give_the_same_tokens(make_engine, reference, prefix_caching):
    engine = make_engine(**SMALL, enable_prefix_caching=prefix_caching)
    outputs = engine.generate(prompt_token_ids=MANY, sampling_params=greedy(50))
    assert engine.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 50) for prompt in MANY]
    assert engine.stats().generation_tokens == 400 and engine.stats().prompt_tokens == 24


def test_sampling_is_unchanged_by_a_preemption(make_engine):
    options = [
        {},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.3, "top_p": 0.9},
        {"min_tokens": 30},
        {"logprobs": 1},
    ]
    params = [SamplingParams(max_tokens=40, temperature=1.2, seed=i, **options[i % len(options)]) for i in range(8)]
    small, roomy = make_engine(**SMALL), make_engine()
    found, expected = (engine.generate(prompt_token_ids=MANY, sampling_params=params) for engine in (small, roomy))
    assert small.stats().num_preemptions > 0 == roomy.stats().num_preemptions
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.finish_reason for output in found] == [output.finish_reason for output in expected]


@pytest.mark.parametrize("at", [1, 3, 5, 9])
def test_prompt_logprobs_come_once_and_whole_though_the_request_was_preempted(make_engine, reference, at):
    loop = make_engine(max_num_batched_tokens=8).loop
    prompt = list(range(3, 43))  # five steps of prefill
    loop.add(request("a", prompt, greedy(12, prompt_logprobs=0)))
    events = []
    for _ in range(at):
        events += loop.step()
    [sent_back] = loop.scheduler.preempt_all()
    assert sent_back.request_id == "a" and loop.stats().kv_cache_usage == 0
    events += drain(loop)["a"]
    scores = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert len(scores) == 1 and events[0].prompt_logprobs is scores[0]
    rows = reference.logprobs(prompt)
    assert [entry.logprob for entry in scores[0][1:]] == pytest.approx(
        [rows[i, token].item() for i, token in enumerate(prompt[1:])], abs=1e-3
    )
    assert tokens(events) == reference.greedy(prompt, 12)


def test_an_urgent_request_overtakes_and_no_request_is_lost(make_engine, reference):
    loop = make_engine(max_num_seqs=1, max_num_batched_tokens=64, graph_buckets=(1,)).loop
    loop.add(request("patient", PROMPTS[0], greedy(20), priority=1))
    first = loop.step()
    loop.add(request("urgent", PROMPTS[1], greedy(5), priority=0))
    order, events = [], {"patient": first}
    while loop.has_work:
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
            order += [event.request_id] if event.finish_reason else []
    assert order == ["urgent", "patient"]
    assert tokens(events["patient"]) == reference.greedy(PROMPTS[0], 20)
    assert tokens(events["urgent"]) == reference.greedy(PROMPTS[1], 5)


# ---- refusals and aborts -------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_rejected_and_the_others_continue(make_engine, reference):
    engine = make_engine(**SMALL)
    loop = engine.loop
    loop.submit(
        [
            request("good", PROMPTS[0], greedy(9)),
            request("pages", [5] * 30, greedy(60)),
            request("context", [5] * 128, greedy(1)),
            request("vocabulary", [320], greedy(1)),
            request("empty", [], greedy(1)),
            request("good", PROMPTS[1], greedy(1)),
        ]
    )
    events = {}
    for event in loop.step():
        events.setdefault(event.request_id, []).append(event)
    refused = {name: events[name][0] for name in ("pages", "context", "vocabulary", "empty")}
    assert all(event.finish_reason == "error" and event.error for event in refused.values())
    assert isinstance(refused["pages"].refusal, PromptTooLong) and "60" in refused["pages"].error
    assert isinstance(refused["context"].refusal, PromptTooLong)
    with pytest.raises(PromptTooLong):
        engine.generate(prompt_token_ids=[PROMPTS[0], [5] * 30], sampling_params=greedy(60))
    loop.abort(["good"])


def test_a_refused_call_leaves_a_running_request_alone(make_engine, reference):
    loop = make_engine().loop
    loop.add(request("a", PROMPTS[0], greedy(9)))
    head = loop.step()
    with pytest.raises(RequestError, match="in use"):
        loop.add(request("a", PROMPTS[1], greedy(9)))
    assert tokens(head + drain(loop)["a"]) == reference.greedy(PROMPTS[0], 9)


def test_without_max_tokens_a_request_ends_where_the_pages_end(make_engine, reference):
    output = make_engine(**SMALL).generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(None))[0]
    assert output.finish_reason == "length"
    assert len(PROMPTS[0]) + len(output.token_ids) == 61  # 15 pages of 4, and the last token's KV is never stored
    assert output.token_ids == reference.greedy(PROMPTS[0], 56)


def test_parameters_that_leave_no_token_are_refused_before_they_fail_a_batch(make_engine, reference):
    loop = make_engine().loop
    loop.submit(
        [
            request("good", PROMPTS[0], greedy(9)),
            request("bad", PROMPTS[1], SamplingParams(min_tokens=2, stop_token_ids=tuple(range(320)))),
        ]
    )
    events = drain(loop)
    assert events["bad"][-1].finish_reason == "error" and "whole vocabulary" in events["bad"][-1].error
    assert tokens(events["good"]) == reference.greedy(PROMPTS[0], 9)


@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_an_abort_frees_pages_and_slot_and_the_others_continue(make_engine, reference, at):
    loop = make_engine(max_num_batched_tokens=16).loop
    loop.add(request("long", list(range(3, 43)), greedy(50, frequency_penalty=0.5)))
    loop.add(request("other", PROMPTS[0], greedy(15)))
    events = drain(loop, {at: ["long", "unknown"]})
    assert events["long"][-1].finish_reason == "abort"
    assert tokens(events["other"]) == reference.greedy(PROMPTS[0], 15)
    stats = loop.stats()
    assert stats.kv_cache_usage == 0 and stats.ended == {"abort": 1, "length": 1}
    loop.idle_check()
    loop.add(request("next", PROMPTS[1], greedy(9)))  # in the slot of the aborted request
    assert tokens(drain(loop)["next"]) == reference.greedy(PROMPTS[1], 9)


def test_a_preempted_request_can_be_aborted(make_engine):
    loop = make_engine().loop
    loop.add(request("a", PROMPTS[0], greedy(50, logprobs=1)))
    loop.step()
    loop.scheduler.preempt_all()
    loop.abort(["a"])
    [event] = loop.step()
    assert event.finish_reason == "abort"
    loop.idle_check()


def test_a_reused_slot_drops_the_last_requests_parameters(make_engine, reference):
    loop = make_engine(max_num_seqs=1, max_num_batched_tokens=64, graph_buckets=(1,)).loop
    for name, params in (
        ("bias", greedy(5, logit_bias={7: 100.0})),
        ("noise", greedy(5, temperature=5.0)),
        ("logprobs", greedy(5, logprobs=3)),
        ("penalty", greedy(5, presence_penalty=2.0)),
    ):
        loop.add(request(name, PROMPTS[0], params))
        drain(loop)
        loop.add(request("plain", PROMPTS[0], greedy(12)))
        events = drain(loop)["plain"]
        assert tokens(events) == reference.greedy(PROMPTS[0], 12)
        assert all(event.logprobs is None for event in events)


# ---- a random workload ---------------------------------------------------------------------------------------------

SAMPLING_PARAMS = (
    greedy(12), greedy(1), greedy(40, frequency_penalty=0.5), greedy(25, prompt_logprobs=0, logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=1), SamplingParams(max_tokens=20, temperature=1.5),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, min_tokens=5), greedy(None),
    SamplingParams(max_tokens=45, temperature=3.0, stop_token_ids=tuple(range(100, 160))),
)  # fmt: skip
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, len(SAMPLING_PARAMS) - 1), st.sampled_from([1, 2, 3, 4, 5, 8, 13, 30, 56]),  # params, length
        st.integers(0, 40), st.none() | st.integers(0, 60), st.integers(0, 2),  # arrival step, abort step, priority
        st.booleans(),  # shares the prefix
    ), min_size=1, max_size=14,
)  # fmt: skip


@pytest.fixture(scope="module")
def crowded(lively_model):
    """A small engine for all examples, and one with enough pages that runs each request alone."""
    from engine import EngineConfig
    from tests.engine.lively import SETTINGS

    small, roomy = (
        Engine(EngineConfig(**({"model": str(lively_model)} | SETTINGS | more)))
        for more in (SMALL | {"max_num_batched_tokens": 16}, {"max_model_len": 61})
    )
    yield small, roomy, {}
    small.close()
    roomy.close()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS)
def test_any_workload_ends_idle_with_the_tokens_of_each_request_alone(crowded, arrivals):
    small, roomy, alone = crowded
    loop, accepted, ended, texts = small.loop, set(), Counter(), {}
    plan = [
        (arrives, f"{i}-{kind}-{length}", kind, prompt_of(i, length, shared), abort, priority)
        for i, (kind, length, arrives, abort, priority, shared) in enumerate(arrivals)
    ]
    for step in itertools.count():
        for arrives, name, kind, prompt, _, priority in plan:
            if arrives == step:
                try:
                    loop.add(request(name, prompt, SAMPLING_PARAMS[kind], priority))
                    accepted.add(name)
                except PromptTooLong:
                    assert len(prompt) + (SAMPLING_PARAMS[kind].max_tokens or 1) > 61
        loop.abort([name for _, name, _, _, abort, _ in plan if abort == step])
        for event in loop.step():
            assert not ended[event.request_id]
            texts.setdefault(event.request_id, []).extend(event.token_ids)
            ended[event.request_id] += event.finish_reason is not None
            assert event.finish_reason != "error", event.error
            if event.finish_reason == "abort":
                texts.pop(event.request_id)
        loop.scheduler.check()
        if step > 60 and not loop.has_work:
            break
        assert step < 5000
    loop.idle_check()
    assert loop.stats().kv_cache_usage == 0
    assert ended == Counter(dict.fromkeys(accepted, 1))
    for _, name, kind, prompt, _, _ in plan:
        if name in texts:
            key = (kind, tuple(prompt))
            if key not in alone:
                roomy.loop.add(request("alone", prompt, SAMPLING_PARAMS[kind]))
                alone[key] = tokens(drain(roomy.loop)["alone"])
            assert texts[name] == alone[key]


def prompt_of(index: int, length: int, shared: bool) -> list[int]:
    return [(i if shared else 31 * index + 7 * i) % 300 + 5 for i in range(length)]


# ---- the graph manifest --------------------------------------------------------------------------------------------


def test_a_manifest_that_cant_be_written_is_one_warning_and_the_loop_serves_on(
    make_engine, reference, tmp_path, monkeypatch, caplog
):
    cache = tmp_path / "cache"
    cache.write_text("a file where the cache folder should be")
    monkeypatch.setenv("ENCORE_CACHE", str(cache))
    monkeypatch.setattr("engine.core.service.MANIFEST_SECONDS", 0.0)
    engine = make_engine(graph_manifest=None)
    loop, reports, turns = engine.loop, [], itertools.count()

    def receive(timeout):  # each turn without work saves; a request comes between two of them
        turn = next(turns)
        return Submit([request("a", PROMPTS[0], greedy(5))]) if turn == 3 else Stop() if turn == 20 else None

    with caplog.at_level("WARNING"):
        serve(loop, receive, reports.append)
        engine.close()
    events = [event for report in reports if isinstance(report, Events) for event in report.events]
    assert [token for event in events for token in event.token_ids] == reference.greedy(PROMPTS[0], 5)
    assert reports[-1] == Dead("")
    warnings = [record.getMessage() for record in caplog.records if "was not saved" in record.getMessage()]
    assert len(warnings) == 1 and str(cache) in warnings[0]


def test_a_manifest_that_can_be_written_again_is_saved_and_a_later_failure_is_told(
    make_engine, tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "folder"
    folder.write_text("a file")
    engine = make_engine(graph_manifest=str(folder / "manifest.json"))
    engine.loop.save_manifest()
    folder.unlink()
    engine.loop.save_manifest()
    assert (folder / "manifest.json").exists()
    shutil.rmtree(folder)
    folder.write_text("a file")
    engine.loop.save_manifest()
    assert sum("was not saved" in record.getMessage() for record in caplog.records) == 2


def test_a_request_of_an_embedding_caller_uses_weights_that_moved(make_engine):
    """The caller steps the loop itself, and no step ends between the move and the next request."""
    engine, other = make_engine(enable_prefix_caching=False), make_engine(enable_prefix_caching=False)
    engine.warm()
    engine.loop.add(request("before", PROMPTS[0], greedy(8)))
    drain(engine.loop)
    for parameter in engine.loop.executor.worker.runner.model.module.parameters():
        parameter.data = parameter.data * 1.5
    for parameter in other.loop.executor.worker.runner.model.module.parameters():
        parameter.data.mul_(1.5)
    for each in (engine, other):
        each.loop.add(request("after", PROMPTS[0], greedy(8)))
    found, expected = (tokens(drain(each.loop)["after"]) for each in (engine, other))
    assert found == expected
    assert sum(engine.loop.executor.worker.runner.cache.stats.invalidations.values())
