"""outlines: its model of an OpenAI server and of a vLLM server."""

from __future__ import annotations

from typing import Literal

import pytest

outlines = pytest.importorskip("outlines")

import openai  # noqa: E402

from tests.clients.answers import MAX_TOKENS, QUESTION, Weather  # noqa: E402


@pytest.fixture
def client(endpoint):
    with openai.OpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0) as one:
        yield one


@pytest.fixture(params=["from_openai", "from_vllm", "from_sglang"])
def model(client, endpoint, request):
    return getattr(outlines, request.param)(client, endpoint.model)


def test_text_and_its_stream(model):
    assert model(QUESTION, max_tokens=12)
    assert "".join(model.stream(QUESTION, max_tokens=12))


def test_a_json_type(model):
    Weather.model_validate_json(model(QUESTION, Weather, max_tokens=MAX_TOKENS))


@pytest.mark.parametrize("make", ["from_vllm", "from_sglang"])
def test_choices_and_regular_expressions(client, endpoint, make):
    model = getattr(outlines, make)(client, endpoint.model)
    assert model(QUESTION, Literal["sunny", "rainy"], max_tokens=20) in ("sunny", "rainy")
    assert model(QUESTION, outlines.regex("[0-9]{3}"), max_tokens=20).isdigit()
