"""pydantic-ai: output types by tool and by schema, and function tools, over chat completions and over responses."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("pydantic_ai")

import openai  # noqa: E402
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from tests.clients.answers import MAX_TOKENS, QUESTION, Sum, Weather  # noqa: E402

SETTINGS = {"max_tokens": MAX_TOKENS, "temperature": 1.0}
MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


@pytest.fixture(params=list(MODELS))
def run(endpoint, request):
    """Call a coroutine function with a model, in an event loop of its own."""

    def call(work):
        async def go():
            async with openai.AsyncOpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0) as client:
                return await work(MODELS[request.param](endpoint.model, provider=OpenAIProvider(openai_client=client)))

        return asyncio.run(go())

    return call


def test_text(run):
    result = run(lambda model: Agent(model).run(QUESTION, model_settings=SETTINGS | {"max_tokens": 12}))
    assert isinstance(result.output, str) and result.usage.output_tokens > 0


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_an_output_type(run, kind):
    result = run(lambda model: Agent(model, output_type=kind(Weather)).run(QUESTION, model_settings=SETTINGS))
    assert isinstance(result.output, Weather)


def test_one_of_several_output_types(run):
    result = run(lambda model: Agent(model, output_type=[Weather, Sum]).run(QUESTION, model_settings=SETTINGS))
    assert isinstance(result.output, Weather | Sum)


def test_an_output_type_is_streamed(run):
    async def outputs(model):
        agent = Agent(model, output_type=ToolOutput(Weather), retries=0)
        async with agent.run_stream(QUESTION, model_settings=SETTINGS) as stream:
            return [output async for output in stream.stream_output(debounce_by=None)]

    assert isinstance(run(outputs)[-1], Weather)


def test_function_tools(run):
    """The model chooses between the tool and the answer until it answers."""
    called = []

    async def answers(model):
        agent = Agent(model, output_type=ToolOutput(Weather), retries=0)

        @agent.tool_plain
        def add(numbers: Sum) -> int:
            """Add two numbers."""
            called.append(numbers)
            return numbers.first + numbers.second

        limits = UsageLimits(request_limit=40)
        for _ in range(20):
            result = await agent.run(QUESTION, model_settings=SETTINGS, usage_limits=limits)
            assert isinstance(result.output, Weather)
            if called:
                return

    run(answers)
    assert called and isinstance(called[0], Sum)
