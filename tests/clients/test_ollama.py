"""Ollama's Python client: chats, prompts, streams, formats, tools, models and errors."""

from __future__ import annotations

import asyncio
import json

import pytest

ollama = pytest.importorskip("ollama")

from tests.clients.answers import MAX_TOKENS, MESSAGES, QUESTION, TOOLS, Weather  # noqa: E402

OPTIONS = {"num_predict": 12, "temperature": 0}
BOUNDED = {"num_predict": MAX_TOKENS, "seed": 1}


@pytest.fixture
def client(endpoint):
    return ollama.Client(endpoint.url, headers={"Authorization": f"Bearer {endpoint.key}"})


def test_a_chat_and_its_stream(client, endpoint):
    answer = client.chat(endpoint.model, MESSAGES, options=OPTIONS)
    assert answer.message.role == "assistant" and answer.done and answer.done_reason in ("stop", "length")
    assert answer.eval_count <= 12 and answer.prompt_eval_count > 5 and answer.total_duration > answer.eval_duration
    chunks = list(client.chat(endpoint.model, MESSAGES, options=OPTIONS, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == answer.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == answer.eval_count and chunks[0].total_duration is None


def test_a_prompt_its_system_message_and_its_stream(client, endpoint):
    answer = client.generate(endpoint.model, QUESTION, system="be short", options=OPTIONS)
    chunks = list(client.generate(endpoint.model, QUESTION, system="be short", options=OPTIONS, stream=True))
    assert "".join(chunk.response for chunk in chunks) == answer.response
    raw = client.generate(endpoint.model, QUESTION, raw=True, options=ollama.Options(**OPTIONS))
    assert raw.prompt_eval_count < answer.prompt_eval_count
    assert client.generate(endpoint.model).done_reason == "load"


def test_formats(client, endpoint):
    schema = Weather.model_json_schema()
    answer = client.chat(endpoint.model, MESSAGES, format=schema, options=BOUNDED)
    Weather.model_validate_json(answer.message.content)
    found = client.generate(endpoint.model, QUESTION, format=schema, options=BOUNDED | {"seed": 2})
    Weather.model_validate_json(found.response)
    constrained = client.chat(endpoint.model, MESSAGES, format="json", options=OPTIONS)
    assert constrained.message.content.lstrip().startswith("{")


def test_tools_and_their_results(client, endpoint):
    def weather(city: str, days: int) -> str:
        """Return the weather.

        Args:
          city: a city
          days: a number of days
        """
        return "sunny"

    plain = client.chat(endpoint.model, MESSAGES, options=OPTIONS)
    for tools in ([weather], TOOLS):
        answer = client.chat(endpoint.model, MESSAGES, tools=tools, options=OPTIONS)
        assert answer.prompt_eval_count > plain.prompt_eval_count
    call = ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Paris", "days": 1})
    turns = [
        *MESSAGES,
        ollama.Message(role="assistant", content="", tool_calls=[ollama.Message.ToolCall(function=call)]),
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    again = client.chat(endpoint.model, turns, tools=[weather], options=OPTIONS)
    assert again.prompt_eval_count > plain.prompt_eval_count


def test_logprobs(client, endpoint):
    answer = client.chat(endpoint.model, MESSAGES, logprobs=True, top_logprobs=3, options=OPTIONS)
    assert len(answer.logprobs) == answer.eval_count
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in answer.logprobs)


def test_models(client, endpoint):
    listed = client.list().models
    assert endpoint.model in [one.model.removesuffix(":latest") for one in listed]
    assert {one.model for one in client.ps().models} == {one.model for one in listed}
    for name in (endpoint.model, f"{endpoint.model}:latest"):
        shown = client.show(name)
        assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"] == shown.details.family
    assert client.chat(listed[0].model, MESSAGES, options=OPTIONS).model == listed[0].model


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (lambda one, model: one.chat("other", MESSAGES), 404, "not served"),
        (lambda one, model: one.chat(model, MESSAGES, options={"temperature": -1}), 400, "options.temperature"),
        (lambda one, model: list(one.chat(model, MESSAGES, options={"mirostat": 2}, stream=True)), 400, "mirostat"),
        (lambda one, model: one.generate(model, "a", images=[b"\x89PNG"]), 400, "images"),
        (lambda one, model: one.generate(model, "a", suffix="b"), 400, "suffix"),
        (lambda one, model: one.embed(model, "a"), 501, "embeddings"),
        (lambda one, model: one.pull("other"), 501, "--model"),
        (lambda one, model: one.delete("other"), 501, "--model"),
    ],
)
def test_errors(client, endpoint, call, status, message):
    with pytest.raises(ollama.ResponseError, match=message) as raised:
        call(client, endpoint.model)
    assert raised.value.status_code == status


def test_keys(endpoint):
    with pytest.raises(ollama.ResponseError, match="key") as raised:
        ollama.Client(endpoint.url).list()
    assert raised.value.status_code == 401


def test_the_async_client(endpoint):
    async def answers():
        one = ollama.AsyncClient(endpoint.url, headers={"Authorization": f"Bearer {endpoint.key}"})
        whole = await one.chat(endpoint.model, MESSAGES, options=OPTIONS)
        pieces = [part async for part in await one.chat(endpoint.model, MESSAGES, options=OPTIONS, stream=True)]
        return whole.message.content, "".join(part.message.content for part in pieces)

    whole, streamed = asyncio.run(answers())
    assert whole == streamed and json.dumps(whole)
