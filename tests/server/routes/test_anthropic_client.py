"""Anthropic's official client against a real server: messages, streams, tools, structured outputs, and its errors."""

from __future__ import annotations

import json

import anthropic
import pytest
from pydantic import BaseModel

from server.schemas import anthropic_answers as wire
from tests.server.conftest import running, tiny_config

KEY = "sk-for-the-client"
MESSAGES = [{"role": "user", "content": "the old king sleeps"}]
GREEDY = {"model": "tiny", "max_tokens": 10, "extra_body": {"temperature": 0}}
SCHEMA = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2]}},
    "required": ["unit", "days"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLS = {"model": "tiny", "max_tokens": 400, "messages": MESSAGES, "tools": [WEATHER, NOW]}


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("client") / "keys"
    path.write_text(KEY)
    with running(tiny_config(tiny_model, api_key_file=str(path), max_model_len=1024)) as handle:
        yield handle


@pytest.fixture
def client(guarded):
    with anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(guarded):
    async with anthropic.AsyncAnthropic(base_url=guarded.url, auth_token=KEY, max_retries=0) as one:
        yield one


def test_a_message_and_its_stream_agree_with_a_chat(guarded, client):
    message = client.messages.create(messages=MESSAGES, system="Be short.", **GREEDY)
    wire.Message.model_validate(message.model_dump(exclude_unset=True), strict=True)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 10
    chat = [{"role": "system", "content": "Be short."}, *MESSAGES]
    plain = guarded.http.post(
        "/v1/chat/completions",
        json={"messages": chat, "max_tokens": 10, "temperature": 0},
        headers={"Authorization": f"Bearer {KEY}"},
    ).json()
    assert message.content[0].text == plain["choices"][0]["message"]["content"]
    total = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert total == plain["usage"]["prompt_tokens"]
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be short.").input_tokens == total
    blocks = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(messages=MESSAGES, system=blocks, **GREEDY) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        streamed = stream.get_final_message()
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "text", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert streamed.content[0].text == message.content[0].text and streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == 10


async def test_the_async_client_with_a_bearer_token(async_client, client):
    message = await async_client.messages.create(messages=MESSAGES, **GREEDY)
    text = ""
    async with async_client.messages.stream(messages=MESSAGES, **GREEDY) as stream:
        async for piece in stream.text_stream:
            text += piece
    assert text == message.content[0].text == client.messages.create(messages=MESSAGES, **GREEDY).content[0].text


def test_stop_sequences_and_a_message_to_continue(client):
    text = client.messages.create(messages=MESSAGES, **GREEDY).content[0].text
    stop = text[-3:]
    message = client.messages.create(messages=MESSAGES, stop_sequences=["zzzz", stop], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]
    half = [*MESSAGES, {"role": "assistant", "content": "the sky is"}]
    count = client.messages.count_tokens
    closed = count(model="tiny", messages=[*half, *MESSAGES]).input_tokens
    assert client.messages.create(messages=half, **GREEDY).usage.output_tokens == 10
    assert count(model="tiny", messages=half).input_tokens < closed


def test_max_tokens_beyond_the_context_stop_at_the_context(client):
    message = client.messages.create(
        messages=MESSAGES, model="tiny", max_tokens=4000, extra_body={"temperature": 0, "ignore_eos": True}
    )
    assert message.stop_reason == "model_context_window_exceeded"
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 1024


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"weather", "now"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "now"}),
        ({"type": "tool", "name": "weather"}, {"weather"}),
    ],
)
def test_required_tools_follow_their_schema(client, choice, names):
    found = client.messages.create(tool_choice=choice, extra_body={"seed": 3}, **CALLS)
    wire.Message.model_validate(found.model_dump(exclude_unset=True), strict=True)
    calls = [block for block in found.content if block.type == "tool_use"]
    assert calls == found.content and {call.name for call in calls} <= names
    assert found.stop_reason in ("tool_use", "model_context_window_exceeded")
    if choice != {"type": "any"}:
        assert len(calls) == 1 and found.stop_reason == "tool_use"
    for call in calls:
        assert set(call.input) == ({"unit", "days"} if call.name == "weather" else set())
    with client.messages.stream(tool_choice=choice, extra_body={"seed": 3}, **CALLS) as stream:
        streamed = stream.get_final_message()
    assert [(one.name, one.input) for one in streamed.content] == [(one.name, one.input) for one in calls]
    if found.stop_reason == "tool_use":
        answers = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        turn = [*MESSAGES, {"role": "assistant", "content": found.content}, {"role": "user", "content": answers}]
        assert client.messages.create(**CALLS | {"messages": turn, "max_tokens": 4}).content is not None


