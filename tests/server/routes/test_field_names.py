"""Errors name the field as the client sent it."""

from __future__ import annotations

import pytest

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "red"}]})
COMPLETION = ("/v1/completions", {"prompt": "red"})
GENERATE = ("/generate", {"text": "red"})


def sampling(**params):
    return {"sampling_params": params}


@pytest.mark.parametrize(
    ("base", "options", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"max_tokens": 10**6}, "max_tokens"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": -1}, "max_completion_tokens"),
        (COMPLETION, {"logprobs": 10**5}, "logprobs"),
        (COMPLETION, {"logprobs": 10**5, "echo": True}, "logprobs"),
        (COMPLETION, {"max_tokens": 10**6}, "max_tokens"),
        (GENERATE, sampling(max_new_tokens=-5), "max_new_tokens"),
        (GENERATE, sampling(max_new_tokens="max_tokens"), "max_new_tokens"),
        (GENERATE, sampling(max_new_tokens=10**6), "max_new_tokens"),
        (GENERATE, sampling(max_tokens=-5), "max_tokens"),
        (GENERATE, sampling(max_tokens=10**6), "max_tokens"),
        (GENERATE, sampling(min_new_tokens=-5), "min_new_tokens"),
        (GENERATE, sampling(sampling_seed=2**70), "sampling_seed"),
        (GENERATE, sampling(no_stop_trim="yes"), "no_stop_trim"),
        (GENERATE, {"return_logprob": True, "top_logprobs_num": 10**5}, "top_logprobs_num"),
        (GENERATE, {"return_logprob": True, **sampling(logprobs=2)}, "logprobs"),
        (GENERATE, sampling(min_new_tokens=256, max_new_tokens=None), "min_new_tokens"),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": -1}]}, "max_new_tokens"),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"max_tokens": 3}, {"max_new_tokens": 999}]},
         "max_new_tokens"),
        (GENERATE, {"text": None, "input_ids": []}, "input_ids"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_was_sent(server, base, options, param):
    route, body = base
    response = server.post(route, body | options)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    if "context of" not in error["message"]:
        assert error["message"].removeprefix("'").startswith(param) or param == "input_ids"
    if "max_new_tokens" == param:
        assert "found 'max_new_tokens'" not in error["message"], "the value is shown as it was sent"


def test_both_fields_of_a_contradiction_are_named_as_sent(server):
    params = {"min_new_tokens": 5, "max_new_tokens": 3}
    error = server.post("/generate", {"text": "red", "sampling_params": params}).json()["error"]
    assert error["param"] == "min_new_tokens"
    assert error["message"] == (
        "min_new_tokens=5 exceeds max_new_tokens=3: lower min_new_tokens or raise max_new_tokens"
    )


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, {}]}, "messages[1].role"),
        ("/v1/chat/completions", {"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1, "b"]}, "stop_token_ids[1]"),
        ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop"),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "x", "content": "a"}]},
         "messages[0].role"),
    ],
)  # fmt: skip
def test_an_error_within_a_list_names_its_place(server, path, fields, place):
    response = server.post(path, fields)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(f"{place}: "), response.text
