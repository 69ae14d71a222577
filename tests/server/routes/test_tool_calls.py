"""Tool calls and reasoning of a running server: a constraint on the output stands for a model that writes them."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from server.schemas import answers as wire
from server.serving.tokenization import INLINE_CHARS
from tests.server.conftest import running, tiny_config

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "red"}]
SCHEMA = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2]}},
    "required": ["unit", "days"], "additionalProperties": False,
}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, parameters=SCHEMA, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("weather"), tool("now", EMPTY)]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C", "days": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def reasoning_server(tiny_model):
    with running(tiny_config(tiny_model, max_model_len=1024, reasoning_parser="qwen3")) as handle:
        yield handle


def says(server, text, **fields):
    """Return a request whose answer is `text`, which no other text may replace.

    With tools, calls may: they begin with "<", which is therefore biased against, without effect where `text` has it.
    """
    [bracket] = server.answer("/tokenize", {"prompt": "<"})["tokens"]
    constraint = {"structured_outputs": {"choice": [text]}, "logit_bias": {str(bracket): -100}}
    return {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, **constraint, **fields}


def streamed(server, body):
    """Return the message and finish reason that the chunks of a stream add up to."""
    message, finish = {"content": None, "tool_calls": []}, None
    for chunk in server.events(CHAT, body | {"stream": True}):
        wire.ChatChunk.model_validate(chunk, strict=True)
        [choice] = chunk["choices"]
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            assert call["index"] == len(message["tool_calls"])
            message["tool_calls"].append(call["function"])
    return message, finish


def answered(server, body):
    """Return the message and finish reason of an answer, which must equal those of its stream."""
    answer = server.answer(CHAT, body)
    wire.ChatCompletion.model_validate(answer, strict=True)
    [choice] = answer["choices"]
    message = {name: value for name, value in choice["message"].items() if name not in ("role", "refusal")}
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", [])]
    message["content"] = message["content"] or None
    assert streamed(server, body) == (message, choice["finish_reason"])
    return message, choice["finish_reason"]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("I look.", "I look.", []),
        (f"I look.\n{CALL}", "I look.", ["weather"]),
        (f"I look.\n{CALL}\n{NOW}", "I look.", ["weather", "now"]),
        ("I <tool_call>nothing</tool_call>", "I <tool_call>nothing</tool_call>", []),
        (f"I {NOW.replace('now', 'never')}", f"I {NOW.replace('now', 'never')}", []),
    ],
)
def test_calls_are_split_off_when_the_model_chooses(long_server, text, content, names):
    message, finish = answered(long_server, says(long_server, text, tools=TOOLS))
    assert message["content"] == content and [call["name"] for call in message["tool_calls"]] == names
    assert finish == ("tool_calls" if names else "stop")
    for call in message["tool_calls"]:
        assert json.loads(call["arguments"]) == ({"unit": "C", "days": 1} if call["name"] == "weather" else {})


def test_without_tools_a_call_is_text(long_server):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, finish = answered(long_server, says(long_server, CALL, **fields))
        assert message == {"content": CALL, "tool_calls": []} and finish == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_calls_follow_the_schema(long_server, choice, seed):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
    message, finish = answered(long_server, body)
    [call] = message["tool_calls"]
    assert finish == "tool_calls" and message["content"] is None
    assert call["name"] == "weather" if choice != "required" else call["name"] in ("weather", "now")
    if call["name"] == "weather":
        found = json.loads(call["arguments"])
        assert set(found) == {"unit", "days"} and found["unit"] in "CF" and found["days"] in (1, 2)


def test_an_answer_in_a_format_beside_tools(long_server):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    for seed in range(4):
        body = {"messages": MESSAGES, "tools": TOOLS, "response_format": schema, "seed": seed, "max_tokens": 60}
        message, finish = answered(long_server, body)
        assert finish == "length" or message["tool_calls"] or json.loads(message["content"]) in ("yes", "no")


def test_reasoning_is_split_off(reasoning_server):
    text = "<think>\nhm, hm\n</think>\n\nyes"
    messages = [*MESSAGES, {"role": "assistant", "content": "I:"}]  # continued, so that nothing may precede the text
    body = says(reasoning_server, text, messages=messages, continue_final_message=True)
    message, finish = answered(reasoning_server, body)
    assert message == {"content": "yes", "reasoning": "hm, hm", "reasoning_content": "hm, hm", "tool_calls": []}
    assert finish == "stop"
    message, _ = answered(reasoning_server, body | {"include_reasoning": False})
    assert message == {"content": "yes", "tool_calls": []}
    message, _ = answered(reasoning_server, body | {"separate_reasoning": False})
    assert message["content"] == text


def test_reasoning_has_a_budget_only_if_its_end_is_a_token(reasoning_server):
    response = reasoning_server.post(CHAT, {"messages": MESSAGES, "max_tokens": 5, "thinking_token_budget": 3})
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget", response.text


def test_logprobs_cover_the_tokens_of_calls(long_server):
    server = long_server
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 1, "logprobs": True,
            "parallel_tool_calls": False}  # fmt: skip
    answer = server.answer(CHAT, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in server.events(CHAT, body | {"stream": True})]
    assert [one for logprobs in chunks if logprobs for one in logprobs["content"]] == content


def test_a_schema_that_can_not_be_followed_is_an_error_for_a_strict_tool(long_server):
    server = long_server
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    body = {"messages": MESSAGES, "tool_choice": "required", "max_tokens": 20}
    response = server.post(CHAT, body | {"tools": [tool("f", odd, strict=True)]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools", response.text
    server.answer(CHAT, body | {"tools": [tool("f", odd)]})


BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
LOOK_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=b)b+$"}}}


def in_format_of(path, tools):
    """Return a request of calls to a route, with tools of chats in its format."""
    functions = [one["function"] for one in tools]
    if path == CHAT:
        return {"messages": MESSAGES, "max_tokens": 20, "tools": tools, "tool_choice": "required"}
    if path == "/v1/responses":
        flat = [{"type": "function", **one} for one in functions]
        return {"input": "red", "max_output_tokens": 20, "tools": flat, "tool_choice": "required"}
    renamed = [
        {"name": one["name"], "input_schema": one["parameters"], "strict": one.get("strict")} for one in functions
    ]
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "tools": renamed, "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (CHAT, "tools[1].function.parameters"),
        ("/v1/responses", "tools[1].parameters"),
        ("/v1/messages", "tools[1].input_schema"),
    ],
)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (tool("f", BAD), ".properties.a: invalid regular expression: unclosed group"),
        (tool("f", LOOK_AHEAD, strict=True), ".properties.a: invalid regular expression: look-around"),
        (tool("f", {"properties": {"a": {"type": "text"}}}), ".properties.a: Invalid type: text"),
        (tool("f", {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}}}), ": Pointer '/$defs/b' does not exist"),
        (tool("f", {"type": "text"}), '.type must be "object", found'),
    ],
)
def test_an_error_of_a_schema_names_its_tool(long_server, path, place, function, reason):
    response = long_server.post(path, in_format_of(path, [TOOLS[0], function]))
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(place) and reason in message, message
    assert response.json()["error"].get("param", "tools") == "tools"


def test_an_error_of_the_answer_beside_tools_names_its_field(long_server):
    body = {"messages": MESSAGES, "tools": TOOLS}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
    tag = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "("}]}}
    for fields, place in (
        ({"response_format": schema}, "response_format.json_schema.schema.properties.a"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": tag}},
         "structured_outputs.structural_tag.format.elements[0].pattern"),
    ):  # fmt: skip
        error = long_server.post(CHAT, body | fields).json()["error"]
        assert error["message"] == f"{place}: invalid regular expression: unclosed group"
        assert error["param"] == place.partition(".")[0]


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def calling_server(tiny_model, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("with_tools") / "model"
    shutil.copytree(tiny_model, folder)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    with running(tiny_config(folder, max_model_len=1024, tool_call_parser=request.param)) as handle:
        yield handle


@pytest.mark.parametrize(
    "schema",
    [
        LOOK_AHEAD,
        {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^(b)\1$"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": r"\bb\b"}}}},
        {"type": "object", "patternProperties": {"^(?!a)": {"type": "string"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/b.json"}}},
        {"type": "object", "properties": {"a": {"type": "string", "format": "color", "not": {"const": "b"}}}},
    ],
)
def test_what_can_not_be_followed_is_ignored_for_functions_that_are_not_strict(calling_server, schema):
    body = {"messages": MESSAGES, "max_tokens": 4, "tools": [tool("f", schema), tool("now", EMPTY, strict=True)]}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        calling_server.answer(CHAT, body | {"tool_choice": choice})
    strict = calling_server.post(CHAT, body | {"tools": [tool("f", schema, strict=True)]})
    assert strict.status_code == 400 and strict.json()["error"]["message"].startswith("tools[0].function.parameters")


def test_the_other_keywords_of_such_a_schema_are_followed(long_server):
    unread = LOOK_AHEAD["properties"]["a"] | {"maxLength": 8}
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"a": unread}}
    body = {"messages": MESSAGES, "max_tokens": 300, "seed": 1, "parallel_tool_calls": False}
    message, _ = answered(long_server, body | {"tools": [tool("weather", schema)], "tool_choice": "required"})
    found = json.loads(message["tool_calls"][0]["arguments"])
    assert found["unit"] in "CF" and found["days"] in (1, 2) and set(found) <= {"unit", "days", "a"}


def test_a_budget_that_can_not_be_kept_beside_a_constraint_is_named(reasoning_server):
    for fields in ({"response_format": {"type": "json_object"}}, {"regex": "a"}, {"tools": TOOLS}):
        body = {"messages": MESSAGES, "max_tokens": 5, "thinking_token_budget": 3, **fields}
        error = reasoning_server.post(CHAT, body).json()["error"]
        assert error["param"] == "thinking_token_budget"
        assert re.match("thinking_token_budget: </think> is .* tokens of the model, and must be one", error["message"])


def test_a_call_that_a_limit_cuts_is_no_content(long_server):
    """The same for a whole answer and its stream: complete calls stay, and no part of the last one is shown."""
    body = says(long_server, f"I look.\n{NOW}\n{CALL}", tools=TOOLS)
    [choice] = long_server.answer(CHAT, body | {"return_token_ids": True})["choices"]
    ids, decode = choice["token_ids"], long_server.service.client.tokenizer.decode
    for limit in range(8, len(ids) - 2, 9):
        written = decode(ids[:limit])
        message, finish = answered(long_server, body | {"max_tokens": limit})
        names = [call["name"] for call in message["tool_calls"]]
        assert names == ["now", "weather"][: written.count("}}")], written
        assert message["content"].rstrip("\n<") == "I look." and finish == "length", written


def test_a_call_that_a_stop_string_cuts_is_no_content(long_server):
    body = says(long_server, f"I look.\n{CALL}", tools=TOOLS, stop=['"days"'])
    message, finish = answered(long_server, body)
    assert message == {"content": "I look.", "tool_calls": []} and finish == "stop"


def test_a_call_that_a_limit_cuts_is_no_content_of_other_apis(long_server):
    text = f"I look.\n{CALL}"
    size = len(long_server.answer("/tokenize", {"prompt": text})["tokens"])
    common = says(long_server, text) | {"model": long_server.http.get("/v1/models").json()["data"][0]["id"]}
    del common["messages"], common["max_tokens"]
    function = {"name": "weather", "parameters": SCHEMA}
    for limit in (size - 30, size - 20):
        body = common | {
            "messages": MESSAGES,
            "max_tokens": limit,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        }
        message = long_server.answer("/v1/messages", body)
        assert message["content"] == [{"type": "text", "text": "I look."}] and message["stop_reason"] == "max_tokens"
        lines = long_server.post("/v1/messages", body | {"stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        shown = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(shown) == "I look."
        body = common | {"input": "red", "max_output_tokens": limit, "tools": [{"type": "function", **function}]}
        response = long_server.answer("/v1/responses", body)
        [item] = response["output"]
        assert item["content"][0]["text"] == "I look." and response["status"] == "incomplete"


def test_a_long_answer_is_parsed_in_a_thread_like_a_short_one(long_server):
    text = "red " * 1030
    assert len(text) > INLINE_CHARS
    body = says(long_server, f"{text}{NOW}", tools=TOOLS, max_tokens=2500)
    [choice] = long_server.answer(CHAT, body)["choices"]
    assert choice["message"]["content"] == text.rstrip() and choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