def test_tools_are_optional_or_off(client):
    for choice in ({"type": "auto"}, {"type": "none"}):
        found = client.messages.create(tool_choice=choice, extra_body={"temperature": 0}, **CALLS | {"max_tokens": 8})
        assert found.stop_reason in ("max_tokens", "end_turn") and [one.type for one in found.content] == ["text"]


class Forecast(BaseModel):
    unit: str
    days: bool


def test_parse_returns_what_the_schema_describes(client):
    schema = Forecast.model_json_schema()
    schema["properties"]["unit"] = {"enum": ["C", "F"]}
    message = client.messages.create(
        messages=MESSAGES, model="tiny", max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}},
    )  # fmt: skip
    assert json.loads(message.content[0].text)["unit"] in "CF"


@pytest.mark.parametrize(
    ("change", "error", "needle"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not served"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
         anthropic.BadRequestError, "messages[0].content[0] has a block of type 'document'"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image", "source": {}}]}]},
         anthropic.BadRequestError, "messages[1].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         anthropic.BadRequestError, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         anthropic.BadRequestError, "messages[0].content[0].input must be an object"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         anthropic.BadRequestError, "redacted_thinking"),
        ({"messages": []}, anthropic.BadRequestError, "messages is empty"),
        ({"system": [{"type": "image"}]}, anthropic.BadRequestError, "system[0] has a block of type 'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, anthropic.BadRequestError, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, anthropic.BadRequestError, "tools[0].name must"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, anthropic.BadRequestError, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice requires a call"),
        ({"tool_choice": {"type": "required"}}, anthropic.BadRequestError, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError, "not among"),
        ({"thinking": {"type": "often"}}, anthropic.BadRequestError, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, anthropic.BadRequestError, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, anthropic.BadRequestError, "output_config.format"),
        ({"container": "c"}, anthropic.BadRequestError, "container is not supported"),
        ({"extra_body": {"top_k": "many"}}, anthropic.BadRequestError, "top_k"),
    ],
)  # fmt: skip
def test_errors_raise_the_clients_own_exceptions(client, change, error, needle):
    with pytest.raises(error) as caught:
        client.messages.create(**{"messages": MESSAGES, **GREEDY, **change})
    body = caught.value.body
    wire.AnthropicError.model_validate(body, strict=True)
    assert needle in body["error"]["message"], body
    assert caught.value.request_id == body["request_id"]


