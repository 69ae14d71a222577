"""Pause, resume, abort and weight versions: what runs, what is kept, and which weights produced which token."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch
from transformers import DynamicCache

from engine.errors import EnginePaused, RequestError
from engine.protocol.outputs import CompletionOutput, OutputDelta, WeightSpan
from tests.engine.lively import PROMPTS, drain, greedy, request, tokens
from tests.support.waiting import PATIENCE

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
LONG = {"max_model_len": 1024}


@pytest.fixture
def paused_loop(make_engine):
    def make(**settings):
        return make_engine(**settings).loop

    return make


def steps(loop, count):
    return [event for _ in range(count) for event in loop.step()]


def named(events, name):
    return [event for event in events if event.request_id == name]


def delta_of(event):
    name = event.request_id
    return OutputDelta(request_id=name, child_id=name, token_ids=event.token_ids, weight_version=event.weight_version)


def follows(reference, prompt, output, start=0):
    """Return whether each token from `start` on is the reference's most likely one after those before it."""
    logits = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return bool((chosen[start:] >= logits.max(dim=1).values[start:] - 1e-3).all())


# ---- spans ---------------------------------------------------------------------------------------------------------


def test_spans_join_tokens_of_one_version_and_skip_deltas_without_tokens():
    output = CompletionOutput(index=0)
    for ids, version in (([1], "a"), ([2, 3], "a"), ([4], "b"), ([], "c"), ([5], "a")):
        output.add(OutputDelta(request_id="r", child_id="r", token_ids=ids, weight_version=version))
    assert output.weight_versions == [("a", 0, 3), ("b", 3, 4), ("a", 4, 5)]
    assert output.weight_versions[0] == WeightSpan(version="a", start=0, end=3) and output.token_ids == [1, 2, 3, 4, 5]


def test_an_engine_says_which_weights_produced_each_output(make_engine, weights):
    engine = make_engine()
    before = engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(5, n=2))
    engine.update_weights(weights["b"], version="b")
    [after] = engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(5))
    assert [one.weight_versions for one in before[0].outputs] == [[("initial", 0, 5)]] * 2
    assert after.weight_versions == [("b", 0, 5)] and before[0].weight_versions == [("initial", 0, 5)]


# ---- modes ---------------------------------------------------------------------------------------------------------


@BOTH
def test_keep_freezes_requests_which_go_on_where_they_were(paused_loop, reference, async_scheduling):
    loop = paused_loop(async_scheduling=async_scheduling)
    loop.add(request("r", PROMPTS[0], greedy(24)))
    events = steps(loop, 6)
    loop.pause("keep")
    events += loop.step()  # of the steps in flight
    assert not loop.can_step and loop.has_work and loop.pause_mode == "keep"
    pages = loop.scheduler.pool.num_in_use
    loop.add(request("new", PROMPTS[1], greedy(8)))
    assert steps(loop, 3) == [] and loop.stats().num_waiting == 1 and loop.stats().pause == "keep"
    assert loop.scheduler.pool.num_in_use == pages > 0 and loop.scheduler.num_running == 1
    loop.resume()
    rest = drain(loop)
    assert loop.scheduler.num_preemptions == 0
    assert tokens(events + rest["r"]) == reference.greedy(PROMPTS[0], 24)
    assert tokens(rest["new"]) == reference.greedy(PROMPTS[1], 8)


@BOTH
def test_an_update_while_frozen_recomputes_the_kv_under_the_new_weights(
    paused_loop, reference, other_reference, weights, async_scheduling
):
    loop = paused_loop(async_scheduling=async_scheduling)
    loop.add(request("r", PROMPTS[2], greedy(30)))
    events = steps(loop, 9)
    loop.pause("keep")
    loop.update_weights(weights["b"].items(), "b")
    loop.resume()
    events += drain(loop)["r"]
    output = CompletionOutput(index=0)
    for event in events:
        output.add(delta_of(event))
    first, second = output.weight_versions
    assert first.version == "initial" and second == ("b", first.end, 30) and 5 < first.end < 12
    assert output.token_ids[: first.end] == reference.greedy(PROMPTS[2], first.end)
    rest = other_reference.greedy([*PROMPTS[2], *output.token_ids[: first.end]], 30 - first.end)
    assert output.token_ids[first.end :] == rest


