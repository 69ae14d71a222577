"""Tool calls and reasoning of a running server: a constraint on the output stands for a model that writes them."""

from __future__ import annotations

import json

import pytest

from server.schemas import responses as wire
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
