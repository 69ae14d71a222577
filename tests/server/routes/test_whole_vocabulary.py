"""Log-probabilities of the whole vocabulary, where --max-logprobs allows them, and stop tokens that it lacks."""

from __future__ import annotations

import math

import pytest

from engine.client.output_queue import LOGPROB_BYTES
from server.schemas import answers as wire
from tests.server.conftest import running, tiny_config

COMPLETIONS, CHAT, GENERATE, RESPONSES = "/v1/completions", "/v1/chat/completions", "/generate", "/v1/responses"
PROMPT, VOCAB = "the old king sleeps", 320
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def unlimited(tiny_model):
    config = tiny_config(tiny_model, max_logprobs=-1, max_total_logprob_bytes=LOGPROB_BYTES * VOCAB * 100)
    with running(config) as handle:
        yield handle


def total(logprobs):
    return sum(map(math.exp, logprobs))


def test_a_completion_has_the_logprobs_of_all_tokens(unlimited):
    body = {"prompt": PROMPT, **GREEDY, "logprobs": -1, "return_tokens_as_token_ids": True, "echo": True}
    logprobs = unlimited.answer(COMPLETIONS, body)["choices"][0]["logprobs"]
    for token, value, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert len(top) == VOCAB and total(top.values()) == pytest.approx(1, abs=1e-4)
        assert next(iter(top.items())) == (token, value)
    chunks = unlimited.events(COMPLETIONS, body | {"stream": True, "echo": False})
    assert [len(one) for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"top_logprobs": []})[
        "top_logprobs"]] == [VOCAB] * 2  # fmt: skip


def test_a_chat_has_the_logprobs_of_all_tokens(unlimited):
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": -1}
    for token in unlimited.answer(CHAT, body)["choices"][0]["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == VOCAB
        assert total(one["logprob"] for one in token["top_logprobs"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": -1}, {"prompt_logprobs": -1, "logprobs": 2, "echo": True}])
def test_a_prompt_has_the_logprobs_of_all_tokens(unlimited, fields):
    answer = unlimited.answer(COMPLETIONS, {"prompt": PROMPT, **GREEDY} | fields)
    wire.Completion.model_validate(answer, strict=True)
    [choice] = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for entry in others:
        assert set(entry) == set(map(str, range(VOCAB)))
        assert total(one["logprob"] for one in entry.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(one["rank"] for one in entry.values()) == list(range(1, VOCAB + 1))
    if choice["logprobs"]:
        assert all(len(top) <= 3 for top in choice["logprobs"]["top_logprobs"][1:])
    chat = unlimited.answer(CHAT, {"messages": MESSAGES, **GREEDY, "prompt_logprobs": -1})
    assert all(len(entry) == VOCAB for entry in chat["prompt_logprobs"][1:])


def test_more_than_the_vocabulary_is_the_vocabulary(unlimited):
    body = {"prompt": PROMPT, **GREEDY, "logprobs": 1000, "return_tokens_as_token_ids": True}
    assert [len(top) for top in unlimited.answer(COMPLETIONS, body)["choices"][0]["logprobs"]["top_logprobs"]] == [
        VOCAB, VOCAB
    ]  # fmt: skip


def test_a_prompt_with_more_than_the_server_holds_is_refused(unlimited):
    body = {"prompt": PROMPT * 10, **GREEDY, "prompt_logprobs": -1}
    response = unlimited.post(COMPLETIONS, body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "prompt_logprobs", error
    assert "--max-total-logprob-bytes" in error["message"]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": 101}, "logprobs"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -2, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (GENERATE, {"return_logprob": True, "top_logprobs_num": 101}, "top_logprobs_num"),
        (GENERATE, {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        (RESPONSES, {"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_the_default_limit_is_named(server, route, fields, param):
    bodies = {COMPLETIONS: {"prompt": "red"}, CHAT: {"messages": MESSAGES}, GENERATE: {"text": "red"}}
    response = server.post(route, bodies.get(route, {"input": "red"}) | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, response.text
    assert error["message"].startswith(param)
    if fields.get(param) == -1 and route != GENERATE:
        assert f"{param}=-1 asks for all 320 tokens" in error["message"] and "--max-logprobs" in error["message"]


@pytest.mark.parametrize("beyond", [[VOCAB], [10**9, 2**63 - 1]])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"prompt": PROMPT}),
        (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 2}),
        (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 2, "ignore_eos": False}),
        (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 1, "regex": "[ab]{2}"}),
        (CHAT, {"messages": MESSAGES}),
    ],
)
def test_stop_tokens_beyond_the_vocabulary_have_no_effect(server, route, body, beyond):
    plain = server.answer(route, GREEDY | body)
    assert server.answer(route, GREEDY | body | {"stop_token_ids": beyond})["choices"] == plain["choices"]


def test_stop_tokens_of_the_vocabulary_still_stop_beside_others(server):
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 8, "return_token_ids": True}
    ids = server.answer(COMPLETIONS, body)["choices"][0]["token_ids"]
    [choice] = server.answer(COMPLETIONS, body | {"stop_token_ids": [VOCAB, ids[2], 10**6]})["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[2]
    sglang = {"text": PROMPT, "sampling_params": {"stop_token_ids": [4000], "max_new_tokens": 2, "temperature": 0}}
    assert server.answer(GENERATE, sglang)["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("ids", [[-1], [VOCAB, -5], [2**63]])
def test_impossible_stop_tokens_are_refused(server, ids):
    response = server.post(COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": ids})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop_token_ids"
