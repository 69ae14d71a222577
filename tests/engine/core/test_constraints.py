"""Constrained requests in the engine: what they sample, how they end, and what they cost the others."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time

import jsonschema
import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.checkpoint.source import resolve_model
from engine.core.constraints import Constraints
from engine.errors import RequestError
from engine.protocol.request import EngineRequest
from engine.protocol.structured_outputs import StructuredOutputs
from engine.scheduling.request import Request
from engine.text.grammars import matcher as matcher_module
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.vocabulary import VocabularySource
from engine.text.tokenizer import Tokenizer
from engine.worker.async_output import AsyncStepOutput
from tests.engine.lively import MANY, PROMPTS, drain, greedy, request, tokens
from tests.support.waiting import PATIENCE

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "async"])
def engine(lively_model, request):
    from tests.support.engines import engines

    with engines(model=str(lively_model), async_scheduling=request.param) as make:
        yield make()


def constrained(outputs, max_tokens=60, **options):
    return SamplingParams(**({"max_tokens": max_tokens, "seed": 7, "structured_outputs": outputs} | options))


def generate(engine, outputs, prompts=PROMPTS[:2], **options):
    return engine.generate(prompt_token_ids=prompts, sampling_params=constrained(outputs, **options))


# ---- what is sampled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"logit_bias": {93: -100.0, 90: 50.0}},
        {"logprobs": 3},
        {"n": 3},
        {"ignore_eos": True},
        {"min_tokens": 12},
        {"stop_token_ids": [0, 1, 2]},
    ],
    ids=str,
)
def test_every_way_of_sampling_follows_the_schema(engine, options):
    for output in generate(engine, COMPACT, **options):
        for one in output.outputs:
            assert one.finish_reason == "stop"
            jsonschema.validate(json.loads(one.text), SCHEMA)


def test_sampling_follows_the_models_distribution_over_the_allowed_tokens(engine, reference):
    """The first token of three choices; its log-probability is that of the masked distribution."""
    a, b, c = (engine.tokenizer.encode(char)[0] for char in "abc")
    logits = reference.logits(PROMPTS[0])[-1][[a, b, c]]
    expected = logits.log_softmax(0)
    output = generate(engine, {"choice": ["a", "b", "c"]}, PROMPTS[:1], logprobs=5, n=64)[0]
    for one in output.outputs:
        [first] = one.logprobs
        assert set(first.top) == {a, b, c}
        for token, value in zip((a, b, c), expected, strict=True):
            assert first.top[token] == pytest.approx(value.item(), abs=1e-3)
    share = sum(one.text == "abc"[expected.argmax()] for one in output.outputs) / 64
    assert share == pytest.approx(math.exp(expected.max()), abs=0.2)


def test_raw_logprobs_are_those_of_the_model(lively_model, reference):
    from tests.support.engines import engines

    with engines(model=str(lively_model), logprobs_mode="raw") as make:
        [output] = generate(make(), {"choice": ["a"]}, PROMPTS[:1], logprobs=2)
    [entry] = output.logprobs
    expected = reference.logprobs(PROMPTS[0])[-1]
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-3)
    assert entry.rank == int((expected > expected[entry.token_id]).sum()) + 1


def test_the_same_seed_gives_the_same_output_in_any_batch(engine):
    alone = generate(engine, COMPACT, PROMPTS[:1])[0].token_ids
    others = [greedy(20), constrained({"regex": "[a-z]{9,12}"}, seed=1), SamplingParams(max_tokens=15, seed=3)]
    together = engine.generate(
        prompt_token_ids=[*PROMPTS[1:4], PROMPTS[0]], sampling_params=[*others, constrained(COMPACT)]
    )
    assert together[-1].token_ids == alone


def test_requests_without_a_constraint_are_unchanged_beside_constrained_ones(engine):
    params = [greedy(30), SamplingParams(max_tokens=30, seed=5), SamplingParams(max_tokens=9, seed=6, logprobs=1)]
    plain = engine.generate(prompt_token_ids=MANY[:3], sampling_params=params)
    mixed = engine.generate(
        prompt_token_ids=MANY[:6], sampling_params=[*params, *(constrained(COMPACT, seed=seed) for seed in range(3))]
    )
    assert [one.token_ids for one in mixed[:3]] == [one.token_ids for one in plain]
    found, expected = mixed[2].logprobs, plain[2].logprobs
    assert [(entry.token_id, entry.rank) for entry in found] == [(entry.token_id, entry.rank) for entry in expected]
    # A GEMM of more rows may round differently.
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-6)


def test_a_long_prompt_in_chunks_and_a_preemption_change_nothing(make_engine):
    params = [constrained({"regex": "[a-z]{30,40}"}, seed=seed, max_tokens=50) for seed in range(8)]
    roomy = make_engine()
    expected = roomy.generate(prompt_token_ids=MANY, sampling_params=params)
    for behind in (False, True):
        small = make_engine(
            num_pages=16, page_size=4, max_model_len=128, max_num_batched_tokens=8, async_scheduling=behind
        )
        found = small.generate(prompt_token_ids=MANY, sampling_params=params)
        assert small.stats().num_preemptions > 0 == roomy.stats().num_preemptions
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert all(re.fullmatch("[a-z]{30,40}", one.text) for one in found)


def test_constrained_requests_have_no_drafts_and_keep_those_of_others(make_engine):
    plain, drafting = make_engine(), make_engine(num_speculative_tokens=3)
    prompts, params = [[5, 6, 7, 8] * 6] * 2, [greedy(24), constrained({"regex": "(ab){20}"}, seed=2)]
    found, expected = (one.generate(prompt_token_ids=prompts, sampling_params=params) for one in (drafting, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert found[1].text == "ab" * 20


# ---- how it ends ---------------------------------------------------------------------------------------------------


def test_the_last_token_of_a_grammar_belongs_to_the_output(engine):
    [output] = generate(engine, {"regex": "abc"}, PROMPTS[:1])
    assert output.text == "abc" and output.finish_reason == "stop" and output.stop_reason is None
    assert engine.tokenizer.decode(output.token_ids) == "abc"


def test_eos_is_sampled_only_where_the_grammar_may_end(engine):
    eos = engine.tokenizer.eos_token_ids[0]
    bias = {eos: 100.0}
    [output] = generate(engine, {"regex": "a{3,9}"}, PROMPTS[:1], logit_bias=bias)
    assert output.text == "aaa" and output.token_ids[-1] == eos and output.finish_reason == "stop"
    [output] = generate(engine, {"regex": "a{3,9}"}, PROMPTS[:1], logit_bias=bias, ignore_eos=True)
    assert output.text == "a" * 9 and output.finish_reason == "stop"
    [output] = generate(engine, {"regex": "a{3,9}"}, PROMPTS[:1], logit_bias=bias, min_tokens=5)
    assert output.text == "a" * 5
    [output] = generate(engine, {"regex": "a?"}, PROMPTS[:1], logit_bias=bias)
    assert output.text == "" and output.finish_reason == "stop"


def test_a_complete_grammar_ends_a_request_before_min_tokens(engine):
    [output] = generate(engine, {"regex": "ab"}, PROMPTS[:1], min_tokens=30)
    assert output.text == "ab" and output.finish_reason == "stop"
    [output] = generate(engine, {"choice": [""]}, PROMPTS[:1], min_tokens=30)
    assert output.text == "" and output.token_ids == [] and output.finish_reason == "stop"
    [output] = generate(engine, {"choice": [""]}, PROMPTS[:1], ignore_eos=True)
    assert output.text == "" and output.finish_reason == "stop"


def test_min_tokens_that_forbids_all_that_the_grammar_allows_is_an_error(engine):
    a = engine.tokenizer.encode("a")[0]
    [output] = generate(engine, {"regex": "a+"}, PROMPTS[:1], min_tokens=3, stop_token_ids=[a])
    assert output.finish_reason == "error" and "min_tokens" in output.outputs[0].error
    assert generate(engine, {"regex": "ab"}, PROMPTS[:1])[0].text == "ab"


def test_a_stop_string_and_the_length_end_a_request_early(engine):
    [output] = generate(engine, {"regex": "[ab]{40}"}, PROMPTS[:1], stop="b", logit_bias={0: 0.0})
    assert output.finish_reason == "stop" and output.stop_reason == "b" and set(output.text) <= {"a"}
    [output] = generate(engine, {"regex": "[ab]{40}"}, PROMPTS[:1], max_tokens=10)
    assert output.finish_reason == "length" and re.fullmatch("[ab]{10}", output.text)


# ---- refusals and failures -----------------------------------------------------------------------------------------


def test_an_invalid_constraint_is_refused_before_anything_runs(engine):
    steps = engine.stats().steps
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: .*unclosed group"):
        engine.generate(prompt_token_ids=PROMPTS[:2], sampling_params=[greedy(3), constrained({"regex": "(a"})])
    assert engine.stats().steps == steps


def test_a_model_without_a_tokenizer_refuses_constraints(lively_model, tmp_path):
    import shutil

    from tests.support.engines import engines

    shutil.copytree(lively_model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with engines(model=str(tmp_path / "bare")) as make:
        engine = make()
        with pytest.raises(RequestError, match="has none"):
            generate(engine, {"regex": "a"})
        engine.loop.submit([request("a", PROMPTS[0], constrained({"regex": "a"}))])
        [event] = drain(engine.loop)["a"]
    assert event.finish_reason == "error" and isinstance(event.refusal, RequestError)


def test_requests_wait_for_their_grammar_without_stopping_others(make_engine):
    loop = make_engine().loop
    loop.add(request("plain", PROMPTS[0], greedy(5)))
    loop.add(request("bad", PROMPTS[0], constrained({"regex": "a("})))
    loop.add(request("good", PROMPTS[1], constrained({"regex": "ab"})))
    loop.add(request("aborted", PROMPTS[1], constrained({"regex": "abc"})))
    assert loop.constraints.num_compiling == 3 and loop.stats().num_waiting == 4
    loop.abort(["aborted"])
    events = drain(loop)
    assert {name: own[-1].finish_reason for name, own in events.items()} == {
        "plain": "length", "bad": "error", "good": "stop", "aborted": "abort",
    }  # fmt: skip
    assert isinstance(events["bad"][-1].refusal, RequestError) and len(tokens(events["good"])) == 2
    assert loop.stats().ended == {"length": 1, "error": 1, "stop": 1, "abort": 1}


def test_the_grammars_of_ended_requests_are_not_compiled(make_engine):
    """Else one request with many slow grammars would hold up those of others after it was refused."""
    loop = make_engine().loop
    slow = [constrained({"json": {"type": "integer", "multipleOf": 999_983 - 2 * number}}) for number in range(12)]
    for number, params in enumerate(slow):
        loop.add(dataclasses.replace(request(str(number), PROMPTS[0], params), index=number))
    waiting = [loop.constraints.compile(params) for params in slow]
    loop.abort([str(number) for number in range(12)])
    assert sum(future.cancelled() for future in waiting) >= 8 and loop.constraints.num_compiling == 0
    loop.add(request("good", PROMPTS[1], constrained({"regex": "ab"})))
    assert tokens(drain(loop)["good"])


def test_a_grammar_that_exceeds_its_limits_ends_only_its_request(engine):
    """About 2**18 states, more than a matcher may have."""
    hostile = {"regex": "(.*a.{18}c|.*b.{17}d|.*c.{16}e|.*d.{15}f)*"}
    params = [greedy(40), constrained(hostile, max_tokens=200, seed=1, temperature=3.0)]
    plain, limited = engine.generate(prompt_token_ids=PROMPTS[:2], sampling_params=params)
    assert plain.finish_reason == "length" and len(plain.token_ids) == 40
    assert limited.finish_reason in ("error", "length")
    if limited.finish_reason == "error":
        assert "grammar can't be followed" in limited.outputs[0].error


def test_a_step_without_constrained_rows_takes_no_masks(make_engine, monkeypatch):
    engine = make_engine(async_scheduling=True)
    calls = []
    write = engine.loop.executor.worker.runner.sampling.masks.write
    monkeypatch.setattr(
        engine.loop.executor.worker.runner.sampling.masks, "write", lambda *args: calls.append(args) or write(*args)
    )
    engine.generate(prompt_token_ids=MANY, sampling_params=SamplingParams(max_tokens=10, seed=1))
    assert calls == []
    [output] = generate(engine, {"regex": "[ab]{7}"}, PROMPTS[2:3], max_tokens=7)
    assert len(output.token_ids) == 7 and len(calls) == 7


def test_a_failure_to_sample_fails_its_batch_and_the_engine_continues(make_engine, monkeypatch):
    engine = make_engine(async_scheduling=True, max_num_seqs=4, graph_buckets=(4,))
    params = [constrained({"regex": "[a-z]{20}"}, seed=seed) for seed in range(2)]
    expected = [one.token_ids for one in engine.generate(prompt_token_ids=MANY[:2], sampling_params=params)]
    loop = engine.loop
    for number, one in enumerate(params):
        loop.add(request(f"{number}", MANY[number], one))
    for _ in range(4):
        loop.step()
    sample = loop.executor.worker.runner.sample

    def fails(masks):
        monkeypatch.setattr(loop.executor.worker.runner, "sample", sample)
        raise RuntimeError("the copy engine coughed")

    monkeypatch.setattr(loop.executor.worker.runner, "sample", fails)
    assert [own[-1].finish_reason for own in drain(loop).values()] == ["error", "error"]
    again = [one.token_ids for one in engine.generate(prompt_token_ids=MANY[:2], sampling_params=params)]
    assert again == expected


def test_a_step_whose_predecessor_failed_is_recomputed(make_engine, monkeypatch):
    """Its forward graph was enqueued already, and its masks depend on tokens that never came."""
    engine = make_engine(async_scheduling=True)
    regex = {"regex": "[a-z]{20}"}
    expected = generate(engine, regex, MANY[1:2], seed=42)[0].token_ids
    loop = engine.loop
    loop.add(request("first", MANY[0], constrained(regex)))
    for _ in range(4):
        loop.step()
    read = AsyncStepOutput.read

    def fails(output):
        monkeypatch.setattr(AsyncStepOutput, "read", read)
        raise RuntimeError("the device coughed")

    monkeypatch.setattr(AsyncStepOutput, "read", fails)
    loop.add(request("second", MANY[1], constrained(regex)))
    events = drain(loop)
    assert events["first"][-1].finish_reason == "error" and events["second"][-1].finish_reason == "stop"
    assert tokens(events["second"]) == expected and loop.stats().num_preemptions == 1


@pytest.mark.parametrize("between", ["drain", "capture", "abort", "load_weights"])
def test_work_between_steps_finds_a_step_that_waits_for_its_masks(make_engine, lively_model, between):
    engine = make_engine(async_scheduling=True, max_num_seqs=4, graph_buckets=(1, 2, 4))
    params = [constrained({"regex": "[a-z]{20}"}, seed=42)] * 2  # the seed of `request`
    expected = [one.token_ids for one in engine.generate(prompt_token_ids=MANY[:2], sampling_params=params)]
    loop = engine.loop

    def work(step):
        if between == "drain":
            loop.steps.drain()
        elif between == "capture":
            loop.executor.worker.runner.cache.invalidate("asked")
            loop.captures.capture_next()
        elif between == "abort":
            loop.abort([f"other {step - 2}"])
            loop.add(request(f"other {step}", MANY[2], constrained({"regex": "[0-9]{30}"})))
        elif step % 5 == 0:
            loop.load_weights(str(lively_model), f"step {step}")

    for number, one in enumerate(params):
        loop.add(request(f"{number}", MANY[number], one))
    events = {}
    for step in range(100):
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        if all(name in events and events[name][-1].finish_reason for name in "01"):
            break
        work(step)
    loop.abort([f"other {step}" for step in range(100)])
    drain(loop)
    assert [tokens(events[f"{number}"]) for number in range(2)] == expected


def test_a_failure_to_fill_masks_fails_its_batch_and_the_engine_continues(make_engine, monkeypatch):
    engine = make_engine(async_scheduling=True)
    expected = generate(engine, {"regex": "[a-z]{20}"}, MANY[:1])[0].token_ids
    loop = engine.loop
    loop.add(request("first", MANY[0], constrained({"regex": "[a-z]{20}"})))
    loop.step()
    with monkeypatch.context() as patch:
        patch.setattr(loop.constraints, "masks", lambda requests: 1 / 0)
        events = loop.step()
    assert [event.finish_reason for event in events] == ["error"] and "ZeroDivisionError" in events[0].error
    assert generate(engine, {"regex": "[a-z]{20}"}, MANY[:1])[0].token_ids == expected


def test_an_interrupted_wait_for_the_earlier_step_recomputes_the_batch(make_engine, monkeypatch):
    engine = make_engine(async_scheduling=True)
    params = [constrained({"regex": "[a-z]{20}"}, seed=seed) for seed in range(3)]
    expected = [one.token_ids for one in engine.generate(prompt_token_ids=MANY[:3], sampling_params=params)]
    loop = engine.loop
    for number, one in enumerate(params):
        asked = request(f"{number}", MANY[number], one)
        asked.seed = number
        loop.add(asked)
    events = {f"{number}": [] for number in range(3)}
    for _ in range(5):
        for event in loop.step():
            events[event.request_id].append(event)
    fill = loop.constraints.masks

    def interrupted(requests):
        monkeypatch.setattr(loop.constraints, "masks", fill)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.constraints, "masks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    for name, own in drain(loop).items():
        events[name] += own
    assert [tokens(own) for own in events.values()] == expected


def test_rows_that_end_while_masks_are_computed_leave_the_others_unchanged(make_engine):
    ranges = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"]  # each row has another mask
    params = [
        constrained({"regex": f"[{letters}]{{40}}"}, seed=seed, max_tokens=4 + seed)
        for seed, letters in enumerate(ranges)
    ]
    plain, behind = make_engine(async_scheduling=False), make_engine(async_scheduling=True)
    expected, found = (one.generate(prompt_token_ids=MANY[:8], sampling_params=params) for one in (plain, behind))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    loop = behind.loop
    for number, one in enumerate(params):
        asked = request(f"{number}", MANY[number], one)
        asked.seed = number
        loop.add(asked)
    events = {f"{number}": [] for number in range(8)}
    for step in range(100):
        for event in loop.step():
            events[event.request_id].append(event)
        if step == 3:
            loop.abort(["2", "5"])
        if not loop.has_work:
            break
    for number, one in enumerate(expected):
        if number not in (2, 5):
            assert tokens(events[f"{number}"]) == one.token_ids


def test_masks_reach_the_device_with_any_vocabulary_size():
    from engine.sampling.token_masks import unpacked

    masks = torch.tensor([[1, -(2**31)], [-1, 0]], dtype=torch.int32)
    bits = unpacked(masks)
    assert bits.shape == (2, 64)
    assert bits[0].nonzero().flatten().tolist() == [0, 63]
    assert bits[1].nonzero().flatten().tolist() == list(range(32))


def test_params_accept_a_mapping_or_the_class():
    assert SamplingParams(structured_outputs={"regex": "a"}) == SamplingParams(
        structured_outputs=StructuredOutputs(regex="a")
    )
    with pytest.raises(RequestError, match="must be an object"):
        SamplingParams(structured_outputs="a")


def test_a_fill_in_the_background_never_writes_masks_of_a_later_step(tiny_model, monkeypatch):
    """The grammar of the fill's only request may end before the next masks are asked for."""
    monkeypatch.setattr(matcher_module, "SERIAL_SECONDS", 0.0)
    executor = matcher_module.LLExecutor

    class Slow:
        def __init__(self, num_threads):
            self.native = executor(num_threads=num_threads)

        def unsafe_compute_mask_ptr(self, *arguments):
            time.sleep(0.05)
            self.native.unsafe_compute_mask_ptr(*arguments)

    monkeypatch.setattr(matcher_module, "LLExecutor", Slow)
    tokenizer = Tokenizer.try_load(resolve_model(str(tiny_model)))
    source = VocabularySource.of(tokenizer, 1024, (2,))
    constraints = Constraints(
        GrammarCompiler(source, max_workers=1),
        1024,
        4,
        frozenset((2,)),
        lambda rows, words: np.zeros((rows, words), np.int32),
    )
    requests = []
    for slot, params in enumerate(({"structured_outputs": {"regex": "a"}}, {"allowed_token_ids": [5, 6]})):
        one = EngineRequest(request_id=str(slot), prompt_token_ids=[3], params=SamplingParams(**params), seed=0)
        if one.params.structured_outputs is not None:
            constraints.compile(one.params).result(PATIENCE)
        assert constraints.begin(one)
        requests.append(Request(one, "weights", frozenset((2,))))
        requests[-1].slot = slot
    first, second = requests
    assert not constraints.masks(requests)[1]
    token = tokenizer.encode("a")[0]
    assert constraints.advance([(first, token)], requests) == {"0"}
    constraints.forget("0")
    found, _ = constraints.masks([second])
    masks = found.masks.copy()
    time.sleep(0.2)
    assert (found.masks == masks).all()
    assert set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))) == {5, 6}
    constraints.close()
