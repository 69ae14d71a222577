"""Ollama's API: answers and streams, options, formats, tools, refusals, and what clients ask about models."""

from __future__ import annotations

import json

import pytest

from engine.protocol.request import SamplingParams
from server.schemas import ollama_answers as wire
from server.schemas.ollama import OllamaChatBody
from tests.server.conftest import running, tiny_config

CHAT, GENERATE = "/api/chat", "/api/generate"
PROMPT = "the old king sleeps"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "num_predict": 6}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = TOOL["function"]["parameters"]


def chat(**fields):
    return {"model": "tiny", "messages": MESSAGES, "options": GREEDY, "stream": False, **fields}


def generate(**fields):
    return {"model": "tiny", "prompt": PROMPT, "options": GREEDY, "stream": False, **fields}


def lines(server, path, body):
    """Return the lines of a stream."""
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def error(server, path, body, status=400):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return response.json()["error"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_is_read_as_json_whatever_its_type(server, kind):
    """litellm sends none, and the examples in Ollama's documentation use `curl -d`."""
    content, headers = json.dumps(chat()).encode(), {} if kind is None else {"Content-Type": kind}
    answer = server.http.post(CHAT, content=content, headers=headers)
    assert answer.status_code == 200 and answer.json()["done"], answer.text
    from_page = server.http.post(CHAT, content=content, headers=headers | {"Origin": "http://localhost"})
    assert from_page.status_code == 415 and "send Content-Type: application/json" in from_page.json()["error"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (GENERATE, generate())])
def test_an_answer_and_its_stream_agree(server, path, body):
    answer = server.answer(path, body)
    model, text = (wire.OllamaChat, "message") if path == CHAT else (wire.OllamaGenerated, "response")
    model.model_validate(answer)
    *pieces, last = lines(server, path, {name: value for name, value in body.items() if name != "stream"})
    assert pieces and all(piece["done"] is False for piece in pieces)  # A slow reader gets several tokens in one.
    for line in (*pieces, last):
        model.model_validate(line)
    content = (lambda one: one["message"]["content"]) if text == "message" else (lambda one: one["response"])
    assert content(answer) and "".join(map(content, pieces)) == content(answer) and content(last) == ""
    assert (last["done"], last["done_reason"]) == (answer["done"], answer["done_reason"]) == (True, "length")
    for one in (answer, last):
        assert one["eval_count"] == 6 and one["prompt_eval_count"] >= 2 and one["load_duration"] == 0
        assert one["total_duration"] == pytest.approx(one["prompt_eval_duration"] + one["eval_duration"], abs=2)
        assert 0 < one["eval_duration"] < 60e9


def test_the_chat_is_that_of_the_openai_route(server):
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    expected = server.answer("/v1/chat/completions", body)
    found = server.answer(CHAT, chat())
    assert found["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert server.answer(GENERATE, generate())["response"] == found["message"]["content"]


def test_a_raw_prompt_has_no_template(server):
    expected = server.answer("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0})
    found = server.answer(GENERATE, generate(raw=True))
    assert found["response"] == expected["choices"][0]["text"]
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    whole = server.answer(GENERATE, generate(raw=True, options={"temperature": 0, "num_predict": -1}))
    assert whole["prompt_eval_count"] + whole["eval_count"] <= 256
    for name, value in (("system", "be short"), ("think", True)):
        assert f"{name} has no effect with raw=true" in error(server, GENERATE, generate(raw=True, **{name: value}))


def test_the_system_message_is_part_of_the_prompt(server):
    plain, system = (server.answer(GENERATE, generate(**more)) for more in ({}, {"system": "the red fox"}))
    messages = [{"role": "system", "content": "the red fox"}, *MESSAGES]
    assert system["prompt_eval_count"] > plain["prompt_eval_count"]
    assert server.answer(CHAT, chat(messages=messages))["message"]["content"] == system["response"]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"num_predict": 3}, {"max_tokens": 3}),
        ({"num_predict": 4, "repeat_penalty": 1.5}, {"max_tokens": 4, "repetition_penalty": 1.5}),
        ({"num_predict": 9, "repeat_penalty": 1.9, "repeat_last_n": 0}, {"max_tokens": 9}),
        ({"num_predict": 6, "presence_penalty": 2, "frequency_penalty": 2, "repeat_last_n": -1},
         {"max_tokens": 6, "presence_penalty": 2, "frequency_penalty": 2}),
        ({"num_predict": 6, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 7},
         {"max_tokens": 6, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 7}),
    ],
)  # fmt: skip
def test_options_are_sampling_parameters(server, options, same):
    greedy = {"temperature": 0}
    expected = server.answer("/v1/chat/completions", {"messages": MESSAGES, **greedy, **same})
    found = server.answer(CHAT, chat(options=greedy | options))
    assert found["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert found["eval_count"] == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 1.0, "frequency_penalty": -1.0}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1.0, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"num_predict": -2}, {"max_tokens": 256}),
        ({"num_predict": 7, "seed": 5, "stop": "a"}, {"max_tokens": 7, "seed": 5, "stop": ("a",)}),
        ({"seed": -1, "min_p": 0.5, "top_k": 3, "top_p": 0.5}, {"min_p": 0.5, "top_k": 3, "top_p": 0.5}),
    ],
)
def test_each_option_becomes_its_sampling_parameter(options, params):
    defaults = {"repetition_penalty": 1.2, "temperature": 0.6}  # of the model
    body, places = OllamaChatBody.model_validate({"model": "tiny", "messages": MESSAGES, "options": options}).chat(256)
    plain = SamplingParams.from_dict({"max_tokens": None} | defaults | params)
    assert body.sampling(defaults) == plain and places == ["messages[0]"]