@BOTH
def test_long_streams_go_on_one_by_one_and_follow_from_the_new_weights_alone(
    paused_loop, other_reference, weights, async_scheduling
):
    loop = paused_loop(async_scheduling=async_scheduling, max_num_batched_tokens=4096, **LONG)
    generator = random.Random(1)
    prompts = {f"r{index}": [generator.randrange(20, 300) for _ in range(500)] for index in range(4)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt, greedy(24, logprobs=0)))
    events = steps(loop, 8)
    loop.update_weights(weights["b"].items(), "b")
    events += loop.take_events()
    outputs, logprobs, first_steps = (
        {name: CompletionOutput(index=0) for name in prompts},
        {name: [] for name in prompts},
        {},
    )
    for number in itertools.count():
        for event in events:
            outputs[event.request_id].add(delta_of(event))
            logprobs[event.request_id] += [entry.logprob for entry in event.logprobs or ()]
            if event.weight_version == "b" and event.token_ids:
                first_steps.setdefault(event.request_id, number)
        if not loop.has_work:
            break
        events = loop.step()
    assert list(first_steps) == list(prompts) and len(set(first_steps.values())) > 1, first_steps
    for name, prompt in prompts.items():
        first, second = outputs[name].weight_versions
        assert (first.version, second) == ("initial", ("b", first.end, 24)) and first.end >= 6
        ids = [*prompt, *outputs[name].token_ids]
        expected = other_reference.logprobs(ids)[len(prompt) - 1 : -1][first.end :].amax(-1)
        assert follows(other_reference, prompt, outputs[name].token_ids, start=first.end)
        torch.testing.assert_close(torch.tensor(logprobs[name][first.end :]), expected, atol=1e-4, rtol=0)


@BOTH
@pytest.mark.parametrize("frozen", [False, True])
def test_kept_kv_of_old_weights_continues_under_the_new_ones(
    paused_loop, reference, other_reference, weights, async_scheduling, frozen
):
    loop = paused_loop(async_scheduling=async_scheduling, keep_stale_kv=True)
    loop.add(request("r", PROMPTS[2], greedy(30, logprobs=0)))
    events = steps(loop, 9)
    if frozen:
        loop.pause("keep")
    loop.add(request("new", PROMPTS[2], greedy(8)))  # shares a prefix that has no KV of the new weights
    loop.update_weights(weights["b"].items(), "b")
    loop.resume()
    rest = drain(loop)
    output = CompletionOutput(index=0)
    for event in events + rest["r"]:
        output.add(delta_of(event))
    first, second = output.weight_versions
    assert (first.version, second) == ("initial", ("b", first.end, 30)) and 5 < first.end < 12
    assert loop.scheduler.num_preemptions == 0
    assert tokens(rest["new"]) == other_reference.greedy(PROMPTS[2], 8)

    known = torch.tensor([[*PROMPTS[2], *output.token_ids]])
    before = len(PROMPTS[2]) + first.end - 1  # tokens whose KV the old weights have computed
    cache = DynamicCache()
    with torch.inference_mode():
        reference.model(known[:, :before], cache=cache)
        logprobs = other_reference.model(known[:, before:-1], cache=cache).logits[0].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == output.token_ids[first.end :]
    found = [entry.logprob for event in events + rest["r"] for entry in event.logprobs][first.end :]
    torch.testing.assert_close(torch.tensor(found), logprobs.amax(-1), atol=1e-4, rtol=0)


@BOTH
def test_abort_ends_requests_with_what_they_have_and_refuses_new_ones(paused_loop, reference, async_scheduling):
    loop = paused_loop(async_scheduling=async_scheduling)
    loop.add(request("r", PROMPTS[0], greedy(24)))
    events = steps(loop, 6)
    loop.add(request("waiting", PROMPTS[1], greedy(8)))
    loop.pause("abort")
    events += loop.step()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"r": "abort", "waiting": "abort"} and not loop.has_work
    kept = tokens(named(events, "r"))
    assert 5 <= len(kept) <= 7 and kept == reference.greedy(PROMPTS[0], len(kept))
    with pytest.raises(EnginePaused, match="paused"):
        loop.add(request("new", PROMPTS[1], greedy(8)))
    loop.submit([request("new", PROMPTS[1], greedy(8))])
    [refused] = loop.step()
    assert refused.finish_reason == "error" and isinstance(refused.refusal, EnginePaused)
    loop.resume()
    loop.add(request("new", PROMPTS[1], greedy(8)))
    assert tokens(drain(loop)["new"]) == reference.greedy(PROMPTS[1], 8)


