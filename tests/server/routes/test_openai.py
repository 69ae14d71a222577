"""The OpenAI routes: completions, chats, models; streaming and not."""

from __future__ import annotations

import json

import pytest

JSON = {"Content-Type": "application/json"}

PROMPT = "the old king sleeps"
BASE = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the old king sleeps"}],
    "max_tokens": 10,
    "temperature": 0,
}


def complete(server, **options):
    return server.answer("/v1/completions", BASE | options)


def chat(server, **options):
    return server.answer("/v1/chat/completions", CHAT | options)


def test_completion_answers_as_generate_does(server):
    answer = complete(server)
    native = server.answer("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 10, "temperature": 0}})
    [choice] = answer["choices"]
    assert choice["text"] == native["text"]
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    prompt_tokens = native["meta_info"]["prompt_tokens"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == 10 and usage["total_tokens"] == prompt_tokens + 10


def test_completion_defaults_to_16_tokens(server):
    assert server.answer("/v1/completions", {"prompt": PROMPT, "ignore_eos": True})["usage"]["completion_tokens"] == 16


def test_prompts_and_choices_are_numbered_prompt_by_prompt(server):
    single = [complete(server, prompt=text)["choices"][0]["text"] for text in ("red bird", "blue house")]
    answer = complete(server, prompt=["red bird", "blue house"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [single[0]] * 2 + [single[1]] * 2
    assert answer["usage"]["completion_tokens"] == 40


def test_token_id_prompts(server):
    ids = server.service.client.tokenizer.encode(PROMPT)
    expected = complete(server)["choices"][0]["text"]
    assert complete(server, prompt=ids)["choices"][0]["text"] == expected
    assert [choice["text"] for choice in complete(server, prompt=[ids, ids])["choices"]] == [expected, expected]


def test_completion_stream_joins_to_the_answer_and_ends_with_usage(server):
    whole = complete(server)
    chunks = server.events("/v1/completions", BASE | {"stream": True, "stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]].count("length") == 1
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_streams_without_usage_have_none(server):
    chunks = server.events("/v1/completions", BASE | {"stream": True})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_streamed_choices_keep_their_numbers(server):
    options = {"prompt": ["red bird", "blue house"], "n": 2}
    chunks = server.events("/v1/completions", BASE | options | {"stream": True})
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == [choice["text"] for choice in complete(server, **options)["choices"]]


def test_completion_logprobs(server):
    answer = complete(server, logprobs=2)
    logprobs, text = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {10}
    assert logprobs["text_offset"][0] == 0
    for token, offset, logprob, top in zip(
        logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob == max(top.values()) <= 0
        if "\ufffd" not in text:
            assert text[offset : offset + len(token)] == token


def test_echo_with_logprobs_and_no_new_tokens_scores_the_prompt(server):
    answer = complete(server, echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT and answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert [PROMPT[a:b] for a, b in zip(offsets, offsets[1:], strict=False)] == logprobs["tokens"][:-1]


def test_echo_puts_the_prompt_before_the_text_also_in_a_stream(server):
    text = complete(server)["choices"][0]["text"]
    assert complete(server, echo=True)["choices"][0]["text"] == PROMPT + text
    chunks = server.events("/v1/completions", BASE | {"stream": True, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + text


def test_stop_strings_are_found_across_chunks(server):
    text = complete(server, max_tokens=40)["choices"][0]["text"]
    stop = text[9:15]
    chunks = server.events("/v1/completions", BASE | {"max_tokens": 40, "stream": True, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_chat_answers_through_the_template(server):
    answer = chat(server)
    [choice] = answer["choices"]
    rendered = "<|im_start|>user\nthe old king sleeps<|im_end|>\n<|im_start|>assistant\n"
    assert choice["message"]["content"] == complete(server, prompt=rendered)["choices"][0]["text"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


def test_chat_takes_text_parts_and_max_completion_tokens(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "the old king sleeps"}]}]
    answer = chat(server, messages=parts, max_tokens=None, max_completion_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4
    assert chat(server)["choices"][0]["message"]["content"].startswith(answer["choices"][0]["message"]["content"])


def test_chat_without_a_maximum_goes_on_to_the_context(server):
    body = {"messages": CHAT["messages"], "ignore_eos": True}
    assert server.answer("/v1/chat/completions", body)["usage"]["total_tokens"] == 256


def test_chat_stream_begins_with_the_role_and_ends_with_a_reason(server):
    chunks = server.events("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == chat(server)["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length" and chunks[-1]["usage"]["completion_tokens"] == 10
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_logprobs(server):
    content = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    for entry in content:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] and len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_models_shows_the_served_name_and_the_context(server):
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 256


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model_is_a_404(server, path):
    response = server.post(path, (BASE if path == "/v1/completions" else CHAT) | {"model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found" and "tiny" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "fox " * 3000}, "prompt"),
        ({"prompt": [1, 2, 10**30]}, "prompt"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10**6}, "max_tokens"),
        ({"min_tokens": 250, "max_tokens": 250, "truncate_prompt_tokens": 10}, "max_tokens"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"best_of": 0}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"model": 3}, "model"),
    ],
)
def test_bad_completion_is_a_400_that_names_the_field(server, options, param):
    assert_refused(server, "/v1/completions", BASE | options, param)


def test_max_completion_tokens_on_a_completion_is_refused_with_a_hint(server):
    refused = server.post("/v1/completions", BASE | {"max_completion_tokens": 4})
    assert "use max_tokens here" in refused.json()["error"]["message"]
    harmless = {"max_completion_tokens": None, "tools": [], "tool_choice": "none"}
    assert server.post("/v1/completions", BASE | harmless).status_code == 200


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"messages": [{"role": "stranger", "content": "hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"messages": [{"role": "user", "content": "fox " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages"),
        ({"max_tokens": None, "min_tokens": 256}, "min_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_bad_chat_is_a_400_that_names_the_field(server, options, param):
    assert_refused(server, "/v1/chat/completions", CHAT | options, param)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", BASE | {"logit_bias": {"a": 1}}, "the keys of logit_bias must be token ids"),
        ("/v1/completions", BASE | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage: Input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
         "messages[0].content[0].text must be a string, found int"),
        ("/v1/chat/completions", CHAT | {"max_tokens": None, "min_tokens": 256}, "min_tokens=256 exceed the context"),
    ],
)  # fmt: skip
def test_an_error_says_what_was_found(server, path, body, message):
    assert message in server.post(path, body).json()["error"]["message"]


def test_equal_limits_of_a_chat_are_accepted(server):
    answer = chat(server, max_tokens=3, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] <= 3


def test_a_truncated_prompt_leaves_room_for_min_tokens(server):
    messages = [{"role": "user", "content": "fox " * 300}]
    answer = chat(server, messages=messages, truncate_prompt_tokens=-1, min_tokens=5, max_tokens=None)
    assert answer["usage"]["completion_tokens"] >= 5


def assert_refused(server, path, body, param):
    response = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and len(error["message"]) < 500
    server.wait_idle()
