"""litellm: as OpenAI's endpoint and as a hosted vLLM."""

from __future__ import annotations

import json

import pytest

litellm = pytest.importorskip("litellm")

from tests.clients.answers import MAX_TOKENS, MESSAGES, TOOLS, Weather  # noqa: E402


@pytest.fixture(params=["openai", "hosted_vllm"])
def request_of(endpoint, request):
    return {
        "model": f"{request.param}/{endpoint.model}", "api_base": endpoint.openai, "api_key": endpoint.key,
        "messages": MESSAGES, "max_tokens": MAX_TOKENS, "seed": 1, "num_retries": 0,
    }  # fmt: skip


def test_text_and_its_stream(request_of):
    short = request_of | {"max_tokens": 12}
    assert litellm.completion(**short).choices[0].message.content
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **short))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def test_response_format(request_of):
    answer = litellm.completion(response_format=Weather, **request_of)
    Weather.model_validate_json(answer.choices[0].message.content)
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": Weather.model_json_schema()}}
    answer = litellm.completion(response_format=schema, **request_of)
    Weather.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(response_format={"type": "json_object"}, **request_of | {"max_tokens": 20})
    assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}, "none", "auto"])
def test_tools(request_of, choice):
    request = request_of if choice not in ("none", "auto") else request_of | {"max_tokens": 20}
    message = litellm.completion(tools=TOOLS, tool_choice=choice, **request).choices[0].message
    if choice == "none":
        assert not message.tool_calls
    elif choice != "auto":
        assert message.tool_calls
        for call in message.tool_calls:
            assert isinstance(json.loads(call.function.arguments), dict)


def test_text_completion(request_of):
    request = {name: value for name, value in request_of.items() if name != "messages"} | {"max_tokens": 8}
    if request["model"].startswith("openai/"):
        request["model"] = request["model"].replace("openai/", "text-completion-openai/", 1)
    assert litellm.text_completion(prompt="the old king", **request).choices[0].text


def test_errors(request_of):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(temperature=-1, **request_of)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**request_of | {"api_key": "sk-wrong"})