def test_a_stop_string_ends_the_answer(server):
    options = {"seed": 5, "temperature": 1.5, "num_predict": 40}
    text = server.answer(CHAT, chat(options=options))["message"]["content"]
    word = text.split()[1]
    for stop in (word, ["never", word]):
        found = server.answer(CHAT, chat(options=options | {"stop": stop}))
        assert found["message"]["content"] == text[: text.index(word)] and found["done_reason"] == "stop"


@pytest.mark.parametrize("limit", [-1, -2, 0, 100_000])
def test_the_context_bounds_an_answer_without_a_limit(server, limit):
    found = server.answer(CHAT, chat(options={"temperature": 2.0, "seed": 3, "num_predict": limit}))
    assert found["done_reason"] in ("stop", "length")
    assert found["prompt_eval_count"] + found["eval_count"] <= 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "options.temperature must be a number from 0 to 100; found -1"),
        ({"temperature": "hot"}, "options.temperature: Input should be a valid number"),
        ({"repeat_penalty": 0}, "options.repeat_penalty must be"),
        ({"num_predict": -3}, "options.num_predict must be an integer from 0"),
        ({"top_p": 2}, "options.top_p must be"),
        ({"mirostat": 1}, "options.mirostat is not supported"),
        ({"typical_p": 0.5}, "options.typical_p is not supported"),
        ({"repeat_last_n": 5}, "options.repeat_last_n=5 is not supported"),
        ({"temprature": 1}, "options.temprature is not a known field; did you mean 'temperature'?"),
        ({"stop": [""]}, "options.stop"),
    ],
)
def test_an_option_that_cannot_be_served_is_refused_by_name(server, options, message):
    assert message in error(server, CHAT, chat(options=options))
    assert message in error(server, GENERATE, generate(options=options, stream=True))


