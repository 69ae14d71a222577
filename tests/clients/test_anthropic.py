"""Anthropic's client: messages, streams, tools and errors."""

from __future__ import annotations

import pytest

anthropic = pytest.importorskip("anthropic")

from tests.clients.answers import MAX_TOKENS, MESSAGES, Weather  # noqa: E402

TOOL = {"name": "weather", "description": "It.", "input_schema": Weather.model_json_schema()}


@pytest.fixture
def client(endpoint):
    with anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as one:
        yield one


@pytest.fixture
def request_of(endpoint):
    return {"model": endpoint.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "extra_body": {"seed": 1}}


def prompt_tokens(answer):
    """Return the tokens of an answer's prompt, cached or not."""
    return answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_text_and_its_stream(client, request_of):
    short = request_of | {"max_tokens": 12, "system": "be short", "extra_body": {"temperature": 0}}
    answer = client.messages.create(**short)
    assert answer.content[0].text and answer.usage.output_tokens <= 12
    with client.messages.stream(**short) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().stop_reason == answer.stop_reason


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("streamed", [False, True])
def test_tools(client, request_of, choice, streamed):
    choice = choice | {"disable_parallel_tool_use": True}
    request = request_of | {"tools": [TOOL], "tool_choice": choice}
    if streamed:
        with client.messages.stream(**request) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**request)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    Weather.model_validate(call.input)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**request_of | {"messages": turns, "max_tokens": 8, "tools": [TOOL]})
    assert prompt_tokens(again) > prompt_tokens(answer)


def test_token_counts(client, request_of):
    counted = client.messages.count_tokens(model=request_of["model"], messages=MESSAGES)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**request_of | {"max_tokens": 1}))


def test_errors(client, request_of):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**request_of | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**request_of | {"max_tokens": -1})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**request_of)
