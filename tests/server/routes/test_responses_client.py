"""The Responses API with the official OpenAI client against a real server: items, events, tools, and the store."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from server.schemas import responses_api_answers as wire
from tests.server.conftest import running, tiny_config

KEY, OTHER_KEY = "sk-for-the-client", "sk-for-another-client"
TEXT = "the old king sleeps"
GREEDY = {"model": "tiny", "max_output_tokens": 10, "temperature": 0}
SCHEMA = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2]}},
    "required": ["unit", "days"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
NOW = {
    "type": "function", "name": "now", "strict": False,
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
CALLS = {"model": "tiny", "input": TEXT, "tools": [WEATHER, NOW], "max_output_tokens": 400, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("client") / "keys"
    path.write_text(f"{KEY}\n{OTHER_KEY}")
    with running(tiny_config(tiny_model, api_key_file=str(path), max_model_len=1024)) as handle:
        yield handle


def client_of(server, key=KEY):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(guarded):
    with client_of(guarded) as one:
        yield one


@pytest.fixture
async def async_client(guarded):
    async with openai.AsyncOpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


def checked(response):
    """Return a response whose body has the documented shape."""
    wire.ResponseObject.model_validate(response.model_dump(exclude_unset=True, exclude={"output": {"__all__": {
        "content": {"__all__": {"parsed"}}, "parsed_arguments": True}}}), strict=True)  # fmt: skip
    return response


def test_a_response_is_the_answer_of_a_chat(client):
    response = checked(client.responses.create(input=TEXT, instructions="Be short.", **GREEDY))
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 10
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["incomplete"]
    assert response.instructions == "Be short." and response.model == "tiny" and response.temperature == 0


def test_input_items_are_the_messages_of_a_chat(client):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "red"}, {"type": "input_text", "text": "blue"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"unit": "C", "days": 1}'},
        {"type": "function_call", "call_id": "call_2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "At noon."},
        {"role": "user", "content": "thanks"},
    ]
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C", "days": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "Be short.\nBe kind."},
        {"role": "user", "content": "red\nblue"},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "At noon."},
        {"role": "user", "content": "thanks"},
    ]
    response = client.responses.create(input=items, instructions="Be short.", **GREEDY)
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output_text == chat.choices[0].message.content


def test_the_events_of_a_stream_come_in_order(client):
    whole = client.responses.create(input=TEXT, **GREEDY)
    with client.responses.create(input=TEXT, stream=True, **GREEDY) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, after in pairwise([*kinds, ""]) if kind != after] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    first, last = events[0].response, checked(events[-1].response)
    assert first.status == "in_progress" and first.output == [] and first.id == last.id
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.output_text == whole.output_text and last.usage.output_tokens == 10
    assert events[-2].item == last.output[0] and events[2].item.id == last.output[0].id


async def test_the_async_client_and_its_stream_helper(async_client):
    body = {"input": TEXT, "model": "tiny", "extra_body": {"structured_outputs": {"choice": ["the sky is blue"]}}}
    whole = await async_client.responses.create(**body)
    async with async_client.responses.stream(**body) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == whole.output_text == "the sky is blue"
    assert final.status == whole.status == "completed" and final.completed_at


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", True, {"weather", "now"}),
        ("required", False, {"weather", "now"}),
        ({"type": "function", "name": "weather"}, True, {"weather"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, False, {"now"}),
    ],
)
def test_required_calls_follow_the_schema(client, choice, parallel, names):
    body = {**CALLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    response = checked(client.responses.create(**body))
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls == response.output and {call.name for call in calls} <= names
    assert parallel or len(calls) == 1 and response.status == "completed"
    for call in calls:
        assert set(json.loads(call.arguments)) == ({"unit", "days"} if call.name == "weather" else set())
    with client.responses.create(**body, stream=True) as stream:
        events = list(stream)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments for call in calls]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == [call.arguments for call in calls]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    if response.status == "completed":
        following = client.responses.create(input=results, previous_response_id=response.id, **GREEDY)
        assert following.previous_response_id == response.id and following.output_text


def test_tools_are_optional_or_off(client):
    for choice in ("auto", "none"):
        body = {**CALLS, "tool_choice": choice, "max_output_tokens": 8, "temperature": 0}
        response = checked(client.responses.create(**body))
        assert [item.type for item in response.output] == ["message"] and response.tool_choice == choice


class Forecast(BaseModel):
    unit: Literal["C", "F"]
    rain: bool


def test_parse_returns_an_instance(client):
    response = client.responses.parse(input=TEXT, model="tiny", text_format=Forecast, max_output_tokens=300)
    assert isinstance(response.output_parsed, Forecast)
    assert checked(response).text.format.name == "Forecast"
    plain = client.responses.create(
        input=TEXT,
        model="tiny",
        max_output_tokens=300,
        text={"format": {"type": "json_object"}},
        extra_body={"seed": 1},
    )
    assert plain.status == "incomplete" or isinstance(json.loads(plain.output_text), dict)


def test_logprobs_of_the_text(client):
    response = client.responses.create(input=TEXT, include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == 10 and all(len(one.top_logprobs) == 2 for one in logprobs)
    with client.responses.create(input=TEXT, top_logprobs=2, stream=True, **GREEDY) as stream:
        streamed = [one for event in stream if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in streamed] == [one.token for one in logprobs]


def test_a_stored_response_is_continued_read_and_deleted(client):
    first = client.responses.create(input="red", instructions="Be short.", metadata={"a": "b"}, **GREEDY)
    second = client.responses.create(input="blue", previous_response_id=first.id, **GREEDY)
    turns = [
        {"role": "user", "content": "red"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "blue"},
    ]
    whole = client.responses.create(input=turns, store=False, **GREEDY)
    assert second.output_text == whole.output_text and second.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(first.id) == first and first.metadata == {"a": "b"}
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["red", first.output_text, "blue"]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == items[-1].id and newest.has_more
    client.responses.delete(first.id)
    for gone in (first.id, whole.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="blue", previous_response_id=first.id, **GREEDY)
    assert caught.value.code == "previous_response_not_found"
    assert client.responses.create(input="green", previous_response_id=second.id, **GREEDY).status == "incomplete"


def test_a_stored_response_belongs_to_its_key(guarded, client):
    mine = client.responses.create(input="red", **GREEDY)
    with client_of(guarded, OTHER_KEY) as other:
        for attempt in (
            lambda: other.responses.retrieve(mine.id),
            lambda: other.responses.delete(mine.id),
            lambda: other.responses.input_items.list(mine.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        with pytest.raises(openai.BadRequestError):
            other.responses.create(input="blue", previous_response_id=mine.id, **GREEDY)
    assert client.responses.retrieve(mine.id).id == mine.id


@pytest.mark.parametrize(
    ("change", "error", "param", "needle"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "not served"),
        ({"input": []}, openai.BadRequestError, "input", "empty"),
        ({"input": 5}, openai.BadRequestError, "input", "items"),
        ({"input": [{"role": "king", "content": "x"}]}, openai.BadRequestError, "input", "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, openai.BadRequestError, "input", "input[0].type 'web_search_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "input", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, openai.BadRequestError, "input",
         "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, openai.BadRequestError, "input", "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, openai.BadRequestError, "input",
         "input[0].encrypted_content"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, openai.BadRequestError, "max_output_tokens", "context"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature"),
        ({"top_logprobs": 10**6}, openai.BadRequestError, "top_logprobs", "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools", "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, openai.BadRequestError, "tools", "tools[0].name"),
        ({"tools": [NOW | {"defer_loading": True}]}, openai.BadRequestError, "tools", "tools[0].defer_loading"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "tools is empty"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, openai.BadRequestError, "tool_choice",
         "not among"),
        ({"tool_choice": {"type": "web_search"}}, openai.BadRequestError, "tool_choice", "web_search"),
        ({"text": {"verbosity": "loud"}}, openai.BadRequestError, "text", "'low', 'medium' or 'high'"),
        ({"text": {"format": []}, "extra_body": {"text": 5}}, openai.BadRequestError, "text", "must be an object"),
        ({"text": {"format": {"type": "grammar"}}}, openai.BadRequestError, "text", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, openai.BadRequestError, "text",
         "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}},
         openai.BadRequestError, "text", "text.format.schema"),
        ({"reasoning": {"effort": "extreme"}}, openai.BadRequestError, "reasoning", "reasoning"),
        ({"extra_body": {"chat_template_kwargs": {"max_tokens": 1}}}, openai.BadRequestError, "chat_template_kwargs",
         "doesn't read 'max_tokens'"),
        ({"reasoning": {"effort": "none"}, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
         openai.BadRequestError, "reasoning", "reasoning and chat_template_kwargs.enable_thinking differ"),
        ({"reasoning": {"mode": "pro"}}, openai.BadRequestError, "reasoning", "reasoning.mode"),
        ({"include": ["everything"]}, openai.BadRequestError, "include", "everything"),
        ({"truncation": "auto"}, openai.BadRequestError, "truncation", "not supported"),
        ({"previous_response_id": "resp_x"}, openai.BadRequestError, "previous_response_id", "not found"),
        ({"extra_body": {"min_p": "much"}}, openai.BadRequestError, "min_p", "min_p"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client, change, error, param, needle):
    with pytest.raises(error) as caught:
        client.responses.create(**{"input": TEXT, **GREEDY, **change})
    assert caught.value.param == param and needle in caught.value.body["message"], caught.value.body


def test_values_that_an_answer_can_not_repeat_are_refused(guarded):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for field in (
        '"metadata": {"a": "\\ud800"}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]',
    ):
        body = f'{{"input": "red", "tool_choice": "none", "max_output_tokens": 1, {field}}}'
        response = guarded.http.post("/v1/responses", content=body, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] in field, response.text


def test_a_request_as_coding_agents_send_it(client):
    request = {
        "model": "tiny", "instructions": "You are an agent.", "stream": True, "store": False,
        "parallel_tool_calls": False,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "red"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "now", "arguments": "{}", "call_id": "call_1", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        ],
        "tools": [NOW], "tool_choice": "auto", "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x",
        "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}, "max_output_tokens": 5,
    }  # fmt: skip
    with client.responses.create(**request) as stream:
        last = list(stream)[-1]
    assert last.type in ("response.completed", "response.incomplete") and last.response.store is False


def test_closing_a_stream_aborts_its_request_and_stores_nothing(guarded, client):
    before = guarded.metric("encore_stored_responses")
    endless = {"input": TEXT, "model": "tiny", "extra_body": {"ignore_eos": True}}
    with client.responses.create(stream=True, **endless) as stream:
        next(iter(stream))
    guarded.wait_idle()
    guarded.wait(lambda: guarded.metric("encore_stored_responses") == before, "the entry's end")


def test_a_server_without_a_store_says_so(start_server):
    handle = start_server(response_store_entries=0)
    assert handle.answer("/v1/responses", {"input": "red", "max_output_tokens": 2})["store"] is False
    for field in ({"store": True}, {"previous_response_id": "resp_x"}):
        response = handle.post("/v1/responses", {"input": "red", "max_output_tokens": 2, **field})
        assert response.status_code == 400 and response.json()["error"]["param"] in field
    assert handle.http.get("/v1/responses/resp_x").status_code == 404