@pytest.mark.parametrize(
    "options", [{"num_ctx": 8192, "num_thread": 2, "num_keep": 4}, {"mirostat": 0, "mirostat_tau": 5.0, "seed": -1},
                {"repeat_last_n": 64, "typical_p": 1.0, "penalize_newline": True, "use_mmap": None}],
)  # fmt: skip
def test_an_option_without_effect_is_accepted(server, options):
    plain = server.answer(CHAT, chat())
    assert server.answer(CHAT, chat(options=GREEDY | options))["message"] == plain["message"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_a_format_constrains_the_answer(server, path, form):
    options = {"seed": 1, "num_predict": 200, "temperature": 1.5}
    body = (chat if path == CHAT else generate)(format=form, options=options)
    answer = server.answer(path, body)
    text = answer["message"]["content"] if path == CHAT else answer["response"]
    if answer["done_reason"] == "stop":
        found = json.loads(text)
        assert isinstance(found, dict) and (form == "json" or found.keys() == {"city", "days"})
    else:
        assert text.lstrip().startswith("{")
    assert server.answer(path, {**body, "format": "", "options": GREEDY})["eval_count"] == 6


@pytest.mark.parametrize("form", ["xml", 5, {"type": "nonsense"}])
def test_an_unknown_format_is_refused(server, form):
    assert "format" in error(server, CHAT, chat(format=form))


@pytest.fixture(scope="module")
def tools_server(tiny_model):
    with running(tiny_config(tiny_model, max_model_len=2048)) as handle:
        yield handle


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_and_their_results(tools_server, streamed):
    options = {"seed": 1, "num_predict": -1, "temperature": 1.0}
    body = chat(tools=[TOOL], tool_choice="required", options=options, stream=streamed)
    found = lines(tools_server, CHAT, body) if streamed else [tools_server.answer(CHAT, body)]
    for line in found:
        wire.OllamaChat.model_validate(line)
    calls = [call for line in found for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["index"] for call in calls] == list(range(len(calls))) and calls
    assert all(call["function"]["name"] == "weather" and call["id"] for call in calls)
    assert calls[0]["function"]["arguments"].keys() == {"city", "days"} and found[-1]["done_reason"] == "stop"
    call = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 1}}}  # as Ollama's clients send it
    turns = [*MESSAGES, {"role": "assistant", "content": "", "thinking": "so", "tool_calls": [call, *calls[:1]]}]
    earlier = found[-1]["prompt_eval_count"]
    for result in ({"tool_name": "weather"}, {"tool_name": "weather", "tool_call_id": calls[0]["id"]}, {}):
        turns.append({"role": "tool", "content": "sunny", **result})
        answer = tools_server.answer(CHAT, chat(messages=turns, tools=[TOOL]))
        assert answer["prompt_eval_count"] > earlier
        earlier = answer["prompt_eval_count"]


@pytest.mark.parametrize("kind", ["required", {"type": "function", "function": {"name": "other"}}])
def test_a_choice_without_its_tool_is_refused(server, kind):
    assert "tool_choice" in error(server, CHAT, chat(tool_choice=kind))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "a", "images": ["iVBOR"]}, "messages[0].images is not supported"),
        ({"role": "user", "content": "a", "colour": "red"}, "messages[0].colour is not a known field"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "messages[0].tool_calls[0].function must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]},
         "messages[0].tool_calls[0].arguments must be a JSON object"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_served_is_refused_by_its_place(server, message, expected):
    assert expected in error(server, CHAT, chat(messages=[message]))


def test_images_of_a_prompt_are_refused_and_none_are_accepted(server):
    assert "images is not supported" in error(server, GENERATE, generate(images=["iVBOR"]))
    server.answer(GENERATE, generate(images=[], context=[], suffix="", template="", keep_alive=-1))
    server.answer(CHAT, chat(messages=[{"role": "user", "content": "red", "images": []}], keep_alive="5m"))


@pytest.mark.parametrize("think", [True, "high"])
def test_thinking_is_refused_for_a_model_without_it(server, think):
    assert "does not support thinking" in error(server, CHAT, chat(think=think))
    assert "does not support thinking" in error(server, GENERATE, generate(think=think))
    assert "think: must be true, false" in error(server, CHAT, chat(think="much"))


def test_thinking_is_a_field_of_its_own(start_server):
    server = start_server(reasoning_parser="deepseek_r1")
    options = {"seed": 1, "num_predict": 30}
    answer = server.answer(CHAT, chat(think=True, options=options))  # without </think>, all text is reasoning
    assert answer["message"]["thinking"] and answer["message"]["content"] == ""
    *pieces, _ = lines(server, GENERATE, generate(stream=True, think="low", options=options))
    assert "".join(piece.get("thinking", "") for piece in pieces) == answer["message"]["thinking"]
    assert "thinking" in server.answer("/api/show", {"model": "tiny"})["capabilities"]


def test_logprobs_of_the_tokens(server):
    answer = server.answer(CHAT, chat(logprobs=True, top_logprobs=2))
    assert len(answer["logprobs"]) == 6 and all(len(one["top_logprobs"]) == 2 for one in answer["logprobs"])
    *pieces, _ = lines(server, CHAT, chat(logprobs=True, stream=True))
    streamed = [one["logprob"] for piece in pieces for one in piece["logprobs"]]
    assert streamed == pytest.approx([one["logprob"] for one in answer["logprobs"]], abs=1e-4)
    assert "logprobs" not in server.answer(CHAT, chat(top_logprobs=2))
    assert "top_logprobs=21 must be from 0 to 20" in error(server, CHAT, chat(logprobs=True, top_logprobs=21))


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"model": "tiny:latest", "keep_alive": 0}])
def test_an_empty_request_waits_for_the_model(server, body):
    for path, more, text in ((CHAT, {"messages": []}, "message"), (GENERATE, {"prompt": ""}, "response")):
        answer = server.answer(path, body | more)
        assert answer["done"] and answer["done_reason"] == "load" and answer["model"] == body["model"]
        assert answer[text] in ("", {"role": "assistant", "content": ""})
        assert server.answer(path, body) | {"created_at": ""} == answer | {"created_at": ""}