def test_errors_outside_the_routes_have_anthropics_body(guarded, client):
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").messages.create(messages=MESSAGES, **GREEDY)
    assert caught.value.body["error"]["type"] == "authentication_error" and caught.value.request_id
    headers = {"X-Api-Key": KEY}
    response = guarded.http.post("/v1/messages", content="{", headers=headers | {"Content-Type": "text/plain"})
    assert response.status_code == 415 and response.json()["type"] == "error"
    response = guarded.http.get("/v1/messages", headers=headers)
    assert response.status_code == 405 and response.json()["type"] == "error"
    response = guarded.http.post("/v1/messages", json={"max_tokens": "many"}, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["request-id"] == response.json()["request_id"]


def test_thinking_is_allowed_with_a_model_that_does_not_reason(client):
    plain = client.messages.create(messages=MESSAGES, **GREEDY).content
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        assert client.messages.create(messages=MESSAGES, thinking=thinking, **GREEDY).content == plain


def test_the_counts_of_a_stream_add_up_with_cached_prompts(client):
    request = {**GREEDY, "messages": [{"role": "user", "content": "a tall tree in the deep forest " * 8}]}
    total = client.messages.count_tokens(model="tiny", messages=request["messages"]).input_tokens
    for cached in (False, True, True):
        with client.messages.create(**request, stream=True) as stream:
            events = list(stream)
        start = next(event.message.usage for event in events if event.type == "message_start")
        end = next(event.usage for event in events if event.type == "message_delta")
        for usage in (start, end):
            assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == total
            assert usage.cache_read_input_tokens >= 16 if cached else usage.cache_read_input_tokens == 0
        assert 1 <= start.output_tokens <= end.output_tokens == 10
        whole = client.messages.create(**request).usage
        assert whole.cache_read_input_tokens >= 16 and whole.input_tokens + whole.cache_read_input_tokens == total


def test_counts_are_vllms_with_compat(start_server):
    request = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "a deep forest " * 16}]}
    ignored = {"ignore_eos": True}
    servers = [start_server(compat="vllm", enable_prompt_tokens_details=details) for details in (True, None)]
    for server, shows_details in zip(servers, (True, False), strict=True):
        total = server.answer("/v1/messages/count_tokens", {"model": "tiny", "messages": request["messages"]})
        total = total["input_tokens"]
        for attempt in range(2):
            text = server.post("/v1/messages", {**request, **ignored, "stream": True}).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
            assert events[0]["message"]["usage"] == {"input_tokens": total, "output_tokens": 0}
            pages = total // 16 * 16
            [end] = [event["usage"] for event in events if event["type"] == "message_delta"]
            if not shows_details:
                assert end == {"input_tokens": total, "output_tokens": 3}
                continue
            cached = end["cache_read_input_tokens"]
            assert cached == 0 if attempt == 0 else cached >= pages - 16
            assert end["cache_creation_input_tokens"] == pages - cached
            assert end["input_tokens"] == total - pages and end["output_tokens"] == 3
        chat = server.answer("/v1/chat/completions", {**request, "stream": False})
        details = chat["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 0 if shows_details else details is None


def test_a_tool_runner_sends_the_whole_conversation_in_each_turn(client, guarded):
    """It asks for a conversation that the server keeps, and must notice that there is none."""
    seen = []

    @anthropic.beta_tool
    def look(day: str) -> str:
        """Look.

        Args:
            day: The day.
        """
        seen.append(day)
        return f"seen {day}"

    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, messages=MESSAGES, tools=[look], tool_choice={"type": "any"}, max_iterations=3,
        extra_body={"temperature": 0},
    )  # fmt: skip
    turns = list(runner)
    assert len(turns) == 3 and len(seen) >= 2, turns
    prompts = [turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in turns]
    assert prompts[0] < prompts[1] < prompts[2]  # the calls and results before are part of the prompt


def test_threads_are_refused_in_the_way_that_clients_recover_from(client):
    kept = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.beta.messages.create(messages=MESSAGES, **GREEDY, **kept)
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    plain = client.messages.create(messages=MESSAGES, **GREEDY).content[0].text
    made = client.beta.messages.create(messages=MESSAGES, **GREEDY, thread={"type": "create"})
    assert made.content[0].text == plain
    conversation = client.beta.messages.thread(model="tiny", max_tokens=10)
    first, second = (conversation.send({"role": "user", "content": text}) for text in ("red", "blue"))
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > first.usage.input_tokens + 10


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thread": {"type": "fork"}}, "thread.type must be"),
        ({"thread": "create "}, "thread.type must be"),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display 'updates' is not supported"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget '5' is not supported"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget is not"),
    ],
)
def test_parts_of_fields_are_refused_by_name(client, fields, words):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(messages=MESSAGES, model="tiny", max_tokens=1, extra_body=fields)
    assert words in caught.value.body["error"]["message"]


def test_closing_a_stream_aborts_its_request(guarded, client):
    endless = {"model": "tiny", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with client.messages.stream(messages=MESSAGES, **endless) as stream:
        next(iter(stream.text_stream))
    guarded.wait_idle()


def test_a_request_as_coding_agents_send_it(client):
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    request = {
        "model": "tiny", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "someone"},
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be short.", **ephemeral}],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "tools": [WEATHER | ephemeral | {"eager_input_streaming": True}, NOW],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "red", **ephemeral}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, **ephemeral,
                 "content": [{"type": "text", "text": "no clock"}]},
                {"type": "text", "text": "try again"},
            ]},
        ],
        "extra_body": {
            "temperature": 1, "stop_sequences": ["\n\n\n\n"], "betas": ["claude-code"],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    }  # fmt: skip
    with client.messages.create(**request) as stream:
        first = next(iter(stream))
    assert first.type == "message_start" and first.message.usage.input_tokens > 0
    counted = {name: request[name] for name in ("model", "system", "thinking", "tools", "messages")}
    count = client.messages.count_tokens(**counted, extra_query={"beta": "true"}).input_tokens
    assert count == first.message.usage.input_tokens + first.message.usage.cache_read_input_tokens