def test_wait_runs_requests_to_their_end_and_holds_new_ones(paused_loop, reference):
    loop = paused_loop(max_num_seqs=1, graph_buckets=(1,))
    loop.add(request("r", PROMPTS[0], greedy(12)))
    loop.add(request("queued", PROMPTS[1], greedy(4)))
    events = steps(loop, 3)
    loop.pause("wait")
    loop.add(request("new", PROMPTS[3], greedy(4)))
    while loop.can_step:
        assert loop.num_awaited() >= 0
        events += loop.step()
    assert {event.request_id for event in events if event.finish_reason == "length"} == {"r", "queued"}
    assert loop.num_awaited() == 0 and loop.has_work and not named(events, "new")
    loop.resume()
    assert tokens(drain(loop)["new"]) == reference.greedy(PROMPTS[3], 4)
    with pytest.raises(RequestError, match="ended or changed"):
        loop.num_awaited()


def test_a_pause_may_change_its_mode(paused_loop):
    loop = paused_loop()
    loop.add(request("r", PROMPTS[0], greedy(12)))
    steps(loop, 3)
    loop.pause("keep")
    loop.add(request("new", PROMPTS[1], greedy(4)))
    loop.pause("wait")
    while loop.can_step:
        events = loop.step()
    assert events[-1].request_id == "r" and events[-1].finish_reason == "length" and loop.has_work
    loop.pause("abort")
    assert [(one.request_id, one.finish_reason) for one in loop.step()] == [("new", "abort")] and not loop.has_work
    with pytest.raises(RequestError, match="'freeze' must be one of abort, wait, keep"):
        loop.pause("freeze")
    assert loop.pause_mode == "abort"
    loop.resume()
    loop.resume()
    assert loop.pause_mode is None


def test_requests_are_aborted_by_their_names_wherever_they_wait(paused_loop):
    loop = paused_loop(max_num_seqs=2, graph_buckets=(2,))
    for number, names in enumerate([("x", "group"), ("y", "group"), ("z",)]):
        one = request(f"0.{number}#0", PROMPTS[0], greedy(20))
        one.names = names
        loop.add(one)
    steps(loop, 2)
    loop.pause("keep")
    held = request("0.9#0", PROMPTS[0], greedy(20))
    held.names = ("group",)
    loop.add(held)
    assert loop.abort_requests(["unknown"]) == 0 and loop.abort_requests(["group"]) == 3
    ended = {one.request_id for one in loop.step() if one.finish_reason == "abort"}
    assert ended == {"0.0#0", "0.1#0", "0.9#0"}
    assert loop.abort_requests() == 1
    loop.resume()
    loop.step()


def test_a_grammar_that_is_compiled_during_a_pause_waits_for_its_end(paused_loop):
    loop = paused_loop()
    loop.add(request("g", PROMPTS[0], greedy(8, structured_outputs={"regex": "[a-z]{3,40}"})))
    loop.pause("keep")
    time.sleep(0.2)
    assert loop.step() == [] and loop.has_work and not loop.can_step
    loop.resume()
    assert len(tokens(drain(loop)["g"])) == 8


# ---- embedded engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_new_call_of_a_paused_engine_is_refused_not_blocked(make_engine, mode):
    engine = make_engine()
    engine.pause(mode)
    assert engine.is_paused
    with pytest.raises(EnginePaused, match="call resume"):
        engine.generate(prompt_token_ids=[[5, 6]], sampling_params=greedy(2))
    engine.resume()
    assert not engine.is_paused
    assert engine.generate(prompt_token_ids=[[5, 6]], sampling_params=greedy(2))[0].finish_reason == "length"


def test_another_thread_pauses_updates_and_resumes_a_running_call(make_engine, reference, other_reference, weights):
    engine = make_engine(**LONG)
    found = []
    call = threading.Thread(
        target=lambda: found.extend(engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(900)))
    )
    call.start()
    while engine.stats().generation_tokens < 20:
        time.sleep(0.001)
    engine.pause("keep")
    count = engine.stats().generation_tokens
    time.sleep(0.05)
    assert engine.stats().generation_tokens == count < 900
    engine.update_weights(weights["b"], version="b")
    engine.resume()
    call.join(PATIENCE)
    [output] = found
    assert output.weight_versions == [("initial", 0, count), ("b", count, 900)]
    assert follows(reference, PROMPTS[0], output.token_ids[:count])
    assert follows(other_reference, PROMPTS[0], output.token_ids, start=count)


