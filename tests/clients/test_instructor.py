"""instructor: its three modes, streamed and not."""

from __future__ import annotations

import pytest

instructor = pytest.importorskip("instructor")

import openai  # noqa: E402

from tests.clients.answers import MAX_TOKENS, MESSAGES, Weather  # noqa: E402

MODES = ["TOOLS", "JSON_SCHEMA", "JSON"]


def client_of(endpoint, mode):
    client = openai.OpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


def request_of(endpoint, mode):
    found = {"model": endpoint.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "max_retries": 0}
    if mode == "JSON":  # the mode asks for any object and leaves the schema to the prompt: the grammar stands for it
        found["extra_body"] = {"response_format": None, "structured_outputs": {"json": Weather.model_json_schema()}}
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_returned(endpoint, mode):
    client = client_of(endpoint, mode)
    answer, raw = client.create_with_completion(response_model=Weather, **request_of(endpoint, mode))
    assert isinstance(answer, Weather) and raw.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_model_is_streamed(endpoint, mode):
    client = client_of(endpoint, mode)
    parts = list(client.create_partial(response_model=Weather, **request_of(endpoint, mode)))
    assert Weather.model_validate(parts[-1].model_dump())


def test_json_mode_sends_json_object(endpoint):
    """The text is any JSON object, which need not be a Weather."""
    client = client_of(endpoint, "JSON")
    request = request_of(endpoint, "JSON") | {"extra_body": {}, "max_tokens": 30}
    with pytest.raises(Exception, match="(?i)validat|incomplete|max_tokens|length") as caught:
        client.create(response_model=Weather, **request)
    assert "400" not in str(caught.value)