def test_names_may_have_the_tag_latest(server):
    assert server.answer(CHAT, chat(model="tiny:latest"))["model"] == "tiny:latest"
    for path, body in ((CHAT, chat()), (GENERATE, generate()), ("/api/show", {})):
        message = error(server, path, {**body, "model": "other"}, 404)
        assert message == "the model 'other' is not served; served models: tiny"
    assert "model" in error(server, CHAT, {"messages": MESSAGES})
    assert (
        "the body is not valid JSON"
        in server.http.post(CHAT, content=b"{", headers={"content-type": "application/json"}).json()["error"]
    )


def test_clients_learn_about_the_model(server):
    assert server.http.get("/api/version").json()["version"].count(".") == 2
    assert {server.http.head(path).status_code for path in ("/", "/api/version", "/api/tags")} == {200}
    [listed] = wire.OllamaModels.model_validate(server.http.get("/api/tags").json()).models
    [loaded] = wire.OllamaLoaded.model_validate(server.http.get("/api/ps").json()).models
    assert listed.name == listed.model == loaded.name == "tiny:latest"
    assert len(listed.digest) == 64 and listed.digest == loaded.digest and listed.size == loaded.size > 0
    assert loaded.size_vram == 0 and loaded.context_length == 256
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}):
        shown = wire.OllamaShown.model_validate(server.answer("/api/show", body))
    assert shown.details == listed.details and shown.details.family == shown.model_info["general.architecture"]
    assert shown.model_info["general.parameter_count"] * 4 == listed.size  # the test server has float32
    assert shown.model_info[f"{shown.details.family}.context_length"] == 256 and "completion" in shown.capabilities
    assert error(server, "/api/show", {}) == "model is required"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/embed"), ("POST", "/api/embeddings"), ("POST", "/api/pull"), ("POST", "/api/create"),
     ("POST", "/api/copy"), ("POST", "/api/push"), ("DELETE", "/api/delete"), ("POST", "/api/blobs/sha256:1")],
)  # fmt: skip
def test_what_is_not_supported_says_so_in_the_format_of_the_api(server, method, path):
    response = server.http.request(method, path, json={"model": "tiny"})
    assert response.status_code == 501 and list(response.json()) == ["error"]
    response = server.http.request(method, "/api/nonsense", json={})
    assert response.status_code == 404 and "unknown route" in response.json()["error"]


def test_a_long_prompt_is_refused_and_not_cut(server):
    message = error(server, CHAT, chat(messages=[{"role": "user", "content": "red bird " * 300}]))
    assert "messages" in message and "256" in message
    assert "truncate is not supported" in error(server, CHAT, chat(truncate=True))
    server.answer(CHAT, chat(truncate=False, shift=False))


def test_keys_and_admission_are_those_of_other_routes(start_server, tmp_path):
    (tmp_path / "keys").write_text("sk-1")
    server = start_server(api_key_file=str(tmp_path / "keys"), max_num_seqs=1, max_waiting=0)
    response = server.post(CHAT, chat())
    assert response.status_code == 401 and list(response.json()) == ["error"]
    assert server.http.get("/api/tags").status_code == 401
    server.http.headers["authorization"] = "Bearer sk-1"
    long = {"temperature": 2.0, "seed": 1, "num_predict": -1}
    with server.http.stream("POST", CHAT, json=chat(stream=True, options=long)) as response:
        assert response.status_code == 200
        refused = server.post(GENERATE, generate())
        assert refused.status_code in (200, 429)  # 200 if the first had ended
        if refused.status_code == 429:
            assert "in flight" in refused.json()["error"] and refused.headers["retry-after"]
    server.wait_idle()  # the abandoned stream ends
