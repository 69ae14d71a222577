"""openai-agents: an agent over chat completions and over responses, with output types and function tools."""

from __future__ import annotations

import asyncio

import pytest

agents = pytest.importorskip("agents")

import openai  # noqa: E402

from tests.clients.answers import MAX_TOKENS, QUESTION, Weather  # noqa: E402


def run(endpoint, agent_fields, api="chat", streamed=False, **settings):
    """Run an agent in an event loop of its own and return its result."""
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    async def go():
        async with openai.AsyncOpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0) as client:
            model = kinds[api](model=endpoint.model, openai_client=client)
            options = agents.ModelSettings(**{"max_tokens": MAX_TOKENS, "temperature": 1.0} | settings)
            agent = agents.Agent(name="helper", model=model, model_settings=options, **agent_fields)
            if not streamed:
                return await agents.Runner.run(agent, QUESTION)
            result = agents.Runner.run_streamed(agent, QUESTION)
            events = [event async for event in result.stream_events()]
            assert any(event.type == "raw_response_event" for event in events)
            return result

    agents.set_tracing_disabled(True)
    return asyncio.run(go())


APIS = ["chat", "responses"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streamed", [False, True])
def test_text(endpoint, api, streamed):
    # A whole answer: an incomplete response is an error to this library.
    body = {"structured_outputs": {"choice": ["the sky is blue"]}}
    result = run(endpoint, {"instructions": "be short"}, api, streamed, extra_body=body)
    assert result.final_output == "the sky is blue"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_output_type(endpoint, api, streamed):
    assert isinstance(run(endpoint, {"output_type": Weather}, api, streamed).final_output, Weather)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_function_tool(endpoint, api, choice):
    called = []

    @agents.function_tool(name_override="weather")
    def weather(city: str, sunny: bool) -> str:
        """Return the weather of a city."""
        called.append((city, sunny))
        return "sunny"

    # The choice is reset to auto after the first call, so that the agent ends.
    fields = {"tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
    result = run(endpoint, fields, api, tool_choice=choice, parallel_tool_calls=False, extra_body={"seed": 1})
    assert len(called) == 1 and isinstance(called[0][1], bool)
    assert result.final_output == "sunny"
