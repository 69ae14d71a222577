"""Conventions of vLLM: null keys, settings of the server, former field names, routes of gateways and SageMaker."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from server.schemas import answers as wire
from tests.server.conftest import running, tiny_config

COMPLETIONS, CHAT, BATCH, INVOCATIONS = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations",
)  # fmt: skip
PROMPT = "the old king sleeps"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
PARTIAL = [*MESSAGES, {"role": "assistant", "content": "red bird"}]


@pytest.fixture(scope="module")
def vllm(tiny_model, tmp_path_factory):
    """A server with all settings of these tests, and an API key that its client sends."""
    key = tmp_path_factory.mktemp("keys") / "api"
    key.write_text("secret")
    config = tiny_config(
        tiny_model, compat="vllm", root_path="/llm/", return_tokens_as_token_ids=True, api_key_file=str(key),
        enable_force_include_usage=True,
    )  # fmt: skip
    with running(config) as handle:
        handle.http.headers["Authorization"] = "Bearer secret"
        yield handle


# Keys of vLLM 0.33's responses, as its protocol classes declare them.
ANSWER = set("id object created model choices usage service_tier system_fingerprint".split()) | set(
    "kv_transfer_params ec_transfer_params metrics".split()
)
CHOICE = set("index logprobs finish_reason stop_reason token_ids routed_experts weight_versions".split())


def test_a_completion_has_all_keys(vllm):
    answer = vllm.answer(COMPLETIONS, {"prompt": PROMPT, **GREEDY, "logprobs": 1})
    wire.Completion.model_validate(answer, strict=True)
    assert answer.keys() >= ANSWER
    [choice] = answer["choices"]
    assert choice.keys() >= CHOICE | {"text", "prompt_logprobs", "prompt_token_ids"}
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is choice["token_ids"] is None
    assert choice["logprobs"].keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    usage = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"}
    assert answer["usage"].keys() == usage
    given = vllm.answer(COMPLETIONS, {"prompt": PROMPT, **GREEDY, "return_token_ids": True, "prompt_logprobs": 0})
    [choice] = given["choices"]
    assert choice["token_ids"] and choice["prompt_token_ids"] and choice["prompt_logprobs"]


def test_a_chat_has_all_keys(vllm):
    answer = vllm.answer(CHAT, {"messages": MESSAGES, **GREEDY})
    wire.ChatCompletion.model_validate(answer, strict=True)
    assert answer.keys() >= ANSWER | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    [choice] = answer["choices"]
    assert choice.keys() >= CHOICE | {"message"}
    message = set("role content refusal annotations audio function_call reasoning reasoning_content".split())
    assert choice["message"].keys() == message  # vLLM leaves tool_calls out where there are none
    given = vllm.answer(CHAT, {"messages": MESSAGES, **GREEDY, "return_token_ids": True})
    assert given["prompt_token_ids"] and given["choices"][0]["token_ids"]


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}])
@pytest.mark.parametrize(
    ("route", "body", "model", "in_choice"),
    [
        (COMPLETIONS, {"prompt": PROMPT}, wire.Completion, {"prompt_token_ids", "token_ids", "weight_versions"}),
        (CHAT, {"messages": MESSAGES}, wire.ChatChunk, {"token_ids"}),
    ],
)
def test_every_chunk_has_its_keys(vllm, route, body, model, in_choice, fields):
    *chunks, last = vllm.events(route, body | GREEDY | fields | {"stream": True})
    for chunk in chunks:
        model.model_validate(chunk, strict=True)
        expected = set() if route == CHAT and fields else in_choice
        assert chunk["choices"][0].keys() >= expected | {"index", "logprobs", "finish_reason"}
    if route == CHAT:
        assert {"prompt_token_ids", "prompt_text"} <= chunks[0].keys()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    given = [chunk["choices"][0]["token_ids"] for chunk in chunks if "token_ids" in chunk["choices"][0]]
    assert sum(len(ids or ()) for ids in given) == (4 if fields else 0)
    assert not (route == CHAT and fields and None in given)


def test_the_finish_reason_of_a_chat_comes_with_its_last_text(vllm, server):
    body = {"messages": MESSAGES, **GREEDY, "stream": True}
    *chunks, last, usage = vllm.events(CHAT, body)
    assert usage["choices"] == [] and not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["delta"]["content"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in [*chunks, last])
    whole = server.answer(CHAT, {"messages": MESSAGES, **GREEDY})
    assert text == whole["choices"][0]["message"]["content"]
    assert server.events(CHAT, body)[-1]["choices"][0]["delta"] == {}


def test_the_finish_reason_of_a_chat_without_text_comes_alone(vllm):
    text = vllm.answer(CHAT, {"messages": MESSAGES, **GREEDY})["choices"][0]["message"]["content"]
    first, last, _ = vllm.events(CHAT, {"messages": MESSAGES, **GREEDY, "stop": [text[0]], "stream": True})
    assert first["choices"][0]["delta"]["role"] and first["choices"][0]["finish_reason"] is None
    choice = last["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == text[0] and choice["delta"] == {}


@pytest.mark.parametrize("n", [1, 2])
def test_usage_counts_the_tokens_that_were_sent(vllm, server, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, **GREEDY, "n": n, "stream": True, "stream_options": options}
    for one in (vllm, server):
        first, *chunks = one.events(CHAT, body)
        assert first["choices"][0]["delta"]["role"] and first["usage"]["completion_tokens"] == 0
        assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] > 0
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4 * n
        if n == 1:  # a token a chunk
            assert counts[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})])
def test_continuous_usage_without_usage_has_no_effect(start_server, server, route, body):
    body |= {**GREEDY, "stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    assert not any("usage" in event for event in start_server(compat="vllm").events(route, body))
    refused = server.post(route, body)
    assert refused.status_code == 400 and "include_usage" in refused.json()["error"]["message"]


def test_keys_without_value_are_left_out_otherwise(server):
    answer = server.answer(CHAT, {"messages": MESSAGES, **GREEDY})
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["choices"][0].keys() == {"index", "message", "logprobs", "finish_reason", "stop_reason"}


def test_a_model_has_all_keys(server, tiny_model):
    [found] = server.http.get("/v1/models").json()["data"]
    wire.Model.model_validate(found, strict=True)
    names = set("id object created owned_by root parent max_model_len permission".split())
    assert found.keys() >= names
    assert found["root"] == str(tiny_model) and found["parent"] is None and found["max_model_len"] == 256
    assert found["permission"][0]["allow_logprobs"] is True
    assert server.http.get("/v1/models/tiny").json() == found


def test_usage_is_given_in_every_stream_if_the_server_says_so(vllm, server):
    for route, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = vllm.events(route, body | GREEDY | {"stream": True} | options)
            assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
            assert chunks[-1]["choices"] == []
        assert "usage" not in server.events(route, body | GREEDY | {"stream": True})[-1]
        refused = vllm.post(route, body | GREEDY | {"stream_options": {"include_usage": True}})
        assert refused.json()["error"]["param"] == "stream_options"


def test_tokens_are_written_as_ids_if_the_server_says_so(vllm):
    body = {"prompt": PROMPT, **GREEDY, "logprobs": 0}
    tokens = vllm.answer(COMPLETIONS, body)["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("token_id:") for token in tokens)
    given = vllm.answer(COMPLETIONS, body | {"return_tokens_as_token_ids": False})["choices"][0]
    assert "".join(given["logprobs"]["tokens"]) == given["text"]
    chat = vllm.answer(CHAT, {"messages": MESSAGES, **GREEDY, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in chat] != [] and all(one["token"].startswith("token_id:") for one in chat)
    chunks = vllm.events(CHAT, {"messages": MESSAGES, **GREEDY, "logprobs": True, "stream": True})
    assert any("token_id:" in json.dumps(chunk) for chunk in chunks)


OBJECT = {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
GUIDED = [
    ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
    ({"guided_regex": "[ab]{3}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 3),
    ({"guided_grammar": 'root ::= "sun" | "moon"'}, lambda text: text in ("sun", "moon")),
    (
        {"guided_json": OBJECT,
         "guided_whitespace_pattern": "[ ]?", "guided_decoding_backend": "xgrammar"},
        lambda text: json.loads(text)["a"] in (True, False) and "\n" not in text,
    ),
    ({"guided_json": '{"enum": [5]}'}, lambda text: text == "5"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "holds"), GUIDED)
def test_former_names_of_constraints(vllm, server, fields, holds):
    body = {"max_tokens": 60, "temperature": 0} | fields
    text = vllm.answer(COMPLETIONS, {"prompt": PROMPT} | body)["choices"][0]["text"]
    assert holds(text), text
    chat = vllm.answer(CHAT, {"messages": MESSAGES} | body)["choices"][0]["message"]["content"]
    assert holds(chat), chat
    refused = server.post(COMPLETIONS, {"prompt": PROMPT} | body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == next(iter(fields)) and "--compat vllm" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_invalid_former_names_are_refused(vllm, fields, param):
    response = vllm.post(COMPLETIONS, {"prompt": PROMPT, **GREEDY} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_null_former_names_have_no_effect(vllm):
    plain = vllm.answer(COMPLETIONS, {"prompt": PROMPT, **GREEDY})["choices"]
    fields = {"guided_json": None, "guided_regex": None, "response_format": {"type": "text"}}
    assert vllm.answer(COMPLETIONS, {"prompt": PROMPT, **GREEDY} | fields)["choices"] == plain


def test_a_proxys_prefix_may_stay_in_the_path(vllm):
    body = {"prompt": PROMPT, **GREEDY}
    assert vllm.answer("/llm/v1/completions", body)["choices"] == vllm.answer(COMPLETIONS, body)["choices"]
    for path in ("/llm/health", "/health", "/llm/chat", "/llm/chat/chat.css", "/llm"):
        assert vllm.http.get(path).status_code == 200, path
    assert vllm.http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    for path in ("/llmhealth", "/other/health", "/llm/llm/health"):
        assert vllm.http.get(path).status_code == 404, path


def test_a_prefix_hides_no_route_from_the_check_of_keys(vllm):
    for path in ("/llm/v1/models", "/v1/models", "/llm/tokenizer_info", "/llm/invocations", "/llm/server_info"):
        response = vllm.http.get(path, headers={"Authorization": "Bearer wrong"})
        assert response.status_code in (401, 403), path
    for prefix in ("/llm", "/llm/", "//llm/", "/llm/llm/"):
        response = vllm.http.get(f"{prefix}/v1/models", headers={"Authorization": ""})
        assert response.status_code in (401, 404), prefix
        assert vllm.http.get(f"{prefix}/health/../v1/models", headers={"Authorization": ""}).status_code != 200


def test_the_last_message_is_echoed(server):
    body = {"messages": PARTIAL, **GREEDY, "continue_final_message": True, "add_generation_prompt": False}
    plain = server.answer(CHAT, body | {"n": 2})["choices"]
    for echo, before in ((True, "red bird"), (False, "")):
        found = server.answer(CHAT, body | {"echo": echo, "n": 2})["choices"]
        assert [one["message"]["content"] for one in found] == [before + one["message"]["content"] for one in plain]
        texts = ["", ""]
        for chunk in server.events(CHAT, body | {"echo": echo, "n": 2, "stream": True}):
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == [one["message"]["content"] for one in found]
    parts = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
    content = server.answer(CHAT, {"messages": parts, **GREEDY, "echo": True})["choices"][0]["message"]["content"]
    assert content.startswith("red")


def test_a_users_message_is_not_echoed(server):
    plain = server.answer(CHAT, {"messages": MESSAGES, **GREEDY})["choices"]
    assert server.answer(CHAT, {"messages": MESSAGES, **GREEDY, "echo": True})["choices"] == plain
    assert server.post(CHAT, {"messages": MESSAGES, "echo": "yes"}).json()["error"]["param"] == "echo"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})])
def test_the_load_is_reported_if_a_request_asks_for_it(server, route, body, stream):
    body = body | GREEDY | {"stream": stream}

    def report(wanted):
        response = server.post(route, body, headers={"Endpoint-Load-Metrics-Format": wanted} if wanted else {})
        assert response.status_code == 200
        return response.headers.get("endpoint-load-metrics")

    kind, _, text = report("JSON").partition(" ")
    values = json.loads(text)["named_metrics"]
    assert kind == "JSON" and values.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert 0 <= values["kv_cache_usage_perc"] <= 1
    kind, _, text = report("text").partition(" ")
    pairs = dict(pair.split("=") for pair in text.split(", "))
    assert kind == "TEXT" and pairs.keys() == {f"named_metrics.{name}" for name in values}
    assert [float(value) >= 0 for value in pairs.values()] == [True, True]
    assert report(None) is None and report("BIN") is None


def test_a_refused_request_has_no_report(server):
    response = server.post(COMPLETIONS, {"prompt": []}, headers={"Endpoint-Load-Metrics-Format": "JSON"})
    assert response.status_code == 400 and "endpoint-load-metrics" not in response.headers


def test_ping_is_the_liveness_of_the_server(vllm):
    for call in (vllm.http.get, vllm.http.post):
        response = call("/ping", headers={"Authorization": ""})
        assert response.status_code == 200 and response.json() == {"status": "ok"}


def test_invocations_answers_as_the_route_of_its_body(server):
    for route, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        body = body | GREEDY | {"seed": 1}
        own, other = server.answer(route, body), server.answer(INVOCATIONS, body)
        assert (own["object"], own["choices"], own["model"]) == (other["object"], other["choices"], other["model"])
        chunks = server.events(INVOCATIONS, body | {"stream": True})
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    both = server.answer(INVOCATIONS, {"messages": MESSAGES, "prompt": None, **GREEDY})
    assert both["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"input": "red"}, "messages"),
        ({"messages": [{"role": 5}]}, "messages"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "red", "max_tokens": -1}, "max_tokens"),
        ({"messages": MESSAGES, "promt": 1}, "promt"),
    ],
)
def test_invocations_names_what_is_wrong(server, body, param):
    response = server.post(INVOCATIONS, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_invocations_needs_a_key_and_a_served_model(vllm):
    assert vllm.post(INVOCATIONS, {"prompt": PROMPT}, headers={"Authorization": ""}).status_code == 401
    assert vllm.post(INVOCATIONS, {"prompt": PROMPT, "model": "other"}).status_code == 404
    assert vllm.post(INVOCATIONS, [1]).status_code == 400


def test_a_batch_answers_each_conversation_as_a_chat(server):
    conversations = [[{"role": "user", "content": text}] for text in ("red bird", "blue house", "the sea")]
    body = {**GREEDY, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    answer = server.answer(BATCH, {"messages": conversations, **body})
    wire.ChatCompletion.model_validate(answer, strict=True)
    single = [server.answer(CHAT, {"messages": messages, **body}) for messages in conversations]
    expected = [one["choices"][0] | {"index": number} for number, one in enumerate(single)]
    for found, other in zip(answer["choices"], expected, strict=True):
        assert found["message"] == other["message"] and found["token_ids"] == other["token_ids"]
        assert found["index"] == other["index"] and found["logprobs"]["content"]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in single)
    assert answer["usage"]["completion_tokens"] == 12 and answer["object"] == "chat.completion"


def test_a_batch_shares_its_constraint_and_echoes(server):
    body = {"messages": [MESSAGES, PARTIAL], "echo": True, "structured_outputs": {"choice": ["sun"]}, "max_tokens": 9}
    contents = [one["message"]["content"] for one in server.answer(BATCH, body)["choices"]]
    assert contents == ["sun", "red birdsun"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", "at least one conversation"),
        ({"messages": MESSAGES}, "messages", "messages[0]"),
        ({"messages": [MESSAGES, []]}, "messages", "messages[1] is empty"),
        ({"messages": [MESSAGES, [{"content": "a"}]]}, "messages", "messages[1][0].role"),
        ({"messages": [MESSAGES, [{"role": "judge", "content": "a"}]]}, "messages", "messages[1]: "),
        ({"messages": [MESSAGES, [{"role": "user", "content": "red " * 999}]]}, "messages", "messages[1] has "),
        ({"messages": [MESSAGES] * 257}, "messages", "--max-sequences-per-request"),
        ({"stream": True}, "stream", "several conversations"),
        ({"n": 2}, "n", "must be 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "several conversations"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "several conversations"),
        ({"temperature": -1}, "temperature", ""),
        ({"top_logprob": 1}, "top_logprob", "did you mean"),
    ],
)
def test_a_batch_names_what_is_wrong(server, fields, param, text):
    response = server.post(BATCH, {"messages": [MESSAGES], **GREEDY} | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and text in error["message"], error


def test_special_tokens_are_added_to_messages_on_request(start_server, tiny_model, tmp_path):
    folder = tmp_path / "with-bos"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    server = start_server(model=str(folder))

    def tokens(**fields):
        return server.answer("/tokenize", fields)["tokens"]

    plain = tokens(messages=MESSAGES)
    assert plain[0] != 0 and tokens(messages=MESSAGES, add_special_tokens=False) == plain
    assert tokens(messages=MESSAGES, add_special_tokens=None) == plain
    assert tokens(messages=MESSAGES, add_special_tokens=True) == [0, *plain]
    assert tokens(prompt=PROMPT) == [0, *tokens(prompt=PROMPT, add_special_tokens=False)]
    for adds, ids in ((None, plain), (False, plain), (True, [0, *plain])):
        body = {"messages": MESSAGES, **GREEDY, "return_token_ids": True, "add_special_tokens": adds}
        assert server.answer(CHAT, body)["prompt_token_ids"] == ids


def test_the_openai_client_reads_a_server_that_speaks_vllms_dialect(vllm):
    with OpenAI(base_url=vllm.url + "/llm/v1", api_key="secret") as client:
        assert client.models.list().data[0].id == "tiny"
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, extra_body={"echo": True})
        assert chat.choices[0].message.content and chat.usage.completion_tokens <= 3
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, stream=True)
        assert [chunk.usage for chunk in stream][-1].total_tokens > 0