def test_another_thread_aborts_a_running_call(make_engine):
    engine = make_engine(**LONG)
    found = []
    prompts = [PROMPTS[0], PROMPTS[1]]
    call = threading.Thread(
        target=lambda: found.extend(engine.generate(prompt_token_ids=prompts, sampling_params=greedy(900)))
    )
    call.start()
    while engine.stats().generation_tokens < 20:
        time.sleep(0.001)
    engine.pause("abort")
    call.join(PATIENCE)
    assert [one.finish_reason for one in found] == ["abort"] * 2 and min(len(one.token_ids) for one in found) >= 5
    engine.resume()


# ---- any order -----------------------------------------------------------------------------------------------------


@BOTH
def test_random_pauses_aborts_and_updates_leak_nothing_and_mix_no_weights(
    paused_loop, reference, other_reference, weights, async_scheduling
):
    """200 sequences of random calls per setting; afterwards each token follows from the weights that its span names."""
    loop = paused_loop(async_scheduling=async_scheduling, max_num_seqs=4, graph_buckets=(4,), num_pages=24)
    references = {"a": reference, "b": other_reference}
    loop.rename_weights("a0")
    prompts, outputs, ended, refused = {}, {}, set(), 0
    generator = random.Random(7)
    versions = 0

    def take(events):
        for event in events:
            name = event.request_id
            assert name not in ended, "an event after the last one"
            outputs[name].add(delta_of(event))
            if event.finish_reason is not None:
                ended.add(name)
                assert event.finish_reason in ("length", "abort")

    for sequence in range(200):
        for turn in range(generator.randint(4, 12)):
            action = generator.choice(("add", "add", "step", "step", "step", "pause", "resume", "abort", "update"))
            if action == "add":
                name = f"{sequence}.{turn}"
                prompts[name] = generator.choice(PROMPTS)
                one = request(name, prompts[name], greedy(generator.randint(1, 40)))
                one.names = (str(turn % 3),)
                try:
                    loop.add(one)
                    outputs[name] = CompletionOutput(index=0)
                except EnginePaused:
                    refused += 1
            elif action == "step":
                for _ in range(generator.randint(1, 4)):
                    take(loop.step())
            elif action == "pause":
                loop.pause(generator.choice(("abort", "wait", "keep")))
            elif action == "resume":
                loop.resume()
            elif action == "abort":
                loop.abort_requests(generator.choice((None, ["0"], ["1", "2"])))
            else:
                versions += 1
                letter = generator.choice("ab")
                loop.update_weights(weights[letter].items(), f"{letter}{versions}")
                if generator.random() < 0.3:
                    loop.rename_weights(f"{letter}{versions}-renamed")
                if generator.random() < 0.3:
                    loop.reset_prefix_cache(recompute_running=generator.random() < 0.5)
        loop.scheduler.check()
        loop.resume()
        while loop.has_work:
            take(loop.step())
        loop.idle_check()
    assert ended == outputs.keys() and refused > 10
    several = 0
    for name, output in outputs.items():
        spans = output.weight_versions
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
        assert (spans[-1].end if spans else 0) == len(output.token_ids)
        several += len(spans) > 1
        for letter in {span.version[0] for span in spans}:
            logits = references[letter].logits([*prompts[name], *output.token_ids])[len(prompts[name]) - 1 : -1]
            for span in spans:
                if span.version[0] == letter:
                    for place in range(span.start, span.end):
                        chosen = logits[place, output.token_ids[place]]
                        assert chosen >= logits[place].max() - 1e-3, (name, place, span)
    assert several > 20, "updates met running requests"


@BOTH
def test_a_thousand_aborts_between_updates_leak_nothing(
    paused_loop, reference, other_reference, weights, async_scheduling
):
    loop = paused_loop(async_scheduling=async_scheduling, max_num_seqs=8, num_pages=48)
    references, generator = {"a": reference, "b": other_reference}, random.Random(11)
    for number in range(1000):
        name = str(number)
        one = request(name, generator.choice(PROMPTS), greedy(generator.randint(2, 60)))
        one.names = (name,)
        loop.add(one)
        for _ in range(generator.randint(0, 3)):
            loop.step()
        victim = str(generator.randint(max(0, number - 8), number))
        if generator.random() < 0.5:
            loop.abort([victim])
        else:
            loop.abort_requests([victim])
        if number % 50 == 0:
            loop.update_weights(weights["ab"[number // 50 % 2]].items(), f"v{number}")
            loop.scheduler.check()
    while loop.has_work:
        loop.step()
    loop.idle_check()
    for letter, expected in references.items():
        loop.update_weights(weights[letter].items(), letter)
        loop.add(request(letter, PROMPTS[0], greedy(20)))
        assert tokens(drain(loop)[letter]) == expected.greedy(PROMPTS[0], 20)
