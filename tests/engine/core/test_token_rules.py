"""allowed_token_ids and bad_words: which tokens a request samples."""

from __future__ import annotations

import math

import pytest

from engine import SamplingParams
from engine.core.token_rules import TokenRules, all_tokens, packed
from engine.errors import RequestError
from tests.engine.lively import PROMPTS

ALLOWED = [5, 31, 32, 64, 99]


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "async"])
def engine(lively_model, request):
    from tests.support.engines import engines

    with engines(model=str(lively_model), async_scheduling=request.param) as make:
        yield make()


def generate(engine, prompts=PROMPTS[:3], **fields):
    params = SamplingParams(**{"max_tokens": 24, "seed": 7, "ignore_eos": True} | fields)
    return engine.generate(prompt_token_ids=prompts, sampling_params=params)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.2}, {"n": 3}, {"logprobs": 2},
                {"repetition_penalty": 1.7}, {"logit_bias": {7: 100.0}}]
)  # fmt: skip
def test_only_allowed_tokens_are_sampled(engine, options):
    for output in generate(engine, allowed_token_ids=ALLOWED, **options):
        for sequence in output.outputs:
            assert len(sequence.token_ids) == 24 and set(sequence.token_ids) <= set(ALLOWED)


def test_logprobs_are_those_of_the_allowed_tokens(engine):
    for one in generate(engine, allowed_token_ids=ALLOWED, logprobs=5)[0].logprobs:
        found = {token: value for token, value in one.top.items() if value > -1000}
        assert set(found) <= set(ALLOWED) and sum(map(math.exp, found.values())) == pytest.approx(1, abs=1e-4)


def test_other_requests_of_the_batch_are_unchanged(engine):
    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    ruled = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, allowed_token_ids=ALLOWED)
    expected = [one.token_ids for one in engine.generate(prompt_token_ids=PROMPTS[:4], sampling_params=plain)]
    mixed = engine.generate(prompt_token_ids=PROMPTS[:4], sampling_params=[plain, ruled, plain, ruled])
    assert [mixed[0].token_ids, mixed[2].token_ids] == [expected[0], expected[2]]
    assert set(mixed[1].token_ids) | set(mixed[3].token_ids) <= set(ALLOWED)


def test_rules_and_a_grammar_both_hold(engine):
    digits = [engine.tokenizer.encode(str(digit))[-1] for digit in range(5)]
    outputs = {"regex": "[0-9]{8}"}
    for output in generate(engine, allowed_token_ids=digits, structured_outputs=outputs):
        assert len(output.text) == 8 and set(output.text) <= set("01234") and output.finish_reason == "stop"


def test_a_bad_word_is_not_completed_and_other_tokens_follow(engine):
    letters = [engine.tokenizer.encode(letter)[0] for letter in "abcdefghij"]
    options = {"temperature": 0.0, "allowed_token_ids": letters}
    free = generate(engine, **options)
    pairs = {tuple(one.token_ids[at : at + 2]) for one in free for at in range(20)}
    words = [engine.tokenizer.decode(pair) for pair in pairs]
    words = [word for word in words if tuple(engine.tokenizer.encode(word)) in pairs]  # not one token of their own
    assert words and all(any(word in output.text for output in free) for word in words)
    for output in generate(engine, bad_words=words, **options):
        assert len(output.token_ids) == 24 and len(output.text) == 24
        assert not any(word in output.text for word in words), (words, output.text)
    [single] = generate(engine, PROMPTS[:1], bad_words=["a"], **options)
    assert "a" not in single.text


def test_the_last_token_alone_is_allowed():
    rules = TokenRules(None, [(3, 4, 5), (9,)], vocab_size=64)

    def forbidden(token_ids, prompt_len):
        mask = all_tokens(64)
        rules.apply(mask, token_ids, prompt_len)
        return [token for token in range(64) if not int(mask.view("uint32")[token // 32]) >> token % 32 & 1]

    assert forbidden([1, 2, 3, 4], 0) == [5, 9]
    assert forbidden([1, 2, 3, 4], 3) == [9]  # a part of it is in the prompt
    assert forbidden([1, 2, 4, 3], 0) == [9]
    assert forbidden([4], 0) == forbidden([], 0) == [9]


def test_masks_have_the_bits_of_their_tokens():
    assert packed([0, 31, 32], 40).view("uint32").tolist() == [0x80000001, 1]
    assert all_tokens(40).view("uint32").tolist() == [0xFFFFFFFF, 0xFF]
    assert TokenRules(None, [(70,)], vocab_size=64).apply(mask := all_tokens(64), [], 0) is None
    assert (mask == all_tokens(64)).all()  # the model doesn't have the token


def test_a_request_that_may_sample_nothing_is_refused(engine):
    [eos] = engine.info.eos_token_ids[:1]
    [output] = generate(engine, PROMPTS[:1], allowed_token_ids=[eos], ignore_eos=False, min_tokens=3)
    assert output.finish_reason == "error" and "leave no token" in output.outputs[0].error
    [output] = generate(engine, PROMPTS[:1], allowed_token_ids=[eos], ignore_eos=False)
    assert output.finish_reason == "stop" and output.token_ids == [eos]


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"allowed_token_ids": []}, "allowed_token_ids is empty"), ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
     ({"allowed_token_ids": [10**6]}, "allowed_token_ids names token id"), ({"bad_words": "x"}, "bad_words must be"),
     ({"bad_words": ["  "]}, "bad_words must be"), ({"bad_words": ["x" * 300]}, "bad_words must be")],
)  # fmt: skip
def test_invalid_rules_are_named(engine, fields, match):
    with pytest.raises(RequestError, match=match) as caught:
        generate(engine, **fields)
    assert caught.value.param == next(iter(fields))
